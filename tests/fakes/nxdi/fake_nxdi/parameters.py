"""Sampling parameters on the host's side: making the tensor, refusing values, greedy rows."""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger("Neuron")


def prepare_tensor(val: Any) -> torch.Tensor:
    if isinstance(val, torch.Tensor):
        return val
    return torch.tensor(val if isinstance(val, list) else [val])


def prepare_sampling_params(
    batch_size: int, top_k: Any = (1,), top_p: Any = (1.0,), temperature: Any = (1.0,)
) -> torch.Tensor:
    columns = [
        prepare_tensor(list(value) if isinstance(value, tuple) else value) for value in (top_k, top_p, temperature)
    ]
    assert len({column.shape[0] for column in columns}) == 1, "sampling params shapes don't match."
    if columns[0].shape[0] == 1:
        columns = [column.broadcast_to(batch_size) for column in columns]
    return torch.stack(columns, dim=1)


def check_parameters(parameters: torch.Tensor, global_topk: int) -> None:
    """The ValueErrors of NxDI, raised only with on-device sampling."""
    if parameters.shape[1] != 3:
        raise ValueError(f"Expected tensor of shape (batch_size, 3), but got {parameters.shape}")
    top_k, top_p, temperature = parameters.to(torch.float32).unbind(1)
    if bool(((top_k != -1) & ((top_k < 0) | (top_k > global_topk))).any()):
        raise ValueError(f"Invalid top-k values found. top-k must be -1 or at most {global_topk}. Found {top_k}.")
    if bool((top_k <= 0).any()):
        logger.warning("In NxDI, top_k = -1 or top_k = 0 means randomly picking a token with a uniform distribution.")
    if not torch.equal(top_k, top_k.floor()):
        raise ValueError(f"Invalid top-k values found. They should be integers. Found {top_k}.")
    if bool(((top_p <= 0) | (top_p > 1)).any()):
        raise ValueError(f"Invalid top-p values found. top-p must be in the range (0.0, 1.0]. Found {top_p}.")
    if bool((temperature < 0).any()):
        raise ValueError(f"Invalid temperature values found. Found {temperature}.")
    if bool(((temperature == 0) & (top_k <= 0)).any()):
        raise ValueError(
            "Invalid sampling parameters found. Temperature = 0 enables greedy sampling. Please set top_k to 1"
        )


def inferred(parameters: torch.Tensor) -> torch.Tensor:
    """Temperature 0 becomes top_k 1 and top_p 1, in the caller's own tensor."""
    for row in parameters:
        if row[2] == 0:
            logger.warning("Temperature = 0 enables greedy sampling. Resetting top_k and top_p values to 1.")
            row[0] = row[1] = 1
    return parameters
