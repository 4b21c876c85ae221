"""The tour of retrieval, `examples/rag.py`, as people run it: against the demo model and the embedding model. And what
the embedding model is."""

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

from helpers.serve_command import serve
from neuron_operator.api.manifest import parse
from neuron_runtime.inspection import inspect_model

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "embedding-model"
TRAINING: dict[str, Any] = json.loads((MODEL / "training.json").read_text(encoding="utf-8"))
PAGE = """# Rooms

The kitchen is closed on Mondays, because nobody cooks then. On other days it opens at noon and closes at ten.

# Devices

A slot is the cache line of one running sequence. A sequence holds as many blocks as its tokens need.

```
code that is no paragraph, however long it may be, and that nobody should find in an answer of any kind
```
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "rag.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_the_tour_finds_the_paragraph_that_answers_a_question(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    with (
        serve(str(EXAMPLES / "demo-model"), "--port", "0", "--served-model-name", "demo") as chat,
        serve(str(MODEL), "--port", "0", "--task", "embed", "--served-model-name", "vectors") as embed,
    ):
        urls = ("--base-url", f"{chat.until_ready()}/v1", "--embed-url", f"{embed.until_ready()}/v1")
        ended = run(
            *urls, "--count", "1", "--pages", str(page), "--", "What is a slot?", "When does the kitchen close?"
        )
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert lines[0] == "2 paragraphs of 1 pages, 128 numbers each"
        slot, kitchen = (
            lines[lines.index(f"> {one}") + 1] for one in ("What is a slot?", "When does the kitchen close?")
        )
        assert "page.md  Devices: A slot is the cache line" in slot
        assert "page.md  Rooms: The kitchen is closed" in kitchen
        assert "A slot is the cache line of one running sequence." in lines
        wrong = run(urls[0], urls[1], "--embed-url", urls[1], "--pages", str(page))
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "this server's task is `generate`: use /v1/chat/completions" in wrong.stderr


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
