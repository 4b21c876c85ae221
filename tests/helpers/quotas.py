"""A ResourceQuota without its controller, which the API servers of tests do not run."""

from __future__ import annotations

from helpers.operators import Namespace

NAME = "few"


def set_quota(namespace: Namespace, **hard: int) -> None:
    """Creates a quota of which nothing is used yet."""
    limits = {resource: str(number) for resource, number in hard.items()}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": NAME}, "spec": {"hard": limits}}
    namespace.server.call("POST", _path(namespace), quota)
    counted = {"status": {"hard": limits, "used": dict.fromkeys(limits, "0")}}
    namespace.server.call("PATCH", f"{_path(namespace)}/{NAME}/status", counted, "application/merge-patch+json")


def delete_quota(namespace: Namespace) -> None:
    namespace.server.call("DELETE", f"{_path(namespace)}/{NAME}", {})


def _path(namespace: Namespace) -> str:
    return f"/api/v1/namespaces/{namespace.name}/resourcequotas"
