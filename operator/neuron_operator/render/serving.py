"""Service, ServiceAccount, PodDisruptionBudget, NetworkPolicy and ConfigMaps of a model.

Called by `decide`. All but the ConfigMaps exist before the first replica and outlive every revision.
"""

from __future__ import annotations

from typing import Any

from neuron_operator.api import names
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.disruption import MAX_UNAVAILABLE
from neuron_operator.read.remembered import remembered
from neuron_operator.read.world import Object, Settings
from neuron_operator.render.config_document import to_json
from neuron_operator.render.objects import child, without_empty


@remembered
def service(model: NeuronModel) -> Object:
    """The model's address: all ready leaders, whatever their revision."""
    port = {
        "name": names.PORT_NAME,
        "port": names.PORT,
        "targetPort": names.PORT_NAME,
        "protocol": "TCP",
        "appProtocol": "http",
    }
    overlay = model.spec.service_template
    made = child(model, "v1", "Service", names.service_name(model.name), component="server")
    return {
        **made,
        "metadata": {**made["metadata"], **without_empty({"annotations": overlay.metadata.annotations})},
        "spec": {
            "type": overlay.spec.type,
            **as_json(overlay.spec),
            "selector": names.serving_selector(model.name),
            "ports": [port],
        },
    }


@remembered
def service_account(model: NeuronModel) -> Object:
    """An identity without rights and without a token."""
    return {
        **child(model, "v1", "ServiceAccount", names.service_account_name(model.name), component="server"),
        "automountServiceAccountToken": False,
    }


def disruption_budget(model: NeuronModel, nodes: int = 1) -> Object:
    """As many replicas may be evicted as a rollout may take away; one that is not ready never blocks a drain.

    nodes: of a replica. Of a group every pod counts. A group that leaves takes its pods with it, so what remains is
    promised as a number: a share of those that exist would allow the next group to be evicted.
    """
    of_pods: Object = {
        "maxUnavailable": MAX_UNAVAILABLE,
        "selector": {"matchLabels": names.serving_selector(model.name)},
    }
    if nodes > 1:
        least = max(0, model.spec.replicas * nodes - 1)
        of_pods = {"minAvailable": least, "selector": names.members_selector(model.name)}
    return {
        **child(model, "policy/v1", "PodDisruptionBudget", names.service_name(model.name), component="server"),
        "spec": {**of_pods, "unhealthyPodEvictionPolicy": "AlwaysAllow"},
    }


@remembered
def network_policy(model: NeuronModel, settings: Settings) -> Object:
    """Opens only the serving port, to the peers in the chart's values. Egress is left to the cluster."""
    rule = without_empty(
        {"ports": [{"port": names.PORT_NAME, "protocol": "TCP"}], "from": list(settings.network_policy_ingress_from)}
    )
    return {
        **child(model, "networking.k8s.io/v1", "NetworkPolicy", names.service_name(model.name), component="server"),
        "spec": {
            "podSelector": {"matchLabels": names.serving_selector(model.name)},
            "policyTypes": ["Ingress"],
            "ingress": [rule],
        },
    }


def config_name(model_name: str, document: dict[str, Any]) -> str:
    return names.config_name(model_name, names.digest(document))


def config_map(model: NeuronModel, document: dict[str, Any]) -> Object:
    """Immutable and named by its content, so that a restarted container has the same configuration."""
    return {
        **child(model, "v1", "ConfigMap", config_name(model.name, document), component="server"),
        "immutable": True,
        "data": {names.CONFIG_KEY: to_json(document)},
    }
