"""Makes the classes of an architecture: its configuration and its application, under the names of their module."""

from __future__ import annotations

from typing import Any

import fake_nxdi
from fake_nxdi.config import InferenceConfig, MoENeuronConfig, NeuronConfig

EXPERTS = ("Mixtral", "Dbrx", "Qwen3Moe", "GptOss", "Llama4", "Llama4Text")

OWN_CONFIG = ("Qwen2", "Qwen3", "Gemma3", "GptOss", "Llama4", "Qwen2VL", "Qwen3VL")
"""Families whose NeuronConfig is a class of their own."""

_ALL = {
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
}
REQUIRED = {
    "Llama": _ALL | {"pad_token_id"},
    "Mistral": _ALL | {"tie_word_embeddings"},
    "Qwen2": _ALL | {"pad_token_id"},
    "Qwen3": _ALL | {"pad_token_id", "head_dim"},
}
"""What the dense decoders ask of a config.json."""


def since(release: int, module: str) -> None:
    if not fake_nxdi.has(release):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def family(name: str, module: str, base: Any) -> tuple[type[InferenceConfig], Any]:
    neuron_config = _neuron_config(name, module)

    class Config(InferenceConfig):
        @classmethod
        def get_neuron_config_cls(cls) -> type[NeuronConfig]:
            return neuron_config

        def get_required_attributes(self) -> list[str]:
            return sorted(REQUIRED.get(name, ()))

    class Application(base):  # type: ignore[misc]
        @classmethod
        def get_config_cls(cls) -> type[InferenceConfig]:
            return Config

    for found, called in ((Config, f"{name}InferenceConfig"), (Application, f"Neuron{name}ForCausalLM")):
        found.__name__ = found.__qualname__ = called
        found.__module__ = module
    return Config, Application


def _neuron_config(name: str, module: str) -> type[NeuronConfig]:
    base = MoENeuronConfig if name in EXPERTS else NeuronConfig
    if name not in OWN_CONFIG or (name == "Qwen2VL" and not fake_nxdi.has(9)):
        return base
    attention = type(f"Neuron{name}Attention", (), {"__module__": module})

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.attn_cls = attention

    Own.__name__ = Own.__qualname__ = f"{name}NeuronConfig"
    Own.__module__ = module
    return Own
