"""The rights that the chart grants the operator, read from its templates, to install exactly these without helm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from helpers.apiserver import ApiServer

OPERATOR_NAMESPACE = "neuron-serving"
OPERATOR_ACCOUNT = "neuron-operator"

CHART_RIGHTS = Path(__file__).parents[2] / "charts" / "neuron-serving" / "templates" / "rbac.yaml"


def _rules(*, by_claim: bool = False) -> list[list[dict[str, Any]]]:
    """Rules of the chart's roles, rendered for an operator of all namespaces, which makes groups of Kubernetes' own
    objects, and no pools for gateways: of its ClusterRole, and of the Lease's Role.

    by_claim: with nodes that give devices by claims.
    """
    text = CHART_RIGHTS.read_text()
    text = re.sub(r"\{\{- if \$.Values.gateway.inferencePools.*?\{\{- end \}\}", "", text, flags=re.DOTALL)
    if not by_claim:
        text = re.sub(r"\{\{- if has \$.Values.devices.mode.*?\{\{- end \}\}", "", text, flags=re.DOTALL)
    text = re.sub(r"\{\{- if eq \(include \"neuron-serving.groupController.*?\{\{- end \}\}", "", text, flags=re.DOTALL)
    text = re.sub(r"\{\{- /\*.*?\*/ -?\}\}", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("{{")]
    filled = re.sub(r"\{\{.*?\}\}", OPERATOR_ACCOUNT, "\n".join(lines))
    return [found["rules"] for found in yaml.safe_load_all(filled) if "rules" in found]


CLUSTER_RULES, LEASE_RULES = _rules()
CLAIM_RULES, _ = _rules(by_claim=True)
"""Those of the ClusterRole where nodes give devices by claims."""
NAMESPACED_RULES = [rule for rule in CLUSTER_RULES if rule["resources"] != ["nodes"]]
"""With `watchNamespaces`, in a Role of each namespace. Nothing is granted in the whole cluster."""


def grant(server: ApiServer, rules: list[dict[str, Any]] | None = None, namespaces: Sequence[str] = ()) -> None:
    """Grants the operator's account its ClusterRole (or `rules`) and its Role, replacing existing ones. With
    `namespaces` it gets a Role in each of them in place of the ClusterRole."""
    subject = {"kind": "ServiceAccount", "name": OPERATOR_ACCOUNT, "namespace": OPERATOR_NAMESPACE}
    rbac = "rbac.authorization.k8s.io"

    def put(namespace: str, name: str, rules: list[dict[str, Any]]) -> None:
        """A role and its binding; in the whole cluster if `namespace` is empty."""
        scope, prefix = (f"namespaces/{namespace}/", "") if namespace else ("", "Cluster")
        role, binding = f"{prefix}Role", f"{prefix}RoleBinding"
        bodies: dict[str, dict[str, Any]] = {
            role: {"rules": rules},
            binding: {"roleRef": {"apiGroup": rbac, "kind": role, "name": name}, "subjects": [subject]},
        }
        for kind, content in bodies.items():
            body = {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": {"name": name}, **content}
            server.apply(f"/apis/{rbac}/v1/{scope}{kind.lower()}s/{name}", body)

    ensure_namespace(server, OPERATOR_NAMESPACE)
    if namespaces:
        for kind in ("clusterrolebindings", "clusterroles"):
            server.call("DELETE", f"/apis/{rbac}/v1/{kind}/{OPERATOR_ACCOUNT}")
    else:
        put("", OPERATOR_ACCOUNT, CLUSTER_RULES if rules is None else rules)
    for namespace in namespaces:
        put(namespace, f"{OPERATOR_ACCOUNT}-models", NAMESPACED_RULES)
    put(OPERATOR_NAMESPACE, f"{OPERATOR_ACCOUNT}-lease", LEASE_RULES)


def ensure_namespace(server: ApiServer, name: str) -> None:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    server.apply(f"/api/v1/namespaces/{name}", body)
