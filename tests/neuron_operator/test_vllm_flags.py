"""vLLM's command line by version: what fields become, what is refused, and what lines of its log mean."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.rig.image_vllm import PINS
from cluster.rig.needs import NotPossibleHere
from helpers import vllm_cpu
from helpers.answers import answer
from neuron_operator.api.engines.engine import Served
from neuron_operator.api.engines.vllm_flags import (
    CACHE_SHARE_VARIABLE,
    FLAGS,
    FORBIDDEN,
    LEAST_CACHE_VARIABLE,
    LOG_REASONS,
    OF_HTTP,
    SEGMENTS,
    SET_BY_FIELDS,
    STRUCTURED,
    VERSIONS,
    followed,
    refusals,
    served,
)
from neuron_operator.api.fields import fields_of, walk
from neuron_operator.api.model import ModelSource, Serving, Spec
from neuron_operator.api.names import LEADER_VARIABLE, RANK_VARIABLE
from neuron_operator.api.reasons import Reason
from neuron_operator.local.pods import expanded

Document = dict[str, Any]

LITE = ("0.24", "0.29")
ON_DEVICES = ("0.16", *LITE)
PARSERS = ("deepseek_r1", "qwen3"), ("deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "pythonic")


def document(**parts: Any) -> Document:
    limits = {"maxModelLength": 4096, "maxSequences": 8}
    drain = {"delaySeconds": 10, "seconds": 300}
    base = {
        "servedNames": ["chat"],
        "dtype": "bfloat16",
        "limits": limits,
        "parallelism": {"tensor": 8},
        "drain": drain,
    }
    return base | parts | {"limits": limits | parts.get("limits", {})}


def serve(of: Document, version: str, **others: Any) -> Served:
    return served(of, version=version, model_dir="/models/m", port=8000, **others)


def flags(of: Document, version: str) -> dict[str, str]:
    """Flags and values of a command; of a switch an empty text."""
    words = serve(of, version).command[3:]
    return dict(word.partition("=")[::2] for word in words if word.startswith("--"))


def settings(of: Document, version: str) -> dict[str, Any]:
    """Those of the plugin."""
    given = json.loads(flags(of, version).get("--additional-config", "{}"))
    assert given.keys() <= {VERSIONS[version].settings}
    found: dict[str, Any] = given.get(VERSIONS[version].settings, {})
    return found


def refused(of: Document, version: str, **others: Any) -> dict[str, str]:
    return dict(refusals(of, version=version, **others))


# Commands


EXPECTED = {
    "0.16": (
        "vllm serve /models/m --port=8000 --served-model-name chat --dtype=bfloat16 --max-model-len=4096 "
        "--max-num-seqs=8 --num-gpu-blocks-override=8 --tensor-parallel-size=8 --no-enable-prefix-caching "
        "--host=:: --allowed-origins=[] --disable-access-log-for-endpoints=/health,/metrics,/v1/models"
    ),
    "0.24": (
        "vllm serve /models/m --port=8000 --served-model-name chat --dtype=bfloat16 --max-model-len=4096 "
        "--max-num-seqs=8 --max-num-batched-tokens=2048 --block-size=32 --num-gpu-blocks-override=1025 "
        "--tensor-parallel-size=8 --enable-prefix-caching --shutdown-timeout=330 "
        '--additional-config={"neuron_config":{"enable_structured_outputs":true,"kv_segment_size_buckets":[2048],'
        '"num_batched_tokens_buckets":[2048],"on_device_sampling_config":{"all_greedy":false}}} '
        "--no-async-scheduling --gpu-memory-utilization=0.9 "
        "--host=:: --allowed-origins=[] --disable-access-log-for-endpoints=/health,/metrics,/v1/models"
    ),
    "cpu": (
        "vllm serve /models/m --port=8000 --served-model-name chat --dtype=bfloat16 --max-model-len=4096 "
        "--max-num-seqs=8 --tensor-parallel-size=8 --shutdown-timeout=330 "
        "--host=:: --allowed-origins=[] --disable-access-log-for-endpoints=/health,/metrics,/v1/models"
    ),
}


@pytest.mark.parametrize(("version", "expected"), [*EXPECTED.items(), ("0.29", EXPECTED["0.24"])])
def test_a_command_has_the_fields_in_the_words_of_its_version(version: str, expected: str) -> None:
    assert " ".join(serve(document(), version).command) == expected
    assert refused(document(), version) == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_arguments_of_the_manifest_come_last_as_they_are(version: str) -> None:
    args = ("--seed", "-1", "--otlp-traces-endpoint=http://x", "--limit-mm-per-prompt.image", "3")
    assert refused(document(), version, args=args) == {}
    assert serve(document(), version, args=args).command[-len(args) :] == args


@pytest.mark.parametrize("version", ["0.24", "0.29", "cpu"])
def test_the_nodes_of_a_group_run_the_same_command_and_followers_answer_nobody(version: str) -> None:
    alone, leading = (serve(document(), version, nodes=nodes, args=("--seed=3",)).command for nodes in (1, 2))
    meeting = ("--nnodes=2", "--node-rank=$(NEURON_SERVING_RANK)", "--master-addr=$(NEURON_SERVING_LEADER)")
    assert leading == (*alone[:-1], *meeting, "--master-port=8010", "--seed=3")
    assert followed(leading).command == (*leading, "--headless")
    assert refused(document(), version, nodes=2) == {}
    assert refused(document(), version, args=["--node-rank=1"]).keys() == {"engine.args[0]"}


def test_a_version_whose_plugin_computes_on_one_node_has_no_groups() -> None:
    assert refused(document(), "0.16", nodes=2).keys() == {"parallelism.nodes"}


def test_a_follower_waits_while_it_is_connected_to_the_leader_and_no_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = leader.getsockname()[1]
        command = (*followed(()).stop_command[:3], str(port), "9", "1")
        assert subprocess.run(command, check=False, timeout=60).returncode == 0, "nobody is connected"
        with socket.create_connection(leader.getsockname()), leader.accept()[0] as joined:
            waiting = subprocess.Popen(command)
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(2)
            joined.close()
            assert waiting.wait(60) == 0


def test_a_follower_does_not_wait_for_a_leader_on_a_lost_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader, socket.socket() as silent, contextlib.ExitStack() as stack:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):  # with its queue full it answers as a lost node does
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(silent.getsockname())
        ports = (str(one.getsockname()[1]) for one in (leader, silent))
        with socket.create_connection(leader.getsockname()), leader.accept()[0]:
            command = (*followed(()).stop_command[:3], *ports, "0.5")
            assert subprocess.run(command, check=False, timeout=30).returncode == 0


def test_a_chat_template_and_parsers_are_passed_as_written() -> None:
    template = "{%- for m in messages -%}\n-- <｜User｜>{{ m.content }}\\n{% endfor %}"
    text = {
        "chatTemplate": template,
        "toolCallParser": "hermes",
        "reasoningParser": "qwen3",
        "generationConfig": "vllm",
    }
    given = flags(document(text=text, server={"accessLog": False}), "0.29")
    assert given["--chat-template"] == template
    assert (given["--tool-call-parser"], given["--reasoning-parser"]) == ("hermes", "qwen3")
    assert given["--generation-config"] == "vllm"
    assert {"--enable-auto-tool-choice", "--disable-uvicorn-access-log"} <= given.keys()


def test_kubelets_leave_a_chat_template_as_it_is_written() -> None:
    template = "Write formulas as $$x$$, for $5, in $(NEURON_SERVING_RANK) and $(HOME)."
    command = serve(document(text={"chatTemplate": template}), "0.29", nodes=2, args=("--seed=$(SEED)",)).command
    variables = {"NEURON_SERVING_RANK": "1", "HOME": "/root", "SEED": "3"}
    replaced = [expanded(word, variables) for word in command]
    assert {f"--chat-template={template}", "--node-rank=1", "--seed=3"} <= {*replaced}


def test_the_queue_counts_running_requests_too_and_early_versions_have_none() -> None:
    queued = document(limits={"maxQueuedRequests": 50})
    assert flags(queued, "0.29")["--max-num-queued-reqs"] == "58"
    assert "--max-num-queued-reqs" not in flags(queued, "0.24")
    assert "serving.maxQueuedRequests" in refused(queued, "0.24")


def test_tokens_are_sampled_where_the_field_says() -> None:
    on_host = document(sampling="Host")
    assert settings(on_host, "0.16") == {"on_device_sampling_config": None}
    assert settings(on_host, "0.29")["on_device_sampling_config"] is None
    assert settings(on_host, "0.29")["enable_structured_outputs"]
    assert "--no-async-scheduling" in flags(on_host, "0.29"), "it needs tokens that stay on the device"
    assert settings(document(sampling="Device"), "0.29") == settings(document(), "0.29")
    assert "serving.sampling" in refused(document(sampling="DeviceWithLogits"), "0.29")


def test_buckets_have_the_names_of_the_version() -> None:
    buckets = {"context": [1024, 4096], "tokenGeneration": [1024, 2048, 4096]}
    bucketed = document(buckets=buckets, prefixCaching="disabled")
    assert settings(bucketed, "0.16") == {
        "context_encoding_buckets": [1024, 4096],
        "token_generation_buckets": [1024, 2048, 4096],
    }
    given = settings(bucketed, "0.24")
    assert given["num_batched_tokens_buckets"] == [1024, 4096]
    assert given["decode_context_length_buckets"] == [1024, 2048], "the graph of the full length is always there"
    assert "kv_segment_size_buckets" not in given
    assert flags(bucketed, "0.24")["--max-num-batched-tokens"] == "4096"


def test_blocks_are_a_whole_sequence_in_nxdi_without_prefix_caching() -> None:
    assert "--block-size" not in flags(document(), "0.16")
    shared = flags(document(limits={"blockSize": 64}), "0.16")
    assert (shared["--block-size"], shared["--num-gpu-blocks-override"]) == ("64", "512")
    assert "--enable-prefix-caching" in shared


@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_has_one_block_more_than_sequences_use(version: str) -> None:
    """It keeps one empty; the plugin with NxD Inference adds that itself."""
    counted = document(limits={"blockSize": 32, "maxSequences": 1})
    given = document(limits={**counted["limits"], "numBlocks": 128})
    for of in (counted, given) if VERSIONS[version].settings else (given,):
        assert flags(of, version)["--num-gpu-blocks-override"] == ("128" if version == "0.16" else "129")


def test_on_a_cpu_the_cache_has_a_size_unless_the_manifest_gives_a_share_of_memory() -> None:
    size = "--kv-cache-memory-bytes=500"
    assert size in serve(document(parallelism={"tensor": 2}), "cpu", cache_bytes=1000).command
    assert not [word for word in serve(document(), "0.29", cache_bytes=1000).command if "cache-memory" in word]
    share = ("--gpu-memory-util=0.4",)
    assert [word for word in serve(document(), "cpu", cache_bytes=1, args=share).command if "memory" in word] == [
        *share
    ]


def test_without_a_length_a_cpu_takes_what_the_cache_has_room_for() -> None:
    given = flags(document() | {"limits": {}}, "cpu")
    assert given["--max-model-len"] == "auto"


def test_on_a_cpu_the_number_of_blocks_follows_from_the_size_of_the_cache_unless_the_manifest_sets_it() -> None:
    """vLLM allocates as many as it is told, whatever the size."""
    for limits in ({}, {"maxModelLength": 1024, "maxSequences": 8, "blockSize": 32}):
        assert "--num-gpu-blocks-override" not in flags(document() | {"limits": limits}, "cpu")


def test_variables_are_those_of_the_version() -> None:
    cores = document(accelerator={"logicalNeuronCore": 2})
    variables = {version: serve(cores, version, family="trn2").env for version in VERSIONS}
    variables["0.24"] = serve(cores, "0.24", family="trn2", compiled_dir="/kept").env
    for version in ON_DEVICES:
        assert variables[version]["NEURON_PLATFORM_TARGET_OVERRIDE"] == "trn2"
        assert variables[version]["NEURON_LOGICAL_NC_CONFIG"] == "2"
        assert serve(cores, version).working_dir == "/tmp", "compilers leave files where they start"
    assert variables["0.16"]["NEURON_COMPILED_ARTIFACTS"].startswith("/tmp/"), "or else in the model's folder"
    assert not [name for name in variables["cpu"] if "NEURON" in name]
    assert not [name for name in variables["0.29"] if name.startswith("NEURON_LIBTORCH_")]
    assert variables["0.29"]["VLLM_NEURON_BACKEND"] == "neuron_native"
    assert variables["0.24"]["NEURON_LIBTORCH_REMOTE_CACHE"] == "/kept"
    assert variables["0.24"]["NEURON_LIBTORCH_ASSERT_CACHE_HIT"] == "1"
    for version in LITE:
        assert variables[version]["NKI_COMPILE_CACHE_URL"].startswith("/tmp/")
        assert "NEURON_LIBTORCH_ASSERT_CACHE_HIT" not in serve(cores, version).env, "nothing compiled it"
        assert variables[version]["VLLM_CACHE_ROOT"].startswith("/tmp/")


# Properties


SIZES = st.sampled_from((64, 128, 256, 384, 512, 1024, 2048, 4096, 8192, 32768))
BUCKETS = st.lists(SIZES, min_size=1, max_size=4, unique=True).map(sorted)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    limits = {"maxModelLength": draw(SIZES), "maxSequences": draw(st.integers(1, 64))}
    optional = {"blockSize": st.sampled_from((16, 32, 48, 128)), "numBlocks": st.integers(1, 9000)}
    limits |= draw(st.fixed_dictionaries({}, optional=optional))
    parts: Document = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "buckets": st.fixed_dictionaries({}, optional={"context": BUCKETS, "tokenGeneration": BUCKETS}),
                "sampling": st.sampled_from(("Device", "Host", "DeviceWithLogits")),
                "parallelism": st.fixed_dictionaries({"tensor": st.integers(1, 64)}),
                "prefixCaching": st.sampled_from(("enabled", "disabled")),
                "chunkedPrefill": st.sampled_from(("enabled", "disabled")),
            },
        )
    )
    return document(**parts) | {"limits": limits}


@given(documents(), st.sampled_from(tuple(VERSIONS)))
def test_each_flag_occurs_once_and_is_one_of_the_version(given: Document, version: str) -> None:
    words = [word.partition("=")[0] for word in serve(given, version).command[3:] if word.startswith("--")]
    names = [f"--{word.removeprefix('--').removeprefix('no-')}" for word in words]
    assert len(names) == len({*names})
    assert {*names} <= {"--port", *(flag.name for flag in FLAGS)} - VERSIONS[version].lacks


@given(documents(), st.sampled_from(ON_DEVICES))
def test_the_number_of_blocks_is_always_pinned_on_devices(given: Document, version: str) -> None:
    assert int(flags(given, version)["--num-gpu-blocks-override"]) > 0


@given(documents(), st.sampled_from(LITE))
def test_what_is_not_refused_passes_the_checks_of_the_plugin(given: Document, version: str) -> None:
    """The checks as the plugin's source has them."""
    if refused(given, version):
        return
    line, own = flags(given, version), settings(given, version)
    length, step = int(line["--max-model-len"]), int(line["--max-num-batched-tokens"])
    tensor = int(line["--tensor-parallel-size"])
    assert tensor & (tensor - 1) == 0
    prefill, segments = own.get("num_batched_tokens_buckets"), own.get("kv_segment_size_buckets")
    if prefill:
        assert prefill == sorted({*prefill})
        assert prefill[-1] == min(step, length)
    if segments:
        assert len(segments) == 1
        assert segments[0] in SEGMENTS
        assert segments[0] % int(line["--block-size"]) == 0
        assert prefill == segments
    else:
        assert step >= length
        assert length <= 16384
        assert "--no-enable-prefix-caching" in line
    for size in own.get("decode_context_length_buckets", ()):
        assert size < length
        assert size % 128 == 0
    if own["on_device_sampling_config"] is None or own["enable_structured_outputs"]:
        assert "--no-async-scheduling" in line


@given(documents())
def test_what_is_not_refused_passes_the_checks_of_nxdi(given: Document) -> None:
    if refused(given, "0.16"):
        return
    line = flags(given, "0.16")
    length, sequences = int(line["--max-model-len"]), int(line["--max-num-seqs"])
    block_size = int(line.get("--block-size", length))
    assert int(line["--num-gpu-blocks-override"]) >= -(-length // block_size) * sequences
    assert ("--block-size" in line) == ("--enable-prefix-caching" in line)
    for sizes in settings(given, "0.16").values():
        assert not isinstance(sizes, list) or sizes[-1] == length


@given(documents(), st.sampled_from(tuple(VERSIONS)))
def test_refusals_need_no_plan(given: Document, version: str) -> None:
    for path, cure in refusals(given | {"limits": {}}, version=version):
        assert path
        assert cure


# Refusals


def spellings(flag: str) -> Iterator[str]:
    yield flag
    yield f"{flag}=1"
    yield flag.replace("-", "_").replace("__", "--", 1)
    yield f"--no-{flag[2:]}"
    yield f"{flag}.key=1"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.field and not flag.unless], ids=lambda flag: flag.name)
def test_an_argument_that_a_field_decides_is_refused_however_it_is_spelled(flag: Any, version: str) -> None:
    for word in (*spellings(flag.name), *filter(None, [flag.short])):
        found = refused(document(), version, args=("--seed", "1", word))
        assert flag.field in found.get("engine.args[2]", ""), word


def test_a_short_argument_with_its_value_attached_is_refused() -> None:
    for word, cure in (("-n2", "nodes"), ("-n=2", "nodes"), ("-r1", "nodes"), ("-dpb=ray", "a replica is one engine")):
        assert cure in refused(document(), "cpu", args=[word])["engine.args[0]"], word
    assert "quantization" in refused(document(), "0.29", args=["-qawq"])["engine.args[0]"]
    assert refused(document(), "cpu", args=["-qawq", "-O3", "-sc={}", "-asc=2"]) == {}


def test_an_abbreviated_argument_is_refused() -> None:
    assert "serving.maxModelLength" in refused(document(), "cpu", args=["--max-model=5"])["engine.args[0]"]


def test_a_parser_that_no_field_has_is_an_argument_unless_the_field_is_set() -> None:
    args = ("--tool-call-parser=kimi_k2", "--enable-auto-tool-choice")
    assert refused(document(), "0.29", args=args) == {}
    assert refused(document(text={"toolCallParser": "hermes"}), "0.29", args=args).keys() == {
        "engine.args[0]",
        "engine.args[1]",
    }


@pytest.mark.parametrize("one", FORBIDDEN, ids=lambda one: one.flags[0])
def test_what_a_version_lacks_is_refused_there_by_name(one: Any) -> None:
    for version in VERSIONS:
        for flag in one.flags:
            found = refused(document(), version, args=(flag, "1"))
            assert bool(found) == (version in one.versions), (version, flag)
            assert all(flag in cure and one.cure in cure for cure in found.values())


def test_variables_that_would_undo_a_choice_are_refused() -> None:
    names = ("MY_OWN", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY", "NEURON_LIBTORCH_REMOTE_CACHE")
    assert (
        "NEURON_LIBTORCH_REMOTE_CACHE" in refused(document(), "0.29", env=dict.fromkeys(names[3:], "x"))["engine.env"]
    )
    assert refused(document(), "0.24", env=dict.fromkeys(names[3:], "x")) == {}
    assert refused(document(), "0.24", env=dict.fromkeys(names[:2], "x")) == {}
    assert refused(document(), "0.24", env={"VLLM_CONFIGURE_LOGGING": "0"})
    assert "serving.apiKeySecretRef" in refused(document(), "cpu", env=dict.fromkeys(names[:3], "x"))["engine.env"]


@pytest.mark.parametrize("version", LITE)
def test_numbers_that_devices_are_planned_with_are_checked(version: str) -> None:
    for bad in ("0", "1.5", "nan", "much", ""):
        for args in ((f"--gpu-memory-utilization={bad}",), ("--gpu-memory-util", bad)):
            assert "above 0" in refused(document(), version, args=args)["engine.args"]
        assert "above 0" in refused(document(), version, env={CACHE_SHARE_VARIABLE: bad})["engine.env"]
    assert "GiB" in refused(document(), version, env={LEAST_CACHE_VARIABLE: "-1"})["engine.env"]
    good = {CACHE_SHARE_VARIABLE: "0.5", LEAST_CACHE_VARIABLE: "0"}
    assert refused(document(), version, args=("--gpu-memory-utilization", ".92"), env=good) == {}


@pytest.mark.parametrize("version", ON_DEVICES)
def test_a_setting_of_the_plugin_that_a_field_decides_is_refused(version: str) -> None:
    for key, field in SET_BY_FIELDS[VERSIONS[version].settings].items():
        found = refused(document(overrideNeuronConfig={key: 1}), version)
        assert field in found[f"engine.overrideNeuronConfig.{key}"]
    allowed = document(overrideNeuronConfig={"quantization": "mxfp8"})
    assert refused(allowed, version) == {}
    assert settings(allowed, version)["quantization"] == "mxfp8"


@pytest.mark.parametrize("version", LITE)
def test_a_request_for_structured_outputs_finds_no_step_scheduled_ahead(version: str) -> None:
    """It would end the engine."""
    ahead = ["--async-scheduling"]
    for accepts in (document(), document(sampling="Host"), document(overrideNeuronConfig={STRUCTURED: True})):
        assert settings(accepts, version)[STRUCTURED] is True
        assert "--no-async-scheduling" in flags(accepts, version)
        assert STRUCTURED in refused(accepts, version, args=ahead)["engine.args[0]"]
    refuses = document(overrideNeuronConfig={STRUCTURED: False})
    assert settings(refuses, version)[STRUCTURED] is False
    assert "--no-async-scheduling" not in flags(refuses, version)
    assert refused(refuses, version, args=ahead) == {}


def test_a_model_without_an_implementation_is_refused() -> None:
    for version in ON_DEVICES:
        assert refused(document(), version, architecture="LlamaForCausalLM") == {}
        assert "model.uri" in refused(document(), version, architecture="PhiForCausalLM")
        assert refused(document(), version, architecture="Qwen3ForCausalLM") == {}
    assert "model.uri" in refused(document(), "0.24", architecture="MistralForCausalLM")
    assert refused(document(), "cpu", architecture="PhiForCausalLM") == {}


@pytest.mark.parametrize("version", LITE)
def test_a_model_whose_prompts_do_not_read_the_cache_gets_no_segments(version: str) -> None:
    refusal = partial(refused, version=version, architecture="Qwen3VLForConditionalGeneration")
    assert refusal(document(prefixCaching="disabled")).keys() == {"serving.chunkedPrefill"}
    whole = {"chunkedPrefill": "disabled"}
    assert "serving.prefixCaching" in refusal(document(**whole, prefixCaching="enabled"))
    assert "serving.maxModelLength" in refusal(document(**whole, limits={"maxModelLength": 32768}))
    assert refusal({"chunkedPrefill": "disabled"}) == {}, "before a plan"
    assert refusal(document(buckets={"context": [1024, 4096]})) == {}
    for buckets in ({}, {"context": [4096]}):
        accepted = document(**whole, buckets=buckets)
        assert refusal(accepted) == {}
        assert "kv_segment_size_buckets" not in settings(accepted, version)
        assert "--no-enable-prefix-caching" in flags(accepted, version)


RULES: tuple[tuple[str, str, Document], ...] = (
    ("0.29", "parallelism.tensor", {"parallelism": {"tensor": 12}}),
    ("0.16", "parallelism.tensor", {"parallelism": {"tensor": 6}}),
    ("0.16", "serving.contextBuckets", {"buckets": {"context": [512, 2048]}}),
    ("0.16", "serving.tokenGenerationBuckets", {"buckets": {"tokenGeneration": [512, 2048]}}),
    ("0.16", "serving.chunkedPrefill", {"chunkedPrefill": "enabled"}),
    ("0.16", "serving.blockSize", {"limits": {"blockSize": 48}}),
    ("0.16", "serving.blockSize", {"limits": {"blockSize": 32}, "prefixCaching": "disabled"}),
    ("0.16", "serving.numBlocks", {"limits": {"blockSize": 32, "numBlocks": 1023}}),
    ("0.24", "serving.tokenGenerationBuckets", {"buckets": {"tokenGeneration": [192]}}),
    ("0.24", "serving.tokenGenerationBuckets", {"buckets": {"tokenGeneration": [8192]}}),
    ("0.24", "serving.contextBuckets", {"buckets": {"context": [8192]}}),
    ("0.24", "serving.contextBuckets", {"buckets": {"context": [1024, 2048]}}),
    ("0.24", "serving.contextBuckets", {"buckets": {"context": [1000]}}),
    ("0.24", "serving.contextBuckets", {"buckets": {"context": [1024, 4096]}, "prefixCaching": "enabled"}),
    ("0.24", "serving.contextBuckets", {"buckets": {"context": [1024, 4096]}, "chunkedPrefill": "enabled"}),
    ("0.24", "serving.chunkedPrefill", {"limits": {"maxModelLength": 16512}, "chunkedPrefill": "disabled"}),
    ("0.24", "serving.blockSize", {"limits": {"blockSize": 48}}),
    ("0.24", "serving.numBlocks", {"limits": {"numBlocks": 127}}),
    ("cpu", "serving.numBlocks", {"limits": {"numBlocks": 31}}),
    ("cpu", "serving.numBlocks", {"limits": {"blockSize": 64, "numBlocks": 63}}),
    ("0.24", "engine.overrideNeuronConfig.num_seqs_buckets", {"overrideNeuronConfig": {"num_seqs_buckets": [1, 4]}}),
    ("0.24", "engine.overrideNeuronConfig.num_seqs_buckets", {"overrideNeuronConfig": {"num_seqs_buckets": [8, 1]}}),
    ("0.24", f"engine.overrideNeuronConfig.{STRUCTURED}", {"overrideNeuronConfig": {STRUCTURED: "no"}}),
)


def test_blocks_for_one_sequence_are_enough() -> None:
    assert refused(document(limits={"numBlocks": 128}), "0.29") == {}
    assert refused(document(limits={"blockSize": 64, "numBlocks": 64}), "cpu") == {}


@pytest.mark.parametrize(("version", "path", "parts"), RULES)
def test_a_rule_of_the_plugin_is_checked(version: str, path: str, parts: Document) -> None:
    assert refused(document(**parts), version).keys() == {path}


def test_a_cpu_has_nothing_to_compile() -> None:
    given = document(buckets={"context": [4096]}, overrideNeuronConfig={"x": 1}, sampling="Device")
    assert refused(given, "cpu").keys() == {
        "serving.contextBuckets",
        "engine.overrideNeuronConfig",
        "serving.sampling",
    }


def test_every_field_that_is_named_exists() -> None:
    known = {path.removeprefix("spec.") for path, _, _ in walk(Spec(model=ModelSource(uri="")), "spec")}
    named = {flag.field for flag in FLAGS} | {by for table in SET_BY_FIELDS.values() for by in table.values()}
    assert named - {"", f"engine.overrideNeuronConfig.{STRUCTURED}"} <= known


def test_our_parsers_are_among_those_of_every_version() -> None:
    """Read in the source of the four versions."""
    for name, theirs in zip(("reasoning_parser", "tool_call_parser"), PARSERS, strict=True):
        (field,) = (one for one in fields_of(Serving) if one.name == name)
        assert {*get_args(field.unwrapped[0])} == {*theirs}


# The real parser


READ = """
import inspect, json, sys
from vllm.entrypoints.launchers.api_server import app_state, entry
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

sys.argv = ["vllm", "serve"]
parser = make_arg_parser(FlexibleArgumentParser())
read = [vars(parser.parse_args(argv)) for argv in json.load(sys.stdin)]
known = [ReasoningParserManager.list_registered(), ToolParserManager.list_registered()]
(server,) = (group for group in parser._action_groups if group.title == "Frontend")
of_server = [name for action in server._group_actions for name in action.option_strings]
steps = [
    (entry.run_server_worker, "async with build_async_engine_client(", "await build_and_serve("),
    (entry.build_and_serve, "await init_app_state(", "await serve_http("),
    (app_state.init_app_state, "state.engine_client =", "state.openai_serving_models ="),
]
found = [[inspect.getsource(made).find(text) for text in texts] for made, *texts in steps]
options = [action.option_strings for action in parser._actions]
print(json.dumps([read, known, options, of_server, found], default=str))
"""


@pytest.mark.slow
def test_the_parser_of_vllm_reads_what_fields_say(tmp_path: Path) -> None:
    """Of its release for CPUs. It also knows our parsers, and has no flag that we would take for one of a field."""
    template = "{%- for m in messages -%}\n-- <｜User｜>{{ m.content }}\\n{% endfor %}"
    full = document(
        servedNames=["chat", "gpt"],
        limits={"maxQueuedRequests": 5, "blockSize": 32, "numBlocks": 99},
        text={"chatTemplate": template, "toolCallParser": "hermes", "reasoningParser": "qwen3"},
        prefixCaching="disabled",
        server={"accessLog": False},
    )
    leading = [one.replace(f"$({RANK_VARIABLE})", "1") for one in serve(document(), "cpu", nodes=2).command]
    commands = [
        serve(full, "cpu", args=("--seed", "-1"), cache_bytes=800).command[2:],
        serve(document(), "0.29").command[2:],
        serve(document() | {"limits": {}}, "cpu").command[2:],
        followed(leading).command[2:],
    ]
    try:
        program = vllm_cpu.folder() / "python"
    except NotPossibleHere as error:
        pytest.skip(str(error))
    given = json.dumps(commands)

    def read() -> str:
        done = subprocess.run(
            [program, "-c", READ],
            input=given,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={"HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1]

    (first, second, third, follower), known, actions, of_server, steps = json.loads(
        answer("vllm-parser", read, PINS, READ, given)
    )
    expected = {
        "model_tag": "/models/m",
        "port": 8000,
        "served_model_name": ["chat", "gpt"],
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_queued_reqs": 13,
        "block_size": 32,
        "num_gpu_blocks_override": 100,
        "kv_cache_memory_bytes": 100,
        "tensor_parallel_size": 8,
        "enable_prefix_caching": False,
        "chat_template": template,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "enable_auto_tool_choice": True,
        "disable_uvicorn_access_log": True,
        "shutdown_timeout": 330,
        "allowed_origins": [],
        "seed": -1,
    }
    assert all(0 <= earlier < later for earlier, later in steps), "healthy only once the served names are known"
    assert {key: first[key] for key in expected} == expected
    assert third["max_model_len"] == -1, "as long as fits"
    assert second["additional_config"] == {"neuron_config": settings(document(), "0.29")}
    of_group = {"nnodes": 2, "node_rank": 1, "master_addr": f"$({LEADER_VARIABLE})", "master_port": 8010}
    assert {key: follower[key] for key in (*of_group, "headless")} == {**of_group, "headless": True}
    for names, theirs in zip(PARSERS, known, strict=True):
        assert {*names} <= {*theirs}
    options = [name for names in actions for name in names]
    assert {*of_server, "--disable-log-stats", "--enable-log-requests"} >= OF_HTTP
    by_fields = [flag.name for flag in FLAGS if flag.field and flag.unless is None]
    assert {*by_fields} <= {*options}
    owned = {*by_fields, *(flag for one in FORBIDDEN for flag in one.flags)}
    everywhere = {*by_fields, *(flag for one in FORBIDDEN if "cpu" in one.versions for flag in one.flags)}
    others = [name for names in actions if {*names} & everywhere for name in names]
    assert [name for name in others if not refused(document(), "cpu", args=[name])] == []
    free = [name for name in options if name.startswith("--") and name not in owned]
    assert [name for name in free if any(flag.startswith(name) for flag in owned)] == []


# The log


LINES = {
    "WARNING No Neuron devices found. Skipping Neuron plugin registration.": Reason.DRIVER_INCOMPATIBLE,
    "RuntimeError: VLLM_NEURON_DISABLE_WARMUP_COMPILE: local compile cache miss for key 0a": Reason.ARTIFACT_MISSING,
    "Compilation failed - terminating process for cleanup: NEURON_LIBTORCH_ASSERT_CACHE_HIT: remote compile cache miss "
    "for key 0a. All graphs must be a cache hit.": Reason.ARTIFACT_MISSING,
    "FATAL Compilation failed - terminating process for cleanup": Reason.COMPILE_FAILED,
    "[NCC_EBVF030] too many instructions": Reason.COMPILE_FAILED,
    "[NCC_EVRF009] memory": Reason.DEVICE_OUT_OF_MEMORY,
    "NRT_RESOURCE while loading a graph": Reason.DEVICE_OUT_OF_MEMORY,
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 2097152000000 bytes. Error code 12 (Cannot allocate memory)": Reason.DEVICE_OUT_OF_MEMORY,
    "Computed KV cache budget is below minimum threshold": Reason.DEVICE_OUT_OF_MEMORY,
    "ERROR cores busy, ret=-16": Reason.DEVICE_HELD,
    "ValueError: Available memory on node 0 (12.1/23.0 GiB) on startup is less than desired CPU memory utilization "
    "(0.92, 21.16 GiB). On the CPU backend": Reason.DEVICE_OUT_OF_MEMORY,
    "ValueError: Available memory on node 0 (2.1/23.0 GiB) on kv cache allocation is less than requested memory for kv "
    "(4.0 GiB).": Reason.DEVICE_OUT_OF_MEMORY,
    "ValueError: Free memory on device cuda:0 (2.1/23.0 GiB) on startup is less than desired GPU memory utilization "
    "(0.92, 21.16 GiB).": Reason.DEVICE_OUT_OF_MEMORY,
    "ValueError: No available memory for the cache blocks. Try increasing": Reason.DEVICE_OUT_OF_MEMORY,
    "vllm serve: error: unrecognized arguments: --nonsense 3": Reason.INVALID_ENGINE_CONFIG,
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig": Reason.INVALID_ENGINE_CONFIG,
    "ValueError: Last bucket in num_batched_tokens_buckets must equal": Reason.INVALID_ENGINE_CONFIG,
    "ValueError: Unsupported speculative decoding method: ngram": Reason.INVALID_ENGINE_CONFIG,
    "ValueError: quantization='mxfp4' is not supported for Qwen3-32B dense.": Reason.INVALID_ENGINE_CONFIG,
    "Model architectures ['X'] are not supported for now.": Reason.UNSUPPORTED_ARCHITECTURE,
    "ValidationError: 1 validation error for ModelConfig\n  Value error, The checkpoint that you load has model type "
    "`x` but Transformers does not recognize this architecture.": Reason.UNSUPPORTED_ARCHITECTURE,
    "ValueError: To serve at least one request with the model's max seq len (2048), (0.01 GiB KV cache is needed\n"
    "EngineDeadError: EngineCore encountered an issue.": Reason.INVALID_ENGINE_CONFIG,
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.": Reason.DEVICE_FAILED,
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.2]:19\n"
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.": Reason.GROUP_INCOMPLETE,
    "EngineCore failed to start.": None,
    "Engine core initialization failed. See root cause above.": None,
    "WorkerProc failed to start.": None,
    "INFO:     Application startup complete.": None,
    'INFO:     10.0.0.1:4 - "POST /v1/chat/completions HTTP/1.1" 200 OK': None,
}


@pytest.mark.parametrize(("text", "reason"), LINES.items())
def test_the_log_means(text: str, reason: Reason | None) -> None:
    assert next((one for pattern, one in LOG_REASONS if pattern.search(text)), None) == reason
