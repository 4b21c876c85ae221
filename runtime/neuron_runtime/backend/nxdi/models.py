"""Which application class of NxD Inference runs a model: the registry by the architecture in config.json.

Called by `settings` and by `inspection`. Pure: whether the installed library has the class is found out by `library`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_runtime.backend.neuron.model_config import ignored_by, own_head_dim, quantization_of
from neuron_runtime.backend.nxdi.quantized import FORMS, check_modules, form_of
from neuron_runtime.backend.nxdi.vision import Counts, check_encoder
from neuron_runtime.core import SamplingMode
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.quantization import has_known_method

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A class that is not registered: `module:Class`."""


@dataclass(frozen=True, slots=True)
class NxdiFamily:
    """Models that one application class runs."""

    application: str
    """Key in the registry of NxD Inference."""
    since: str
    """First release that has it."""
    architectures: tuple[str, ...]
    """As in config.json."""
    before: str = ""
    """The application that runs them in older releases."""
    text_class: str = ""
    """Module and class of NxD Inference that run the text alone, where the registry's class wants an encoder of
    pictures too."""
    layouts: tuple[str, ...] = ("slots", "blocks")
    windows: Literal["none", "ignored", "kept", "whole"] = "none"
    """What becomes of sliding windows: models have none, the class ignores them, each cache line keeps one, which every
    prompt must fill, or they are right only for sequences of their own length."""
    mixed: bool = False
    """Some layers keep less of a sequence than others; then a decode step reads whole cache lines."""
    ignores: tuple[str, ...] = ()
    """Fields of config.json that the class does not read, or fails on, so they must be off: see `ignored_by`."""
    quantizations: tuple[str, ...] = ("",)
    """What `quantization_of` may be for the class itself. It would drop the scales of others, and compute garbage."""
    quantized: bool = False
    """Whether it computes weights in the forms of `quantized.FORMS`."""
    casts_cache: bool = True
    """Whether it keeps keys and values in the type that NeuronConfig has for the cache."""
    experts: bool = False
    """Whether its NeuronConfig is one for mixtures of experts."""
    needs: Mapping[str, bool] = field(default_factory=dict)
    """Arguments of NeuronConfig without which its tokens are wrong."""
    pictures: Counts | Literal[""] = ""
    """What its encoder counts of a picture; empty: it sees none."""
    samplings: tuple[SamplingMode, ...] = ("Device", "DeviceWithLogits", "Host")
    least_rows: Mapping[str, int] = field(default_factory=dict)
    """By Neuron SDK, how many sequences a decode step must have."""
    note: str = ""
    """What a user should know, for the log."""


_OF_MIXTURES = ("num_experts_per_tok", "tie_word_embeddings", "mlp_only_layers", "decoder_sparse_step")

FAMILIES = (
    # Tokens of all were compared with those of transformers, on the Python part of NxD Inference.
    NxdiFamily("llama", "0.1", ("LlamaForCausalLM",), quantized=True),
    NxdiFamily(
        "mistral",
        "0.9",
        ("MistralForCausalLM",),
        before="llama",
        windows="kept",
        ignores=("rope_scaling", "head_dim"),
        quantized=True,
    ),
    NxdiFamily(
        "qwen2",
        "0.5",
        ("Qwen2ForCausalLM",),
        windows="ignored",
        ignores=("rope_scaling", "head_dim"),
        quantized=True,
    ),
    NxdiFamily(
        "qwen3",
        "0.5",
        ("Qwen3ForCausalLM",),
        windows="ignored",
        ignores=("rope_scaling", "attention_bias"),
        quantized=True,
    ),
    NxdiFamily(
        "mixtral",
        "0.1",
        ("MixtralForCausalLM",),
        windows="ignored",
        ignores=("rope_scaling", "head_dim", *_OF_MIXTURES),
        experts=True,
        note="faster with SDK 2.28 than with newer ones",
    ),
    NxdiFamily("dbrx", "0.1", ("DbrxForCausalLM",), experts=True, note="faster with SDK 2.28 than with newer ones"),
    NxdiFamily(
        "qwen3_moe",
        "0.6",
        ("Qwen3MoeForCausalLM",),
        windows="ignored",
        ignores=("rope_scaling", "attention_bias", *_OF_MIXTURES),
        quantizations=("", "fp8 in blocks"),
        experts=True,
        least_rows={"2.28": 16},
    ),
    NxdiFamily(
        "gpt_oss",
        "0.7",
        ("GptOssForCausalLM",),
        layouts=("slots",),
        windows="kept",
        mixed=True,
        quantizations=("mxfp4",),
        casts_cache=False,
        experts=True,
        note="its MXFP4 weights, and no others, are computed in bfloat16",
    ),
    NxdiFamily(
        "llama4",
        "0.5",
        ("Llama4ForConditionalGeneration",),
        text_class="models.llama4.modeling_llama4_text:NeuronLlama4TextForCausalLM",
        layouts=("slots",),
        experts=True,
        pictures="chunks",
        note="sees pictures from 0.9 on; text is faster with SDK 2.28 than with newer ones",
    ),
    NxdiFamily(
        "pixtral",
        "0.9",
        ("LlavaForConditionalGeneration",),
        layouts=("slots",),
        windows="ignored",
        pictures="patches",
        note="sees pictures",
    ),
    NxdiFamily(
        "qwen3_vl",
        "0.9",
        ("Qwen3VLForConditionalGeneration",),
        layouts=("slots",),
        ignores=("rope_scaling", "attention_bias"),
        pictures="grids",
        # Of the two, its wrapper returns the first one of the first core.
        samplings=("Device", "Host"),
        note="sees pictures",
    ),
    NxdiFamily(
        "gemma3",
        "0.9",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        layouts=("slots",),
        windows="whole",
        # Otherwise all layers turn positions as the first one does.
        needs={"layer_boundary_markers": True},
        note="text only; sequences as long as its sliding window",
    ),
)

NOT_COMPUTED = {
    "Qwen2VLForConditionalGeneration": "gives the tokens of a picture plain positions, so its answers would be wrong",
    "Qwen2_5_VLForConditionalGeneration": "has no class for it",
    "MllamaForConditionalGeneration": "wants another checkpoint than the hub has",
    "Mistral3ForConditionalGeneration": "has no class for it",
}
"""Why models that see pictures are refused."""

BY_APPLICATION = {family.application: family for family in FAMILIES}
BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def family_of(model: Mapping[str, Any], application_class: str) -> NxdiFamily:
    """The family of a model, which computes it rightly.

    Args:
        model: config.json.
        application_class: a key of the registry, `module:Class`, or empty: by the architecture.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE if there is none, or if it does not compute what config.json says.
        InvalidConfig: the application class is malformed.
    """
    family = _family_of(model, application_class)
    if is_private(family.application):
        return family
    text = text_config(model)
    _check_weights(family, model)
    if family.pictures:
        check_encoder(model, family.pictures)
    for name, value in ignored_by(text, family.ignores):
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: NxD Inference's {family.application} does not compute {name} {json.dumps(value)}, "
            "so it would fail, or its tokens would be wrong: remove it if the model was made without it",
        )
    return family


def _check_weights(family: NxdiFamily, model: Mapping[str, Any]) -> None:
    """Raises FatalError (UNSUPPORTED_ARCHITECTURE, INVALID_MODEL) unless the class computes such weights."""
    form = form_of(model)
    if quantization_of(model) not in family.quantizations and not (family.quantized and form in FORMS):
        computed = (*family.quantizations, *(FORMS if family.quantized else ()))
        reads = " or ".join(one or "unquantized" for one in computed)
        cure = "serve a checkpoint that has them"
        if family.quantized and has_known_method(model):
            cure += ", or convert this one with `neuron-runtime convert`"
        experts = "; its quantized experts need a form that none of these checkpoints has" if family.experts else ""
        raise FatalError(
            ExitCode.UNSUPPORTED_ARCHITECTURE,
            f"config.json: the weights are {form or 'unquantized'}, but NxD Inference's {family.application} "
            f"computes those that are {reads} alone{experts}: {cure}",
        )
    check_modules(model)


def _family_of(model: Mapping[str, Any], application_class: str) -> NxdiFamily:
    if application_class:
        if family := BY_APPLICATION.get(application_class):
            return family
        if IMPORT_PATH.fullmatch(application_class):
            return NxdiFamily(application_class, "", ())
        known = ", ".join(sorted(BY_APPLICATION))
        message = f"must be one of {known}, or `module:Class`; got {application_class!r}"
        raise InvalidConfig("$.applicationClass", message)
    names = [str(name) for name in model.get("architectures") or ()]
    for name in names:
        if family := BY_ARCHITECTURE.get(name):
            text = text_config(model)
            # Mistral's Nemo and Small: the class of older releases computes them too, but without a window.
            other = family.before if own_head_dim(text) and not window_of(family, text) else ""
            return BY_APPLICATION.get(other, family)
    for name in names:
        if reason := NOT_COMPUTED.get(name):
            message = f"config.json names {name}: NxD Inference {reason}. Use another backend (torch, vllm)"
            raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, message)
    named = ", ".join(names) or "no architecture"
    known = ", ".join(sorted(BY_ARCHITECTURE))
    raise FatalError(
        ExitCode.UNSUPPORTED_ARCHITECTURE,
        f"config.json names {named}; NxD Inference runs {known}. For another class set applicationClass to "
        "`module:Class`",
    )


def reads_stored(model: Mapping[str, Any]) -> bool:
    """Whether the class of NxD Inference itself multiplies out, or computes, what this checkpoint stores."""
    names = (str(name) for name in model.get("architectures") or ())
    families = [family for name in names if (family := BY_ARCHITECTURE.get(name))]
    return bool(families) and quantization_of(model) in families[0].quantizations


def is_private(application: str) -> bool:
    """Whether an application is given by its import path."""
    return ":" in application


def text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model, with the names that most families use."""
    text = dict(model)
    for part in ("text_config", "attn_config", "ffn_config"):
        nested = model.get(part)
        text |= nested if isinstance(nested, Mapping) else {}
    if model.get("model_type") == "llava":
        text = LEFT_OUT_BY_PIXTRAL | text
    if text.get("model_type") in ("gemma3", "gemma3_text"):
        text = LEFT_OUT_BY_GEMMA_3 | {name: value for name, value in text.items() if value is not None}
    return text | {name: text[other] for name, other in OTHER_NAMES.items() if name not in text and other in text}


def window_of(family: NxdiFamily, text: Mapping[str, Any]) -> int:
    """Tokens that layers with a sliding window see; 0: none has one, or what its class does is not known.

    text: see `text_config`.
    """
    window, types = text.get("sliding_window"), text.get("layer_types")
    # Qwen's have none unless they say so.
    used = text.get("use_sliding_window", not family.application.startswith("qwen"))
    if family.windows == "none" or not used or (types and "sliding_attention" not in types):
        return 0
    return window if isinstance(window, int) else 0


LEFT_OUT_BY_GEMMA_3: dict[str, Any] = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
"""Its makers write only what differs from the defaults of transformers."""

LEFT_OUT_BY_PIXTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
"""As Gemma 3's; a window that does not apply is null."""

OTHER_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_seq_len",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "num_key_value_heads": "kv_n_heads",
}
"""As DBRX writes them."""
