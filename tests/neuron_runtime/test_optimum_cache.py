"""What `inspect --backend optimum` finds in Hugging Face's cache of compiled graphs, by a registry written here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.hub import Shelf, serving
from helpers.optimum import fake_optimum
from helpers.tiny_model import TINY_CONFIG, write_tiny_model
from neuron_runtime.backend.optimum.hub_cache import (
    RELEASE,
    REPOSITORY,
    CachedGraphs,
    digest_of_entry,
    digest_of_model,
    in_words,
    installed_release,
)
from neuron_runtime.inspection import facts_as_text, inspect_model

COMPILER = f"neuronxcc-{RELEASE[1]}+82129205"
SMALL = CachedGraphs(target="trn1", cores=2, sequences=4, tokens=4096)
LARGE = CachedGraphs(target="trn2", cores=4, sequences=16, tokens=8192)
ONE = f"cached for {SMALL}"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path / "hub")
    write_tiny_model(shelf.root / "acme/tiny/main")
    with serving(shelf) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield shelf


def entry(graphs: CachedGraphs, model: str = "acme/tiny", **config: Any) -> dict[str, Any]:
    """As the library writes it: what differs from the defaults of the architecture, and its own configuration."""
    neuron = {
        "target": graphs.target,
        "tp_degree": graphs.cores,
        "batch_size": graphs.sequences,
        "sequence_length": graphs.tokens,
        "_serialized_key": "NxDNeuronConfig",
    }
    configuration = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, **config}
    names = {"_entry_class": "SingleModelCacheEntry", "_model_id": model, "_task": "text-generation"}
    return {**configuration, **names, "neuron": neuron}


def fill(shelf: Shelf, *entries: dict[str, Any], release: str = RELEASE[0], digest: str = "", alias: str = "") -> None:
    """Entries below their architecture; the first one of a model also below its name."""
    registry = shelf.root / REPOSITORY / "main" / COMPILER / "0_REGISTRY" / release
    for number, one in enumerate(entries):
        for folder in (digest or digest_of_entry(one), *([f"llama/{alias}"] if alias and not number else [])):
            path = registry / folder / f"{number:020}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(one))


def test_graphs_of_a_model_that_the_cache_names_are_found_with_those_of_its_architecture(shelf: Shelf) -> None:
    fill(shelf, entry(LARGE), entry(SMALL), entry(SMALL, "acme/other"), alias="acme/tiny")
    fill(shelf, entry(LARGE, hidden_size=64))
    facts = inspect_model("hf://acme/tiny", "optimum")
    small, large = "inf2 or trn1, 2 cores, 4 requests of 4096 tokens", "trn2, 4 cores, 16 requests of 8192 tokens"
    assert facts.graphs == f"cached for {small}; {large}"
    assert f"graphs:       cached for {small}" in facts_as_text("hf://acme/tiny", facts)


def test_another_model_of_an_architecture_has_its_graphs(shelf: Shelf) -> None:
    folder = shelf.root / "acme/tiny/main"
    fill(shelf, entry(SMALL, "acme/first"), digest=digest_of_model(folder))
    assert inspect_model("hf://acme/tiny", "optimum").graphs == ONE
    assert inspect_model(f"file://{folder}", "optimum").graphs == ONE


def test_tokens_of_a_vocabulary_that_only_name_something_do_not_change_the_architecture(
    shelf: Shelf, tmp_path: Path
) -> None:
    folder = shelf.root / "acme/tiny/main"
    other = write_tiny_model(tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**TINY_CONFIG, "eos_token_id": 5}))
    assert digest_of_model(folder) == digest_of_model(other)
    (other / "config.json").write_text(json.dumps({**TINY_CONFIG, "rms_norm_eps": 1e-3}))
    assert digest_of_model(folder) != digest_of_model(other)


@pytest.mark.parametrize("fills", [True, False])
def test_a_model_that_the_cache_does_not_have_must_be_compiled(shelf: Shelf, fills: bool) -> None:
    fill(shelf, entry(SMALL, hidden_size=64))
    if not fills:
        fill(shelf, release="0.4.4")
    facts = inspect_model("hf://acme/tiny", "optimum")
    assert facts.graphs == "must be compiled, about 1 min"


def test_graphs_of_another_release_do_not_count(shelf: Shelf) -> None:
    fill(shelf, entry(SMALL), alias="acme/tiny")
    with fake_optimum("0.4.5"):
        assert installed_release() == ("0.4.5", "2.21.33363.0")
        assert inspect_model("hf://acme/tiny", "optimum").graphs.startswith("must be compiled")
    with fake_optimum("sdk2.31"):
        assert inspect_model("hf://acme/tiny", "optimum").graphs == ONE


@pytest.mark.parametrize("status", [0, 500])
def test_a_cache_that_does_not_answer_is_unknown_and_the_model_is_inspected(
    shelf: Shelf, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shelf.root / "acme/tiny/main"
    shelf.fail_next(*[status] * 9)
    assert inspect_model(f"file://{folder}", "optimum").graphs == ""
    assert "the cache of compiled graphs does not tell what it has" in capsys.readouterr().err


def test_other_backends_do_not_ask(shelf: Shelf) -> None:
    fill(shelf, entry(SMALL), alias="acme/tiny")
    assert inspect_model("hf://acme/tiny").graphs == ""
    assert not [asked for asked in shelf.asked if REPOSITORY in asked.path]


def test_entries_that_are_no_decoders_are_left_out(shelf: Shelf) -> None:
    stray = {**entry(SMALL), "neuron": {"static_batch_size": 1}}
    fill(shelf, entry(SMALL), stray, alias="acme/tiny")
    assert inspect_model("hf://acme/tiny", "optimum").graphs == ONE


def test_words_name_a_few_and_count_the_others() -> None:
    many = [CachedGraphs("trn2", 4, 1024 * number, 1) for number in range(1, 100)]
    text = in_words(many, 32)
    assert text.endswith("; trn2, 4 cores, 1 requests of 6144 tokens; and 93 more")
    assert len(text) < 500
    assert in_words([], 32) == "must be compiled, about 3 min"
