"""What the optimum backend takes for granted, against the real optimum-neuron, as far as it runs without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.rig.needs import NotPossibleHere
from helpers.foreign_clients import optimum_library
from helpers.hub import Shelf, serving
from helpers.optimum import fake_optimum
from helpers.tiny_model import write_tiny_model
from neuron_runtime.backend.optimum.foreign import CLASS
from neuron_runtime.backend.optimum.hub_cache import (
    NOT_OF_CONFIGURATION,
    REPOSITORY,
    CachedGraphs,
    digest_of_entry,
    installed_release,
)
from neuron_runtime.backend.optimum.settings import OURS, OVERRIDES
from neuron_runtime.inspection import inspect_model

pytestmark = [
    pytest.mark.long,  # the library of a fixed release takes seconds to import
    pytest.mark.timeout(900),  # the first one may install
]

FOLDER = Path(__file__).parent / "optimum_library"
RELEASE = "0.4.5"
NEWER = {"prefill_chunk_size"}
"""Fields that came after it."""
CONFIG = {
    "target": "trn1",
    "tp_degree": 2,
    "batch_size": 4,
    "sequence_length": 4096,
    "torch_dtype": "bfloat16",
    "on_device_sampling": True,
    "continuous_batching": True,
}


Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    shelf = Shelf(tmp_path_factory.mktemp("hub"))
    write_tiny_model(shelf.root / "acme/tiny/main")
    return shelf


@pytest.fixture(scope="module")
def library(shelf: Shelf) -> Iterator[Ask]:
    """Asks one process, which imports the library once."""
    try:
        python = optimum_library()
    except NotPossibleHere as error:
        pytest.skip(str(error))
    with serving(shelf) as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(shelf.root / ".cache")}
        with subprocess.Popen(
            [str(python), "-W", "ignore", str(FOLDER / "answers.py"), sysconfig.get_path("purelib")],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:

            def ask(**fields: Any) -> dict[str, Any]:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(fields) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    if line.startswith("{"):
                        return dict(json.loads(line))
                raise AssertionError(f"optimum-neuron ended with {process.wait()}")

            yield ask
            process.kill()


@pytest.fixture(scope="module")
def told(library: Ask, shelf: Shelf) -> dict[str, Any]:
    return library(model=str(shelf.root / "acme/tiny/main"), config=CONFIG)


def test_the_fake_has_the_fields_and_defaults_of_the_library(told: dict[str, Any]) -> None:
    with fake_optimum(RELEASE):
        from fake_optimum.config import NeuronConfig

        fields = {field.name: field.default for field in NeuronConfig.__dataclass_fields__.values()}
    assert json.loads(json.dumps(fields, default=str)) == told["defaults"]


def test_the_library_has_every_field_that_the_backend_writes_or_reads(told: dict[str, Any]) -> None:
    named = {*OVERRIDES, *OURS, *CONFIG, "speculation_length", "output_logits"}
    assert named - told["defaults"].keys() == NEWER
    assert told["written"].items() >= CONFIG.items()
    assert told["written"]["_serialized_key"] == CLASS


def test_the_library_and_inspect_find_the_same_graphs_in_a_cache(
    library: Ask, told: dict[str, Any], shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = told["entry"]
    assert entry.keys() >= set(NOT_OF_CONFIGURATION)
    assert digest_of_entry(entry) == told["digest"]
    with fake_optimum(RELEASE):
        release, compiler = installed_release()
        registry = f"neuronxcc-{compiler}+82129205/0_REGISTRY/{release}"
        for folder in (told["digest"], "llama/acme/tiny"):
            path = shelf.root / REPOSITORY / "main" / registry / folder / "0.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(entry))
        found = library(model=str(shelf.root / "acme/tiny/main"), repository=REPOSITORY)
        assert found == {"registry": registry, "cached": [told["written"]]}
        (cached,) = found["cached"]
        graphs = CachedGraphs(cached["target"], cached["tp_degree"], cached["sequence_length"], cached["batch_size"])
        with serving(shelf) as endpoint:
            monkeypatch.setenv("HF_ENDPOINT", endpoint)
            assert inspect_model("hf://acme/tiny", "optimum").graphs == f"cached for {graphs}"
