"""The fake torch-neuronx: which chip there is, and its class among those of torch."""

__version__ = "2.9.0.2.0.0"
from types import SimpleNamespace

import torch
from fake_nxdi import device
from fake_nxdi.platform import target as get_platform_target

__all__ = ["get_platform_target"]


class _Runtime:
    """`torch.classes.neuron.Runtime`, which the real library registers when it is imported."""

    def get_vnc_memory_stats(self) -> tuple[int, int]:
        return device.DEVICE.memory_stats()


torch.classes.neuron = SimpleNamespace(Runtime=_Runtime)
