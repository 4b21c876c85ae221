from fake_transformers_neuronx.config import (
    ContinuousBatchingConfig,
    GenerationConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)

__all__ = [
    "ContinuousBatchingConfig",
    "GenerationConfig",
    "KVCacheQuantizationConfig",
    "NeuronConfig",
    "QuantizationConfig",
]
