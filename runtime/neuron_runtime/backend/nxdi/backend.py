"""`NxdiBackend`: the Backend protocol over an application of NxD Inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any

from msgspec.structs import replace

from neuron_runtime.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, AdapterRules, check_adapter
from neuron_runtime.adapters.tensors import pairs
from neuron_runtime.backend.neuron.device import Application, DeviceBackend
from neuron_runtime.backend.neuron.installed import device_memory
from neuron_runtime.backend.neuron.step_graphs import Decode
from neuron_runtime.backend.nxdi.buckets import all_graphs, span_that_takes
from neuron_runtime.backend.nxdi.inputs import BASE_MODEL, Inputs
from neuron_runtime.backend.nxdi.pixels import filling, turning
from neuron_runtime.backend.nxdi.settings import MIN_ADAPTER_RANK, Settings
from neuron_runtime.backend.warming import lone_step
from neuron_runtime.core import BackendLimits, Batch
from neuron_runtime.errors import ExitCode, FatalError


class NxdiBackend(DeviceBackend):
    """See `DeviceBackend`, and `AdapterBackend` if the settings have adapters."""

    def __init__(
        self,
        application: Application,
        settings: Settings,
        limits: BackendLimits,
        *,
        model_config: Mapping[str, Any] = MappingProxyType({}),
        in_group: bool = False,
    ) -> None:
        """model_config: config.json, which adapters must fit."""
        self._model_config = model_config
        self._links = TemporaryDirectory(prefix="adapters-", ignore_cleanup_errors=True)
        """A folder for each adapter."""
        self._adapter_ids: dict[str, int] = {}
        """The library's numbers, which it counts up from that of the base model. It never forgets a name."""
        self._manager: Any = getattr(application, "lora_model_manager", None)
        inputs = Inputs(settings, limits, self._adapter_ids)
        if settings.vision is not None and settings.vision.turns:
            application = turning(application)
        super().__init__(
            application, inputs, limits, warm_up_steps(settings, limits), memory=device_memory, in_group=in_group
        )

    def read_adapter(self, folder: Path) -> None:
        """Checks all that the library would fail on, which would end the process, or take and compute wrongly. It reads
        and shards the tensors itself, between two steps."""
        rules = AdapterRules(self.limits.max_adapter_rank, self.limits.adapter_targets, MIN_ADAPTER_RANK)
        check_adapter(folder, self._model_config, rules)
        for _ in pairs(folder):
            pass

    def add_adapter(self, digest: str, folder: Path, weights: None) -> None:
        expected = self._adapter_ids.setdefault(digest, BASE_MODEL + 1 + len(self._adapter_ids))
        self.before_next_step(partial(self._add, digest, folder, expected))

    def remove_adapter(self, digest: str) -> None:
        """From the host's memory; on the device its weights stay until others take their place."""
        self.before_next_step(partial(self._manager.remove_adapter, self._adapter_ids[digest]))

    def close(self) -> None:
        super().close()
        self._links.cleanup()

    # On the backend's thread

    def _add(self, digest: str, folder: Path, expected: int) -> None:
        # The library takes every file of a folder for weights: of a training's folder, those of its optimizer, too.
        alone = Path(self._links.name) / digest
        alone.mkdir(exist_ok=True)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (alone / name).unlink(missing_ok=True)
            (alone / name).symlink_to((folder / name).absolute())
        added = self._manager.add_adapter(SimpleNamespace(lora_name=digest, lora_path=str(alone)))
        number = self._manager.lora_adapter_id_mapping.get(digest)
        if not added or number != expected:
            message = f"NxD Inference has taken adapter {digest[:12]} from {folder} as {number} instead of {expected}"
            raise FatalError(ExitCode.DEVICE_FAILED, message)


def warm_up_steps(settings: Settings, limits: BackendLimits) -> Iterator[Batch]:
    """A step for each graph that a call takes, those of an encoder of pictures included. Rows with an adapter take the
    same graphs: its number is an input."""
    for graph in all_graphs(settings):
        if span := span_that_takes(settings, graph):
            decodes = isinstance(graph, Decode)
            slot = graph.rows - 1 if isinstance(graph, Decode) and settings.layout == "slots" else 0
            yield lone_step(limits, slot, *span, decodes=decodes)
    if vision := settings.vision:
        for encode in vision.graphs:
            pictures = tuple(filling(vision, encode, limits.longest_prefill))
            step = lone_step(limits, 0, 0, pictures[-1].end, decodes=False)
            tokens = (vision.opening,) * pictures[0].start + (vision.image_token,) * (
                pictures[-1].end - pictures[0].start
            )
            yield replace(step, added=(replace(step.added[0], token_ids=tokens, pictures=pictures),))
