"""NeuronModelForCausalLM: export, save, load, `forward` and `prefill_chunk`.

Names and checks are those of the library. What it pads, sorts and fills up is here, what its graphs compute is in
`program`.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import fake_nxdi
import torch
import torch.nn.functional as F
from fake_nxdi import device, platform
from fake_nxdi.decoder import DROPPED, moved, parameters, read_checkpoint
from transformers import AutoConfig

from fake_optimum.config import NeuronConfig
from fake_optimum.program import Program, shape_of

TARGETS = {"trn1": "trn1", "trn1n": "trn1", "inf2": "trn1", "trn2": "trn2"}
GRAPHS_FILE, SHARDS = "model.pt", "checkpoint/weights/tp{rank}_sharded_checkpoint.safetensors"
TYPES = ("llama", "qwen2", "qwen3")
WRONG_ON_TWO_CORES = ("qwen2", "qwen3")


class NeuronModelForCausalLM:
    config_class: type[NeuronConfig]
    """Of the release."""

    def __init__(self, config: Any, neuron_config: NeuronConfig) -> None:
        self.config, self.neuron_config = config, neuron_config
        self.program: Program | None = None

    @classmethod
    def get_neuron_config(
        cls,
        model_name_or_path: str,
        instance_type: str,
        batch_size: int,
        sequence_length: int,
        tensor_parallel_size: int,
        **others: Any,
    ) -> NeuronConfig:
        has_chunks = "prefill_chunk_size" in cls.config_class.__dataclass_fields__
        if unknown := others.keys() - ({"prefill_chunk_size"} if has_chunks else set()):
            raise TypeError(f"get_neuron_config() got an unexpected keyword argument {min(unknown)!r}")
        config = AutoConfig.from_pretrained(model_name_or_path)
        if config.model_type not in TYPES:
            raise ValueError(f"Model type {config.model_type} is not supported for task text-generation in neuron")
        if config.dtype is None:
            raise ValueError("Unable to find `None` in the dtype mapping")
        if has_chunks and others.get("prefill_chunk_size") is None:
            others["prefill_chunk_size"] = 1024 if sequence_length > 1024 else 0
        garbage = config.model_type in WRONG_ON_TWO_CORES and batch_size > 1 and tensor_parallel_size == 2
        return cls.config_class(
            batch_size=batch_size,
            sequence_length=sequence_length,
            tp_degree=tensor_parallel_size,
            torch_dtype=config.dtype,
            target=TARGETS[instance_type],
            on_device_sampling=not garbage,
            fused_qkv=config.model_type != "qwen2",
            continuous_batching=batch_size > 1,
            **others,
        )

    # Export

    @classmethod
    def export(cls, model_id: str, neuron_config: NeuronConfig, load_weights: bool = False) -> NeuronModelForCausalLM:
        target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
        if target != neuron_config.target:
            raise ValueError(f"The compilation target is {neuron_config.target} but the variable is set to {target}")
        if load_weights:
            raise NotImplementedError("the fake exports without weights")
        work = os.environ.get("BASE_COMPILE_WORK_DIR")
        if work is None and fake_nxdi.strict():
            fake_nxdi.refuse("0.1-23", "BASE_COMPILE_WORK_DIR is not set: compilations share /tmp/nxd_model")
        for graph in ("chunked_prefill" if neuron_config.chunk else "context_encoding", "token_generation"):
            neff = Path(work or "/tmp/nxd_model", graph, "_tp0_bk0", "graph.neff")
            neff.parent.mkdir(parents=True, exist_ok=True)
            time.sleep(fake_nxdi.SETTINGS.compile_seconds)
            neff.write_text(graph, encoding="utf-8")
            fake_nxdi.COUNTS.compiled += 1
        return cls(AutoConfig.from_pretrained(model_id), neuron_config)

    def save(self, dest_path: str) -> None:
        self.config.save_pretrained(dest_path)
        self.neuron_config.save_pretrained(dest_path)
        graphs = {"neuron": self.neuron_config.to_dict(), "model": self.config.to_dict()}
        Path(dest_path, GRAPHS_FILE).write_text(json.dumps(graphs, default=str), encoding="utf-8")

    # Load

    @classmethod
    def from_pretrained(cls, model_id: str) -> NeuronModelForCausalLM:
        config = AutoConfig.from_pretrained(model_id)
        neuron = cls.config_class.from_pretrained(model_id)
        if neuron.target != TARGETS.get(platform.device()):
            raise ValueError(f"The model was compiled for {neuron.target} but this is {platform.device()}")
        if len(device.visible_cores()) < neuron.tp_degree:
            raise ValueError(f"The model requires at least {neuron.tp_degree} Neuron cores")
        graphs = json.loads(Path(model_id, GRAPHS_FILE).read_text(encoding="utf-8"))
        if graphs["neuron"] != neuron.to_dict():
            raise RuntimeError("shapes of the graphs are not those of neuron_config.json")
        model = cls(config, neuron)
        model.program = Program(shape_of(config), neuron, _weights(Path(model_id), neuron, config))
        device.DEVICE.take(neuron.tp_degree, model.program.num_bytes // neuron.tp_degree)
        return model

    # A call

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, seq_ids: torch.Tensor, sampling_params: torch.Tensor
    ) -> torch.Tensor:
        neuron = self.neuron_config
        if neuron.on_device_sampling:
            _validate(sampling_params, neuron.max_topk)
        prefill = input_ids.shape[-1] > 1 and not position_ids.min().item()
        if prefill and neuron.chunk:
            raise ValueError("When prefill_chunk_size > 0, call generate() or prefill_chunk() instead of forward()")
        return self._run("prefill" if prefill else "decode", input_ids, position_ids, seq_ids, sampling_params)

    def prefill_chunk(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, seq_ids: torch.Tensor, sampling_params: torch.Tensor
    ) -> torch.Tensor:
        return self._run("chunk", input_ids, position_ids, seq_ids, sampling_params)

    def _run(self, kind: str, *given: torch.Tensor) -> torch.Tensor:
        device.DEVICE.start_call()
        error: BaseException | None = None
        try:
            return self._wrapped(kind, *given)
        except BaseException as raised:
            error = raised
            raise
        finally:
            device.DEVICE.end_call(error)

    def _wrapped(
        self, kind: str, ids: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor, sampling: torch.Tensor
    ) -> torch.Tensor:
        neuron = self.neuron_config
        assert self.program is not None
        rows, width = ids.shape
        if kind == "prefill":
            padding = neuron.max_context_length - width  # type: ignore[operator]
            ids, positions = F.pad(ids, (0, padding), value=0), F.pad(positions, (0, padding), value=1)
        elif kind == "chunk" and width < neuron.chunk:
            more = neuron.chunk - width
            ids = torch.cat([ids, ids[:, -1:].expand(-1, more)], dim=-1)
            positions = torch.cat([positions, positions[:, -1:].expand(-1, more)], dim=-1)
        batch = neuron.batch_size if kind == "decode" or not neuron.continuous_batching else 1
        if rows > batch:
            raise NotImplementedError(f"the fake runs no more rows in a call than the {batch} of its graph")
        if rows < batch:
            if fake_nxdi.strict():
                fake_nxdi.refuse("3.4", f"{rows} rows of {batch}: the others get the first one's token and position")
            ids, positions, sampling = (
                torch.cat([one, one[:1].expand(batch - rows, -1)]) for one in (ids, positions, sampling)
            )
            named = seq_ids.tolist()
            seq_ids = torch.tensor(named + [one for one in range(batch) if one not in named])
        undo = None
        if kind == "decode" and neuron.continuous_batching and seq_ids.tolist() != list(range(batch)):
            undo, order = seq_ids, torch.argsort(seq_ids)
            ids, positions, sampling = ids[order], positions[order], sampling[order]
        outputs = self.program.run(kind, ids.long(), positions.long(), seq_ids.long(), sampling)
        return (outputs if undo is None else outputs[undo])[:rows]


def _weights(folder: Path, neuron: NeuronConfig, config: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if not (folder / "checkpoint").is_dir():
        found = read_checkpoint(folder)
        read = parameters(shape_of(config), config)
        # The library moves what it reads, adds ranks of its own, and says what no module has.
        dropped = [*(moved(name) for name in found if name not in read), "rank_util.rank"]
        warnings.warn(f"{DROPPED}{dropped}", stacklevel=1)
        return {name: tensor for name, tensor in found.items() if name in read}
    parts = [load_file(folder / SHARDS.format(rank=rank)) for rank in range(neuron.tp_degree)]
    return parts[0]  # each has all, since all ranks compute the same here


def _validate(parameters: torch.Tensor, max_topk: int) -> None:
    if parameters.shape[1] != 3:
        raise ValueError(f"Expected tensor of shape (batch_size, 3), but got {parameters.shape}")
    top_k, top_p, temperature = parameters.unbind(1)
    if not bool(((top_k == -1) | ((top_k > 0) & (top_k <= max_topk))).all()):
        raise ValueError(f"Invalid top-k values found: {top_k}")
    if not bool(((top_p > 0) & (top_p <= 1)).all()):
        raise ValueError(f"Invalid top-p values found: {top_p}")
    if not bool((temperature > 0).all()):
        raise ValueError(f"Invalid temperature values found: {temperature}")
    if fake_nxdi.strict() and bool((top_k == -1).any()):
        fake_nxdi.refuse("3.4", "top_k -1 masks every candidate alike: it draws uniformly")
