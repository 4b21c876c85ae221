"""Speculative decoding is configured with vLLM's keys, and what is not built is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.eagle import head_config, head_tensors, write_head
from neuron_runtime import LLM, SamplingParams
from neuron_runtime.arguments import FLAG_NAMES, config_of, llm_config, naming
from neuron_runtime.artifacts.loading import with_local_draft
from neuron_runtime.commands.command_line import build_parser
from neuron_runtime.commands.serve import configuration
from neuron_runtime.config import DraftSource, RuntimeConfig, Speculation, parse_config
from neuron_runtime.core import BackendLimits
from neuron_runtime.engine.backends import PACKAGES, backend_package, check_backend
from neuron_runtime.engine.drafts import Drafts, drafts_of
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import as_flag

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
DOCUMENT: dict[str, Any] = {"version": 1, "model": {"uri": "hf://a/m"}, "servedNames": ["m"]}


def served_with(*words: str) -> RuntimeConfig:
    return configuration(build_parser().parse_args(["serve", "a/m", *words]))


def as_flags(arguments: dict[str, Any]) -> list[str]:
    return [word for name, value in arguments.items() for word in (as_flag(name), str(value))]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, Speculation()),
        ({"method": "ngram"}, Speculation(method="NGram")),
        ({"model": "[ngram]", "num_speculative_tokens": 5}, Speculation(method="NGram", num_tokens=5)),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            Speculation(method="NGram", num_tokens=2, min_match=2, max_match=4),
        ),
        (
            {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 3},
            Speculation(method="Draft", num_tokens=3, model=DraftSource(uri="hf://org/draft")),
        ),
        ({"model": "file:///draft"}, Speculation(method="Draft", model=DraftSource(uri="file:///draft"))),
        ({"method": "ngram", "model": None, "rejection_sample_method": "standard"}, Speculation(method="NGram")),
    ],
)
def test_drafts_are_configured_with_the_keys_of_vllm(given: dict[str, Any], read: Speculation) -> None:
    for flag in ("--speculative-config", "-sc"):
        assert served_with(flag, json.dumps(given)).speculation == read
    assert llm_config("org/name", {"speculative_config": given}).speculation == read


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_both_names_of_eagle_are_one_method(method: str) -> None:
    given = {"method": method, "model": "org/head@main", "num_speculative_tokens": 2}
    read = Speculation(method="Eagle", num_tokens=2, model=DraftSource(uri="hf://org/head@main"))
    assert config_of("hf://a/m", {"speculative_config": given}).speculation == read


@pytest.mark.parametrize(
    ("given", "match"), [({}, (2, 8)), ({"max": 3}, (3, 3)), ({"min": 2}, (2, 2)), ({"min": 1, "max": 4}, (1, 4))]
)
def test_one_length_of_a_match_stands_for_both_as_in_vllm(given: dict[str, int], match: tuple[int, int]) -> None:
    lengths = {f"prompt_lookup_{key}": value for key, value in given.items()}
    assert served_with("-sc", json.dumps({"method": "ngram", **lengths})).speculation.match == match


def test_without_a_method_no_row_has_drafts() -> None:
    assert Speculation(num_tokens=3).max_drafts == 0
    assert Speculation(method="NGram", num_tokens=3).max_drafts == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("x", "($.speculation): 'x' is not JSON"),
        ([1], '($.speculation): must be an object such as {"method": "ngram", "num_speculative_tokens": 4}'),
        ({"num_speculative_tokens": 4}, "`method`: is missing: set ngram"),
        ({"method": "medusa"}, "`method`: 'medusa' is not supported yet: set ngram, draft_model, eagle or eagle3"),
        ({"method": "eagle3"}, "`model`: is missing: name the draft model"),
        ({"method": "draft_model"}, "`model`: is missing: name the draft model"),
        ({"method": "draft_model", "model": 7}, "`model`: is missing: name the draft model"),
        ({"method": "ngram", "model": "org/draft"}, "`model`: is for the methods draft_model, eagle, eagle3: leav"),
        ({"model": "org/draft", "prompt_lookup_min": 2}, "`prompt_lookup_min`: is for the method ngram: leave it out"),
        ({"model": "ftp://draft"}, "($.speculation.model.uri): unknown scheme ftp"),
        ({"method": "ngram", "max_model_len": 9}, "`max_model_len`: 9 is not supported yet: leave it out"),
        ({"method": "ngram", "tokens": 4}, "`tokens`: is no key of it: use method, model, num_speculative_tokens, pro"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "($.speculation.numTokens): Expected `int` <= 16, got 17"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "($.speculation.numTokens): Expected `int` >= 1, got 0"),
        ({"method": "ngram", "prompt_lookup_max": 33}, "($.speculation.maxMatch): Expected `int` <= 32, got 33"),
        (
            {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "($.speculation.minMatch): must be at most maxMatch (2), got 3",
        ),
        ({"model": ""}, "`method`: is missing: set ngram"),
    ],
)
def test_a_wrong_key_is_named_with_its_cure(given: Any, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        served_with("--speculative-config", given if isinstance(given, str) else json.dumps(given))
    assert caught.value.field.startswith("--speculative-config ($.speculation")
    assert says in str(caught.value)
    with pytest.raises(InvalidConfig) as caught:
        LLM("/nowhere", speculative_config=given)
    assert str(caught.value).startswith("speculative_config ($.speculation")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("older", "read"),
    [
        ({"speculative_model": "[ngram]"}, Speculation(method="NGram")),
        (
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": 3,
                "ngram_prompt_lookup_min": 2,
                "ngram_prompt_lookup_max": 4,
            },
            Speculation(method="NGram", num_tokens=3, min_match=2, max_match=4),
        ),
        (
            {"speculative_model": "org/d", "max_model_len": 256, "speculative_max_model_len": 256},
            Speculation(method="Draft", model=DraftSource(uri="hf://org/d")),
        ),
    ],
)
def test_arguments_of_older_versions_mean_the_same(older: dict[str, Any], read: Speculation) -> None:
    assert served_with(*as_flags(older)).speculation == read
    assert llm_config("org/name", older).speculation == read


@pytest.mark.parametrize("named", ["", "model."])
def test_a_draft_model_of_older_arguments_that_is_an_eagle_head_is_served_as_one(named: str, tmp_path: Path) -> None:
    head = head_config(1, is_eagle=True)
    tensors = {f"{named}{name}": tensor for name, tensor in head_tensors(1, head).items()}
    folder = write_head(tmp_path / "head", head, tensors)
    for draft, method in ((folder, "Eagle"), (DEMO / "draft", "Draft")):
        config = llm_config("org/name", {"speculative_model": str(draft), "num_speculative_tokens": 2})
        assert config.speculation.method == "Draft"
        local = with_local_draft(config, lambda stage, share: None, tmp_path)
        assert (local.speculation.method, local.speculation.num_tokens) == (method, 2)


@pytest.mark.parametrize(
    ("older", "says"),
    [
        ({"num_speculative_tokens": 4}, "num_speculative_tokens: needs speculative_model"),
        (
            {"speculative_model": "org/d", "speculative_max_model_len": 64, "max_model_len": 128},
            "speculative_max_model_len: must be as max_model_len: drafts reach as far as the model",
        ),
        (
            {"speculative_model": "org/d", "speculative_config": '{"method": "ngram"}'},
            "speculative_model: is an older form of speculative_config: leave it out",
        ),
        (
            {"speculative_model": "org/d", "ngram_prompt_lookup_max": 4},
            "speculative_config ($.speculation): `prompt_lookup_max`: is for the method ngram: leave it out",
        ),
    ],
)
def test_wrong_arguments_of_older_versions_are_named(older: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        llm_config("org/name", older)
    assert str(caught.value) == says
    with pytest.raises(InvalidConfig) as caught:
        served_with(*as_flags(older))
    assert caught.value.field.startswith(as_flag(says.partition(":")[0].partition(" ")[0]))


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        served_with("-sc", '{"method": "medusa", "model": "org/heads", "quantization": "fp8", "speed": 9}')
    assert all(f"`{key}`: " in str(caught.value) for key in ("method", "model", "quantization", "speed"))


@pytest.mark.parametrize("method", ["Medusa", "eagle3", "ngram"])
def test_a_document_names_the_methods_that_there_are(method: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^[$].speculation.method: Invalid enum value '{method}': .*`NGram`"):
        parse_config(json.dumps({**DOCUMENT, "speculation": {"method": method}}).encode())


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
@pytest.mark.parametrize("backend", PACKAGES)
def test_a_backend_refuses_the_drafts_that_it_does_not_have(
    backend: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"method": method, **({"model": "org/draft"} if method != "ngram" else {})}
    drafting = config_of("hf://a/m", {"backend": backend, "speculative_config": config})
    package = backend_package(drafting)
    name = drafting.speculation.method
    monkeypatch.setattr(package, "check_config", lambda _: None)  # its library may be missing
    if name in package.DRAFT_METHODS:
        check_backend(drafting)
        return
    with pytest.raises(InvalidConfig) as caught, naming(FLAG_NAMES):
        check_backend(drafting)
    assert str(caught.value) == " or set ".join(
        [
            f"--speculative-config ($.speculation.method): the {backend} backend has no {name}: leave it out",
            *package.DRAFT_METHODS,
        ]
    )
    check_backend(config_of("hf://a/m", {"backend": backend, "speculative_config": {}}))


@pytest.mark.parametrize("method", ["", "NGram"])
def test_drafts_are_proposed_where_they_are_configured_and_verified(method: Any) -> None:
    limits = BackendLimits(max_rows=2, max_model_length=64, max_step_tokens=64, block_size=64, num_blocks=2)
    configured = Speculation(method=method, num_tokens=3)
    assert drafts_of(configured, limits) is None
    assert (drafts_of(configured, replace(limits, max_drafts=3)) is not None) == bool(method)


def test_an_answer_that_repeats_an_earlier_one_is_drafted_and_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine drafts might seem not to pay.
    measure = Drafts.measure
    monkeypatch.setattr(Drafts, "measure", lambda drafts, rows, tokens, *_: measure(drafts, rows, tokens, 0.01))
    question = {"role": "user", "content": "What is neuron-serving?"}
    greedy = SamplingParams(temperature=0, max_tokens=80)
    with LLM(str(DEMO), speculative_config={"method": "ngram"}) as model:
        first = model.chat([question], greedy, use_tqdm=False)[0].outputs[0].text
        again = [question, {"role": "assistant", "content": first}, question]
        drafted = model.chat(again, greedy, use_tqdm=False)[0].outputs[0].text
        assert model._engine.stats.num_accepted_drafts_total > 10
    assert drafted == first
