"""What must be in the cluster before a replica begins: the CRDs, with all fields of the status, and the rights to
watch. Called by `run.process`, once at the start and then for what was refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.errors import ClusterFault
from neuron_operator.api.schema import DEFINITIONS, schema_of
from neuron_operator.cluster.client import (
    CLAIM_TEMPLATES,
    INFERENCE_POOLS,
    LEADER_WORKER_SETS,
    NEURON_ADAPTERS,
    NEURON_MODELS,
    Client,
    Forbidden,
    NotFound,
    Resource,
    Throttled,
)
from neuron_operator.read.world import Settings

logger = logging.getLogger(__name__)

REGRANT_SECONDS = 30.0
GRANT_SECONDS = 10.0
"""A busy API server may learn of a new role, or publish a new CRD, some seconds after the operator starts."""
MAX_NAMED = 5
"""Fields in a message."""
_NONE = "metadata.name=none"
"""Selects nothing: the request only checks the right to list."""

_CRDS = (NEURON_MODELS, NEURON_ADAPTERS)
INSTALL = {
    NEURON_MODELS: "install the CRD with `kubectl apply --server-side -f crds/neuronmodels.yaml` or with the chart "
    "neuron-serving",
    NEURON_ADAPTERS: "install the CRD with `kubectl apply --server-side -f crds/neuronadapters.yaml` or with the chart "
    "neuron-serving",
    LEADER_WORKER_SETS: "install LeaderWorkerSet, or set the chart value groups.controller to StatefulSet",
    CLAIM_TEMPLATES: "claims need Kubernetes 1.34: update it, or set the chart value devices.mode to Plugin",
    INFERENCE_POOLS: "install the CRDs of the Gateway API Inference Extension, or set the chart value "
    "gateway.inferencePools.enabled to false",
}
"""What the operator cannot run without, if it is used, and the cure."""


def optional_children(settings: Settings) -> tuple[Resource, ...]:
    """The kinds of children that only some installations have."""
    used = {
        LEADER_WORKER_SETS: settings.groups.controller == names.LEADER_WORKER_SET,
        CLAIM_TEMPLATES: settings.claims_devices,
        INFERENCE_POOLS: settings.inference_pools.enabled,
    }
    return tuple(resource for resource, is_used in used.items() if is_used)


async def refused_namespaces(
    cluster: Client, namespaces: Sequence[str], optional: Sequence[Resource] = ()
) -> frozenset[str]:
    """Those of the namespaces that may not be watched; empty text: the cluster, if there are no namespaces. Where one
    was deleted, its Role is gone, and the models of the others are looked after all the same.

    Raises ClusterFault, with the cure, if a CRD is missing or the API server is unreachable.
    """
    last_wait = asyncio.get_running_loop().time() + GRANT_SECONDS
    refused = set[str]()
    for namespace in namespaces or ("",):
        try:
            for kind in (*_CRDS, *optional):
                await _until_granted(cluster, kind, namespace or None, last_wait)
        except Forbidden as fault:
            refused.add(namespace)
            cure = "if it exists, run helm upgrade" if namespace else "grant it with the chart (helm upgrade)"
            logger.warning("%s is left out: %s; %s", _place(namespace), fault, cure)
    return frozenset(refused)


async def until_one_is_granted(cluster: Client, namespaces: Collection[str], optional: Sequence[Resource] = ()) -> None:
    """Raises ClusterFault once `refused_namespaces` would leave out one of these no more: the process begins again."""
    while True:
        await asyncio.sleep(REGRANT_SECONDS)
        for namespace in namespaces:
            try:
                for kind in (*_CRDS, *optional):
                    await cluster.list(kind, namespace or None, field_selector=_NONE)
            except NotFound:
                pass  # the next start says what to install
            except ClusterFault as fault:
                logger.debug("%s: %s", _place(namespace), fault)
                continue
            text = f"{_place(namespace)} can be watched now: the operator begins again with it"
            raise ClusterFault(text, retriable=True)


def _place(namespace: str) -> str:
    return f"namespace {namespace}" if namespace else "the cluster"


async def _until_granted(cluster: Client, kind: Resource, namespace: str | None, last_wait: float) -> None:
    while True:
        try:
            await cluster.list(kind, namespace, field_selector=_NONE)
            return
        except Throttled as fault:  # also right after the CRD was created
            logger.info("%s", fault)
            await asyncio.sleep(fault.retry_after_seconds)
        except NotFound as fault:
            text = f"the cluster has no {kind.plural} of {kind.api_version}; {INSTALL[kind]}"
            raise ClusterFault(text, retriable=False) from fault
        except Forbidden:
            if asyncio.get_running_loop().time() > last_wait:
                raise
            await asyncio.sleep(1.0)


async def check_schemas(cluster: Client) -> None:
    """Raises ClusterFault, with the cure, if a CRD of an earlier version is installed, which lacks fields of the
    status: the API server would refuse every status. Nothing is checked where the schema may not be read."""
    last_wait = asyncio.get_running_loop().time() + GRANT_SECONDS
    for resource, definition in zip((NEURON_MODELS, NEURON_ADAPTERS), DEFINITIONS, strict=True):
        while True:
            try:
                found = await cluster.schema(resource)
            except ClusterFault as fault:
                logger.info("the schema of %s is not checked: %s", resource.plural, fault)
                break
            wanted = {"properties": {"status": schema_of(definition.status)}}
            lacking = list(_missing(wanted, found)) if found else ()
            if not lacking:
                break
            if asyncio.get_running_loop().time() > last_wait:
                listed = ", ".join(islice(lacking, MAX_NAMED)) + (", ..." if len(lacking) > MAX_NAMED else "")
                text = f"the CRD {resource.plural} is older than this operator and lacks {listed}; {INSTALL[resource]}"
                raise ClusterFault(text, retriable=False)
            await asyncio.sleep(1.0)


def _missing(wanted: Any, found: Any, path: str = "") -> Iterator[str]:
    """The fields of a schema that another one lacks."""
    fields = found.get("properties", {})
    for name, schema in wanted.get("properties", {}).items():
        if name in fields:
            yield from _missing(schema, fields[name], f"{path}{name}.")
        else:
            yield path + name
    if "items" in wanted:
        yield from _missing(wanted["items"], found.get("items", {}), f"{path.removesuffix('.')}[].")
