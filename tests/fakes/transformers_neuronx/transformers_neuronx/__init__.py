from fake_transformers_neuronx.config import (
    GQA,
    ContinuousBatchingConfig,
    GenerationConfig,
    Layout,
    NeuronConfig,
    QuantizationConfig,
)
from fake_transformers_neuronx.model import LlamaForSampling, MistralForSampling

__version__ = "0.13.0"
__all__ = [
    "GQA",
    "ContinuousBatchingConfig",
    "GenerationConfig",
    "Layout",
    "LlamaForSampling",
    "MistralForSampling",
    "NeuronConfig",
    "QuantizationConfig",
]
