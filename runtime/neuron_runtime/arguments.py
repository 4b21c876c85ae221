"""Converts command-line flags and arguments of `LLM` to a configuration document.

Names are vLLM's where the meaning is the same. Called by the command `serve` and by the offline class; errors name the
flag or argument. It reads no model and imports no backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from neuron_runtime.config import CONFIG_VERSION, RuntimeConfig, parse_config
from neuron_runtime.console import say
from neuron_runtime.errors import ConfigProblems, FatalError, InvalidConfig
from neuron_runtime.flags import as_flag, fields_of, model_uri, plain
from neuron_runtime.host import DEV, device_nodes
from neuron_runtime.neuronx_fields import BY_NAME as BY_FIELD
from neuron_runtime.neuronx_fields import OTHER_VARIABLES, QUANT_VARIABLE, SEVERAL_NODES
from neuron_runtime.not_built import Surface, is_neutral, refuse
from neuron_runtime.speculative_config import OLDER_NAMES, with_older_names

DEFAULT_BACKEND = "torch"
NEURON_BACKEND = "nxdi"
"""The default on a machine with Neuron devices. It serves compiled graphs only."""
OPTIMUM_BACKEND = "optimum"
LEGACY_BACKEND = "transformers-neuronx"
COMPILING_BACKENDS = (NEURON_BACKEND, OPTIMUM_BACKEND, LEGACY_BACKEND)
BACKENDS_WITHOUT_BUCKETS = ("torch", "simulated", OPTIMUM_BACKEND)
BUCKET_VARIABLES = {
    "NEURON_CONTEXT_LENGTH_BUCKETS": "context_buckets",
    "NEURON_TOKEN_GEN_BUCKETS": "token_generation_buckets",
}
"""Arguments by the variable that sets them, as in vLLM's guides for Neuron."""
FRAMEWORK_VARIABLE = "VLLM_NEURON_FRAMEWORK"
FRAMEWORKS = {
    "neuronx-distributed-inference": NEURON_BACKEND,
    "optimum-neuron": OPTIMUM_BACKEND,
    "transformers-neuronx": LEGACY_BACKEND,
}
"""Backends by vLLM's names of them, which this variable has."""

NEURON_QUANT = "neuron_quant"
"""vLLM's word for quantization by transformers-neuronx, to the type of the variable."""
QUANT_KINDS = {"s8": ("int8", NEURON_QUANT), "f8e4m3fn": ("fp8",)}
"""What other backends have for its types. The last word means the first one by default."""

SWITCH_OF_ADAPTERS = "enable_lora"

RUNNERS: Mapping[str, Mapping[str, str]] = {
    "runner": {"generate": "generate", "pooling": "embed"},
    "convert": {"none": "", "embed": "embed", "classify": "rerank"},
}
"""vLLM's arguments that say together what `task` says, and what each value says; `auto` says nothing."""

TARGET_VARIABLE = "VLLM_TARGET_DEVICE"
"""With the value cpu, scripts that were written for devices run on the CPU, unchanged."""

FIELDS = tuple(fields_of(RuntimeConfig))

BY_ARGUMENT = {field.argument: field for field in FIELDS if field.argument}
LLM_ARGUMENTS = {name: field for name, field in BY_ARGUMENT.items() if field.flag and field.flag.llm}

FLAG_NAMES = {"model.uri": "MODEL"} | {field.path: field.option for field in BY_ARGUMENT.values()}
LLM_NAMES = {"model.uri": "model"} | {field.path: name for name, field in LLM_ARGUMENTS.items()}
"""The flag of `serve`, or the argument of `LLM`, by path of the document. See `naming`."""


def config_of(uri: str, arguments: Mapping[str, Any], **more: Any) -> RuntimeConfig:
    """Build the document from arguments. Raises InvalidConfig with the path in the document; see `naming`.

    Args:
        arguments: values by the names in `BY_ARGUMENT`; others get their defaults.
        more: further keys of the document.
    """
    document: dict[str, Any] = {
        "version": CONFIG_VERSION,
        "model": {"uri": uri},
        "servedNames": [uri.partition("@")[0].rstrip("/").rpartition("/")[2]],
        **more,
    }
    problems = ConfigProblems()
    for name, value in arguments.items():
        field = BY_ARGUMENT[name]
        part, _, key = field.path.rpartition(".")
        try:
            (document.setdefault(part, {}) if part else document)[key] = field.read(value)
        except ValueError as error:
            problems.add(f"$.{field.path}", str(error))
    try:
        raw = msgspec.json.encode(document)
    except TypeError as error:
        raise InvalidConfig("$", f"only plain values can be configured: {error}") from error
    with problems.collecting():
        config = parse_config(raw)
    problems.check()
    return config


def on_this_machine(
    arguments: Mapping[str, Any],
    *,
    device: str | None = None,
    additional_config: Mapping[str, Any] | None = None,
    enable_lora: bool | None = None,
    written: Callable[[str], str] = as_flag,
    dev: Path = DEV,
) -> dict[str, Any]:
    """Arguments as vLLM's scripts and commands for Neuron mean them, with what this machine says where they are silent.
    What the environment and the devices decide is logged. Raises InvalidConfig with the argument or variable.

    Args:
        arguments: values by the names in `BY_ARGUMENT`, `OLDER_NAMES` and `RUNNERS`.
        device: "cpu", "neuron" or "auto"; None: as "auto".
        additional_config: settings of the backend, below the key that newer versions of vLLM have for them.
        enable_lora: vLLM's switch for adapters, one at a time unless `max_loras` says more; None: `max_loras` decides.
        written: how errors write the name of an argument.
        dev: folder of device nodes.
    """
    values, problems = dict(arguments), ConfigProblems()
    with problems.collecting():
        values = with_older_names(values, written)
    with problems.collecting():
        values = _with_task(values, written)
    if enable_lora:
        values.setdefault("max_loras", 1)
    elif enable_lora is False:
        values.pop("max_loras", None)
    if os.environ.get(TARGET_VARIABLE) == "cpu" and "backend" not in values and device in (None, "auto", "neuron"):
        device = "cpu"
        values.pop("tensor_parallel_size", None)
        say(f"{TARGET_VARIABLE} is cpu: the model is computed on the CPU, in one process")
        # What is switched off on a device is not there on a CPU.
        settings = values.get("override_neuron_config")
        if isinstance(settings, Mapping):
            values["override_neuron_config"] = {name: one for name, one in settings.items() if one is not False}
    with problems.collecting():
        override = _neuron_config(values.pop("override_neuron_config", None), additional_config, written)
        if override:
            values["override_neuron_config"] = override
    with problems.collecting():
        if "backend" not in values or device is not None:
            backend = _backend(device, written, dev)
            if backend is not None:
                values.setdefault("backend", backend)
        values |= _of_environment(values)
    with problems.collecting():
        values |= _of_transformers_neuronx(values, written)
    problems.check()
    backend = values.get("backend", DEFAULT_BACKEND)
    if backend in COMPILING_BACKENDS:
        values.setdefault("compile", True)
        if _has_one_block_per_request(values):
            del values["block_size"]
            say(
                "the block size is the model's length: each request has one contiguous line of the cache (layout slots)"
            )
        elif backend == LEGACY_BACKEND and values.pop("block_size", None):
            say("the block size has no effect: each request has one contiguous line of the cache (layout slots)")
    return values


def _with_task(arguments: Mapping[str, Any], written: Callable[[str], str]) -> dict[str, Any]:
    """With the task that `RUNNERS` say. Raises InvalidConfig if they contradict each other or the task."""
    values, said = dict(arguments), dict[str, str]()
    for name, words in RUNNERS.items():
        value = values.pop(name, None)
        if value not in (None, "auto", *words):
            raise InvalidConfig(written(name), f"must be auto, {' or '.join(words)}, got {value!r}")
        if task := words.get(str(value), ""):
            said[name] = task
    runner, converted = said.get("runner", ""), said.get("convert", "")
    if runner == "generate" and converted:
        raise InvalidConfig(written("convert"), f"needs another {written('runner')} than generate: pooling")
    task = converted or runner
    given = BY_ARGUMENT["task"].read(values.get("task") or task)
    if task and given != task:
        raise InvalidConfig(written("task"), f"{given!r} is not what {' and '.join(map(written, said))} say: {task!r}")
    return {**values, "task": task} if task else values


def _of_transformers_neuronx(arguments: Mapping[str, Any], written: Callable[[str], str]) -> dict[str, Any]:
    """What a manifest that was written for transformers-neuronx sets otherwise, on that backend or on another one.

    What changes results there is honoured or refused with the cure; the rest is accepted with a notice.
    """
    backend, problems = arguments.get("backend", DEFAULT_BACKEND), ConfigProblems()
    override, dtype = arguments.get("override_neuron_config"), os.environ.get(QUANT_VARIABLE)
    name, kind = "override_neuron_config", "quantization"
    with suppress(ValueError):  # whoever makes the document says what is wrong
        override = BY_ARGUMENT[name].read(override)
    values: dict[str, Any] = {}
    given, said_by = arguments.get(kind), QUANT_VARIABLE
    if given is not None and not (given == NEURON_QUANT and dtype):
        said_by = written(kind)
        dtype = next((one for one, words in QUANT_KINDS.items() if given in words), None)
    if isinstance(override, Mapping):
        sizes = {key: one for key, one in override.items() if plain(key) == "continuous_batching"}
        values[name] = override = {key: one for key, one in override.items() if key not in sizes}
        for size in sizes.values():
            values |= _batching(size, arguments)
    if backend == LEGACY_BACKEND:
        if wrong := [variable for variable in SEVERAL_NODES if os.environ.get(variable)]:
            problems.add(wrong[0], f"the {backend} backend runs on one node: unset it")
        if dtype:
            say(f"{said_by}: weights are quantized to {dtype}")
            values[name] = {"quant": {"quant_dtype": dtype}, **values.get(name, {})}
            values[kind] = "auto"
        problems.check()
        return values
    if dtype in QUANT_KINDS:
        values[kind] = QUANT_KINDS[dtype][0]
        if given != values[kind]:
            say(f"{said_by}: weights are quantized to {values[kind]}")
    elif dtype:
        problems.add(QUANT_VARIABLE, f"is {dtype!r}: set {' or '.join(QUANT_KINDS)}, or unset it")
    if unread := [variable for variable in OTHER_VARIABLES if os.environ.get(variable)]:
        say(f"{', '.join(unread)}: no effect, only transformers-neuronx reads such variables")
    if isinstance(override, Mapping):
        kept, ignored = dict[str, Any](), list[str]()
        for key, value in override.items():
            field = BY_FIELD.get(plain(key))
            if field is None or (field.shared and backend == NEURON_BACKEND):
                kept[key] = value
            elif field.cure and not is_neutral(value, field.neutral):
                problems.add(f"{written(name)}[{key!r}]", f"is of transformers-neuronx: {field.cure}")
            else:
                ignored.append(key)
        if ignored:
            say(f"{written(name)}: {', '.join(ignored)}: no effect, these are layouts of transformers-neuronx")
        values[name] = kept
    problems.check()
    return values


def _batching(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that keywords of ContinuousBatchingConfig mean, unless they are set."""
    names = {
        "max_num_seqs": "max_num_seqs",
        "batch_size_for_shared_caches": "max_num_seqs",
        "max_model_len": "max_model_len",
    }
    sizes = {names.get(key): one for key, one in config.items()} if isinstance(config, Mapping) else {}
    return {name: one for name, one in sizes.items() if name and one is not None and name not in arguments}


def _has_one_block_per_request(arguments: Mapping[str, Any]) -> bool:
    """vLLM's guides for Neuron require a block size of the model's length for the contiguous cache."""
    decides = ("layout", "enable_prefix_caching", "num_gpu_blocks_override")
    return (
        "block_size" in arguments
        and arguments["block_size"] == arguments.get("max_model_len")
        and not arguments.keys() & {*decides}
    )


def _of_environment(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The buckets of a backend that has some, by variables. Raises InvalidConfig."""
    values: dict[str, Any] = {}
    backend = arguments.get("backend", DEFAULT_BACKEND)
    for variable, name in BUCKET_VARIABLES.items():
        value = os.environ.get(variable)
        if not value:
            continue
        if name in arguments or backend in BACKENDS_WITHOUT_BUCKETS:
            why = f"{BY_ARGUMENT[name].option} is set" if name in arguments else f"the {backend} backend has no buckets"
            say(f"{variable} has no effect: {why}")
            continue
        try:
            values[name] = BY_ARGUMENT[name].read(value)
        except ValueError as error:
            raise InvalidConfig(variable, str(error)) from error
        say(f"{variable}: {BY_ARGUMENT[name].option} {value}")
    return values


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Add the name of the flag or argument to errors about a document: `FLAG_NAMES` or `LLM_NAMES`."""
    try:
        yield
    except FatalError as error:
        path, _, message = str(error).partition(": ")
        parts = error.parts if isinstance(error, InvalidConfig) else ((path, message),)
        named = [(_named(path, names), message) for path, message in parts]
        if named == list(parts):
            raise
        raise InvalidConfig(*named[0], *named[1:]) from None


def _named(path: str, names: Mapping[str, str]) -> str:
    inside = path.removeprefix("$.").partition("[")[0]
    name = names.get(inside) or names.get(inside.partition(".")[0])
    return path if name is None else f"{name} ({path})"


def llm_config(
    model: str,
    arguments: Mapping[str, Any],
    *,
    device: str | None = None,
    revision: str | None = None,
    additional_config: Mapping[str, Any] | None = None,
    dev: Path = DEV,
) -> RuntimeConfig:
    """Build the document from the arguments of `LLM`, by vLLM's names; None means the default.

    Raises:
        TypeError: an unknown argument.
        InvalidConfig: names the argument that is not supported.
    """
    values, problems = {}, ConfigProblems()
    for name, value in arguments.items():
        is_known = True
        with problems.collecting():
            is_known = refuse(Surface.LLM, name, value)
        if is_known or value is None or name == SWITCH_OF_ADAPTERS:
            continue
        if name not in LLM_ARGUMENTS and name not in (*OLDER_NAMES, *RUNNERS):
            raise TypeError(f"LLM() has no argument {name!r}")
        values[name] = value
    if "dtype" in values:
        values["dtype"] = str(values["dtype"])
    with problems.collecting():
        vllm: dict[str, Any] = {"device": device, "additional_config": additional_config}
        vllm[SWITCH_OF_ADAPTERS] = arguments.get(SWITCH_OF_ADAPTERS)
        values = on_this_machine(values, **vllm, written=str, dev=dev)
    problems.check()
    with problems.collecting(), naming(LLM_NAMES):
        config = config_of(_with_revision(model_uri(model), revision), values)
    problems.check()
    return config


def default_weights_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "neuron-serving", "weights")


def default_artifacts_dir() -> Path:
    return default_weights_dir().with_name("artifacts")


def _neuron_config(override: Any, additional: Any, written: Callable[[str], str]) -> Any:
    """Settings of the Neuron backend from either of the two arguments that vLLM's versions use."""
    if not isinstance(additional, Mapping | None):
        raise InvalidConfig(written("additional_config"), f"must be an object, got {additional!r}")
    inside = dict(additional or {})
    sources = [override, inside.pop("override_neuron_config", None), inside.pop("override-neuron-config", None)]
    for key in inside:
        raise InvalidConfig(
            f"{written('additional_config')}[{key!r}]", "is not supported: only `override_neuron_config` is"
        )
    configs = [config for config in sources if config]
    if len(configs) > 1:
        raise InvalidConfig(
            written("override_neuron_config"), f"is set twice: leave it out of `{written('additional_config')}`"
        )
    return configs[0] if configs else None


def _backend(device: str | None, written: Callable[[str], str], dev: Path) -> str | None:
    """The default backend: that of a Neuron device, if the machine has one."""
    nodes, name = device_nodes(dev), written("device")
    match device:
        case None | "auto":
            backend = _neuron_backend() if nodes else None
            if backend is not None:
                say(f"backend {backend} by default: this machine has Neuron devices ({nodes[0]})")
            return backend
        case "cpu":
            return DEFAULT_BACKEND
        case "neuron":
            if not nodes:
                raise InvalidConfig(
                    name,
                    f"'neuron', but this machine has no Neuron device ({dev}/neuron0): leave `{name}` out to run on "
                    "the CPU, or run this on an Inf2 or Trn instance with the Neuron driver",
                )
            return _neuron_backend()
    raise InvalidConfig(name, f"must be 'cpu' or 'neuron', got {device!r}")


def _neuron_backend() -> str:
    framework = os.environ.get(FRAMEWORK_VARIABLE)
    if not framework:
        return NEURON_BACKEND
    if framework not in FRAMEWORKS:
        raise InvalidConfig(FRAMEWORK_VARIABLE, f"must be one of {', '.join(FRAMEWORKS)}, got {framework!r}")
    return FRAMEWORKS[framework]


def _with_revision(uri: str, revision: str | None) -> str:
    if revision is None:
        return uri
    if not uri.startswith("hf://") or "@" in uri:
        raise InvalidConfig("revision", f"{revision!r} requires an hf:// model without a revision, got {uri}")
    return f"{uri}@{revision}"
