"""`neuron-runtime compile MODEL` or `compile --config FILE`: compiles a model once, before anything serves it.

Needs no device, and no weights unless the backend compiles them in. Prints the folder of the artifact. May be killed
and run again at any time; see `artifacts.compiling`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from neuron_runtime import record
from neuron_runtime.arguments import FLAG_NAMES, naming
from neuron_runtime.artifacts.compiling import make, wanted_artifact
from neuron_runtime.artifacts.loading import with_local_draft
from neuron_runtime.artifacts.store import artifact_store, read_artifact, remote_artifacts
from neuron_runtime.commands.serve import add_model, add_model_flags, configuration
from neuron_runtime.config import COMPILED, RuntimeConfig
from neuron_runtime.console import StageLines, say
from neuron_runtime.engine.backends import backend_package, check_backend
from neuron_runtime.flags import Field
from neuron_runtime.local_settings import add_artifact_flags, add_weights_flags, check_stores
from neuron_runtime.weights.fetching import described, materialize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_weights_flags(parser)
    add_artifact_flags(parser)
    record.add_flag(parser)
    add_model_flags(parser, is_compiled)
    parser.set_defaults(run=run)


def is_compiled(field: Field) -> bool:
    """Whether compiled graphs depend on it."""
    return COMPILED in field.annotations and field.path != "compile"


def run(options: argparse.Namespace) -> record.StoredArtifact:
    check_stores(options)
    with naming(FLAG_NAMES if options.config is None else {}):
        config = msgspec.structs.replace(configuration(options), compile=True)
        check_backend(config)
        progress = StageLines()
        config = with_local_draft(config, progress, options.weights_dir, options.weights_store)
        with _model(config, options, progress) as (folder, digest):
            wanted = wanted_artifact(config, folder, digest)
            entry, reused = make(
                wanted, artifact_store(options.artifacts_dir), progress, remote_artifacts(options.artifacts_store)
            )
    artifact = read_artifact(entry)
    if reused:
        say(f"artifact {entry.key}: nothing to compile")
    print(entry.folder)
    return record.StoredArtifact(
        key=entry.key,
        bytes=entry.manifest.num_bytes,
        seconds=artifact.seconds,
        reused=reused,
        peak_bytes=artifact.peak_bytes,
    )


@contextmanager
def _model(config: RuntimeConfig, options: argparse.Namespace, progress: StageLines) -> Iterator[tuple[Path, str]]:
    """A folder with as much of the model as its backend needs to compile it, and the digest."""
    package, places = backend_package(config), (options.weights_dir, options.weights_store)
    with described(config.model, *places, with_weights=package.needs_weights(config)) as (folder, digest):
        if not package.compiler_reads_weights(config):
            yield folder, digest
            return
    model = msgspec.structs.replace(config.model, digest=digest)
    yield materialize(model, options.weights_dir, progress, weights_store=options.weights_store), digest
