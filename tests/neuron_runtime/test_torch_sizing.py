"""Limits derived from configuration, shape and free memory; what does not fit is refused with the numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from helpers.random_model import model_config
from helpers.torch_models import runtime_config
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.held import MULTIPLIED_OUT, Held, weight_bytes
from neuron_runtime.backend.torch.sizing import derive_limits
from neuron_runtime.backend.torch.towers import MostOfPicture, TowerNeeds
from neuron_runtime.config import AdapterOptions
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.host import FreeMemory

GIB = 2**30
MODEL = decoder_config(
    model_config(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=2560,
        vocabulary_size=32000,
        max_position_embeddings=8192,
    )
)
BYTES_PER_TOKEN = 2 * 12 * 4 * 64 * 2


def limits(available_bytes: int = 16 * GIB, **config: Any) -> BackendLimits:
    return derive_limits(runtime_config(**config), MODEL, 2, FreeMemory(available_bytes))


def test_weights_that_are_held_as_int8_numbers_leave_their_memory_to_the_cache() -> None:
    shapes = tensor_shapes(MODEL)
    int8 = frozenset(name for name in shapes if name.endswith("_proj.weight"))
    saved = sum(math.prod(shapes[name]) - 2 * shapes[name][0] for name in int8)

    def blocks(available: int, held: Held) -> int:
        config = runtime_config(layout="blocks", max_sequences=500)
        return derive_limits(config, MODEL, 2, FreeMemory(available), held=held).num_blocks

    more = blocks(2 * GIB, Held(int8)) - blocks(2 * GIB, MULTIPLIED_OUT)
    assert more == pytest.approx(saved / (16 * BYTES_PER_TOKEN), abs=1)


def test_weights_in_blocks_have_a_scale_of_four_bytes_for_each_row_of_each() -> None:
    held = Held(frozenset({"weight"}), tiled=True, kind="fp8", span=128)
    assert weight_bytes({"weight": (10, 300), "norm": (10,)}, 2, held) == 10 * (300 + 3 * 4) + 20


def test_with_enough_memory_the_defaults_are_eight_slots_of_the_model_length() -> None:
    found = limits()
    assert (found.layout, found.max_rows, found.max_model_length, found.max_step_tokens) == ("slots", 8, 8192, 512)
    assert (found.block_size, found.num_blocks, found.max_drafts) == (8192, 8, 0)
    assert (found.steps_in_flight, found.token_feedback) == (2, "device")


def test_drafts_take_memory_for_their_logits() -> None:
    few, many = (limits(GIB, max_drafts=number) for number in (0, 8))
    assert (few.max_drafts, many.max_drafts) == (0, 8)
    logits = 8 * 8 * 32000 * 3 * 4  # of eight rows
    missing = (few.max_model_length - many.max_model_length) * 8 * BYTES_PER_TOKEN
    assert abs(missing - logits) <= 8 * BYTES_PER_TOKEN


def test_setting_a_block_size_or_count_selects_blocks() -> None:
    assert limits(block_size=32).layout == limits(num_blocks=1024).layout == limits(layout="blocks").layout == "blocks"
    found = limits(layout="blocks", max_model_length=100, max_sequences=3)
    assert (found.block_size, found.num_blocks, found.max_model_length) == (16, 3 * 7, 100)


def test_prefix_sharing_is_on_by_default_and_selects_blocks_when_requested() -> None:
    assert limits(layout="blocks").shares_prefixes
    assert not limits(layout="blocks", prefix_caching="disabled").shares_prefixes
    assert not limits().shares_prefixes
    found = limits(prefix_caching="enabled")
    assert (found.layout, found.shares_prefixes) == ("blocks", True)
    with pytest.raises(InvalidConfig, match="cannot share prefixes; leave out the layout, or use blocks") as caught:
        limits(layout="slots", prefix_caching="enabled")
    assert caught.value.field == "$.prefixCaching"


def test_chunked_prefill_is_on_by_default() -> None:
    assert limits().chunks_prefill
    assert limits(chunked_prefill="enabled").chunks_prefill
    assert not limits(chunked_prefill="disabled").chunks_prefill


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_unset_limits_shrink_with_memory_down_to_a_useful_minimum(layout: str) -> None:
    for available in (2 * GIB, 1 * GIB, GIB * 3 // 4):
        found = limits(available, layout=layout)
        taken = found.num_blocks * found.block_size * BYTES_PER_TOKEN
        assert taken < available * 0.9 - 2 * 139_000_000
        assert found.max_model_length <= found.num_blocks * found.block_size
    with pytest.raises(FatalError, match=r"90% of 0\.30 GiB free may be used: weights 0\.\d\d GiB, scratch") as caught:
        limits(int(0.3 * GIB), layout=layout)
    assert caught.value.exit_code is ExitCode.DEVICE_OUT_OF_MEMORY


def test_a_refusal_for_lack_of_memory_names_the_limit_that_would_do() -> None:
    config, limit = runtime_config(), GIB
    with pytest.raises(FatalError, match=r"0\.20 GiB free of the limit of 1\.00 GiB may be used") as caught:
        derive_limits(config, MODEL, 2, FreeMemory(GIB // 5, limit))
    assert "NeuronModel: podTemplate.spec.resources.limits.memory" in str(caught.value)
    found = re.search(r"raise the memory limit to at least ([\d.]+) GiB", str(caught.value))
    assert found
    raised = int((float(found[1]) + 0.01) * GIB)
    served = derive_limits(config, MODEL, 2, FreeMemory(GIB // 5 + raised - limit, raised))
    assert served.max_model_length >= 8
    with pytest.raises(FatalError, match=r"free at least 0\.\d\d GiB, or use a machine with more memory"):
        limits(GIB // 5)


def test_a_model_length_of_one_token_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least 2"):
        limits(max_model_length=1)


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "longer than the model": (
        "$.limits.maxModelLength",
        "must be at most the model's 8192 positions, got 9000",
        {"max_model_length": 9000},
    ),
    "fewer step tokens than rows": (
        "$.limits.maxStepTokens",
        r"must be at least maxSequences \(32\), one token each; got 16",
        {"max_step_tokens": 16, "max_sequences": 32},
    ),
    "slots with blocks": ("$.layout", "layout slots has no blocks", {"layout": "slots", "block_size": 16}),
    "length beyond memory": (
        "$.limits.maxModelLength",
        "8 sequences of 8192 tokens do not fit: 90% of 1.00 GiB free",
        {"max_model_length": 8192, "available_bytes": GIB},
    ),
    "sequences beyond memory": (
        "$.limits.maxSequences",
        "512 sequences of 64 tokens do not fit",
        {"max_sequences": 512, "available_bytes": GIB * 5 // 4},
    ),
    "blocks beyond memory": (
        "$.limits.numBlocks",
        r"100000 blocks of 16 tokens do not fit, at most \d+ do",
        {"num_blocks": 100_000, "available_bytes": 2 * GIB},
    ),
    "blocks short of one sequence": (
        "$.limits.numBlocks",
        "one sequence of 1000 tokens needs 63 blocks of 16, but there are 62",
        {"num_blocks": 62, "max_model_length": 1000},
    ),
    "a sequence beyond memory, in blocks": (
        "$.limits.maxModelLength",
        "one sequence of 8192 tokens needs 512 blocks",
        {"layout": "blocks", "max_model_length": 8192, "available_bytes": int(0.6 * GIB)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_limits_are_refused_with_field_and_numbers(case: str) -> None:
    field, message, config = REFUSED[case]
    with pytest.raises(InvalidConfig, match=message) as caught:
        limits(**config)
    assert caught.value.field == field


def test_adapters_take_memory_of_the_cache_and_are_named_in_the_arithmetic() -> None:
    per_adapter = 12 * 16 * (2 * (768 + 768) + 2 * (768 + 256) + 3 * (768 + 2560)) * 2
    adapters = AdapterOptions(max_active=4, max_loaded=7)
    # One more than these may be read at a time.
    without = limits(available_bytes=GIB).max_model_length
    found = limits(available_bytes=GIB, adapters=adapters)
    assert without - found.max_model_length in {12 * per_adapter // (8 * BYTES_PER_TOKEN) + one for one in (0, 1)}
    assert (found.max_adapters, found.max_loaded_adapters, found.max_adapter_rank) == (4, 7, 16)
    assert limits(adapters=AdapterOptions(max_active=4)).max_loaded_adapters == 4
    assert limits().max_adapters == limits().max_loaded_adapters == 0
    with pytest.raises(FatalError, match=r"adapters [\d.]+ GiB, scratch"):
        limits(available_bytes=GIB, adapters=AdapterOptions(max_active=64, max_rank=64))


def test_a_step_has_room_for_a_picture_whose_tokens_see_each_other_beside_all_other_rows() -> None:
    pictures = TowerNeeds(MostOfPicture(tokens=600, patches=4096), weights=0, scratch=0, feeds_whole=True)

    def found(**config: Any) -> BackendLimits:
        return derive_limits(runtime_config(max_sequences=4, **config), MODEL, 2, FreeMemory(GIB), pictures=pictures)

    assert found().max_step_tokens == 603
    assert found(max_step_tokens=603).feeds_pictures_whole
    with pytest.raises(InvalidConfig, match=r"must be at least 603: the 600 tokens of a picture.*; got 602") as refused:
        found(max_step_tokens=602)
    assert refused.value.field == "$.limits.maxStepTokens"
    assert found(max_step_tokens=64, chunked_prefill="disabled").max_step_tokens == 64
