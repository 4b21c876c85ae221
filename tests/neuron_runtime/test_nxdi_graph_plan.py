"""The plan of a model's graphs: what each takes, how much is padding, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.random_model import model_config, write_random_model
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.neuron.step_graphs import Graph, Prefill
from neuron_runtime.backend.nxdi.buckets import all_graphs, decode_graph, limits_of, prefill_graph
from neuron_runtime.backend.nxdi.graph_plan import GraphPlan, plan_of, read_plan
from neuron_runtime.backend.nxdi.settings import RECOMPUTED, Settings, settings_of
from neuron_runtime.commands.command_line import main
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


def planned(lengths: tuple[tuple[int, float], ...] = (), **more: object) -> GraphPlan:
    return plan_of(config(**more), MODEL, TRN2, lengths)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prefixCaching": "enabled"},
        {"limits": {"maxModelLength": 32_768}},
        {"prefixCaching": "enabled", "limits": {"maxModelLength": 131_072}},
    ],
)
def test_a_plan_lists_every_graph_that_is_compiled_and_at_most_24(more: dict[str, object]) -> None:
    plan = planned(**more)
    assert [graph.name for graph in plan.graphs] == [graph.name for graph in all_graphs(plan.settings)]
    assert len(plan.graphs) <= 24


def test_the_sums_are_those_of_the_model() -> None:
    plan = planned(limits={"maxSequences": 8, "maxModelLength": 4096})
    assert plan.cache_bytes == 2 * 32 * 8 * 128 * 2 * 8 * 4096
    assert plan.compile_seconds == pytest.approx(len(plan.graphs) * 32 * 2.4)
    text = "\n".join(plan.lines())
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
    assert plan.flags.startswith("--context-buckets 256,2560,4096 --token-generation-buckets ")


MISTRAL = {**MODEL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}


@pytest.mark.parametrize("lengths", [(), ((200, 0.9), (2500, 0.1))])
@pytest.mark.parametrize("more", [{}, {"prefixCaching": "enabled"}, {"limits": {"maxModelLength": 4096}}])
@pytest.mark.parametrize("model", [MODEL, MISTRAL], ids=["llama", "mistral"])
def test_a_plan_has_the_sizes_that_are_compiled_without_flags(
    model: dict[str, object], more: dict[str, object], lengths: tuple[tuple[int, float], ...]
) -> None:
    plan = plan_of(config(**more), model, TRN2, lengths)
    if not lengths:
        assert plan.settings == settings_of(config(**more), model, TRN2)
    buckets = {"context": plan.settings.context_buckets}
    assert plan_of(config(**more, buckets=buckets), model, TRN2, lengths).settings == plan.settings


@pytest.mark.parametrize("key", ["enable_bucketing", "enable-bucketing"])
def test_a_plan_without_bucketing_has_one_size(key: str) -> None:
    plan = planned(limits={"maxModelLength": 4096}, overrideNeuronConfig={key: False})
    assert [graph.name for graph in plan.graphs] == ["prefill_4096", "decode_16x4096"]


def test_sizes_that_the_override_gives_are_kept_however_they_are_spelled() -> None:
    plan = planned(limits={"maxModelLength": 4096}, overrideNeuronConfig={"context-encoding-buckets": [512, 4096]})
    assert plan.settings.context_buckets == (512, 4096)


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


def test_the_command_writes_the_plan_to_a_file_that_gives_back_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    written = tmp_path / "plan.json"
    flags = ["--backend", "nxdi", "--tensor-parallel-size", "4", "--layout", "blocks", "--json", str(written)]
    assert main(["plan-buckets", str(tmp_path), *flags]) == 0
    asked: dict[str, object] = {"layout": "blocks", "parallelism": {"tensor": 4}}
    plan = planned(**asked)
    assert read_plan(written) == plan.settings
    graphs = json.loads(written.read_bytes())["graphs"]
    assert [graph["name"] for graph in graphs] == [graph.name for graph in plan.graphs]
    assert main(["plan-buckets", str(tmp_path), *flags[:-1], str(tmp_path / "none" / "plan.json")]) == 2
    assert "--json: cannot write" in capsys.readouterr().err


def test_the_command_plans_graphs_with_a_draft_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    model, written = tmp_path / "model", tmp_path / "plan.json"
    write_random_model(model, model_config())
    drafts = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3})
    flags = ["--backend", "nxdi", "--max-model-len", "128", "--speculative-config", drafts, "--json", str(written)]
    assert main(["plan-buckets", str(model), *flags, "--weights-dir", str(tmp_path / "weights")]) == 0
    assert "decode_16x131_of_4" in capsys.readouterr().out
    draft = read_plan(written).draft
    assert draft is not None
    assert draft.application == "llama"


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


def taken_graphs(settings: Settings) -> set[Graph]:
    """By calls of every length, by the rules of NxD Inference."""
    length, sizes = settings.max_model_length, settings.context_buckets
    last = length if settings.layout == "blocks" else sizes[-1]
    # The first and the last call that each graph could take, and their neighbours, lie at sums of sizes.
    edges = {*sizes, *settings.prefix_buckets, 1, *RECOMPUTED}
    edges |= {size + prefix for size in sizes for prefix in settings.prefix_buckets}
    ends = {near for edge in (*edges, last) for near in (edge - 1, edge, edge + 1) if 0 < near <= last}
    starts = (settings.segments or settings.shares_prefixes) and settings.layout == "blocks"
    calls = {
        (max(end - tokens, 0) if starts else 0, end)
        for end in ends
        for tokens in (*range(1, end, 97), *sizes, 1, end)
        if tokens <= sizes[-1]
    }
    reach = limits_of(settings, 0.0).max_prefill_start or length
    taken: set[Graph] = {prefill_graph(settings, *call) for call in calls if call[0] <= reach}
    positions = {near for size in settings.token_buckets for near in (size - 3, size - 1, size) if 0 < near < length}
    taken |= {
        decode_graph(settings, rows, position) for rows in range(1, settings.max_rows + 1) for position in positions
    }
    return taken


@st.composite
def open_plans(draw: st.DrawFn) -> GraphPlan:
    """Plans of configurations that leave the sizes open."""
    blocks, rows = draw(st.booleans()), draw(st.integers(1, 9))
    num_blocks = draw(st.integers(2, 300))
    block_size = draw(st.sampled_from([32, 64, 128])) if num_blocks >= 128 else 128
    limits = {"maxModelLength": num_blocks * block_size, "maxSequences": rows}
    more: dict[str, object] = {"asyncMode": draw(st.booleans()), "limits": limits}
    if blocks:
        limits["blockSize"] = block_size
        shares, segments = (draw(st.sampled_from(["enabled", "disabled"])) for _ in range(2))
        more |= {"layout": "blocks", "prefixCaching": shares, "chunkedPrefill": segments}
        more |= {"overrideNeuronConfig": {"attn_kernel_enabled": True}}
    lengths = draw(st.sets(st.integers(1, 9000), max_size=3))
    target = Target(PLATFORMS["trn2"], draw(st.sampled_from([1, 2])), 4)
    return plan_of(config(**more), MODEL, target, tuple((one, 1 / len(lengths)) for one in sorted(lengths)))


@given(plan=open_plans())
def test_each_chosen_graph_is_taken_by_some_call(plan: GraphPlan) -> None:
    settings = plan.settings
    never_taken = {*all_graphs(settings)} - taken_graphs(settings)
    # The library compiles the whole grid: a prompt that is computed at once leaves no room for a prefix in the largest.
    whole = settings.shares_prefixes and not settings.segments
    longest = settings.context_buckets[-1]
    expected = {Prefill(longest, prefix) for prefix in settings.prefix_buckets if prefix} if whole else set()
    assert never_taken == expected, settings
    assert plan.num_unused == len(expected)
    assert len(plan.graphs) <= 24


def test_a_graph_of_given_sizes_that_no_call_takes_is_named() -> None:
    given_sizes = {"context": [128, 256, 384, 512], "prefix": [512, 640], "tokenGeneration": [640]}
    plan = planned(prefixCaching="enabled", limits={"maxModelLength": 640, "blockSize": 128}, buckets=given_sizes)
    takes = {graph.name: graph.takes for graph in plan.graphs}
    unused = {name for name, text in takes.items() if text == "nothing: no call takes it"}
    assert unused == {graph.name for graph in all_graphs(plan.settings)} - {g.name for g in taken_graphs(plan.settings)}
    over = {f"prefill_{size}_after_640" for size in (128, 256, 384, 512)}
    assert unused == {"prefill_384", *over}
    assert f"({len(unused)} of them unused), about" in plan.lines()[-2]
    assert takes["prefill_512"] == "prompts of 257 to 512 tokens"
    assert takes["prefill_128"] == "prompts of 1 to 128 tokens"


def test_a_prefill_may_start_anywhere_if_the_prefixes_reach_what_the_smallest_one_leaves() -> None:
    more: dict[str, object] = {"prefixCaching": "enabled", "limits": {"maxModelLength": 4096, "blockSize": 32}}
    reaching = planned(**more, buckets={"context": [512, 2048], "prefix": [3584]})
    assert limits_of(reaching.settings, 0.0).max_prefill_start == 0
    short = planned(**more, buckets={"context": [512, 2048], "prefix": [3552]})
    assert limits_of(short.settings, 0.0).max_prefill_start == 3552
