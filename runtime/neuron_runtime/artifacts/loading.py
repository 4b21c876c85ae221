"""Loads a backend, with its compiled graphs if the configuration asks for them; and finds adapters.

Called by the engine process, by `LLM` and by benchmarks once the model is on this machine; by the front end for
adapters. It finds the artifact that the model and configuration need, or says what differs from those that there are,
or has it compiled.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from neuron_runtime.adapters.peft import AdapterRules
from neuron_runtime.artifacts.compiling import Wanted, download, make, wanted_artifact
from neuron_runtime.artifacts.store import (
    artifact_store,
    documents_of,
    entries_of,
    find,
    nearest,
    read_fitting,
    remote_artifacts,
)
from neuron_runtime.backend_protocol import ONE_RANK, Backend, ProgressCallback, Rank
from neuron_runtime.checkpoint import check_tokenizer, read_checkpoint, read_config
from neuron_runtime.config import DraftSource, ModelSource, RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.engine.backends import backend_package, check_ranks, compiles
from neuron_runtime.errors import ExitCode, FatalError, joined
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.record import AdapterFacts
from neuron_runtime.weights.disk import make_folder, writing
from neuron_runtime.weights.fetching import described, fetch_adapter, materialize, open_remote
from neuron_runtime.weights.store import Damaged, Store

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore

ARTIFACT_VARIABLE = "NEURON_COMPILED_ARTIFACTS"
"""Names the folder of one artifact, which is loaded instead of one of the store."""


def given_folder() -> Path | None:
    value = os.environ.get(ARTIFACT_VARIABLE)
    return Path(os.path.realpath(value)) if value else None


def find_model(
    config: RuntimeConfig, settings: LocalSettings, progress: ProgressCallback, *, with_weights: bool = True
) -> Path:
    """The local folder of the model, with a tokenizer, fetched if needed. Errors as of `fetch`.

    with_weights: False for the small files alone; a backend that needs no weights gets no others anyway.
    """
    return materialize(
        config.model,
        settings.weights_dir,
        progress,
        weights_store=settings.weights_store,
        on_miss=settings.on_weights_miss,
        with_weights=with_weights and backend_package(config).needs_weights(config),
        has_recipe=config.task != "generate",
        check=check_tokenizer,
    )


def find_adapter(
    uri: str, model_dir: Path, config: RuntimeConfig, settings: LocalSettings, *, digest: str = "", version: str = ""
) -> tuple[Path, AdapterFacts]:
    """The local folder of an adapter that fits this model, fetched if needed, and what it is.

    Args:
        digest: what the adapter must be, as the facts have it; empty: anything that fits.
        version: of its source, as `fetch` takes it.

    Raises FatalError as `fetch_adapter`, and CHECKSUM_MISMATCH; SourceUnreachable.
    """
    smallest = backend_package(config).MIN_ADAPTER_RANK
    rules = AdapterRules(config.adapters.max_rank, config.adapters.targets, smallest)
    fetched, facts = fetch_adapter(
        uri,
        Store(settings.weights_dir),
        lambda amount: None,
        version,
        model_config=read_config(model_dir),
        rules=rules,
        remote=open_remote(settings.weights_store) if settings.weights_store else None,
        on_miss=settings.on_weights_miss,
    )
    if digest and facts.digest != digest:
        raise FatalError(ExitCode.CHECKSUM_MISMATCH, f"{uri} has digest {facts.digest}, but {digest} is pinned")
    return fetched.folder, facts


def load_backend(
    model_dir: Path,
    config: RuntimeConfig,
    settings: LocalSettings,
    progress: ProgressCallback,
    *,
    rank: Rank = ONE_RANK,
) -> Backend:
    """The backend of a model in a folder, or one rank of it.

    Raises FatalError as `provide` and the backend do, and InvalidConfig with a field that cannot be served.
    """
    check_ranks(config, rank.size)
    config = _local(config, settings, progress)
    if not compiles(config):
        if given_folder() is not None:
            say(f"{ARTIFACT_VARIABLE} has no effect, because the configuration does not set `compile`")
        return backend_package(config).load_backend(model_dir, config, progress, rank=rank)
    artifact = provide(config, model_dir, settings, progress)
    return backend_package(config).load_backend(model_dir, config, progress, artifact, rank=rank)


def _local(config: RuntimeConfig, settings: LocalSettings, progress: ProgressCallback) -> RuntimeConfig:
    store, on_miss = settings.weights_store, settings.on_weights_miss
    return with_local_draft(config, progress, settings.weights_dir, store, on_miss=on_miss)


def with_local_draft(
    config: RuntimeConfig,
    progress: ProgressCallback,
    weights_dir: Path,
    weights_store: str = "",
    *,
    on_miss: Literal["fetch", "fail"] = "fetch",
) -> RuntimeConfig:
    """The configuration with the folder of its draft model, which is fetched if needed. An EAGLE head is one whatever
    it was named as: older arguments of vLLM have no word for it. Errors as of `fetch`."""
    speculation = config.speculation
    if not speculation.model.uri:
        return config
    source = ModelSource(uri=speculation.model.uri, digest=speculation.model.digest)
    folder = materialize(source, weights_dir, progress, weights_store=weights_store, on_miss=on_miss)
    local = replace(speculation, model=DraftSource(uri=folder.as_uri()))
    if speculation.method == "Draft" and read_checkpoint(folder).is_eagle_head:
        say(f"{source.uri} is an EAGLE head")
        local = replace(local, method="Eagle")
    return replace(config, speculation=local)


def check_artifact(config: RuntimeConfig, settings: LocalSettings, progress: ProgressCallback) -> None:
    """Find the artifact before weights are fetched, where a miss is an error: it must not take as long as a fetch.

    Raises: as `provide`, and what `described` raises.
    """
    if compiles(config) and settings.on_artifact_miss == "fail":
        config = _local(config, settings, progress)
        with_weights, store = backend_package(config).needs_weights(config), settings.weights_store
        with described(config.model, settings.weights_dir, store, with_weights=with_weights) as (folder, digest):
            provide(config, folder, settings, progress, digest)


def provide(
    config: RuntimeConfig, model_dir: Path, settings: LocalSettings, progress: ProgressCallback, digest: str = ""
) -> Path:
    """The folder of the compiled graphs.

    Args:
        digest: that of the model, if the folder is only an outline.

    Raises:
        FatalError: ARTIFACT_MISSING with the fields that differ from the nearest one, or the damaged file; those of
            `make`.
    """
    wanted = wanted_artifact(config, model_dir, digest)
    compiler = backend_package(config).compiler(wanted.config, model_dir)
    given = given_folder()
    if (folder := compiler.ready_made(given)) is not None:
        return folder
    if given is not None:
        return _given(given, wanted, settings, progress)
    store, remote = artifact_store(settings.artifacts_dir), remote_artifacts(settings.artifacts_store)
    if settings.on_artifact_miss == "compile":
        return make(wanted, store, progress, remote)[0].folder
    entry = find(store, wanted.cover)
    if entry is None and remote is not None:
        entry = download(wanted, store, progress, remote)
    if entry is None:
        raise FatalError(ExitCode.ARTIFACT_MISSING, _miss(wanted, store, remote))
    return entry.folder


def _given(folder: Path, wanted: Wanted, settings: LocalSettings, progress: ProgressCallback) -> Path:
    """The artifact in the folder of ARTIFACT_VARIABLE. One that does not fit is refused, never deleted."""
    try:
        entry, differing = read_fitting(folder, wanted.cover)
    except Damaged as error:
        message = f"{folder} is no intact artifact: {error.reason}; name the folder of one, or copy it again"
        raise FatalError(ExitCode.ARTIFACT_MISSING, f"{ARTIFACT_VARIABLE}: {message}") from error
    if differing:
        message = (
            f"{ARTIFACT_VARIABLE}: the artifact in {folder} was compiled for something else: {joined(differing)}; "
            "name another folder, or change the configuration"
        )
        raise FatalError(ExitCode.ARTIFACT_MISSING, message)
    if entry is not None:
        return folder
    if settings.on_artifact_miss == "fail":
        raise FatalError(ExitCode.ARTIFACT_MISSING, f"{ARTIFACT_VARIABLE}: {folder} has no artifact")
    remote = remote_artifacts(settings.artifacts_store)
    made, _ = make(wanted, artifact_store(settings.artifacts_dir), progress, remote)
    with writing(folder.parent):
        make_folder(folder.parent)
        copy = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            shutil.copytree(made.folder, copy, dirs_exist_ok=True)
            copy.rename(folder)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    return folder


def _miss(wanted: Wanted, store: Store, remote: RemoteStore | None) -> str:
    cure = "compile it with `neuron-runtime compile`, or serve with --on-artifact-miss compile"
    place = store.folder if remote is None else remote.address
    closest = nearest(entries_of(store) if remote is None else documents_of(remote), wanted.cover)
    if closest is None:
        return f"{place} has no artifact, {wanted.key} is needed: {cure}"
    entry, differing = closest
    return (
        f"{place} has no artifact {wanted.key}; the nearest one, {entry.key}, was compiled for something else: "
        f"{joined(differing)}; {cure}"
    )
