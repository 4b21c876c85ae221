"""A policy of the cluster rewrites what the operator writes, on a real API server with Kubernetes' own controllers: the
model serves and says so, also after a restart of the operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.apiserver import ApiServer
from helpers.controllers import controlling, kubelet
from helpers.operators import OPERATOR_USER, Namespace, client_of, eventually, is_ready, operating, run_settings
from neuron_operator.cluster.client import PODS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(server: ApiServer) -> Iterator[ApiServer]:
    with controlling(server):
        yield server


@pytest.fixture
def mirrored(server: ApiServer) -> Namespace:
    """A namespace in which the images of Deployments come from a mirror, as Kyverno's rule for that does."""
    namespace = Namespace(server)
    group = "/apis/admissionregistration.k8s.io/v1beta1"
    image = "object.spec.template.spec.containers[0].image"
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"]}
    replace = f'JSONPatch{{op: "replace", path: "/spec/template/spec/containers/0/image", value: "mirror/" + {image}}}'
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": [{**rule, "resources": ["deployments"]}]},
        "matchConditions": [{"name": "not-yet", "expression": f'!{image}.startsWith("mirror/")'}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{replace}]"}}],
    }
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}}
    binding = {"policyName": "mirror", "matchResources": where}
    for kind, plural, spec in (("Policy", "policies", policy), ("PolicyBinding", "policybindings", binding)):
        about = {"apiVersion": "admissionregistration.k8s.io/v1beta1", "kind": f"MutatingAdmission{kind}"}
        body = {**about, "metadata": {"name": "mirror"}, "spec": spec}
        server.call("POST", f"{group}/mutatingadmission{plural}", body)
    # The API server learns of its own policies after a while, and an operator may be faster.
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "a", "image": "example.com/a"}]}}
    tried = {"metadata": {"name": "tried"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": pod}}
    path = f"/apis/apps/v1/namespaces/{namespace.name}/deployments?dryRun=All"
    for _ in range(600):
        made = server.call("POST", path, {"apiVersion": "apps/v1", "kind": "Deployment", **tried})
        if made["spec"]["template"]["spec"]["containers"][0]["image"].startswith("mirror/"):
            return namespace
        time.sleep(0.1)
    raise AssertionError("the policy is not in force after a minute")


def conditions(namespace: Namespace) -> dict[str, Any]:
    return {one["type"]: one for one in namespace.model().get("status", {}).get("conditions", ())}


def is_contested_and_ready(namespace: Namespace) -> bool:
    return is_ready(namespace) and "Contested" in conditions(namespace)


def images(namespace: Namespace) -> set[str]:
    """Of the replicas."""
    pods = [pod for pod in namespace.list(PODS) if "pod-template-hash" in pod["metadata"]["labels"]]
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


async def test_a_mirror_of_images_leaves_a_model_ready_and_no_restart_begins_the_contest_again(
    server: ApiServer, mirrored: Namespace
) -> None:
    settings = run_settings("--watch-namespaces", mirrored.name)
    async with client_of(server) as client, kubelet(mirrored):
        async with operating(client, settings):
            mirrored.put_model(replicas=1)
            await eventually(lambda: is_contested_and_ready(mirrored), about=mirrored.model)
            assert images(mirrored) == {"mirror/example.com/runtime:1"}, "otherwise the policy is not in force yet"
            before = conditions(mirrored)
            assert {one["status"] for one in before.values()} == {"True"}, before
            message = before["Contested"]["message"]
            assert 'wanted "example.com/runtime:1", but somebody else makes it "mirror/example.com/' in message
        begin = time.time()
        async with operating(client, settings) as operator:
            await eventually(lambda: operator.is_leading)
            mirrored.wake()
            await asyncio.sleep(3.0)
            written = [(e["verb"], e["objectRef"]["resource"]) for e in server.requests(OPERATOR_USER, begin)]
            assert not [one for one in written if one in (("patch", "deployments"), ("create", "events"))]
            assert conditions(mirrored) == before
            for changes in ({"replicas": 2}, {"replicas": 2, "serving": {"maxModelLength": 99}}):
                mirrored.put_model(**changes)
                await eventually(lambda: is_contested_and_ready(mirrored), about=mirrored.model)
