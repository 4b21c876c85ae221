"""The rights that the chart gives the operator, as a test installs them without helm."""

from __future__ import annotations

from typing import Any

from helpers.apiserver import ApiServer

OPERATOR_NAMESPACE = "neuron-serving"
OPERATOR_ACCOUNT = "neuron-operator"

KEEP = ["get", "list", "watch", "create", "patch"]
CLUSTER_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["neuron-serving.dev"], "resources": ["neuronmodels"], "verbs": ["list", "watch"]},
    {"apiGroups": ["neuron-serving.dev"], "resources": ["neuronmodels/status"], "verbs": ["patch"]},
    {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": KEEP},
    {"apiGroups": [""], "resources": ["services", "serviceaccounts"], "verbs": KEEP},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": KEEP},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": KEEP},
    {"apiGroups": ["apps"], "resources": ["controllerrevisions"], "verbs": [*KEEP, "delete"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": [*KEEP, "delete"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": [*KEEP, "delete"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "list"]},
]
LEASE_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["neuron-operator"],
        "verbs": ["get", "list", "watch", "update"],
    },
]


def grant(server: ApiServer, rules: list[dict[str, Any]] | None = None) -> None:
    """Give the operator's account its ClusterRole (`rules`: another one) and its Role; made again where it exists."""
    subject = {"kind": "ServiceAccount", "name": OPERATOR_ACCOUNT, "namespace": OPERATOR_NAMESPACE}
    rbac = "rbac.authorization.k8s.io"

    def put(path: str, kind: str, name: str, **content: Any) -> None:
        body = {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": {"name": name}, **content}
        server.apply(f"/apis/{rbac}/v1/{path}/{name}", body)

    ensure_namespace(server, OPERATOR_NAMESPACE)
    in_namespace = f"namespaces/{OPERATOR_NAMESPACE}"
    put("clusterroles", "ClusterRole", "neuron-operator", rules=CLUSTER_RULES if rules is None else rules)
    put(
        "clusterrolebindings",
        "ClusterRoleBinding",
        "neuron-operator",
        roleRef={"apiGroup": rbac, "kind": "ClusterRole", "name": "neuron-operator"},
        subjects=[subject],
    )
    put(f"{in_namespace}/roles", "Role", "neuron-operator", rules=LEASE_RULES)
    put(
        f"{in_namespace}/rolebindings",
        "RoleBinding",
        "neuron-operator",
        roleRef={"apiGroup": rbac, "kind": "Role", "name": "neuron-operator"},
        subjects=[subject],
    )


def ensure_namespace(server: ApiServer, name: str) -> None:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    server.apply(f"/api/v1/namespaces/{name}", body)
