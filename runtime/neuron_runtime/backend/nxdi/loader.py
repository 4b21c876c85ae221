"""Loads a compiled model onto Neuron devices. Called by `load_backend` in the process that will run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from neuron_runtime.backend.neuron.devices import (
    Target,
    check_cores,
    environment_of_group,
    exec_timeout_seconds,
    has_efa,
)
from neuron_runtime.backend.neuron.failures import when_free
from neuron_runtime.backend.nxdi import library
from neuron_runtime.backend.nxdi.backend import NxdiBackend
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.draft_model import accepting, draft_folder
from neuron_runtime.backend.nxdi.foreign import is_foreign
from neuron_runtime.backend.nxdi.graphs import described, fitting, missing_weights, prepare_environment
from neuron_runtime.backend.nxdi.models import BY_APPLICATION
from neuron_runtime.backend.nxdi.neuron_config import SHARDED
from neuron_runtime.backend.nxdi.quantized import check_stored
from neuron_runtime.backend.nxdi.settings import Settings
from neuron_runtime.backend.nxdi.unread import all_weights_read
from neuron_runtime.backend_protocol import ONE_RANK, Backend, ProgressCallback, Rank
from neuron_runtime.checkpoint import check_tied_head, read_checkpoint, read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError


def load(
    model_dir: Path, config: RuntimeConfig, progress: ProgressCallback, artifact: Path, place: Rank = ONE_RANK
) -> Backend:
    """See `load_backend`. place: each rank is a node, with as many cores of the model as every other."""
    library.check_installed()
    settings, target = described(fitting(config, model_dir, artifact), model_dir)
    draft_dir = draft_folder(config)
    check_cores(target, settings.tensor)
    if missing := missing_weights(settings, artifact):
        cure = "add it" if is_foreign(artifact) else "compile the model again"
        raise FatalError(ExitCode.ARTIFACT_MISSING, f"{artifact} has no {missing[0]}: {cure}")
    if not settings.neuron_config.get(SHARDED):
        checkpoint = read_checkpoint(model_dir)
        check_tied_head(checkpoint)
        if settings.quantized is not None:
            check_stored(checkpoint)
        if draft_dir is not None and not (settings.draft and settings.draft.eagle):
            check_tied_head(read_checkpoint(draft_dir))
    report(settings, target)
    prepare_environment(settings, target)
    share: dict[str, int] = {}
    if place.size > 1:
        os.environ.update(environment_of_group(place.rendezvous))
        num_cores = settings.tensor // place.size
        first = place.rank * num_cores
        share = {"start_rank_id": first, "local_ranks_size": num_cores}
        say(f"this node has ranks {first} to {first + num_cores - 1} of {settings.tensor}")
        if not has_efa():
            cost = "devices of several nodes reach each other slowly, or not at all"
            say(f"warning: this node has no EFA interface: {cost}")
    limits = limits_of(settings, exec_timeout_seconds())
    progress("loading graphs and weights onto the device", 0.0)

    def attempt() -> Any:
        made = library.application(settings, model_dir, draft_dir)
        with all_weights_read(model_dir, settings, draft_dir):
            made.load(str(artifact), **share, skip_warmup=True)
        return made

    application = when_free(attempt)
    progress("loading graphs and weights onto the device", 1.0)
    application = accepting(application) if settings.draft else application
    return NxdiBackend(application, settings, limits, model_config=read_config(model_dir), in_group=place.size > 1)


def report(settings: Settings, target: Target) -> None:
    """Say which libraries run what on which cores, and what is not certain."""
    versions = library.versions()
    say("NxD Inference: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    say(
        f"{settings.application} on {settings.tensor} logical cores of {target.platform.name}, each of "
        f"{target.logical_core} physical ones"
    )
    family = BY_APPLICATION.get(settings.application)
    if family is None:
        say(f"warning: {settings.application} is a class of yours: its tokens were never compared with others")
    elif family.note:
        say(f"{family.application}: {family.note}")
    if family is not None and family.pictures and settings.vision is None:
        why = "media.maxImages is 0" if library.sees_pictures() else "this NxD Inference cannot see pictures"
        say(f"{family.application}: text only, because {why}")
