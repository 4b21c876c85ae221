"""The registry of architectures, as long as that of the emulated release."""

from importlib import import_module

import fake_nxdi

_FIRST = {
    "gpt_oss": (7, "GptOss"),
    "llama": (7, "Llama"),
    "llama4": (7, "Llama4"),
    "mllama": (7, "Mllama"),
    "mistral": (9, "Mistral"),
    "mixtral": (7, "Mixtral"),
    "pixtral": (8, "Pixtral"),
    "dbrx": (7, "Dbrx"),
    "qwen2": (7, "Qwen2"),
    "qwen2_vl": (8, "Qwen2VL"),
    "qwen3": (7, "Qwen3"),
    "qwen3_moe": (7, "Qwen3Moe"),
    "gemma3": (9, "Gemma3"),
    "qwen3_vl": (8, "Qwen3VL"),
}
_VISION = ("llama4", "pixtral", "qwen2_vl", "qwen3_vl")


def _classes(key, name):
    module = import_module(f"neuronx_distributed_inference.models.{key}.modeling_{key}")
    found = {"causal-lm": getattr(module, f"Neuron{name}ForCausalLM")}
    if key in _VISION and fake_nxdi.has(8):
        found["image-encoding"] = type(f"Neuron{name}ForImageEncoding", (), {})
    return found


MODEL_TYPES = {key: _classes(key, name) for key, (release, name) in _FIRST.items() if fake_nxdi.has(release)}
