"""Where a compiled model is placed: the cheapest that fits, what the manifest names, and what is said otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from helpers.manifests import CASES
from helpers.operator_worlds import SETTINGS, body
from neuron_operator.api import names
from neuron_operator.api.errors import InvalidSpec, OperatorError, Unplaceable
from neuron_operator.api.manifest import parse
from neuron_operator.api.reasons import Reason
from neuron_operator.place.catalog import INSTANCE_TYPES
from neuron_operator.place.planner import Choice, Held, Supply, choose, is_stranded
from neuron_operator.place.sizes import legal_sizes
from neuron_operator.read.objects import number_of
from neuron_operator.read.placement import NodeRules
from neuron_operator.read.records import Facts, PlannedConversion
from neuron_operator.read.world import (
    DEVICE_MODES,
    DeviceMode,
    EngineSettings,
    FreeDevices,
    GroupSettings,
    NodeDevices,
    Provisionable,
    Taint,
)
from neuron_operator.render.config_document import config_document

FILE: Path = CASES / "sizing" / "models.yaml"
MODELS = {name: msgspec.convert(facts, Facts) for name, facts in yaml.safe_load(FILE.read_text()).items()}
LLAMA = MODELS["meta-llama/Llama-3.1-8B-Instruct"]
LARGE = MODELS["meta-llama/Llama-3.3-70B-Instruct"]
NONE = FreeDevices(())


def node(instance_type: str, devices: int, free: int | None = None, **labels: str) -> NodeDevices:
    labels = {names.INSTANCE_TYPE_LABEL: instance_type, **labels}
    return NodeDevices(f"{instance_type}-{free}", devices, devices if free is None else free, 0, 0, labels)


def chosen(
    facts: Facts = LLAMA,
    types: tuple[str, ...] = (),
    *nodes: NodeDevices,
    mode: DeviceMode = "PluginWithExtension",
    max_nodes: int = 1,
    families: Mapping[str, str] | None = None,
    version: str = "",
    **spec: Any,
) -> Choice:
    groups = GroupSettings(max_nodes=max_nodes)
    using = replace(
        SETTINGS,
        device_mode=mode,
        provisionable=Provisionable(types),
        groups=groups,
        device_families=families or {},
        engines={"vllm": EngineSettings("i", version)},
    )
    return choose(parse(body({"model": {"uri": "hf://acme/tiny"}, **spec})), facts, using, FreeDevices(nodes))


def outcome(choice: Choice) -> tuple[Any, ...]:
    best = choice.chosen
    return best.placement.size, best.site.name, best.tensor, best.load.sequences, best.load.length


def test_the_cheapest_type_that_fits_is_chosen_and_the_next_is_named() -> None:
    choice = chosen(LLAMA, ("trn2.3xlarge", "inf2.xlarge", "inf2.8xlarge", "trn1.2xlarge"))
    assert outcome(choice) == (1, "inf2.8xlarge", 2, 16, 4096)
    assert choice.why == "cheapest, about $1.97 per hour, before 1 Neuron device of trn2.3xlarge at $2.23"
    problems = {option.site.name: option.problem for option in choice.others}
    assert problems.keys() == {"inf2.xlarge", "trn1.2xlarge"}
    assert all("host memory" in problem for problem in problems.values())
    assert "inf2.xlarge" not in choice.instance_types
    assert {"inf2.8xlarge", "inf2.48xlarge"} <= set(choice.instance_types)


def test_a_node_that_is_there_comes_before_one_to_buy_and_that_before_one_that_is_taken() -> None:
    there, taken = node("trn2.48xlarge", 16, 4), node("trn2.48xlarge", 16, 0)
    assert chosen(LLAMA, ("inf2.8xlarge",), there).chosen.site.name == "trn2.48xlarge"
    assert chosen(LLAMA, ("inf2.8xlarge",), there).why.startswith("chosen because it is there now")
    assert chosen(LLAMA, ("inf2.8xlarge",), taken).chosen.site.name == "inf2.8xlarge"
    assert chosen(LLAMA, (), taken).chosen.site.name == "trn2.48xlarge"
    both = chosen(LLAMA, (), node("inf2.48xlarge", 12), node("trn2.48xlarge", 16))
    assert both.chosen.site.name == "inf2.48xlarge"
    assert 1 < both.chosen.cost < 1.2  # a twelfth of the node


def test_an_edit_does_not_move_a_model_whose_own_replicas_hold_its_devices() -> None:
    using = replace(SETTINGS, provisionable=Provisionable(("trn2.3xlarge",)))
    model = parse(body({"model": {"uri": "hf://acme/tiny"}}))
    taken = FreeDevices((node("inf2.8xlarge", 1, 0),))
    assert choose(model, LLAMA, using, taken).chosen.site.name == "trn2.3xlarge"
    kept = choose(model, LLAMA, using, taken, Held("inf2.8xlarge", "inf2", 1))
    assert (kept.chosen.site.name, kept.why) == ("inf2.8xlarge", "as before this edit")
    assert choose(model, LLAMA, using, taken, Held("", "inf2", 1)).chosen.site.name == "inf2.8xlarge"
    assert (
        choose(
            model,
            LARGE,
            replace(using, provisionable=Provisionable(("trn1.32xlarge",))),
            taken,
            Held("inf2.8xlarge", "inf2", 1),
        ).chosen.site.name
        == "trn1.32xlarge"
    )


def test_an_empty_node_group_does_not_block_planning_and_a_selector_still_counts() -> None:
    types = ("inf2.8xlarge", "trn2.48xlarge")
    selected = {"podTemplate": {"spec": {"nodeSelector": {"pool": "llm"}}}}
    assert chosen(LLAMA, types, **selected).chosen.site.name == "inf2.8xlarge"
    rule = {"key": names.INSTANCE_TYPE_LABEL, "operator": "NotIn", "values": ["inf2.8xlarge"]}
    affinity = {"nodeAffinity": {names.REQUIRED_AFFINITY: {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}}}
    assert chosen(LLAMA, types, podTemplate={"spec": {"affinity": affinity}}).chosen.site.name == "trn2.48xlarge"


DEDICATED = Taint("dedicated", "batch", "NoSchedule")


def test_a_node_is_planned_for_only_if_the_pod_tolerates_its_taints() -> None:
    cheap = replace(node("inf2.8xlarge", 1), taints=(DEDICATED,))
    ours = replace(node("trn2.48xlarge", 16), taints=(Taint(names.NEURON_TAINT, "true", "NoSchedule"),))
    assert chosen(LLAMA, (), cheap, ours).chosen.site.name == "trn2.48xlarge"
    tolerating = {"spec": {"tolerations": [{"key": "dedicated", "value": "batch"}]}}
    assert chosen(LLAMA, (), cheap, ours, podTemplate=tolerating).chosen.site.name == "inf2.8xlarge"
    with pytest.raises(Unplaceable, match=r"has the taint dedicated=batch:NoSchedule: tolerate it in podTemplate"):
        chosen(LLAMA, (), cheap)


@pytest.mark.parametrize(
    ("toleration", "holds"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"key": "dedicated", "operator": "Equal", "value": "batch", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "dedicated", "value": "other"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"operator": "Equal"}, False),
    ],
)
def test_tolerations_are_read_as_the_scheduler_reads_them(toleration: dict[str, str], holds: bool) -> None:
    tainted = replace(node("trn1.32xlarge", 16), taints=(DEDICATED,))
    assert NodeRules.of({"tolerations": [toleration]}).accept(tainted) is holds


@pytest.mark.parametrize("group", ["karpenter.k8s.aws", "eks.amazonaws.com"])
@pytest.mark.parametrize(
    ("part", "value"), [("family", "trn1"), ("category", "trn"), ("size", "32xlarge"), ("generation", "1")]
)
def test_labels_that_follow_from_a_type_count_for_types_that_can_be_added(group: str, part: str, value: str) -> None:
    types = ("inf2.8xlarge", "trn1.32xlarge", "trn2.48xlarge")
    assert chosen(LLAMA, types).chosen.site.name == "inf2.8xlarge"
    key = f"{group}/instance-{part}"
    for spec in (
        {"nodeSelector": {key: value, "pool": "ours"}},
        {"affinity": required({"key": key, "operator": "In", "values": [value]})},
    ):
        assert chosen(LLAMA, types, podTemplate={"spec": spec}).chosen.site.name == "trn1.32xlarge"


def required(rule: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {names.REQUIRED_AFFINITY: {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}}}


def test_the_types_of_hyperpod_are_those_that_they_are_named_after() -> None:
    selector = {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "ml.trn1.32xlarge"}}}
    named = chosen(LARGE, podTemplate=selector, accelerator={"devices": 16})
    plain = chosen(LARGE, ("trn1.32xlarge",), accelerator={"devices": 16})
    assert named.chosen.site.name == "ml.trn1.32xlarge"
    assert (named.chosen.tensor, named.chosen.load, named.chosen.cost) == (
        *(plain.chosen.tensor, plain.chosen.load),
        plain.chosen.cost,
    )
    assert named.chosen.site.efa
    assert outcome(chosen(LLAMA, (), node("ml.trn1.32xlarge", 16)))[1] == "ml.trn1.32xlarge"
    assert chosen(LLAMA, ("ml.trn1.32xlarge",)).chosen.site.name == "ml.trn1.32xlarge"
    rule = chosen(LLAMA, ("trn1.32xlarge",)).node_rule
    assert rule is not None
    assert {"trn1.32xlarge", "ml.trn1.32xlarge"} <= set(rule["values"])


def test_a_model_is_placed_on_devices_that_its_engine_runs_on() -> None:
    engine, small = {"backend": "transformers-neuronx"}, node("trn2.3xlarge", 1)
    assert chosen(LLAMA, ("inf2.8xlarge",), small).chosen.site.name == "trn2.3xlarge"
    assert chosen(LLAMA, ("inf2.8xlarge",), small, engine=engine).chosen.site.name == "inf2.8xlarge"
    with pytest.raises(Unplaceable, match="transformers-neuronx runs on inf2, trn1, not on trn2: set another"):
        chosen(LLAMA, (), small, engine=engine)
    assert chosen(LLAMA, (), small, engine={"backend": "optimum"}).chosen.site.name == "trn2.3xlarge"
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "engine": engine}))
    assert not is_stranded(model, SETTINGS, Held("inf2.8xlarge", "inf2", 1), FreeDevices((small,)))


def by_vllm(*args: str, **env: str) -> dict[str, Any]:
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return {"backend": "vllm", "args": list(args), "env": variables}


LONG = {"maxModelLength": 32768, "maxSequences": 8}
SHARE, LEAST = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "VLLM_NEURON_MIN_KV_BUDGET_GIB"


@pytest.mark.parametrize("version", ["0.24", "0.29"])
def test_an_engine_that_caps_its_cache_is_given_more_cores_unless_the_manifest_raises_the_cap(version: str) -> None:
    types = ("trn2.3xlarge", "trn2.48xlarge")
    assert outcome(chosen(LLAMA, types, serving=LONG))[:3] == (1, "trn2.3xlarge", 4)
    capped = chosen(LLAMA, types, version=version, serving=LONG, engine=by_vllm())
    assert outcome(capped)[:3] == (4, "trn2.48xlarge", 16)
    (small,) = (one for one in capped.others if one.site.name == "trn2.3xlarge")
    assert "the engine would leave 7.0 GB to the cache" in small.problem
    assert "8.6 GB are needed" in small.problem
    raised = chosen(LLAMA, types, version=version, serving=LONG, engine=by_vllm(**{SHARE: "0.5"}))
    assert outcome(raised)[:3] == (1, "trn2.3xlarge", 4)
    assert "the engine leaves 11.6 GB to the cache" in raised.arithmetic
    half = chosen(LLAMA, types, version=version, serving=LONG, engine=by_vllm("--kv-cache-dtype=fp8"))
    assert outcome(half)[:3] == (1, "trn2.3xlarge", 4)


def test_a_cache_of_fp8_counts_as_one_byte_a_number() -> None:
    fp8 = chosen(LLAMA, ("trn2.3xlarge",), serving={"kvCacheDtype": "Fp8"}).chosen.memory.cache
    override = {"overrideNeuronConfig": {"kv_cache_quant": True}}
    assert fp8 == chosen(LLAMA, ("trn2.3xlarge",), engine=override).chosen.memory.cache
    assert 2 * fp8 == chosen(LLAMA, ("trn2.3xlarge",)).chosen.memory.cache


def test_the_budget_of_the_cache_is_what_weights_leave_of_the_share_that_the_manifest_sets() -> None:
    short = {"maxModelLength": 2048, "maxSequences": 1}
    for args in (["--gpu-memory-utilization=0.19"], ["--gpu_memory_utilization", "0.19"]):
        with pytest.raises(Unplaceable, match=r"leave 0.9 GB to the cache, beside weights of 4.0 GB, and 1.1 GB are"):
            chosen(LLAMA, ("trn2.3xlarge",), serving=short, engine=by_vllm(*args))
        less = by_vllm(*args, **{LEAST: "0.5"})
        assert chosen(LLAMA, ("trn2.3xlarge",), serving=short, engine=less).chosen.fits


def test_the_plan_of_an_engine_with_blocks_pins_their_number() -> None:
    load = chosen(LLAMA, ("trn2.3xlarge",), engine=by_vllm()).chosen.load
    assert (load.block_size, load.num_blocks, load.longest_prefill) == (32, 16 * 128, 2048)
    assert load.num_graphs == 1 + 5, "prompts, and decoding of 1, 2, 4, 8 and 16 sequences"
    wished = {"contextBuckets": [512], "tokenGenerationBuckets": [1024, 2048], "maxSequences": 3}
    assert chosen(LLAMA, ("trn2.3xlarge",), engine=by_vllm(), serving=wished).chosen.load.num_graphs == 1 + 3 * 3


def test_only_degrees_that_the_engine_takes_are_planned() -> None:
    facts = msgspec.structs.replace(LLAMA, num_heads=24, intermediate_size=12288)
    accelerator = {"devices": 6}
    assert outcome(chosen(facts, ("inf2.48xlarge",), accelerator=accelerator))[2] == 12
    vllm = {"accelerator": accelerator, "engine": by_vllm(), "version": "0.16"}
    assert outcome(chosen(facts, ("inf2.48xlarge",), **vllm))[2] == 8
    with pytest.raises(InvalidSpec, match=r"5 does not divide the 24 attention heads; choose one of 1, 2, 4, 8$"):
        chosen(facts, ("inf2.48xlarge",), **vllm, parallelism={"tensor": 5})


@pytest.mark.parametrize(("version", "site"), [("0.16", "inf2.8xlarge"), ("0.29", "trn2.3xlarge")])
def test_the_version_of_an_engine_decides_on_which_devices_it_runs(version: str, site: str) -> None:
    types = ("inf2.8xlarge", "trn2.3xlarge")
    assert outcome(chosen(LLAMA, types, version=version, engine=by_vllm()))[1] == site
    if version == "0.29":
        with pytest.raises(Unplaceable, match=r"vllm runs on trn2, trn3, not on inf2"):
            chosen(LLAMA, types[:1], version=version, engine=by_vllm())


def test_an_administrator_can_name_the_family_of_any_type() -> None:
    lab = node("lab-1", 16)
    with pytest.raises(Unplaceable, match=r"is of type lab-1: name its family in the chart value devices.families"):
        chosen(LLAMA, (), lab)
    with pytest.raises(Unplaceable, match=r"nothing is known of lab-1: name its family"):
        chosen(LLAMA, ("lab-1",))
    with pytest.raises(Unplaceable, match=r"node -16 has no label node.kubernetes.io/instance-type: give it one"):
        chosen(LLAMA, (), replace(lab, name="-16", labels={}))
    told = chosen(LLAMA, (), lab, families={"lab-1": "trn1"})
    assert (told.chosen.site.name, told.chosen.site.family.name) == ("lab-1", "trn1")
    assert "lab-1" in told.instance_types


def test_a_type_that_the_table_lacks_is_used_by_what_its_node_offers() -> None:
    choice = chosen(LARGE, (), node("trn2.new", 4), mode="Plugin")
    assert outcome(choice) == (4, "trn2.new", 16, 16, 4096)
    assert "trn2.new" in choice.instance_types


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"accelerator": {"devices": 4}}, (4, "inf2.24xlarge", 8, 16, 4096)),
        ({"accelerator": {"cores": 4}}, (4, "inf2.24xlarge", 4, 16, 4096)),
        ({"parallelism": {"tensor": 4}}, (2, "inf2.24xlarge", 4, 16, 4096)),
        ({"serving": {"maxModelLength": 65_536}}, (4, "inf2.24xlarge", 8, 8, 65_536)),
        ({"serving": {"maxModelLength": 8192, "maxSequences": 64}}, (6, "inf2.24xlarge", 8, 64, 8192)),
        ({"engine": {"overrideNeuronConfig": {"seq_len": 2048, "batchSize": 3}}}, (1, "inf2.24xlarge", 2, 3, 2048)),
        ({"engine": {"overrideNeuronConfig": {"tp_degree": 8}}}, (4, "inf2.24xlarge", 8, 16, 4096)),
    ],
)
def test_what_the_manifest_sets_is_kept_and_the_rest_follows(spec: dict[str, Any], found: tuple[Any, ...]) -> None:
    size, name, tensor, sequences, length = found
    best = chosen(LLAMA, ("inf2.24xlarge",), **spec).chosen
    assert (best.site.name, best.tensor, best.load.sequences, best.load.length) == (name, tensor, sequences, length)
    assert best.placement.size == size or "maxSequences" in str(spec)


def test_the_plan_is_in_the_configuration_document() -> None:
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "serving": {"prefixCaching": "Enabled"}}))
    using = replace(SETTINGS, provisionable=Provisionable(("trn2.3xlarge",)))
    document = config_document(model, LLAMA, choose(model, LLAMA, using, NONE).chosen)
    assert document["parallelism"] == {"tensor": 4}
    assert document["limits"] == {"maxModelLength": 4096, "maxSequences": 16, "blockSize": 32, "numBlocks": 2048}


@pytest.mark.parametrize(
    ("resources", "site", "problem"),
    [
        (
            {"requests": {"memory": "64Gi"}},
            "inf2.8xlarge",
            "its pod requests 68.7 GB of host memory, and a node has 14.8",
        ),
        ({"limits": {"memory": "8Gi"}}, "inf2.xlarge", ""),
        (
            {"requests": {"cpu": "8"}, "limits": {"cpu": "32"}},
            "inf2.8xlarge",
            "its pod requests 8 CPUs, and a node has 4",
        ),
        ({"requests": {"cpu": "3500m"}}, "inf2.xlarge", ""),
        ({"limits": {"cpu": "32"}}, "inf2.24xlarge", "its pod requests 32 CPUs, and a node has 32, of which it keeps"),
    ],
)
def test_a_node_has_the_memory_and_cpus_that_the_manifest_requests(
    resources: dict[str, Any], site: str, problem: str
) -> None:
    types = ("inf2.xlarge", "inf2.8xlarge", "inf2.24xlarge")
    choice = chosen(MODELS["Qwen/Qwen3-0.6B"], types, podTemplate={"spec": {"resources": resources}})
    assert choice.chosen.site.name == site
    assert problem in "; ".join(option.problem for option in choice.others)
    left_out = {option.site.name for option in choice.others}
    assert not left_out & set(choice.instance_types)


@pytest.mark.parametrize(
    "quantity", ["500m", "1", 4, "2.5", ".5", "1k", "8G", "100Mi", "16Gi", "3Ti", "1E", "1E2", "1e3"], ids=str
)
def test_quantities_are_read_as_kubernetes_reads_them(quantity: str | int) -> None:
    assert number_of(quantity) == pytest.approx(float(parse_quantity(quantity)))


def test_of_two_equally_cheap_places_both_are_named() -> None:
    tied = chosen(LLAMA, (), node("inf2.24xlarge", 6), node("inf2.48xlarge", 12))
    assert tied.chosen.words == "1 Neuron device of inf2.24xlarge"
    assert tied.why == "as cheap as 1 Neuron device of inf2.48xlarge"


def attempt(facts: Facts, types: tuple[str, ...], **given: Any) -> Choice | OperatorError:
    try:
        return chosen(facts, types, **given)
    except OperatorError as error:
        return error


def refused(facts: Facts = LLAMA, types: tuple[str, ...] = (), **spec: Any) -> OperatorError:
    with pytest.raises(OperatorError) as caught:
        chosen(facts, types, **spec)
    return caught.value


def test_a_model_that_is_too_large_is_told_the_numbers_and_the_nearest_place() -> None:
    error = refused(LARGE, ("inf2.48xlarge",))
    assert isinstance(error, Unplaceable)
    assert error.reason is Reason.MODEL_TOO_LARGE
    for part in (
        "each of 8 cores would need 21.6 GB",
        "may use 16.3 GB",
        "it would fit on 16 Neuron devices of trn1.32",
    ):
        assert part in str(error)
    wide = refused(LLAMA, ("inf2.24xlarge",), serving={"maxModelLength": 131_072, "maxSequences": 16})
    assert str(wide).endswith(
        "; no 64 nodes of any known type hold it; less would fit on 16 Neuron devices of trn2.48xlarge, with 8 "
        "sequences of 131072 tokens"
    )
    deep = msgspec.structs.replace(LLAMA, num_layers=500, max_position_embeddings=131_072)
    long = refused(deep, ("inf2.24xlarge",), serving={"maxModelLength": 131_072})
    assert re.search(r"; less would fit on .*, with 1 sequence of (16384|32768) tokens$", str(long)), long
    unknown = refused(LLAMA, podTemplate={"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "inf3.xlarge"}}})
    assert str(unknown).endswith(
        "[node.kubernetes.io/instance-type] of a known family (inf2, trn1, trn2, trn3), or name its family in the "
        "chart value devices.families, such as {inf3.xlarge: trn1}"
    )
    huge = refused(msgspec.structs.replace(LARGE, parameters=4 * 10**12, weights_bytes=8 * 10**12), ("trn2.48xlarge",))
    assert str(huge).endswith("; no 64 nodes of any known type hold it")


def test_a_model_that_is_too_large_is_told_where_it_would_fit_with_eight_bits() -> None:
    large = refused(LARGE, ("inf2.48xlarge",), accelerator={"devices": 6})
    cure = (
        "serving.quantization: Int8 would, on 6 Neuron devices of inf2.48xlarge, with 9.1 GB of weights on each core; "
    )
    assert cure in str(large)
    wide = refused(LLAMA, ("inf2.24xlarge",), serving={"maxModelLength": 131_072, "maxSequences": 16})
    assert "quantization" not in str(wide), "the cache alone is too large"
    for spec in ({"serving": {"quantization": "Int8"}}, {"engine": {"backend": "optimum"}}):
        assert "quantization" not in str(refused(LARGE, ("inf2.48xlarge",), accelerator={"devices": 6}, **spec))
    experts = msgspec.structs.replace(LARGE, num_experts=8)
    assert "quantization" not in str(refused(experts, ("inf2.48xlarge",), accelerator={"devices": 6}))


def test_converted_weights_count_by_their_bytes_on_the_cores_and_on_the_host() -> None:
    planned = PlannedConversion(digest="c0" * 32, format="int8", bytes=9_086_705_664)
    converted = msgspec.structs.replace(LLAMA, conversion=planned)
    before, after = chosen(LLAMA, ("inf2.8xlarge",)), chosen(converted, ("inf2.8xlarge",))
    assert after.chosen.tensor == before.chosen.tensor == 2
    extra = 32 * 4096 * 2 * 2  # each core has all norms
    assert after.chosen.memory.weights == -(-planned.bytes // 2) + extra
    assert before.chosen.memory.weights == LLAMA.parameters + extra
    assert after.chosen.host.memory < before.chosen.host.memory
    stored = msgspec.structs.replace(
        LLAMA, weights_bytes=planned.bytes, dtype="int8", quantization="compressed-tensors: int8 per channel"
    )
    assert chosen(stored, ("inf2.8xlarge",)).chosen.memory.weights == after.chosen.memory.weights
    plain = chosen(stored, ("inf2.8xlarge",), serving={"quantization": "None"})
    assert plain.chosen.memory.weights == before.chosen.memory.weights


def packed(billions: int) -> Facts:
    """A model whose weights are stored in a byte each."""
    number = billions * 10**9
    return msgspec.structs.replace(LARGE, parameters=number, weights_bytes=number, dtype="F8_E4M3", num_heads=128)


def test_several_nodes_are_chosen_only_where_fewer_do_not_hold_the_model_and_the_chart_allows_them() -> None:
    choice = chosen(packed(235), ("trn1.32xlarge",), max_nodes=64)
    assert outcome(choice) == (16, "trn1.32xlarge", 64, 16, 4096)
    assert choice.chosen.words == "16 Neuron devices on each of 2 nodes of trn1.32xlarge"
    assert choice.chosen.cost == 2 * INSTANCE_TYPES["trn1.32xlarge"].price
    assert (choice.placement.devices, choice.placement.nodes, choice.chosen.cores) == (16, 2, 64)
    assert chosen(LARGE, ("trn1.32xlarge",), max_nodes=64).placement.nodes == 1
    one = chosen(packed(235), ("trn1.32xlarge", "trn2.48xlarge"), max_nodes=64)
    assert (one.chosen.site.name, one.placement.nodes) == ("trn2.48xlarge", 1)
    among = chosen(packed(235), ("trn1.32xlarge", "trn1n.32xlarge"), max_nodes=2)
    assert "before 16 Neuron devices on each of 2 nodes of trn1n.32xlarge" in among.why


def test_a_model_that_needs_several_nodes_is_told_how_many_and_what_allows_them() -> None:
    error = refused(packed(671), ("trn2.48xlarge",))
    assert isinstance(error, Unplaceable)
    assert error.reason is Reason.MODEL_TOO_LARGE
    for cure in (
        "it would fit on 16 Neuron devices of trn3.48xlarge, with 16 sequences of 4096 tokens, and it would fit on ",
        "16 Neuron devices on each of 2 nodes of trn2.48xlarge, with 16 sequences of 4096 tokens ",
        "(set parallelism.nodes, or the chart value groups.maxNodes, to 2)",
    ):
        assert cure in str(error)
    larger = refused(packed(1000), ("trn2.3xlarge",))
    assert "it would fit on 16 Neuron devices on each of 2 nodes of trn2.48xlarge" in str(larger)
    both = {"max_nodes": 2}, {"parallelism": {"nodes": 2}}
    assert [chosen(packed(671), ("trn2.48xlarge",), **each).placement.nodes for each in both] == [2, 2]


def test_what_the_manifest_says_of_devices_is_said_of_each_node() -> None:
    types = ("inf2.24xlarge", "trn1.32xlarge")
    choice = chosen(LLAMA, types, parallelism={"nodes": 2})
    assert outcome(choice)[:3] == (16, "trn1.32xlarge", 32), "several nodes are whole ones with a network for devices"
    assert outcome(chosen(LLAMA, types, parallelism={"nodes": 2}, accelerator={"devices": 6}))[:2] == (
        6,
        "inf2.24xlarge",
    )
    assert chosen(LLAMA, types, max_nodes=8, accelerator={"devices": 1}).placement.nodes == 1
    with pytest.raises(Unplaceable):
        chosen(packed(235), ("trn1.32xlarge",), max_nodes=64, engine={"backend": "optimum"})
    tensor = refused(LLAMA, ("trn1.32xlarge",), parallelism={"nodes": 2, "tensor": 128})
    assert "128 needs 128 NeuronCores, but 64 are those of 16 Neuron devices on each of 2 nodes, trn1" in str(tensor)


def test_nodes_for_a_group_are_there_if_enough_of_them_are_in_one_domain() -> None:
    def supply(*zones: str) -> Supply:
        nodes = [node("trn1.32xlarge", 16, **{names.ZONE_LABEL: zone}) for zone in zones]
        return chosen(LLAMA, ("trn1.32xlarge",), *nodes, parallelism={"nodes": 2}).chosen.supply

    assert supply("a", "b", "a") is Supply.THERE
    assert supply("a", "b") is Supply.TO_BUY


def test_an_edit_does_not_move_a_group_to_another_number_of_nodes() -> None:
    held = Held("trn1.32xlarge", "trn1", 16, 2)
    model = parse(body({"model": {"uri": "hf://acme/tiny"}}))
    types = Provisionable(("trn1.32xlarge", "trn2.48xlarge"))
    using = replace(SETTINGS, provisionable=types, groups=GroupSettings(max_nodes=2))
    assert choose(model, packed(235), using, NONE, held).placement.nodes == 2
    assert choose(model, packed(235), using, NONE).placement.nodes == 1


def test_a_manifest_that_sets_every_number_is_tried_although_the_estimate_says_no() -> None:
    spec = {"accelerator": {"devices": 4}, "serving": {"maxModelLength": 4096, "maxSequences": 4}}
    choice = chosen(LARGE, ("inf2.24xlarge",), **spec)
    assert outcome(choice) == (4, "inf2.24xlarge", 8, 4, 4096)
    assert choice.why == "more than the estimate allows, but the manifest sets every number"


def test_sizes_and_degrees_that_nothing_grants_are_refused() -> None:
    error = refused(LLAMA, ("trn1.32xlarge",), accelerator={"devices": 6})
    assert isinstance(error, Unplaceable)
    assert error.reason is Reason.TOPOLOGY_IMPOSSIBLE
    assert str(error) == "no node of trn1.32xlarge grants 6 Neuron devices to one pod"
    wrong = refused(LLAMA, ("inf2.8xlarge", "trn2.3xlarge"), parallelism={"tensor": 16})
    assert isinstance(wrong, InvalidSpec)
    assert "16 needs 16 NeuronCores, but 4 are those of 1 Neuron device, trn2" in str(wrong)


SERVING: Mapping[str, st.SearchStrategy[Any]] = {
    "maxModelLength": st.integers(1, 40).map(lambda blocks: 128 * blocks),
    "maxSequences": st.integers(1, 128),
    "blockSize": st.sampled_from([16, 32, 128]),
    "prefixCaching": st.sampled_from(["Auto", "Enabled", "Disabled"]),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
}


@given(
    st.sampled_from(sorted(MODELS)),
    st.sets(st.sampled_from(sorted(INSTANCE_TYPES)), min_size=1).map(lambda types: tuple(sorted(types))),
    st.sampled_from(DEVICE_MODES),
    st.fixed_dictionaries({}, optional=dict(SERVING)),
)
def test_a_plan_never_exceeds_a_core_a_host_or_what_a_node_grants(
    name: str, types: tuple[str, ...], mode: DeviceMode, serving: dict[str, Any]
) -> None:
    facts = MODELS[name]
    choice = attempt(facts, types, mode=mode, serving=serving)
    if isinstance(choice, OperatorError):
        assert len(str(choice)) < 900
        return
    best = choice.chosen
    assert best.memory.fits
    assert best.memory.total <= best.memory.limit < best.logical_core * best.site.family.core_memory
    assert best.host.memory <= INSTANCE_TYPES[best.site.name].host_memory
    assert best.placement.size in legal_sizes(best.site.name, 0, mode, in_cores=False)
    assert facts.num_heads % best.tensor == 0
    assert facts.intermediate_size % best.tensor == 0
    assert best.tensor <= best.cores
    assert best.tensor in best.site.family.degrees
    assert best.load.length == serving.get("maxModelLength", best.load.length)
    assert best.load.sequences == serving.get("maxSequences", best.load.sequences)
    assert len(choice.arithmetic) < 500
    assert all(other.order >= best.order for other in choice.fitting)


COUNTS = [name for name in Facts.__struct_fields__ if name.startswith("num_")]
NUMBERS = st.integers(0, 2**53) | st.integers(0, 300)


@given(st.fixed_dictionaries(dict.fromkeys(COUNTS, NUMBERS)))
def test_no_numbers_of_a_record_make_it_raise_anything_else(numbers: dict[str, int]) -> None:
    facts = msgspec.structs.replace(LLAMA, **numbers)
    made = attempt(facts, ("inf2.8xlarge", "trn2.48xlarge"))
    assert made.chosen.memory.fits if isinstance(made, Choice) else len(str(made)) < 900


def claiming(instance_type: str, devices: int, free: int, **connected: int) -> NodeDevices:
    """A node whose devices pods claim; `s8=1`: one connected set of eight is free."""
    sets = {size: connected.get(f"s{size}", 0) for size in (4, 8, 16)}
    return replace(node(instance_type, devices, free), connected=sets)


def test_devices_that_pods_claim_are_used_where_a_node_gives_them_so() -> None:
    nodes = (node("trn1.32xlarge", 16, 16), claiming("trn1.32xlarge", 16, 16, s4=4, s8=2, s16=1))
    whole = {"accelerator": {"devices": 16}}
    assert chosen(LLAMA, (), *nodes, mode="Auto", **whole).placement.by_claim
    assert not chosen(LLAMA, (), nodes[0], mode="Auto", **whole).placement.by_claim
    assert "no node with known devices" in str(refused_in("DRA", (), nodes[0], **whole))
    both = {"podTemplate": {"spec": {"nodeSelector": {"pool": "plugin"}}}}
    mixed = (replace(nodes[0], labels={**nodes[0].labels, "pool": "plugin"}), nodes[1])
    assert not chosen(LLAMA, (), *mixed, mode="Auto", **both, **whole).placement.by_claim


def test_a_claim_has_connected_devices_or_the_node_has_none_free() -> None:
    apart, together = claiming("trn1.32xlarge", 16, 12), claiming("trn1.32xlarge", 16, 4, s4=1)
    asked = {"accelerator": {"devices": 4}}
    assert chosen(LLAMA, (), apart, mode="DRA", **asked).chosen.supply is Supply.TAKEN
    assert chosen(LLAMA, (), apart, together, mode="DRA", **asked).chosen.supply is Supply.THERE


def test_a_broken_device_of_one_node_takes_no_size_from_the_others() -> None:
    broken, whole = claiming("trn1.32xlarge", 15, 15, s4=3, s8=1), claiming("trn1.32xlarge", 16, 16, s4=4, s8=2, s16=1)
    for nodes in ((broken, whole), (whole, broken)):
        assert chosen(LLAMA, (), *nodes, mode="DRA", accelerator={"devices": 16}).chosen.supply is Supply.THERE
    plain = node("trn1.32xlarge", 15, 15), node("trn1.32xlarge", 16, 16)
    assert chosen(LLAMA, (), *plain, mode="Plugin", accelerator={"devices": 16}).chosen.supply is Supply.THERE


def test_claims_are_planned_neither_for_types_that_an_autoscaler_adds_nor_for_inf2() -> None:
    types = ("trn1.32xlarge",)
    refusal = "no node with known devices is found"
    assert refusal in str(refused_in("DRA", types))
    assert not chosen(LLAMA, types, mode="Auto").placement.by_claim
    named = {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "trn2.48xlarge"}}}}
    assert chosen(LLAMA, (), mode="DRA", **named).placement.by_claim
    inf2 = {"podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "inf2.24xlarge"}}}}
    assert "inf2.24xlarge grants no devices by claims" in str(refused_in("DRA", **inf2))


def test_a_claim_has_whole_devices_of_a_set() -> None:
    whole = claiming("trn1.32xlarge", 16, 16, s4=4, s8=2, s16=1)
    assert "claims (chart value devices.mode: DRA) have whole devices" in str(
        refused_in("DRA", (), whole, accelerator={"cores": 2})
    )
    text = "devices: 2 is not a size that any known instance type grants to one pod; choose one of 1, 4, 8, 16"
    assert text in str(refused_in("DRA", (), whole, accelerator={"devices": 2}))


def refused_in(mode: DeviceMode, types: tuple[str, ...] = (), *nodes: NodeDevices, **spec: Any) -> OperatorError:
    with pytest.raises(OperatorError) as raised:
        chosen(LLAMA, types, *nodes, mode=mode, **spec)
    return raised.value
