"""Makes the classes of an architecture: its configuration and its application, under the names of their module."""

from __future__ import annotations

from typing import Any

import fake_nxdi
from fake_nxdi.config import InferenceConfig, MoENeuronConfig, NeuronConfig

EXPERTS = ("Mixtral", "Dbrx", "Qwen3Moe", "GptOss", "Llama4", "Llama4Text")

REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
)
"""What the dense decoders ask of a config.json."""


def since(release: int, module: str) -> None:
    if not fake_nxdi.has(release):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def family(name: str, module: str, base: Any) -> tuple[type[InferenceConfig], Any]:
    neuron_config = MoENeuronConfig if name in EXPERTS else NeuronConfig

    class Config(InferenceConfig):
        @classmethod
        def get_neuron_config_cls(cls) -> type[NeuronConfig]:
            return neuron_config

        def get_required_attributes(self) -> list[str]:
            return list(REQUIRED) if name in ("Llama", "Mistral", "Qwen2", "Qwen3") else []

    class Application(base):  # type: ignore[misc]
        @classmethod
        def get_config_cls(cls) -> type[InferenceConfig]:
            return Config

    for found, called in ((Config, f"{name}InferenceConfig"), (Application, f"Neuron{name}ForCausalLM")):
        found.__name__ = found.__qualname__ = called
        found.__module__ = module
    return Config, Application
