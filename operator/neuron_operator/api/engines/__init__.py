"""The engines that `engine.backend` may name in this version."""

from collections.abc import Mapping

from neuron_operator.api.engines import own
from neuron_operator.api.engines.engine import Engine

__all__ = ["DEFAULTS", "ENGINES", "Engine"]

ENGINES: Mapping[str, Engine] = {
    "nxdi": own.NXDI,
    "transformers-neuronx": own.TRANSFORMERS_NEURONX,
    "torch": own.TORCH,
    "simulated": own.SIMULATED,
}
DEFAULTS: Mapping[str, str] = {"Neuron": "nxdi", "CPU": "torch"}
"""By `accelerator.type`."""
