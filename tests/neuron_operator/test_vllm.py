"""Models that vLLM serves: its images, what is refused before a pod exists, and what is said about its ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from helpers.operator_worlds import (
    FACTS,
    NOW,
    SETTINGS,
    body,
    condition,
    ended,
    failure_record,
    find,
    finished,
    fresh,
    resolved_pod,
    resolved_world,
    serving_pod,
    settle,
    stepped,
    stored,
)
from neuron_operator.api import names
from neuron_operator.api.engines import vllm
from neuron_operator.api.engines.vllm_connections import Ends
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim
from neuron_operator.api.reasons import Reason
from neuron_operator.decide.course import decide
from neuron_operator.decide.pin import pin, wanted
from neuron_operator.read.objects import name_of
from neuron_operator.read.records import Facts
from neuron_operator.read.revision import Compiling, from_object, from_running
from neuron_operator.read.views import observe
from neuron_operator.read.world import (
    CaBundle,
    Decision,
    EngineSettings,
    JobSettings,
    KeyRef,
    Object,
    Place,
    Settings,
    StorageSettings,
    World,
)
from neuron_operator.render.jobs import compile_jobs, fetch_job, memory_of, resolve_job
from neuron_operator.render.pods import runtime_image
from neuron_operator.render.serving import progress_seconds
from neuron_operator.why.refusals import explain_denial

USING = replace(
    SETTINGS,
    engines={"vllm": EngineSettings("vllm:0.29"), "vllm-cpu": EngineSettings("vllm-cpu:0.32")},
    storage=StorageSettings(weights=Place(persistent_volume_claim=Claim(claim_name="kept"))),
)
KNOWN = msgspec.convert(FACTS, Facts)
CPU: dict[str, Any] = {
    "model": {"uri": "hf://acme/tiny"},
    "accelerator": {"type": "CPU"},
    "engine": {"backend": "vllm"},
}
TRN2 = {"podTemplate": {"spec": {"nodeSelector": {"node.kubernetes.io/instance-type": "trn2.48xlarge"}}}}
NEURON = {**CPU, "accelerator": {}, **TRN2}


def container_of(template: Object) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return dict(container)


def refused(spec: dict[str, Any], using: Any = USING) -> str:
    with pytest.raises(InvalidSpec) as refusal:
        pin(parse(body(spec)), KNOWN, using, 1)
    return str(refusal.value)


@pytest.mark.parametrize(("spec", "image"), [(CPU, "vllm-cpu:0.32"), (NEURON, "vllm:0.29")], ids=["cpu", "neuron"])
def test_replicas_run_the_image_of_the_engine_and_jobs_that_of_our_runtime(spec: dict[str, Any], image: str) -> None:
    model = parse(body(spec))
    revision = pin(model, KNOWN, USING, 1)
    assert revision.image == image
    jobs = [resolve_job(model, USING)]
    assert container_of(jobs[0]["spec"]["template"])["command"][-2:] == ["--backend", "vllm"]
    assert revision.pinned.weights is not None
    jobs.append(fetch_job(model, USING, revision.pinned.weights, KNOWN, runtime_image(model, USING)))
    assert {container_of(job["spec"]["template"])["image"] for job in jobs} == {SETTINGS.runtime_image}


def test_the_document_and_the_arguments_say_the_same() -> None:
    serving = {"maxModelLength": 1024, "maxSequences": 8}
    pinned = pin(parse(body({**NEURON, "serving": serving})), KNOWN, USING, 1).pinned
    command = container_of(pinned.template)["command"]
    assert command[:3] == ["vllm", "serve", f"/var/lib/neuron-serving/weights/{KNOWN.digest}"]
    limits = pinned.config["limits"]
    assert {f"--max-model-len={limits['maxModelLength']}", f"--max-num-seqs={limits['maxSequences']}"} <= set(command)
    assert f"--tensor-parallel-size={pinned.config['parallelism']['tensor']}" in command


def test_on_a_cpu_the_cache_takes_what_a_pod_requests_for_it() -> None:
    sizes, requests = [], []
    for sequences in (256, 512):
        serving = {"maxModelLength": 1024, "maxSequences": sequences, "dtype": "float32"}
        template = pin(parse(body({**CPU, "serving": serving})), KNOWN, USING, 1).pinned.template
        found = container_of(template)
        (size,) = (word for word in found["command"] if word.startswith("--kv-cache-memory-bytes="))
        sizes.append(int(size.partition("=")[2]))
        requests.append(int(found["resources"]["requests"]["memory"].removesuffix("Mi")) * 2**20)
    token = 2 * KNOWN.num_layers * KNOWN.num_kv_heads * KNOWN.head_dim * 4
    assert sizes[0] == token * (256 * (1024 + 128) + 128)
    assert abs((requests[1] - requests[0]) - (sizes[1] - sizes[0])) <= 64 * 2**20


def test_on_a_cpu_a_rank_has_room_for_the_heads_that_it_holds_beside_others() -> None:
    assert (KNOWN.num_heads, KNOWN.num_kv_heads) == (6, 2)
    for tensor, heads in ((1, 2), (2, 1), (6, 1)):
        spec = {**CPU, "serving": {"maxModelLength": 1024, "maxSequences": 1}, "parallelism": {"tensor": tensor}}
        command = container_of(pin(parse(body(spec)), KNOWN, USING, 1).pinned.template)["command"]
        tokens = 1024 + 2 * vllm.CPU.block_size
        assert f"--kv-cache-memory-bytes={tokens * 2 * KNOWN.num_layers * heads * KNOWN.head_dim * 2}" in command


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": {"backend": "vllm", "args": ["--max-num-seqs=3"]}}, "serving.maxSequences"),
        ({"engine": {"backend": "vllm", "env": [{"name": "VLLM_API_KEY", "value": "x"}]}}, "apiKeySecretRef"),
        (
            {"storage": {"weights": {"objectStore": {"uri": "s3://bucket/weights"}}}},
            "storage.weights: backend vllm reads the weights from a folder",
        ),
    ],
    ids=["flag", "variable", "storage"],
)
def test_what_the_engine_would_refuse_is_refused_before_a_pod_exists(changes: dict[str, Any], says: str) -> None:
    assert says in refused({**CPU, **changes})


IN_PODS = replace(USING, storage=StorageSettings(), ca_bundle=CaBundle(config_map=KeyRef("ca", "ca.crt")))
SECRET = {"model": {"uri": "hf://acme/tiny", "credentialsSecretRef": {"name": "hub"}}}


@pytest.mark.parametrize("limit", [None, "100Gi"])
def test_without_a_claim_an_init_container_fetches_as_the_job_would(limit: str | None) -> None:
    using = replace(IN_PODS, jobs=JobSettings(env=({"name": "HF_ENDPOINT", "value": "https://mirror"},)))
    storage = {"storage": {"weights": {"emptyDir": {"sizeLimit": limit}}}} if limit else {}
    jobs = {"jobs": {"resources": {"requests": {"cpu": "2"}}}}
    model = parse(body({**CPU, **SECRET, **jobs, **storage}))
    pinned = pin(model, KNOWN, using, 1).pinned
    spec = pinned.template["spec"]
    (fetcher,) = spec["initContainers"]
    place = Place(persistent_volume_claim=Claim(claim_name="kept"))
    job = container_of(fetch_job(model, using, place, KNOWN, runtime_image(model, using))["spec"]["template"])
    assert pinned.weights is None
    differs = {"name", "volumeMounts"}
    assert {k: v for k, v in fetcher.items() if k not in differs} == {k: v for k, v in job.items() if k not in differs}
    paths = {mount["name"]: mount["mountPath"] for mount in fetcher["volumeMounts"]}
    assert paths == {mount["name"]: mount["mountPath"] for mount in job["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["weights"]["emptyDir"] == ({"sizeLimit": limit} if limit else {})
    assert len(volumes) == len(spec["volumes"])

    served = container_of(pinned.template)
    assert served["command"][2] == f"{paths['weights']}/{KNOWN.digest}"
    assert "weights" in {mount["name"] for mount in served["volumeMounts"]}
    # Only what fetches has credentials.
    assert not {"HF_TOKEN", "HF_ENDPOINT", "SSL_CERT_FILE"} & {one["name"] for one in served["env"]}


@pytest.mark.parametrize("spec", [{}, {"model": {"uri": "pvc://models/tiny"}}], ids=["claim", "pvc"])
def test_weights_on_a_volume_need_no_init_container(spec: dict[str, Any]) -> None:
    assert "initContainers" not in pin(parse(body({**CPU, **spec})), KNOWN, USING, 1).pinned.template["spec"]


def fetching(state: Object, restarts: int = 0, **others: Any) -> tuple[World, Object]:
    """A model whose replica has an init container in this state, and its status."""
    world, _ = resolved_world(IN_PODS, spec={**CPU, **SECRET})
    pod = serving_pod(
        find(world.children, "Deployment"), "chat-0", state={"waiting": {"reason": "PodInitializing"}}, phase="Pending"
    )
    status = {"name": "fetch-weights", "ready": False, "restartCount": restarts, "state": state, **others}
    pod = {**pod, "status": {**pod["status"], "initContainerStatuses": [status]}}
    world = replace(world, pods=(pod,))
    decided = decide(world, IN_PODS).status
    assert decided is not None
    return world, decided


def test_while_it_fetches_the_condition_says_so() -> None:
    _, status = fetching({"running": {"startedAt": "2026-03-01T11:51:00Z"}})
    assert condition(status, "WeightsReady")["reason"] == "FetchedByPods"
    available = condition(status, "Available")
    assert available["reason"] == "Loading"
    assert "chat-0 has been fetching the weights since 2026-03-01T11:51:00Z" in available["message"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [(11, "WeightsUnauthorized"), (14, "ChecksumMismatch"), (15, "StorageFull"), (10, "ModelNotFound")],
)
def test_a_failed_fetch_has_the_reasons_of_our_runtime(code: int, reason: str) -> None:
    # A line of vLLM's would mean something else.
    record = failure_record(code, reason, "No Neuron devices found; the hub answered", "fetch")
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    world, status = fetching(state, 1, lastState=ended(code, record))
    (pod,) = observe(world).replicas
    assert (pod.container.name, pod.container.num_restarts, pod.additions) == ("fetch-weights", 1, ())
    ready = condition(status, "Ready")
    assert ready["reason"] == reason
    assert "pod chat-0, fetching the weights, ended with exit code" in ready["message"]
    assert "the hub answered" in ready["message"]


def test_an_edit_whose_weights_cannot_be_fetched_is_rolled_back() -> None:
    world, _ = resolved_world(IN_PODS, spec={**CPU, "replicas": 2})
    before = find(world.children, "Deployment")
    old = tuple(serving_pod(before, f"chat-{n}", ready=True) for n in range(2))
    world, _ = settle(replace(world, pods=old), IN_PODS)
    edit = {**CPU, "replicas": 2, "serving": {"maxSequences": 3}}
    world, _ = stepped(*settle(replace(world, body={**world.body, "spec": edit}), IN_PODS), IN_PODS)
    pod = serving_pod(find(world.children, "Deployment"), "chat-2", state={"waiting": {"reason": "PodInitializing"}})
    record = failure_record(11, "WeightsUnauthorized", "the token was revoked", "fetch")
    status = {"name": "fetch-weights", "ready": False, "restartCount": 1, "state": {}, "lastState": ended(11, record)}
    pod = {**pod, "status": {**pod["status"], "initContainerStatuses": [status]}}
    decided = decide(replace(world, pods=(old[0], pod)), IN_PODS).status
    assert condition(decided, "UpToDate")["reason"] == "RolledBack"
    assert "the token was revoked" in condition(decided, "UpToDate")["message"]


def test_resources_for_the_largest_job_do_not_make_a_replica_larger_unless_the_manifest_says_so() -> None:
    large: dict[str, Any] = {"requests": {"cpu": "32", "memory": "256Gi"}, "limits": {"memory": "256Gi"}}
    chart = replace(IN_PODS, jobs=JobSettings(resources=large))
    limited = {"podTemplate": {"spec": {"resources": {"limits": {"memory": "9Gi"}}}}}

    def resources(**spec: Any) -> tuple[Object, Object]:
        made = pin(parse(body({**CPU, **spec})), KNOWN, chart, 1).pinned.template
        (fetcher,) = made["spec"]["initContainers"]
        return fetcher["resources"], container_of(made)["resources"]

    fetcher, replica = resources()
    assert fetcher == {"requests": replica["requests"], "limits": large["limits"]}
    fetcher, replica = resources(**limited)
    assert fetcher["limits"] == replica["limits"] == {"memory": "9Gi"}
    assert fetcher["requests"] == {"cpu": replica["requests"]["cpu"], "memory": "9Gi"}
    assert resources(jobs={"resources": large})[0] == large
    del large["requests"]  # which are then the limits
    fetcher, replica = resources()
    assert fetcher["requests"]["memory"] == replica["requests"]["memory"]


MORE: dict[str, Any] = {"limits": {"memory": "1Gi"}}


def test_what_it_needs_more_helps_a_model_that_has_not_served() -> None:
    _, status = fetching({"waiting": {"reason": "CrashLoopBackOff"}}, 1, lastState=ended(137, reason="OOMKilled"))
    assert "; raise jobs.resources.limits.memory" in condition(status, "Ready")["message"]

    def memory(world: World) -> Any:
        spec = find(world.children, "Deployment")["spec"]["template"]["spec"]
        return spec["initContainers"][0]["resources"].get("limits")

    def now(world: World, using: Settings) -> World:
        return stepped(*settle(world, using), using)[0]

    spec = {**CPU, **SECRET}
    edit = {**spec, "jobs": {"resources": MORE}}
    chart = replace(IN_PODS, jobs=JobSettings(resources=MORE))
    world, _ = resolved_world(IN_PODS, spec=spec)
    assert memory(world) is None
    assert memory(now(world, chart)) == MORE["limits"]
    assert memory(now(replace(world, body={**world.body, "spec": edit}), IN_PODS)) == MORE["limits"]
    # One that serves is not replaced for it.
    pod = serving_pod(find(world.children, "Deployment"), "chat-0", ready=True)
    world = now(replace(world, pods=(pod,)), IN_PODS)
    assert memory(now(replace(world, body={**world.body, "spec": edit}), chart)) is None


def test_a_quota_for_the_init_container_is_met_in_jobs() -> None:
    said = 'pods "chat-0" is forbidden: failed quota: team: must specify limits.memory for: fetch-weights,runtime'
    reason, cure = explain_denial(said)
    assert (reason, "those of container fetch-weights in jobs.resources" in cure) == (Reason.QUOTA_EXCEEDED, True)


def test_a_missing_secret_of_the_init_container_is_named() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    _, status = fetching({"waiting": waiting})
    assert condition(status, "Ready")["reason"] == "SecretNotFound"


def test_once_the_weights_are_there_the_pod_is_explained_by_its_runtime() -> None:
    world, _ = fetching(ended(0), ready=True)
    (pod,) = observe(world).replicas
    assert pod.container.name == "runtime"
    done, _ = fetching({**ended(0)})  # not marked as ready yet
    assert observe(done).replicas[0].container.name == "runtime"


def test_after_a_reboot_of_its_node_a_pod_is_explained_by_what_fetches_again() -> None:
    stopped = {
        "name": "runtime",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": {"reason": "PodInitializing"}},
    }
    stopped["lastState"] = ended(255, reason="Unknown")

    def available(state: Object, code: int, message: str = "") -> Object:
        world, _ = fetching(state, 1, lastState=ended(code, message))
        (pod,) = world.pods
        pod = {**pod, "status": {**pod["status"], "containerStatuses": [stopped]}}
        return condition(decide(replace(world, pods=(pod,)), IN_PODS).status, "Ready")

    again = available({"running": {"startedAt": "2026-03-01T11:51:00Z"}}, 0)
    assert "pod chat-0 has been fetching the weights since 2026-03-01T11:51:00Z" in again["message"]
    record = failure_record(11, "WeightsUnauthorized", "the token was revoked", "fetch")
    refused = available({"waiting": {"reason": "CrashLoopBackOff"}}, 11, record)
    assert refused["reason"] == "WeightsUnauthorized"


def test_a_model_that_the_version_does_not_list_is_refused_by_name() -> None:
    facts = msgspec.structs.replace(KNOWN, architecture="MambaForCausalLM")
    with pytest.raises(InvalidSpec, match=r"spec.model.uri: MambaForCausalLM has no implementation") as refusal:
        pin(parse(body(NEURON)), facts, USING, 1)
    assert refusal.value.reason is Reason.FIELD_NOT_SUPPORTED


def test_without_an_image_the_refusal_names_the_values_of_the_chart() -> None:
    assert "engines.vllm-cpu.image" in refused(CPU, SETTINGS)
    assert "engines.vllm.image" in refused(NEURON, SETTINGS)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({**NEURON, "accelerator": {"cores": 2}}, "accelerator.cores"),
        ({**NEURON, "engine": {"backend": "vllm", "compile": "Enabled"}}, "engine.compile"),
        ({**CPU, "serving": {"contextBuckets": [128]}}, "serving.contextBuckets"),
        ({**CPU, "serving": {"cacheEvents": "Enabled"}}, "serving.cacheEvents"),
        ({**NEURON, "serving": {"cacheEvents": "Enabled"}}, "serving.cacheEvents"),
        ({**CPU, "serving": {"media": {"maxPixels": 5}}}, "serving.media.maxPixels"),
        ({**CPU, "engine": {"backend": "torch", "args": ["--x"]}}, "engine.args"),
    ],
    ids=str,
)
def test_a_field_that_an_engine_does_not_honour_is_refused_by_name(spec: dict[str, Any], field: str) -> None:
    assert f"spec.{field}: " in refused(spec)


def test_a_replica_on_several_nodes_has_a_degree_over_all_of_them_that_is_a_power_of_two() -> None:
    nodes = {"accelerator": {"devices": 16}, "parallelism": {"nodes": 2}}
    pinned = pin(parse(body({**NEURON, **nodes})), KNOWN, USING, 1).pinned
    assert (pinned.nodes, pinned.plan.tensor) == (2, 2)
    assert {"--nnodes=2", "--tensor-parallel-size=2"} <= {*container_of(pinned.template)["command"]}
    assert "set a power of two instead of 6" in refused(
        {**NEURON, "accelerator": {"devices": 16}, "parallelism": {"nodes": 2, "tensor": 6}}
    )
    old = replace(USING, engines={"vllm": EngineSettings("i", "0.16")})
    assert "spec.parallelism.nodes: remove it" in refused({**NEURON, **nodes}, old)


def test_a_version_that_cannot_drain_is_told_to_stop_when_the_time_for_answers_is_over() -> None:
    waits = {}
    for version in ("0.16", "0.24"):
        using = replace(USING, engines={"vllm": EngineSettings("i", version)})
        spec = {**NEURON, "rollout": {"drainDelaySeconds": 5, "drainSeconds": 40}}
        found = container_of(pin(parse(body(spec)), KNOWN, using, 1).pinned.template)
        waits[version] = found["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits == {"0.16": 45, "0.24": 5}


def test_the_reason_of_an_end_is_what_it_logged_and_not_its_exit_code() -> None:
    cause = "ValueError: No available memory for the cache blocks. Try"
    log = f"Traceback\n{cause}\nRuntimeError: see above"
    for code in (0, 1, 31):
        reason, said = vllm.explain(code, log)
        assert (reason, said) == (
            Reason.DEVICE_OUT_OF_MEMORY,
            "ValueError: No available memory for the cache blocks. Try",
        )
    assert vllm.explain(0, "") == (None, vllm.ENGINE_DIED)
    assert vllm.explain(2, "") == (None, "")


def test_an_end_without_a_known_cause_is_explained_by_the_first_error_and_not_the_last_line() -> None:
    cause = "OSError: [Errno 28] No space left on device"
    log = f"EngineCore failed to start.\n  File x, line 1\n{cause}\nTraceback\nRuntimeError: Worker failed\nWorker died"
    assert vllm.explain(1, log) == (None, cause)
    assert vllm.explain(1, "RuntimeError: Engine core initialization failed. See root cause above.") == (None, "")


def test_an_engine_that_was_killed_points_to_a_device_only_where_there_is_one() -> None:
    log = "AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    on_device, on_host = (pin(parse(body(spec)), KNOWN, USING, 1).engine for spec in (NEURON, CPU))
    assert on_device.explain(0, log)[0] is Reason.DEVICE_FAILED
    assert on_host.explain(0, log) == (None, vllm.ENGINE_DIED)
    assert on_host.explain(0, f"OSError: no space\n{log}") == (None, "OSError: no space")


def test_another_content_of_a_file_needs_another_config_map_and_moves_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**CPU, "model": {"uri": "pvc://models/tiny"}}
    world, _ = stepped(*settle(fresh(spec=given), USING), USING)
    (first,) = (found for found in world.children if found["kind"] == "ConfigMap")
    assert isinstance(vllm.CPU.files, dict)
    monkeypatch.setitem(vllm.CPU.files, vllm.LOGGING_KEY, "{}")
    after, _ = settle(world, USING)
    assert after.children == world.children
    deployment = find(world.children, "Deployment")
    rebuilt = from_running(deployment, [first])
    kept = from_object(find(world.children, "ControllerRevision"))
    assert rebuilt is not None
    assert kept is not None
    files = {name: text for name, text in first["data"].items() if name != names.CONFIG_KEY}
    assert files.keys() == vllm.CPU.files.keys()
    assert rebuilt.pinned.files == kept.pinned.files == files
    fresh_one, _ = stepped(*settle(fresh(spec=given), USING), USING)
    (second,) = (found for found in fresh_one.children if found["kind"] == "ConfigMap")
    assert second["data"][vllm.LOGGING_KEY] == "{}"
    assert second["metadata"]["name"] != first["metadata"]["name"]


def of_a_version_that_pinned_no_files(world: World) -> World:
    """Its ConfigMaps were named by the document alone."""
    data = find(world.children, "ControllerRevision")["data"]
    name = names.config_name("chat", data["config"], data.pop("files"))
    before = json.dumps(world.children).replace(name, names.config_name("chat", data["config"], {}))
    return replace(world, children=tuple(json.loads(before)))


@pytest.mark.parametrize("lost", ["", "ControllerRevision", "ConfigMap"])
def test_replicas_of_a_version_that_pinned_no_files_keep_their_config_map(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = stepped(*settle(fresh(spec={**CPU, "model": {"uri": "pvc://models/tiny"}}), USING), USING)
    world = of_a_version_that_pinned_no_files(made)
    assert isinstance(vllm.CPU.files, dict)
    monkeypatch.setitem(vllm.CPU.files, vllm.LOGGING_KEY, "{}")
    remaining = tuple(child for child in world.children if child["kind"] != lost)
    after, _ = settle(replace(world, children=remaining), USING)
    assert find(after.children, "Deployment") == find(world.children, "Deployment")
    assert find(after.children, "ControllerRevision")["data"] == find(world.children, "ControllerRevision")["data"]
    before, kept = (find(one.children, "ConfigMap") for one in (world, after))
    assert kept["metadata"]["name"] == before["metadata"]["name"]
    assert kept["data"] == {**before["data"], **({vllm.LOGGING_KEY: "{}"} if lost == "ConfigMap" else {})}


@pytest.mark.parametrize(("version", "graphs"), [("0.16", 16), ("0.24", 6), ("0.29", 6)])
def test_before_a_pod_holds_devices_it_is_said_for_how_long_it_will_compile(version: str, graphs: int) -> None:
    using = replace(USING, engines={"vllm": EngineSettings("i", version)})
    world, decision = settle(fresh(spec=NEURON), using)
    answer = resolved_pod(find(decision.desired, "Job"), {**FACTS, "numLayers": 80})
    world, decision = settle(finished(settle(replace(world, pods=(answer,)), using)[0]), using)
    said = f"each replica compiles on the device as it starts, about {round(graphs * 80 * 2.4 / 60)} minutes"
    assert condition(decision.status, "Placed")["message"].endswith(f"; {said}")
    assert "Deployment" not in {found["kind"] for found in decision.desired}, "the weights are not there yet"
    world, decision = stepped(world, decision, using)
    assert condition(decision.status, "Compiled")["message"] == said
    assert find(decision.desired, "Deployment")


COMPILING = replace(
    USING,
    engines={"vllm": EngineSettings("vllm:0.24", "0.24")},
    storage=msgspec.structs.replace(
        USING.storage, artifacts=Place(persistent_volume_claim=Claim(claim_name="compiled"))
    ),
)


def to_compile(using: Settings = COMPILING, **spec: Any) -> Compiling | None:
    return pin(parse(body({**NEURON, **spec})), KNOWN, using, 1).pinned.compiling


BIG = msgspec.structs.replace(
    KNOWN,
    parameters=100 * 10**9,
    weights_bytes=200 * 10**9,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=28_672,
)
BIG_SECONDS = 3 * (2000 + 200)


@pytest.mark.parametrize(("facts", "seconds"), [(KNOWN, 3600), (BIG, BIG_SECONDS)], ids=["small", "big"])
@pytest.mark.parametrize("version", ["0.16", "0.24", "0.29"])
def test_the_probe_the_engine_and_the_rollout_wait_equally_long_for_a_start(
    version: str, facts: Facts, seconds: int
) -> None:
    using = replace(COMPILING, engines={"vllm": EngineSettings("i", version)})
    model = parse(body(NEURON))
    revision = pin(model, facts, using, 1)
    minutes = revision.pinned.plan.compile_minutes or 0
    assert (minutes > 0) == (version != "0.24")
    seconds = max(3600, seconds + 3 * 60 * minutes * (facts is BIG))
    container = container_of(revision.pinned.template)
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == seconds
    env = {one["name"]: one["value"] for one in container["env"]}
    waits = {"VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_NEURON_BARRIER_TIMEOUT", "NEURON_LIBTORCH_COMPILATION_TIMEOUT"}
    assert {env[name] for name in waits & env.keys()} == {str(seconds)}
    assert env.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600") == "3600", "a frozen member is noticed by it"
    assert progress_seconds(model, revision) == seconds
    own = parse(body({**NEURON, "rollout": {"progressDeadlineSeconds": 600}}))
    assert progress_seconds(own, revision) == 600


def test_a_big_model_of_our_runtime_has_more_time_to_start_too() -> None:
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "accelerator": {"type": "CPU"}}))
    probe = container_of(pin(model, BIG, USING, 1).pinned.template)["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == BIG_SECONDS


def test_a_job_of_its_image_compiles_with_the_numbers_of_replicas_that_then_compile_nothing() -> None:
    engine = {"backend": "vllm", "env": [{"name": "NEURON_CC_FLAGS", "value": "-O1"}, {"name": "MINE", "value": "x"}]}
    model = parse(body({**NEURON, "engine": engine}))
    revision = pin(model, KNOWN, COMPILING, 1)
    first, *_ = jobs = compile_jobs(model, COMPILING, revision)
    job, replica = container_of(first["spec"]["template"]), container_of(revision.pinned.template)
    assert [memory_of(one) for one in jobs] == ["8256Mi", "16512Mi", "33024Mi"]
    assert job["image"] == replica["image"] == "vllm:0.24"
    assert first["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 65532
    folder = job["command"][4]
    assert folder.startswith("/var/lib/neuron-serving/artifacts/vllm/")
    flags = {word for word in replica["command"] if word.startswith("--")}
    serving_only = {"--served-model-name", f"--shutdown-timeout={300 + 30}", vllm.ENDS_CONNECTIONS}
    assert {word for word in job["command"][6:] if word.startswith("--")} == flags - serving_only | {
        "--served-model-name"
    }
    env = {one["name"]: one["value"] for one in job["env"]}
    assert (env["VLLM_NEURON_CPU_COMPILE"], env["NEURON_LIBTORCH_CPU_COMPILE"]) == ("1", "1")
    assert (env["NEURON_PLATFORM_TARGET_OVERRIDE"], env["NEURON_CC_FLAGS"]) == ("trn2", "-O1")
    assert "MINE" not in env
    served = {one["name"]: one["value"] for one in replica["env"]}
    assert served["NEURON_LIBTORCH_REMOTE_CACHE"] == folder
    assert served["NEURON_LIBTORCH_ASSERT_CACHE_HIT"] == "1"
    assert "VLLM_NEURON_DISABLE_WARMUP_COMPILE" not in served, "it would refuse what is only in the remote cache"
    assert served["NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND"] == "1"
    mounts = {one["name"]: one.get("readOnly", False) for one in replica["volumeMounts"]}
    assert mounts["artifacts"]
    assert (replica["workingDir"], mounts["tmp"]) == ("/tmp", False), "compilers leave files where they start"
    assert revision.pinned.plan.compile_minutes is None


def test_limits_of_time_that_the_manifest_sets_are_those_of_the_pod_and_not_of_a_job() -> None:
    own = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60", "NEURON_SKIP_EFA_AFFINITY": "0"}
    given = {"backend": "vllm", "env": [{"name": name, "value": value} for name, value in own.items()]}
    spec = {**NEURON, "engine": given}
    env = {
        one["name"]: one["value"]
        for one in container_of(pin(parse(body(spec)), KNOWN, USING, 1).pinned.template)["env"]
    }
    assert {name: env[name] for name in own} == own
    limits = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_ENGINE_READY_TIMEOUT_S"}
    slower = [{"name": name, "value": "7"} for name in sorted(limits)]
    assert to_compile(engine={"backend": "vllm", "env": slower}) == to_compile()


@pytest.mark.parametrize(
    ("using", "engine"),
    [
        (replace(COMPILING, engines={"vllm": EngineSettings("i", "0.29")}), {}),
        (replace(COMPILING, engines={"vllm": EngineSettings("i", "0.16")}), {}),
        (replace(COMPILING, storage=USING.storage), {}),
        (replace(COMPILING, storage=msgspec.structs.replace(COMPILING.storage, weights=Place())), {}),
        (COMPILING, {"compile": "Disabled"}),
        (COMPILING, {"args": ['--speculative-config={"method":"eagle3"}']}),
        (COMPILING, {"env": [{"name": "NEURON_LIBTORCH_REMOTE_CACHE", "value": "/mine"}]}),
        (COMPILING, {"env": [{"name": "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "value": "1"}]}),
        (
            COMPILING,
            {"env": [{"name": "NEURON_CC_FLAGS", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]},
        ),
        (COMPILING, {"env": [{"name": "O", "value": "1"}, {"name": "NEURON_CC_FLAGS", "value": "-O$(O)"}]}),
        (COMPILING, {"env": [{"name": "TYPE", "value": "fp8"}], "args": ["--kv-cache-dtype=$(TYPE)"]}),
    ],
    ids=[
        *("0.29", "0.16", "no claim", "no weights", "disabled", "speculation", "own cache", "no cache", "no value"),
        *("value of others", "argument of others"),
    ],
)
def test_where_no_job_can_compile_replicas_do_and_say_so(using: Settings, engine: dict[str, Any]) -> None:
    pinned = pin(parse(body({**NEURON, "engine": {"backend": "vllm", **engine}})), KNOWN, using, 1).pinned
    assert pinned.compiling is None
    assert pinned.plan.compile_minutes
    env = {one["name"] for one in container_of(pinned.template)["env"]}
    assert "NEURON_LIBTORCH_ASSERT_CACHE_HIT" not in env


def test_replicas_of_several_nodes_compile_themselves() -> None:
    assert to_compile(parallelism={"nodes": 2}) is None


def test_models_share_graphs_unless_something_differs_that_is_in_them() -> None:
    base = to_compile()
    assert base is not None
    served = {"model": {"uri": "hf://acme/tiny", "servedNames": ["other"]}, "rollout": {"drainSeconds": 7}}
    assert to_compile(**served) == base
    assert to_compile(engine={"backend": "vllm", "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]}) == base
    of_http = [
        "--uvicorn-log-level=debug",
        "--allowed-methods",
        '["GET"]',
        "--no-enable_log_requests",
        "--host=0.0.0.0",
    ]
    of_http += ["--tool-parser-plugin=$(PLUGINS)", "--default-chat-template-kwargs.thinking", "false"]
    assert to_compile(engine={"backend": "vllm", "args": of_http}) == base
    for other in (
        to_compile(engine={"backend": "vllm", "args": [*of_http, "--max-logprobs", "5"]}),
        to_compile(serving={"maxSequences": 3}),
        to_compile(serving={"numBlocks": 700}),
        to_compile(engine={"backend": "vllm", "args": ["--kv-cache-dtype=fp8"]}),
        to_compile(engine={"backend": "vllm", "env": [{"name": "NEURON_CC_FLAGS", "value": "-O1"}]}),
        to_compile(replace(COMPILING, engines={"vllm": EngineSettings("vllm:newer", "0.24")})),
    ):
        assert other is not None
        assert other.folder != base.folder


def test_an_edit_lets_replicas_compile_instead_of_a_job() -> None:
    engine = {"backend": "vllm", "compile": "Disabled"}
    world, before = stepped(*settle(fresh(spec=NEURON), COMPILING), COMPILING)
    assert condition(before.status, "Compiled")["reason"] == "Compiled"
    edited = replace(world, body={**world.body, "spec": {**NEURON, "engine": engine}})
    after, decision = settle(edited, COMPILING)
    assert condition(decision.status, "Compiled")["reason"] == "NotRequired"
    kept = [from_object(one) for one in after.children if one["kind"] == "ControllerRevision"]
    assert {one.pinned.compiling is None for one in kept if one} == {True, False}
    back, decision = settle(replace(after, body={**after.body, "spec": NEURON}), COMPILING)
    assert condition(decision.status, "Compiled")["reason"] == "Compiled"
    assert len(back.children) == len(after.children)


@pytest.mark.parametrize(
    "added",
    [{"parallelism": {"nodes": 1}}, {"engine": {"backend": "vllm", "compile": "Disabled"}}],
    ids=["nodes", "compile"],
)
def test_what_earlier_versions_did_not_read_makes_no_revision_where_it_changes_nothing(added: dict[str, Any]) -> None:
    revision = pin(parse(body(NEURON)), KNOWN, USING, 1)
    assert wanted(parse(body({**NEURON, **added})), [revision]) == revision
    compiled = pin(parse(body(NEURON)), KNOWN, COMPILING, 1)
    grouped = msgspec.structs.replace(compiled, pinned=msgspec.structs.replace(compiled.pinned, nodes=2))
    assert wanted(parse(body({**NEURON, **added})), [grouped]) is None


def test_graphs_that_a_replica_does_not_find_are_compiled_again() -> None:
    world, decision = stepped(*settle(fresh(spec=NEURON), COMPILING), COMPILING)
    assert condition(decision.status, "Compiled")["reason"] == "Compiled"
    long_ago = {"creationTimestamp": "2026-03-01T11:00:00Z"}
    shared = stored(
        {**one, "metadata": {**one["metadata"], **long_ago}} if one["kind"] == "ConfigMap" else one
        for one in world.shared
    )
    miss = (
        "Compilation failed - terminating process for cleanup: ASSERT_CACHE_HIT: remote compile cache miss for key 01"
    )
    for message, reason in ((miss, "Compiling"), ("RuntimeError: something else", "Compiled")):
        last = {"terminated": {**ended(1, message)["terminated"], "finishedAt": NOW.isoformat()}}
        crashed = {"waiting": {"reason": "CrashLoopBackOff"}}
        pod = serving_pod(find(decision.desired, "Deployment"), state=crashed, last=last)
        found = decide(replace(world, shared=shared, pods=(*world.pods, pod)), COMPILING)
        assert condition(found.status, "Compiled")["reason"] == reason


MISS = "Compilation failed - terminating process for cleanup: ASSERT_CACHE_HIT: remote compile cache miss for key 01"


def missing_a_graph(pod_made: str, *, reused: bool = True, **metadata: Any) -> Decision:
    """A Job left its record at 11:00, and a replica made at this time ended now."""
    world, decision = stepped(*settle(fresh(spec=NEURON), COMPILING), COMPILING)
    (kept,) = (one for one in world.shared if one["kind"] == "ConfigMap" and name_of(one).startswith("artifact-"))
    record = json.loads(kept["data"]["record.json"])
    record["artifact"]["reused"] = reused
    at = {"creationTimestamp": "2026-03-01T11:00:00Z"}
    known = {**kept, "data": {"record.json": json.dumps(record)}, "metadata": {**kept["metadata"], **at}}
    shared = [known if one is kept else one for one in world.shared]
    last = {"terminated": {**ended(1, MISS)["terminated"], "finishedAt": NOW.isoformat()}}
    crashed = {"waiting": {"reason": "CrashLoopBackOff"}}
    pod = serving_pod(find(decision.desired, "Deployment"), state=crashed, last=last, restarts=3)
    pod = {**pod, "metadata": {**pod["metadata"], "creationTimestamp": pod_made}}
    body = {**world.body, "metadata": {**world.body["metadata"], **metadata}}
    return decide(replace(world, body=body, shared=stored(shared), pods=(*world.pods, pod)), COMPILING)


def test_graphs_that_a_replica_still_misses_in_a_whole_store_are_not_compiled_for_ever() -> None:
    found = missing_a_graph("2026-03-01T10:59:00Z")
    stuck = condition(found.status, "Compiled")
    assert (stuck["status"], stuck["reason"]) == ("False", "ArtifactUnusable")
    assert "set engine.compile: Disabled" in stuck["message"]
    assert "cache miss for key 01" in stuck["message"]
    assert (found.delete, condition(found.status, "Stalled")["status"]) == ((), "True")
    assert find(found.desired, "Deployment"), "it stays as it is"


@pytest.mark.parametrize(
    ("pod_made", "reused", "metadata"),
    [
        ("2026-03-01T11:00:01Z", True, {}),
        ("2026-03-01T10:59:00Z", False, {}),
        ("2026-03-01T10:59:00Z", True, {"annotations": {names.RETRY_ANNOTATION: "1"}}),
    ],
    ids=["the store may have lost it since", "compiled anew", "somebody says so"],
)
def test_a_job_is_asked_again_once_and_whenever_somebody_says_so(
    pod_made: str, reused: bool, metadata: dict[str, Any]
) -> None:
    found = missing_a_graph(pod_made, reused=reused, **metadata)
    assert condition(found.status, "Compiled")["reason"] == "Compiling"
    assert "artifact-" in str(sorted(map(name_of, found.delete)))


def test_what_it_logs_is_configured_by_a_file_beside_the_document() -> None:
    assert json.loads(vllm.VLLM.files[vllm.LOGGING_KEY])["version"] == 1


def test_its_server_ends_the_connection_of_each_answer_so_that_no_client_stays_with_a_pod_that_drains() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b"text"})

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Ends(app))) as client:
            return await client.get("http://pod/health")

    answer = asyncio.run(ask())
    assert (answer.text, dict(answer.headers)) == ("text", {"x": "y", "connection": "close"})
    found = container_of(pin(parse(body(CPU)), KNOWN, USING, 1).pinned.template)
    module, name = found["command"][-1].removeprefix("--middleware=").split(".")
    assert f"class {name}:" in vllm.VLLM.files[f"{module}.py"]
    variables = {one["name"]: one.get("value") for one in found["env"]}
    assert variables["PYTHONPATH"] in [one["mountPath"] for one in found["volumeMounts"]]
