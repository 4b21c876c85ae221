"""`kubectl neuron why`: the same states as the operator explains, with pods, nodes, last error and next command."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from helpers.operator_worlds import (
    SETTINGS,
    ended,
    failure_record,
    find,
    fresh,
    job_pod,
    resolved_pod,
    resolved_world,
    serving_pod,
    settle,
    unscheduled_pod,
)
from neuron_operator.api import names
from neuron_operator.api.reasons import Reason
from neuron_operator.decide.course import decide
from neuron_operator.kubectl import command, why
from neuron_operator.local import plan
from neuron_operator.read.views import observe
from neuron_operator.read.world import Object, Refusal, RefusalCause, World

CRASH = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
INSUFFICIENT = "0/2 nodes are available: 2 Insufficient aws.amazon.com/neuron."
HEALTHY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


def told(world: World, nodes: Any = (), log: str = "") -> str:
    """What a user reads after the operator's pass over this world."""
    status = decide(world, SETTINGS).status or world.body.get("status")
    world = replace(world, body={**world.body, "status": status})
    observed = observe(world)
    found = why.culprit(observed)
    error = why.last_error(found, log) if found is not None and found.has_log else ""
    return why.report(world.body, observed, nodes, error)


def with_pods(*pods: Callable[[Object], Object], replicas: int = 2) -> World:
    world, _ = resolved_world()
    deployment = find(world.children, "Deployment")
    return replace(world, pods=tuple(pod(deployment) for pod in pods))


def test_a_crashed_replica_shows_its_last_words_and_leads_to_its_log() -> None:
    record = failure_record(31, "DeviceOutOfMemory", "needs 40 GiB, 32 GiB per core", "serve")
    text = told(
        with_pods(
            lambda d: serving_pod(d, "chat-good", ready=True),
            lambda d: serving_pod(d, "chat-bad", state=CRASH, last=ended(31, record), restarts=3),
        )
    )
    assert text.startswith("NeuronModel team/chat: DeviceOutOfMemory\n")
    assert re.search(r"chat-bad +server +exit code 31, CrashLoopBackOff +restarts 3 +n1", text), text
    assert "pod chat-bad, container runtime: needs 40 GiB, 32 GiB per core (exit code 31)" in text
    assert "see troubleshooting (docs/troubleshooting.md#not-enough-memory)" in text
    assert text.endswith("$ kubectl neuron logs chat -n team")


def test_a_follower_that_keeps_its_group_from_serving_is_shown_with_its_node() -> None:
    def follower(deployment: Object) -> Object:
        pod = serving_pod(deployment, "chat-f-1", state=CRASH, last=ended(21, "boom"))
        labels = {**pod["metadata"]["labels"], names.ROLE_LABEL: names.ROLE_FOLLOWER, names.GROUP_LABEL: "chat-g"}
        return {**pod, "metadata": {**pod["metadata"], "labels": labels}, "spec": {**pod["spec"], "nodeName": "n2"}}

    world = with_pods(lambda d: serving_pod(d, "chat-0"), follower)
    message = "0 of 1 replicas answer; pod chat-f-1 ended with exit code 21 (restarts: 0): boom"
    condition = {"type": "Ready", "status": "False", "reason": "CompileFailed", "message": message}
    observed = observe(replace(world, body={**world.body, "status": {"conditions": [condition]}}))
    found = why.culprit(observed)
    assert found is not None
    text = why.report(world.body, observed, (), why.last_error(found, ""))
    assert re.search(r"chat-f-1 +follower +exit code 21, CrashLoopBackOff +restarts 0 +n2", text), text
    assert "pod chat-f-1, container runtime: boom (exit code 21)" in text
    assert re.search(r"n2 +- +- +does not exist", text), text


def test_a_pod_without_a_node_leads_to_the_nodes() -> None:
    text = told(with_pods(lambda d: unscheduled_pod(d, INSUFFICIENT, "chat-1")))
    assert re.search(r"chat-1 +server +unschedulable", text), text
    assert "InsufficientNeuron" in text
    assert "no pod has a node" in text
    assert text.endswith("$ kubectl get nodes -L node.kubernetes.io/instance-type,karpenter.sh/nodepool")


def test_a_model_that_does_not_exist_shows_the_jobs_pod_and_leads_to_an_edit() -> None:
    world, _ = settle(fresh())
    record = failure_record(10, "ModelNotFound", "hf://acme/tiny: no such repository")
    world = replace(world, pods=(job_pod(find(world.shared, "Job"), ended(10, record)),))
    text = told(world)
    assert re.search(r"resolve-x +resolve +exit code 10", text), text
    assert "pod resolve-x, container runtime: hf://acme/tiny: no such repository (exit code 10)" in text
    assert text.endswith("$ kubectl edit nm chat -n team")


def test_a_refused_edit_shows_the_runtimes_answer_and_leads_to_an_edit() -> None:
    """Not to a replica, which serves the earlier revision."""
    world = with_pods(*(lambda d, n=n: serving_pod(d, f"chat-{n}", ready=True) for n in range(2)))
    world, _ = settle(world)
    world = replace(world, body={**world.body, "spec": {**world.body["spec"], "serving": {"chatTemplate": "{% if %}"}}})
    world, decision = settle(world)
    record = failure_record(2, "InvalidEngineConfig", "$.text.chatTemplate: not a valid template", "serve")
    checker = job_pod(find(decision.desired, "Job"), ended(2, record), "check-x")
    text = told(replace(world, pods=(*world.pods, checker)))
    assert text.startswith("NeuronModel team/chat: InvalidEngineConfig\n")
    assert "pod check-x, container runtime: $.text.chatTemplate: not a valid template (exit code 2)" in text
    assert text.endswith("$ kubectl edit nm chat -n team")
    refused, _ = settle(replace(world, pods=(*world.pods, checker)))
    text = told(replace(refused, pods=world.pods, shared=()))
    assert "Last error" not in text
    assert text.endswith("$ kubectl edit nm chat -n team")


def test_a_refused_write_blames_no_pod() -> None:
    """Nor does it quote the Job that read the model long ago: it ended as it should, and left a record."""
    world, decision = settle(fresh())
    world = replace(world, pods=(resolved_pod(find(decision.desired, "Job")),))
    taken = (Refusal(RefusalCause.TAKEN, "Service", "chat"),)
    assert "\nLast " not in told(replace(world, refusals=taken))
    serving = with_pods(*(lambda d, n=n: serving_pod(d, f"chat-{n}", ready=True) for n in range(2)))
    text = told(replace(serving, refusals=taken), log="an error of long ago\n")
    assert text.startswith("NeuronModel team/chat: NameConflict\n")
    assert "\nLast " not in text
    found = why.culprit(observe(replace(serving, refusals=taken)))
    assert found is not None
    assert found.pod.name == "chat-0", "whose log `kubectl neuron logs` prints"


def test_what_somebody_else_undoes_is_told_of_a_ready_model_too() -> None:
    serving = with_pods(*(lambda d, n=n: serving_pod(d, f"chat-{n}", ready=True) for n in range(2)))
    text = told(replace(serving, refusals=(Refusal(RefusalCause.UNDONE, "Deployment", "chat", "spec.x: wanted 1"),)))
    assert text.startswith("NeuronModel team/chat: ready\n")
    assert re.search(r"\n  Contested +True +Contested\n  since .*: somebody else undoes .* chat: spec.x", text)


def test_a_ready_model_leads_to_a_chat() -> None:
    text = told(with_pods(*(lambda d, n=n: serving_pod(d, f"chat-{n}", ready=True) for n in range(2))))
    assert text.startswith("NeuronModel team/chat: ready\n")
    assert "Last error" not in text
    assert text.endswith("$ kubectl neuron chat chat -n team")


def test_a_ready_model_that_makes_vectors_leads_to_what_asks_it() -> None:
    world = with_pods(*(lambda d, n=n: serving_pod(d, f"chat-{n}", ready=True) for n in range(2)))
    spec = {**world.body["spec"], "serving": {"task": "Embed"}}
    body = {**world.body, "spec": spec, "status": decide(world, SETTINGS).status}
    text = why.report(body, observe(replace(world, body=body)), (), "")
    assert "\n  task      Embed\n" in text
    assert "$ curl -s http://chat.team.svc:8000/v1/embeddings -H" in text
    assert """-d '{"model": "chat", "input": "Hello"}'""" in text


def test_a_model_without_conditions_leads_to_the_operator() -> None:
    world = fresh()
    text = why.report(world.body, observe(world), (), "")
    assert "the operator has not seen the model yet" in text
    assert text.endswith("$ kubectl get pods -A -l app.kubernetes.io/name=neuron-operator")
    world = with_pods(lambda d: serving_pod(d, ready=True))
    edited = {**world.body, "metadata": {**world.body["metadata"], "generation": 2}}
    text = why.report(edited, observe(replace(world, body=edited)), (), "")
    assert "has not seen generation 2 yet" in text
    assert "app.kubernetes.io/name=neuron-operator" in text


def test_the_log_of_a_loading_pod_is_searched_for_its_last_error() -> None:
    world = with_pods(lambda d: serving_pod(d, "chat-1"))
    log = "neuron-runtime: loading\nRuntimeError: boom \x1b[31m\nneuron-runtime: loading 40 %\n"
    assert "container runtime: RuntimeError: boom" in told(world, log=log)
    assert "\x1b" not in told(world, log=log)
    assert "no error in the last 200 lines; the last says: loading 40 %" in told(world, log="loading 40 %\n")


def test_the_log_before_a_restart_matters_once_the_container_runs_again() -> None:
    running = {"running": {"startedAt": "2026-03-01T11:51:00Z"}}
    world = with_pods(lambda d: serving_pod(d, "chat-1", state=running, last=ended(1, "boom"), restarts=1))
    observed = observe(world)
    found = why.culprit(observed)
    assert found is not None
    assert found.log_options == ("--previous",)


def test_nodes_show_their_devices_and_what_is_wrong_with_them() -> None:
    labels = {"node.kubernetes.io/instance-type": "inf2.24xlarge"}
    sick = {"type": "NeuronHealth", "status": "True", "reason": "NeuronHasError_SRAM"}
    well = {"type": "NeuronHealth", "status": "False", "reason": "NeuronHasNoError"}
    devices = {"allocatable": {"aws.amazon.com/neuron": "5"}, "capacity": {"aws.amazon.com/neuron": "6"}}
    nodes = [
        {"metadata": {"name": "n1", "labels": labels}, "status": {"conditions": [HEALTHY, sick], **devices}},
        {"metadata": {"name": "n2"}, "spec": {"unschedulable": True}, "status": {"conditions": [HEALTHY, well]}},
    ]
    text = told(with_pods(lambda d: serving_pod(d, "chat-1")), nodes)
    assert re.search(r"n1 +inf2.24xlarge +5 Neuron devices of 6 +NeuronHealth=True NeuronHasError_SRAM\n", text), text
    assert re.search(r"n2 +- +no Neuron devices +cordoned\n", text), text
    assert re.search(r"n1 +- +- +does not exist", told(with_pods(lambda d: serving_pod(d, "chat-1")), nodes[1:]))
    assert "cannot be read: Forbidden" in told(with_pods(lambda d: serving_pod(d, "chat-1")), "Forbidden")


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.row.means], ids=str)
def test_every_reason_has_a_cure_without_markdown_and_a_command_without_gaps(reason: Reason) -> None:
    world = with_pods(lambda d: serving_pod(d, "chat-1"))
    condition = {"type": "Ready", "status": "False", "reason": str(reason), "observedGeneration": 1, "message": ""}
    for pods in (world.pods, ()):
        body = {**world.body, "status": {"conditions": [condition]}}
        observed = observe(replace(world, body=body, pods=pods))
        cure, command = why.next_step(body, observed, why.culprit(observed))
        assert cure
        assert not re.search(r"[`\]]|\(#", cure), cure
        assert command.startswith(("kubectl ", "helm "))
        assert "{" not in command
        assert not re.search(r"(pod|node|-n) *( |$)(-n|$)", command), command


def test_plan_is_the_operators_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert re.search(r"\bplan +show where", capsys.readouterr().out)
    assert command.main(["plan", "-f", "/does/not/exist"]) == plan.EXIT_USAGE
    assert "cannot read /does/not/exist" in capsys.readouterr().err


def test_an_engine_that_the_manifest_does_not_name_is_shown_with_who_chose_it() -> None:
    world, _ = resolved_world()
    assert "\n  engine " not in told(world)
    plan = {"backend": "vllm", "defaultFor": "trn2"}
    body = {**world.body, "status": {**world.body["status"], "plan": plan}}
    report = why.report(body, observe(replace(world, body=body)), (), "")
    assert "\n  engine    vllm, the default for trn2\n" in report


def adapter(status: str, reason: str, message: str = "", name: str = "support-de", **more: Any) -> Object:
    ready = {"type": "Ready", "status": status, "reason": reason, "message": message, "observedGeneration": 1}
    return {
        "kind": names.ADAPTER_KIND,
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "generation": 1},
        "spec": {"model": "chat", "uri": "hf://acme/support-de"},
        "status": {"ready": "1/2", "conditions": [*more.pop("before", ()), ready], **more},
    }


def of_adapter(body: Object, world: World, error: str = "") -> str:
    return why.report(body, observe(replace(world, body=body)), (), error)


def test_an_adapter_that_a_replica_lacks_leads_to_its_log() -> None:
    world = with_pods(*(lambda d, n=n: serving_pod(d, f"chat-{n}", ready=True) for n in range(2)))
    body = adapter("False", "StorageFull", "1 of 2 replicas serve it; chat-1: Failed: StorageFull: no room")
    text = of_adapter(body, world)
    assert text.startswith(
        "NeuronAdapter team/support-de: StorageFull\n  model     chat\n  uri       hf://acme/support"
    )
    assert "\n  replicas  1/2\n" in text
    assert "chat-1: Failed: StorageFull: no room" in text
    found = why.culprit(observe(replace(world, body=body)))
    assert found is not None
    assert found.pod.name == "chat-1"
    assert text.endswith("$ kubectl neuron logs na/support-de -n team")


def test_an_adapter_that_does_not_fit_shows_its_job_and_leads_to_an_edit() -> None:
    world, _ = settle(fresh())
    world = replace(world, pods=(job_pod(find(world.shared, "Job"), ended(62, "a shape"), "resolve-x"),))
    before = [{"type": "Resolved", "status": "False", "reason": "AdapterMismatch"}]
    body = adapter("False", "AdapterMismatch", "a shape", before=before, served={"uri": "hf://acme/old"})
    found = why.culprit(observe(replace(world, body=body)))
    assert found is not None
    text = of_adapter(body, world, why.last_error(found, ""))
    assert "\n  served    hf://acme/old, the version before\n" in text
    assert "\n  Resolved  False  AdapterMismatch\n" in text
    assert "pod resolve-x, container runtime: a shape (exit code 62)" in text
    assert text.endswith("$ kubectl edit na support-de -n team")


@pytest.mark.parametrize(
    ("body", "command"),
    [
        (adapter("True", "Ready"), "kubectl neuron chat na/support-de -n team"),
        (adapter("True", "ScaledToZero"), "kubectl scale nm chat -n team --replicas=1"),
        (adapter("False", "AdaptersNotServed"), "kubectl edit nm chat -n team"),
        (adapter("False", "Resolving", "waiting until WeightsReady"), "kubectl neuron why chat -n team"),
        (adapter("False", "NoSuchModel"), "kubectl edit na support-de -n team"),
    ],
    ids=["ready", "scaled to zero", "model without adapters", "model not ready", "no model"],
)
def test_an_adapter_leads_to_where_the_cure_is(body: Object, command: str) -> None:
    assert of_adapter(body, fresh()).endswith(f"$ {command}")


def test_a_model_names_its_adapters_that_are_not_ready() -> None:
    world, _ = resolved_world()
    observed = observe(world)
    others = [adapter("True", "Ready", name="sql"), {**adapter("False", "Loading"), "spec": {"model": "other"}}]
    text = why.report(world.body, observed, (), "", adapters=[adapter("False", "StorageFull"), *others])
    assert "\n  adapters  1 of 2 are ready\n" in text
    assert re.search(
        r"\nAdapters that are not ready; .*na/NAME says more\n  support-de  1/2  StorageFull\n\nNext", text
    ), text
    assert "dapters" not in why.report(world.body, observed, (), "", adapters=others[1:])
    many = [adapter("False", "Loading", name=f"a{number}") for number in range(why.MAX_ADAPTERS + 5)]
    text = why.report(world.body, observed, (), "", adapters=many)
    assert "\n  and 5 more\n" in text
    spec = {**world.body["spec"], "serving": {"adapters": {"maxActive": 1}}}
    assert "adapters  cannot be read" in why.report({**world.body, "spec": spec}, observed, (), "", adapters=None)


def test_a_model_says_what_is_known_of_zero_and_back() -> None:
    world, _ = resolved_world()
    body = {**world.body, "spec": {**world.body["spec"], "idle": {"afterSeconds": 900}}}
    scaling = {"loadSeconds": 85, "activeAt": "2026-03-01T11:00:00Z", "wakingSince": "2026-03-01T11:59:00Z"}
    body = {**body, "status": {**body["status"], "scaling": scaling}}
    text = why.report(body, observe(replace(world, body=body)), (), "")
    expected = (
        "zero      wakes since 2026-03-01T11:59:00Z; the last replica took 85 s to load; scaled to 0 after 900 s "
        "without requests; no request that the operator knows of since 2026-03-01T11:00:00Z\n"
    )
    assert expected in text
    assert "zero  " not in why.report(world.body, observe(world), (), "")
