"""What retrieval is shown with: the embedding model, the manifests, and how `examples/rag.py` fails. That it finds what
it should is in test_vector_clients.py, which has servers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from neuron_operator.api.manifest import parse
from neuron_runtime.inspection import inspect_model

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "embedding-model"
TRAINING: dict[str, Any] = json.loads((MODEL / "training.json").read_text(encoding="utf-8"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "rag.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


def test_the_tour_says_which_server_does_not_answer() -> None:
    ended = run("--embed-url", "http://127.0.0.1:9/v1", "What is a slot?")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("http://127.0.0.1:9/v1: ")


def test_the_manifests_of_the_tour_are_those_of_a_chat_model_and_of_vectors() -> None:
    chat, vectors = (parse(one) for one in yaml.safe_load_all((EXAMPLES / "rag.yaml").read_text(encoding="utf-8")))
    assert (chat.name, chat.spec.serving.task) == ("chat", "Generate")
    assert (vectors.name, vectors.spec.serving.task, vectors.spec.backend) == ("vectors", "Embed", "torch")


@pytest.fixture(scope="module")
def train() -> ModuleType:
    """The module examples/embedding-model/train.py, a program outside any package."""
    spec = importlib.util.spec_from_file_location("embedding_model_train", MODEL / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        patch.setattr(sys, "dont_write_bytecode", True)  # the folder is copied into an image
        spec.loader.exec_module(module)
    return module


def test_the_embedding_model_is_small_and_what_its_training_wrote(train: ModuleType) -> None:
    facts = inspect_model(f"file://{MODEL}")
    assert (facts.architecture, facts.task, facts.vector_size) == ("BertModel", "embed", 128)
    assert TRAINING["found"] >= train.REQUIRED
    assert TRAINING["cpuSeconds"] <= 4 * 60
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) < 2_000_000
    for name, content in train.FILES.items():
        assert json.loads((MODEL / name).read_text(encoding="utf-8")) == content
