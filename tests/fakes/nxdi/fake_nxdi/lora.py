"""LoRA as NxD Inference serves it: its configuration, its manager of adapters, and the seats of a loaded program.

Adapters are added at run time only (dynamic, with a place for rows without one), as 0.9 can. Rules are numbered "L" and
the section of the contract. What the library accepts and computes wrongly is refused in strict mode; in damage mode it
is computed as wrongly.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

import fake_nxdi

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = {name: "self_attn" if name in TARGETS[:4] else "mlp" for name in TARGETS}

Weights = dict[str, tuple[torch.Tensor, torch.Tensor, float]]
"""By module (`layers.0.self_attn.q_proj`): A `[rank, in]`, B `[out, rank]`, scaling. Empty: the base model."""


class _Config:
    """LoraServingConfig of 0.7 and 0.8."""

    def __init__(
        self,
        *,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_cpu_loras: int = 100,
        batch_size: int = 1,
        target_modules: Any = None,
        lora_bias: str = "none",
        lora_ckpt_paths: Any = None,
        lora_ckpt_paths_cpu: Any = None,
        lora_ckpt_json: str | None = None,
        lora_memory_transpose: bool = True,
        lora_shard_linear_layer: bool = True,
        is_context_encoding: bool = False,
        dynamic_multi_lora: bool = False,
        eviction_policy: str = "lru",
        lfu_decay_period: int = 128,
        base_model_quantized: bool = False,
    ) -> None:
        if lora_ckpt_paths or lora_ckpt_paths_cpu or lora_ckpt_json:
            raise NotImplementedError("the fake adds adapters at run time only")
        self.__dict__.update({name: value for name, value in locals().items() if name != "self"})


class _ConfigWithBase(_Config):
    """That of 0.9. Read back from its own JSON it counts the base model twice, as the real one does."""

    def __init__(
        self,
        *,
        max_loras: int = 1,
        max_cpu_loras: int = 100,
        enable_base_model_only: bool = False,
        **more: Any,
    ) -> None:
        added = int(enable_base_model_only)
        super().__init__(max_loras=max_loras + added, max_cpu_loras=max_cpu_loras + added, **more)
        self.enable_base_model_only = enable_base_model_only


def config_class() -> type[_Config]:
    """The class of the version that is emulated."""
    base = _ConfigWithBase if fake_nxdi.has(9) else _Config
    return type("LoraServingConfig", (base,), {})


def check(neuron: Any) -> None:
    """What fails when the graphs are traced, and what the fake has not."""
    config = neuron.lora_config
    if not config.dynamic_multi_lora or not getattr(config, "enable_base_model_only", False):
        raise NotImplementedError("the fake has adapters with dynamic_multi_lora and enable_base_model_only only")
    if neuron.fused_qkv:
        raise ValueError(f"Target modules {config.target_modules} not found in the base model.")
    if getattr(neuron, "token_generation_batches", None):
        raise RuntimeError("einsum(): operands do not broadcast: batch buckets with LoRA")
    if config.batch_size != neuron.batch_size:
        raise IndexError(f"index {neuron.batch_size - 1} is out of bounds for {config.batch_size} seats")
    if strange := sorted({*(config.target_modules or ())} - {*TARGETS}):
        raise TypeError(f"forward() got an unexpected keyword argument 'adapter_ids' in {strange[0]}")
    if not config.target_modules:
        raise ValueError("Target modules are not set for the base model.")
    if neuron.save_sharded_checkpoint:
        raise RuntimeError("the first swap of an adapter: shapes [n, in, r] and [in, r] do not match")


def facts_of(neuron: Any) -> dict[str, Any] | None:
    """What of the configuration is in the graphs."""
    config = neuron.lora_config
    if config is None:
        return None
    return {
        "loras": config.max_loras,
        "rank": config.max_lora_rank,
        "seats": config.batch_size,
        "targets": sorted(config.target_modules),
    }


class Seats:
    """Weights on the device: those of each adapter's position, and a copy for each seat of the batch."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.positions: list[Weights] = [{} for _ in range(facts["loras"])]
        self._seats: list[Weights] = [{} for _ in range(facts["seats"])]

    def bind(self, adapters: torch.Tensor, seq_ids: torch.Tensor) -> list[Weights]:
        """A prompt's call: each row's seat gets the weights of its adapter."""
        rows = []
        for position, seat in zip(adapters.tolist(), seq_ids.tolist(), strict=True):
            if not 0 <= position < len(self.positions) or not 0 <= seat < len(self._seats):
                raise IndexError(f"index out of range in self (adapter {position}, seat {seat})")
            self._seats[seat] = self.positions[position]
            rows.append(self._seats[seat])
        return rows

    def of_rows(self, seq_ids: torch.Tensor, real: list[bool]) -> list[Weights]:
        """A decode call: row i has what seat i has, whatever its sequence is."""
        if fake_nxdi.strict():
            for row, seat in enumerate(seq_ids.tolist()):
                if row < len(real) and real[row] and seat != row:
                    fake_nxdi.refuse("L2.4", f"decode row {row} of sequence {seat} uses the adapter of seat {row}")
        return self._seats[: len(seq_ids)]


class LoraModelManager:
    """Which adapters the library knows, has in the host's memory, and has on the device."""

    def __init__(self, config: Any) -> None:
        self.lora_config = config
        self.lora_adapter_id_mapping: dict[str, int] = {}
        self.global_adapter_id = 1
        self._folders: dict[int, str] = {}
        self._host: dict[int, tuple[float, Weights]] = {0: (0.0, {})}
        self._device: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        self._model_type = ""

    def add_adapter(self, lora_request: Any) -> bool:
        name, folder = lora_request.lora_name, str(lora_request.lora_path)
        if name not in self.lora_adapter_id_mapping:
            self.lora_adapter_id_mapping[name] = self.global_adapter_id
            self.global_adapter_id += 1
        number = self.lora_adapter_id_mapping[name]
        known = self._folders.setdefault(number, folder)
        if known != folder and fake_nxdi.strict():
            fake_nxdi.refuse("L2.5", f"adapter {name} gets another folder, and its old weights may go on serving")
        if number not in self._host:
            weights = read(Path(folder), self.lora_config)
            if len(self._host) == self.lora_config.max_cpu_loras:
                del self._host[min((one for one in self._host if one), key=lambda one: self._host[one][0])]
            self._host[number] = (time.monotonic(), weights)
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        del self._host[adapter_id]
        return True

    def swap(self, seats: Seats, adapter_ids: torch.Tensor) -> torch.Tensor:
        """Before a prompt's call: puts its adapters on the device; returns their positions."""
        numbers = adapter_ids.tolist()
        for number in numbers:
            if number not in self._host:
                raise KeyError(number)  # a streamed adapter has no path to be read again from
            weights = self._host[number][1]
            self._host[number] = (time.monotonic(), weights)
            if number not in self._device:
                taken = {position for _, position in self._device.values()}
                free = [one for one in range(len(seats.positions)) if one not in taken]
                if not free:
                    oldest = min((one for one in self._device if one), key=lambda one: self._device[one][0])
                    free = [self._device.pop(oldest)[1]]
                seats.positions[free[0]] = weights
                self._device[number] = (0.0, free[0])
            self._device[number] = (time.monotonic(), self._device[number][1])
        if missing := [number for number in numbers if number not in self._device]:
            raise ValueError(f"{missing[0]} is not in list")
        return torch.tensor([self._device[number][1] for number in numbers], dtype=adapter_ids.dtype)


def read(folder: Path, config: Any) -> Weights:
    """An adapter in PEFT's format, as the library reads it."""
    from safetensors.torch import load_file

    described = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.iterdir()):
        # Whatever is there, the last one wins.
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        elif path.suffix in (".bin", ".pt"):
            tensors = torch.load(path)
    if fake_nxdi.strict():
        _check(described, tensors)
    found: Weights = {}
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        parts = name.split(".")
        layer, module = parts[parts.index("layers") + 1], parts[parts.index("lora_A") - 1]
        if module not in config.target_modules:
            if fake_nxdi.strict():
                fake_nxdi.refuse("L2.5", f"{module} has no adapter in the graphs: the base model answers")
            continue
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        rank = a.shape[0]
        if rank == 1:
            raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got 1)")
        if rank > config.max_lora_rank:
            raise RuntimeError(
                f"The size of tensor a ({config.max_lora_rank}) must match the size of tensor b ({rank})"
            )
        alpha = described.get("lora_alpha") or rank
        scaling = alpha / rank**0.5 if described.get("use_rslora") else alpha / rank
        found[f"layers.{layer}.{BLOCKS[module]}.{module}"] = (a, b, scaling)
    return found


def _check(described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for key in ("alpha_pattern", "use_dora", "modules_to_save"):
        if described.get(key):
            fake_nxdi.refuse("L2.2", f"{key} is ignored: wrong tokens")
    if described.get("lora_alpha") == 0:
        fake_nxdi.refuse("L2.2", "lora_alpha 0 counts as scaling 1")
    if described.get("bias", "none") != "none":
        raise IndexError("list index out of range")
    if any("lora_embedding" in name for name in tensors):
        fake_nxdi.refuse("L2.2", "embeddings of an adapter are ignored")
