"""Service, ServiceAccount, PodDisruptionBudget, NetworkPolicy, ConfigMaps and Deployment of a model.

Called by `decide`. All but the last two exist before the first replica and outlive every revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuron_operator.api import names
from neuron_operator.api.engines.engine import START_SECONDS
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import NeuronModel, remembered
from neuron_operator.api.reasons import Needed
from neuron_operator.place.sizing import MAX_START_SECONDS
from neuron_operator.read.revision import Pinned, Revision, beside_template, shared_annotation
from neuron_operator.read.world import Object, Settings
from neuron_operator.render.config_document import to_json
from neuron_operator.render.objects import child, without_empty

KEPT_REPLICA_SETS = 2
MAX_UNAVAILABLE = 1
"""How many replicas may be away at a time: in a rollout, by eviction, and before the model is no longer Available."""


def num_promised(num_wanted: int) -> int:
    """Replicas that answer during a rollout or an eviction. Of a single replica the loss is never promised away: its
    replacement is a gap."""
    return min(num_wanted, max(1, num_wanted - MAX_UNAVAILABLE))


@dataclass(frozen=True)
class Pace:
    """How a revision reaches the replicas."""

    surges: bool
    words: str
    """For the condition, before the rollout begins: above all, whether nobody will answer."""
    needs: frozenset[Needed] = frozenset()


@remembered
def service(model: NeuronModel) -> Object:
    """The model's address, which has its name: all ready leaders, whatever their revision."""
    port = {
        "name": names.PORT_NAME,
        "port": names.PORT,
        "targetPort": names.PORT_NAME,
        "protocol": "TCP",
        "appProtocol": "http",
    }
    overlay = model.spec.service_template
    spec = {
        "type": overlay.spec.type,
        **as_json(overlay.spec),
        "selector": names.serving_selector(model.name),
        "ports": [port],
    }
    return child(model, "v1", "Service", model.name, annotations=overlay.metadata.annotations, spec=spec)


@remembered
def service_account(model: NeuronModel) -> Object:
    """An identity without rights and without a token."""
    name = names.service_account_name(model.name)
    return child(model, "v1", "ServiceAccount", name, automountServiceAccountToken=False)


def disruption_budget(model: NeuronModel, nodes: int = 1) -> Object:
    """As many replicas may be evicted as a rollout may take away; one that is not ready never blocks a drain.

    nodes: of a replica. Of a group every pod counts. A group that leaves takes its pods with it, so what remains is
    promised as a number: a share of those that exist would allow the next group to be evicted.
    """
    spec: Object = {
        "maxUnavailable": MAX_UNAVAILABLE,
        "selector": {"matchLabels": names.serving_selector(model.name)},
    }
    if nodes > 1:
        least = max(0, model.spec.replicas * nodes - 1)
        spec = {"minAvailable": least, "selector": names.members_selector(model.name)}
    spec["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
    return child(model, "policy/v1", "PodDisruptionBudget", model.name, spec=spec)


@remembered
def network_policy(model: NeuronModel, settings: Settings) -> Object:
    """Opens only the ports of clients and gateways, to the peers in the chart. Egress is left to the cluster."""
    peers = list(settings.network_policy_ingress_from)
    if peers and model.spec.is_asked:
        peers += settings.network_policy_operator
    events = [names.CACHE_EVENTS_PORT_NAME] if model.spec.serving.cache_events == "Enabled" else []
    ports = [{"port": name, "protocol": "TCP"} for name in (names.PORT_NAME, *events)]
    rule = without_empty({"ports": ports, "from": peers})
    spec = {
        "podSelector": {"matchLabels": names.serving_selector(model.name)},
        "policyTypes": ["Ingress"],
        "ingress": [rule],
    }
    return child(model, "networking.k8s.io/v1", "NetworkPolicy", model.name, spec=spec)


def config_map(model: NeuronModel, pinned: Pinned, files: Mapping[str, str]) -> Object:
    """Immutable and named by its content, so that a restarted container has the same configuration. `files`: as pinned,
    if they were."""
    name = names.config_name(model.name, pinned.config, pinned.files)
    data = {names.CONFIG_KEY: to_json(pinned.config), **files}
    return child(model, "v1", "ConfigMap", name, immutable=True, data=data)


def progress_seconds(model: NeuronModel, revision: Revision) -> int:
    """Until a rollout has failed. The default leaves a new replica as long as its start may take."""
    seconds = model.spec.rollout.progress_deadline_seconds
    starts = min(revision.start_seconds, MAX_START_SECONDS)
    return max(seconds, starts) if seconds == START_SECONDS else seconds


def deployment(model: NeuronModel, revision: Revision, num_replicas: int, pace: Pace, tried: str = "") -> Object:
    """`num_replicas` copies of a revision whose replicas are one pod. `tried`: see `nudge`."""
    return child(
        model,
        "apps/v1",
        "Deployment",
        model.name,
        annotations={
            names.PINNED_ANNOTATION: beside_template(revision),
            **shared_annotation(revision),
            **({names.TRIED_ANNOTATION: tried} if tried else {}),
        },
        spec={
            "replicas": num_replicas,
            "revisionHistoryLimit": KEPT_REPLICA_SETS,
            "progressDeadlineSeconds": progress_seconds(model, revision),
            "selector": {"matchLabels": names.serving_selector(model.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": 1 if pace.surges else 0,
                    "maxUnavailable": 0 if pace.surges else MAX_UNAVAILABLE,
                },
            },
            "template": revision.pinned.template,
        },
    )
