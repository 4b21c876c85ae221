"""The fake NxD Inference answers a careful caller as transformers does, and a careless one as the real library would.

Each careless call is made twice: the strict fake refuses it with the number of the rule, the damaging one answers, and
its tokens differ from those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.nxdi import fake_nxdi
from helpers.torch_models import random_model, reference

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 2": {"num_kv_heads": 4},
    "Llama 3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "Llama 3.2": {"rope_theta": 500000.0, "tie_word_embeddings": True, "head_dim": 32},
    "Mistral": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "Qwen2.5": {"architecture": "Qwen2ForCausalLM"},
    "Qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "tie_word_embeddings": True},
}
KEYS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GREEDY = [1.0, 1.0, 1.0]


class Model:
    """A checkpoint and what transformers makes of it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = random_model(folder, **config)
        self.key = KEYS[config.get("architecture", "LlamaForCausalLM")]
        self.reference = reference(self.folder)

    @torch.inference_mode()
    def continuation(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(autouse=True)
def own_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))


def built(model: Model, folder: Path, **changes: Any) -> Any:
    """A compiled and loaded application for lines of 128 positions."""
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    application = MODEL_TYPES[model.key]["causal-lm"]
    config_class = application.get_config_cls()
    fields: dict[str, Any] = {
        "batch_size": 4,
        "ctx_batch_size": 1,
        "tkg_batch_size": 4,
        "seq_len": 128,
        "is_continuous_batching": True,
        "enable_bucketing": True,
        "context_encoding_buckets": [16, 32, 64, 128],
        "token_generation_buckets": [32, 64, 128],
        "torch_dtype": torch.float32,
        "on_device_sampling_config": OnDeviceSamplingConfig(dynamic=True, global_topk=64),
        "logical_nc_config": 1,
    } | changes
    fields = {name: value for name, value in fields.items() if value is not None}
    config = config_class(
        config_class.get_neuron_config_cls()(**fields), load_config=load_pretrained_config(str(model.folder))
    )
    loaded = application(str(model.folder), config)
    loaded.compile(str(folder))
    loaded.load(str(folder), skip_warmup=True)
    return loaded


class Lines:
    """A careful caller of the contiguous layout: greedy sequences in lines, every live line in every decode call."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.live: dict[int, list[int]] = {}
        self.starts: dict[int, int] = {}

    def prefill(self, line: int, prompt: list[int]) -> int:
        outputs = self.application.forward(
            input_ids=torch.tensor([prompt]),
            position_ids=torch.arange(len(prompt))[None],
            seq_ids=torch.tensor([line]),
            sampling_params=torch.tensor([GREEDY]),
        )
        self.live[line] = [*prompt, token := _tokens(outputs)[0]]
        self.starts[line] = len(prompt)
        return token

    def decode(self) -> None:
        lines = sorted(self.live)
        outputs = self.application.forward(
            input_ids=torch.tensor([[self.live[line][-1]] for line in lines]),
            position_ids=torch.tensor([[len(self.live[line]) - 1] for line in lines]),
            seq_ids=torch.tensor(lines),
            sampling_params=torch.tensor([GREEDY] * len(lines)),
        )
        for line, token in zip(lines, _tokens(outputs), strict=True):
            self.live[line].append(token)

    def answer(self, line: int) -> list[int]:
        return self.live[line][self.starts[line] :]


def _tokens(outputs: Any) -> list[int]:
    if outputs.logits is None or outputs.hidden_states == []:
        return outputs.tokens.tolist()
    return outputs.logits[:, -1].argmax(-1).tolist()


def prompts(count: int, lengths: tuple[int, ...] = (5, 23, 40, 9), seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


@pytest.fixture(params=["0.7", "0.9"])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


def _served(lines: Lines, model: Model, count: int = 4) -> None:
    for line, prompt in enumerate(prompts(count)):
        lines.prefill(line, prompt)
    for _ in range(12):
        lines.decode()
    for line, prompt in enumerate(prompts(count)):
        assert lines.answer(line) == model.continuation(prompt, 13)


@pytest.mark.parametrize("sampling", ["device", "host"])
@pytest.mark.parametrize("mode", ["strict", "damage"])
def test_a_careful_caller_gets_the_tokens_of_transformers(
    model: Model, tmp_path: Path, version: str, mode: Any, sampling: str
) -> None:
    with fake_nxdi(version, mode):
        changes = {"on_device_sampling_config": None} if sampling == "host" else {}
        _served(Lines(built(model, tmp_path, **changes)), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    model = Model(tmp_path / "model", **FAMILIES[family])
    with fake_nxdi("0.9"):
        _served(Lines(built(model, tmp_path / "artifact")), model, 2)
