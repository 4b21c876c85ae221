"""NxDNeuronConfig: its fields, its file, and the versions without which a file is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FILE = "neuron_config.json"


@dataclass
class NeuronConfig:
    checkpoint_id: str | None = None
    checkpoint_revision: str | None = None
    batch_size: int = 1
    max_batch_size: int | None = None
    continuous_batching: bool = False
    speculation_length: int = 0
    sequence_length: int = 128
    tp_degree: int = 1
    ep_degree: int = 1
    pp_degree: int = 1
    torch_dtype: torch.dtype = torch.bfloat16
    n_active_tokens: int | None = None
    max_context_length: int | None = None
    output_logits: bool = False
    fused_qkv: bool = False
    target: str | None = None
    on_device_sampling: bool = False
    max_topk: int = 256
    start_rank_id: int = 0
    local_ranks_size: int | None = None
    capacity_factor: float | None = None
    glu_mlp: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.torch_dtype, str):
            self.torch_dtype = getattr(torch, self.torch_dtype)
        self.n_active_tokens = self.n_active_tokens or self.sequence_length
        self.max_context_length = self.max_context_length or self.sequence_length
        self.max_batch_size = self.max_batch_size or self.batch_size
        self.local_ranks_size = self.local_ranks_size or self.tp_degree

    @property
    def chunk(self) -> int:
        return getattr(self, "prefill_chunk_size", 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "torch_dtype": str(self.torch_dtype).removeprefix("torch."),
            "_serialized_key": "NxDNeuronConfig",
            **_versions(),
        }

    def save_pretrained(self, folder: str) -> None:
        Path(folder, FILE).write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str) -> NeuronConfig:
        document = json.loads(Path(folder, FILE).read_text(encoding="utf-8"))
        for name, installed in _versions().items():
            if (found := document.pop(name)) != installed:
                raise ValueError(f"This neuron configuration has {name} {found}, but {installed} is installed.")
        del document["_serialized_key"]
        known = {one.name for one in fields(cls)}
        if unknown := document.keys() - known:
            raise TypeError(f"NxDNeuronConfig.__init__() got an unexpected keyword argument {min(unknown)!r}")
        return cls(**document)


def _versions() -> dict[str, str]:
    return {
        "optimum_neuron_version": version("optimum-neuron"),
        "neuronxcc_version": import_module("neuronxcc").__version__,
    }
