"""EAGLE heads on the torch backend: their drafts are those of a plain reference, and answers are as without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.device_drafts import BLOCKS, MAX_DRAFTS, SLOTS, EverySecond, Seen, some_requests
from helpers.eagle import PlainEagle, Tensors, head_config, head_tensors, write_head
from helpers.random_model import model_config
from helpers.told_drafts import events_of, tokens_of
from helpers.torch_models import load_backend, random_model, runtime_config
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.eagle import STATES as STATES_FIELD
from neuron_runtime.backend.torch.eagle import read_eagle
from neuron_runtime.backend.torch.loader import load
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.config import DraftSource, Speculation
from neuron_runtime.core import Request
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import FatalError, InvalidConfig
from neuron_runtime.host import FreeMemory
from neuron_runtime.inspection import inspect_head

FEW_BLOCKS = {**BLOCKS, "num_blocks": 22}
MODEL: dict[str, Any] = {"num_layers": 7}
STATES = (2, 3, 4)
"""Those that EAGLE 3 reads of it if a head does not say which."""


def with_head(folder: Path) -> Speculation:
    return Speculation(method="Eagle", num_tokens=MAX_DRAFTS, model=DraftSource(uri=folder.as_uri()))


def check(seen: Seen, plain: PlainEagle, sequences: Sequence[Sequence[int]]) -> None:
    """sequences: prompts with their answers."""
    heard = [(tuple(tokens), plain.hear(tokens)) for tokens in sequences]
    wrong = []
    for known, drafts in seen.drafts:
        of_model = next(one for tokens, one in heard if tokens[: len(known)] == tuple(known))
        expected = plain.drafts(known, of_model[: len(known) - 1], len(drafts))
        if drafts != expected:
            wrong.append((len(known), drafts, expected))
    assert not wrong, f"{len(wrong)} of {len(seen.drafts)}: {wrong[:5]}"


def answers(folder: Path, requests: Sequence[Request], **config: Any) -> Mapping[str, list[int]]:
    backend = load_backend(folder, **config)
    found = tokens_of(events_of(Engine(backend), requests))
    backend.close()
    return found


def with_prompts(answers: Mapping[str, list[int]]) -> list[list[int]]:
    return [[*one.prompt_token_ids, *answers[one.request_id]] for one in some_requests()]


def a_head(folder: Path, generation: int) -> Path:
    config = head_config(generation)
    return write_head(folder, config, head_tensors(generation, config))


@pytest.mark.parametrize(
    ("generation", "layout", "period"),
    [
        (1, FEW_BLOCKS, 3),
        (3, FEW_BLOCKS, 1),
        (3, SLOTS, 2),
        pytest.param(1, FEW_BLOCKS, 1, marks=pytest.mark.long),
        pytest.param(1, SLOTS, 2, marks=pytest.mark.long),
        pytest.param(3, FEW_BLOCKS, 3, marks=pytest.mark.long),
    ],
)
def test_the_drafts_of_every_step_are_those_of_the_reference(
    generation: int, layout: dict[str, Any], period: int, tmp_path: Path
) -> None:
    """Beside prompts, in parts too, behind prefixes that others computed, and after preemptions."""
    model, head = random_model(tmp_path / "model", **MODEL), a_head(tmp_path / "head", generation)
    expected = answers(model, some_requests(), **layout)
    backend = load_backend(model, speculation=with_head(head), **layout)
    seen, engine = Seen(backend), Engine(backend, drafting=EverySecond(period))
    found = tokens_of(events_of(engine, some_requests()))
    backend.close()
    assert found == expected
    assert len(seen.drafts) > 20
    check(seen, PlainEagle(model, head, states=STATES if generation == 3 else ()), with_prompts(found))
    assert layout["layout"] == "slots" or (engine.stats.num_prefix_hits_total and engine.stats.num_preemptions_total)


@pytest.mark.parametrize("states", [[1, 3, 7], None])
def test_heads_that_speculators_wrote_say_more_and_are_read_too(states: list[int] | None, tmp_path: Path) -> None:
    """With norms of their own, another hidden size, its own embedding, other names, and biases."""
    model = random_model(tmp_path / "model", **MODEL)
    says = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"), True)
    config = head_config(3, hidden_size=32, num_heads=4, num_kv_heads=1)
    tensors = {name.replace("midlayer.", "layers.0."): one for name, one in head_tensors(3, config).items()}
    drawn = torch.Generator().manual_seed(5)
    for name, shape in {
        "embed_tokens.weight": (256, 32),
        "fc.bias": (32,),
        "layers.0.self_attn.q_proj.bias": (32,),
        "layers.0.self_attn.k_proj.bias": (8,),
        "layers.0.self_attn.v_proj.bias": (8,),
        "input_norm.weight": (192,),
        **{f"fc_norm.{number}.weight": (64,) for number in range(3)},
    }.items():
        tensors[name] = torch.rand(shape, generator=drawn) + 0.5
    nested = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**config, "layer_types": ["full_attention"]},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": 64,
        **says,
        **({"eagle_aux_hidden_state_layer_ids": states} if states else {"eagle_config": {}}),
    }
    head = write_head(tmp_path / "head", nested, tensors)
    backend = load_backend(model, speculation=with_head(head), **BLOCKS)
    seen = Seen(backend)
    found = tokens_of(events_of(Engine(backend, drafting=EverySecond(2)), some_requests()[:4]))
    backend.close()
    assert len(seen.drafts) > 20
    plain = PlainEagle(model, head, states=states or STATES, **says)
    check(seen, plain, [[*one.prompt_token_ids, *found[one.request_id]] for one in some_requests()[:4]])


def test_states_of_eagle_config_are_numbered_as_sglang_does(tmp_path: Path) -> None:
    """By the block that makes a state, not by the one that reads it."""
    model, config = decoder_config(model_config(**MODEL)), head_config(3)
    head = write_head(tmp_path, {**config, "eagle_config": {STATES_FIELD: [0, 3, 5]}}, head_tensors(3, config))
    assert read_eagle(read_checkpoint(head), model)[0].states == (1, 4, 6)
    head = write_head(tmp_path, {**config, STATES_FIELD: [0, 3, 5]}, head_tensors(3, config))
    assert read_eagle(read_checkpoint(head), model)[0].states == (0, 3, 5)


Change = Callable[[dict[str, Any], Tensors], object]


def says(**fields: Any) -> Change:
    return lambda config, _: config.update(fields)


def has(**tensors: torch.Tensor) -> Change:
    return lambda _, found: found.update({name.replace("__", "."): one for name, one in tensors.items()})


def lacks(name: str) -> Change:
    return lambda _, found: found.pop(name)


def maps(change: int) -> Change:
    return lambda _, found: found["d2t"].add_(change)


WRONG: dict[str, tuple[int, Change, str]] = {
    "another hidden size": (1, says(hidden_size=32), "its hidden_size is 32, and the model's 64"),
    "for a wider model": (3, says(target_hidden_size=96), "its target_hidden_size is 96"),
    "other tokens": (3, says(vocab_size=300), "300 tokens, and the model 256"),
    "fc of two states": (3, has(fc__weight=torch.zeros(64, 128)), r"fc.weight has shape \[64, 128\], .* \[64, 192\]"),
    "no fc": (1, lacks("fc.weight"), "missing: fc.weight"),
    "no projection": (3, lacks("midlayer.mlp.up_proj.weight"), "missing: midlayer.mlp.up_proj.weight"),
    "unread": (1, has(layers__0__extra=torch.zeros(1)), "unexpected: layers.0.extra"),
    "no map": (3, lacks("d2t"), "d2t is missing, which maps the 100 tokens"),
    "a map beyond": (3, maps(60), "d2t maps a draft to token 259, but the model has 256"),
    "a map below": (3, maps(-2), "d2t maps a draft to token -1, but the model has 256"),
    "a short map": (3, has(d2t=torch.zeros(9, dtype=torch.int64)), r"d2t must have .* shape \[100\], got I64 \[9\]"),
    "a map of numbers": (3, has(d2t=torch.zeros(100)), r"d2t must have dtype I64 .* got F32"),
    "unknown states": (3, says(**{STATES_FIELD: [1, 3, 8]}), f"{STATES_FIELD} .* has 7, in order"),
    "states out of order": (3, says(**{STATES_FIELD: [3, 1, 5]}), "in order; got"),
    "two blocks": (3, says(num_hidden_layers=2), "num_hidden_layers of EAGLE 3 must be 1"),
    "norms of HASS": (1, says(add_para_norm=True), "add_para_norm True of EAGLE heads"),
    "layers of no known kind": (3, says(layer_types=[["full_attention"]]), "layer_types"),
    "no layers": (3, says(layer_types=5), "layer_types"),
    "more drafts than tokens": (3, says(draft_vocab_size=257), "draft_vocab_size must be at most"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_head_that_does_not_fit_is_refused_by_name(what: str, tmp_path: Path) -> None:
    generation, change, message = WRONG[what]
    model, config = random_model(tmp_path / "model", **MODEL), head_config(generation)
    tensors = head_tensors(generation, config)
    change(config, tensors)
    head = write_head(tmp_path / "head", config, tensors)
    with pytest.raises((FatalError, InvalidConfig), match=message):
        load_backend(model, speculation=with_head(head), **BLOCKS)


def test_pickled_weights_are_refused_with_the_cure(tmp_path: Path) -> None:
    model, head = random_model(tmp_path / "model", **MODEL), a_head(tmp_path / "head", 1)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(FatalError, match=r"only safetensors .* contains pytorch_model.bin; convert the model"):
        load_backend(model, speculation=with_head(head), **BLOCKS)


def test_a_small_model_has_no_usual_states(tmp_path: Path) -> None:
    model, head = random_model(tmp_path / "model"), a_head(tmp_path / "head", 3)
    with pytest.raises(FatalError, match=f"{STATES_FIELD} .* of the model, which has 2, in order; which it lacks"):
        load_backend(model, speculation=with_head(head), **BLOCKS)


@pytest.mark.parametrize("generation", [1, 3])
def test_a_head_and_what_it_reads_take_memory_of_the_cache(generation: int, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", max_position_embeddings=2**16, **MODEL)
    head = a_head(tmp_path / "head", generation)
    config: dict[str, Any] = {"layout": "blocks", "available_bytes": 200_000_000}
    without, with_one = (
        load_backend(model, **config, **more) for more in ({"max_drafts": MAX_DRAFTS}, {"speculation": with_head(head)})
    )
    num_weights = sum(tensor.numel() for tensor in load_file(head / "model.safetensors").values())
    per_token = 4 * 7 * 64
    missing = (without.limits.num_blocks - with_one.limits.num_blocks) * 16 * per_token
    own = 4 * num_weights + with_one.limits.num_blocks * 16 * 4 * (64 + 64)
    assert own < missing < 2 * own
    without.close(), with_one.close()


@pytest.mark.parametrize("generation", [1, 3])
def test_a_head_is_inspected_without_a_tokenizer(generation: int, tmp_path: Path) -> None:
    config = head_config(generation)
    facts = inspect_head(write_head(tmp_path / "head", config, head_tensors(generation, config)).as_uri())
    assert (facts.num_layers, facts.vocabulary_size) == (1, config["vocab_size"])
    assert facts.weights_bytes > 0
    plain = {name: tensor for name, tensor in head_tensors(generation, config).items() if name != "fc.weight"}
    with pytest.raises(FatalError, match=r"fc\.weight is missing: this is no EAGLE head"):
        inspect_head(write_head(tmp_path / "none", config, plain).as_uri())


def test_steps_run_eager_beside_a_head_that_reads_between_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, head = random_model(tmp_path / "model", **MODEL), a_head(tmp_path / "head", 3)
    config = runtime_config(speculation=with_head(head), **BLOCKS)
    load(model, config, lambda what, share: None, lambda: FreeMemory(2**30), artifact=tmp_path / "unread").close()
    assert "decode steps are not compiled" in (told := "".join(capsys.readouterr()))
    assert "EAGLE 3 head reads hidden states" in told
