"""A replica on several nodes: the pods of a leader and its followers, and what they share.

`group_owner` and `rest_of` render one attempt from the pod template of a revision: two StatefulSets, or a
LeaderWorkerSet, which are never edited. The first object owns all the rest, so that deleting it ends the group as a
whole. Called by `decide`. Pure: the content of the Secret is made by `reconcile` when it writes it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.engines import Engine
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.objects import dig, labels_of, name_of, only, text
from neuron_operator.read.revision import Revision
from neuron_operator.read.world import GroupSettings, Object
from neuron_operator.render.objects import Mount, child, without_empty
from neuron_operator.render.pods import READABLE, before_stopping, merged_env, with_terms


@dataclass(frozen=True)
class Attempt:
    """One start of one replica."""

    replica: int
    number: int
    labels: Mapping[str, str]
    """Labels of the nodes that it may use, besides what the template says."""


def group_owner(
    model: NeuronModel, revision: Revision, attempt: Attempt, settings: GroupSettings, *, is_room_known: bool
) -> Object:
    """The owner of everything else of the group: the leader's StatefulSet, or the LeaderWorkerSet of all its pods."""
    name = names.group_name(model.name, attempt.replica, revision.name, attempt.number)
    size = revision.placement.nodes
    own = {
        names.REVISION_LABEL: revision.name,
        names.GROUP_LABEL: name,
        names.REPLICA_LABEL: str(attempt.replica),
        names.ATTEMPT_LABEL: str(attempt.number),
        names.GROUP_SIZE_LABEL: str(size),
    }
    template = copy.deepcopy(revision.pinned.template)
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **own}
    spec = template["spec"]
    spec["nodeSelector"] = {**attempt.labels, **spec.get("nodeSelector", {})}
    is_unknown = revision.placement.on_devices and not is_room_known
    together = (names.INSTANCE_TYPE_LABEL, settings.topology_key) if is_unknown else ()
    spec["affinity"] = _apart(spec.get("affinity") or {}, name, filter(None, together))
    if settings.host_network:
        spec.update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet")
    source = {"secret": {"secretName": name, "defaultMode": READABLE}}
    secret = Mount(names.GROUP_SECRET_VOLUME, names.GROUP_SECRET_DIR, source, read_only=True)
    spec["volumes"] = [*spec.get("volumes", ()), secret.volume]
    container = _runtime(template)
    container["volumeMounts"] = [*container.get("volumeMounts", ()), secret.in_container]
    of_index = {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX_LABELS[settings.controller]}']"}}
    own_env = (
        {"name": names.RANK_VARIABLE, "valueFrom": of_index},
        {"name": names.GROUP_SIZE_VARIABLE, "value": str(size)},
        {"name": names.LEADER_VARIABLE, "value": f"{name}-0.{name}.{model.namespace}.svc"},
        {"name": names.GROUP_SECRET_VARIABLE, "value": f"{names.GROUP_SECRET_DIR}/{names.GROUP_SECRET_KEY}"},
    )
    variable = revision.engine.address_variable
    address = ({"name": variable, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},) if variable else ()
    container["env"] = merged_env(container.get("env", ()), own_env, address)
    template["spec"] = without_empty(spec)
    if settings.controller == names.LEADER_WORKER_SET:
        kind, made = names.LEADER_WORKER_SET, _leader_worker_spec(template, revision.engine, size)
        return child(model, names.LEADER_WORKER_SET_API, kind, name, labels=own, spec=made)
    selector = {names.GROUP_LABEL: name, names.ROLE_LABEL: names.ROLE_LEADER}
    spec = _set(template, selector, service=name, replicas=1)
    return child(model, "apps/v1", "StatefulSet", name, labels=own, spec=spec)


_INDEX_LABELS = {"StatefulSet": names.POD_INDEX_LABEL, names.LEADER_WORKER_SET: names.WORKER_INDEX_LABEL}
"""With the number of a pod in its group, 0 for the leader; that of a LeaderWorkerSet has the same name and address as
with StatefulSets: `<group>-0.<group>`."""


def _leader_worker_spec(template: Object, engine: Engine, size: int) -> Object:
    """Its controller makes the headless Service, and repairs nothing: another attempt is another object."""
    return {
        "replicas": 1,
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "leaderWorkerTemplate": {
            "size": size,
            "restartPolicy": "None",
            "leaderTemplate": template,
            "workerTemplate": _follower(template, engine),
        },
    }


def rest_of(model: NeuronModel, leader: Object, engine: Engine) -> tuple[Object, ...]:
    """What belongs to the live owner of a group. Where the last (`views.LAST_PARTS`) exists, all of it was created."""
    name = name_of(leader)
    size = int(labels_of(leader)[names.GROUP_SIZE_LABEL])
    own = only(labels_of(leader), _OF_GROUP)
    port = {"name": "group", "port": names.GROUP_PORT, "protocol": "TCP"}
    address = {
        "clusterIP": "None",
        # The members look for each other before they are ready.
        "publishNotReadyAddresses": True,
        "selector": {names.GROUP_LABEL: name},
        "ports": [port],
    }
    members = {"podSelector": {"matchLabels": {names.GROUP_LABEL: name}}}
    # The ranks connect on ports that they choose. Serving is opened by the model's own policy.
    policy = {**members, "policyTypes": ["Ingress"], "ingress": [{"from": [members], "ports": [{"protocol": "TCP"}]}]}

    def part(api_version: str, kind: str, called: str, **content: Any) -> Object:
        made = child(model, api_version, kind, called, labels=own, **content)
        made["metadata"]["ownerReferences"] = [_owner(leader)]
        return made

    secret = part("v1", "Secret", name, immutable=True, type="Opaque")
    closed = part("networking.k8s.io/v1", "NetworkPolicy", name, spec=policy)
    if leader["kind"] == names.LEADER_WORKER_SET:
        return secret, closed
    template = _follower(dig(leader, "spec", "template"), engine)
    selector = {names.GROUP_LABEL: name, names.ROLE_LABEL: names.ROLE_FOLLOWER}
    followers = _set(template, selector, service=name, replicas=size - 1)
    return (
        closed,
        secret,
        part("apps/v1", "StatefulSet", names.followers_name(name), spec={**followers, "ordinals": {"start": 1}}),
        part("v1", "Service", name, spec=address),
    )


_OF_GROUP = frozenset(
    {names.REVISION_LABEL, names.GROUP_LABEL, names.REPLICA_LABEL, names.ATTEMPT_LABEL, names.GROUP_SIZE_LABEL}
)


def _set(template: Object, selector: Mapping[str, str], *, service: str, replicas: int) -> Object:
    return {
        "replicas": replicas,
        "serviceName": service,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": dict(selector)},
        "template": template,
    }


def _follower(template: Object, engine: Engine) -> Object:
    """The leader's template for a pod that runs what the leader sends. It answers nobody, so nothing probes it."""
    template = copy.deepcopy(template)
    template["metadata"]["labels"][names.ROLE_LABEL] = names.ROLE_FOLLOWER
    container = _runtime(template)
    for part in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
        container.pop(part, None)
    followed = engine.follow(container["command"])
    container.update({"command": list(followed.command), **before_stopping(followed)})
    spec = template["spec"]
    of_clients = (names.API_KEY_VOLUME, engine.api_key_variable)
    for holder, part in ((container, "volumeMounts"), (container, "env"), (spec, "volumes")):
        holder[part] = [one for one in holder[part] if one["name"] not in of_clients]
    return template


def _apart(affinity: Mapping[str, Any], group: str, together: Iterable[str]) -> Object:
    """Every member on a node of its own, and all on nodes with the same value of these labels."""
    members = {"labelSelector": {"matchLabels": {names.GROUP_LABEL: group}}}
    spread = with_terms(affinity, "podAntiAffinity", ({**members, "topologyKey": names.HOSTNAME_LABEL},))
    common = [{**members, "topologyKey": key} for key in together]
    return with_terms(spread, "podAffinity", common) if common else spread


def _runtime(template: Object) -> dict[str, Any]:
    container: dict[str, Any] = next(
        one for one in template["spec"]["containers"] if one.get("name") == names.RUNTIME_CONTAINER
    )
    return container


def _owner(leader: Object) -> Object:
    return {
        "apiVersion": text(leader, "apiVersion"),
        "kind": text(leader, "kind"),
        "name": name_of(leader),
        "uid": text(leader, "metadata", "uid"),
        "controller": True,
    }
