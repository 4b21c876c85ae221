"""A small decoder of the Llama kind: reads a checkpoint, computes hidden states and logits for one graph run.

It knows Llama 2 and 3.x, Mistral, Qwen2 and Qwen3 (dense). Keys and values are read from and written to the cache by
the caller: `forward` takes what came before as tensors and returns the new keys and values of every layer.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fake_nxdi
from fake_nxdi import quantized
from fake_nxdi.lora import Weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "llama4_text", "qwen3_vl_text")

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values `[rows, kv heads, positions, head size]` of one layer."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a config.json decides the computation; plain values, so that an artifact can hold it."""

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    tied: bool
    pad_token: int


def shape_of(config: Any) -> Shape:
    """From an InferenceConfig; anything this decoder would compute wrongly is an error."""
    kind = str(getattr(config, "model_type", ""))
    if kind not in FAMILIES:
        raise NotImplementedError(f"the fake computes {', '.join(FAMILIES)}, not {kind}")
    if kind == "llama4_text" and (config.moe_layers or config.use_qk_norm or not all(config.no_rope_layers)):
        raise NotImplementedError("the fake computes no experts, normalised heads, or layers without rotation")
    window = getattr(config, "sliding_window", None)
    windowed = kind == "mistral" or bool(getattr(config, "use_sliding_window", False))
    if window and windowed and window < config.neuron_config.seq_len:
        raise NotImplementedError("the fake has no sliding window")
    smallest = min(config.neuron_config.context_encoding_buckets or [config.neuron_config.max_context_length])
    if kind == "mistral" and window and fake_nxdi.has(9) and smallest < window - 1:
        # The cache keeps a window of each prompt, gathered from what the prompt's graph has.
        raise RuntimeError(f"index {smallest} is out of bounds for dimension 2 with size {smallest}")
    heads = config.num_attention_heads
    scaling = getattr(config, "rope_scaling", None)
    return Shape(
        model_type=kind,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        epsilon=config.rms_norm_eps,
        rope_theta=float(config.rope_theta),
        rope_scaling=dict(scaling) if scaling else None,
        max_positions=config.max_position_embeddings,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        pad_token=getattr(config, "pad_token_id", None) or 0,
    )


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, under their names without `model.`."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    for file in sorted(folder.glob("*.bin")):
        found.update(torch.load(file, map_location="cpu", weights_only=True))
    if not found:
        raise FileNotFoundError(f"Can not find model.safetensors or pytorch_model.bin in {folder}")
    return quantized.renamed({name.removeprefix("model."): tensor for name, tensor in found.items()})


DROPPED = "Removing redundant keys from checkpoint: "
COPIED = {
    **{f"self_attn.{one}_proj": f"self_attn.qkv_proj.{one}_proj" for one in "qkv"},
    "self_attn.o_proj": "self_attn.o_proj.o_proj",
}
"""Parameters that the library copies under another name."""


def parameters(shape: Shape, config: Any) -> set[str]:
    """Names of what the decoder reads of a checkpoint."""
    norms = ("input_layernorm", "post_attention_layernorm")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    biased: list[str] = [*COPIED] if getattr(config, "attention_bias", False) else []
    biased += mlp if getattr(config, "mlp_bias", False) else ()
    if shape.model_type == "qwen2":
        biased = [one for one in COPIED if one != "self_attn.o_proj"]
    if shape.model_type in ("qwen3", "qwen3_vl_text"):
        norms += ("self_attn.q_norm", "self_attn.k_norm")
    modules = (*norms, *COPIED, *mlp)
    read = {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    read |= {f"layers.{number}.{one}.weight" for number in range(shape.layers) for one in modules}
    return read | {f"layers.{number}.{one}.bias" for number in range(shape.layers) for one in biased}


def linear_modules(names: set[str]) -> list[str]:
    """The modules of these parameters that can be quantized."""
    modules = sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return [name for name in modules if name.endswith(("_proj", "lm_head"))]


def moved(name: str) -> str:
    """Where the library puts a parameter."""
    module, _, parameter = name.rpartition(".")
    layer, _, inner = module.removeprefix("layers.").partition(".")
    return f"layers.{layer}.{COPIED[inner]}.{parameter}" if inner in COPIED else name


def preprocess(config: Any, checkpoint: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """What the decoder reads of a checkpoint. As the library does, it says what it drops, copies too.

    prefix: before each name, where a graph has two models.
    """
    is_head = config.neuron_config.is_eagle_draft
    read = head_parameters(shape_of(config), config) if is_head else parameters(shape_of(config), config)
    if is_head and (missing := sorted(read - checkpoint.keys() - {"fc.bias"})):
        raise KeyError(missing[0])
    linear = {name: moved(f"{name}.weight").removesuffix(".weight") for name in linear_modules(read)}
    numbers = quantized.taken(linear, checkpoint, config.neuron_config, tied=shape_of(config).tied)
    read |= numbers.keys()
    dropped = []
    for name in checkpoint:
        is_copied = moved(name) != name
        is_kept = shape_of(config).model_type == "qwen3" and name.rpartition(".")[0].endswith(("q_norm", "k_norm"))
        if name not in read or is_copied or is_kept:
            dropped.append(f"{prefix}{name}")
        if name not in read and is_copied:
            dropped.append(f"{prefix}{moved(name)}")
    warnings.warn(f"{DROPPED}{dropped}", stacklevel=1)
    return {f"{prefix}{name}": tensor for name, tensor in (checkpoint | numbers).items() if name in read}


def frequencies(shape: Shape) -> torch.Tensor:
    """Angles per position of each pair of a head, scaled as the model asks."""
    pairs = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    rates = shape.rope_theta**-pairs
    scaling = shape.rope_scaling
    if scaling is None:
        return rates
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return rates
    if kind == "linear":
        return rates / scaling["factor"]
    if kind != "llama3":
        raise NotImplementedError(f"the fake does not scale positions by {kind}")
    turns = scaling["original_max_position_embeddings"] * rates / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return rates * keep + rates / scaling["factor"] * (1 - keep)


def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Summed in float32 and rounded once, as on a device. A CPU without half precision is ten times as slow at it."""
    wide = F.linear(values.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(values.dtype)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """As `linear`."""
    return (left.float() @ right.float()).to(left.dtype)


class Decoder:
    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        scales = {name: tensor for name, tensor in weights.items() if name.endswith(".scale")}
        wide = {
            name: quantized.multiplied(weights[name], scale)
            for scale_name, scale in scales.items()
            for name in (f"{scale_name.removesuffix('.scale')}.weight",)
        }
        self._saved = sum(wide[name].numel() * dtype.itemsize - weights[name].nbytes for name in wide)
        self._saved -= sum(scale.nbytes for scale in scales.values())
        self._weights = {name: tensor.to(dtype) for name, tensor in (weights | wide).items() if name not in scales}
        if shape.tied or "lm_head.weight" not in self._weights:
            self._weights["lm_head.weight"] = self._weights["embed_tokens.weight"]
        self._rates = frequencies(shape)
        self.rows: list[Weights] = []
        """What the adapter of each row of the next call adds; empty: no row has one."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values()) - self._saved

    seen: tuple[torch.Tensor, torch.Tensor] | None = None
    """Features of pictures that the next prompt has, and their places in it."""
    deeper: torch.Tensor | None = None
    """`[layers, rows, tokens, hidden]`: features for the same places that the first layers add."""
    turned: torch.Tensor | None = None
    """`[3, rows, width]`: positions that turn, where they are not those in the cache."""
    taps: tuple[int, ...] = ()
    """Layers behind which hidden states are kept for an EAGLE 3 head; empty: those at the end, for EAGLE 1."""

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        wide = values.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.epsilon)
        return self._weights[name] * scaled.to(values.dtype)

    def _linear(self, values: torch.Tensor, name: str) -> torch.Tensor:
        found = linear(values, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))
        for row, adapter in enumerate(self.rows):
            if pair := adapter.get(name):
                a, b, scaling = pair
                found[row] += (linear(linear(values[row], a), b) * scaling).to(found.dtype)
        return found

    def _heads(self, values: torch.Tensor, name: str, norm: str) -> torch.Tensor:
        rows, width, _ = values.shape
        heads = self._linear(values, name).view(rows, width, -1, self.shape.head_size)
        if norm in self._weights:
            heads = self._norm(heads, norm)
        if norm and self.shape.model_type == "llama4_text":
            # It turns neighbours, where others turn halves.
            heads = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return heads.transpose(1, 2)

    def _turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        before: list[Layer] | None,
        mask: torch.Tensor,
        previous: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[Layer]]:
        """Hidden states `[rows, width, hidden]` and the new keys and values.

        `before` holds what the cache has for each row, `mask [rows, width, cached + width]` what each token sees of it
        and of the new tokens; `previous` are the hidden states that a head reads.
        """
        shape = self.shape
        angles = self._angles(positions if self.turned is None else self.turned)[:, None]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        embedded = F.embedding(ids.long(), self._weights["embed_tokens.weight"])
        if self.seen is not None:
            embedded = self._scattered(embedded, self.seen[0])
        hidden = self._entry(embedded, previous)
        rows, width, _ = hidden.shape
        kept: list[torch.Tensor] = []
        group = shape.heads // shape.kv_heads
        unseen = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)[:, None]
        new: list[Layer] = []
        for number in range(shape.layers):
            prefix = f"layers.{number}"
            normed, hidden = self._before_attention(hidden, prefix)
            attention = f"{prefix}.self_attn"
            query = self._turned(self._heads(normed, f"{attention}.q_proj", f"{attention}.q_norm.weight"), cos, sin)
            key = self._turned(self._heads(normed, f"{attention}.k_proj", f"{attention}.k_norm.weight"), cos, sin)
            value = self._heads(normed, f"{attention}.v_proj", "")
            new.append((key, value))
            if before is not None:
                key = torch.cat((before[number][0], key), dim=2)
                value = torch.cat((before[number][1], value), dim=2)
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            scores = product(query, key.transpose(2, 3)).float() / math.sqrt(shape.head_size) + unseen
            seen = product(scores.softmax(-1).to(self.dtype), value)
            hidden = hidden + self._linear(seen.transpose(1, 2).reshape(rows, width, -1), f"{attention}.o_proj")
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
            gate = F.silu(self._linear(normed, f"{prefix}.mlp.gate_proj"))
            hidden = hidden + self._linear(
                gate * self._linear(normed, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"
            )
            if self.deeper is not None and number < len(self.deeper):
                hidden = hidden + self._scattered(torch.zeros_like(hidden), self.deeper[number])
            if number in self.taps:
                kept.append(hidden)
        found = self._exit(hidden)
        self.kept = torch.cat(kept, dim=-1) if kept else found
        return found, new

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """`[rows, width, pairs]`; of positions with three parts, pairs take them in turns."""
        angles = positions[..., None].float() * self._rates
        if positions.dim() == 2:
            return angles
        section, pair = (self.shape.rope_scaling or {})["mrope_section"], torch.arange(len(self._rates))
        found = angles[0]
        for part in (1, 2):
            found = torch.where((pair % 3 == part) & (pair < 3 * section[part]), angles[part], found)
        return found

    def _scattered(self, values: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The values with the features in their places."""
        assert self.seen is not None
        places = self.seen[1].flatten().long()
        values = values.clone()
        values.view(-1, self.shape.hidden)[places] = features.flatten(0, 1)[: len(places)].to(self.dtype)
        return values

    def _entry(self, embedded: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        return embedded

    def _before_attention(self, hidden: torch.Tensor, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention reads, and what its answer is added to."""
        return self._norm(hidden, f"{prefix}.input_layernorm.weight"), hidden

    def _exit(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, "norm.weight")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self._weights["lm_head.weight"]).float()


class Head(Decoder):
    """An EAGLE head. Its hidden states are those that it reads itself for the next draft."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor], dtype: torch.dtype, *, version: int) -> None:
        super().__init__(shape, weights, dtype)
        self._version = version
        self._is_normed = "layers.0.input_layernorm.weight" in weights

    def _entry(self, embedded: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        assert previous is not None
        if self._version == 1:
            return self._linear(torch.cat((embedded, previous), dim=-1), "fc")
        if previous.shape[-1] == 3 * embedded.shape[-1]:
            previous = self._linear(previous, "fc")
        return torch.cat((embedded, previous), dim=-1)

    def _before_attention(self, hidden: torch.Tensor, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        norm = f"{prefix}.input_layernorm.weight"
        if self._version == 1:
            return self._norm(hidden, norm) if self._is_normed else hidden, hidden
        embedded, previous = hidden.chunk(2, dim=-1)
        if not self._is_normed:
            return hidden, previous
        normed = self._norm(previous, f"{prefix}.hidden_norm.weight")
        return torch.cat((self._norm(embedded, norm), normed), dim=-1), previous

    def _exit(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(self._norm(hidden, "norm.weight") if self._version == 3 else hidden)


def head_parameters(shape: Shape, config: Any) -> set[str]:
    """Names of what a head reads of a checkpoint."""
    neuron, layer = config.neuron_config, "layers.0"
    read = parameters(shape, config) - {f"{layer}.input_layernorm.weight", "norm.weight"} | {"fc.weight"}
    read |= {"fc.bias"} if getattr(config, "fc_bias", False) else set()
    if neuron.enable_eagle_draft_input_norm:
        read |= {f"{layer}.input_layernorm.weight"}
    if neuron.is_eagle3:
        read |= {"norm.weight", f"{layer}.hidden_norm.weight"}
    return read
