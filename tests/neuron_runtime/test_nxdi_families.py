"""Families that the fake does not compute, on the installed NxD Inference: tokens equal to those of transformers.

Collected with NXDI_UNDER_TEST=installed alone. NxD Inference's Python needs transformers 4.57.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from helpers.nxdi import installed
from helpers.nxdi_engine import TARGET, backend_for
from helpers.torch_models import NEAR_TIE
from neuron_runtime.backend.nxdi.library import application
from neuron_runtime.backend.nxdi.settings import Settings, settings_of
from neuron_runtime.config import parse_config
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import InvalidConfig

__test__ = installed()

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LLAMA_4 = {
    **BASE,
    "head_dim": 16,
    "intermediate_size_mlp": 128,
    "num_hidden_layers": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", {**BASE, **EXPERTS, "sliding_window": None}),
    "DBRX": (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "vocab_size": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 500000.0},
            "ffn_config": {
                "ffn_hidden_size": 64,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_loss_weight": 0.01,
                "ffn_act_fn": {"name": "silu"},
            },
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        {
            **BASE,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "Qwen3-MoE that does not normalize": (
        "qwen3_moe",
        {**BASE, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **BASE,
            **EXPERTS,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_scaling": YARN,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Llama 4 in chunks": ("llama4_text", {**LLAMA_4, "attention_chunk_size": 128}),
    "Llama 4 within a chunk": ("llama4_text", {**LLAMA_4, "attention_chunk_size": 512}),
    "Gemma 3 of 1B": (
        "gemma3_text",
        {**BASE, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512},
    ),
    "Gemma 3 of a model with images": (
        "gemma3_text",
        {
            **BASE,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 512,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "Mistral with a window": ("mistral", {**BASE, "sliding_window": 200}),
}
SINCE = {"Gemma 3 of 1B": 9, "Gemma 3 of a model with images": 9, "Mistral with a window": 9, "Llama 4 in chunks": 9}


@torch.no_grad()
def random_model(folder: Path, kind: str, fields: dict[str, Any]) -> Any:
    """What transformers makes of a new checkpoint, which is written as its makers write it."""
    from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Llama4Config, Llama4ForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    model = (Llama4ForCausalLM._from_config if kind == "llama4_text" else AutoModelForCausalLM.from_config)(config)
    model = model.float().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter) * 0.1
        # Gemma 3 keeps the scales of norms in bfloat16.
        parameter.copy_(parameter + (noise * 64).round() / 64 if "norm" in name else noise)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if kind == "gpt_oss":
        for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:
            tensors |= _packed(name, tensors.pop(name), model)
        config.quantization_config = {"quant_method": "mxfp4"}
    with_images = {"llama4_text": Llama4Config, "gemma3_text": Gemma3Config if fields.get("rope_scaling") else None}
    architecture = type(model).__name__
    if outer := with_images.get(kind):
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        config, architecture = outer(text_config=config.to_dict()), outer.__name__[:-6] + "ForConditionalGeneration"
    config.architectures = [architecture]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def _packed(name: str, weights: torch.Tensor, model: Any) -> dict[str, torch.Tensor]:
    """Random MXFP4 weights in place of others, which the model gets too."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, size, outputs = weights.shape
    blocks = torch.randint(0, 256, (experts, outputs, size // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 125, (experts, outputs, size // 32), dtype=torch.uint8)
    model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def settings_for(folder: Path, **document: Any) -> Settings:
    base = {"version": 1, "model": {"uri": "file:///m"}, "servedNames": ["m"], "backend": "nxdi", "dtype": "float32"}
    base["limits"] = {"maxSequences": 2, "maxModelLength": 512}
    model = json.loads((folder / "config.json").read_text())
    return settings_of(parse_config(msgspec.json.encode(base | document)), model, TARGET)


def minor_version() -> int:
    from neuronx_distributed_inference import __version__

    return int(__version__.split(".")[1])


def test_attention_in_chunks_is_refused_where_it_is_wrong(tmp_path: Path) -> None:
    kind, fields = FAMILIES["Llama 4 in chunks"]
    random_model(tmp_path, kind, fields)
    with nullcontext() if minor_version() >= 9 else pytest.raises(InvalidConfig, match="set 128,"):
        application(settings_for(tmp_path), tmp_path)


def answers(settings: Settings, model_dir: Path, folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and their answers."""
    backend = backend_for(type("Model", (), {"folder": model_dir})(), settings, folder)
    backend.warm_up(lambda stage, share: None)
    engine, prompts = Engine(backend), [torch.randint(3, 512, (length,)).tolist() for length in (5, 40, 200, 1, 300)]
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), Sampling(temperature=0.0, max_tokens=16)))
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            outputs[int(event.request_id)] += event.token_ids
    backend.close()
    yield from zip(prompts, outputs, strict=True)


@pytest.mark.parametrize("layout", ["slots", "blocks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neuron_runtime.backend.nxdi.models import family_of

    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    if minor_version() < SINCE.get(family, 0):
        pytest.skip(f"came with NxD Inference 0.{SINCE[family]}")
    kind, fields = FAMILIES[family]
    (folder := tmp_path / "model").mkdir()
    model = random_model(folder, kind, fields)
    if layout not in family_of(json.loads((folder / "config.json").read_text()), "").layouts or (
        layout == "blocks" and family == "Mistral with a window"
    ):
        pytest.skip("has no blocks")
    document = {"layout": "blocks", "prefixCaching": "enabled"} if layout == "blocks" else {}
    for prompt, output in answers(settings_for(folder, **document), folder, tmp_path / "artifact"):
        assert len(output) == 16
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        given = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert float((logits.max(dim=-1).values - given).max()) <= NEAR_TIE, f"after {len(prompt)} tokens"
