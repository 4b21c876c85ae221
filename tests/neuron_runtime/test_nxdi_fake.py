"""The fake NxD Inference answers a careful caller as transformers does, and a careless one as the real library would.

Each careless call is made twice: the strict fake refuses it with the number of the rule, the damaging one answers, and
its tokens differ from those of transformers. With NXDI_UNDER_TEST=installed the tests of damage run on the NxD
Inference that is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import signature
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.eagle_heads import write_head
from helpers.nxdi import fake_nxdi, installed, process_environment
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
OLDER = [pytest.param(version, marks=pytest.mark.long) for version in ("0.7", "0.8")]
EACH = [
    ("0.9", "strict"),
    *(
        pytest.param(version, mode, marks=pytest.mark.long)
        for version, mode in (("0.9", "damage"), *product(("0.7", "0.8"), ("strict", "damage")))
    ),
]
"""Releases and modes. Our own tests use the newest release in strict mode; `make test-long` tries the others."""


class Model:
    """A checkpoint and what transformers makes of it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = random_model(folder, **config)
        self.key = KEYS[config.get("architecture", "LlamaForCausalLM")]
        self.reference = reference(self.folder)
        self._known: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def continuation(self, prompt: list[int], count: int) -> list[int]:
        """Computed once per prompt, without a cache of keys and values."""
        answer = self._known.setdefault(tuple(prompt), [])
        while len(answer) < count:
            answer.append(int(self.reference(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
        return answer[:count]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(autouse=True)
def own_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))


@contextmanager
def library(version: str = "0.9", mode: Any = "strict", **settings: Any) -> Iterator[Any]:
    """The fake; or, for what it does in damage mode, the installed library if that has the version."""
    if not installed():
        with fake_nxdi(version, mode, **settings) as fake:
            yield fake
        return
    import neuronx_distributed_inference

    if mode == "strict" or not neuronx_distributed_inference.__version__.startswith(version):
        pytest.skip("only the fake does that")
    yield None


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
    fused = fields.pop("fused", None)
    config = config_class(
        config_class.get_neuron_config_cls()(**fields),
        load_config=load_pretrained_config(str(model.folder)),
        **({"fused_spec_config": fused(application, fields)} if fused else {}),
    )
    loaded = application(str(model.folder), config)
    loaded.compile(str(folder / "artifact"))
    loaded.load(str(folder / "artifact"), skip_warmup=True)
    return loaded


def in_blocks(model: Model, folder: Path, **changes: Any) -> Any:
    """The same for blocks of 32 positions, with prefix caching."""
    fields: dict[str, Any] = {
        "seq_len": 512,
        "is_block_kv_layout": True,
        "is_prefix_caching": True,
        "pa_num_blocks": 64,
        "pa_block_size": 32,
        "context_encoding_buckets": [128, 256],
        "prefix_buckets": [128, 256, 512],
        "token_generation_buckets": [128, 512],
        "logical_nc_config": 2,
    }
    return built(model, folder, **fields | changes)


class Lines:
    """A careful caller of the contiguous layout: greedy sequences in lines, every live line in every decode call."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.live: dict[int, list[int]] = {}
        self.starts: dict[int, int] = {}

    def prefill(self, line: int, prompt: list[int], **changes: Any) -> int:
        ids, positions = torch.tensor([prompt]), torch.arange(len(prompt))[None]
        if len(prompt) == 1:
            longest = self.application.neuron_config.max_context_length
            ids = torch.nn.functional.pad(ids, (0, longest - 1))
            positions = torch.zeros_like(ids)
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "seq_ids": torch.tensor([line]),
            "sampling_params": torch.tensor([GREEDY]),
        }
        token = tokens_of(self.application.forward(**arguments | changes))[0]
        self.live[line] = [*prompt, token]
        self.starts[line] = len(prompt)
        return token

    def arguments(self, lines: list[int]) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.tensor([[self.live[line][-1]] for line in lines]),
            "position_ids": torch.tensor([[len(self.live[line]) - 1] for line in lines]),
            "seq_ids": torch.tensor(lines),
            "sampling_params": torch.tensor([GREEDY] * len(lines)),
        }

    def decode(self, lines: list[int] | None = None, **changes: Any) -> None:
        lines = sorted(self.live) if lines is None else lines
        outputs = self.application.forward(**self.arguments(lines) | changes)
        for line, token in zip(lines, tokens_of(outputs), strict=True):
            self.live[line].append(token)

    def answer(self, line: int) -> list[int]:
        return self.live[line][self.starts[line] :]


class Blocks:
    """A careful caller of the block layout: any rows in a call, prompts in segments, prefixes of others' blocks."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.size = application.neuron_config.pa_block_size
        self.free = list(range(1, application.neuron_config.pa_num_blocks))
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.starts: dict[int, int] = {}

    def _extend(self, sequence: int, end: int) -> None:
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.size < end:
            table.append(self.free.pop())

    def slots(self, sequence: int, start: int, end: int) -> list[int]:
        table = self.tables[sequence]
        return [table[at // self.size] * self.size + at % self.size for at in range(start, end)]

    def prefill(self, sequence: int, prompt: list[int], start: int = 0, end: int | None = None, **changes: Any) -> int:
        """Computes `prompt[start:end]`; what comes before is in the sequence's blocks."""
        end = len(prompt) if end is None else end
        self._extend(sequence, end + 1)
        arguments = {
            "input_ids": torch.tensor([prompt[:end]]),
            "position_ids": torch.arange(end)[None],
            "seq_ids": torch.tensor([sequence]),
            "sampling_params": torch.tensor([GREEDY]),
            "slot_mapping": torch.tensor([self.slots(sequence, start, end)]),
            "block_table": torch.tensor([self.tables[sequence]]),
            "full_context_lens": torch.tensor([[end]]),
            "computed_context_lens": torch.tensor([[start]]),
        }
        token = tokens_of(self.application.forward(**arguments | changes))[0]
        self.tokens[sequence] = [*prompt, token]
        self.starts[sequence] = len(prompt)
        return token

    def decode(self, sequences: list[int] | None = None, **changes: Any) -> None:
        sequences = list(self.tokens) if sequences is None else sequences
        lengths = [len(self.tokens[sequence]) for sequence in sequences]
        for sequence, length in zip(sequences, lengths, strict=True):
            self._extend(sequence, length + 1)
        width = max(len(self.tables[sequence]) for sequence in sequences)
        at = torch.tensor(lengths)[:, None] - 1
        arguments = {
            "input_ids": torch.tensor([[self.tokens[sequence][-1]] for sequence in sequences]),
            "position_ids": at,
            "seq_ids": torch.tensor(sequences),
            "sampling_params": torch.tensor([GREEDY] * len(sequences)),
            "slot_mapping": torch.tensor([self.slots(s, n - 1, n) for s, n in zip(sequences, lengths, strict=True)]),
            "block_table": torch.tensor([self._padded(sequence, width) for sequence in sequences]),
            "full_context_lens": at + 1,
            "computed_context_lens": at,
        }
        outputs = self.application.forward(**arguments | changes)
        for sequence, token in zip(sequences, tokens_of(outputs), strict=True):
            self.tokens[sequence].append(token)

    def _padded(self, sequence: int, width: int) -> list[int]:
        return self.tables[sequence] + [0] * (width - len(self.tables[sequence]))

    def answer(self, sequence: int) -> list[int]:
        return self.tokens[sequence][self.starts[sequence] :]


def tokens_of(outputs: Any) -> list[int]:
    if fused := getattr(outputs, "fused_outputs", None):
        return fused[0][:, 0].tolist()
    if outputs.tokens.dim() == 1:
        return outputs.tokens.tolist()
    return outputs.logits[:, -1].argmax(-1).tolist()


def prompts(count: int, lengths: tuple[int, ...] = (5, 23, 40, 9), seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


@pytest.fixture(params=["0.9", *OLDER])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


# Careful callers


def _served(caller: Lines | Blocks, model: Model, lengths: tuple[int, ...] = (5, 23, 40, 9), count: int = 4) -> None:
    wanted = {row: (prompt, model.continuation(prompt, 13)) for row, prompt in enumerate(prompts(count, lengths))}
    for row, (prompt, _) in wanted.items():
        caller.prefill(row, prompt)
    for _ in range(12):
        caller.decode()
    for row, (_, answer) in wanted.items():
        assert caller.answer(row) == answer


@pytest.mark.parametrize("sampling", ["device", "host"])
@pytest.mark.parametrize(("version", "mode"), EACH)
def test_a_careful_caller_gets_the_tokens_of_transformers(
    model: Model, tmp_path: Path, version: str, mode: Any, sampling: str
) -> None:
    with library(version, mode):
        changes = {"on_device_sampling_config": None} if sampling == "host" else {}
        _served(Lines(built(model, tmp_path, **changes)), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    model = Model(tmp_path / "model", **FAMILIES[family])
    with library("0.9", "damage"):
        _served(Lines(built(model, tmp_path)), model, count=2)


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_lines_come_and_go_and_one_token_is_a_prompt(model: Model, tmp_path: Path, version: str, mode: Any) -> None:
    with library(version, mode):
        lines = Lines(built(model, tmp_path))
        first, second, third = prompts(3, (30, 1, 12))
        lines.prefill(2, first)
        lines.decode()
        lines.prefill(0, second)
        for _ in range(20):
            lines.decode()
        del lines.live[2]
        lines.decode()
        lines.prefill(2, third)
        for _ in range(3):
            lines.decode()
        assert lines.answer(0) == model.continuation(second, 25)
        assert lines.answer(2) == model.continuation(third, 4)


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_blocks_hold_sequences_of_any_rows(model: Model, tmp_path: Path, version: str, mode: Any) -> None:
    with library(version, mode):
        blocks = Blocks(in_blocks(model, tmp_path))
        _served(blocks, model, (5, 140, 1, 60))
        fifth = prompts(1, (33,), seed=5)[0]
        blocks.prefill(99, fifth)
        for sequences in ([99, 1], [99], [3, 99, 0]):
            blocks.decode(sequences)
        assert blocks.answer(99) == model.continuation(fifth, 4)
        assert blocks.answer(1) == model.continuation(prompts(4, (5, 140, 1, 60))[1], 14)


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_prefixes_are_shared_and_prompts_come_in_segments(
    model: Model, tmp_path: Path, version: str, mode: Any
) -> None:
    with library(version, mode):
        blocks = Blocks(in_blocks(model, tmp_path))
        prompt = prompts(1, (300,))[0]
        blocks.prefill(0, prompt, 0, 130)
        blocks.prefill(0, prompt, 130, 256)
        assert blocks.prefill(0, prompt, 256) == model.continuation(prompt, 1)[0]
        # The second prompt shares seven blocks; not all of the eighth is the same.
        other = [*prompt[:240], *prompts(1, (37,), seed=8)[0]]
        blocks.tables[1] = blocks.tables[0][:7]
        blocks.prefill(1, other, 224)
        for _ in range(3):
            blocks.decode()
        assert blocks.answer(0) == model.continuation(prompt, 4)
        assert blocks.answer(1) == model.continuation(other, 4)


# Careless callers: silent damage

Pairs = list[tuple[list[int], list[int]]]
"""What a caller got, and what transformers has."""


def unsorted_rows(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder))
    given = prompts(4)
    for line, prompt in enumerate(given):
        lines.prefill(line, prompt)
    lines.decode([3, 1, 2, 0])
    return [(lines.answer(line), model.continuation(prompt, 2)) for line, prompt in enumerate(given)]


def absent_line(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder))
    short, long = prompts(2)
    lines.prefill(0, short)
    lines.prefill(1, long)
    for _ in range(4):
        lines.decode([0])
    for _ in range(4):
        lines.decode()
    return [(lines.answer(1), model.continuation(long, 5))]


def dummy_row(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder))
    given = prompts(2)
    for line, prompt in enumerate(given):
        lines.prefill(line, prompt)
    arguments = lines.arguments([0, 1])
    zero = {name: torch.cat((tensor, torch.zeros_like(tensor[:1]))) for name, tensor in arguments.items()}
    zero["seq_ids"][2], zero["sampling_params"][2] = 2, torch.tensor(GREEDY)
    found = tokens_of(lines.application.forward(**zero))
    for line in (0, 1):
        lines.live[line].append(found[line])
    lines.decode()
    return [(lines.answer(line), model.continuation(prompt, 3)) for line, prompt in enumerate(given)]


def line_twice(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder))
    given = prompts(4)
    for line, prompt in enumerate(given):
        lines.prefill(line, prompt)
    lines.decode([0, 0, 2, 3])
    return [(lines.answer(0), model.continuation(given[0], 2))]


def lone_token(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder))
    pairs = []
    for line, prompt in enumerate(prompts(4, (1,))):
        lines.prefill(line, prompt, input_ids=torch.tensor([prompt]), position_ids=torch.zeros(1, 1, dtype=torch.long))
        pairs.append((lines.answer(line), model.continuation(prompt, 1)))
    return pairs


def ramp(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder))
    prompt = prompts(1)[0]
    padded = torch.tensor([prompt + [0] * 6])
    lines.prefill(0, prompt, input_ids=padded, position_ids=torch.arange(11)[None])
    lines.decode()
    return [(lines.answer(0), model.continuation(prompt, 2))]


def too_few_parameters(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder, **DETERMINISTIC))
    given = prompts(2)
    for line, prompt in enumerate(given):
        lines.prefill(line, prompt)
    for _ in range(3):
        lines.decode(sampling_params=torch.tensor([[64.0, 1.0, 9.0]]))
    return [(lines.answer(1), model.continuation(given[1], 4))]


def top_k_zero(model: Model, folder: Path) -> Pairs:
    """At so low a temperature only the likeliest token has a chance."""
    lines = Lines(built(model, folder, **DETERMINISTIC))
    prompt = prompts(1)[0]
    lines.prefill(0, prompt, sampling_params=torch.tensor([[0.0, 1.0, 0.0001]]))
    return [(lines.answer(0), model.continuation(prompt, 1))]


def cut_prompt(model: Model, folder: Path) -> Pairs:
    lines = Lines(
        built(model, folder, max_context_length=32, context_encoding_buckets=[32], allow_input_truncation=True)
    )
    prompt = prompts(1, (40,))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines.prefill(0, prompt)
    return [(lines.answer(0), model.continuation(prompt, 1))]


def stored_prefix(model: Model, folder: Path) -> Pairs:
    """Slots for all of the prompt, of which the first blocks are shared."""
    blocks = Blocks(in_blocks(model, folder))
    prompt = prompts(1, (200,))[0]
    other, third = ([*prompt[:160], *prompts(1, (20,), seed=seed)[0]] for seed in (8, 9))
    blocks.prefill(0, prompt)
    blocks.tables[1] = blocks.tables[0][:5]
    blocks._extend(1, 181)
    blocks.prefill(1, other, 160, slot_mapping=torch.tensor([blocks.slots(1, 0, 180)]))
    blocks.tables[2] = blocks.tables[0][:5]
    blocks.prefill(2, third, 160)
    for _ in range(6):
        blocks.decode()
    return [(blocks.answer(0), model.continuation(prompt, 7)), (blocks.answer(2), model.continuation(third, 7))]


def unused_prefix(model: Model, folder: Path) -> Pairs:
    blocks = Blocks(in_blocks(model, folder, logical_nc_config=1))
    pairs = []
    for sequence, prompt in enumerate(prompts(4, (200,))):
        blocks.prefill(2 * sequence, prompt)
        blocks.tables[2 * sequence + 1] = blocks.tables[2 * sequence][:1]
        other = [*prompt[:32], *prompts(1, (240,), seed=8)[0]]
        blocks.prefill(2 * sequence + 1, other, 32)
        pairs.append((blocks.answer(2 * sequence + 1), model.continuation(other, 1)))
    return pairs


DETERMINISTIC = {
    "on_device_sampling_config": {"dynamic": True, "deterministic": True, "global_topk": 64},
}

SILENT: dict[str, tuple[str, Callable[[Model, Path], Pairs]]] = {
    "rows that are not sorted by line": ("20-1", unsorted_rows),
    "a live line that is absent from a decode call": ("20-2", absent_line),
    "a line twice in a full batch": ("20-1", line_twice),
    "a dummy row at position 0": ("20-3", dummy_row),
    "a prompt of one token": ("20-4", lone_token),
    "positions that go on through the padding": ("20-5", ramp),
    "fewer rows of sampling parameters than rows": ("20-10", too_few_parameters),
    "top_k 0": ("20-11", top_k_zero),
    "a prompt that is cut": ("0.1-18", cut_prompt),
    "slots for a shared prefix": ("20-14", stored_prefix),
    "a prefix bucket that is not full at LNC 1": ("10-LNC1", unused_prefix),
}


# Careless callers: errors

Careless = Callable[[Model, Path], None]


def _one_line(model: Model, folder: Path, **changes: Any) -> Lines:
    lines = Lines(built(model, folder, **changes))
    lines.prefill(0, prompts(1)[0])
    return lines


def _one_in_blocks(model: Model, folder: Path, length: int = 40, **changes: Any) -> tuple[Blocks, list[int]]:
    blocks = Blocks(in_blocks(model, folder, **changes))
    prompt = prompts(1, (length,))[0]
    blocks.prefill(0, prompt)
    return blocks, prompt


def no_positions(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(position_ids=None)


def flat_positions(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(position_ids=torch.tensor([5]))


def negative_positions(model: Model, folder: Path) -> None:
    padded = {"input_ids": torch.ones(1, 11, dtype=torch.long), "position_ids": torch.tensor([[*range(5)] + [-1] * 6])}
    _one_line(model, folder).prefill(1, prompts(1)[0], **padded)


def lines_in_two_dimensions(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(seq_ids=torch.tensor([[0]]))


def more_rows_than_the_batch(model: Model, folder: Path) -> None:
    rows = {"input_ids": torch.ones(5, 1, dtype=torch.long), "position_ids": torch.full((5, 1), 5)}
    parameters = torch.tensor([GREEDY] * 5)
    _one_line(model, folder).decode(**rows, seq_ids=torch.arange(5), sampling_params=parameters)


def half_a_static_batch(model: Model, folder: Path) -> None:
    _one_line(model, folder, is_continuous_batching=False, ctx_batch_size=2)


def logits_of_a_part_of_a_static_batch(model: Model, folder: Path) -> None:
    _one_line(model, folder, is_continuous_batching=False, output_logits=True).decode()


def later_chunk(model: Model, folder: Path) -> None:
    _one_line(model, folder).prefill(0, prompts(1)[0], position_ids=torch.arange(5, 10)[None])


def same_line_twice(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode([0, 0])


def line_beyond_the_batch(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(seq_ids=torch.tensor([4]))


def prompts_side_by_side(model: Model, folder: Path) -> None:
    built(model, folder, ctx_batch_size=4)


def no_parameters(model: Model, folder: Path) -> None:
    _one_line(model, folder).prefill(1, prompts(2)[1], sampling_params=None)


def parameters_of_the_batch(model: Model, folder: Path) -> None:
    """In a call of one row."""
    _one_line(model, folder).prefill(1, prompts(2)[1], sampling_params=torch.tensor([GREEDY] * 4))


def greedy_without_top_k(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(sampling_params=torch.tensor([[0.0, 1.0, 0.0]]))


def top_k_beyond_the_graph(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(sampling_params=torch.tensor([[65.0, 1.0, 1.0]]))


def long_prompt(model: Model, folder: Path) -> None:
    Lines(built(model, folder, context_encoding_buckets=[16, 32])).prefill(0, prompts(1, (33,))[0])


def last_position(model: Model, folder: Path) -> None:
    lines = _one_line(model, folder)
    lines.decode(position_ids=torch.tensor([[128]]))


def small_vocabulary(model: Model, folder: Path) -> None:
    built(model, folder, on_device_sampling_config={"dynamic": True, "global_topk": 300})


def long_prefix(model: Model, folder: Path) -> None:
    blocks, prompt = _one_in_blocks(model, folder, 200, prefix_buckets=[128])
    other = [*prompt[:192], *prompts(1, (120,), seed=8)[0]]
    blocks.tables[1] = blocks.tables[0][:6]
    blocks.prefill(1, [*other, *other[:100]], 192)


def suffix_alone(model: Model, folder: Path) -> None:
    blocks, prompt = _one_in_blocks(model, folder)
    blocks.tables[1] = blocks.tables[0][:1]
    rest = torch.tensor([prompt[32:]])
    blocks.prefill(1, prompt, 32, input_ids=rest, position_ids=torch.arange(32, 40)[None])


def flat_lengths(model: Model, folder: Path) -> None:
    blocks, _ = _one_in_blocks(model, folder)
    blocks.decode(full_context_lens=torch.tensor([41]), computed_context_lens=torch.tensor([40]))


def no_lengths(model: Model, folder: Path) -> None:
    _one_in_blocks(model, folder)[0].decode(full_context_lens=None)


def no_table(model: Model, folder: Path) -> None:
    _one_in_blocks(model, folder)[0].decode(block_table=None)


def negative_table(model: Model, folder: Path) -> None:
    blocks, _ = _one_in_blocks(model, folder)
    blocks.decode(block_table=torch.tensor([[*blocks.tables[0], -1]]))


def small_blocks(model: Model, folder: Path) -> None:
    lengths = {"context_encoding_buckets": [64], "prefix_buckets": [64], "token_generation_buckets": [64]}
    in_blocks(model, folder, seq_len=64, pa_block_size=4, **lengths)


def blocks_without_prefixes(model: Model, folder: Path) -> None:
    in_blocks(model, folder, is_prefix_caching=False)


def prefixes_without_blocks(model: Model, folder: Path) -> None:
    in_blocks(model, folder, is_block_kv_layout=False)


def one_row_with_logits(model: Model, folder: Path) -> None:
    _one_in_blocks(model, folder, output_logits=True)[0].decode()


def sparse_lines(model: Model, folder: Path) -> None:
    lines = Lines(built(model, folder, token_generation_batches=[2]))
    for line in (0, 2):
        lines.prefill(line, prompts(3)[line])
    lines.decode()


def no_artifact(model: Model, folder: Path) -> None:
    application = built(model, folder)
    (folder / "artifact" / "model.pt").unlink()
    application.load(str(folder / "artifact"))


RAISES: dict[str, tuple[Any, Careless]] = {
    "20-5 no positions": (AssertionError, no_positions),
    "20-5 positions in one dimension": (ValueError, flat_positions),
    "0.1-17 padding with position -1": (torch.jit.Error, negative_positions),
    "20-7 lines in two dimensions": (TypeError, lines_in_two_dimensions),
    "20-7 more rows than the batch": (IndexError, more_rows_than_the_batch),
    "0.1-19 half of a static batch at once": (IndexError, half_a_static_batch),
    "0.1-7 logits of a part of a static batch": (TypeError, logits_of_a_part_of_a_static_batch),
    "20-6 a prompt that begins later": (torch.jit.Error, later_chunk),
    "20-7 a line twice": (IndexError, same_line_twice),
    "20-7 a line beyond the batch": (IndexError, line_beyond_the_batch),
    "20-8 prompts side by side": (AssertionError, prompts_side_by_side),
    "20-10 no sampling parameters": (torch.jit.Error, no_parameters),
    "20-11 greedy without top_k": (ValueError, greedy_without_top_k),
    "20-11 top_k beyond the graph": (ValueError, top_k_beyond_the_graph),
    "20-12 a prompt beyond the largest bucket": (ValueError, long_prompt),
    "20-13 a prefix beyond the largest bucket": (AssertionError, long_prefix),
    "20-14 the rest of a prompt alone": (Exception, suffix_alone),
    "20-15 lengths in one dimension": (ValueError, flat_lengths),
    "20-15 no lengths": (TypeError, no_lengths),
    "8.2 no block table": (IndexError, no_table),
    "20-16 a block table padded with -1": ((IndexError, RuntimeError), negative_table),
    "20-17 blocks that cannot be tiled": (RuntimeError, small_blocks),
    "20-19 a position beyond the last": ((IndexError, RuntimeError), last_position),
    "0.1-6 blocks without prefix caching": (AttributeError, blocks_without_prefixes),
    "0.1-6 prefix caching without blocks": (RuntimeError, prefixes_without_blocks),
    "0.1-9 a small vocabulary": (RuntimeError, small_vocabulary),
    "tokens and logits of one row in blocks": (IndexError, one_row_with_logits),
    "no artifact": (ValueError, no_artifact),
}


@pytest.mark.parametrize(("version", "mode"), EACH)
@pytest.mark.parametrize("mistake", RAISES)
def test_a_mistake_that_the_library_notices_is_its_own_error(
    model: Model, tmp_path: Path, version: str, mode: Any, mistake: str
) -> None:
    error, careless = RAISES[mistake]
    with library(version, mode), pytest.raises(error) as raised:
        careless(model, tmp_path)
    assert type(raised.value).__name__ != "FakeRefusal"


def test_sparse_lines_miss_every_graph_of_few_rows(model: Model, tmp_path: Path) -> None:
    with library("0.9", "damage"), pytest.raises(torch.jit.Error):
        sparse_lines(model, tmp_path)


def test_sampling_parameters_reach_the_graph_as_exactly_the_rows_of_the_call(
    model: Model, tmp_path: Path, version: str
) -> None:
    with library(version, "damage"), pytest.raises(torch.jit.Error):
        parameters_of_the_batch(model, tmp_path)


# Outputs


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_outputs_have_the_shapes_of_their_configuration(model: Model, tmp_path: Path, version: str, mode: Any) -> None:
    with library(version, mode):
        for name, changes in {"host": {"on_device_sampling_config": None}, "device": {}, "both": BOTH}.items():
            lines = _one_line(model, tmp_path / name, **changes)
            lines.prefill(1, prompts(2)[1])
            found = lines.application.forward(**lines.arguments([1, 0]))
            if name == "host":
                assert found.logits.shape == (2, 1, 256)
                assert found.logits.dtype == torch.float32
                assert found.tokens is found.hidden_states is found.logits
            elif name == "device":
                assert found.logits is None
                assert found.tokens.dtype == torch.int32
                assert found.tokens.shape == (2,)
            else:
                assert found.logits.shape == (2, 1, 256)
                assert found.hidden_states == []
            assert tokens_of(found) == [model.continuation(prompt, 2)[1] for prompt in (prompts(2)[1], prompts(2)[0])]
            assert found.past_key_values is None
            assert hasattr(found, "captured_tensors") is (version == "0.9")


def test_tokens_with_logits_of_blocks_keep_the_padded_rows(model: Model, tmp_path: Path, version: str) -> None:
    with library(version, "damage"):
        blocks, _ = _one_in_blocks(model, tmp_path, **BOTH)
        blocks.prefill(1, prompts(2)[1])
        outputs = blocks.application.forward(**_decode_arguments(blocks, [0, 1]))
        assert outputs.tokens.shape == (4,)
        assert outputs.logits.shape == (4, 1, 256)


def test_logits_beside_no_tokens_are_a_list(model: Model, tmp_path: Path, version: str) -> None:
    with library(version, "damage"):
        application = built(model, tmp_path, on_device_sampling_config=None, output_logits=True)
        prompt = {"input_ids": torch.tensor(prompts(1)), "position_ids": torch.arange(5)[None]}
        parameters = torch.tensor([GREEDY])
        outputs = application.forward(**prompt, seq_ids=torch.tensor([0]), sampling_params=parameters)
        assert isinstance(outputs.logits, list)
        assert len(outputs.logits) == 2


def test_top_p_drops_the_token_that_crosses_it(model: Model, tmp_path: Path, version: str) -> None:
    """At so high a temperature two candidates are equally likely, and others would keep both at 0.75."""
    with library(version, "damage"):
        lines = Lines(built(model, tmp_path))
        likeliest = model.continuation(prompt := prompts(1)[0], 1)[0]
        drawn = [lines.prefill(0, prompt, sampling_params=torch.tensor([[2.0, 0.75, 100.0]])) for _ in range(12)]
        assert set(drawn) == {likeliest}
        both = [lines.prefill(0, prompt, sampling_params=torch.tensor([[2.0, 1.0, 100.0]])) for _ in range(24)]
        assert len(set(both)) == 2


def test_temperature_0_writes_into_the_callers_tensor(model: Model, tmp_path: Path, version: str) -> None:
    with library(version, "damage"):
        lines = Lines(built(model, tmp_path))
        given = torch.tensor([[5.0, 0.5, 0.0]])
        lines.prefill(0, prompts(1)[0], sampling_params=given)
        assert given.tolist() == [[1.0, 1.0, 0.0]]


def test_rows_have_their_own_parameters_in_the_callers_order(model: Model, tmp_path: Path, version: str) -> None:
    """One row is greedy, the other takes the token at half of an almost even distribution."""
    with library(version, "damage"):
        lines = Lines(built(model, tmp_path, **DETERMINISTIC))
        given = prompts(4)
        for line in (1, 3):
            lines.prefill(line, given[line])
        for _ in range(3):
            lines.decode([3, 1], sampling_params=torch.tensor([[64.0, 1.0, 50.0], GREEDY]))
        assert lines.answer(1) == model.continuation(given[1], 4)
        assert lines.answer(3) != model.continuation(given[3], 4)


BOTH = {"output_logits": True}


def _decode_arguments(blocks: Blocks, sequences: list[int]) -> dict[str, torch.Tensor]:
    """The arguments of the next decode step, which is not run."""
    found: dict[str, torch.Tensor] = {}

    class Recorded(Exception):
        pass

    def forward(**arguments: torch.Tensor) -> None:
        found.update(arguments)
        raise Recorded

    application, blocks.application = blocks.application, SimpleNamespace(forward=forward)
    with pytest.raises(Recorded):
        blocks.decode(sequences)
    blocks.application = application
    return found


# Graphs: buckets of lengths and rows, masks of lines


def test_the_smallest_bucket_is_larger_than_the_prompt_and_only_the_last_one_may_be_full(
    model: Model, tmp_path: Path, version: str
) -> None:
    with fake_nxdi(version) as fake:
        lines = Lines(built(model, tmp_path))
        for length, bucket in ((15, 16), (16, 32), (64, 128), (128, 128)):
            fake.COUNTS.graphs.clear()
            lines.prefill(0, prompts(1, (length,))[0])
            assert list(fake.COUNTS.graphs) == [f"context_encoding_model 1x{bucket}+{bucket}"]


def test_active_buckets_may_be_full_and_recompute_what_was_cached(model: Model, tmp_path: Path, version: str) -> None:
    with fake_nxdi(version) as fake:
        changes = {"context_encoding_buckets": [128, 512], "prefix_buckets": [128, 256, 512]}
        blocks = Blocks(in_blocks(model, tmp_path, seq_len=512, max_context_length=512, **changes))
        prompt = prompts(1, (500,))[0]
        # New tokens, cached ones, and the graph: 257 to 512 together take 512 without a prefix.
        for start, end, graph in (
            (0, 128, "128+0"),
            (128, 256, "128+128"),
            (230, 256, "128+128"),
            (256, 384, "512+0"),
            (384, 500, "512+0"),
        ):
            fake.COUNTS.graphs.clear()
            blocks.prefill(0, prompt, start, end)
            assert list(fake.COUNTS.graphs) == [f"context_encoding_model 1x{graph}"]
        assert blocks.tokens[0][-1] == model.continuation(prompt, 1)[0]


def test_an_active_bucket_below_128_is_no_prefill(model: Model, tmp_path: Path, version: str) -> None:
    for mode, error in (("strict", "FakeRefusal"), ("damage", "RuntimeError")):
        with fake_nxdi(version, mode), pytest.raises((AssertionError, RuntimeError)) as raised:
            in_blocks(model, tmp_path / mode, context_encoding_buckets=[64, 128])
        assert type(raised.value).__name__ == error


@pytest.mark.parametrize("mode", ["strict", pytest.param("damage", marks=pytest.mark.long)])
def test_fewer_rows_take_a_smaller_graph_if_their_lines_are_the_first(model: Model, tmp_path: Path, mode: Any) -> None:
    with library("0.9", mode) as fake:
        lines = Lines(built(model, tmp_path, token_generation_batches=[1, 2]))
        given = prompts(3)
        for line, prompt in enumerate(given):
            lines.prefill(line, prompt)
        for _ in range(2):
            lines.decode()
        del lines.live[2]
        for _ in range(2):
            lines.decode([1, 0])
        if fake is not None:
            assert {name.split()[1].split("x")[0] for name in fake.COUNTS.graphs} == {"1", "2", "4"}
        del lines.live[1]
        lines.decode()
        assert lines.answer(0) == model.continuation(given[0], 6)


@pytest.mark.parametrize("mode", ["strict", pytest.param("damage", marks=pytest.mark.long)])
def test_free_lines_below_a_live_one_are_filled_with_copies(model: Model, tmp_path: Path, mode: Any) -> None:
    with library("0.9", mode):
        lines = Lines(built(model, tmp_path, token_generation_batches=[2]))
        given = prompts(2)
        lines.prefill(0, given[0])
        lines.prefill(1, given[1])
        del lines.live[0]
        for _ in range(4):
            copied = {
                name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in lines.arguments([1]).items()
            }
            outputs = lines.application.forward(**copied | {"seq_ids": torch.tensor([0, 1])})
            lines.live[1].append(tokens_of(outputs)[1])
        assert lines.answer(1) == model.continuation(given[1], 5)


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_masked_lines_keep_what_they_hold(model: Model, tmp_path: Path, version: str, mode: Any) -> None:
    with library(version, mode):
        lines = Lines(built(model, tmp_path, apply_seq_ids_mask=True))
        given = prompts(2)
        for line, prompt in enumerate(given):
            lines.prefill(line, prompt)
        for _ in range(4):
            lines.decode([0])
        for _ in range(4):
            lines.decode()
        assert lines.answer(1) == model.continuation(given[1], 5)


def test_a_masked_line_takes_positions_beyond_its_end(model: Model, tmp_path: Path, version: str) -> None:
    for mode in ("damage", "strict"):
        with library(version, mode) as fake:
            lines = Lines(built(model, tmp_path / mode, apply_seq_ids_mask=True))
            lines.prefill(0, prompts(1, (127,))[0])
            lines.decode()
            if mode == "damage":
                lines.decode()
                continue
            with pytest.raises(fake.FakeRefusal, match="20-19"):
                lines.decode()


# Asynchronous execution


@pytest.mark.parametrize("layout", ["lines", "blocks"])
@pytest.mark.parametrize(("version", "mode"), EACH)
def test_steps_that_run_ahead_give_the_tokens_of_transformers(
    model: Model, tmp_path: Path, version: str, mode: Any, layout: str
) -> None:
    with library(version, mode) as fake:
        make = built if layout == "lines" else in_blocks
        caller: Any = (Lines if layout == "lines" else Blocks)(make(model, tmp_path, async_mode=True))
        given = prompts(3)
        for row, prompt in enumerate(given[:2]):
            caller.prefill(row, prompt)
        for _ in range(30):
            caller.decode()
        caller.prefill(2, given[2])
        for _ in range(3):
            caller.decode()
        for row, count in enumerate((34, 34, 4)):
            assert caller.answer(row) == model.continuation(given[row], count)
        if fake is not None:
            assert fake.COUNTS.wasted > 0


def changed_token(model: Model, folder: Path) -> Pairs:
    lines = Lines(built(model, folder, async_mode=True))
    prompt = prompts(1)[0]
    lines.prefill(0, prompt)
    for _ in range(3):
        lines.decode()
    lines.live[0][-1] = (lines.live[0][-1] + 1) % 256
    forced = list(lines.live[0])
    lines.decode()
    return [(lines.live[0], forced + model.continuation(forced, 1))]


def border_without_a_block(model: Model, folder: Path) -> Pairs:
    """The step that runs ahead crosses into a block that its table does not have yet, and writes into block 0."""
    blocks = Blocks(in_blocks(model, folder, async_mode=True))
    blocks.free = [*range(1, 64), 0]
    other, prompt = prompts(2, (20, 61))
    blocks.prefill(0, other)
    blocks.prefill(1, prompt)
    for _ in range(10):
        length = len(blocks.tokens[1])
        blocks.tables[1] = blocks.tables[1][: -(-length // 32)]
        needed = -(-length // 32)
        if len(blocks.tables[1]) < needed:
            blocks.tables[1].append(blocks.free.pop())
        arguments = _decode_arguments(blocks, [1])
        table = blocks.tables[1][:needed]
        outputs = blocks.application.forward(**arguments | {"block_table": torch.tensor([table])})
        blocks.tokens[1].append(tokens_of(outputs)[0])
    for _ in range(4):
        blocks.decode([0])
    return [(blocks.answer(0), model.continuation(other, 5)), (blocks.answer(1), model.continuation(prompt, 11))]


SILENT |= {
    "a token that async mode has already run": ("20-24", changed_token),
}


def test_the_step_ahead_needs_its_block_already_at_a_border(model: Model, tmp_path: Path, version: str) -> None:
    with library(version, "damage"):
        assert any(got != wanted for got, wanted in border_without_a_block(model, tmp_path / "damage"))
    if not installed():
        with library(version, "strict") as fake, pytest.raises(fake.FakeRefusal):
            border_without_a_block(model, tmp_path / "strict")


# More silent mistakes


def parameters_of_another_type(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(sampling_params=torch.tensor([[1, 1, 1]]))


def parameters_of_a_greedy_graph(model: Model, folder: Path) -> None:
    lines = _one_line(model, folder, on_device_sampling_config={})
    lines.decode(sampling_params=torch.tensor([[50.0, 1.0, 3.0]]))


def mask_with_a_hole(model: Model, folder: Path) -> None:
    _one_line(model, folder).decode(attention_mask=torch.tensor([[1, 1, 0, 1, 1]], dtype=torch.int32))


def lengths_beside_the_position(model: Model, folder: Path) -> None:
    blocks, _ = _one_in_blocks(model, folder)
    blocks.decode(full_context_lens=torch.tensor([[40]]), computed_context_lens=torch.tensor([[39]]))


def another_sequences_table(model: Model, folder: Path) -> None:
    blocks, _ = _one_in_blocks(model, folder)
    blocks.prefill(1, prompts(2, (40, 70))[1])
    blocks.decode([0], block_table=torch.tensor([[blocks.tables[0][0], blocks.tables[1][1]]]))


def two_rows_in_one_block(model: Model, folder: Path) -> None:
    blocks, prompt = _one_in_blocks(model, folder)
    blocks.tables[1] = list(blocks.tables[0])
    blocks.tokens[1], blocks.starts[1] = list(blocks.tokens[0]), len(prompt)
    blocks.decode([0, 1])


def skipped_position(model: Model, folder: Path) -> None:
    lines = Lines(built(model, folder))
    lines.prefill(0, prompts(1, (20,))[0])
    lines.decode(position_ids=torch.tensor([[25]]))


def static_lines(model: Model, folder: Path) -> None:
    lines = Lines(built(model, folder, is_continuous_batching=False, ctx_batch_size=4))
    arguments = {"input_ids": torch.tensor(prompts(4, (6,))), "position_ids": torch.arange(6).repeat(4, 1)}
    parameters = torch.tensor([GREEDY] * 4)
    lines.application.forward(**arguments, seq_ids=torch.tensor([1, 0, 2, 3]), sampling_params=parameters)


def step_after_an_error(model: Model, folder: Path) -> None:
    lines = _one_line(model, folder)
    with pytest.raises(IndexError):
        lines.decode(seq_ids=torch.tensor([4]))
    lines.decode()


def shared_work_folder(model: Model, folder: Path) -> None:
    del os.environ["BASE_COMPILE_WORK_DIR"]
    built(model, folder)


def unknown_field(model: Model, folder: Path) -> None:
    built(model, folder, pa_num_block=64)


def unknown_sampling_field(model: Model, folder: Path) -> None:
    built(model, folder, on_device_sampling_config={"dynamic": True, "global_top_k": 64, "global_topk": 64})


def artifact_of_another_configuration(model: Model, folder: Path) -> None:
    built(model, folder)
    other = built(model, folder / "other", seq_len=64, context_encoding_buckets=[64], token_generation_buckets=[64])
    other.load(str(folder / "artifact"), skip_warmup=True)


# Verification of drafts


def verifying(model: Model, folder: Path, **changes: Any) -> Lines:
    """Rows of four tokens, and a sequence in line 0."""
    fields = {"speculation_length": 4, "on_device_sampling_config": None}
    return _one_line(model, folder, **fields | changes)


def verified(lines: Lines, drafts: Sequence[int], **changes: Any) -> list[int]:
    """The likeliest tokens behind the last token of line 0 and behind each draft."""
    fed, start = [lines.live[0][-1], *drafts], len(lines.live[0]) - 1
    arguments = {
        "input_ids": torch.tensor([fed]),
        "position_ids": torch.arange(start, start + len(fed))[None],
        "attention_mask": torch.ones(1, start, dtype=torch.int64),
        "seq_ids": torch.tensor([0]),
        "sampling_params": torch.tensor([GREEDY]),
    }
    outputs = lines.application.forward(**arguments | changes)
    found = outputs.tokens if outputs.logits is None else outputs.logits.argmax(dim=-1)
    return [int(token) for token in found[0]]


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_a_verification_takes_rejected_drafts_back(model: Model, tmp_path: Path, version: str, mode: Any) -> None:
    prompt = prompts(1)[0]
    with library(version, mode):
        lines = verifying(model, tmp_path)
        for right in (3, 0, 1, 2, 3):
            wanted = model.continuation(prompt, len(lines.answer(0)) + 4)[-4:]
            drafts = [token if at < right else token ^ 1 for at, token in enumerate(wanted[:3])]
            assert verified(lines, drafts)[: right + 1] == wanted[: right + 1]
            lines.live[0] += wanted[: right + 1]


def mask_with_the_drafts(model: Model, folder: Path) -> Pairs:
    lines = verifying(model, folder)
    wanted = model.continuation(prompts(1)[0], 5)[1:]
    return [(verified(lines, wanted[:3], attention_mask=None), wanted)]


def verification_of_sampled_rows(model: Model, folder: Path) -> None:
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    sampling = OnDeviceSamplingConfig(dynamic=True, global_topk=64)
    verified(verifying(model, folder, on_device_sampling_config=sampling), [1, 2, 3])


def positions_that_are_no_run(model: Model, folder: Path) -> None:
    lines = verifying(model, folder)
    start = len(lines.live[0]) - 1
    verified(lines, [1, 2, 3], position_ids=torch.tensor([[start, start + 1, start + 1, start + 2]]))


def single_token_of_a_verifying_model(model: Model, folder: Path) -> None:
    verifying(model, folder).decode()


def bucket_as_wide_as_a_verification(model: Model, folder: Path) -> None:
    verifying(model, folder, context_encoding_buckets=[4, 16])


def verification_over_blocks(model: Model, folder: Path) -> None:
    in_blocks(model, folder, speculation_length=4, on_device_sampling_config=None)


def verification_at_the_end(model: Model, folder: Path) -> None:
    lines = verifying(model, folder)
    lines.live[0] += [7] * (126 - len(lines.live[0]))
    verified(lines, [1, 2, 3])


SILENT |= {"a mask that names the drafts": ("5", mask_with_the_drafts)}


@pytest.mark.parametrize(
    ("error", "careless"),
    [
        (AttributeError, single_token_of_a_verifying_model),
        (RuntimeError, bucket_as_wide_as_a_verification),
        (RuntimeError, verification_over_blocks),
        (ValueError, verification_at_the_end),
    ],
)
def test_what_a_verifying_model_cannot_do_is_the_librarys_error(
    model: Model, tmp_path: Path, version: str, error: type[Exception], careless: Careless
) -> None:
    with library(version), pytest.raises(error) as raised:
        careless(model, tmp_path)
    assert type(raised.value).__name__ != "FakeRefusal"


# Drafts of a second model


def with_draft(
    model: Model, folder: Path, draft: Path | None = None, *, of_draft: dict[str, Any] | None = None, **changes: Any
) -> Lines:
    """The same with a second model, the model itself if there is no other, that makes the drafts."""
    from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig, OnDeviceSamplingConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    def fused(application: Any, fields: dict[str, Any]) -> Any:
        config_class = application.get_config_cls()
        neuron_config = config_class.get_neuron_config_cls()(**fields)
        for name, value in {"enable_fused_speculation": False, **(of_draft or {"speculation_length": 0})}.items():
            setattr(neuron_config, name, value)
        second = draft or model.folder
        drafting = config_class(neuron_config, load_config=load_pretrained_config(str(second)))
        return FusedSpecNeuronConfig(application._model_cls, drafting, str(second))

    fields = {"speculation_length": 4, "enable_fused_speculation": True, "fused": fused}
    fields["on_device_sampling_config"] = OnDeviceSamplingConfig()
    return _one_line(model, folder, **fields | changes)


def accepted(lines: Lines, *, back: int = 0, **changes: Any) -> list[int]:
    """Tokens of one step behind the last token of line 0, or behind one that many tokens before it."""
    start = len(lines.live[0]) - 1 - back
    arguments = {
        "input_ids": torch.tensor([[lines.live[0][start]]]),
        "position_ids": torch.tensor([[start]]),
        "seq_ids": torch.tensor([0]),
        "sampling_params": torch.tensor([GREEDY]),
    }
    tokens, _, _, following = lines.application.forward(**arguments | changes).fused_outputs
    return [int(token) for token in tokens[0, : int(following[0, 0]) - start]]


@pytest.mark.parametrize(("version", "mode"), EACH)
def test_drafts_of_a_second_model_change_no_token_and_are_taken_back(
    model: Model, tmp_path: Path, version: str, mode: Any
) -> None:
    """Also where the caller keeps fewer tokens than were accepted."""
    prompt = prompts(1)[0]
    with library(version, mode):
        lines = with_draft(model, tmp_path)
        for kept in (4, 1, 2, 4, 3):
            found = accepted(lines)
            assert found == model.continuation(prompt, len(lines.answer(0)) + 4)[-4:]
            lines.live[0] += found[:kept]


@pytest.mark.parametrize("version", ["0.7", "0.8"])
def test_what_fills_the_places_behind_accepted_tokens_differs_between_releases(
    model: Model, tmp_path: Path, version: str
) -> None:
    with library(version):
        lines = with_draft(model, tmp_path, Model(tmp_path / "draft", intermediate_size=96).folder)
        start = len(lines.live[0]) - 1
        found = lines.application.forward(
            input_ids=torch.tensor([[lines.live[0][-1]]]),
            position_ids=torch.tensor([[start]]),
            seq_ids=torch.tensor([0]),
            sampling_params=torch.tensor([GREEDY]),
        ).fused_outputs
    assert int(found[3]) == start + 1
    assert found[0].tolist() == [[*model.continuation(prompts(1)[0], 2)[1:], *[0 if version == "0.7" else -1] * 3]]


@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_head_changes_no_token(model: Model, tmp_path: Path, version: Literal[1, 3]) -> None:
    target = model if version == 1 else deep(tmp_path)
    with library():
        lines = with_head(target, tmp_path, version)
        for kept in (4, 1, 2, 4):
            found = accepted(lines)
            assert found == target.continuation(prompts(1)[0], len(lines.answer(0)) + len(found))[-len(found) :]
            lines.live[0] += found[:kept]


def sampled_row_of_a_greedy_verification(model: Model, folder: Path) -> None:
    accepted(with_draft(model, folder), sampling_params=torch.tensor([[64.0, 1.0, 1.5]]))


def draft_that_drafts(model: Model, folder: Path) -> None:
    with_draft(model, folder, of_draft={"speculation_length": 4})


def with_head(model: Model, folder: Path, version: Literal[1, 3], **changes: Any) -> Lines:
    """The same with an EAGLE head, which the library can read."""
    head = write_head(folder / "head", model.folder, version)
    tensors = load_file(head / "model.safetensors")
    weights = load_file(model.folder / "model.safetensors")
    tensors = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    } | {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    save_file(tensors, head / "model.safetensors")
    fields = {"enable_eagle_speculation": True, "of_draft": {"is_eagle_draft": True}}
    if version == 3:
        fields |= {"is_eagle3": True, "sequence_parallel_enabled": True, "enable_eagle_draft_input_norm": True}
    return with_draft(model, folder, head, **fields | changes)


def third_head_without_norms(model: Model, folder: Path) -> None:
    with_head(Model(folder / "model", num_layers=7, num_kv_heads=4), folder, 3, enable_eagle_draft_input_norm=False)


def third_head_over_prefixes(model: Model, folder: Path) -> None:
    blocks = {"is_block_kv_layout": True, "is_prefix_caching": True, "pa_num_blocks": 64, "pa_block_size": 32}
    buckets = {f"{name}_buckets": [128] for name in ("context_encoding", "prefix", "token_generation")}
    with_head(deep(folder), folder, 3, **blocks, **buckets)


def published_names(model: Model, folder: Path) -> None:
    head = write_head(folder / "published", model.folder, 3)
    fields = {"is_eagle3": True, "sequence_parallel_enabled": True, "enable_eagle_draft_input_norm": True}
    with_draft(model, folder, head, enable_eagle_speculation=True, of_draft={"is_eagle_draft": True}, **fields)


def deep(folder: Path) -> Model:
    return Model(folder / "deep", num_layers=7, num_kv_heads=4)


def drafts_beyond_the_end(model: Model, folder: Path) -> None:
    lines = with_draft(model, folder)
    lines.live[0] += [7] * (126 - len(lines.live[0]))
    accepted(lines)


def other_vocabulary(model: Model, folder: Path) -> None:
    with_draft(model, folder, Model(folder / "draft", vocabulary_size=100).folder)


def sampled_drafts(model: Model, folder: Path) -> None:
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    with_draft(model, folder, on_device_sampling_config=OnDeviceSamplingConfig(do_sample=True, global_topk=64))


@pytest.mark.parametrize(
    ("error", "careless"),
    [
        (ValueError, drafts_beyond_the_end),
        (IndexError, other_vocabulary),
        (IndexError, sampled_drafts),
        (AttributeError, lambda model, folder: with_draft(model, folder, on_device_sampling_config=None)),
        (AttributeError, lambda model, folder: with_draft(model, folder, fused=None)),
        (RuntimeError, lambda model, folder: with_draft(model, folder, context_encoding_buckets=[4, 16])),
        (RuntimeError, lambda model, folder: with_draft(model, folder, output_logits=True)),
        (RuntimeError, lambda model, folder: with_head(model, folder, 3)),
        (RuntimeError, lambda model, folder: with_head(deep(folder), folder, 3, sequence_parallel_enabled=False)),
        (KeyError, lambda model, folder: published_names(deep(folder), folder)),
        (AssertionError, third_head_over_prefixes),
    ],
)
def test_what_a_model_with_drafts_of_a_second_one_cannot_do_is_the_librarys_error(
    model: Model, tmp_path: Path, version: str, error: type[Exception], careless: Careless
) -> None:
    with library(version), pytest.raises(error) as raised:
        careless(model, tmp_path)
    assert type(raised.value).__name__ != "FakeRefusal"


REFUSED: dict[str, tuple[str, Careless]] = {
    "a sampled row where drafts are verified greedily": ("3.4", sampled_row_of_a_greedy_verification),
    "a draft model whose own configuration drafts": ("3.1", draft_that_drafts),
    "an EAGLE 3 head without its norms": ("3.6", third_head_without_norms),
    "verification of sampled rows": ("3.4", verification_of_sampled_rows),
    "positions of a verification that are no run": ("3.2", positions_that_are_no_run),
    "parameters of another type": ("0.1-19", parameters_of_another_type),
    "parameters that the graph ignores": ("6", parameters_of_a_greedy_graph),
    "a mask that leaves out a token": ("5", mask_with_a_hole),
    "lengths beside the position": ("20-15", lengths_beside_the_position),
    "another sequence's block": ("21-2", another_sequences_table),
    "two rows that write one place": ("21-4", two_rows_in_one_block),
    "a position that follows none": ("8.1", skipped_position),
    "lines of a static batch": ("20-1", static_lines),
    "a step after an error": ("21-8", step_after_an_error),
    "a work folder for all": ("0.1-23", shared_work_folder),
    "an unknown field": ("20-26", unknown_field),
    "an unknown field of sampling": ("20-26", unknown_sampling_field),
    "an artifact of another configuration": ("17", artifact_of_another_configuration),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_the_strict_fake_refuses_what_goes_wrong_later(
    model: Model, tmp_path: Path, version: str, mistake: str
) -> None:
    rule, careless = REFUSED[mistake]
    with fake_nxdi(version) as fake, pytest.raises(fake.FakeRefusal) as refusal:
        careless(model, tmp_path)
    assert refusal.value.rule == rule


def test_every_rule_that_the_strict_fake_knows_is_broken_by_a_test() -> None:
    folder = Path(__file__).parents[1] / "fakes" / "nxdi" / "fake_nxdi"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    known = set(re.findall(r'(?:refuse\(|: \()\s*"([\d.]+(?:-\w+)?)"', source))
    elsewhere = {"20-13": "a bucket below 128", "20-19": "beyond a line's end", "21-1": "two calls at once"}
    elsewhere |= dict.fromkeys(("18", "19.1", "19.3"), "several nodes: test_nxdi_group.py")
    elsewhere |= dict.fromkeys(("4.1", "4.2"), "quantized weights: test_nxdi_quantized.py")
    assert known - elsewhere.keys() == {rule for rule, _ in (*SILENT.values(), *REFUSED.values())}


@pytest.mark.parametrize("field", ["flash_decoding_enabled", "is_medusa"])
def test_what_the_fake_does_not_emulate_is_an_error(model: Model, tmp_path: Path, field: str) -> None:
    with fake_nxdi(), pytest.raises(NotImplementedError, match="the fake has no"):
        built(model, tmp_path, **{field: True})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_medusa": True, "async_mode": True}, "Medusa Decoding is not yet supported with async"),
        ({"speculation_length": 4, "token_generation_batches": [1, 2]}, "speculative decoding"),
        (
            {"enable_fused_speculation": True, "token_generation_batches": [1, 2]},
            "not currently supported with .*speculati",
        ),
        ({"is_medusa": True, "token_generation_batches": [1, 2]}, "Medusa decoding"),
    ],
)
def test_speculation_is_refused_with_what_the_library_does_not_combine(
    model: Model, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with library("0.9", "damage"), pytest.raises(Exception, match=f"(?i){message}"):
        built(model, tmp_path, **fields)


# Versions


def test_a_release_has_the_fields_models_and_arguments_that_it_brought() -> None:
    found = {}
    for version in ("0.7", "0.8", "0.9", "0.10"):
        with fake_nxdi(version) as fake:
            from neuronx_distributed_inference import __version__
            from neuronx_distributed_inference.models.config import NeuronConfig
            from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
            from neuronx_distributed_inference.utils.constants import MODEL_TYPES

            assert __version__.startswith(version)
            found[version] = (
                hasattr(NeuronConfig(), "token_generation_batches"),
                "tensor_capture_hook" in signature(NeuronBaseForCausalLM.forward).parameters,
                "disable_fail_fast" in signature(NeuronBaseForCausalLM.compile).parameters,
                "pixtral" in MODEL_TYPES,
                "mistral" in MODEL_TYPES,
                version in fake.VERIFIED,
            )
    assert found == {
        "0.7": (False, False, False, False, False, True),
        "0.8": (True, False, False, True, False, True),
        "0.9": (True, True, True, True, True, True),
        "0.10": (True, True, True, True, True, False),
    }


def test_a_field_that_the_release_does_not_know_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with fake_nxdi("0.7", "damage"):
        from neuronx_distributed_inference.models.config import NeuronConfig

        assert not hasattr(NeuronConfig(token_generation_batches=[1]), "token_generation_batches")
    assert "Unexpected keyword arguments" in caplog.text


# Life cycle


def test_an_artifact_opens_by_its_folder_and_reads_the_checkpoint(model: Model, tmp_path: Path, version: str) -> None:
    with library(version, "damage"):
        application = built(model, tmp_path)
        work = Path(os.environ["BASE_COMPILE_WORK_DIR"])
        assert (work / "context_encoding_model").is_dir()
        opened = type(application)(str(tmp_path / "artifact"))
        assert opened.is_compiled
        assert opened.neuron_config.tkg_batch_size == 4
        assert opened.neuron_config.on_device_sampling_config.global_topk == 64
        opened.load(str(tmp_path / "artifact"), skip_warmup=True)
        lines = Lines(opened)
        prompt = prompts(1)[0]
        lines.prefill(0, prompt)
        lines.decode()
        assert lines.answer(0) == model.continuation(prompt, 2)


def test_a_sharded_artifact_needs_no_checkpoint(tmp_path: Path, version: str) -> None:
    model = Model(tmp_path / "model", tie_word_embeddings=True)
    with library(version, "damage"):
        built(model, tmp_path, save_sharded_checkpoint=True)
        for file in model.folder.glob("*.safetensors"):
            file.unlink()
        from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM

        opened = NeuronLlamaForCausalLM(str(tmp_path / "artifact"))
        opened.load(str(tmp_path / "artifact"), skip_warmup=True)
        lines = Lines(opened)
        prompt = prompts(1)[0]
        lines.prefill(0, prompt)
        assert lines.answer(0) == model.continuation(prompt, 1)
    assert (tmp_path / "artifact" / "weights" / "tp0_sharded_checkpoint.safetensors").is_file()


def test_loading_runs_every_graph_once_unless_the_caller_will(model: Model, tmp_path: Path, version: str) -> None:
    with fake_nxdi(version) as fake:
        application = built(model, tmp_path)
        assert fake.COUNTS.compiled == 7
        assert fake.COUNTS.steps == 0
        application.load(str(tmp_path / "artifact"))
        assert set(fake.COUNTS.graphs.values()) == {1}
        assert fake.COUNTS.steps == 7
        _served(Lines(application), model)


def test_calls_that_only_run_the_graphs_are_no_mistakes(model: Model, tmp_path: Path, version: str) -> None:
    with fake_nxdi(version):
        lines = Lines(built(model, tmp_path))
        for length in (15, 31, 127):
            lines.prefill(0, [0] * length)
        for position in (20, 60, 127):
            lines.decode(position_ids=torch.tensor([[position]]))
        lines.live.clear()
        _served(lines, model)


def test_a_machine_without_a_compiler_does_not_compile(model: Model, tmp_path: Path) -> None:
    with fake_nxdi(compiler=False), pytest.raises(FileNotFoundError, match="neuronx-cc"):
        built(model, tmp_path)


def test_graphs_for_another_chip_do_not_load(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    with fake_nxdi(version):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2")
        with pytest.raises(RuntimeError, match="NRT_UNSUPPORTED_NEFF_VERSION"):
            built(model, tmp_path)


# Faults


def test_a_failing_step_names_its_status_and_no_step_follows(model: Model, tmp_path: Path, version: str) -> None:
    with fake_nxdi(version) as fake:
        lines = _one_line(model, tmp_path)
        fake.SETTINGS.faults.nrt_code, fake.SETTINGS.faults.at_step = 1202, fake.COUNTS.steps
        with pytest.raises(RuntimeError, match=r"status_code=1202 \(NRT_EXEC_HW_ERR_NC_UE\)"):
            lines.decode()
        with pytest.raises(fake.FakeRefusal, match="21-8"):
            lines.decode()


def test_after_a_failing_step_the_damaging_fake_answers_nonsense(model: Model, tmp_path: Path) -> None:
    with fake_nxdi(mode="damage") as fake:
        lines = _one_line(model, tmp_path)
        fake.SETTINGS.faults.nrt_code, fake.SETTINGS.faults.at_step = 5, fake.COUNTS.steps
        with pytest.raises(RuntimeError, match="NRT_TIMEOUT"):
            lines.decode()
        for _ in range(4):
            lines.decode()
        assert lines.answer(0) != model.continuation(prompts(1)[0], 5)


def test_held_cores_fail_a_load_until_they_are_free(model: Model, tmp_path: Path) -> None:
    with fake_nxdi() as fake:
        application = built(model, tmp_path)
        fake.SETTINGS.faults.held_loads = 1
        with pytest.raises(RuntimeError, match="NRT_RESOURCE"):
            application.load(str(tmp_path / "artifact"), skip_warmup=True)
        application.load(str(tmp_path / "artifact"), skip_warmup=True)


def test_models_share_a_device_until_its_memory_is_full(model: Model, tmp_path: Path) -> None:
    with fake_nxdi() as fake:
        application = built(model, tmp_path)
        fake.SETTINGS.memory_bytes = int(1.5 * application.used_bytes)
        with pytest.raises(RuntimeError, match="NRT_RESOURCE"):
            application.load(str(tmp_path / "artifact"), skip_warmup=True)


def test_only_the_end_of_a_process_frees_its_cores(tmp_path: Path) -> None:
    """Even a killed one."""
    environment = {**os.environ, **process_environment(), "FAKE_NXDI_DEVICES": str(tmp_path)}
    code = "from fake_nxdi import device; device.DEVICE.take(2, 0); print('taken', flush=True); input()"
    start = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(start, **pipes) as first:
        assert first.stdout.readline() == "taken\n"  # type: ignore[union-attr]
        second = subprocess.run(start, env=environment, input="", capture_output=True, text=True, check=False)
        assert "NRT_RESOURCE" in second.stderr
        first.kill()
    third = subprocess.run(start, env=environment, input="\n", capture_output=True, text=True, check=True)
    assert third.stdout == "taken\n"


def test_two_calls_at_once_are_refused(model: Model, tmp_path: Path) -> None:
    with fake_nxdi(step_seconds=0.5) as fake, ThreadPoolExecutor(1) as pool:
        lines = Lines(built(model, tmp_path))
        first = pool.submit(lines.prefill, 0, prompts(1)[0])
        while not fake.COUNTS.steps:
            time.sleep(0.001)
        with pytest.raises(fake.FakeRefusal, match="21-1"):
            lines.prefill(1, prompts(2)[1])
        with pytest.raises(fake.FakeRefusal, match="21-1"):
            torch.classes.neuron.Runtime().get_vnc_memory_stats()
        first.result()


def test_a_call_blocks_until_its_step_is_done_and_async_mode_leaves_the_next_one_running(
    model: Model, tmp_path: Path
) -> None:
    for asynchronous in (False, True):
        with fake_nxdi(step_seconds=0.02) as fake:
            from fake_nxdi.device import DEVICE

            lines = _one_line(model, tmp_path / str(asynchronous), async_mode=asynchronous)
            for call in range(5):
                began = DEVICE.free_at
                lines.decode()
                assert time.monotonic() >= (began if asynchronous and call else DEVICE.free_at - 0.02 * asynchronous)
            assert fake.COUNTS.steps == 1 + 5 + asynchronous


@pytest.mark.parametrize("mistake", SILENT)
def test_a_careless_caller_is_refused_or_gets_wrong_tokens(
    model: Model, tmp_path: Path, version: str, mistake: str
) -> None:
    rule, careless = SILENT[mistake]
    with library(version, "damage"):
        assert any(got != wanted for got, wanted in careless(model, tmp_path / "damage"))
    if not installed():
        with library(version, "strict") as fake, pytest.raises(fake.FakeRefusal) as refusal:
            careless(model, tmp_path / "strict")
        assert refusal.value.rule == rule
