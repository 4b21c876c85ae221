"""The Neuron libraries: versions, what the installed ones can, and applications made of them.

The only module that imports `neuronx_distributed_inference` and what it needs. Called by `graphs` and by whoever loads,
in a process whose environment is set (`devices.environment_of`). What a version can is found out by looking at it,
never by comparing version numbers: AWS's wheels and the public tags differ.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from neuron_runtime.backend.neuron.installed import driver_version, has_module, missing
from neuron_runtime.backend.neuron.installed import version_of as installed_version
from neuron_runtime.backend.neuron.model_config import ROPE, completed
from neuron_runtime.backend.neuron.override import PATH
from neuron_runtime.backend.nxdi.eagle import converted, read_tensor
from neuron_runtime.backend.nxdi.models import BY_APPLICATION, is_private, text_config
from neuron_runtime.backend.nxdi.neuron_config import BY_NAME, CACHE_TYPE, SAMPLING
from neuron_runtime.backend.nxdi.quantized import CHECKPOINT, EXCLUDED, of_draft
from neuron_runtime.backend.nxdi.settings import DraftModel, Settings
from neuron_runtime.backend.nxdi.vision import CHUNKS, GRIDS, encoder_of
from neuron_runtime.checkpoint import read_config
from neuron_runtime.errors import ConfigProblems, ExitCode, FatalError, InvalidConfig

IMAGE = "runtime-neuron"
"""Target of our Dockerfile whose image has all of them."""

INFERENCE = "neuronx-distributed-inference"
PACKAGES = {
    INFERENCE: "neuronx_distributed_inference",
    "neuronx-distributed": "neuronx_distributed",
    "torch-neuronx": "torch_neuronx",
}
"""The name to import of each distribution without which nothing runs. Graphs run only with the versions that compiled
them."""
COMPILER = "neuronx-cc"
COMPILER_MODULE = "neuronxcc"
OTHERS = (COMPILER, "libneuronxla", "torch-xla", "torch", "transformers")

PARTS = ("text_config", "vision_config")
"""Of a config.json, for what a model consists of."""

SDK_OF_RELEASE = {
    (0, 7): "2.27",
    (0, 8): "2.28",
    (0, 9): "2.29",
    (0, 10, 17970): "2.30",
    (0, 10, 18399): "2.31",
}
"""The Neuron SDK that brings a release of NxD Inference."""
OF_GRIDS, POSITIONS = "models.qwen3_vl.modeling_qwen3_vl", "visual.pos_embed.weight"
"""The module of a model whose encoder takes grids, and that encoder's tensor of positions."""
BLIND = ("2.27", "2.28")
"""Those whose applications with an encoder do not run."""


def check_installed() -> None:
    """Raises InvalidConfig naming the packages that are missing."""
    if lacks := missing(PACKAGES):
        message = f"nxdi needs {', '.join(lacks)}, which is not installed: use the image {IMAGE}, or another backend"
        raise InvalidConfig("$.backend", message)


def version_of(distribution: str) -> str:
    """The installed version; empty if it is not installed, or does not say."""
    version = installed_version(distribution)
    if not version and distribution == INFERENCE and has_module(PACKAGES[INFERENCE]):
        # Installed from a checkout. Importing it imports nothing else.
        return str(getattr(importlib.import_module(PACKAGES[INFERENCE]), "__version__", ""))
    return version


def compiler_version() -> str:
    """The version of the compiler. Raises FatalError with COMPILE_FAILED if it is missing."""
    if version := installed_version(COMPILER):
        return version
    try:
        return str(importlib.import_module(COMPILER_MODULE).__version__)
    except (ImportError, AttributeError) as error:
        message = f"the Neuron compiler {COMPILER} is not installed: use the image {IMAGE}, or pip install {COMPILER}"
        raise FatalError(ExitCode.COMPILE_FAILED, message) from error


def required_versions() -> dict[str, str]:
    """Versions that must be the same where graphs are compiled and where they run."""
    return {name: version_of(name) or "unknown" for name in (*PACKAGES, "torch")}


def sdk_of(version: str) -> str:
    """The Neuron SDK of a version of NxD Inference; empty if unknown."""
    numbers = tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())
    releases = [sdk for release, sdk in SDK_OF_RELEASE.items() if numbers[: len(release)] == release]
    return releases[0] if releases else ""


def check_rows(settings: Settings) -> None:
    """Raises InvalidConfig if the installed release computes a model only with more sequences at once."""
    family, sdk = BY_APPLICATION.get(settings.application), sdk_of(version_of(INFERENCE))
    least = family.least_rows.get(sdk, 1) if family is not None else 1
    rows = min(settings.row_buckets, default=settings.max_rows)
    if rows < least:
        at = "$.buckets.sequences" if settings.row_buckets else "$.limits.maxSequences"
        message = f"must be at least {least}: Neuron SDK {sdk} runs {settings.application} with no fewer, got {rows}"
        raise InvalidConfig(at, f"{message}; or use an image with a newer one")


def versions(sys: Path = Path("/sys")) -> dict[str, str]:
    """All versions that a report of a problem should have; imports nothing."""
    named = {name: version_of(name) for name in (*PACKAGES, *OTHERS)}
    installed = {name: value for name, value in named.items() if value}
    if sdk := sdk_of(installed.get(INFERENCE, "")):
        installed = {"neuron-sdk": sdk, **installed}
    driver = driver_version(sys)
    return {**installed, "driver": driver} if driver else installed


def application(settings: Settings, model_dir: Path, draft_dir: Path | None = None) -> Any:
    """The application of a model: an object of NxD Inference, neither compiled nor loaded.

    If the settings have a draft model, its graphs have it too.

    Its configuration is made from the model's folder, never read from an artifact: that one names the folder from which
    it was compiled.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE.
        InvalidConfig: a package is missing, or NxD Inference refuses the configuration, or does not know a part.
    """
    check_installed()
    application_class = _class_of(settings, read_config(model_dir))
    config_class = application_class.get_config_cls().get_neuron_config_cls()
    arguments = _arguments(settings, config_class, model_dir)
    _check_known(arguments, config_class)
    if settings.max_adapters:
        _check_adapters()
    try:
        neuron_config = config_class(**arguments)
    except Exception as error:
        raise InvalidConfig(PATH, f"NxD Inference refuses it: {_text(error)}") from error
    _check_taken(settings.neuron_config, neuron_config, config_class())
    try:
        drafts = dict[str, Any]()
        if settings.draft is not None and draft_dir is not None:
            drafts["fused_spec_config"] = _with_draft(settings, settings.draft, application_class, draft_dir, model_dir)
        configs, family = [neuron_config], BY_APPLICATION.get(settings.application)
        if settings.vision is not None:
            configs.append(config_class(**copy.deepcopy(dict(settings.vision.neuron_config))))
        config = application_class.get_config_cls()(*configs, load_config=_load_config(model_dir), **drafts)
        if family is not None and family.text_class and settings.vision is None:
            config = config.text_config
        elif settings.vision is not None and settings.vision.counts == CHUNKS:
            application_class = _with_room(application_class)
        elif settings.vision is not None and settings.vision.counts == GRIDS:
            application_class = _with_tied_head(application_class)
        model = text_config(read_config(model_dir))
        for name, value in corrected(settings, model).items():
            setattr(config, name, value)
        if settings.application == "qwen3_moe":
            # Its class always normalizes.
            config.neuron_config.normalize_top_k_affinities = bool(model.get("norm_topk_prob"))
        with _reading_positions(settings, model_dir):
            return application_class(str(model_dir), config)
    except Exception as error:
        raise InvalidConfig(PATH, f"NxD Inference refuses the model with it: {_text(error)}") from error


def sees_pictures() -> bool:
    """Whether applications with an encoder run: older releases fail in every call, for texts too, after the device has
    computed it."""
    return sdk_of(version_of(INFERENCE)) not in BLIND


def _with_room(application_class: Any) -> Any:
    """An application of Llama 4 that pads features to the graph which a prompt takes. Its own takes one that is as long
    as the prompt, and so too short."""

    class WithRoom(application_class):  # type: ignore[misc]
        def get_padding_length(self, buckets: list[int], position_ids: Any) -> int:
            length = 1 + int(position_ids.max())
            return next((size for size in buckets if size > length), buckets[-1])

    return WithRoom


def _with_tied_head(application_class: Any) -> Any:
    """An application of Qwen3-VL that finds a head which is tied to the embedding. Its text alone does."""

    class WithTiedHead(application_class):  # type: ignore[misc]
        @staticmethod
        def update_state_dict_for_tied_weights(state_dict: dict[str, Any]) -> None:
            _module(OF_GRIDS).NeuronQwen3VLTextForCausalLM.update_state_dict_for_tied_weights(state_dict)

    return WithTiedHead


@contextmanager
def _reading_positions(settings: Settings, model_dir: Path) -> Iterator[None]:
    """Meanwhile the encoder of grids, whose table of positions is on the host, reads only that of a checkpoint, or none
    where there are no weights, as to compile."""
    if settings.vision is None or settings.vision.counts != GRIDS:
        yield
        return
    import torch  # noqa: PLC0415  (as the library)

    module: Any = _module(f"{OF_GRIDS}_vision")
    encoder = encoder_of(read_config(model_dir), GRIDS)

    def positions(folder: str) -> dict[str, Any]:
        if any(Path(folder).glob("*.safetensors")):
            return {f"model.{POSITIONS}": read_tensor(Path(folder), POSITIONS)}
        return {f"model.{POSITIONS}": torch.zeros(encoder["num_position_embeddings"], encoder["hidden_size"])}

    former, module.load_state_dict = module.load_state_dict, positions
    try:
        yield
    finally:
        module.load_state_dict = former


def _arguments(settings: Settings, config_class: Any, model_dir: Path) -> dict[str, Any]:
    """Those of a NeuronConfig of this release, which JSON cannot have, or which only this machine knows, too."""
    arguments: dict[str, Any] = copy.deepcopy(dict(settings.neuron_config))
    if settings.quantized is not None:
        arguments[CHECKPOINT] = str(model_dir)
    if cache := arguments.pop(CACHE_TYPE, None):
        import torch  # noqa: PLC0415  (as the library)

        if hasattr(config_class(), CACHE_TYPE):  # in older releases the flag is enough
            arguments[CACHE_TYPE] = {**cache, "quant_dtype": getattr(torch, cache["quant_dtype"])}
        elif settings.layout == "blocks":
            message = f"NxD Inference {version_of(INFERENCE)} has no blocks of fp8: leave it out, use layout slots, or"
            raise InvalidConfig("$.kvCacheDtype", f"{message} an image with a newer Neuron SDK")
    return arguments


def _with_draft(settings: Settings, draft: DraftModel, application_class: Any, draft_dir: Path, model_dir: Path) -> Any:
    """What an application is told of the model that makes its drafts. Raises as `application`."""
    draft_class = _class_of(replace(settings, application=draft.application), draft.config)
    config_class = draft_class.get_config_cls()
    # Another class may have another kind of NeuronConfig.
    neuron_config_class = config_class.get_neuron_config_cls()
    neuron_config = neuron_config_class(**_arguments(settings, neuron_config_class, model_dir))
    for name, value in draft.arguments.items():
        setattr(neuron_config, name, value)
    if settings.quantized is not None:
        setattr(neuron_config, EXCLUDED, of_draft(text_config(draft.config).get("num_hidden_layers", 1)))
    config = config_class(neuron_config, load_config=_load_config(draft_dir))
    for name, value in corrected(replace(settings, application=draft.application), text_config(draft.config)).items():
        setattr(config, name, value)
    if draft.eagle:
        config.tie_word_embeddings = False
        config.fc_bias = draft.has_fusion_bias
        draft_class = _head_class(draft_class, settings, model_dir)
    return _module("models.config").FusedSpecNeuronConfig(
        worker_cls=application_class._model_cls,
        draft_config=config,
        draft_model_path=str(draft_dir),
        draft_model_cls=None if draft_class is application_class else draft_class,
    )


def _head_class(application_class: Any, settings: Settings, model_dir: Path) -> Any:
    """The class of an EAGLE head, which NxD Inference asks for its weights."""

    class Head(application_class):  # type: ignore[misc]
        @staticmethod
        def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: Any) -> Any:
            found = converted(state_dict, settings.vocabulary_size, partial(read_tensor, model_dir))
            return application_class.convert_hf_to_neuron_state_dict(found, config)

    return Head


def _load_config(model_dir: Path) -> Callable[[Any], None]:
    """What reads config.json into an InferenceConfig, with what NxD Inference needs but transformers leaves out."""
    load, given = _module("utils.hf_adapter").load_pretrained_config(str(model_dir)), read_config(model_dir)

    def load_config(config: Any) -> None:
        load(config)
        for name, value in completed(given).items():
            # transformers has a default for some families, but not for what it does not know to be in the file.
            if getattr(config, name, None) is None or (name in ROPE and given.get(name) is None):
                setattr(config, name, value)
        for part in PARTS:
            inner, of_part = getattr(config, part, None), given.get(part)
            if isinstance(inner, SimpleNamespace) and isinstance(of_part, Mapping):
                found = completed(of_part)
                if part != "text_config":
                    found.pop("rope_scaling", None)  # of an encoder it is another word for its own way of turning
                for name, value in found.items():
                    if getattr(inner, name, None) is None or (name in ROPE and of_part.get(name) is None):
                        setattr(inner, name, value)

    return load_config


def corrected(settings: Settings, text: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by this model's numbers, where a class of NxD Inference takes those of another, or would fail.

    text: see `text_config`.
    """
    if settings.application == "mistral" and (text.get("sliding_window") or 0) >= settings.max_model_length:
        # No token is that far from another one; and a prompt would have to fill the window.
        return {"sliding_window": None}
    if settings.application != "gemma3":
        return {}
    rope = text.get("rope_parameters") or {}
    everywhere, nearby = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    scaling = text.get("rope_scaling") or everywhere
    facts = {
        "vocab_size": text.get("vocab_size"),
        "max_position_embeddings": text.get("max_position_embeddings"),
        "rms_norm_eps": text.get("rms_norm_eps"),
        "global_rope_theta": text.get("rope_theta") or everywhere.get("rope_theta"),
        "local_rope_theta": text.get("rope_local_base_freq") or nearby.get("rope_theta"),
    }
    # The smallest models do not stretch positions.
    return {name: value for name, value in facts.items() if value is not None} | {"rope_scaling": scaling.get("factor")}


def _text(error: Exception) -> str:
    return f"{error} ({type(error).__name__})" if str(error) else type(error).__name__


def _class_of(settings: Settings, model: Mapping[str, Any]) -> Any:
    """The application class. Raises FatalError or InvalidConfig."""
    name, window = settings.application, model.get("sliding_window")
    if is_private(name):
        module, _, attribute = name.partition(":")
        try:
            application_class = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise InvalidConfig("$.applicationClass", f"cannot import {name}: {error}") from error
        if not inspect.isclass(application_class) or not callable(getattr(application_class, "get_config_cls", None)):
            raise InvalidConfig("$.applicationClass", f"{name} is no application class of NxD Inference")
        return application_class
    registry, family = _module("utils.constants").MODEL_TYPES, BY_APPLICATION[name]
    if family.application in registry:
        if family.pictures and settings.vision is not None:
            if not sees_pictures():
                raise FatalError(
                    ExitCode.UNSUPPORTED_ARCHITECTURE,
                    f"NxD Inference {version_of(INFERENCE)} fails in every call of {family.application}: use an image "
                    "with Neuron SDK 2.29 or newer",
                )
        elif family.text_class:
            _check_chunks(settings, text_config(model).get("attention_chunk_size"))
            module, _, attribute = family.text_class.partition(":")
            return getattr(_module(module), attribute)
        return registry[family.application]["causal-lm"]
    if family.before in registry:
        if isinstance(window, int) and window < settings.max_model_length:
            message = (
                f"is {settings.max_model_length}, but NxD Inference {version_of(INFERENCE)} does not know the sliding "
                f"window of {window} tokens: set {window} or less, or use an image with a newer Neuron SDK"
            )
            raise InvalidConfig("$.limits.maxModelLength", message)
        return registry[family.before]["causal-lm"]
    raise FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE,
        f"NxD Inference {version_of(INFERENCE)} has no {family.application}, which came with {family.since}: use an "
        "image with a newer Neuron SDK",
    )


def _check_chunks(settings: Settings, chunk: Any) -> None:
    """Raises InvalidConfig if attention in chunks would be wrong: older releases mix up the values of heads."""
    if not isinstance(chunk, int) or settings.max_model_length <= chunk:
        return
    with suppress(ImportError):
        utils = importlib.import_module(f"{PACKAGES[INFERENCE]}.modules.attention.utils")
        if hasattr(utils, "reshape_qkv_for_chunked_flash_attention_kernel"):
            message = (
                f"is {settings.max_model_length}, but NxD Inference {version_of(INFERENCE)} is wrong beyond a chunk of "
                f"attention, which has {chunk} tokens: set {chunk}, or use an image with a newer Neuron SDK"
            )
            raise InvalidConfig("$.limits.maxModelLength", message)


def _check_adapters() -> None:
    """Older releases accept an added adapter and never use it. Raises InvalidConfig."""
    config_class = _module("modules.lora_serving.config").LoraServingConfig
    if "enable_base_model_only" not in inspect.signature(config_class).parameters:
        message = (
            f"NxD Inference {version_of(INFERENCE)} cannot add adapters while it serves: leave it out, or use an image "
            "with Neuron SDK 2.29 or newer"
        )
        raise InvalidConfig("$.adapters.maxActive", message)


def _check_known(arguments: Mapping[str, Any], config_class: Any) -> None:
    """NeuronConfig drops what it does not know, with a line in the log. Raises InvalidConfig."""
    problems, defaults = ConfigProblems(), config_class()
    for name in arguments:
        field = BY_NAME.get(name)
        if (field is None or field.is_kept) and not hasattr(defaults, name):
            at = field.path if field is not None and field.path else f"{PATH}.{name}"
            problems.add(at, f"NxD Inference {version_of(INFERENCE)} does not have `{name}`: leave it out")
    problems.check()


def _check_taken(arguments: Mapping[str, Any], made: Any, defaults: Any) -> None:
    """An attribute may exist without being an argument, and OnDeviceSamplingConfig drops what it does not know.

    Raises InvalidConfig with every one that was dropped.
    """
    problems = ConfigProblems()
    sampling = arguments.get(SAMPLING) or {}
    dropped = {f"{PATH}.{SAMPLING}.{name}": name for name in sampling if not hasattr(getattr(made, SAMPLING), name)}
    for name, value in arguments.items():
        field, before = BY_NAME.get(name), getattr(defaults, name, None)
        plain = isinstance(value, bool | int | float | str | list)
        ours = field is not None and (field.path or field.derived)
        if plain and not ours and getattr(made, name, value) == before != value:
            dropped[f"{PATH}.{name}"] = name
    for at, name in dropped.items():
        problems.add(at, f"NxD Inference {version_of(INFERENCE)} ignores `{name}`: leave it out")
    problems.check()


def _module(name: str) -> ModuleType:
    """A module of NxD Inference. Raises InvalidConfig naming what it could not import."""
    try:
        return importlib.import_module(f"{PACKAGES[INFERENCE]}.{name}")
    except ImportError as error:
        missing = getattr(error, "name", None) or str(error)
        message = f"nxdi needs {missing}, which is not installed or does not match ({error}): use the image {IMAGE}"
        raise InvalidConfig("$.backend", message) from error
