"""The CronJobs that delete from claims what no model of the namespace has needed for long. Called by `decide`.

The models that keep weights or artifacts in one claim share one CronJob, which is told what they need. Object stores
are left alone: other namespaces and clusters may use the same bucket. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from neuron_operator.api import names
from neuron_operator.api.model import Jobs, NeuronModel
from neuron_operator.read.records import Record
from neuron_operator.read.revision import Revision
from neuron_operator.read.world import Object, Place, Settings
from neuron_operator.render.jobs import NEVER_NEURON, nodes_for_jobs
from neuron_operator.render.objects import shared
from neuron_operator.render.pods import step_pod_template
from neuron_operator.render.resources import JOB_REQUESTS
from neuron_operator.render.storage import ARTIFACTS, WEIGHTS, Access, Kept, access_to

DEADLINE_SECONDS = 6 * 3600
"""Deleting many small files on a network file system is slow."""

_KEY = re.compile("[0-9a-f]{40,64}")
"""The key of an entry of a store. Records are not trusted: anything else could be a flag."""


def cleaners(
    model: NeuronModel, settings: Settings, revisions: Iterable[Revision], records: Iterable[Record]
) -> tuple[Object, ...]:
    """One CronJob for each claim of these revisions, and for each folder in it whose entries have keys.

    Args:
        records: those that are kept in the namespace. They name everything that a revision of any model needs.
    """
    places = dict.fromkeys(
        (kept, place, folder)
        for revision in revisions
        for kept, place, folder in (
            (WEIGHTS, revision.pinned.weights, WEIGHTS.folder),
            (ARTIFACTS, revision.pinned.artifacts, ARTIFACTS.folder),
            (ARTIFACTS, revision.pinned.artifacts, _folder_of_engine(revision)),
        )
        if place and place.persistent_volume_claim and folder
    )
    if not settings.storage.keep_days or not places:
        return ()
    # Weights and artifacts may share a folder.
    known = tuple(records)
    keys = {one.weights.digest for one in known if one.weights} | {one.artifact.key for one in known if one.artifact}
    needed = sorted(filter(_KEY.fullmatch, keys))
    return tuple(_cleaner(model, settings, *one, needed=needed) for one in places)


def _folder_of_engine(revision: Revision) -> str:
    """With the graphs of an engine that is not our runtime, each under its key; empty: there are none."""
    compiling = revision.pinned.compiling
    return compiling.folder.rpartition("/")[0] if compiling else ""


def _cleaner(
    model: NeuronModel, settings: Settings, kept: Kept, place: Place, folder: str, *, needed: list[str]
) -> Object:
    anybody = replace(model, refresh="", spec=msgspec.structs.replace(model.spec, jobs=Jobs()))

    def template(using: Settings, nodes: Object, *arguments: str) -> Object:
        return step_pod_template(
            anybody,
            using,
            role=names.ROLE_CLEAN,
            image=using.runtime_image,
            command=["neuron-runtime", kept.name, "prune", folder, *arguments],
            access=Access(access_to(kept, place).mounts),
            resources={"requests": JOB_REQUESTS},
            nodes=nodes,
        )

    days = str(settings.storage.keep_days)
    rendered = template(
        settings,
        nodes_for_jobs(settings, NEVER_NEURON),
        *("--unused-days", days, "--record", names.TERMINATION_LOG),
        *(("--keep", *needed) if needed else ()),
    )
    name = names.shared_name("prune", template(Settings(runtime_image=""), {}))
    # Not all namespaces at the same time: they may share a file system.
    minute = int(names.digest([model.namespace, name]), 16) % (24 * 60)
    spec = {
        "schedule": f"{minute % 60} {minute // 60} * * *",
        "concurrencyPolicy": "Forbid",
        "successfulJobsHistoryLimit": 1,
        "failedJobsHistoryLimit": 1,
        "jobTemplate": {"spec": {"backoffLimit": 1, "activeDeadlineSeconds": DEADLINE_SECONDS, "template": rendered}},
    }
    return shared(model, "batch/v1", "CronJob", name, component=names.ROLE_CLEAN, spec=spec)
