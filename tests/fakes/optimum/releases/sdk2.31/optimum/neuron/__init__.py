"""The import names of optimum-neuron 0.4.7.dev0."""

import os

os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")

from fake_optimum.model import NeuronModelForCausalLM as Base
from optimum.neuron.models.inference.backend.config import NxDNeuronConfig


class NeuronModelForCausalLM(Base):
    config_class = NxDNeuronConfig


__all__ = ["NeuronModelForCausalLM"]
