"""What a model is compiled with for NxD Inference: `Settings`, in a normal form.

Derived once from the configuration and config.json by whoever compiles and whoever serves. Pure: it imports neither
NxD Inference nor torch, and knows no path, no time and nothing of this machine but the `Target` that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.backend.neuron import bucket_plan
from neuron_runtime.backend.neuron.devices import LogicalCore, Target
from neuron_runtime.backend.neuron.model_config import number_of
from neuron_runtime.backend.neuron.override import PATH
from neuron_runtime.backend.nxdi.eagle import HEAD_NORMS, TOKENS, named_as_layers, not_computed
from neuron_runtime.backend.nxdi.models import NxdiFamily, family_of, text_config, window_of
from neuron_runtime.backend.nxdi.neuron_config import (
    CACHE_FLAG,
    CACHE_TYPE,
    OF_EAGLE,
    SAMPLING,
    SHARDED,
    Override,
    merge,
    read_override,
)
from neuron_runtime.backend.nxdi.quantized import (
    CHECKPOINT,
    ENVIRONMENT,
    EXCLUDED,
    OF_WEIGHTS,
    Quantized,
    excluded_of,
    form_of,
    projections,
    weights_of,
)
from neuron_runtime.backend.nxdi.vision import GRIDS, Vision, vision_of
from neuron_runtime.checkpoint import FUSION
from neuron_runtime.config import METHODS_WITH_MODEL, NO_PREFIX_CACHE, AdapterOptions, RuntimeConfig, uses_blocks
from neuron_runtime.core import SamplingMode
from neuron_runtime.dtypes import COMPUTED
from neuron_runtime.errors import ConfigProblems, FatalError

WITH_ADAPTERS = {**dict.fromkeys(("llama", "qwen2", "qwen3"), TARGETS), "mistral": TARGETS[:4]}
"""By application, the projections that are told whose adapter a row has. Mistral's layers do not tell their MLP."""
KERNELS = {
    **dict.fromkeys(("qkv_kernel_enabled", "qkv_nki_kernel_enabled"), TARGETS[:3]),
    **dict.fromkeys(("mlp_kernel_enabled", "mlp_tkg_nki_kernel_enabled"), TARGETS[4:]),
    "out_proj_kernel_enabled": ("o_proj",),
    "attn_block_tkg_nki_kernel_enabled": TARGETS[:4],
}
"""Kernels that take the weights of layers themselves, and so know nothing of the adapters, or scales, of these
projections."""
MIN_ADAPTER_RANK = 2
"""NxD Inference takes an axis of one for none."""
WITH_DRAFTS = ("llama", "mistral", "qwen2", "qwen3")
"""Applications whose graphs are known to verify drafts rightly."""
EAGLE_FAMILY = "llama"
"""The application whose class also is one of EAGLE heads. Those of version 1 may be for models of others: what makes
hidden states is common to all."""
MIN_EAGLE_3_LAYERS = 7
"""Else two of the three layers whose hidden states an EAGLE 3 head reads would be the same."""
DEFAULT_MAX_SEQUENCES = 16
DEFAULT_MAX_LENGTH = 4096
DEFAULT_BLOCK_SIZE = 32
DEFAULT_SEGMENT_TOKENS = 2048
DEFAULT_GLOBAL_TOPK = 256
RECOMPUTED = (256, 512)
"""NxD Inference computes a prompt above the first and up to the second size without its cached prefix, if it has a
bucket of the second: its authors measured that this is faster."""
SMALLEST_BUCKET = 128

MIN_BETWEEN = 3
"""Tokens between two graphs for prompts with grids: one longer than the smaller, and two below the larger."""

OF_BOTH = ("torch_dtype", "logical_nc_config", "cast_type", "skip_warmup", "on_cpu", SHARDED)
"""Arguments that an encoder of pictures has in common with the text of its model."""

CACHE_DTYPES = {"auto": "", "fp8": "float8_e4m3fn"}
"""By `kvCacheDtype`. Numbers are cast as they are, without a scale."""
CACHE_KERNEL = "attn_block_tkg_nki_kernel_cache_update"
"""Kernel that writes keys and values itself, into what was read of the cache, which is cast by then."""

MIN_ACTIVE_TOKENS = 128
"""NxD Inference takes a shorter prefill over a prefix for token generation."""
MIN_KERNEL_TOKENS = 512
"""With logical cores of one physical core, the attention kernel runs from this many tokens on, if it is enabled.
Without it, a prefill over a prefix attends to unused positions: its tokens are wrong now and then."""
TILE = 128
"""Positions that the cache manager wants along one axis of a sequence's blocks."""


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A second model in the same graphs, which makes the drafts that they verify."""

    application: str
    config: Mapping[str, Any]
    """Its config.json. Its weights change no graph."""
    eagle: Literal[0, 1, 3] = 0
    """It is an EAGLE head of this version; 0: a model of its own."""
    has_input_norm: bool = False
    """Whether a head of version 1 has a norm before its attention; one of version 3 always has two."""
    has_fusion_bias: bool = False
    """Whether the matrix that fuses hidden states with tokens has one."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What its NeuronConfig has otherwise than the model's."""
        return {
            "enable_fused_speculation": False,
            **({"is_eagle_draft": True} if self.eagle else {"speculation_length": 0}),
        }


@dataclass(frozen=True, kw_only=True)
class DraftFiles:
    """What is known of a draft model before its weights are read."""

    config: Mapping[str, Any]
    """config.json."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of its tensors, by their names without `model.`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the graphs and the limits."""

    application: str
    """Key in the registry of NxD Inference, such as `llama`, or `module:Class`."""
    tensor: int
    """Tensor-parallel degree: the number of cores that a model runs on."""
    logical_core: LogicalCore
    """Physical cores that make one logical core (LNC)."""
    dtype: str
    layout: Literal["slots", "blocks"]
    max_rows: int
    max_model_length: int
    max_context_length: int
    """Longest prompt of one context-encoding call."""
    block_size: int
    """The model's length with slots."""
    num_blocks: int
    """Without the one that NxD Inference adds for what must not be kept."""
    segments: bool
    """Whether a prompt may be computed in several calls, over the graphs of prefix caching."""
    shares_prefixes: bool
    context_buckets: tuple[int, ...]
    """Ascending, as all buckets. With blocks: tokens that one call computes."""
    prefix_buckets: tuple[int, ...]
    """With blocks: tokens that were computed before; 0 is one of them."""
    token_buckets: tuple[int, ...]
    """Lengths of a decode step."""
    row_buckets: tuple[int, ...]
    """Rows of a decode step; empty: `max_rows` alone."""
    sampling: SamplingMode
    global_topk: int
    """Candidates that the device samples from; 0 without sampling on the device."""
    asynchronous: bool
    vocabulary_size: int
    neuron_config: Mapping[str, Any]
    """All arguments of NeuronConfig, as plain JSON."""
    max_adapters: int = 0
    """Adapters of running requests; 0: the model has none."""
    max_loaded_adapters: int = 0
    """Adapters in the host's memory. It changes no graph."""
    max_adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    max_drafts: int = 0
    """With drafts every decode graph computes so many tokens of a row beside its own. It returns logits of each, or
    makes them itself with `draft`, and returns the tokens that it accepts."""
    draft: DraftModel | None = None
    quantized: Quantized | None = None
    """None: the weights are not quantized, or the class multiplies them out itself."""
    cache_dtype: str = ""
    """That of keys and values in the cache; empty: `dtype`."""
    unread_weights: tuple[str, ...] = ()
    """Patterns of names of tensors that no module needs to read. It changes no graph."""
    vision: Vision | None = None
    """None: the application has no encoder of pictures."""

    @property
    def compiled_length(self) -> int:
        return _compiled_length(self.max_model_length, self.max_drafts, self.block_size, blocks=self.layout == "blocks")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the libraries must find when they are imported."""
        has_fp8 = self.cache_dtype or (self.quantized is not None and self.quantized.dtype.startswith("f8"))
        return dict(ENVIRONMENT) if has_fp8 else {}


def settings_of(
    config: RuntimeConfig,
    model: Mapping[str, Any],
    target: Target,
    lengths: bucket_plan.Lengths = (),
    draft: DraftFiles | None = None,
    *,
    sees_pictures: bool = True,
) -> Settings:
    """The settings of a model.

    Args:
        model: config.json.
        draft: the draft model, if the configuration has one; None: it is not known yet.
        lengths: of prompts, for which context buckets are chosen that the configuration leaves open.
        sees_pictures: whether the library can; otherwise a model that can is served for its text, if a class does it.

    Raises:
        InvalidConfig: names every field that contradicts another one, the model or the device.
        InvalidModel: config.json lacks a number.
        FatalError: UNSUPPORTED_ARCHITECTURE.
    """
    family = family_of(model, config.application_class)
    override = read_override(config.override_neuron_config, family.application)
    whole = model if family.pictures and (sees_pictures or not family.text_class) else None
    return _Derivation(config, text_config(model), target, override, family, lengths, draft, whole).settings()


@dataclass
class _Derivation:
    """One pass over the fields, in the order in which they depend on one another. What is wrong is collected."""

    _config: RuntimeConfig
    _model: Mapping[str, Any]
    _target: Target
    _override: Override
    _family: NxdiFamily
    _lengths: bucket_plan.Lengths
    _draft: DraftFiles | None
    _whole: Mapping[str, Any] | None
    """config.json of a model that sees pictures."""
    _found: ConfigProblems = field(default_factory=ConfigProblems)
    _at: dict[str, str] = field(default_factory=dict)
    """Where the value of a field was given, if the override has it."""

    @property
    def _sees(self) -> bool:
        """Whether the application has an encoder: a class of text alone is used where one exists."""
        asked = self._config.media.max_images
        return self._whole is not None and (asked > 0 or not self._family.text_class)

    @property
    def _one_size(self) -> bool:
        return self._override.get("enable_bucketing") is False

    def settings(self) -> Settings:
        config, problems, override = self._config, self._found, self._override
        vocabulary_size = number_of(self._model, "vocab_size")
        longest = number_of(self._model, "max_position_embeddings", 2)
        rows = self._chosen("$.limits.maxSequences", config.limits.max_sequences, "batch_size") or DEFAULT_MAX_SEQUENCES
        tensor = self._tensor()
        dtype = self._dtype()
        blocks, shares, segments = self._layout()
        if config.cache_events.endpoint and not shares:
            self._refuse("$.cacheEvents.endpoint", NO_PREFIX_CACHE)
        given_length = self._chosen("$.limits.maxModelLength", config.limits.max_model_length, "seq_len")
        block_size = self._chosen("$.limits.blockSize", config.limits.block_size, "pa_block_size")
        window = window_of(self._family, self._model)
        length = given_length or min(longest, DEFAULT_MAX_LENGTH, longest if self._family.mixed else window or longest)
        if blocks:
            block_size = block_size or _default_block_size(length)
            length = length if given_length else length // block_size * block_size
        if not 2 <= length <= longest:
            self._refuse("$.limits.maxModelLength", f"must be from 2 to the model's {longest} positions, got {length}")
        self._check_window(window, length, blocks)
        for name, value in self._family.needs.items():
            if override.get(name, value) != value:
                message = f"must be {_shown(value)}: without it, tokens of {self._family.application} are wrong"
                self._refuse(f"{PATH}.{name}", message)
        self._check_capacity()
        num_blocks = self._chosen("$.limits.numBlocks", config.limits.num_blocks, "pa_num_blocks")
        if blocks:
            num_blocks = num_blocks or rows * -(-length // block_size)
            self._check_blocks(length, block_size, num_blocks)
        else:
            block_size, num_blocks = length, rows
        # A prompt is padded until it fills the window.
        fills = window - 1 if self._family.windows == "whole" or window < length else 0
        drafts = config.speculation.max_drafts
        context = self._context_buckets(length, blocks, segments, fills, room=drafts)
        prefix = self._prefix_buckets(length, block_size, context) if blocks and (segments or shares) else (0,) * blocks
        one = self._one_size or self._mixes(length)
        compiled = _compiled_length(length, drafts, block_size, blocks=blocks)
        tokens = self._token_buckets(compiled, block_size, blocks, rows, one=one)
        asynchronous = self._chosen("$.asyncMode", config.async_mode, "async_mode")
        sampling, sampling_config = self._sampling(vocabulary_size, asynchronous)
        row_buckets = self._row_buckets(rows, blocks, asynchronous)
        if config.adapters.max_active:
            self._check_adapters(row_buckets)
        if drafts:
            self._check_drafts(blocks, window_ends=0 < window < length, context=context, row_buckets=row_buckets)
        draft = self._draft_model(vocabulary_size, tensor, length, context)
        quantized = self._quantized()
        words = {True: "fp8", False: "auto"}
        cache = self._chosen("$.kvCacheDtype", config.kv_cache_dtype, CACHE_FLAG, words)
        if CACHE_DTYPES[cache] and not self._family.casts_cache:
            name = self._family.application
            message = f"is {cache}, but NxD Inference's {name} keeps its cache in the model's dtype: leave it out"
            self._refuse("$.kvCacheDtype", message)
        if CACHE_DTYPES[cache] and override.get(CACHE_KERNEL):
            message = f"writes the model's dtype into the cache, and kvCacheDtype is {cache}: leave out one of them"
            self._refuse(f"{PATH}.{CACHE_KERNEL}", message)
        if blocks and len(prefix) > 1:
            self._check_prefix_prefill(context, "$.prefixCaching" if shares else "$.chunkedPrefill")
        if self._sees:
            self._check_pictures(asynchronous=bool(asynchronous), row_buckets=row_buckets, context=context)
        if sampling not in (possible := self._family.samplings):
            message = (
                f"is {sampling}, and NxD Inference's {self._family.application} has {' and '.join(possible)} alone"
            )
            self._refuse("$.sampling", message)
        problems.check()
        plain = Settings(
            application=self._family.application,
            tensor=tensor,
            logical_core=self._target.logical_core,
            dtype=dtype,
            layout="blocks" if blocks else "slots",
            max_rows=rows,
            max_model_length=length,
            max_context_length=context[-1],
            block_size=block_size,
            num_blocks=num_blocks,
            segments=segments,
            shares_prefixes=shares,
            context_buckets=context,
            prefix_buckets=prefix,
            token_buckets=tokens,
            row_buckets=row_buckets,
            sampling=sampling,
            global_topk=(sampling_config or {}).get("global_topk", 0),
            asynchronous=asynchronous,
            vocabulary_size=vocabulary_size,
            neuron_config={},
            **_adapters(config.adapters),
            max_drafts=drafts,
            draft=draft,
            quantized=quantized,
            cache_dtype=CACHE_DTYPES[cache],
            unread_weights=self._override.unread,
        )
        ours = {
            **_arguments(plain),
            **self._family.needs,
            SAMPLING: sampling_config,
            "output_logits": sampling == "DeviceWithLogits",
        }
        arguments = merge(ours, _derived(plain), self._override)
        return replace(plain, neuron_config=arguments, vision=self._vision(context[-1] - 1, tensor, arguments))

    def _check_pictures(self, *, asynchronous: bool, row_buckets: tuple[int, ...], context: tuple[int, ...]) -> None:
        """Refuses what is not known to work beside an encoder of pictures. Others are refused by the family: blocks,
        and with them shared prefixes and chunks, drafts, adapters."""
        cure = "leave it out"
        cure += ", or set media.maxImages to 0 to serve text alone" if self._family.text_class else ""
        for path, given in (("$.asyncMode", asynchronous), ("$.buckets.sequences", bool(row_buckets))):
            if given:
                self._refuse(path, f"cannot be combined with pictures, which {self._family.application} sees: {cure}")
        if self._family.pictures != GRIDS:
            return
        if self._override.get(SHARDED):
            message = "cannot be combined with an encoder that reads its positions from the checkpoint: leave it out"
            self._refuse(f"{PATH}.{SHARDED}", message)
        for smaller, size in pairwise((0, *context)):
            if size - smaller < MIN_BETWEEN:
                message = f"{size} is too close to {smaller}: with pictures, sizes differ by {MIN_BETWEEN} or more"
                self._refuse("$.buckets.context", message)

    def _vision(self, longest: int, tensor: int, arguments: Mapping[str, Any]) -> Vision | None:
        counts = self._family.pictures
        if not self._sees or self._whole is None or not counts:
            return None
        return vision_of(
            self._whole,
            counts,
            asked=self._config.media.max_images,
            longest=longest,
            tensor=tensor,
            arguments={name: arguments[name] for name in OF_BOTH if name in arguments},
        )

    def _check_adapters(self, row_buckets: tuple[int, ...]) -> None:
        """Refuses what NxD Inference cannot combine with adapters, or takes and computes wrongly."""
        path, adapters = "$.adapters.maxActive", self._config.adapters
        if self._family.application not in WITH_ADAPTERS:
            self._refuse(path, f"{self._family.application} has no adapters: only {', '.join(WITH_ADAPTERS)} have")
        possible = WITH_ADAPTERS.get(self._family.application, TARGETS)
        if others := [one for one in adapters.targets or TARGETS if one not in possible]:
            message = f"{self._family.application} has no adapters of {', '.join(others)}: set {', '.join(possible)}"
            self._refuse("$.adapters.targets", message)
        if adapters.max_rank < MIN_ADAPTER_RANK:
            message = f"must be at least {MIN_ADAPTER_RANK} with NxD Inference, got {adapters.max_rank}"
            self._refuse("$.adapters.maxRank", message)
        if row_buckets:
            self._refuse("$.buckets.sequences", "cannot be combined with adapters: leave out one of them")
        for name in ("fused_qkv", SHARDED):
            if self._override.get(name):
                self._refuse(f"{PATH}.{name}", "cannot be combined with adapters: leave out one of them")
        for name, unadapted in KERNELS.items():
            wrong = [one for one in unadapted if one in (adapters.targets or TARGETS)]
            if wrong and self._override.get(name):
                message = f"computes no adapters of {', '.join(wrong)}: leave it out, or these of adapters.targets"
                self._refuse(f"{PATH}.{name}", message)

    def _quantized(self) -> Quantized | None:
        """What the graphs have of quantized weights. Refuses kernels that would read their numbers without scales."""
        if not self._family.quantized:
            return None
        fused = bool(self._override.get("fused_qkv"))
        found = weights_of(self._model, self._override.get(EXCLUDED) or (), fused=fused)
        if found is None:
            return None
        quantized = projections(self._model)
        for name, taken in KERNELS.items():
            if self._override.get(name) and (wrong := [one for one in taken if one in quantized]):
                message = f"takes the quantized weights of {', '.join(wrong)} without their scales: leave it out"
                self._refuse(f"{PATH}.{name}", message)
        if fused and any(name.endswith(TARGETS[:3]) for name in excluded_of(self._model)):
            message = "needs q_proj, k_proj and v_proj quantized in each layer, or no weights: leave it out"
            self._refuse(f"{PATH}.fused_qkv", message)
        return found

    def _check_drafts(
        self, blocks: bool, *, window_ends: bool, context: tuple[int, ...], row_buckets: tuple[int, ...]
    ) -> None:
        """Refuses what the graphs that verify drafts cannot do, or do wrongly."""
        config, name, width = self._config, self._family.application, 1 + self._config.speculation.max_drafts
        if name not in WITH_DRAFTS:
            message = f"the {name} of NxD Inference is not known to verify drafts: only {', '.join(WITH_DRAFTS)} are"
            self._refuse("$.speculation.method", message)
        keeps_blocks = blocks and config.speculation.method == "Draft"
        against = {
            "$.layout": (blocks and not keeps_blocks, "blocks"),
            "$.chunkedPrefill": (keeps_blocks and config.chunked_prefill == "enabled", "prompts in several calls"),
            "$.adapters.maxActive": (config.adapters.max_active > 0, "adapters"),
            "$.buckets.sequences": (bool(row_buckets), "decode sizes for fewer sequences"),
            "$.asyncMode": (config.async_mode or self._override.get("async_mode"), "asyncMode"),
            "$.limits.maxModelLength": (window_ends, "sequences longer than the model's sliding window"),
        }
        for path, (holds, what) in against.items():
            if holds:
                self._refuse(path, f"{what} cannot be combined with drafts: leave out one of them")
        if self._override.get("flash_decoding_enabled"):
            message = "cannot be combined with drafts, whose graphs do not compile with it: leave out one of them"
            self._refuse(f"{PATH}.flash_decoding_enabled", message)
        if width in context:
            message = f"NxD Inference takes a prompt of {width} tokens for a row with its drafts: choose another size"
            self._refuse("$.buckets.context", message)

    def _draft_model(
        self, vocabulary_size: int, tensor: int, length: int, context: tuple[int, ...]
    ) -> DraftModel | None:
        """The model that makes drafts, if the configuration has one. It is refused unless it fits the other one."""
        path, files = "$.speculation.model.uri", self._draft
        if self._config.speculation.method == "NGram" or files is None:
            return None
        text = text_config(files.config)
        if form := form_of(files.config):
            self._refuse(path, f"its weights are {form}: NxD Inference makes drafts with unquantized ones alone")
            return None
        for name in ("num_attention_heads", "intermediate_size"):
            if isinstance(number := text.get(name), int) and number % tensor:
                self._refuse(path, f"its {name} of {number} cannot be shared out to {tensor} cores")
        if (size := number_of(text, "vocab_size")) != vocabulary_size:
            self._refuse(path, f"it has {size} tokens, and the model {vocabulary_size}: they must be the same")
        if self._config.speculation.method == "Eagle":
            return self._head(files, text, tensor, context)
        try:
            family = family_of(files.config, "")
        except FatalError as error:
            self._refuse(path, f"the draft model: {error}")
            return None
        if family.application not in WITH_DRAFTS:
            message = f"is a {family.application}, which is not known to make drafts: only {', '.join(WITH_DRAFTS)} are"
            self._refuse(path, message)
        if 0 < window_of(family, text) < length:
            message = f"it has a sliding window, which must not end within the {length} positions of the model"
            self._refuse(path, message)
        return DraftModel(application=family.application, config=dict(files.config))

    def _head(
        self, files: DraftFiles, text: Mapping[str, Any], tensor: int, context: tuple[int, ...]
    ) -> DraftModel | None:
        path, shapes, hidden = "$.speculation.model.uri", files.shapes, number_of(self._model, "hidden_size")
        versions: dict[int, Literal[1, 3]] = {2 * hidden: 1, 3 * hidden: 3}
        fusion = shapes.get(FUSION, (0, 0))
        eagle = versions.get(fusion[-1]) if fusion[0] == hidden else None
        if eagle is None:
            message = f"must be an EAGLE head: {FUSION} must be {hidden} times {2 * hidden} (EAGLE 1) or {3 * hidden}"
            self._refuse(path, f"{message} (EAGLE 3), got {' times '.join(map(str, fusion))}")
            return None
        if (kind := text.get("model_type")) != EAGLE_FAMILY:
            message = f"it is a {kind}, and NxD Inference has heads of the kind {EAGLE_FAMILY} alone, also for others"
            self._refuse(path, message)
        if text.get("num_hidden_layers", 1) != 1:
            self._refuse(path, f"it has {text['num_hidden_layers']} layers, and a head must have one")
        names = named_as_layers(shapes)
        if eagle == 3:
            self._check_eagle_3(files, names, tensor, context)
        return DraftModel(
            application=EAGLE_FAMILY,
            config=dict(files.config),
            eagle=eagle,
            has_input_norm=HEAD_NORMS[0] in names,
            has_fusion_bias="fc.bias" in shapes,
        )

    def _check_eagle_3(self, files: DraftFiles, names: set[str], tensor: int, context: tuple[int, ...]) -> None:
        path, shapes = "$.speculation.model.uri", files.shapes
        if (name := self._family.application) != EAGLE_FAMILY:
            message = f"EAGLE 3 needs sequence parallelism, which NxD Inference lacks in a part of {name}: use Draft"
            self._refuse("$.speculation.method", message)
        if missing := [one for one in (*HEAD_NORMS, "norm.weight") if one not in names]:
            self._refuse(path, f"it has no {missing[0]}, which an EAGLE 3 head must have")
        size, of_head = number_of(self._model, "vocab_size"), shapes.get("lm_head.weight", (0, 0))[0]
        if of_head and of_head != size and TOKENS not in shapes:
            self._refuse(path, f"its lm_head has {of_head} tokens, and it has no {TOKENS} to tell which of the {size}")
        if (layers := number_of(self._model, "num_hidden_layers")) < MIN_EAGLE_3_LAYERS:
            message = f"EAGLE 3 needs a model of at least {MIN_EAGLE_3_LAYERS} layers, got {layers}: use Draft"
            self._refuse("$.speculation.method", message)
        elif others := not_computed(files.config, layers):
            self._refuse(path, f"its config.json has {others[0]}, which NxD Inference computes otherwise")
        if uneven := [size for size in context if size % tensor]:
            message = f"with EAGLE 3 each size must be a multiple of the {tensor} cores, got {uneven[0]}"
            self._refuse("$.buckets.context", message)
        if self._override.get("sequence_parallel_enabled") is False:
            message = "must be true with EAGLE 3, whose graphs do not compile without: leave it out"
            self._refuse(f"{PATH}.sequence_parallel_enabled", message)

    def _check_capacity(self) -> None:
        """Refuses what would make experts drop tokens, which nothing reports."""
        factor = self._override.get("capacity_factor")
        experts = (
            self._model.get("num_local_experts") or self._model.get("num_experts") or self._model.get("moe_num_experts")
        )
        chosen = self._model.get("num_experts_per_tok") or self._model.get("moe_top_k")
        if factor and experts and chosen and factor * chosen < experts:
            message = f"must be at least {experts / chosen:g}, got {factor:g}: experts that are full drop tokens"
            self._refuse(f"{PATH}.capacity_factor", message)

    def _refuse(self, path: str, message: str) -> None:
        """Note what is wrong with a field, at the place where its value was given."""
        self._found.add(self._at.get(path, path), message)

    def _chosen(self, path: str, ours: Any, name: str, words: Mapping[Any, str] = MappingProxyType({})) -> Any:
        """The value of a field, or of the override's key if the field is left open.

        words: what the key's values are in the field's words, if they are others.
        """
        value = self._override.get(name)
        if value is None:
            return ours
        value = tuple(sorted(value)) if isinstance(value, list) else words.get(value, value)
        if ours in (0, "", "auto", (), False, None):
            self._at[path] = f"{PATH}.{name}"
            return value
        if value != ours:
            message = f"is {_shown(value)}, but {path.removeprefix('$.')} is {_shown(ours)}: leave out one of them"
            self._refuse(f"{PATH}.{name}", message)
        return ours

    def _tensor(self) -> int:
        """The tensor-parallel degree. Left open: as many of this process's cores as divide the model, or one."""
        config, cores = self._config, self._target.granted_cores
        sizes = {
            name: self._model[name]
            for name in ("num_attention_heads", "intermediate_size")
            if isinstance(self._model.get(name), int)
        }
        path = "$.parallelism.tensor"
        degree = self._chosen(path, config.parallelism.tensor, "tp_degree")
        if not degree:
            return max(d for d in range(1, max(cores, 1) + 1) if not any(size % d for size in sizes.values()))
        if 0 < config.accelerator.cores < self._target.cores_of_node(degree):
            self._refuse(path, f"is {degree}, but accelerator.cores is {config.accelerator.cores}")
        indivisible = next((name for name, size in sizes.items() if size % degree), None)
        if indivisible is not None:
            fitting = ", ".join(str(d) for d in range(1, 65) if not any(one % d for one in sizes.values()))
            size = f"the model's {indivisible} of {sizes[indivisible]}"
            self._refuse(path, f"is {degree}, which does not divide {size}; possible are {fitting}")
        return int(degree)

    def _dtype(self) -> str:
        words = {f"torch.{name}": name for name in COMPUTED}
        dtype = self._chosen("$.dtype", self._config.dtype, "torch_dtype", words)
        if dtype == "auto":
            stored = self._model.get("dtype") or self._model.get("torch_dtype") or "bfloat16"
            dtype = str(stored).removeprefix("torch.")
        if dtype not in COMPUTED:
            self._refuse("$.dtype", f"must be one of {', '.join(COMPUTED)}, got {dtype!r}")
        return str(dtype)

    def _layout(self) -> tuple[bool, bool, bool]:
        """Whether the cache has blocks, prefixes are shared, and prompts are computed in segments."""
        config, override, one = self._config, self._override, self._target.logical_core == 1
        layout = self._chosen("$.layout", config.layout, "is_block_kv_layout", {True: "blocks", False: "slots"})
        caching = self._chosen(
            "$.prefixCaching", config.prefix_caching, "is_prefix_caching", {True: "enabled", False: "disabled"}
        )
        sized = any(override.get(name) for name in ("pa_num_blocks", "pa_block_size"))
        blocks = False
        with self._found.collecting():
            adopted = msgspec.structs.replace(config, layout=layout, prefix_caching=caching)
            blocks = uses_blocks(adopted) or (layout == "auto" and sized)
            if layout == "slots" and sized:
                self._refuse(f"{PATH}.pa_num_blocks", "layout slots has no blocks: leave it out, or use blocks")
        name = "blocks" if blocks else "slots"
        if name not in self._family.layouts:
            path = "$.prefixCaching" if blocks and layout != "blocks" and caching == "enabled" else "$.layout"
            self._refuse(path, f"{self._family.application} has no layout {name}: leave it out")
            blocks = False
        elif not blocks and config.chunked_prefill == "enabled":
            cure = "leave it out, or use layout blocks" if "blocks" in self._family.layouts else "leave it out"
            self._refuse("$.chunkedPrefill", f"with layout slots, a prompt is computed in one call: {cure}")
        if not blocks:
            return False, False, False
        shares = caching == "enabled" or (caching == "auto" and not one)
        cuts = (not one or shares) and not config.speculation.max_drafts
        segments = config.chunked_prefill == "enabled" or (config.chunked_prefill == "auto" and cuts)
        return True, shares, segments

    def _check_blocks(self, length: int, block_size: int, num_blocks: int) -> None:
        path, per_sequence = "$.limits.blockSize", -(-length // block_size)
        if block_size > length or length % block_size:
            self._refuse(
                path,
                f"the model's length of {length} must be a multiple of the block size {block_size}: set "
                f"maxModelLength to {max(1, length // block_size) * block_size}, or another block size",
            )
        tile = _tile(length, block_size)
        if block_size % tile:
            self._refuse(
                path,
                f"{block_size} is too small for {per_sequence} blocks per sequence: with fewer than {TILE} it must "
                f"be a multiple of {tile}, such as {-(-block_size // tile) * tile}",
            )
        if num_blocks < per_sequence:
            needed = f"{per_sequence} blocks of {block_size}"
            message = f"one sequence of {length} tokens needs {needed}, but there are {num_blocks}"
            self._refuse("$.limits.numBlocks", message)

    def _buckets(
        self, path: str, ours: tuple[int, ...], name: str, length: int, block_size: int = 1
    ) -> tuple[int, ...]:
        """block_size: of which sizes must be multiples."""
        sizes: tuple[int, ...] = self._chosen(path, ours, name)
        if wrong := [size for size in sizes if size % block_size]:
            self._refuse(path, f"{wrong[0]} is no multiple of the block size {block_size}")
        if sizes and sizes[-1] > length:
            self._refuse(path, f"{sizes[-1]} is above the model's length of {length}")
        elif len(sizes) > 1 and self._one_size:
            self._refuse(f"{PATH}.enable_bucketing", f"is false, but {path.removeprefix('$.')} has sizes")
        return tuple(sorted({*sizes}))

    def _check_window(self, window: int, length: int, blocks: bool) -> None:
        path, name, does = "$.limits.maxModelLength", self._family.application, self._family.windows
        if does == "ignored" and 0 < window < length:
            message = f"is {length}, but NxD Inference's {name} ignores the model's sliding window of {window} tokens"
            self._refuse(path, f"{message}: set {window} or less")
        if does == "whole" and 0 < window != length:
            message = f"is {length}, but NxD Inference computes {name} right only with the length of its sliding window"
            self._refuse(path, f"{message}: set {window}")
        if does == "kept" and 0 < window < length and blocks and "blocks" in self._family.layouts:
            message = f"blocks: NxD Inference has none for a sliding window of {window} tokens"
            self._refuse("$.layout", f"{message}: use layout slots, or set maxModelLength to {window}")

    def _mixes(self, length: int) -> bool:
        """See `Family.mixed`."""
        chunk = self._model.get("attention_chunk_size")
        return self._family.mixed or (isinstance(chunk, int) and chunk < length)

    def _context_buckets(self, length: int, blocks: bool, segments: bool, fills: int, *, room: int) -> tuple[int, ...]:
        """room: positions behind the model's length. Graphs of others are for prompts as long as with these."""
        config, path = self._config, "$.buckets.context"
        sizes = self._buckets(path, config.buckets.context, "context_encoding_buckets", length + room)
        if sizes:
            if sizes[0] < fills:
                self._refuse(path, f"{sizes[0]} is too short for the model's sliding window: the least is {fills}")
            if 0 < config.limits.max_step_tokens < sizes[-1]:
                message = f"is {config.limits.max_step_tokens}, but the largest context bucket is {sizes[-1]}"
                self._refuse("$.limits.maxStepTokens", message)
            return sizes
        least = MIN_KERNEL_TOKENS if blocks and self._target.logical_core == 1 else SMALLEST_BUCKET
        longest = self._override.get("max_context_length") or config.limits.max_step_tokens
        if not longest and segments:
            # At most half a sequence, because it is compiled behind a prefix too.
            longest = min(DEFAULT_SEGMENT_TOKENS, max(_rounded(-(-length // 2), bucket_plan.STEP), least))
        longest = min(longest or length, length)
        if self._one_size:
            return (longest,)
        if longest < fills and not blocks:
            message = f"is {longest}, which is too short for the model's sliding window: the least is {fills}"
            self._refuse("$.limits.maxStepTokens", message)
        return bucket_plan.choose(
            bucket_plan.prompts(self._lengths, longest),
            longest,
            bucket_plan.MAX_SEGMENT_BUCKETS if blocks else bucket_plan.MAX_CONTEXT_BUCKETS,
            bucket_plan.prefill_cost,
            least=max(least, fills),
            strict=not blocks,
            never=RECOMPUTED if blocks else (0, 0),
        )

    def _prefix_buckets(self, length: int, block_size: int, context: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self._buckets("$.buckets.prefix", self._config.buckets.prefix, "prefix_buckets", length, block_size)
        if sizes:
            return tuple(sorted({0, *sizes}))
        # Free places of a prefill take cached tokens, so no call reads more than what the smallest one leaves.
        longest = min(_rounded(length - context[0], math.lcm(bucket_plan.STEP, block_size)), length)
        least = length if self._one_size else _rounded(MIN_KERNEL_TOKENS, block_size)
        # Every context size is compiled for every prefix: beyond, the largest would fit in no sequence.
        smaller = [size for size in _growing(least, longest) if size < length - context[-1]]
        return tuple(sorted({0, *smaller, longest}))

    def _token_buckets(self, length: int, block_size: int, blocks: bool, rows: int, *, one: bool) -> tuple[int, ...]:
        path = "$.buckets.tokenGeneration"
        multiple, ours = block_size if blocks else 1, self._config.buckets.token_generation
        sizes = self._buckets(path, ours, "token_generation_buckets", length, multiple)
        if one and sizes and sizes != (length,):
            message = f"must be {length} alone: NxD Inference's {self._family.application} has one decode size"
            self._refuse(path, message)
        if sizes or one:
            return tuple(sorted({*sizes, length}))
        contexts = bucket_plan.contexts_of(bucket_plan.log_uniform(bucket_plan.SHORTEST_PROMPT, length), rows)
        cost = bucket_plan.decode_cost(self._model, rows)
        most, least = bucket_plan.MAX_TOKEN_BUCKETS, 2 * SMALLEST_BUCKET
        multiple = math.lcm(bucket_plan.STEP, multiple)
        return bucket_plan.choose(contexts, length, most, cost, least=least, multiple=multiple)

    def _row_buckets(self, rows: int, blocks: bool, asynchronous: bool) -> tuple[int, ...]:
        path = "$.buckets.sequences"
        sizes: tuple[int, ...] = self._chosen(path, self._config.buckets.sequences, "token_generation_batches")
        if not sizes:
            return ()
        if sizes[-1] > rows:
            self._refuse(path, f"{sizes[-1]} is above maxSequences, which is {rows}")
        elif blocks or asynchronous:
            reason = "layout blocks" if blocks else "asyncMode"
            self._refuse(path, f"cannot be combined with {reason}: leave out one of them")
        buckets = tuple(sorted({*sizes, rows}))
        return buckets if len(buckets) > 1 else ()

    def _sampling(self, vocabulary_size: int, asynchronous: bool) -> tuple[SamplingMode, dict[str, Any] | None]:
        """The mode, and OnDeviceSamplingConfig."""
        override, mode = self._override, self._config.sampling
        logits = override.get("output_logits")
        if override.on_host and (mode not in ("", "Host") or logits):
            self._refuse(f"{PATH}.{SAMPLING}", f"is off, but sampling is {mode or 'DeviceWithLogits'!r}")
        elif logits is not None and mode and logits != (mode == "DeviceWithLogits"):
            self._refuse(f"{PATH}.output_logits", f"is {_shown(logits)}, but sampling is {mode}")
        method = self._config.speculation.method
        ours: SamplingMode = "Host" if override.on_host or method == "NGram" else "Device"
        chosen: SamplingMode = mode or ("DeviceWithLogits" if logits else ours)
        if method == "NGram" and chosen != "Host":
            message = f"is {chosen}, but the device keeps drafts by the likeliest token alone: set Host"
            self._refuse("$.sampling", message)
        elif method in METHODS_WITH_MODEL and chosen != "Device":
            message = f"is {chosen}, but a device that makes drafts returns no logits: set Device, or method NGram"
            self._refuse("$.sampling", message)
        if method == "Draft":
            if override.sampling:
                message = "has no effect, because the device keeps drafts by the likeliest token alone: leave it out"
                self._refuse(f"{PATH}.{SAMPLING}", message)
            return chosen, {"do_sample": False, "dynamic": False}
        if asynchronous and chosen != "Device":
            self._refuse("$.asyncMode", f"needs sampling Device, but it is {chosen}")
        if chosen == "Host":
            if override.sampling:
                self._refuse(f"{PATH}.{SAMPLING}", "has no effect, because sampling is Host: leave it out")
            return chosen, None
        override_topk = override.sampling.get("global_topk")
        if override_topk is not None and not 1 <= override_topk <= vocabulary_size:
            message = f"must be from 1 to the vocabulary's {vocabulary_size} tokens, got {override_topk}"
            self._refuse(f"{PATH}.{SAMPLING}.global_topk", message)
        topk = override_topk or min(DEFAULT_GLOBAL_TOPK, vocabulary_size)
        fixed = {"global_topk": topk}
        if method == "Eagle":
            # Else it would keep drafts by the likeliest token, whatever a row's temperature.
            fixed["do_sample"] = True
            if override.sampling.get("do_sample") is False:
                self._refuse(f"{PATH}.{SAMPLING}.do_sample", "must be true with Eagle: leave it out")
        return chosen, {"dynamic": True, "deterministic": False, **override.sampling, **fixed}

    def _check_prefix_prefill(self, context: tuple[int, ...], asked: str) -> None:
        """Prefills over a prefix are right only where the attention kernel runs, and NxD Inference recognises them.

        asked: the field that asks for them.
        """
        one, kernel = self._target.logical_core == 1, self._override.get("attn_kernel_enabled")
        if one and kernel is not True:
            self._refuse(
                asked,
                "with logical cores of one physical core, prompts over a prefix are right only with the attention "
                "kernel: set overrideNeuronConfig.attn_kernel_enabled to true and all context buckets to "
                f"{MIN_KERNEL_TOKENS} or more, or disable prefixCaching and chunkedPrefill",
            )
        elif kernel is False:
            message = "must not be false: prompts over a prefix are right only with the attention kernel"
            self._refuse(f"{PATH}.attn_kernel_enabled", message)
        least = MIN_KERNEL_TOKENS if one else MIN_ACTIVE_TOKENS
        if context[0] < least:
            cores = f", with logical cores of {self._target.logical_core} physical ones" if one else ""
            self._refuse("$.buckets.context", f"{context[0]} is too short over a prefix{cores}: the least is {least}")


def _shown(value: Any) -> Any:
    return {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value


def _tile(length: int, block_size: int) -> int:
    """What a block size must be a multiple of: NxD Inference cuts the blocks of short sequences into tiles."""
    per_sequence = -(-length // block_size)
    return 1 if per_sequence >= TILE else 1 << (-(-TILE // per_sequence) - 1).bit_length()


def _default_block_size(length: int) -> int:
    size = DEFAULT_BLOCK_SIZE
    while size < length and size % _tile(length, size):
        size *= 2
    return min(size, length)


def _compiled_length(length: int, drafts: int, block_size: int, *, blocks: bool) -> int:
    """Positions of a graph. A row writes its drafts behind its last token, also where that is the last of all; with
    blocks its graph must be longer than that."""
    return _rounded(length + drafts + 1, block_size) if drafts and blocks else length + drafts


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _growing(first: int, end: int) -> list[int]:
    """Sizes below the end, each four times the one before, or more if they would be too many."""
    sizes, factor = [first] * (first < end), 4
    while sizes and sizes[-1] * factor < end:
        sizes.append(sizes[-1] * factor)
        if len(sizes) > bucket_plan.MAX_PREFIX_BUCKETS - 2:
            sizes, factor = [first], 2 * factor
    return sizes


def _arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of NeuronConfig that we decide, without sampling."""
    blocks = settings.layout == "blocks"
    arguments: dict[str, Any] = {
        "tp_degree": settings.tensor,
        "logical_nc_config": settings.logical_core,
        "torch_dtype": settings.dtype,
        "padding_side": "right",
        "batch_size": settings.max_rows,
        "ctx_batch_size": 1,
        "tkg_batch_size": settings.max_rows,
        "is_continuous_batching": settings.max_rows > 1,
        "seq_len": settings.compiled_length,
        "max_context_length": settings.max_context_length,
        "enable_bucketing": True,
        "context_encoding_buckets": list(settings.context_buckets),
        "token_generation_buckets": list(settings.token_buckets),
        "async_mode": settings.asynchronous,
    }
    if blocks:
        arguments |= {
            "is_block_kv_layout": True,
            "is_prefix_caching": True,
            "pa_num_blocks": settings.num_blocks,
            "pa_block_size": settings.block_size,
            "prefix_buckets": [size for size in settings.prefix_buckets if size],
        }
    if settings.max_adapters:
        arguments["lora_config"] = {
            "max_loras": settings.max_adapters,
            "max_cpu_loras": settings.max_loaded_adapters,
            "max_lora_rank": settings.max_adapter_rank,
            "batch_size": settings.max_rows,
            "target_modules": list(settings.adapter_targets),
            "dynamic_multi_lora": True,
            # Its place for rows without an adapter, which it adds to both numbers.
            "enable_base_model_only": True,
        }
    if settings.max_drafts:
        arguments["speculation_length"] = 1 + settings.max_drafts
    if settings.draft is not None:
        arguments["enable_fused_speculation"] = True
        if settings.draft.eagle:
            arguments["enable_eagle_speculation"] = True
            arguments["enable_eagle_draft_input_norm"] = settings.draft.has_input_norm
        if settings.draft.eagle == 3:
            arguments |= {"is_eagle3": True, "sequence_parallel_enabled": True}
    if settings.quantized is not None:
        arguments |= settings.quantized.arguments
    if settings.cache_dtype:
        arguments |= {CACHE_FLAG: True, CACHE_TYPE: {"quant_dtype": settings.cache_dtype, "direct_cast": True}}
    if settings.row_buckets:
        arguments["token_generation_batches"] = list(settings.row_buckets)
    return arguments


def _adapters(options: AdapterOptions) -> dict[str, Any]:
    if not options.max_active:
        return {}
    return {
        "max_adapters": options.max_active,
        "max_loaded_adapters": options.max_loaded or options.max_active,
        "max_adapter_rank": options.max_rank,
        "adapter_targets": tuple(one for one in TARGETS if one in (options.targets or TARGETS)),
    }


def _derived(settings: Settings) -> dict[str, Any]:
    """What NeuronConfig makes of them: an override may repeat it."""
    length, rows, tensor = settings.compiled_length, settings.max_rows, settings.tensor
    blocks = settings.layout == "blocks"
    return {
        **dict.fromkeys(("max_length", "n_positions", "n_active_tokens"), length),
        **dict.fromkeys(("max_batch_size", "kv_cache_batch_size"), rows),
        **dict.fromkeys(("world_size", "local_ranks_size"), tensor),
        **dict.fromkeys(("pp_degree", "ep_degree"), 1),
        **dict.fromkeys(("start_rank_id", "kv_cache_padding_size"), 0),
        **dict.fromkeys(("allow_input_truncation", "skip_sharding", "bucket_n_active_tokens"), False),
        "is_block_kv_layout": blocks,
        "lora_config": None,
        "speculation_length": 0,
        **dict.fromkeys(("enable_fused_speculation", *OF_EAGLE), False),
        **dict.fromkeys((*OF_WEIGHTS, CHECKPOINT, CACHE_TYPE)),
    }
