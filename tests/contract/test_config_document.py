"""RuntimeConfig between operator and runtime: the runtime's strict parser accepts every rendered document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import FACTS, SETTINGS, SPEC, body
from helpers.optimum import fake_optimum
from neuron_operator.api import names
from neuron_operator.api.engines import ENGINES, own
from neuron_operator.api.errors import FieldNotSupported
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import FOR_TEXT, Claim, ModelSource, ObjectStore, Serving, Target
from neuron_operator.decide.pin import pin
from neuron_operator.decide.steps import MADE_FOR
from neuron_operator.place.catalog import FAMILIES
from neuron_operator.place.planner import choose
from neuron_operator.read.adapters import adapters_in
from neuron_operator.read.records import Facts, PlannedConversion
from neuron_operator.read.world import Place, StorageSettings
from neuron_operator.render import config_document as operator
from neuron_operator.render.adapters import MAX_LISTED, adapter_list
from neuron_operator.render.jobs import (
    compile_jobs,
    convert_job,
    fetch_adapter_job,
    fetch_job,
    resolve_adapter_job,
    resolve_job,
)
from neuron_runtime import config as runtime
from neuron_runtime import core
from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.artifacts.key import compiled_part
from neuron_runtime.artifacts.loading import ARTIFACT_VARIABLE
from neuron_runtime.backend import optimum
from neuron_runtime.backend.neuron.devices import PLATFORM_VARIABLE, PLATFORMS
from neuron_runtime.backend.nxdi import models as nxdi_models
from neuron_runtime.backend.optimum import models as optimum_models
from neuron_runtime.backend.optimum.settings import COMPILE_TARGETS
from neuron_runtime.backend.simulated.options import limits_of, read_options
from neuron_runtime.backend.torch.vector_limits import check_settings
from neuron_runtime.backend.transformers_neuronx import settings as transformers_neuronx
from neuron_runtime.commands.command_line import build_parser
from neuron_runtime.engine.backends import PACKAGES, package_of
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.server.adapter_list import MAX_ENTRIES, ListFile, Wanted
from neuron_runtime.server.exchange import OPEN_PATHS
from neuron_runtime.server.objects import AdapterState, AdapterStates, StateName

KNOWN = msgspec.convert(FACTS, Facts)
ON_TRN2 = {
    "model": SPEC["model"],
    "parallelism": {"tensor": 3},
    "podTemplate": {"spec": {"nodeSelector": {names.INSTANCE_TYPE_LABEL: "trn2.48xlarge"}}},
}
TRN2 = choose(parse(body(ON_TRN2)), KNOWN, SETTINGS, None).chosen
PLACES = {
    "claims": Place(persistent_volume_claim=Claim(claim_name="kept")),
    "stores": Place(object_store=ObjectStore(uri="s3://models/kept")),
}
LIMITS = {
    "maxModelLength": "max_model_length",
    "maxSequences": "max_sequences",
    "blockSize": "block_size",
    "numBlocks": "num_blocks",
    "maxQueuedRequests": "max_queued_requests",
}
SWITCHES = {"prefixCaching": "prefix_caching", "chunkedPrefill": "chunked_prefill"}
SERVING = {
    "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    **dict.fromkeys(LIMITS, st.integers(1, 4096)),
    **dict.fromkeys(SWITCHES, st.sampled_from(["Auto", "Enabled", "Disabled"])),
    "chatTemplate": st.text(st.characters(codec="utf-8"), min_size=1),
    "reasoningParser": st.sampled_from(["deepseek_r1", "qwen3"]),
    "toolCallParser": st.sampled_from(["hermes", "llama3_json", "mistral"]),
    "generationConfig": st.sampled_from(["Enabled", "Disabled"]),
    "accessLog": st.sampled_from(["Enabled", "Disabled"]),
}


def rendered(spec: dict[str, Any]) -> runtime.RuntimeConfig:
    document = operator.config_document(parse(body(spec)), KNOWN)
    return runtime.parse_config(operator.to_json(document).encode())


@given(
    st.fixed_dictionaries({}, optional=SERVING),
    st.integers(0, 600),
    st.integers(0, 7200),
    st.lists(
        st.text(min_size=1, max_size=20).filter(lambda name: not any(c.isspace() for c in name)),
        max_size=3,
        unique=True,
    ),
)
def test_the_runtime_reads_the_document_of_a_manifest(
    serving: dict[str, Any], delay: int, drain: int, served: list[str]
) -> None:
    spec = {
        **SPEC,
        "model": {"uri": "hf://acme/tiny", "servedNames": served},
        "serving": serving,
        "rollout": {"drainDelaySeconds": delay, "drainSeconds": drain},
    }
    config = rendered(spec)
    assert config.model == runtime.ModelSource(uri="hf://acme/tiny", digest=FACTS["digest"])
    assert config.served_names == (tuple(served) or ("chat",))
    assert config.backend == "torch"
    assert config.dtype == serving.get("dtype", "auto")
    assert {key: getattr(config.limits, name) for key, name in LIMITS.items()} == {
        key: serving.get(key, 0) for key in LIMITS
    }
    assert {key: getattr(config, name) for key, name in SWITCHES.items()} == {
        key: serving.get(key, "Auto").lower() for key in SWITCHES
    }
    assert (config.drain.delay_seconds, config.drain.seconds) == (delay, drain)
    assert config.text == runtime.TextOptions(
        generation_config="vllm" if serving.get("generationConfig") == "Disabled" else "auto",
        chat_template=serving.get("chatTemplate", ""),
        reasoning_parser=serving.get("reasoningParser", ""),
        tool_call_parser=serving.get("toolCallParser", ""),
    )
    assert config.server == runtime.ServerOptions(access_log=serving.get("accessLog") != "Disabled")


@given(
    st.fixed_dictionaries({}, optional=SERVING),
    st.sampled_from(["torch", "simulated", "nxdi"]),
    st.integers(0, 600),
)
def test_operator_and_runtime_agree_on_what_a_compiled_artifact_depends_on(
    serving: dict[str, Any], backend: str, delay: int
) -> None:
    engine = {"backend": backend, **({"overrideNeuronConfig": {"stepTimes": None}} if backend == "simulated" else {})}
    on_device = {"contextBuckets": [128, 512], "sampling": "Device"} if backend == "nxdi" else {}
    spec = {**SPEC, "engine": engine, "serving": serving | on_device, "rollout": {"drainDelaySeconds": delay}}
    model = parse(body(spec))
    document = operator.config_document(model, KNOWN, TRN2 if backend == "nxdi" else None)
    part = runtime.parse_config(operator.to_json(operator.compiled_part(document)).encode())
    assert part == compiled_part(runtime.parse_config(operator.to_json(document).encode()))


@pytest.mark.parametrize("backend", PACKAGES)
def test_the_operator_knows_the_drafts_of_a_backend(backend: str) -> None:
    assert {*ENGINES[backend].drafts} == {*package_of(backend).DRAFT_METHODS}
    assert ENGINES[backend].honours("serving.speculation") == bool(ENGINES[backend].drafts)


@pytest.mark.parametrize("backend", PACKAGES)
def test_the_operator_knows_which_backends_compute_vectors(backend: str) -> None:
    assert ENGINES[backend].honours("serving.task") == (package_of(backend).TASKS == core.TASKS)


@pytest.mark.parametrize("task", core.TASKS)
def test_the_runtime_reads_the_task(task: core.Task) -> None:
    spec = {**SPEC, "accelerator": {"type": "CPU"}, "serving": {"task": MADE_FOR[task]}}
    assert rendered(spec).task == task
    assert rendered(SPEC).task == "generate"
    assert MADE_FOR.keys() == {*core.TASKS}
    document = operator.config_document(parse(body(spec)), KNOWN)
    part = runtime.parse_config(operator.to_json(operator.compiled_part(document)).encode())
    assert part == compiled_part(runtime.parse_config(operator.to_json(document).encode()))


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("engine.compile", {"compile": True}),
        ("serving.quantization", {"quantization": "int8"}),
        ("serving.blockSize", {"limits": {"blockSize": 16}}),
        ("serving.numBlocks", {"limits": {"numBlocks": 16}}),
        ("serving.prefixCaching", {"prefixCaching": "enabled"}),
        ("serving.chunkedPrefill", {"chunkedPrefill": "enabled"}),
        ("serving.adapters", {"adapters": {"maxActive": 1}}),
        ("serving.speculation", {"speculation": {"method": "NGram"}}),
        ("parallelism.tensor", {"parallelism": {"tensor": 2}}),
    ],
)
def test_what_the_runtime_refuses_with_another_task_the_operator_refuses_before(
    path: str, document: dict[str, Any]
) -> None:
    head = {"version": 1, "model": {"uri": "hf://acme/tiny"}, "servedNames": ["a"], "backend": "torch", "task": "embed"}
    check_settings(runtime.parse_config(json.dumps(head).encode()))
    with pytest.raises(InvalidConfig, match="must not be set with task 'embed'"):
        check_settings(runtime.parse_config(json.dumps(head | document).encode()))
    assert path in FOR_TEXT


def test_the_runtime_reads_which_model_makes_drafts() -> None:
    drafting = {"method": "Draft", "model": {"uri": "hf://org/small"}}
    spec = {**SPEC, "serving": {"speculation": drafting}}
    facts = msgspec.structs.replace(KNOWN, draft=msgspec.structs.replace(KNOWN, digest="sha256:small"))
    document = operator.config_document(parse(body(spec)), facts)
    read = runtime.parse_config(operator.to_json(document).encode())
    source = runtime.DraftSource(uri="hf://org/small", digest="sha256:small")
    assert read.speculation == runtime.Speculation(method="Draft", model=source)
    assert operator.compiled_part(document)["speculation"]["model"] == drafting["model"] | {"digest": "sha256:small"}
    part = runtime.parse_config(operator.to_json(operator.compiled_part(document)).encode())
    assert part == compiled_part(read)


def test_the_runtime_reads_how_drafts_are_made() -> None:
    drafting = {"method": "NGram", "numTokens": 16, "minMatch": 1, "maxMatch": 32}
    spec = {**SPEC, "serving": {"speculation": drafting}}
    assert rendered(spec).speculation == runtime.Speculation(method="NGram", num_tokens=16, min_match=1, max_match=32)
    assert rendered(SPEC).speculation == runtime.Speculation()
    # Where drafts are found changes no graph, but how many tokens a row feeds may.
    document = operator.config_document(parse(body(spec)), KNOWN)
    assert operator.compiled_part(document)["speculation"] == {"method": "NGram", "numTokens": 16}
    part = runtime.parse_config(operator.to_json(operator.compiled_part(document)).encode())
    assert part == compiled_part(runtime.parse_config(operator.to_json(document).encode()))


def test_the_runtime_reads_what_a_model_holds_of_adapters() -> None:
    held = {"maxActive": 4, "maxRank": 32, "targets": ["q_proj", "v_proj"], "maxLoaded": 8}
    spec = {**SPEC, "serving": {"adapters": held}}
    read = runtime.AdapterOptions(max_active=4, max_rank=32, targets=("q_proj", "v_proj"), max_loaded=8)
    assert rendered(spec).adapters == read
    assert rendered(SPEC).adapters == runtime.AdapterOptions()
    assert get_args(Target) == TARGETS
    # How many are kept in memory changes no graph.
    document = operator.config_document(parse(body(spec)), KNOWN)
    assert operator.compiled_part(document)["adapters"] == {key: held[key] for key in list(held)[:3]}
    part = runtime.parse_config(operator.to_json(operator.compiled_part(document)).encode())
    assert part == compiled_part(runtime.parse_config(operator.to_json(document).encode()))


def test_the_runtime_reads_the_list_of_adapters(tmp_path: Path) -> None:
    assert MAX_LISTED <= MAX_ENTRIES
    file = tmp_path / names.ADAPTERS_KEY
    served = {"model": "chat", "uri": "s3://bucket/sql", "key": "k", "digest": "d" * 64, "sourceDigest": "c" * 40}
    listed = {"metadata": {"name": "sql"}, "spec": {"model": "chat"}, "status": {"served": served}}
    for adapters in ([], [listed]):
        file.write_text(adapter_list(parse(body()), adapters)["data"][names.ADAPTERS_KEY])
        wanted = Wanted("sql", "s3://bucket/sql", "d" * 64, "c" * 40)
        assert ListFile(file).changed() == {one.name: one for one in (wanted,) if adapters}


def test_the_operator_reads_what_a_replica_tells_of_its_adapters() -> None:
    state = AdapterState(name="sql", digest="d", state="Failed", reason="StorageFull", message="full", rank=8, bytes=9)
    told = msgspec.json.encode(AdapterStates(max_active=4, max_rank=16, adapters=[state])).decode()
    (read,) = (adapters_in(told) or {}).values()
    assert msgspec.to_builtins(read).items() <= msgspec.to_builtins(state).items()
    assert set(get_args(StateName)) >= {"Ready", "Failed"}


def test_the_runtime_parses_the_command_of_a_replica_with_adapters() -> None:
    model = parse(body({**SPEC, "serving": {"adapters": {"maxActive": 4}}}))
    pinned = pin(model, KNOWN, SETTINGS, 1).pinned
    serve = build_parser().parse_args(command_of(pinned.template))
    assert serve.adapters_file.as_posix() == f"{names.ADAPTERS_DIR}/{names.ADAPTERS_KEY}"
    assert names.ADAPTERS_PATH in OPEN_PATHS  # the operator has no API key


@pytest.mark.parametrize("claim", [None, PLACES["claims"]])
def test_the_runtime_parses_the_commands_that_check_and_fetch_an_adapter(claim: Place | None) -> None:
    base = parse(body({**SPEC, "serving": {"adapters": {"maxActive": 4, "maxRank": 32, "targets": ["q_proj"]}}}))
    source = ModelSource(uri="s3://bucket/sql")
    adapter = replace(base, kind=names.ADAPTER_KIND, spec=msgspec.structs.replace(base.spec, model=source))
    job = resolve_adapter_job(adapter, base, "m" * 40, SETTINGS, claim)
    inspect = build_parser().parse_args(command_of(job["spec"]["template"]))
    folder = f"file://{names.WEIGHTS_DIR}/{'m' * 40}"
    assert (inspect.uri, inspect.adapter_of) == ("s3://bucket/sql", folder if claim else "hf://acme/tiny")
    assert (inspect.backend, inspect.max_rank, inspect.targets) == (base.spec.backend, 32, ("q_proj",))
    if claim is not None:
        job = fetch_adapter_job(adapter, SETTINGS, claim, "c" * 40)
        fetch = build_parser().parse_args(command_of(job["spec"]["template"]))
        assert (fetch.uri, fetch.store, fetch.digest) == ("s3://bucket/sql", names.WEIGHTS_DIR, "c" * 40)
        assert fetch.adapter


def test_the_document_tells_a_compiler_without_devices_what_it_compiles_for() -> None:
    serving = {"contextBuckets": [128, 512], "tokenGenerationBuckets": [512], "sampling": "DeviceWithLogits"}
    model = parse(body({**SPEC, "engine": {"backend": "nxdi"}, "serving": serving}))
    document = operator.config_document(model, KNOWN, TRN2)
    config = runtime.parse_config(operator.to_json(document).encode())
    assert (config.backend, config.compile, config.sampling) == ("nxdi", True, "DeviceWithLogits")
    assert (config.parallelism.tensor, config.accelerator.logical_neuron_core) == (3, 2)
    assert config.buckets == runtime.Buckets(context=(128, 512), token_generation=(512,))
    assert config.accelerator.cores == 0  # those that a pod is granted are counted in the pod


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("serving", {name: 8}) for name in ("blockSize", "numBlocks")),
        *(("serving", {name: "Enabled"}) for name in ("prefixCaching", "chunkedPrefill")),
        ("engine", {"applicationClass": "llama"}),
        ("parallelism", {"nodes": 2}),
        ("accelerator", {"type": "Neuron", "logicalNeuronCore": 2}),
    ],
)
def test_the_operator_refuses_what_transformers_neuronx_lacks_before_the_runtime_does(
    path: str, value: dict[str, Any]
) -> None:
    serving = {"contextBuckets": [128, 512], "tokenGenerationBuckets": [512], "sampling": "Host"}
    accepted: dict[str, Any] = {
        **SPEC,
        "accelerator": {"type": "Neuron"},
        "engine": {"backend": "transformers-neuronx", "overrideNeuronConfig": {"shard_over_sequence": True}},
        "serving": {**serving, "prefixCaching": "Disabled"},
    }
    document = operator.config_document(parse(body(accepted)), KNOWN, TRN2)
    config = runtime.parse_config(operator.to_json(document).encode())
    transformers_neuronx.check_document(config)
    assert (config.backend, config.compile, config.sampling) == ("transformers-neuronx", True, "Host")
    with pytest.raises(FieldNotSupported, match=f"spec.{path}.{list(value)[-1]}"):
        parse(body({**accepted, path: {**accepted.get(path, {}), **value}}))


def test_the_operator_knows_on_which_devices_a_backend_runs_and_where_it_samples() -> None:
    assert ENGINES["optimum"].devices("", (), {}).families == tuple(COMPILE_TARGETS)
    assert ENGINES["transformers-neuronx"].devices("", (), {}).families == transformers_neuronx.PLATFORMS
    # Qwen and Mixtral on the host, others on the device.
    assert not operator.sampling_mode(parse(body({**SPEC, "engine": {"backend": "optimum"}})))


@pytest.mark.parametrize(
    ("backend", "known"),
    [
        ("nxdi", nxdi_models.BY_ARCHITECTURE),
        ("optimum", optimum_models.BY_ARCHITECTURE),
        ("transformers-neuronx", transformers_neuronx.FAMILIES),
    ],
)
def test_the_operator_knows_the_architectures_of_a_backend(backend: str, known: dict[str, object]) -> None:
    assert ENGINES[backend].architectures == known.keys()


def test_the_operator_refuses_what_optimum_neuron_lacks_before_the_runtime_does() -> None:
    accepted: dict[str, Any] = {
        **SPEC,
        "accelerator": {"type": "Neuron"},
        "engine": {"backend": "optimum", "overrideNeuronConfig": {"max_topk": 64}},
        "serving": {"sampling": "Host", "chunkedPrefill": "Enabled", "prefixCaching": "Disabled"},
    }
    config = runtime.parse_config(
        operator.to_json(operator.config_document(parse(body(accepted)), KNOWN, TRN2)).encode()
    )
    with fake_optimum():
        optimum.check_config(config)
    assert (config.backend, config.compile, config.sampling) == ("optimum", True, "Host")
    assert config.chunked_prefill == "enabled"
    for part, value in (
        ("serving", {"blockSize": 8}),
        ("serving", {"prefixCaching": "Enabled"}),
        ("serving", {"contextBuckets": [128]}),
        ("engine", {"applicationClass": "llama"}),
        ("parallelism", {"nodes": 2}),
    ):
        with pytest.raises(FieldNotSupported, match=f"spec.{part}.{list(value)[-1]}"):
            parse(body({**accepted, part: {**accepted.get(part, {}), **value}}))


def test_operator_and_runtime_know_the_same_devices() -> None:
    assert {name: (one.physical_cores, one.logical_core) for name, one in FAMILIES.items()} == {
        name: (one.physical_cores, one.logical_core) for name, one in PLATFORMS.items()
    }
    assert names.PLATFORM_VARIABLE == PLATFORM_VARIABLE
    assert names.ARTIFACT_VARIABLE == ARTIFACT_VARIABLE


def test_models_that_differ_in_names_and_http_share_an_artifact() -> None:
    alike = {"servedNames": ["other"], "text": {"chatTemplate": "{{ messages }}"}, "server": {"accessLog": False}}
    document = operator.config_document(parse(body()), KNOWN)
    assert operator.compiled_part({**document, **alike}) == operator.compiled_part(document)
    assert operator.compiled_part({**document, "dtype": "float32"}) != operator.compiled_part(document)


def test_the_class_that_runs_a_private_architecture_reaches_inspection_and_document() -> None:
    spec = {**SPEC, "engine": {"backend": "nxdi", "applicationClass": "ours.serving:OursForCausalLM"}}
    options = build_parser().parse_args(command_of(resolve_job(parse(body(spec)), SETTINGS)["spec"]["template"]))
    assert options.application_class == rendered(spec).application_class == "ours.serving:OursForCausalLM"


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("optimum", "optimum"),
        ("nxdi", "nxdi"),
        ("torch", ""),
        ("simulated", ""),
        ("transformers-neuronx", "transformers-neuronx"),
    ],
)
def test_inspection_is_told_the_engine_if_that_asks_for_graphs_converts_weights_or_refuses_most_models(
    backend: str, told: str
) -> None:
    spec = {**SPEC, "accelerator": {"type": "Neuron"}, "engine": {"backend": backend}}
    options = build_parser().parse_args(command_of(resolve_job(parse(body(spec)), SETTINGS)["spec"]["template"]))
    assert (options.backend, options.quantization) == (told, "auto")


def test_inspection_is_not_told_an_engine_while_that_is_open() -> None:
    """Another one than the default may have the model's architecture."""
    using = replace(SETTINGS, engine_defaults={"trn2": "vllm"})
    spec: dict[str, Any] = {**SPEC, "accelerator": {"type": "Neuron"}, "engine": {}}
    model = parse(body(spec), has_defaults=True)
    assert build_parser().parse_args(command_of(resolve_job(model, using)["spec"]["template"])).backend == ""


@pytest.mark.parametrize(
    ("sampling", "written", "mode"),
    [
        (None, {}, "Device"),
        ("Host", {}, "Host"),
        ("DeviceWithLogits", {"stepMilliseconds": 5}, "DeviceWithLogits"),
        ("Device", {"stepTimes": None}, "Device"),
    ],
)
def test_the_document_carries_times_and_sampling_of_a_simulated_device(
    sampling: str | None, written: dict[str, Any], mode: str
) -> None:
    engine = {"backend": "simulated", "overrideNeuronConfig": written}
    model = parse(body({**SPEC, "engine": engine, "serving": {"sampling": sampling}}))
    config = rendered({**SPEC, "engine": engine, "serving": {"sampling": sampling}})
    options = read_options(config.override_neuron_config)
    assert config.backend == "simulated"
    assert config.sampling == (sampling or "")
    limits = limits_of(config, options, vocabulary_size=9, longest=1000)
    assert (limits.sampling, operator.sampling_mode(model)) == (mode, mode)
    assert options.step_milliseconds == written.get("stepMilliseconds")


def test_the_document_and_the_pod_template_contain_only_json_values() -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "matchLabelKeys": ["a"]}
    spec = {
        **SPEC,
        "model": {"uri": "hf://acme/tiny", "servedNames": ["a", "b"]},
        "podTemplate": {"spec": {"topologySpreadConstraints": [spread], "tolerations": [{"operator": "Exists"}]}},
    }
    pinned = pin(parse(body(spec)), KNOWN, SETTINGS, 1).pinned
    for part in (pinned.config, pinned.template):
        assert json.loads(json.dumps(part)) == part
    assert pinned.template["spec"]["topologySpreadConstraints"] == [spread]


def test_operator_and_runtime_use_the_same_document_version() -> None:
    assert operator.VERSION == runtime.CONFIG_VERSION


def test_unpinned_settings_are_left_to_the_runtime() -> None:
    config = rendered(SPEC)
    assert config.limits == runtime.EngineLimits()
    assert config.text == runtime.TextOptions()
    assert config.server == runtime.ServerOptions()


def schema_of(kind: type, field: str) -> dict[str, Any]:
    """The allowed values of a field, without null."""
    (top,), parts = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = parts[top["$ref"].rpartition("/")[2]]["properties"][field]
    return next((option for option in schema.get("anyOf", []) if option.get("type") != "null"), schema)


def test_choices_and_bounds_of_the_manifest_match_the_runtime() -> None:
    assert set(LIMITS) <= set(runtime.EngineLimits.__struct_encode_fields__)
    assert schema_of(Serving, "dtype")["enum"] == schema_of(runtime.RuntimeConfig, "dtype")["enum"]
    for parser in ("reasoningParser", "toolCallParser"):
        assert ["", *schema_of(Serving, parser)["enum"]] == schema_of(runtime.TextOptions, parser)["enum"]


COMPILED = {"backend": "torch", "compile": "Enabled"}


def command_of(template: dict[str, Any]) -> list[str]:
    (container,) = template["spec"]["containers"]
    return list(container["command"][1:])


@pytest.mark.parametrize("place", PLACES)
def test_the_runtime_parses_the_commands_that_fetch_and_read_stored_weights(place: str) -> None:
    using = replace(SETTINGS, storage=StorageSettings(weights=PLACES[place]))
    model = parse(body({**SPEC, "model": {"uri": "hf://acme/tiny"}}))
    pinned = pin(model, KNOWN, using, 1)
    assert pinned.pinned.weights is not None
    job = fetch_job(model, using, pinned.pinned.weights, KNOWN, pinned.image)
    fetch = build_parser().parse_args(command_of(job["spec"]["template"]))
    store = PLACES[place].object_store
    assert (fetch.uri, fetch.digest) == ("hf://acme/tiny", KNOWN.digest)
    assert fetch.store == (store.uri if store else names.WEIGHTS_DIR)
    serve = build_parser().parse_args(command_of(pinned.pinned.template))
    assert serve.weights_dir.as_posix() == names.WEIGHTS_DIR
    assert serve.weights_store == (store.uri if store else "")
    assert serve.on_weights_miss == "fail"


@pytest.mark.parametrize("place", PLACES)
def test_the_runtime_parses_the_command_that_converts_weights(place: str) -> None:
    using = replace(SETTINGS, storage=StorageSettings(weights=PLACES[place]))
    spec = {**SPEC, "model": {"uri": "hf://acme/tiny"}, "engine": {"backend": "torch"}}
    model = parse(body({**spec, "serving": {"quantization": "Int8"}}))
    planned = PlannedConversion(digest="c0" * 32, format="int8", bytes=10**9)
    facts = msgspec.structs.replace(KNOWN, conversion=planned)
    revision = pin(model, facts, using, 1)
    (job, *_) = convert_job(model, using, revision)
    convert = build_parser().parse_args(command_of(job["spec"]["template"]))
    store = PLACES[place].object_store
    assert convert.run.__module__.endswith("convert")
    assert (convert.uri, convert.digest) == ("hf://acme/tiny", KNOWN.digest)
    assert (convert.backend, convert.quantization, convert.converted) == ("torch", "int8", planned.digest)
    assert convert.store == (store.uri if store else names.WEIGHTS_DIR)
    document = operator.config_document(replace(model, reads_converted=True), facts)
    parsed = runtime.parse_config(operator.to_json(document).encode())
    assert compiled_part(parsed) == runtime.parse_config(operator.to_json(operator.compiled_part(document)).encode())
    assert (parsed.model.converted, parsed.quantization) == (planned.digest, "int8")


@pytest.mark.parametrize("arguments", [(), own.API_KEYS])
def test_the_runtime_parses_the_rendered_command_of_a_replica(arguments: tuple[str, ...]) -> None:
    parsed = build_parser().parse_args((*own.SERVE[1:], *arguments))
    assert parsed.record.as_posix() == names.TERMINATION_LOG


@pytest.mark.parametrize("artifacts", PLACES)
@pytest.mark.parametrize("weights", [None, *PLACES])
def test_the_runtime_parses_the_rendered_commands_of_a_compiled_model(weights: str | None, artifacts: str) -> None:
    places = StorageSettings(PLACES[weights] if weights else Place(), PLACES[artifacts])
    using, model = replace(SETTINGS, storage=places), parse(body({**SPEC, "engine": COMPILED}))
    revision = pin(model, KNOWN, using, 1)
    (job, *_) = compile_jobs(model, using, revision)
    for template in (revision.pinned.template, job["spec"]["template"], resolve_job(model, using)["spec"]["template"]):
        parsed = build_parser().parse_args(command_of(template))
        assert parsed.record.as_posix() == names.TERMINATION_LOG
    assert parsed.run.__module__.endswith("inspect")
