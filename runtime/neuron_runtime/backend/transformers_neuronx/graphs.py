"""What transformers-neuronx compiles of a model: all its graphs in one unit, each saved in a file of its own.

`NeuronxCompiler` is the `Compiler` of `backend_protocol`. Describing needs no Neuron library but their versions; they
are imported to compile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuron_runtime.artifacts.store import DOCUMENT
from neuron_runtime.backend.neuron.devices import Target, check_cores, environment_of, find_target
from neuron_runtime.backend.neuron.installed import platform_target
from neuron_runtime.backend.transformers_neuronx import library
from neuron_runtime.backend.transformers_neuronx.settings import Settings, all_graphs, settings_of
from neuron_runtime.backend_protocol import CompileUnit, Needs
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say

COMPILE_CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
"""Where the compiler keeps what it made; without it, in a folder that all processes of a machine share."""
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
"""Options of the compiler that the library adds to its own (`compiler.get_compiler_flags`)."""
TARGET = "trn1"
"""Of every graph: see `settings.PLATFORMS`."""


class NeuronxCompiler:
    """See `backend_protocol.Compiler`."""

    def __init__(self, config: RuntimeConfig, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._settings, self._target = described(config, model_dir)

    @property
    def needs(self) -> Needs:
        settings = self._settings
        return Needs(
            shapes={
                "rows": settings.max_rows,
                "length": settings.max_model_length,
                "contextBuckets": list(settings.context_buckets),
                "tokenBuckets": list(settings.token_buckets),
            },
            settings={
                "modelClass": settings.model_class,
                "dtype": settings.dtype,
                "globalTopK": settings.global_top_k,
                **({"compilerFlags": flags} if (flags := os.environ.get(FLAGS_VARIABLE, "").strip()) else {}),
                "neuronConfig": {
                    name: value for name, value in settings.neuron_config.items() if name != "compilation_worker_count"
                },
            },
            libraries=library.required_versions(),
            target={"platform": TARGET, "tensor": settings.tensor},
        )

    def ready_made(self, given: Path | None) -> Path | None:
        """A folder that the library saved itself. Loading says if it does not fit, graph by graph."""
        if given is None or (given / DOCUMENT).exists() or not library.saved(given):
            return None
        say(f"loading the graphs that transformers-neuronx saved in {given}")
        return given

    def tools(self) -> Mapping[str, str]:
        return {library.COMPILER: library.compiler_version()}

    def graphs(self) -> Sequence[CompileUnit]:
        names = tuple(graph.name for graph, _ in all_graphs(self._settings))
        return [CompileUnit(self._settings.model_class, self._compile, names)]

    def check(self, folder: Path) -> None:
        library.check_saved(folder, len(list(all_graphs(self._settings))))

    def _compile(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="transformers-neuronx-") as scratch:
            prepare_environment(self._settings, self._target, Path(scratch))
            library.compile_into(self._settings, self._model_dir, folder)


def prepare_environment(settings: Settings, target: Target, scratch: Path | None = None) -> None:
    """Set the variables that the Neuron libraries read. Must run before they are imported."""
    os.environ.update(environment_of(target, settings.tensor, settings.context_buckets[-1], scratch))
    if scratch is not None:
        os.environ.setdefault(COMPILE_CACHE_VARIABLE, str(scratch / "cache"))


def described(config: RuntimeConfig, model_dir: Path) -> tuple[Settings, Target]:
    """What to compile or to load. Raises as `settings_of` and `find_target`, and as `check_cores` on a machine with
    devices."""
    target = find_target(config, ask=platform_target)
    settings = settings_of(config, read_config(model_dir), target)
    if target.granted_cores:
        check_cores(target, settings.tensor)
    return settings, target
