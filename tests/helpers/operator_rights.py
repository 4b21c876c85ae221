"""The rights that the chart grants the operator, read from its templates, to install exactly these without helm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from helpers.apiserver import ApiServer

OPERATOR_NAMESPACE = "neuron-serving"
OPERATOR_ACCOUNT = "neuron-operator"

CHART_RIGHTS = Path(__file__).parents[2] / "charts" / "neuron-serving" / "templates" / "rbac.yaml"


def _rules(kind: str) -> list[dict[str, Any]]:
    """Rules of the chart's ClusterRole or Role, rendered for an operator of all namespaces."""
    lines = [line for line in CHART_RIGHTS.read_text().splitlines() if not line.startswith("{{")]
    filled = re.sub(r"\{\{.*?\}\}", OPERATOR_ACCOUNT, "\n".join(lines))
    (rules,) = (found["rules"] for found in yaml.safe_load_all(filled) if found["kind"] == kind)
    return list(rules)


CLUSTER_RULES = _rules("ClusterRole")
LEASE_RULES = _rules("Role")


def grant(server: ApiServer, rules: list[dict[str, Any]] | None = None) -> None:
    """Grants the operator's account its ClusterRole (or `rules`) and its Role, replacing existing ones."""
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
