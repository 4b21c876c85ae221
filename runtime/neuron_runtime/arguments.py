"""What people write, on a command line or as arguments of `LLM`, as the configuration document that it amounts to.

Names are vLLM's where the meaning is the same. Called by the command `serve` and by the offline class; what cannot be
honoured is refused by the name that was written. Nothing here looks at a model or imports a backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from neuron_runtime.config import CONFIG_VERSION, RuntimeConfig, parse_config
from neuron_runtime.errors import FatalError, InvalidConfig
from neuron_runtime.flags import absolute, fields_of
from neuron_runtime.not_built import Surface, refuse

FIELDS = tuple(fields_of(RuntimeConfig))

BY_ARGUMENT = {field.argument: field for field in FIELDS if field.argument}
LLM_ARGUMENTS = {name: field for name, field in BY_ARGUMENT.items() if field.flag and field.flag.llm}

FLAG_NAMES = {"model.uri": "MODEL"} | {field.path: field.option for field in BY_ARGUMENT.values()}
LLM_NAMES = {"model.uri": "model"} | {field.path: name for name, field in LLM_ARGUMENTS.items()}
"""What sets the value at a path of the document: a flag of `serve`, an argument of `LLM`. See `naming`."""


def config_of(uri: str, given: Mapping[str, Any], **more: Any) -> RuntimeConfig:
    """The document that arguments amount to.

    Args:
        given: values by the names in `BY_ARGUMENT`; the others have their defaults.
        more: further keys of the document.

    Raises:
        InvalidConfig: with the path of the document; see `naming`.
    """
    document: dict[str, Any] = {
        "version": CONFIG_VERSION,
        "model": {"uri": uri},
        "servedNames": [uri.partition("@")[0].rstrip("/").rpartition("/")[2]],
        **more,
    }
    for name, value in given.items():
        field = BY_ARGUMENT[name]
        part, _, key = field.path.rpartition(".")
        try:
            (document.setdefault(part, {}) if part else document)[key] = field.read(value)
        except ValueError as error:
            raise InvalidConfig(f"$.{field.path}", str(error)) from error
    try:
        raw = msgspec.json.encode(document)
    except TypeError as error:
        raise InvalidConfig("$", f"only plain values can be configured: {error}") from error
    return parse_config(raw)


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a document that arguments amount to, from any process, name the argument before the path.

    Args:
        names: what the person wrote, by the document's path without `$.`: `FLAG_NAMES` or `LLM_NAMES`.
    """
    try:
        yield
    except FatalError as error:
        path, _, message = str(error).partition(": ")
        inside = path.removeprefix("$.").partition("[")[0]
        name = names.get(inside) or names.get(inside.partition(".")[0])
        if name is None:
            raise
        raise InvalidConfig(f"{name} ({path})", message) from error


def llm_config(
    model: str,
    arguments: Mapping[str, Any],
    *,
    device: str | None = None,
    revision: str | None = None,
    additional_config: Mapping[str, Any] | None = None,
    dev: Path = Path("/dev"),
) -> RuntimeConfig:
    """The document that the arguments of `LLM` amount to.

    Args:
        arguments: by vLLM's names; None asks for nothing.
        dev: where device nodes lie.

    Raises:
        TypeError: an argument that neither vLLM's class nor this one has.
        InvalidConfig: naming the argument that cannot be honoured.
    """
    given = {}
    for name, value in arguments.items():
        if refuse(Surface.LLM, name, value) or value is None:
            continue
        if name not in LLM_ARGUMENTS:
            raise TypeError(f"LLM() has no argument {name!r}")
        given[name] = value
    if "dtype" in given:
        given["dtype"] = str(given["dtype"])
    override = _neuron_config(given.pop("override_neuron_config", None), additional_config)
    if override:
        given["override_neuron_config"] = override
    backend = _backend(device, dev)
    if backend is not None:
        given.setdefault("backend", backend)
    with naming(LLM_NAMES):
        return config_of(_with_revision(model_uri(model), revision), given)


def model_uri(model: str) -> str:
    """A model as people write it, as a URI: a folder that exists, else `org/name` on the hub. Raises InvalidConfig."""
    if "://" in model:
        return model
    if not model.startswith(("/", ".", "~")) and not Path(model).exists():
        return f"hf://{model}"
    try:
        return absolute(model).as_uri()
    except ValueError as error:
        raise InvalidConfig("$.model.uri", str(error)) from error


def default_weights_dir() -> Path:
    """Where downloads go by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "neuron-serving", "weights")


def _neuron_config(override: Any, additional: Mapping[str, Any] | None) -> Any:
    """Both places in which vLLM's versions look for the settings of the Neuron backend."""
    inside = dict(additional or {})
    found = [override, inside.pop("override_neuron_config", None), inside.pop("override-neuron-config", None)]
    for key in inside:
        raise InvalidConfig(f"additional_config[{key!r}]", "is not supported: only `override_neuron_config` is")
    asked = [config for config in found if config]
    if len(asked) > 1:
        raise InvalidConfig("override_neuron_config", "is given twice: leave it out of `additional_config`")
    return asked[0] if asked else None


def _backend(device: str | None, dev: Path) -> str | None:
    match device:
        case None | "auto":
            return None
        case "cpu":
            return "torch"
        case "neuron":
            if not any(dev.glob("neuron[0-9]*")):
                raise InvalidConfig(
                    "device",
                    f"'neuron', but this machine has no Neuron device ({dev}/neuron0): leave `device` out to run on "
                    "the CPU, or run this on an Inf2 or Trn instance with the Neuron driver",
                )
            return "nxdi"
    raise InvalidConfig("device", f"{device!r} is unknown: leave it out, or say 'cpu' or 'neuron'")


def _with_revision(uri: str, revision: str | None) -> str:
    if revision is None:
        return uri
    if not uri.startswith("hf://") or "@" in uri:
        raise InvalidConfig("revision", f"{revision!r} is for models on a hub that name none themselves, not for {uri}")
    return f"{uri}@{revision}"
