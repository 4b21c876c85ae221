from fake_nxdi.config import (
    CONFIG_FILE,
    FusedSpecNeuronConfig,
    IncompatibleConfigError,
    InferenceConfig,
    LoraServingConfig,
    MoENeuronConfig,
    MultimodalVisionNeuronConfig,
    NeuronConfig,
    OnDeviceSamplingConfig,
    to_dict,
    to_torch_dtype,
)

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
