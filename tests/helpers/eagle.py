"""EAGLE heads with random weights for small models, and a plain reference of ours: without a cache, all positions of a
sequence at a time. It follows the papers and shares no code with the runtime.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from helpers.random_model import model_config
from helpers.torch_models import reference

Tensors = dict[str, torch.Tensor]


def head_tensors(
    generation: int, config: dict[str, Any], *, target: int = 64, states: int = 3, scale: float = 0.2
) -> Tensors:
    """Named as in the first checkpoints of the hub. target: the model's hidden size."""
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = hidden // config["num_attention_heads"]
    key, third = config["num_key_value_heads"] * dim, generation == 3
    prefix = "midlayer" if third else "layers.0"
    wide = 2 * hidden if third else hidden
    tensors = {
        "fc.weight": drawn(hidden, states * target if third else hidden + target),
        f"{prefix}.self_attn.q_proj.weight": drawn(hidden, wide),
        f"{prefix}.self_attn.k_proj.weight": drawn(key, wide),
        f"{prefix}.self_attn.v_proj.weight": drawn(key, wide),
        f"{prefix}.self_attn.o_proj.weight": drawn(hidden, hidden),
        f"{prefix}.mlp.gate_proj.weight": drawn(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": drawn(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": drawn(hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": 1 + drawn(hidden),
    }
    if not third:
        return tensors
    drafted = config.get("draft_vocab_size", config["vocab_size"])
    # Every second token, and the rest from the end.
    tokens = torch.arange(drafted) * 2 + 1
    tensors |= {
        f"{prefix}.hidden_norm.weight": 1 + drawn(hidden),
        f"{prefix}.input_layernorm.weight": 1 + drawn(hidden),
        "norm.weight": 1 + drawn(hidden),
        "lm_head.weight": drawn(drafted, hidden),
        "d2t": tokens - torch.arange(drafted),
        "t2d": torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, tokens, True),
    }
    return tensors


def head_config(generation: int, **others: Any) -> dict[str, Any]:
    # A model that is longer than the head says, as on the hub.
    found = model_config(num_layers=1, max_position_embeddings=64, **others)
    return {**found, "draft_vocab_size": 100} if generation == 3 else found


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_copy(folder: Path, model: Path) -> Path:
    """A head of generation 1 that is nearly the whole model, which has one block, so that most of its drafts are right.

    It misses the first token, and lacks two norms: its embedding is normalised, what its block adds has that scale, and
    its head has the weights of the last norm.
    """
    own = load_file(model / "model.safetensors")
    config, block = json.loads((model / "config.json").read_text()), "layers.0."
    tensors = {name.removeprefix("model."): tensor for name, tensor in own.items()}
    embedding, norm, last = (
        tensors.pop(name) for name in ("embed_tokens.weight", f"{block}input_layernorm.weight", "norm.weight")
    )
    size = embedding.pow(2).mean(dim=1, keepdim=True).sqrt()
    tensors["embed_tokens.weight"] = embedding / size
    for name in "qkv":
        tensors[f"{block}self_attn.{name}_proj.weight"] *= norm
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[block + name] /= size.mean()
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * last
    hidden = config["hidden_size"]
    tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    return write_head(folder, config, tensors)


class PlainEagle:
    """states: after how many blocks of the model EAGLE 3 reads its hidden states."""

    def __init__(self, model: Path, head: Path, *, states: Sequence[int] = (), **says: bool) -> None:
        self._model, self._states, self._says = reference(model), tuple(states), says
        self._config = json.loads((head / "config.json").read_text())
        self._config = self._config.get("transformer_layer_config", self._config)
        self._is_third = bool(states)
        tensors = load_file(head / "model.safetensors")
        self._tensors = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        }

    @torch.inference_mode()
    def hear(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the head reads of the model at each position. It depends on the tokens up to there alone."""
        last: list[torch.Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda module, given: last.append(given[0]))
        found = self._model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        hook.remove()
        # In transformers the last of them is behind the last norm.
        if not self._is_third:
            heard: torch.Tensor = found[-1][0]
            return heard
        taken = [(*found[:-1], *last)[number][0] for number in self._states]
        if self._says.get("fc_norm"):
            taken = [self._norm(one, f"fc_norm.{number}") for number, one in enumerate(taken)]
        fused = torch.cat(taken, dim=-1)
        if self._says.get("norm_before_fc"):
            fused = self._norm(fused, "input_norm")
        return self._linear(fused, "fc")

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], heard: torch.Tensor, count: int) -> list[int]:
        """The drafts that follow these tokens. heard: at each position but the last."""
        drafts: list[int] = []
        for _ in range(count):
            own = self._states_after([*tokens, *drafts][1:], heard)
            last = own[-1]
            drafts.append(self._token(last))
            if self._says.get("norm_output"):
                last = self._norm(last, "norm")
            heard = torch.cat((heard, last.unsqueeze(0)))
        return drafts

    def _states_after(self, tokens: Sequence[int], heard: torch.Tensor) -> torch.Tensor:
        """Hidden states of the head: token i of these is fed with state i of `heard`."""
        embedding = self._tensors.get("embed_tokens.weight", self._model.get_input_embeddings().weight)
        embedded = embedding[torch.tensor(tokens)]
        if self._is_third:
            normed = self._norm(heard, "layers.0.hidden_norm")
            attended = torch.cat((self._norm(embedded, "layers.0.input_layernorm"), normed), dim=-1)
            x = normed if self._says.get("norm_before_residual") else heard
        else:
            attended = x = self._linear(torch.cat((embedded, heard), dim=-1), "fc")
        x = x + self._attention(attended)
        y = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(y, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(silu(gate) * up, "layers.0.mlp.down_proj")

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        count, dim = len(x), self._config["hidden_size"] // heads
        query, key, value = (self._linear(x, f"layers.0.self_attn.{name}_proj").view(count, -1, dim) for name in "qkv")
        query, key = self._rotated(query), self._rotated(key)
        key, value = (one.repeat_interleave(heads // kv_heads, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / dim**0.5
        later = torch.ones(count, count).triu(1).bool()
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, value).flatten(1), "layers.0.self_attn.o_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        count, _, dim = x.shape
        frequencies = self._config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(count).float(), frequencies).unsqueeze(1)
        one, other = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)

    def _token(self, state: torch.Tensor) -> int:
        hidden = self._norm(state, "norm") if self._is_third else state
        head = self._tensors.get("lm_head.weight", self._model.get_output_embeddings().weight)
        found = int((head @ hidden).argmax())
        return found + int(self._tensors["d2t"][found]) if "d2t" in self._tensors else found

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self._tensors.get(f"{name}.bias", torch.zeros(()))
        return x @ self._tensors[f"{name}.weight"].T + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        return x * scale * self._tensors[f"{name}.weight"]
