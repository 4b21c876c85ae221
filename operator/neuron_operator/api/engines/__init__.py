"""The engines that `engine.backend` may name in this version."""

from collections.abc import Mapping

from neuron_operator.api.engines import own, vllm
from neuron_operator.api.engines.engine import Engine

__all__ = ["ASSUMED", "DEFAULTS", "ENGINES", "SETTINGS", "Engine", "honouring", "with_drafts"]

ENGINES: Mapping[str, Engine] = {
    "nxdi": own.NXDI,
    "optimum": own.OPTIMUM,
    "vllm": vllm.VLLM,
    "transformers-neuronx": own.TRANSFORMERS_NEURONX,
    "torch": own.TORCH,
    "simulated": own.SIMULATED,
}
ASSUMED = own.TORCH
"""Of what runs an engine that is not among them, after a downgrade."""
DEFAULTS: Mapping[str, str] = {"Neuron": "nxdi", "CPU": "torch"}
"""By `accelerator.type`."""
SETTINGS: Mapping[str, Engine] = {
    row.setting or name: row for name, engine in ENGINES.items() for row in (engine, engine.on_host) if row
}
"""By the key of the installation's settings for it."""


def honouring(path: str) -> str:
    """The names of those that act on a field, for people."""
    return " or ".join(name for name, row in ENGINES.items() if row.honours(path)) or "none yet"


def with_drafts(method: str) -> str:
    """The names of those that have a method of drafts, for people."""
    return ", ".join(name for name, row in ENGINES.items() if method in row.drafts) or "none yet"
