"""Fixtures of several files: an S3 server, which a machine must be able to build, and what NxD Inference is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.rig.needs import NotPossibleHere
from helpers.s3_server import S3Server, serving, use


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """With an empty bucket, for the tests of one file."""
    try:
        with serving(tmp_path_factory.mktemp("s3")) as server:
            yield server
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The one that clients of this test use; it has been asked nothing so far."""
    use(running, monkeypatch)
    return running


@pytest.fixture
def one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NxD Inference compiles into a folder of the test, and has one core."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
