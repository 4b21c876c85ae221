"""Adapters with NxD Inference: every answer is that of the model with the adapter merged into its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.nxdi import Mode
from helpers.nxdi_engine import BLOCKS, SLOTS, Model, backend_for, library, refusals, settings_for
from helpers.torch_models import reference
from neuron_runtime.backend.nxdi.graphs import _NOT_OF_GRAPHS, _without
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import FatalError, InvalidConfig

RANK, ALPHA = 4, 24
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, Any] = {"adapters": {"maxActive": 2, "maxLoaded": 3, "maxRank": 8}}


def write_adapter(model: Path, folder: Path, seed: int, targets: tuple[str, ...] = TARGETS, rank: int = RANK) -> Path:
    """An adapter in PEFT's format with weights that change most tokens."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    tensors = {}
    for name, weight in load_file(next(model.glob("*.safetensors"))).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in targets and weight.dim() == 2:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, weight.shape[1]) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], rank) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.pt")  # as a training leaves it
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": sorted(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter added to its weights."""
    weights = load_file(next(model.glob("*.safetensors")))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[weight] += b @ a * (ALPHA / a.shape[0])
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, next(folder.glob("*.safetensors")), metadata={"format": "pt"})
    return folder


class Tuned(Model):
    """A model made elsewhere, and what transformers makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self._reference = reference(folder)


class Fleet:
    """A model with four adapters."""

    def __init__(self, folder: Path, family: str) -> None:
        self.model = Model(folder / "base", family)
        self.folders, self.tuned = {"": Path()}, {"": self.model}
        for number, targets in enumerate((TARGETS, ("q_proj", "v_proj"), TARGETS[4:], TARGETS)):
            name = f"adapter-{number}"
            self.folders[name] = write_adapter(folder / "base", folder / name, number, targets, rank=RANK + number % 2)
            self.tuned[name] = Tuned(merged(folder / "base", self.folders[name], folder / f"merged-{number}"))


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fleet]:
    return {family: Fleet(tmp_path_factory.mktemp(family), family) for family in ("Llama", "Qwen3")}


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))


def some_requests(random: Random, fleet: Fleet, longest: int, count: int) -> Iterator[Request]:
    """Greedy requests of all adapters, many with equal prompts or equal beginnings, and some of one token."""
    size = fleet.model.config["vocab_size"]
    text = [random.randrange(size) for _ in range(longest)]
    for number in range(count):
        length = random.choice((1, 2, 33, 64, 65, longest // 2))
        common = random.choice((0, length // 2, length))
        prompt = (*text[:common], *(random.randrange(size) for _ in range(length - common)))
        sampling = Sampling(max_tokens=random.choice((1, 5, 12)), temperature=0.0)
        yield Request(f"{number}", prompt, sampling, adapter=random.choice(list(fleet.folders)))


@pytest.mark.parametrize(
    ("family", "mode", "document"),
    [
        # Each value beside each other one, and all of them in long tests.
        ("Llama", "strict", BLOCKS),
        ("Llama", "strict", {**SLOTS, "asyncMode": True}),
        ("Qwen3", "damage", SLOTS),
        ("Qwen3", "damage", {**BLOCKS, "asyncMode": True}),
        pytest.param("Llama", "strict", SLOTS, marks=pytest.mark.long),
        pytest.param("Llama", "strict", {**BLOCKS, "asyncMode": True}, marks=pytest.mark.long),
        pytest.param("Llama", "damage", BLOCKS, marks=pytest.mark.long),
    ],
)
def test_each_request_gets_the_tokens_of_its_adapter(
    family: str, mode: Mode, document: dict[str, Any], fleets: dict[str, Fleet], tmp_path: Path
) -> None:
    with library(mode=mode):
        check_answers(fleets[family], document, tmp_path)


def check_answers(fleet: Fleet, document: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_for(fleet.model, **document, **ADAPTERS)
    backend = backend_for(fleet.model, settings, tmp_path / "artifact")
    backend.warm_up(lambda stage, share: None)
    random, engine = Random(7), Engine(backend)
    for name, folder in fleet.folders.items():
        if name:
            engine.load_adapter(name, folder)
    while engine.is_reading:
        assert all(not failure for _, failure in engine.take_adapter_news())
    waiting = list(some_requests(random, fleet, 120, 16))
    outputs: dict[str, list[int]] = {one.request_id: [] for one in waiting}
    requests = waiting[:]
    while waiting or engine.has_work:
        if waiting and random.random() < 0.3:
            engine.add(waiting.pop(0))
        if random.random() < 0.02:
            engine.drop_adapter("adapter-3")
            engine.load_adapter("adapter-3", fleet.folders["adapter-3"])
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        engine.take_adapter_news()
    engine.close()
    backend.close()
    for one in requests:
        assert len(outputs[one.request_id]) == one.sampling.max_tokens
        fleet.tuned[one.adapter].check(one, outputs[one.request_id])


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ({"adapters": {"maxActive": 2, "maxRank": 1}}, "$.adapters.maxRank", "at least 2"),
        ({**ADAPTERS, "overrideNeuronConfig": {"fused_qkv": True}}, "$.overrideNeuronConfig.fused_qkv", "adapters"),
        *[
            (
                {**ADAPTERS, "overrideNeuronConfig": {name: True}},
                f"$.overrideNeuronConfig.{name}",
                f"computes no adapters of {targets}: leave it out",
            )
            for name, targets in {
                "mlp_kernel_enabled": "gate_proj, up_proj, down_proj",
                "out_proj_kernel_enabled": "o_proj",
                "attn_block_tkg_nki_kernel_enabled": "q_proj, k_proj, v_proj, o_proj",
            }.items()
        ],
        (
            {**ADAPTERS, "overrideNeuronConfig": {"save_sharded_checkpoint": True}},
            "$.overrideNeuronConfig.save_sharded_checkpoint",
            "adapters",
        ),
        (
            {**ADAPTERS, "limits": {"maxSequences": 4}, "buckets": {"sequences": [1, 2]}},
            "$.buckets.sequences",
            "adapters",
        ),
        (
            {**ADAPTERS, "config": {"architectures": ["MistralForCausalLM"]}},
            "$.adapters.targets",
            "no adapters of gate_proj, up_proj, down_proj: set q_proj, k_proj, v_proj, o_proj",
        ),
        (
            {"overrideNeuronConfig": {"lora_config": {"max_loras": 2}}},
            "$.overrideNeuronConfig.lora_config",
            "set adapters.maxActive instead",
        ),
    ],
)
def test_what_the_library_cannot_combine_with_adapters_is_refused(
    document: dict[str, Any], path: str, message: str
) -> None:
    found = refusals(dict(document))
    assert list(found) == [path]
    assert message in found[path]


def test_a_kernel_of_other_projections_than_the_adapters_is_not_refused() -> None:
    adapters = {"maxActive": 2, "targets": ["q_proj", "up_proj"]}
    kernels = {"mlp_kernel_enabled": True, "out_proj_kernel_enabled": True}
    (refused,) = refusals({"adapters": adapters, "overrideNeuronConfig": kernels}).items()
    assert refused[0] == "$.overrideNeuronConfig.mlp_kernel_enabled"
    assert "computes no adapters of up_proj:" in refused[1]


@pytest.mark.parametrize("version", ["0.7", "0.8"])
def test_a_release_that_ignores_added_adapters_is_refused(version: str, tmp_path: Path) -> None:
    model = Model(tmp_path / "model")
    with library(version), pytest.raises(InvalidConfig, match=r"cannot add adapters while it serves"):
        backend_for(model, settings_for(model, **SLOTS, **ADAPTERS), tmp_path / "artifact")


def test_how_many_adapters_are_in_memory_changes_no_graph(tmp_path: Path) -> None:
    model = Model(tmp_path / "model")
    one, other = (
        settings_for(model, **SLOTS, adapters={"maxActive": 2, "maxLoaded": loaded}).neuron_config["lora_config"]
        for loaded in (2, 9)
    )
    assert one != other
    assert _without(one, _NOT_OF_GRAPHS) == _without(other, _NOT_OF_GRAPHS)


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (RANK, lambda one: one.fill_(float("nan")), r"infinite or none"),
        (RANK, lambda one: one.fill_(1e30), r"norms .* at most 10000"),
        (RANK, lambda one: one[:, :-1], r"name its model"),
        (1, lambda one: one, r"rank 1 is not supported"),
        (16, lambda one: one, r"rank 16, but the highest that is served is 8"),
    ],
)
def test_an_adapter_that_the_library_would_fail_on_is_refused_before_it_sees_it(
    rank: int, change: Callable[[torch.Tensor], torch.Tensor], message: str, fleets: dict[str, Fleet], tmp_path: Path
) -> None:
    fleet = fleets["Llama"]
    folder = write_adapter(fleet.model.folder, tmp_path / "bad", 1, rank=rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: change(tensors[name]).contiguous()}, folder / "adapter_model.safetensors")
    with library():
        backend = backend_for(fleet.model, settings_for(fleet.model, **SLOTS, **ADAPTERS), tmp_path / "artifact")
        with pytest.raises(FatalError, match=message):
            backend.read_adapter(folder)
        backend.close()


def test_an_adapter_of_rank_1_is_refused_before_the_library_sees_it(fleets: dict[str, Fleet], tmp_path: Path) -> None:
    fleet = fleets["Llama"]
    folder = write_adapter(fleet.model.folder, tmp_path / "thin", 1, rank=1)
    with library():
        backend = backend_for(fleet.model, settings_for(fleet.model, **SLOTS, **ADAPTERS), tmp_path / "artifact")
        with pytest.raises(FatalError, match=r"rank 1 is not supported: this backend computes ranks from 2 on"):
            backend.read_adapter(folder)
        backend.close()
