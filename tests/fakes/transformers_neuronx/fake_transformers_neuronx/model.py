"""The models: construct, read weights, compile or load, run. After `base.py` and `llama/model.py`."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fake_nxdi
import torch
from fake_nxdi import device
from fake_nxdi.decoder import Decoder, Shape, read_checkpoint

from fake_transformers_neuronx.config import GenerationConfig, NeuronConfig
from fake_transformers_neuronx.program import Program, nrt_error, sample

AMP = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KV_SHARD_PAD = 128
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def find(buckets: list[int], size: int) -> int:
    """The smallest bucket that holds a size, or the largest one."""
    return buckets[bisect.bisect_left(buckets, size, hi=len(buckets) - 1)]


class NeuronModel:
    """What both classes have in common."""

    model_type = ""
    scalings: tuple[str | None, ...] = (None,)
    shards_sequences = False

    def __init__(
        self,
        config: Any,
        *,
        n_positions: Any = 2048,
        batch_size: int = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        context_length_estimate: Any = None,
        neuron_config: NeuronConfig | None = None,
    ) -> None:
        self.neuron_config = neuron_config or NeuronConfig()
        if self.neuron_config.continuous_batching is None:
            raise NotImplementedError("the fake has continuous batching only")
        if not isinstance(n_positions, list) or not isinstance(context_length_estimate, list):
            raise NotImplementedError("the fake wants lists of buckets")
        self.config, self.tp_degree, self.dtype = config, tp_degree, AMP[amp]
        self.lines = batch_size
        expected = self.neuron_config.continuous_batching.batch_size_for_shared_caches
        assert expected == batch_size, f"invalid batch_size_for_shared_caches ({expected}), {batch_size} is expected"
        self.token_buckets, self.context_buckets = sorted(n_positions), sorted(context_length_estimate)
        assert self.token_buckets[-1] >= self.context_buckets[-1], "Max context_length_estimate"
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.shards = 1
        if self.neuron_config.shard_over_sequence:
            if not self.shards_sequences:
                raise TypeError("pre_layer() takes no core_id")
            assert tp_degree % kv_heads == 0, f"tp_degree {tp_degree} not divisble by n_kv_heads {kv_heads}"
            self.shards = tp_degree // kv_heads
            self.token_buckets[-1] += KV_SHARD_PAD
        # AutoConfig takes theta and scaling of new files apart.
        rope = getattr(config, "rope_parameters", None) or {}
        scaling = getattr(config, "rope_scaling", None) or rope
        kind = scaling.get("rope_type", scaling.get("type")) if scaling else None
        if kind not in (*self.scalings, "default"):
            if self.model_type == "llama":
                raise ValueError(f"Only default and llama3 ropes scaling types are supported. Received {kind}")
            scaling = {}
        self.shape = Shape(
            model_type=self.model_type,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_size=config.hidden_size // config.num_attention_heads,
            epsilon=config.rms_norm_eps,
            rope_theta=float(getattr(config, "rope_theta", None) or 10000),
            rope_scaling=dict(scaling) if kind not in (None, "default") else None,
            max_positions=config.max_position_embeddings,
            tied=bool(config.tie_word_embeddings),
            pad_token=0,
        )
        self._weights: dict[str, torch.Tensor] = {}
        self._folder = ""
        self._neffs: dict[str, bytes] = {}
        self._program: Program | None = None
        self._parameters = torch.ones(batch_size, 3)
        if generation := self.neuron_config.on_device_generation:
            generation.vocab_size = config.vocab_size

    # Weights and graphs

    def load_state_dict_dir(self, folder: str) -> None:
        names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
        if not any(Path(folder, name).exists() for name in names):
            raise FileNotFoundError(f"Can not find model.safetensors or pytorch_model.bin in {folder}")
        self._weights = {name: tensor for name, tensor in read_checkpoint(Path(folder)).items() if ".bias" not in name}

    def _read_weights(self) -> dict[str, torch.Tensor]:
        quant = self.neuron_config.quant
        if quant is None:
            return self._weights
        if quant.quant_dtype != "s8":
            raise NotImplementedError("the fake quantizes to s8")
        return {name: quantized(name, tensor, quant.quantize_attn) for name, tensor in self._weights.items()}

    def _graphs(self) -> dict[str, str]:
        """Name of the file of each graph, by the hash of what is compiled."""
        names = [f"context-seqlen{size}-batch1" for size in self.context_buckets]
        names += [f"token-seqlen{size}-batch{self.lines}" for size in self.token_buckets]
        settings = {
            name: repr(getattr(value, "__dict__", value))
            for name, value in vars(self.neuron_config).items()
            if name not in ("compilation_worker_count", "on_device_generation")
        }
        generation = self.neuron_config.on_device_generation
        seen = {
            "shape": asdict(self.shape),
            "dtype": str(self.dtype),
            "cores": self.tp_degree,
            "settings": settings,
            "generates": generation and [generation.global_top_k, generation.dynamic, generation.per_batch_line],
            "weights": {name: list(tensor.shape) for name, tensor in self._weights.items()},
            "zero": [name for name, tensor in self._read_weights().items() if not tensor.count_nonzero()]
            if self.neuron_config.quant
            else [],
        }
        text = json.dumps(seen, sort_keys=True, default=str)
        return {name: hashlib.sha256(f"{name} {text}".encode()).hexdigest()[:20] + ".neff" for name in names}

    def cpu_compile(self) -> None:
        if not self._weights:
            raise RuntimeError("the weights have not been read")
        if not fake_nxdi.SETTINGS.compiler:
            raise FileNotFoundError(2, "No such file or directory", "neuronx-cc")
        if fake_nxdi.strict() and "NEURON_COMPILE_CACHE_URL" not in os.environ:
            fake_nxdi.refuse("cache", "NEURON_COMPILE_CACHE_URL is not set: compilations of a machine share a folder")
        for name, file in self._graphs().items():
            self._neffs[file] = name.encode()
            fake_nxdi.COUNTS.compiled += 1

    def save(self, directory: str) -> None:
        assert self._neffs, "cannot save a model which has not been successfully compiled"
        os.makedirs(directory, exist_ok=True)
        for file, content in self._neffs.items():
            Path(directory, file).write_bytes(content)

    def load(self, directory: str) -> None:
        self._folder = directory

    def to_neuron(self) -> None:
        weights = self._read_weights()
        files = list(self._graphs().values())
        if not self._folder:
            self.cpu_compile()
        elif missing := [file for file in files if not Path(self._folder, file).is_file()]:
            raise FileNotFoundError(f"Could not find a matching NEFF for your HLO in this directory. {missing}")
        decoder = Decoder(self.shape, weights, self.dtype)
        device.DEVICE.take(self.tp_degree, decoder.num_bytes // self.tp_degree)
        self._program = Program(decoder, self.lines, self.token_buckets[-1], self.shards)

    # Calls

    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        device.DEVICE.start_call()
        given = generation_config
        assert self.neuron_config.on_device_generation is not None
        assert given.per_batch_line == self.neuron_config.on_device_generation.per_batch_line
        parameters = [given.top_k, given.top_p, given.temperature]
        assert all(isinstance(one, list) and len(one) == self.lines for one in parameters), "must be of same size"
        self._parameters = torch.tensor(parameters).T.contiguous()
        device.DEVICE.end_call(None)

    def __call__(self, input_ids: Any, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        assert self._program is not None, "the model is not loaded"
        device.DEVICE.start_call()
        error: BaseException | None = None
        try:
            return self._forward(input_ids, cache_ids, start_ids)
        except BaseException as raised:
            error = raised
            self._program.scramble()
            raise
        finally:
            device.DEVICE.end_call(error)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 1 and int(positions.flatten()[0]) == 0:
            return self._encode(ids, positions, lines)
        if ids.shape[1] > 1:
            raise NotImplementedError("the fake has no speculation")
        full_ids = torch.zeros(self.lines, 1, dtype=ids.dtype)
        full_positions = torch.zeros(self.lines, 1, dtype=ids.dtype)
        place = lines.flatten().unsqueeze(-1).to(torch.int64)
        full_ids.scatter_(dim=0, index=place, src=ids)
        full_positions.scatter_(dim=0, index=place, src=positions)
        furthest = int(full_positions.max())
        size = next(size for size in self.token_buckets if size >= furthest + 1)
        logits = self._run(f"token-seqlen{size}-batch{self.lines}", full_ids, full_positions, size, lines.tolist())
        return self._result(logits, torch.arange(self.lines))[lines.to(torch.long)]

    def _encode(self, ids: torch.Tensor, positions: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        rows, width = ids.shape
        size = find(self.context_buckets, width)
        assert rows == len(positions), f"invalid n_active_seqs ({rows} vs {len(positions)})"
        assert width <= size, f"invalid input prompt length ({width} <= {size})"
        last = positions.max(dim=1).values.tolist()
        if width < size:
            ids = torch.nn.functional.pad(ids, (0, size - width))
            positions = torch.arange(size).expand(rows, size)
        found = []
        # One prompt after another, whatever the number of them: virtual dynamic batching.
        for row, line in enumerate(lines.tolist()):
            one = slice(row, row + 1)
            logits = self._run(f"context-seqlen{size}-batch1", ids[one], positions[one], line, last[row])
            found.append(self._result(logits, lines[one]))
        return torch.cat(found)

    def _run(self, graph: str, *given: Any) -> torch.Tensor:
        assert self._program is not None
        ready_at = device.DEVICE.run(graph)
        run = self._program.prefill if graph.startswith("context") else self._program.decode
        try:
            logits = run(*given)
        except (IndexError, StopIteration) as error:
            raise nrt_error(graph, error) from error
        device.Device.wait_until(ready_at)
        return logits

    def _result(self, logits: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """Tokens `[rows, 1]`, or logits `[rows, vocabulary]`."""
        generation = self.neuron_config.on_device_generation
        if generation is None:
            return logits.float()
        if not (generation.dynamic and generation.do_sample and generation.per_batch_line):
            return logits.argmax(-1, keepdim=True).int()
        assert generation.global_top_k
        return sample(logits.float(), self._parameters[lines.long()], generation.global_top_k).int()


def quantized(name: str, tensor: torch.Tensor, attention: bool) -> torch.Tensor:
    """int8 weights as `quantize.maybe_quantize_weights` makes them, multiplied by their scales again."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module not in PROJECTIONS or (not attention and "self_attn" in name):
        return tensor
    wide = tensor.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    return ((wide / scales).round().clamp(-128, 127) * scales).to(tensor.dtype)


class LlamaForSampling(NeuronModel):
    model_type = "llama"
    scalings = (None, "llama3")
    shards_sequences = True


class MistralForSampling(NeuronModel):
    model_type = "mistral"
