from fake_nxdi.config import (
    CONFIG_FILE,
    FusedSpecNeuronConfig,
    IncompatibleConfigError,
    InferenceConfig,
    MoENeuronConfig,
    MultimodalVisionNeuronConfig,
    NeuronConfig,
    OnDeviceSamplingConfig,
    to_dict,
    to_torch_dtype,
)

from neuronx_distributed_inference.modules.lora_serving.config import LoraServingConfig

__all__ = [
    "CONFIG_FILE",
    "FusedSpecNeuronConfig",
    "IncompatibleConfigError",
    "InferenceConfig",
    "LoraServingConfig",
    "MoENeuronConfig",
    "MultimodalVisionNeuronConfig",
    "NeuronConfig",
    "OnDeviceSamplingConfig",
    "to_dict",
    "to_torch_dtype",
]
