"""An S3 server for the tests that use one; a machine that cannot build it skips them."""

from __future__ import annotations

from collections.abc import Iterator

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
