"""What optimum-neuron compiles of a model: a graph for prompts and one for decoding, in one file that only it can load.

`OptimumCompiler` is the `Compiler` of `backend_protocol`. Describing needs no Neuron library but their versions; they
are imported to compile.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuron_runtime.backend.neuron.devices import (
    PLATFORM_VARIABLE,
    Target,
    check_cores,
    environment_of,
    find_target,
)
from neuron_runtime.backend.neuron.installed import platform_target, version_of
from neuron_runtime.backend.optimum import library
from neuron_runtime.backend.optimum.foreign import adopted, differences, is_foreign
from neuron_runtime.backend.optimum.settings import Settings, settings_of
from neuron_runtime.backend_protocol import Compiler, CompileUnit, Needs
from neuron_runtime.checkpoint import GRAPHS_CONFIG_FILE, GRAPHS_FILE, read_config
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, joined

WORK_FOLDERS = {"prefill": ("context_encoding", "chunked_prefill"), "decode": ("token_generation",)}
"""In its work folder the library has a folder for each graph, by what it calls it."""
NEFF_FILE = "_tp0_bk0/graph.neff"


class OptimumCompiler(Compiler):
    """See `backend_protocol.Compiler`."""

    def __init__(self, config: RuntimeConfig, model_dir: Path) -> None:
        library.check_installed()
        self._config, self._model_dir = config, model_dir
        self._settings, self._target = described(config, model_dir)
        self._work: Path | None = None
        """Where the library compiles."""

    @property
    def needs(self) -> Needs:
        settings = self._settings
        return Needs(
            shapes={
                "rows": settings.max_rows,
                "length": settings.max_model_length,
                "chunk": settings.chunk_tokens,
            },
            settings={
                "modelType": settings.model_type,
                "dtype": settings.dtype,
                "sampling": settings.sampling,
                "topK": settings.max_topk,
                "override": dict(settings.override),
            },
            libraries=library.required_versions(),
            target={"platform": settings.target, "tensor": settings.tensor},
        )

    def ready_made(self, given: Path | None) -> Path | None:
        folder = self._model_dir if given is None else given
        if not is_foreign(folder):
            return None
        if not (differing := self._differences(folder)):
            say(f"loading the graphs that optimum-neuron exported into {folder}")
            return folder
        message = f"the graphs in {folder} were exported for something else: {joined(differing)}"
        if given is not None:
            raise FatalError(ExitCode.ARTIFACT_MISSING, f"{message}; name another folder, or change these settings")
        say(message)
        return None

    def _differences(self, folder: Path) -> list[str]:
        try:
            settings, _ = described(adopted(self._config, folder), self._model_dir)
        except InvalidConfig as error:
            return [f"{path}: {message}" for path, message in error.parts]
        except FatalError as error:
            return [str(error)]
        return differences(settings, folder, library.required_versions())

    def tools(self) -> Mapping[str, str]:
        return {library.COMPILER: version_of(library.COMPILER)}

    def graphs(self) -> Sequence[CompileUnit]:
        return [CompileUnit(self._settings.model_type, self._compile, tuple(WORK_FOLDERS), self._ready)]

    def check(self, folder: Path) -> None:
        """Loading graphs takes a device, so this looks for the files that loading will read."""
        json.loads((folder / GRAPHS_CONFIG_FILE).read_bytes())
        if (folder / GRAPHS_FILE).stat().st_size == 0:
            raise FatalError(ExitCode.COMPILE_FAILED, f"{GRAPHS_FILE} is empty")

    def _compile(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="optimum-") as scratch:
            self._work = Path(scratch, "work")
            prepare_environment(self._settings, self._target, self._work)
            library.export(self._settings, self._model_dir, folder)

    def _ready(self) -> list[str]:
        """Graphs that are compiled."""
        work = self._work
        return [
            name
            for name, folders in WORK_FOLDERS.items()
            if work is not None and any((work / folder / NEFF_FILE).is_file() for folder in folders)
        ]


def prepare_environment(settings: Settings, target: Target, scratch: Path | None = None) -> None:
    """Set the variables that the Neuron libraries read. Must run before they are imported."""
    os.environ.update(environment_of(target, settings.tensor, settings.prefill_tokens, scratch))
    # The library refuses a value that is not its own name of the target, such as inf2.
    os.environ[PLATFORM_VARIABLE] = settings.target


def described(config: RuntimeConfig, model_dir: Path) -> tuple[Settings, Target]:
    """What to compile or to load. Raises as `settings_of` and `find_target`, and as `check_cores` on a machine with
    devices."""
    target = find_target(config, ask=platform_target)
    settings = settings_of(config, read_config(model_dir), target, has_chunks=library.has_chunks())
    if target.granted_cores:
        check_cores(target, settings.tensor)
    return settings, target


def fitting(config: RuntimeConfig, folder: Path) -> RuntimeConfig:
    """The configuration for these graphs: what others exported decides what it leaves open."""
    return adopted(config, folder) if is_foreign(folder) else config
