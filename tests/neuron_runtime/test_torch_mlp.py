"""Mixtures of experts: which experts a step reads, which shapes are refused. Families are compared with transformers in
`test_torch_families.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.quantized import FORMATS, quantize
from helpers.torch_models import MODELS, load_backend, random_model, reference, reference_logits, runtime_config
from helpers.torch_parity import TOLERANCE, feed, load_decoder_and_cache, random_sequences
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.graphs import TorchCompiler
from neuron_runtime.backend.torch.linear import Linear, Widened
from neuron_runtime.backend.torch.mlp import Clamped, Dense, Experts, Route
from neuron_runtime.backend.torch.parts import part_of_model
from neuron_runtime.checkpoint import CONFIG_FILE, InvalidModel
from neuron_runtime.config import AdapterOptions
from neuron_runtime.errors import InvalidConfig

MakeExpert = Callable[[Linear, Linear], Dense | Clamped]
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 8, 4, 64, 4


class Counted(Widened):
    """A linear layer that notes how many rows each product has."""

    calls: list[int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls.append(len(x))
        return super().__call__(x)


def clamped(gate_up: Linear, down: Linear) -> Clamped:
    return Clamped(gate_up, down, alpha=1.7, limit=2.0)


@pytest.mark.parametrize(
    ("make", "route"),
    [
        (Dense, Route("softmax", TOP_K, normalises=True)),
        (clamped, Route("softmax", TOP_K, normalises=True)),
        (Dense, Route("sigmoid", TOP_K, normalises=False, scales_inputs=True)),
    ],
    ids=["Mixtral", "gpt-oss", "Llama 4"],
)
def test_a_step_reads_each_expert_that_it_needs_once_for_all_its_rows(make: MakeExpert, route: Route) -> None:
    torch.manual_seed(0)
    Counted.calls = []
    layers = [
        make(Counted(torch.randn(2 * INNER, HIDDEN), None), Widened(torch.randn(HIDDEN, INNER), None))
        for _ in range(NUM_EXPERTS)
    ]
    experts = Experts(torch.randn(NUM_EXPERTS, HIDDEN), tuple(layers), route)
    x = torch.randn(8, HIDDEN)
    found, num_read = experts(x), len(Counted.calls)
    assert sum(Counted.calls) == 8 * TOP_K
    outputs, chosen = (x @ experts.router.T).topk(TOP_K, dim=-1)
    assert num_read == len(chosen.unique()) < 8 * TOP_K
    shares = outputs.sigmoid() if route.scales_inputs else outputs.softmax(dim=-1)
    for row, (of_row, by) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        one, expected = x[row : row + 1], torch.zeros(1, HIDDEN)
        for expert, share in zip(of_row, by, strict=True):
            expected += layers[expert](one * share) if route.scales_inputs else share * layers[expert](one)
        torch.testing.assert_close(found[row], expected[0])


def test_quantized_experts_are_computed_with_their_scales(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", **MODELS["Qwen3-MoE"])
    plain = quantize(source, tmp_path / "model", FORMATS["fp8 in blocks"])
    (tokens,) = sequences = random_sequences(24)
    (found,) = feed(*load_decoder_and_cache(tmp_path / "model", "blocks"), [[(0, 0, 24)]], sequences)
    torch.testing.assert_close(found, reference_logits(reference(plain), tokens), atol=TOLERANCE, rtol=0)


def config_of(folder: Path, **fields: Any) -> dict[str, Any]:
    random_model(folder, **MODELS["Qwen3-MoE"])
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    return config | fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 17}, r"num_experts_per_tok \(17\) must be at most num_experts \(16\)"),
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_experts": 50_001}, "num_experts must be at most 50000 with 2 layers, got 50001"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"decoder_sparse_step": -1}, "decoder_sparse_step must be a positive integer"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ],
)
def test_impossible_experts_are_an_error_with_field_and_limit(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=message):
        decoder_config(config_of(tmp_path, **fields))


def test_the_size_of_dense_layers_matters_only_where_some_are_dense(tmp_path: Path) -> None:
    config = config_of(tmp_path, decoder_sparse_step=1, intermediate_size=0)
    assert part_of_model(decoder_config(config | {"intermediate_size": 101}), 2) == part_of_model(
        decoder_config(config), 2
    )
    with pytest.raises(InvalidModel, match="intermediate_size must be a positive integer, got 0"):
        decoder_config(config | {"mlp_only_layers": [1]})


def test_adapters_may_change_the_attention_beside_experts_but_not_these(tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS["Mixtral"])
    backend = load_backend(folder, adapters=AdapterOptions(max_active=1, max_rank=4))
    assert backend.limits.adapter_targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    backend.close()
    options = AdapterOptions(max_active=1, max_rank=4, targets=("q_proj", "down_proj"))
    with pytest.raises(InvalidConfig, match="q_proj, k_proj, v_proj, o_proj, not down_proj"):
        load_backend(folder, adapters=options)


def test_steps_with_experts_are_not_compiled(tmp_path: Path) -> None:
    folder = random_model(tmp_path, **MODELS["Mixtral"])
    with pytest.raises(InvalidConfig, match=re.escape("$.compile")):
        TorchCompiler(runtime_config(), folder)
