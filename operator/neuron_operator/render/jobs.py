"""Jobs of steps, named by the hash of their spec, so that the API server creates each only once. Called by `steps`."""

from __future__ import annotations

from neuron_operator import names
from neuron_operator.catalog import INSTANCE_TYPES
from neuron_operator.model import NeuronModel
from neuron_operator.reasons import FINAL_EXIT_CODES
from neuron_operator.render.objects import child
from neuron_operator.render.pods import step_pod_template
from neuron_operator.world import Object, Settings

RETRY_AFTER_SECONDS = 600
"""A finished Job is deleted after this time; a failed one is then created again."""
DEADLINE_SECONDS = 1800
"""Includes pulling a runtime image of several GB on a new node."""


def resolve_job(model: NeuronModel, settings: Settings) -> Object:
    """Reads the model's facts with the model's own credentials, before devices are allocated."""
    spec = {
        "backoffLimit": 3,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "ttlSecondsAfterFinished": RETRY_AFTER_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": names.RUNTIME_CONTAINER,
                        "operator": "In",
                        "values": list(FINAL_EXIT_CODES),
                    },
                }
            ]
        },
        "template": step_pod_template(
            model,
            settings,
            role=names.ROLE_RESOLVE,
            command=["neuron-runtime", "inspect", model.spec.model.uri, "--record", names.TERMINATION_LOG],
            affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": _AWAY_FROM_NEURON}},
        ),
    }
    name = names.resolve_job_name(model.name, names.digest(spec))
    job = child(
        model, "batch/v1", "Job", name, component=names.ROLE_RESOLVE, labels={names.ROLE_LABEL: names.ROLE_RESOLVE}
    )
    return {**job, "spec": spec}


_AWAY_FROM_NEURON = [
    {"weight": 100, "preference": {"matchExpressions": [expression]}}
    for expression in (
        {"key": names.NEURON_PRESENT_LABEL, "operator": "DoesNotExist"},
        {"key": names.INSTANCE_TYPE_LABEL, "operator": "NotIn", "values": sorted(INSTANCE_TYPES)},
    )
]
