"""The chart as helm renders it, and as helm installs it into a real API server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from cluster.rig.binaries import ensure
from cluster.rig.cache import Cache, content_key
from cluster.rig.machine import GO_SETTINGS, wait_until
from cluster.rig.needs import NotPossibleHere
from helpers.apiserver import NOT_YET_SERVED, ApiServer, running
from helpers.checkov import complaints
from helpers.operator_rights import (
    CLUSTER_RULES,
    LEASE_RULES,
    NAMESPACED_RULES,
    OPERATOR_NAMESPACE,
    ensure_namespace,
)
from helpers.operators import BY_KIND, Namespace, client_of, eventually, operating, served
from helpers.rendered_cases import FILES, render
from neuron_operator.api import names
from neuron_operator.api.model import ObjectStore
from neuron_operator.gateway import process as gateway_process
from neuron_operator.gateway.config import Config
from neuron_operator.read.world import (
    CaBundle,
    ClaimTemplate,
    EngineSettings,
    GroupSettings,
    JobSettings,
    KeyRef,
)
from neuron_operator.render.pods import READABLE, serving_pod_template
from neuron_operator.run import settings

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHART = Path(__file__).resolve().parents[2] / "charts" / "neuron-serving"
NAMESPACE = "neuron-serving"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/neuronmodels.neuron-serving.dev"
MODELS = "/apis/neuron-serving.dev/v1alpha1/namespaces/default/neuronmodels"
IMAGES = {"image": {"operator": "registry.test:5000/operator:1", "runtime": "registry.test:5000/runtime:1"}}
# Every value different from its default, to cover what the defaults do not reach.
EVERYTHING: dict[str, Any] = {
    "image": {
        **IMAGES["image"],
        "compile": "registry.test:5000/compile:1",
        "pullPolicy": "IfNotPresent",
        "pullSecrets": ["one", "two"],
    },
    "engines": {"vllm": {"image": "registry.test:5000/vllm:1", "version": "0.24"}, "defaults": {"trn2": "vllm"}},
    "commonLabels": {"team": "serving", "example.com/cost-center": "42"},
    "replicas": 3,
    "lease": {"seconds": 15},
    "workers": 4,
    "logLevel": "debug",
    "watchNamespaces": ["team-a", "team-b"],
    "devices": {"mode": "PluginWithExtension", "schedulerName": "neuron-scheduler", "families": {"lab-1": "trn1"}},
    "troubleshootingUrl": "https://wiki.test/troubleshooting",
    "jobs": {
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "resources": {"limits": {"memory": "1Gi"}},
        "labels": {"team": "serving"},
        "annotations": {"karpenter.sh/do-not-disrupt": "true"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy.test:3128"}],
    },
    "caBundle": {"configMap": {"name": "private-ca", "key": "ca.crt"}},
    "provisionable": {"instanceTypes": ["inf2.8xlarge", "trn2.48xlarge"]},
    "runtimeUpgrade": "Rolling",
    "groups": {
        "restartSeconds": 30,
        "maxRestarts": 2,
        "placeSeconds": 60,
        "topologyKey": "example.com/rack",
        "hostNetwork": True,
        "maxNodes": 4,
        "controller": "LeaderWorkerSet",
    },
    "storage": {
        "weights": {"pvcTemplate": {"storageClassName": "efs", "size": "1Ti"}},
        "artifacts": {"objectStore": {"uri": "s3://bucket/artifacts"}},
        "imageVolumes": True,
        "keepDays": 7,
    },
    "rbac": {"aggregateToDefaultRoles": False, "readJobLogs": False},
    "crds": {"install": False},
    "networkPolicy": {"ingressFrom": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]},
    "monitoring": {
        "dashboard": {
            "enabled": True,
            "namespace": "grafana",
            "labels": {"grafana_dashboard": "1", "team": "a"},
            "annotations": {"grafana_folder": "Serving"},
            "datasource": "Thanos",
        },
        "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://docs.test/runbook.md"},
    },
    "resources": {"requests": {"cpu": "1"}},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"prometheus.io/port": "8080"},
}
GATEWAY = {
    "enabled": True,
    "replicas": 3,
    "namespaces": ["team-a"],
    "keysSecret": "gateway-keys",
    "inferencePools": {"enabled": True, "picker": "NAME-epp", "pickerPort": 9003},
    "ingressFrom": [{"namespaceSelector": {"matchLabels": {"team": "b"}}}],
    "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"example.com/internal": "true"}},
    "hold": {"requests": 10, "bytes": 2048, "seconds": 30, "perReplica": 4, "retryAfterSeconds": 5},
    "timeouts": {
        "readSeconds": 6,
        "idleSeconds": 70,
        "replicaIdleSeconds": 7,
        "connectSeconds": 1.5,
        "firstByteSeconds": 60,
        "silenceSeconds": 20,
        "stalledSeconds": 30,
        "avoidSeconds": 2,
        "drainDelaySeconds": 10,
        "drainSeconds": 300,
    },
    "picking": {"prefixCharacters": 100, "loadFactor": 2, "spreadFrom": 2, "idleConnections": 3},
    "limits": {"headBytes": 2048, "bodyBytes": 4096, "allBodiesBytes": 8192, "connections": 100},
    "resources": {"requests": {"cpu": "1"}},
}
"""The same of the gateway: apart, because most tests are about the operator's objects."""
WITH_GATEWAY = {**EVERYTHING, "gateway": GATEWAY}
VARIANTS = {"defaults": IMAGES, "everything": EVERYTHING, "gateway": WITH_GATEWAY}

NO_CPU_LIMIT = "a limit of CPU throttles; requests suffice"
NO_DISK = "its root file system is read-only, and it writes nothing"
EXCEPTIONS = {
    ("Deployment", "container-resources"): NO_CPU_LIMIT,
    ("Deployment", "container-ephemeral-storage-request-and-limit"): NO_DISK,
    ("Deployment", "container-image-pull-policy"): "the value image.pullPolicy; by default Kubernetes' own",
    ("Deployment", "deployment-has-host-podantiaffinity"): "topologySpreadConstraints do the same",
    ("Deployment", "pod-networkpolicy"): "egress is open: the address of the API server is not known to the chart",
    ("Pod", "container-resources"): NO_CPU_LIMIT,
    ("Pod", "container-ephemeral-storage-request-and-limit"): NO_DISK,
    ("Pod", "container-image-pull-policy"): "the value image.pullPolicy",
    ("Pod", "pod-networkpolicy"): "the pod of `helm test` listens on no port and ends after a second",
}
"""What kube-score complains about and we keep, by kind and check, with the reason."""
NO_LIMITS = "a limit of CPU slows steps down, one of memory ends a pod that needs more"
NO_LIVENESS = "vLLM ends by itself when its engine ends, and says no more of its health; golden files have the probes"
IMAGES_USER = "the user of the image, which runAsNonRoot holds to be other than root; a model may bring its own image"
OF_ALL_MODELS = {
    "container-resources": NO_LIMITS,
    "container-ephemeral-storage-request-and-limit": "weights in an emptyDir have its sizeLimit",
    "container-image-pull-policy": "the value image.pullPolicy, or the model's engine.imagePullPolicy",
    "container-security-context-user-group-id": IMAGES_USER,
    "pod-networkpolicy": "egress is open: the addresses of hubs and stores are not known",
}
EXCEPTIONS_OF_MODELS = {
    **{(kind, check): why for kind in ("Deployment", "Job", "CronJob") for check, why in OF_ALL_MODELS.items()},
    ("Deployment", "deployment-replicas"): "one replica unless the model asks for more",
    ("Deployment", "pod-probes"): NO_LIVENESS,
    ("CronJob", "cronjob-has-deadline"): "a clean-up that begins late is as good",
}
"""The same for the objects of models."""
CHECKOV_EXCEPTIONS = {
    "chart": {
        **{
            (kind, check): why
            for kind in ("Deployment", "Pod")
            for check, why in {
                "CKV_K8S_11": NO_CPU_LIMIT,
                "CKV_K8S_15": "the value image.pullPolicy; by default Kubernetes' own",
                "CKV_K8S_43": "the value image.operator: a digest is allowed",
            }.items()
        },
        ("Deployment", "CKV_K8S_38"): "the operator is a client of the API server",
        **dict.fromkeys(
            (("Pod", "CKV_K8S_8"), ("Pod", "CKV_K8S_9"), ("Pod", "CKV2_K8S_6")),
            "the pod of `helm test` listens on no port and ends after a second",
        ),
    },
    "models": {
        **{
            (kind, check): why
            for kind in ("Deployment", "Job", "CronJob", "StatefulSet")
            for check, why in {
                "CKV_K8S_11": NO_LIMITS,
                "CKV_K8S_13": NO_LIMITS,
                "CKV_K8S_15": "the value image.pullPolicy, or the model's engine.imagePullPolicy",
                "CKV_K8S_40": IMAGES_USER,
                "CKV_K8S_43": "the value image.runtime, or the model's engine.image: digests are allowed there",
            }.items()
        },
        ("Deployment", "CKV_K8S_35"): "libraries of stores read their credentials from the environment",
        ("StatefulSet", "CKV_K8S_35"): "vLLM reads its key from the environment",
        ("Deployment", "CKV_K8S_8"): NO_LIVENESS,
        ("StatefulSet", "CKV_K8S_8"): "followers open no port: their supervisor ends them, and the leader tells",
        ("StatefulSet", "CKV_K8S_9"): "the same",
        ("Pod", "CKV2_K8S_6"): "pods of Jobs listen on no port, and their egress is open",
    },
}
"""What checkov complains about and we keep, by kind and check, with the reason."""


class Helm:
    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        # Rendered once: the same helm makes the same of the same chart and values.
        self._rendered = Cache.default().entry("answers", "helm", content_key(program, CHART), lambda folder: None)

    def __call__(self, *arguments: str, values: Mapping[str, Any] = IMAGES, code: int = 0) -> str:
        """Output of helm, with its errors if it is expected to fail with `code`."""
        file = self._folder / "values.json"
        file.write_text(json.dumps(values))
        environment = {f"HELM_{name}_HOME": str(self._folder / name) for name in ("CACHE", "CONFIG", "DATA")}
        takes_values = arguments[0] in ("install", "lint", "template", "upgrade")
        done = subprocess.run(
            [self._program, *arguments, *(("--values", file) if takes_values else ())],
            capture_output=True,
            text=True,
            check=False,
            env={**environment, **GO_SETTINGS, "HOME": str(self._folder)},
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr if code else done.stdout

    def render(self, values: Mapping[str, Any], *arguments: str) -> list[dict[str, Any]]:
        where = ("--namespace", NAMESPACE, "--kube-version", "1.35")
        file = self._rendered / f"{content_key(json.dumps([values, where, arguments], sort_keys=True))}.yaml"
        if not file.exists():
            made = self._folder / file.name
            made.write_text(self("template", "neuron-serving", str(CHART), *where, *arguments, values=values))
            shutil.move(made, file)
        return [document for document in yaml.load_all(file.read_bytes(), Loader=yaml.CSafeLoader) if document]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    try:
        return Helm(ensure("helm")["helm"] / "helm", tmp_path_factory.mktemp("helm"))
    except NotPossibleHere as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    try:
        with running(tmp_path_factory.mktemp("api-server")) as server:
            yield server
    except NotPossibleHere as error:
        pytest.skip(str(error))


def one(documents: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (d for d in documents if d["kind"] == kind and (not name or d["metadata"]["name"] == name))
    return found


def granted(rules: list[dict[str, Any]]) -> set[tuple[str, str, str, str]]:
    """Single rights: group, resource, name of the object ("" for all), verb."""
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_helm_lint_passes(helm: Helm, values: Mapping[str, Any]) -> None:
    report = helm("lint", "--strict", str(CHART), values=values)
    assert "[WARNING]" not in report
    assert "1 chart(s) linted, 0 chart(s) failed" in report


@pytest.mark.parametrize("command", ["lint", "template"])
@pytest.mark.parametrize("image", ["operator", "runtime"])
def test_an_empty_image_is_refused_by_name(helm: Helm, image: str, command: str) -> None:
    values = {"image": {**IMAGES["image"], image: ""}}
    report = helm(command, str(CHART), values=values, code=1)
    assert re.search(rf"at '/image/{image}': minLength: got 0, want 1", report), report


def test_the_charts_own_values_lack_only_the_images(helm: Helm) -> None:
    report = helm("lint", str(CHART), values={}, code=1)
    assert set(re.findall(r"- at '(\S+)'", report)) == {"/image/operator", "/image/runtime"}, report


def test_an_unknown_value_is_refused_by_name(helm: Helm) -> None:
    report = helm("template", str(CHART), values={**IMAGES, "runtimeUpgrades": "Rolling"}, code=1)
    assert "runtimeUpgrades" in report


def test_the_chart_grants_the_rights_that_the_operator_uses(helm: Helm) -> None:
    """Other tests check `CLUSTER_RULES` and `LEASE_RULES` against the operator's requests to an API server."""
    documents = helm.render(IMAGES)
    assert granted(one(documents, "ClusterRole", "neuron-operator")["rules"]) == granted(CLUSTER_RULES)
    assert granted(one(documents, "Role")["rules"]) == granted(LEASE_RULES)


def test_with_named_namespaces_nothing_is_granted_elsewhere(helm: Helm) -> None:
    documents = helm.render(merged(EVERYTHING, {"groups": {"controller": "StatefulSet"}}))
    assert not [d for d in documents if d["kind"].startswith("ClusterRole")]
    for kind in ("Role", "RoleBinding"):
        found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == "neuron-operator-models"]
        assert [d["metadata"]["namespace"] for d in found] == EVERYTHING["watchNamespaces"]
        for one_of_them in found:
            if kind == "Role":
                without = {right for right in granted(NAMESPACED_RULES) if right[1] == "pods/log"}
                assert granted(one_of_them["rules"]) == granted(NAMESPACED_RULES) - without
            else:
                assert one_of_them["roleRef"]["kind"] == "Role"
                assert one_of_them["subjects"][0]["namespace"] == NAMESPACE


def test_view_may_read_models_and_edit_and_admin_may_change_them(helm: Helm) -> None:
    roles = {d["metadata"]["name"]: d for d in helm.render(IMAGES) if d["kind"] == "ClusterRole"}
    verbs = {"neuron-operator-view": {"get", "list", "watch"}}
    verbs["neuron-operator-edit"] = {"create", "update", "patch", "delete", "deletecollection"}
    into: dict[str, set[str]] = {"neuron-operator-view": {"view"}, "neuron-operator-edit": {"edit", "admin"}}
    into["neuron-operator-adapters"] = set()
    assert roles.keys() == {"neuron-operator", *into}
    for name, role in roles.items():
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        labels = {label.removeprefix(prefix) for label in role["metadata"]["labels"] if label.startswith(prefix)}
        assert labels == into.get(name, set())
    for name, expected in verbs.items():
        rights = granted(roles[name]["rules"])
        for resource in ("neuronmodels", "neuronadapters"):
            assert {right[3] for right in rights if right[1] == resource} == expected
        assert {right[0] for right in rights} == {"neuron-serving.dev"}
    assert not [d for d in helm.render(EVERYTHING) if d["kind"] == "ClusterRole" and d["metadata"]["name"] in into]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_no_right_reads_secrets_or_is_a_wildcard(helm: Helm, values: Mapping[str, Any]) -> None:
    roles = [d for d in helm.render(values) if d["kind"] in ("ClusterRole", "Role")]
    rights = set().union(*(granted(role["rules"]) for role in roles))
    assert not [right for right in rights if "*" in right or right[1] == "pods/exec"]
    assert {right[3] for right in rights if right[1] == "secrets"} == {"create"}


RBAC = "rbac.authorization.k8s.io"
OWN_ROLES = ("view", "edit", "admin")


@pytest.fixture
def aggregated(helm: Helm, server: ApiServer) -> Iterator[ApiServer]:
    """A server whose own roles include what the chart adds to them."""
    roles = [document for document in helm.render(IMAGES) if document["kind"] == "ClusterRole"]
    for role in roles:
        server.apply(f"/apis/{RBAC}/v1/clusterroles/{role['metadata']['name']}", role)
    manager = [
        ensure("hyper")["hyper"] / "kube-controller-manager",
        *(f"--kubeconfig={server.kubeconfig('admin')}", "--controllers=clusterrole-aggregation-controller"),
        *("--leader-elect=false", "--secure-port=0"),
    ]

    def has_models(role: str) -> bool:
        rules = server.call("GET", f"/apis/{RBAC}/v1/clusterroles/{role}")["rules"] or ()
        return any("neuronmodels" in rule.get("resources", ()) for rule in rules)

    with subprocess.Popen(manager, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until("the roles are aggregated", lambda: all(map(has_models, OWN_ROLES)))
            yield server
        finally:
            process.kill()
            for role in roles:
                server.call("DELETE", f"/apis/{RBAC}/v1/clusterroles/{role['metadata']['name']}")


def test_a_tenant_reads_and_changes_models_of_its_own_namespace_only(aggregated: ApiServer) -> None:
    """Users who have `view`, `edit` or `admin` in the namespace `tenant-a`, and nothing elsewhere."""
    server = aggregated
    crd = yaml.safe_load((CHART / "files" / "neuronmodels.yaml").read_text())
    server.apply(CRD, crd)
    body = {"apiVersion": "neuron-serving.dev/v1alpha1", "kind": "NeuronModel", "metadata": {"name": "chat"}}
    body["spec"] = {"model": {"uri": "hf://o/m"}}

    def models(namespace: str, *below: str) -> str:
        return "/".join((f"/apis/neuron-serving.dev/v1alpha1/namespaces/{namespace}/neuronmodels", *below))

    def code(user: str, method: str, path: str, content: Any = None) -> int:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            server.call(method, path, content, kind, user)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    wait_until("the resource is served", lambda: code("", "GET", models("default")) == 200)
    for namespace in ("tenant-a", "tenant-b"):
        ensure_namespace(server, namespace)
        server.call("POST", models(namespace), body)
    for role in OWN_ROLES:
        server.apply(
            f"/apis/{RBAC}/v1/namespaces/tenant-a/rolebindings/{role}",
            {
                "apiVersion": f"{RBAC}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": role},
                "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": RBAC, "kind": "User", "name": role}],
            },
        )
        wait_until("the binding is in force", lambda user=role: code(user, "GET", models("tenant-a")) == 200)  # type: ignore[misc]
    spec = {"spec": {"replicas": 1}}
    reads = [(), ("chat",), ("chat", "status"), ("chat", "scale")]
    changes = [("PATCH", ("chat",), spec), ("PATCH", ("chat", "scale"), spec)]
    for role in OWN_ROLES:
        own = 403 if role == "view" else 200
        another = {**body, "metadata": {"name": f"by-{role}"}}
        assert {code(role, "GET", models("tenant-a", *path)) for path in reads} == {200}
        assert {code(role, method, models("tenant-a", *path), patch) for method, path, patch in changes} == {own}
        assert code(role, "POST", models("tenant-a"), another) == own
        assert code(role, "DELETE", models("tenant-a", f"by-{role}")) == own
        # Nobody but the operator writes a status.
        assert code(role, "PATCH", models("tenant-a", "chat", "status"), {"status": {"ready": "9/9"}}) == 403
        assert {code(role, "GET", models("tenant-b", *path)) for path in reads} == {403}
        assert {code(role, method, models("tenant-b", *path), patch) for method, path, patch in changes} == {403}
        assert code(role, "POST", models("tenant-b"), another) == 403
        assert code(role, "DELETE", models("tenant-b", "chat")) == 403
        assert code(role, "GET", "/apis/neuron-serving.dev/v1alpha1/neuronmodels") == 403
    assert server.call("GET", models("tenant-b", "chat"))["spec"]["model"] == {"uri": "hf://o/m"}
    server.call("DELETE", CRD)
    wait_until("the resource is gone", lambda: code("", "GET", CRD) == 404)


def settings_of(documents: list[dict[str, Any]]) -> settings.RunSettings:
    """Settings as the operator reads them in the pod."""
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["neuron-operator", "run"]
    return settings.load([], {e["name"]: e.get("value", "from-the-pod") for e in container["env"]})


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and default of each value of the chart; a map that is empty by default is one value."""
    for key, value in values.items():
        is_group = isinstance(value, dict) and value and (*path, key) not in MAPS
        yield from leaves(value, (*path, key)) if is_group else (((*path, key), value),)


MAPS = (("monitoring", "dashboard", "labels"), ("resources",), ("gateway", "resources"))
"""Values with keys of the user's, which are not empty by default."""
DEFAULTS = dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))


def at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(first[key], second[key]) for key in first.keys() & second.keys() if isinstance(first[key], dict)
    }
    return {**first, **second, **both}


@pytest.mark.parametrize("path", DEFAULTS, ids=".".join)
def test_each_value_changes_what_the_chart_renders(helm: Helm, path: tuple[str, ...]) -> None:
    value = at(WITH_GATEWAY, path)
    assert value != DEFAULTS[path]
    before: dict[str, Any] = {"image": {"operator": "operator:0", "runtime": "runtime:0"}}
    if path[0] == "monitoring" and path[-1] != "enabled":  # the object exists
        before = merged(before, nested((*path[:2], "enabled"), True))
    if path[0] == "gateway" and path[-1] != "enabled":
        before = merged(before, {"gateway": {"enabled": True}})
    change = nested(path, value)
    if path[0] == "devices":  # refused unless both are set
        change = {"devices": EVERYTHING["devices"]}
    assert helm.render(before) != helm.render(merged(before, change))


def test_the_values_reach_the_operator(helm: Helm) -> None:
    seen = settings_of(helm.render(EVERYTHING))
    jobs = EVERYTHING["jobs"]
    assert seen.models.runtime_image == "registry.test:5000/runtime:1"
    assert seen.models.compile_image == "registry.test:5000/compile:1"
    assert seen.models.engines == {"vllm": EngineSettings("registry.test:5000/vllm:1", "0.24")}
    assert seen.models.engine_defaults == {"trn2": "vllm"}
    assert seen.models.image_pull_policy == "IfNotPresent"
    assert seen.models.image_pull_secrets == ("one", "two")
    assert seen.models.jobs == JobSettings(
        *(jobs["nodeSelector"], tuple(jobs["tolerations"]), jobs["resources"], tuple(jobs["env"])),
        *(jobs["labels"], jobs["annotations"]),
    )
    assert seen.models.ca_bundle == CaBundle(config_map=KeyRef("private-ca", "ca.crt"))
    assert seen.models.storage.weights.pvc_template == ClaimTemplate(storage_class_name="efs", size="1Ti")
    assert seen.models.storage.artifacts.object_store == ObjectStore(uri="s3://bucket/artifacts")
    assert seen.models.storage.keep_days == 7
    assert seen.models.provisionable.instance_types == ("inf2.8xlarge", "trn2.48xlarge")
    assert seen.models.runtime_upgrade == "Rolling"
    assert seen.models.groups == GroupSettings(
        restart_seconds=30,
        max_restarts=2,
        place_seconds=60,
        topology_key="example.com/rack",
        host_network=True,
        max_nodes=4,
        controller="LeaderWorkerSet",
    )
    assert seen.models.device_mode == "PluginWithExtension"
    assert seen.models.device_scheduler_name == "neuron-scheduler"
    assert seen.models.troubleshooting_url == "https://wiki.test/troubleshooting"
    assert seen.models.device_families == {"lab-1": "trn1"}
    assert seen.models.network_policy_ingress_from == tuple(EVERYTHING["networkPolicy"]["ingressFrom"])
    (operator,) = seen.models.network_policy_operator
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "neuron-operator"
    assert (seen.namespace, seen.identity) == ("from-the-pod", "from-the-pod")
    assert seen.lease.duration_seconds == 15
    assert seen.watch_namespaces == ("team-a", "team-b")
    assert seen.num_workers == 4
    assert seen.log_level == "debug"


def test_chart_defaults_are_the_operators_defaults(helm: Helm) -> None:
    needed = ["--namespace", "from-the-pod", "--identity", "from-the-pod"]
    own = settings.load(["--runtime-image", IMAGES["image"]["runtime"], *needed], {})
    assert settings_of(helm.render(IMAGES)) == own


def gateway_of(helm: Helm, values: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The configuration as the gateway reads it in the pod, and its Deployment."""
    deployment = one(helm.render(values), "Deployment", "neuron-gateway")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["neuron-gateway"]
    return gateway_process.load([], {each["name"]: each["value"] for each in container["env"]}), deployment


def test_the_values_reach_the_gateway(helm: Helm) -> None:
    config, deployment = gateway_of(helm, WITH_GATEWAY)
    read = msgspec.to_builtins(config)
    for part in ("hold", "timeouts", "picking", "limits"):
        assert read[part] == GATEWAY[part]
    assert (config.gateways, config.namespaces, config.log_level) == (3, ("team-a",), "debug")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.timeouts.drain_delay_seconds + config.timeouts.drain_seconds
    (mount,), (volume,) = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert (volume["secret"]["secretName"], volume["name"]) == ("gateway-keys", mount["name"])
    assert volume["secret"]["defaultMode"] == READABLE
    assert config.keys_file == f"{mount['mountPath']}/keys.yaml"
    every, _ = gateway_of(helm, {**WITH_GATEWAY, "gateway": {"enabled": True}})
    assert every.namespaces == ("team-a", "team-b")  # those of the operator


def test_chart_defaults_are_the_gateways_defaults(helm: Helm) -> None:
    config, deployment = gateway_of(helm, {**IMAGES, "gateway": {"enabled": True}})
    assert config == Config(gateways=2)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": config.port, "metrics": config.metrics_port}
    assert not [each for each in helm.render(IMAGES) if each["metadata"]["name"] == "neuron-gateway"]


def test_the_gateway_may_read_what_it_serves_and_wake_models_and_nothing_else(helm: Helm) -> None:
    read = ((names.GROUP, names.PLURAL), (names.GROUP, names.ADAPTER_PLURAL), ("discovery.k8s.io", "endpointslices"))
    allowed = {(*kind, "", verb) for kind in read for verb in ("list", "watch")}
    allowed |= {(names.GROUP, f"{names.PLURAL}/scale", "", "patch")}
    everywhere = helm.render({**IMAGES, "gateway": {"enabled": True}})
    assert granted(one(everywhere, "ClusterRole", "neuron-gateway")["rules"]) == allowed
    narrow = helm.render(WITH_GATEWAY)
    role = one(narrow, "Role", "neuron-gateway")
    assert (role["metadata"]["namespace"], granted(role["rules"])) == ("team-a", allowed)
    of_cluster = {each["metadata"]["name"] for each in narrow if each["kind"] == "ClusterRole"}
    assert "neuron-gateway" not in of_cluster


def test_models_that_admit_named_clients_admit_the_gateway(helm: Helm) -> None:
    documents = helm.render(WITH_GATEWAY)
    (container,) = one(documents, "Deployment", "neuron-operator")["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    *peers, gateway = json.loads(env["NEURON_OPERATOR_NETWORK_POLICY_INGRESS_FROM"])
    assert peers == EVERYTHING["networkPolicy"]["ingressFrom"]
    labels = one(documents, "Deployment", "neuron-gateway")["spec"]["template"]["metadata"]["labels"]
    assert gateway["podSelector"]["matchLabels"].items() <= labels.items()
    selector = one(documents, "Service", "neuron-operator")["spec"]["selector"]
    assert not selector.items() <= labels.items()


def test_the_chart_sets_every_setting_or_excludes_it_explicitly(helm: Helm) -> None:
    (container,) = one(helm.render(IMAGES), "Deployment")["spec"]["template"]["spec"]["containers"]
    known = {setting.variable for setting in settings.SETTINGS}
    others = ("HTTP_HOST", "HTTP_PORT", "HEALTH_PORT", "KUBECONFIG", "LEASE_NAME")
    # Set where pods admit named clients only.
    left_alone = {f"{settings.ENV_PREFIX}{name}" for name in (*others, "NETWORK_POLICY_OPERATOR")}
    assert {entry["name"] for entry in container["env"]} == known - left_alone


def test_service_and_probes_use_the_ports_of_the_operator(helm: Helm) -> None:
    documents = helm.render(IMAGES)
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    own = settings_of(documents)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": own.http_port, "health": own.health_port}
    (service_port,) = one(documents, "Service")["spec"]["ports"]
    assert service_port["targetPort"] == "http"
    probed = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    live, ready = {"path": "/healthz", "port": "health"}, {"path": "/readyz", "port": "http"}
    assert probed == {"startupProbe": live, "livenessProbe": live, "readinessProbe": ready}


def test_selectors_match_the_operator_and_not_the_test_pod(helm: Helm) -> None:
    documents = helm.render(IMAGES)
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    test_labels = one(documents, "Pod")["metadata"]["labels"]
    selectors = [
        one(documents, "Deployment")["spec"]["selector"]["matchLabels"],
        one(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(documents, "Service")["spec"]["selector"],
        *(
            constraint["labelSelector"]["matchLabels"]
            for constraint in one(documents, "Deployment")["spec"]["template"]["spec"]["topologySpreadConstraints"]
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test_labels.items()


MONITORING = {"ConfigMap", "PodMonitor", "PrometheusRule"}


def test_monitoring_objects_are_off_by_default(helm: Helm) -> None:
    assert not [d for d in helm.render(IMAGES) if d["kind"] in MONITORING]
    for part, kind in (("dashboard", "ConfigMap"), ("podMonitors", "PodMonitor"), ("rules", "PrometheusRule")):
        documents = helm.render({**IMAGES, "monitoring": {part: {"enabled": True}}})
        assert {d["kind"] for d in documents} & MONITORING == {kind}


def test_the_chart_renders_the_dashboards_with_the_chosen_data_source(helm: Helm) -> None:
    boards = one(helm.render(EVERYTHING), "ConfigMap")
    assert boards["metadata"]["namespace"] == "grafana"
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["metadata"]["annotations"] == {"grafana_folder": "Serving"}
    assert boards["data"].keys() == {file.name for file in (CHART / "dashboards").iterdir()}
    for name, text in boards["data"].items():
        rendered, file = json.loads(text), json.loads((CHART / "dashboards" / name).read_text())
        assert rendered["templating"]["list"][0].pop("current") == {"text": "Thanos", "value": "Thanos"}
        assert file["templating"]["list"][0].pop("current") == {}
        assert rendered == file
    assert len(json.dumps(boards)) < 250_000, "a ConfigMap holds 1 MiB, an annotation of kubectl apply 256 KiB"


def test_monitors_select_models_and_the_operator(helm: Helm) -> None:
    documents = helm.render(EVERYTHING)
    models = one(documents, "PodMonitor", "neuron-operator-models")
    wanted = models["spec"]["selector"]["matchLabels"]
    for made in FILES:
        for child in render(yaml.safe_load(made.read_text())["given"])["objects"]:
            if child["kind"] in ("Deployment", "Job"):
                pod = child["spec"]["template"]
                serves = child["kind"] == "Deployment"
                assert (wanted.items() <= pod["metadata"]["labels"].items()) == serves, made.name
                assert not serves or pod["spec"]["containers"][0]["ports"][0]["name"] == names.PORT_NAME
    assert models["spec"]["namespaceSelector"] == {"matchNames": EVERYTHING["watchNamespaces"]}
    assert one(helm.render(EVERYTHING | {"watchNamespaces": []}), "PodMonitor", "neuron-operator-models")["spec"][
        "namespaceSelector"
    ] == {"any": True}
    operator = one(documents, "PodMonitor", "neuron-operator-operator")
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert operator["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert (
        not operator["spec"]["selector"]["matchLabels"].items() <= one(documents, "Pod")["metadata"]["labels"].items()
    )
    assert operator["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    ports = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"]
    (port,) = (port for port in ports if port["containerPort"] == settings_of(documents).http_port)
    own_labels: dict[str, object] = {"honorLabels": True}
    for monitor, name, extra in ((models, names.PORT_NAME, {}), (operator, port["name"], own_labels)):
        assert monitor["spec"]["podMetricsEndpoints"] == [
            {"port": name, "path": "/metrics", "interval": "15s", **extra}
        ]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize(
    ("controller", "served", "found"),
    [
        ("StatefulSet", True, "StatefulSet"),
        ("LeaderWorkerSet", False, "LeaderWorkerSet"),
        ("Auto", True, "LeaderWorkerSet"),
        ("Auto", False, "StatefulSet"),
    ],
)
def test_leader_worker_sets_are_used_and_allowed_only_as_the_chart_says(
    helm: Helm, controller: str, served: bool, found: str
) -> None:
    also = ("--api-versions", "leaderworkerset.x-k8s.io/v1") if served else ()
    made = helm.render(IMAGES | {"groups": {"controller": controller}}, *also)
    (operator,) = (one for one in made if one["kind"] == "Deployment")
    env = {one["name"]: one.get("value") for one in operator["spec"]["template"]["spec"]["containers"][0]["env"]}
    groups = msgspec.json.decode(env["NEURON_OPERATOR_GROUPS"], type=GroupSettings)
    assert (groups.controller, groups.max_nodes) == (found, 1)
    rules = [rule for one in made if one["kind"] == "ClusterRole" for rule in one["rules"]]
    assert any("leaderworkersets" in rule["resources"] for rule in rules) == (found == "LeaderWorkerSet")


def test_the_chart_renders_the_alerting_rules(helm: Helm) -> None:
    rules = one(helm.render(EVERYTHING), "PrometheusRule")
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            link = rule["annotations"].pop("runbook_url")
            assert link == f"https://docs.test/runbook.md#{rule['alert'].lower()}"
    file = yaml.safe_load((CHART / "rules" / "neuron-serving.yaml").read_text())
    assert rules["spec"] == file
    without_link = helm.render({**IMAGES, "monitoring": {"rules": {"enabled": True}}})
    assert one(without_link, "PrometheusRule")["spec"] == file


def test_a_single_replica_has_no_disruption_budget(helm: Helm) -> None:
    assert not [d for d in helm.render({**IMAGES, "replicas": 1}) if d["kind"] == "PodDisruptionBudget"]


def scored_low(documents: list[dict[str, Any]], folder: Path) -> set[tuple[str, str]]:
    """Kinds and checks about which kube-score complains."""
    file = folder / "objects.json"
    file.write_text("\n---\n".join(json.dumps(d) for d in documents))
    program = ensure("kube-score")["kube-score"] / "kube-score"
    done = subprocess.run([program, "score", "-o", "json", file], capture_output=True, text=True, check=False)
    return {
        (scored["type_meta"]["kind"], check["check"]["id"])
        for scored in json.loads(done.stdout)
        for check in scored["checks"]
        if not check["skipped"] and check["grade"] < 10
    }


@pytest.mark.parametrize("enabled", [False, True], ids=["operator", "gateway"])
def test_kube_score_finds_nothing_but_the_known_exceptions(helm: Helm, tmp_path: Path, enabled: bool) -> None:
    assert scored_low(helm.render({**IMAGES, "gateway": {"enabled": enabled}}), tmp_path) == EXCEPTIONS.keys()


def objects_of_models() -> list[list[dict[str, Any]]]:
    """The objects of each golden case, in a namespace of its own: an object of another case must not match."""
    return [
        [
            {**child, "metadata": {**child["metadata"], "namespace": re.sub(r"\W|_", "-", made.stem)}}
            for child in render(yaml.safe_load(made.read_text())["given"])["objects"]
        ]
        for made in FILES
    ]


def test_kube_score_finds_nothing_but_the_known_exceptions_in_the_objects_of_models(tmp_path: Path) -> None:
    objects: list[dict[str, Any]] = []
    for children in objects_of_models():
        serves = any(child["kind"] == "Deployment" for child in children)  # else the Service has no pods yet
        objects += [child for child in children if serves or child["kind"] in ("Job", "CronJob")]
    assert scored_low(objects, tmp_path) == EXCEPTIONS_OF_MODELS.keys()


@pytest.mark.timeout(900)  # the first one may install
def test_checkov_finds_nothing_but_the_known_exceptions(helm: Helm, tmp_path: Path) -> None:
    of_models = [child for children in objects_of_models() for child in children]
    found = complaints({"chart": helm.render(IMAGES), "models": of_models}, tmp_path)
    different = {name: found[name] ^ exceptions.keys() for name, exceptions in CHECKOV_EXCEPTIONS.items()}
    assert not any(different.values()), different


def test_common_labels_are_on_every_object_and_select_nothing(helm: Helm) -> None:
    labels = EVERYTHING["commonLabels"]
    documents = helm.render(EVERYTHING)
    for document in documents:
        if document["kind"] not in ("CustomResourceDefinition", "ConfigMap"):
            assert labels.items() <= document["metadata"]["labels"].items(), document["metadata"]["name"]
    board = one(documents, "ConfigMap")["metadata"]["labels"]
    assert board.items() >= {**labels, **EVERYTHING["monitoring"]["dashboard"]["labels"]}.items()
    deployment = one(documents, "Deployment")["spec"]
    assert labels.items() <= deployment["template"]["metadata"]["labels"].items()
    assert not labels.keys() & deployment["selector"]["matchLabels"].keys()
    own = one(helm.render(IMAGES), "Deployment")["metadata"]["labels"]
    report = helm("template", str(CHART), values={**IMAGES, "commonLabels": dict.fromkeys(own, "other")}, code=1)
    assert all(f"/commonLabels/{name.replace('/', '~1')}" in report for name in own), report


def test_images_may_be_pinned_by_digest(helm: Helm) -> None:
    images = {name: f"registry.test:5000/{name}@sha256:{'0' * 64}" for name in ("operator", "runtime", "compile")}
    documents = helm.render({"image": images})
    assert one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"] == images["operator"]
    assert one(documents, "Pod")["spec"]["containers"][0]["image"] == images["operator"]
    seen = settings_of(documents).models
    assert (seen.runtime_image, seen.compile_image) == (images["runtime"], images["compile"])


def test_the_operators_ports_are_all_that_its_network_policy_opens(helm: Helm) -> None:
    documents = helm.render(IMAGES)
    policy = one(documents, "NetworkPolicy")["spec"]
    template = one(documents, "Deployment")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    opened = {port["port"] for port in rule["ports"]}
    assert opened == {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert policy["policyTypes"] == ["Ingress"]


def test_the_crd_can_be_managed_outside_the_chart(helm: Helm) -> None:
    documents = helm.render({**IMAGES, "crds": {"install": False}})
    assert not [d for d in documents if d["kind"] == "CustomResourceDefinition"]


def test_the_notes_show_the_next_command(helm: Helm) -> None:
    where = ("--namespace", NAMESPACE, "--dry-run=client", "--hide-notes=false")
    notes = helm("install", "neuron-serving", str(CHART), *where).partition("NOTES:")[2]
    for command in (f"helm test neuron-serving -n {NAMESPACE}", "kubectl apply", "kubectl wait", "kubectl describe nm"):
        assert command in notes


def test_a_packaged_chart_renders_the_same(helm: Helm, tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    packaged = helm("template", "neuron-serving", str(package), "--namespace", NAMESPACE)
    assert packaged == helm("template", "neuron-serving", str(CHART), "--namespace", NAMESPACE)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_pods_pass_pod_security_restricted(helm: Helm, server: ApiServer, values: Mapping[str, Any]) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": "restricted", "labels": labels}
    server.apply("/api/v1/namespaces/restricted", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    documents = helm.render(values)
    templates = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    for spec in (*templates, one(documents, "Pod")["spec"]):
        for account in ("default", spec.get("serviceAccountName", "default")):
            body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}}
            server.apply(f"/api/v1/namespaces/restricted/serviceaccounts/{account}", body)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {**spec, "priorityClassName": ""}}
        server.call("POST", "/api/v1/namespaces/restricted/pods?dryRun=All", pod)
    privileged = {**pod, "spec": {**spec, "securityContext": {}}}
    with pytest.raises(urllib.error.HTTPError, match="403"):
        server.call("POST", "/api/v1/namespaces/restricted/pods?dryRun=All", privileged)


def test_models_survive_an_uninstall_and_are_adopted_by_the_next_install(helm: Helm, server: ApiServer) -> None:
    cluster = ("--namespace", NAMESPACE, "--kubeconfig", str(server.kubeconfig("admin")))

    def generation() -> int:
        return int(server.call("GET", CRD)["metadata"]["generation"])

    helm("install", "neuron-serving", str(CHART), *cluster, "--create-namespace")
    model = {
        "apiVersion": "neuron-serving.dev/v1alpha1",
        "kind": "NeuronModel",
        "metadata": {"name": "demo"},
        "spec": {"model": {"uri": "file:///models/demo"}, "accelerator": {"type": "CPU"}},
    }
    uid = _when_served(server, model)["metadata"]["uid"]
    before = generation()
    old = {"spec": {"names": {"shortNames": ["old"]}}}
    server.call("PATCH", CRD, old, "application/merge-patch+json")
    helm("upgrade", "neuron-serving", str(CHART), *cluster, "--force-conflicts", values={**IMAGES, "replicas": 3})
    assert server.call("GET", CRD)["spec"]["names"]["shortNames"] == ["nm"], "an upgrade leaves an old resource behind"
    assert generation() > before

    helm("uninstall", "neuron-serving", *cluster)
    left = server.call("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments")["items"]
    assert left == []
    assert server.call("GET", f"{MODELS}/demo")["metadata"]["uid"] == uid

    helm("install", "neuron-serving", str(CHART), *cluster)
    assert server.call("GET", f"{MODELS}/demo")["metadata"]["uid"] == uid


@pytest.mark.parametrize("num_models", [8, pytest.param(50, marks=pytest.mark.long)])
async def test_an_upgrade_that_changes_every_value_restarts_no_pod_of_many_models(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_models: int
) -> None:
    """The later operator would also make other pods of the same manifests, and does so of a new one."""

    def later_template(*arguments: Any, **named: Any) -> dict[str, Any]:
        made = serving_pod_template(*arguments, **named)
        return {**made, "metadata": {**made["metadata"], "annotations": {"version": "later"}}}

    hub = [f"hub-{number}" for number in range(num_models // 2)]
    models = [*hub, *(f"local-{number}" for number in range(num_models // 2))]
    with served(tmp_path) as server:
        namespace = Namespace(server)
        where = {"namespace": OPERATOR_NAMESPACE, "watch_namespaces": (namespace.name,)}
        # Without groups as LeaderWorkerSets, which this cluster does not have.
        other = {"image": {"runtime": "registry.test:5000/runtime:2"}, "groups": {"controller": "StatefulSet"}}
        newer = merged(EVERYTHING, other)
        before, after = (replace(settings_of(helm.render(values)), **where) for values in (IMAGES, newer))

        def deployments() -> dict[str, tuple[int, Any]]:
            found = {d["metadata"]["name"]: d for d in namespace.list(BY_KIND["Deployment"])}
            return {name: (d["metadata"]["generation"], d["spec"]["template"]) for name, d in found.items()}

        async with client_of(server) as client:
            async with operating(client, before):
                for name in models:
                    namespace.put_model(name, **({"model": {"uri": "hf://acme/tiny"}} if name in hub else {}))
                await eventually(lambda: len(namespace.list(BY_KIND["Job"])) == 2)
                namespace.finish_resolve()
                await eventually(lambda: deployments().keys() == set(models))
                await eventually(lambda: all(namespace.condition("UpToDate", name)[0] == "True" for name in models))
                await eventually(lambda: all(namespace.has_served(name) for name in models))
            running = deployments()
            monkeypatch.setattr("neuron_operator.decide.pin.serving_pod_template", later_template)
            async with operating(client, after):
                peers = list(after.models.network_policy_ingress_from)

                def has_reached_all() -> bool:
                    policies = namespace.list(BY_KIND["NetworkPolicy"])
                    return all(policy["spec"]["ingress"][0].get("from") == peers for policy in policies)

                await eventually(has_reached_all)
                assert deployments() == running
                namespace.put_model("new")
                await eventually(namespace.finish_resolve)
                await eventually(lambda: "new" in deployments())
                found = deployments()
                assert found.pop("new")[1]["metadata"]["annotations"]["version"] == "later"
                assert found == running


FOREIGN_CRDS = ("scaledobjects", "httproutes", "podmonitors", "prometheusrules")


@pytest.fixture(scope="module")
def foreign_kinds(server: ApiServer) -> ApiServer:
    """A server that knows the kinds of KEDA, the Gateway API and the Prometheus operator, from their own modules."""
    for name in FOREIGN_CRDS:
        crd = yaml.safe_load((ensure("crds")["crds"] / f"{name}.yaml").read_text())
        server.apply(f"/apis/{crd['apiVersion']}/customresourcedefinitions/{crd['metadata']['name']}", crd)
    return server


def refused(server: ApiServer, body: dict[str, Any]) -> str:
    """Why the server refuses the object, with unknown fields refused too; "" if it takes it."""
    plural = {"Ingress": "ingresses"}.get(body["kind"], f"{body['kind'].lower()}s")
    path = f"/apis/{body['apiVersion']}/namespaces/default/{plural}?dryRun=All&fieldValidation=Strict"
    answers: list[str] = []

    def has_answered() -> bool:
        try:
            server.call("POST", path, {**body, "metadata": {**body["metadata"], "namespace": "default"}})
            answers.append("")
        except urllib.error.HTTPError as error:
            if error.code not in NOT_YET_SERVED:
                answers.append("\n".join(error.__notes__))
        return bool(answers)

    wait_until(f"{body['kind']} is served", has_answered)
    return answers[0]


@pytest.mark.parametrize("name", ["autoscaling-hpa", "autoscaling-keda", "httproute", "ingress"])
def test_the_api_server_accepts_the_examples(foreign_kinds: ApiServer, name: str) -> None:
    body = yaml.safe_load((CHART.parents[1] / "examples" / f"{name}.yaml").read_text())
    assert refused(foreign_kinds, body) == ""
    assert "unknown field" in refused(foreign_kinds, {**body, "spec": {**body["spec"], "unheardOf": 1}})


def test_the_prometheus_operator_accepts_the_charts_objects(helm: Helm, foreign_kinds: ApiServer) -> None:
    documents = [d for d in helm.render(EVERYTHING) if d["apiVersion"].startswith("monitoring.coreos.com/")]
    assert len(documents) == 3
    for body in documents:
        assert refused(foreign_kinds, body) == ""


def _when_served(server: ApiServer, model: dict[str, Any]) -> dict[str, Any]:
    """Applies the model; the API server serves a new resource only a moment after its creation."""
    applied: list[dict[str, Any]] = []

    def is_applied() -> bool:
        try:
            applied.append(server.apply(f"{MODELS}/{model['metadata']['name']}", model))
        except urllib.error.HTTPError as error:
            if error.code not in NOT_YET_SERVED:
                raise
        return bool(applied)

    wait_until("the resource is served", is_applied)
    return applied[0]
