"""The replicas of a revision: each is a group of one or more pods; groups of one are the pods of a Deployment.

Called by `decide` with what a revision pinned; nothing about a pod is decided here.
"""

from __future__ import annotations

from neuron_operator import names
from neuron_operator.model import NeuronModel
from neuron_operator.render.objects import child
from neuron_operator.revision import Revision
from neuron_operator.world import Object

KEPT_REPLICA_SETS = 2


def replicas(model: NeuronModel, revision: Revision) -> tuple[Object, ...]:
    """The workload objects for `spec.replicas` copies of the revision.

    Devices are scarce, so an edit replaces one replica at a time and never asks for one more than wanted.
    """
    deployment = child(model, "apps/v1", "Deployment", names.service_name(model.name), component="server")
    deployment["spec"] = {
        "replicas": model.spec.replicas,
        "revisionHistoryLimit": KEPT_REPLICA_SETS,
        "progressDeadlineSeconds": model.spec.rollout.progress_deadline_seconds,
        "selector": {"matchLabels": names.serving_selector(model.name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": revision.template,
    }
    return (deployment,)
