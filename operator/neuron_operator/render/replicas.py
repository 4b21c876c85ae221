"""The replicas of a revision. A replica is a group of pods; groups of one pod are a Deployment. Called by `decide`."""

from __future__ import annotations

from neuron_operator.api import names
from neuron_operator.api.model import NeuronModel
from neuron_operator.read.disruption import Pace
from neuron_operator.read.revision import Revision, beside_template, shared_annotation
from neuron_operator.read.world import Object
from neuron_operator.render.objects import child

KEPT_REPLICA_SETS = 2


def replicas(
    model: NeuronModel, revision: Revision, num_replicas: int, pace: Pace, tried: str = ""
) -> tuple[Object, ...]:
    """The workload objects for `num_replicas` copies of the revision. `tried`: see `nudge`."""
    deployment = child(model, "apps/v1", "Deployment", names.service_name(model.name), component="server")
    deployment["metadata"]["annotations"] = {
        names.PINNED_ANNOTATION: beside_template(revision),
        **shared_annotation(revision),
        **({names.TRIED_ANNOTATION: tried} if tried else {}),
    }
    deployment["spec"] = {
        "replicas": num_replicas,
        "revisionHistoryLimit": KEPT_REPLICA_SETS,
        "progressDeadlineSeconds": model.spec.rollout.progress_deadline_seconds,
        "selector": {"matchLabels": names.serving_selector(model.name)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": pace.max_surge, "maxUnavailable": pace.max_unavailable},
        },
        "template": revision.template,
    }
    return (deployment,)
