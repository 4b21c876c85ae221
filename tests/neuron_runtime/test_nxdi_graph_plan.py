"""The plan of a model's graphs: what each takes, how much is padding, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuron_runtime.__main__ import main
from neuron_runtime.backend.nxdi.buckets import all_graphs
from neuron_runtime.backend.nxdi.devices import PLATFORMS, Target
from neuron_runtime.backend.nxdi.graph_plan import Plan, flags_of, lines_of, plan_of
from neuron_runtime.commands.plan_buckets import read_lengths
from neuron_runtime.config import RuntimeConfig, parse_config
from neuron_runtime.errors import InvalidConfig

TRN2 = Target(PLATFORMS["trn2"], 2, 4)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


def config(**more: object) -> RuntimeConfig:
    document = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "nxdi", "compile": True}
    return parse_config(json.dumps({**document, **more}).encode())


def planned(lengths: tuple[tuple[int, float], ...] = (), **more: object) -> Plan:
    return plan_of(config(**more), MODEL, TRN2, lengths)


@pytest.mark.parametrize("more", [{}, {"prefixCaching": "enabled"}, {"limits": {"maxModelLength": 32_768}}])
def test_a_plan_lists_every_graph_that_is_compiled_and_at_most_24(more: dict[str, object]) -> None:
    plan = planned(**more)
    assert [graph.name for graph in plan.graphs] == [graph.name for graph in all_graphs(plan.settings)]
    assert len(plan.graphs) <= 24


def test_the_sums_are_those_of_the_model() -> None:
    plan = planned(limits={"maxSequences": 8, "maxModelLength": 4096})
    assert plan.cache_bytes == 2 * 32 * 8 * 128 * 2 * 8 * 4096
    assert plan.compile_seconds == pytest.approx(len(plan.graphs) * 32 * 2.4)
    text = "\n".join(lines_of(plan))
    assert "llama, 4 cores, 8 sequences of 4096 tokens, layout slots" in text
    assert "the cache takes 4.00 GiB (1.00 GiB per core)" in text
    widest = next(graph for graph in plan.graphs if graph.name == "prefill_4096")
    assert widest.activation_bytes == 4096 * (2 * 4096 + 2 * 14336 // 4) * 2 + 128_256 // 4 * 4


@pytest.mark.parametrize(("tensor", "heads"), [(1, 8), (4, 8), (8, 8), (16, 16), (32, 32)])
def test_cores_without_a_cached_head_of_their_own_hold_copies(tensor: int, heads: int) -> None:
    target = Target(PLATFORMS["trn2"], 2, 32)
    more = {"limits": {"maxSequences": 8, "maxModelLength": 4096}, "parallelism": {"tensor": tensor}}
    assert plan_of(config(**more), MODEL, target).cache_bytes == 2 * 32 * heads * 128 * 2 * 8 * 4096


@pytest.mark.parametrize(("cached", "heads"), [(10, 40), (20, 20)])
def test_cached_heads_that_do_not_divide_the_cores_are_as_many_as_query_heads(cached: int, heads: int) -> None:
    model = MODEL | {"num_attention_heads": 40, "num_key_value_heads": cached, "head_dim": 128}
    more = {"limits": {"maxSequences": 8, "maxModelLength": 4096}, "parallelism": {"tensor": 4}}
    assert plan_of(config(**more), model, TRN2).cache_bytes == 2 * 32 * heads * 128 * 2 * 8 * 4096


def test_every_prompt_is_taken_by_one_graph_and_padding_is_the_mean_over_its_prompts() -> None:
    plan = planned(((127, 0.5), (128, 0.5)), buckets={"context": [128, 256]})
    first, second = plan.graphs[:2]
    assert (first.takes, second.takes) == ("prompts of 1 to 127 tokens", "prompts of 128 to 256 tokens")
    assert first.padding == pytest.approx(1 - (384 + 127) / (384 + 128))
    assert second.padding == pytest.approx(1 - (384 + 128) / (384 + 256))
    assert plan.prefill_padding == pytest.approx(1 - (2 * 384 + 255) / (2 * 384 + 128 + 256))


def test_buckets_are_chosen_for_the_prompts_of_the_traffic() -> None:
    lengths = ((200, 0.5), (2500, 0.5))
    plan = planned(lengths)
    assert plan.settings.context_buckets == (256, 2560, 4096)
    assert plan.prefill_padding < planned(lengths, buckets={"context": [128, 512, 4096]}).prefill_padding
    again = planned(lengths, buckets={"context": [256, 2560, 4096]})
    assert again == plan
    assert flags_of(plan).startswith("--context-buckets 256,2560,4096 --token-generation-buckets ")


def test_the_command_prints_the_plan_of_a_model_without_device_or_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("200\n2500\n\n")
    flags = ["--backend", "nxdi", "--tensor-parallel-size", "4", "--prompt-lengths", str(lengths)]
    assert main(["plan-buckets", str(tmp_path), *flags]) == 0
    printed = capsys.readouterr().out
    assert "prefill_2560" in printed
    assert "of prefill time is padding" in printed
    assert "--context-buckets 256,2560,4096" in printed


def test_a_backend_without_buckets_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert main(["plan-buckets", str(tmp_path), "--backend", "torch"]) == 2
    assert "the torch backend has no buckets to plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("12\nabc\n", "line 2"), ("0\n", "line 1"), ("\n", "has no numbers"), ("-4", "line 1")],
)
def test_a_wrong_line_of_lengths_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=message):
        read_lengths(path)
