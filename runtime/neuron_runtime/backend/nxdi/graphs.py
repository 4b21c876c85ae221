"""What NxD Inference compiles of a model: all its graphs in one unit, which only this library can load.

`NxdiCompiler` is the `Compiler` of `backend_protocol`. Describing needs no Neuron library but their versions; they are
imported to compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from neuron_runtime.backend.neuron.devices import Target, check_cores, environment_of, find_target
from neuron_runtime.backend.neuron.installed import platform_target
from neuron_runtime.backend.neuron.model_config import quantization_of
from neuron_runtime.backend.neuron.step_graphs import Prefill
from neuron_runtime.backend.nxdi import library
from neuron_runtime.backend.nxdi.buckets import all_graphs
from neuron_runtime.backend.nxdi.draft_model import draft_files, draft_folder
from neuron_runtime.backend.nxdi.foreign import (
    TEXT_PROGRAM,
    VISION_PROGRAM,
    adopted,
    around,
    differences,
    has_encoder,
    holds_weights,
    is_foreign,
    within,
)
from neuron_runtime.backend.nxdi.models import reads_stored
from neuron_runtime.backend.nxdi.neuron_config import SHARDED
from neuron_runtime.backend.nxdi.quantized import check_stored
from neuron_runtime.backend.nxdi.settings import Settings, settings_of
from neuron_runtime.backend.nxdi.unread import all_weights_read
from neuron_runtime.backend_protocol import CompileUnit, Needs
from neuron_runtime.checkpoint import (
    GRAPHS_CONFIG_FILE,
    GRAPHS_FILE,
    SHARD_FILE,
    has_only_shards,
    read_checkpoint,
    read_config,
)
from neuron_runtime.config import ModelSource, RuntimeConfig
from neuron_runtime.console import say
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, joined
from neuron_runtime.quantization import wanted_format
from neuron_runtime.uris import ModelInPlace, parse_uri
from neuron_runtime.weights.store import Damaged, read_entry

PREFILLS, DECODES, VERIFIES = "context_encoding_model", "token_generation_model", "speculation_model"
DRAFTS, ENCODES = "fused_speculation_model", "vision_encoder_model"
"""In its work folder, NxD Inference has a folder for each of these, and in it one for each bucket."""
NEFF_FILE = "graph.neff"


def programs(settings: Settings) -> tuple[str, ...]:
    """Folders of the programs, within those of an artifact and of the work."""
    return (TEXT_PROGRAM, VISION_PROGRAM) if settings.vision else ("",)


class NxdiCompiler:
    """See `backend_protocol.Compiler`."""

    def __init__(self, config: RuntimeConfig, model_dir: Path) -> None:
        library.check_installed()
        self._config, self._model_dir = config, model_dir
        self._settings, self._target = described(config, model_dir)
        holds_weights = self._settings.neuron_config.get(SHARDED) and not _is_pinned_by_contents(config.model)
        self._work: Path | None = None
        """Where NxD Inference compiles."""
        self._identity = identity_of(model_dir) if holds_weights else ""
        self._draft_dir = draft_folder(config)

    @property
    def needs(self) -> Needs:
        settings, target = self._settings, self._target
        shapes = {
            "rows": settings.max_rows,
            "rowBuckets": list(settings.row_buckets),
            "length": settings.max_model_length,
            "contextBuckets": list(settings.context_buckets),
            "prefixBuckets": list(settings.prefix_buckets),
            "tokenBuckets": list(settings.token_buckets),
            "blockSize": settings.block_size,
            "blocks": settings.num_blocks,
        }
        return Needs(
            shapes=shapes,
            settings={
                **({"weights": self._identity} if self._identity else {}),
                **self._draft,
                **self._vision,
                "application": settings.application,
                "layout": settings.layout,
                "neuronConfig": {
                    name: _without(value, _NOT_OF_GRAPHS)
                    for name, value in settings.neuron_config.items()
                    if name not in _NOT_OF_SETTINGS
                },
            },
            libraries=library.required_versions(),
            target={
                "platform": target.platform.name,
                "logicalCore": target.logical_core,
                "tensor": settings.tensor,
            },
        )

    @property
    def _draft(self) -> dict[str, Any]:
        """What the graphs, or the weights beside them, have of a draft model."""
        draft, folder = self._settings.draft, self._draft_dir
        if draft is None or folder is None:
            return {}
        facts: dict[str, Any] = {"application": draft.application, "config": dict(draft.config)}
        facts |= {"arguments": draft.arguments, "fusionBias": draft.has_fusion_bias}
        if self._settings.neuron_config.get(SHARDED):
            facts["weights"] = identity_of(folder) or folder.name  # an entry of a store has its digest for a name
        return {"draft": facts}

    @property
    def _vision(self) -> dict[str, Any]:
        """What the graphs of an encoder of pictures depend on."""
        vision = self._settings.vision
        if vision is None:
            return {}
        return {"vision": {name: one for name, one in vision.neuron_config.items() if name not in _NOT_OF_VISION}}

    def ready_made(self, given: Path | None) -> Path | None:
        for folder in filter(has_encoder, around(self._model_dir) if given is None else [given]):
            message = f"the graphs in {folder} have an encoder of pictures, and such graphs of others are not loaded"
            if given is not None:
                raise FatalError(ExitCode.ARTIFACT_MISSING, f"{message}: leave it out, so that the model is compiled")
            say(message)
        for folder in within(self._model_dir) if given is None else filter(is_foreign, [given]):
            if not (differing := self._differences(folder)):
                say(f"loading the graphs that NxD Inference compiled into {folder}")
                return folder
            message = f"the graphs in {folder} were compiled for something else: {joined(differing)}"
            if given is not None:
                raise FatalError(ExitCode.ARTIFACT_MISSING, f"{message}; name another folder, or change these settings")
            if folder == self._model_dir and has_only_shards(folder):
                cure = "change these settings, or add the model's own weights, from which others can be compiled"
                raise FatalError(ExitCode.ARTIFACT_MISSING, f"{message}; {cure}")
            say(message)
        return None

    def _differences(self, folder: Path) -> list[str]:
        try:
            settings, _ = described(fitting(self._config, self._model_dir, folder), self._model_dir)
        except InvalidConfig as error:
            return [f"{path}: {message}" for path, message in error.parts]
        except FatalError as error:
            return [str(error)]
        return differences(settings, read_config(self._model_dir), folder)

    def tools(self) -> Mapping[str, str]:
        return {library.COMPILER: library.compiler_version()}

    def graphs(self) -> Sequence[CompileUnit]:
        library.check_rows(self._settings)
        vision = self._settings.vision
        names = tuple(graph.name for graph in (*all_graphs(self._settings), *(vision.graphs if vision else ())))
        return [CompileUnit(self._settings.application, self._compile, names, self._ready)]

    def check(self, folder: Path) -> None:
        """Loading graphs takes a device, so this looks for the files that loading will read."""
        json.loads((folder / GRAPHS_CONFIG_FILE).read_bytes())  # it has Infinity, which strict JSON does not
        for part in programs(self._settings):
            if Path(folder, part, GRAPHS_FILE).stat().st_size == 0:
                raise FatalError(ExitCode.COMPILE_FAILED, f"{Path(part, GRAPHS_FILE)} is empty")
        for name in missing_weights(self._settings, folder):
            raise FatalError(ExitCode.COMPILE_FAILED, f"NxD Inference wrote no {name}")

    def _compile(self, folder: Path) -> None:
        # NxD Inference deletes its work folder, compiles into it, and leaves it.
        with tempfile.TemporaryDirectory(prefix="nxdi-") as scratch:
            self._work = Path(scratch, "work")
            prepare_environment(self._settings, self._target, self._work)
            if self._settings.quantized is not None and any(self._model_dir.glob("*.safetensors")):
                check_stored(read_checkpoint(self._model_dir))  # if they are elsewhere, when they are loaded
            with all_weights_read(self._model_dir, self._settings, self._draft_dir):
                library.application(self._settings, self._model_dir, self._draft_dir).compile(str(folder))

    def _ready(self) -> list[str]:
        """Graphs that are compiled, in any order: NxD Inference has several compilers at work."""
        if self._work is None:
            return []
        decodes = DRAFTS if self._settings.draft else VERIFIES if self._settings.max_drafts else DECODES
        (text, *others), vision = programs(self._settings), self._settings.vision
        numbers, names = Counter[str](), []
        for graph in all_graphs(self._settings):
            submodel = PREFILLS if isinstance(graph, Prefill) else decodes
            if Path(self._work, text, submodel, f"_tp0_bk{numbers[submodel]}", NEFF_FILE).is_file():
                names.append(graph.name)
            numbers[submodel] += 1
        for number, encode in enumerate(vision.graphs if vision else ()):
            if Path(self._work, *others, ENCODES, f"_tp0_bk{number}", NEFF_FILE).is_file():
                names.append(encode.name)
        return names


_NOT_OF_SETTINGS = {
    *("skip_warmup", "tp_degree", "logical_nc_config"),
    *("batch_size", "tkg_batch_size", "seq_len", "max_context_length", "context_encoding_buckets", "prefix_buckets"),
    *("token_generation_buckets", "token_generation_batches", "pa_num_blocks", "pa_block_size"),
}
"""Arguments of NeuronConfig that change no graph, or that the needs name elsewhere."""


_NOT_OF_VISION = {"skip_warmup"}
_NOT_OF_GRAPHS = {"max_cpu_loras"}


def _without(value: Any, names: Collection[str]) -> Any:
    """A part of NeuronConfig without what changes no graph."""
    return {name: one for name, one in value.items() if name not in names} if isinstance(value, Mapping) else value


SAMPLES, SAMPLE_BYTES = 16, 2**16


def _is_pinned_by_contents(model: ModelSource) -> bool:
    """Digests of models that are read in place are those of names and shapes."""
    return bool(model.converted or (model.digest and not isinstance(parse_uri(model.uri), ModelInPlace)))


def identity_of(model_dir: Path) -> str:
    """A hash over parts of the weights of a folder that has no digest of its own; empty if it has one, or no weights.

    An artifact that holds weights must not be loaded for other weights of the same shape.
    """
    with suppress(Damaged):
        if read_entry(model_dir) is not None:
            return ""
    paths, digest = sorted(model_dir.glob("*.safetensors")), hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            for at in range(SAMPLES):
                file.seek(size * at // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
        digest.update(f"{path.name} {size}".encode())
    return digest.hexdigest() if paths else ""


def missing_weights(settings: Settings, folder: Path) -> list[str]:
    """Files of weights that an artifact with weights lacks."""
    if not settings.neuron_config.get(SHARDED):
        return []
    ranks = [SHARD_FILE.format(rank=rank) for rank in range(settings.tensor)]
    names = [str(Path(part, name)) for part in programs(settings) for name in ranks]
    return [name for name in names if not (folder / name).is_file()]


def prepare_environment(settings: Settings, target: Target, scratch: Path | None = None) -> None:
    """Set the variables that the Neuron libraries read. Must run before they are imported."""
    os.environ.update(environment_of(target, settings.tensor, settings.max_context_length, scratch))
    os.environ.update(settings.environment)


def described(config: RuntimeConfig, model_dir: Path) -> tuple[Settings, Target]:
    """What to compile or to load. Raises as `settings_of` and `find_target`, and as `check_cores` on a machine with
    devices."""
    target = find_target(config, ask=platform_target)
    model = read_config(model_dir)
    _check_wanted(config, model)
    sees = library.sees_pictures()
    settings = settings_of(config, model, target, draft=draft_files(config), sees_pictures=sees)
    if target.granted_cores:
        check_cores(target, settings.tensor)
    return settings, target


def _check_wanted(config: RuntimeConfig, model: Mapping[str, Any]) -> None:
    """Weights are converted before they come here, unless the class multiplies them out. Raises InvalidConfig."""
    if config.quantization == "auto" or config.model.converted or (quantization_of(model) and reads_stored(model)):
        return
    if wanted_format(model, config.quantization):
        message = f"is {config.quantization}, but these weights are not: convert them with `neuron-runtime convert`"
        raise InvalidConfig("$.quantization", f"{message}, and set model.converted to the digest that it prints")


def fitting(config: RuntimeConfig, model_dir: Path, folder: Path) -> RuntimeConfig:
    """The configuration for graphs that others compiled: as it is, if they fit, or with what they decide. For graphs of
    ours it is as it is."""
    if not is_foreign(folder):
        return config
    settings, _ = described(config, model_dir)
    as_it_is = not differences(settings, read_config(model_dir), folder) and not holds_weights(folder)
    return config if as_it_is else adopted(config, folder)
