"""Adapters that the peft library wrote: read as it reads them, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.random_model import model_config
from neuron_runtime.adapters.peft import TARGETS, AdapterRules, open_adapter, read_adapter
from neuron_runtime.adapters.tensors import pairs
from neuron_runtime.errors import ExitCode, FatalError

pytestmark = [
    pytest.mark.slow,  # the library takes seconds to import, which processes that collect this file would all spend
    pytest.mark.filterwarnings("ignore"),  # it uses names that transformers will drop
]

RULES = AdapterRules(max_rank=16)
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def written(folder: Path, architecture: str = "LlamaForCausalLM", **lora: Any) -> tuple[Any, dict[str, Any]]:
    """A PEFT model with random adapter weights, saved to the folder, and the config.json of its base."""
    import peft

    config = model_config(architecture=architecture, head_dim=16)
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    made = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **lora}
    model = peft.get_peft_model(base, peft.LoraConfig(**made))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return model, config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True, "target_modules": r".*\.[qv]_proj"},
        {"rank_pattern": {"down_proj": 8, r"layers\.1\.self_attn\.q_proj": 2}, "target_modules": list(TARGETS)},
        {"layers_to_transform": [1], "target_modules": ["o_proj", "up_proj"]},
        {"layers_to_transform": 0, "target_modules": ["self_attn.k_proj"], "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_every_pair_is_the_difference_that_peft_computes(
    tmp_path: Path, architecture: str, lora: dict[str, Any]
) -> None:
    from peft.tuners.lora import LoraLayer

    model, config = written(tmp_path, architecture, **lora)
    facts = read_adapter(tmp_path, config, RULES)
    layers = {
        (layer, name.rpartition(".")[2]): module
        for layer, block in enumerate(model.base_model.model.model.layers)
        for name, module in block.named_modules()
        if isinstance(module, LoraLayer)
    }
    found = list(pairs(tmp_path))
    assert {(pair.layer, pair.module) for pair in found} == layers.keys()
    for pair in found:
        expected = layers[pair.layer, pair.module].get_delta_weight("default")
        torch.testing.assert_close(pair.scaling * pair.b @ pair.a, expected)
    assert set(facts.targets) == {target for _, target in layers}
    assert facts.rank == max(pair.a.shape[0] for pair in found)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"bias": "all", "architecture": "Qwen2ForCausalLM"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["norm"]},
        {"alpha_pattern": {"q_proj": 32}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"trainable_token_indices": [1, 2]},
    ],
    ids=str,
)
def test_what_peft_can_do_beyond_plain_lora_is_refused(tmp_path: Path, lora: dict[str, Any]) -> None:
    _, config = written(tmp_path, **lora)
    with pytest.raises(FatalError) as caught:
        read_adapter(tmp_path, config, RULES)
    assert caught.value.exit_code is ExitCode.ADAPTER_NOT_SUPPORTED


def test_fields_that_peft_adds_by_default_are_known(tmp_path: Path) -> None:
    written(tmp_path)
    assert open_adapter(tmp_path).pairs


def test_another_kind_of_adapter_is_refused(tmp_path: Path) -> None:
    import peft

    config = model_config()
    base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    made = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    peft.get_peft_model(base, made).save_pretrained(tmp_path)
    with pytest.raises(FatalError, match="peft_type IA3") as caught:
        open_adapter(tmp_path)
    assert caught.value.exit_code is ExitCode.ADAPTER_NOT_SUPPORTED


def test_an_adapter_saved_without_safetensors_is_refused(tmp_path: Path) -> None:
    import peft

    model, _ = written(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(peft.get_peft_model_state_dict(model), tmp_path / "adapter_model.bin")
    with pytest.raises(FatalError, match=r"adapter_model\.bin is not read, because it may run code"):
        open_adapter(tmp_path)
