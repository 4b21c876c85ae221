"""The models that optimum-neuron's decoders compute rightly: by the architecture in config.json.

Called by `settings` and by `inspection`. Pure: whether the installed library has a class is found out by `library`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_runtime.backend.neuron.model_config import ignored_by, quantization_of
from neuron_runtime.errors import ExitCode, FatalError

PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of rope_scaling whose angles depend on the position alone, so that they can be compiled."""


@dataclass(frozen=True, slots=True)
class OptimumFamily:
    """Models that one class runs."""

    model_type: str
    """Key in the registry of optimum-neuron."""
    architecture: str
    """As in config.json."""
    ignores: tuple[str, ...]
    """Fields of config.json that the class does not read, so they must be off: see `ignored_by`."""
    rope_types: tuple[str, ...] = ("default",)
    """Types of rope_scaling that it computes."""
    samples: bool = True
    """Whether the library samples on the device, unless it is told otherwise."""
    wrong_on_two_cores: bool = False
    """On two cores, what the device samples for several rows is garbage, by the library's own word."""


_BIASED = ("attention_bias", "head_dim")

FAMILIES = (
    OptimumFamily("llama", "LlamaForCausalLM", _BIASED, PLAIN_ROPE),
    OptimumFamily("qwen2", "Qwen2ForCausalLM", ("head_dim",), PLAIN_ROPE, wrong_on_two_cores=True),
    OptimumFamily("qwen3", "Qwen3ForCausalLM", ("attention_bias",), PLAIN_ROPE, wrong_on_two_cores=True),
    OptimumFamily("qwen3_moe", "Qwen3MoeForCausalLM", ("attention_bias", "mlp_only_layers", "decoder_sparse_step")),
    OptimumFamily("mixtral", "MixtralForCausalLM", _BIASED, samples=False),
    OptimumFamily("phi3", "Phi3ForCausalLM", _BIASED),
    OptimumFamily("granite", "GraniteForCausalLM", _BIASED, PLAIN_ROPE),
    OptimumFamily("smollm3", "SmolLM3ForCausalLM", _BIASED),
)

BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}


def family_of(model: Mapping[str, Any]) -> OptimumFamily:
    """The family of a model, by its config.json.

    Raises FatalError (UNSUPPORTED_ARCHITECTURE) if there is none, or if it does not compute what config.json says.
    """
    names = [str(name) for name in model.get("architectures") or ()]
    family = next((BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE), None)
    if family is None:
        known = ", ".join(sorted(BY_ARCHITECTURE))
        named = ", ".join(names) or "no architecture"
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE, f"config.json names {named}; the optimum backend runs {known}"
        )
    if quantization := quantization_of(model):
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: the weights are {quantization}, but optimum-neuron computes those that are unquantized "
            "alone: serve a checkpoint that has them",
        )
    for name, value in _wrong(family, model):
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: optimum-neuron's {family.model_type} does not compute {name} {json.dumps(value)}, so it "
            "would fail, or its tokens would be wrong: remove it if the model was made without it",
        )
    return family


def _wrong(family: OptimumFamily, model: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Fields, with their values, that the family's class would not compute."""
    wrong = list(ignored_by(model, family.ignores))
    wrong += [one for one in ignored_by(model, ("rope_scaling",)) if one[1] not in family.rope_types]
    if (turned := model.get("partial_rotary_factor")) not in (None, 1):
        wrong.append(("partial_rotary_factor", turned))
    return wrong


def window_of(model: Mapping[str, Any]) -> int:
    """Tokens that layers with a sliding window see, which no class of optimum-neuron has; 0: no layer has one."""
    window, types = model.get("sliding_window"), model.get("layer_types")
    # Qwen's and SmolLM's have none unless they say so.
    used = model.get("use_sliding_window", model.get("model_type") in ("mixtral", "phi3"))
    if not used or not isinstance(window, int) or (types and "sliding_attention" not in types):
        return 0
    return window
