"""Numbers and scales from weights: the one arithmetic of quantizing, when weights are converted or loaded.

Each row has a scale, see `quantization.CONVERTED`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from neuron_runtime.quantization import LARGEST, Kind

STORED: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows of zeros, and of those that are nearly so."""


def quantize(rows: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers `[rows, columns]` and float32 scales `[rows, 1]`. rows: float32; what is not finite has such a scale."""
    largest = LARGEST[kind]
    scale = rows.abs().amax(dim=1, keepdim=True).div_(largest).clamp_min_(SMALLEST_SCALE)
    numbers = rows / scale
    if kind == "int8":
        numbers.round_()
    return numbers.clamp_(-largest, largest).to(STORED[kind]), scale
