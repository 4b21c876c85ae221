"""The adapters of an `LLM`: what its arguments and `lora_request` name, checked and loaded when they are first used.

`llm` asks for the target of each prompt. The engine loads an adapter while the prompts that want it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_runtime.config import RuntimeConfig
from neuron_runtime.errors import FatalError, InvalidConfig, InvalidRequest
from neuron_runtime.flags import model_uri
from neuron_runtime.record import AdapterFacts
from neuron_runtime.requests.targets import Target
from neuron_runtime.requests.texts import Text

Find = Callable[[str], tuple[Path, AdapterFacts, Text]]
"""The local folder of the adapter at a URI, what it is, and its chat template and defaults. Raises FatalError."""


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a prompt, with the fields of vLLM's class.

    lora_int_id: as in vLLM, another number means another adapter: the same path is read again.
    lora_path: folder, `org/name` of the hub, or URI; without one, the adapter that `lora_modules` of the `LLM` names.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    base_model_name: str | None = None

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path.strip() or (self.lora_local_path or "").strip()


class OfflineAdapters:
    """modules: paths by name, see `modules_of`; load: has the engine load an adapter, whose requests wait for it."""

    def __init__(
        self, config: RuntimeConfig, modules: Mapping[str, str], find: Find, load: Callable[[str, Path], None]
    ) -> None:
        self._is_served = config.adapters.max_active > 0
        self._modules = modules
        self._find = find
        self._load = load
        self._targets: dict[LoRARequest, Target] = {}

    def target(self, request: LoRARequest) -> Target:
        """Raises InvalidRequest."""
        if not isinstance(request, LoRARequest):
            raise InvalidRequest.at("lora_request", f"must be a LoRARequest, got {type(request).__name__}")
        if request not in self._targets:
            self._targets[request] = self._new(request)
        return self._targets[request]

    def _new(self, request: LoRARequest) -> Target:
        name, path = request.lora_name, request.path or self._modules.get(request.lora_name, "")
        if not self._is_served:
            raise InvalidRequest.at("lora_request", "needs `LLM(..., enable_lora=True)`")
        if not path:
            raise InvalidRequest.at("lora_request", f"has no lora_path, and `lora_modules` has no {name!r}")
        try:
            folder, facts, text = self._find(model_uri(path))
        except FatalError as error:
            raise InvalidRequest.at("lora_request", f"of {name!r} cannot be served: {error}") from error
        self._load(facts.digest, folder)
        return Target(name, facts.digest, path, text=text)


def modules_of(given: Any) -> dict[str, str]:
    """Paths of adapters by their names: `{name: path}`, or a list of objects or dicts with `name` and `path`, as forks
    of vLLM for Neuron have them. Raises InvalidConfig."""
    if given is None or isinstance(given, Mapping):
        pairs: Iterable[tuple[Any, Any]] = (given or {}).items()
    elif isinstance(given, Iterable) and not isinstance(given, str):
        each = (one if isinstance(one, Mapping) else getattr(one, "__dict__", {}) for one in given)
        pairs = [(one.get("name"), one.get("path")) for one in each]
    else:
        pairs = [(None, None)]
    modules = dict(pairs)
    if not all(isinstance(text, str) and text for pair in modules.items() for text in pair):
        raise InvalidConfig("lora_modules", f"must be {{name: path}}, or a list with `name` and `path`, got {given!r}")
    return modules
