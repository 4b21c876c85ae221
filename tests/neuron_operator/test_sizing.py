"""The memory of a core: never less for more work, and close to what was reported from real devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from helpers.manifests import CASES
from helpers.operator_worlds import FACTS
from neuron_operator.place.catalog import FAMILIES, GIB, INSTANCE_TYPES, MIB
from neuron_operator.place.sizing import (
    Load,
    Memory,
    Widths,
    cached_heads,
    host_bytes,
    memory_of,
    start_seconds,
    weights_bytes,
)
from neuron_operator.read.records import Facts

PUBLIC = yaml.safe_load((CASES / "sizing" / "models.yaml").read_text())
LLAMA_8B = msgspec.convert(
    FACTS
    | {
        "parameters": 8_030_261_248,
        "weightsBytes": 16_060_522_496,
        "numLayers": 32,
        "hiddenSize": 4096,
        "numHeads": 32,
        "numKvHeads": 8,
        "headDim": 128,
        "vocabularySize": 128_256,
        "maxPositionEmbeddings": 8192,
        "intermediateSize": 14_336,
        "tiedEmbeddings": False,
    },
    Facts,
)
LLAMA_70B = msgspec.structs.replace(
    LLAMA_8B,
    parameters=70_553_706_496,
    weights_bytes=141_107_412_992,
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    intermediate_size=28_672,
)


def on(family: str, facts: Facts, tensor: int, load: Load) -> Memory:
    kind = FAMILIES[family]
    return memory_of(facts, Widths(), load, tensor, family=kind, logical_core=kind.logical_core)


SIZES: dict[str, st.SearchStrategy[Any]] = {
    "parameters": st.integers(1, 10**12),
    "weights_bytes": st.integers(1, 10**13),
    "num_layers": st.integers(1, 200),
    "hidden_size": st.integers(1, 2**15),
    "num_heads": st.integers(1, 128),
    "num_kv_heads": st.integers(1, 128),
    "head_dim": st.integers(1, 512),
    "vocabulary_size": st.integers(1, 300_000),
    "intermediate_size": st.integers(0, 2**17),
    "num_experts": st.integers(0, 256),
    "tied_embeddings": st.booleans(),
}
MODELS = st.fixed_dictionaries(SIZES).map(lambda sizes: msgspec.structs.replace(LLAMA_8B, **sizes))
LOADS = st.builds(
    Load,
    length=st.integers(2, 2**17),
    sequences=st.integers(1, 256),
    block_size=st.sampled_from([0, 16, 32, 128]),
    num_blocks=st.integers(1, 10_000),
)
FAMILY = st.sampled_from(sorted(FAMILIES))
DEGREE = st.sampled_from(sorted({d for family in FAMILIES.values() for d in family.degrees}))


@given(MODELS, LOADS, FAMILY, DEGREE, st.tuples(st.integers(0, 2**16), st.integers(0, 64), st.integers(0, 64)))
def test_longer_and_more_sequences_never_take_less(
    facts: Facts, load: Load, family: str, tensor: int, more: tuple[int, int, int]
) -> None:
    larger = replace(
        load,
        length=load.length + more[0],
        sequences=load.sequences + more[1],
        num_blocks=load.num_blocks + more[2],
    )
    before, after = on(family, facts, tensor, load), on(family, facts, tensor, larger)
    assert all(after.parts[name] >= part for name, part in before.parts.items())
    assert after.fits <= before.fits


@given(MODELS, LOADS, FAMILY, DEGREE)
def test_the_cores_together_hold_the_whole_model_and_the_whole_cache(
    facts: Facts, load: Load, family: str, tensor: int
) -> None:
    memory = on(family, facts, tensor, load)
    assert memory.weights * tensor >= facts.parameters * 2
    assert memory.cache * tensor >= 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * load.cached_tokens * 2
    assert memory.limit < FAMILIES[family].core_memory * FAMILIES[family].logical_core
    assert memory.fits == (sum(memory.parts.values()) <= memory.limit)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "held"),
    [(32, 8, 2, 8), (32, 8, 8, 8), (32, 8, 32, 32), (28, 4, 7, 28), (48, 8, 12, 48), (32, 32, 8, 32), (6, 2, 3, 6)],
)
def test_heads_that_the_cores_cannot_share_out_are_held_repeatedly(
    heads: int, kv_heads: int, tensor: int, held: int
) -> None:
    facts = msgspec.structs.replace(LLAMA_8B, num_heads=heads, num_kv_heads=kv_heads)
    assert cached_heads(facts, tensor) == held


def test_repeated_heads_tied_embeddings_and_routers_take_their_weights() -> None:
    even = weights_bytes(LLAMA_8B, Widths(), 8)
    assert even == 2 * LLAMA_8B.parameters // 8 + 2 * 32 * 4096 * 2
    repeated = 2 * 32 * 24 * 128 * 4096
    assert weights_bytes(LLAMA_8B, Widths(), 32) == 2 * (LLAMA_8B.parameters + repeated) // 32 + 2 * 32 * 4096 * 2
    tied = msgspec.structs.replace(LLAMA_8B, tied_embeddings=True)
    assert weights_bytes(tied, Widths(), 8) - even == 2 * 128_256 * 4096 // 8
    routed = msgspec.structs.replace(LLAMA_8B, num_experts=64)
    assert weights_bytes(routed, Widths(), 8) - even == 2 * 32 * 4096 * 64
    assert weights_bytes(LLAMA_8B, Widths(weights=1), 8) < 0.51 * even


@pytest.mark.parametrize(
    ("facts", "cores", "load", "loaded"),
    [
        # In Hugging Face's cache of models compiled for inf2.
        (LLAMA_8B, 2, Load(4096, 8), True),
        (LLAMA_8B, 8, Load(4096, 32), True),
        (LLAMA_70B, 24, Load(4096, 4), True),
        # transformers-neuronx#92.
        (LLAMA_70B, 12, Load(4096, 1), False),
    ],
)
def test_what_was_reported_to_fit_fits_and_what_did_not_does_not(
    facts: Facts, cores: int, load: Load, loaded: bool
) -> None:
    assert on("inf2", facts, cores, load).fits == loaded


def test_the_estimate_allows_what_is_published_to_run_on_as_many_cores() -> None:
    refused = set()
    for one in yaml.safe_load((CASES / "sizing" / "recipes.yaml").read_text())["recipes"]:
        widths = Widths(weights=one.get("weights", 2))
        family = FAMILIES[one["family"]]
        facts, load = msgspec.convert(PUBLIC[one["model"]], Facts), Load(one["length"], one["sequences"])
        if not memory_of(facts, widths, load, one["cores"], family=family, logical_core=family.logical_core).fits:
            refused.add(one["model"])
    assert refused == {"Qwen/Qwen3-235B-A22B"}, "its sequences are divided among groups of cores"


def test_weights_and_cache_are_close_to_those_reported_from_a_full_core() -> None:
    memory, reported = on("inf2", LLAMA_70B, 12, Load(4096, 1)), 13.17 * GIB
    assert abs(memory.weights + memory.cache - reported) < 0.1 * reported


def test_loading_takes_the_checkpoint_and_its_shards_on_the_host() -> None:
    assert host_bytes(LLAMA_8B, Widths()) == 512 * MIB + 2 * LLAMA_8B.weights_bytes
    packed = msgspec.structs.replace(LLAMA_8B, weights_bytes=LLAMA_8B.parameters // 2)
    assert host_bytes(packed, Widths()) == 512 * MIB + LLAMA_8B.parameters * 5 // 2


def test_the_table_of_types_agrees_with_itself() -> None:
    for kind in INSTANCE_TYPES.values():
        assert kind.price > 0
        assert kind.vcpus >= 4
        assert kind.host_memory > kind.devices * GIB
        devices = kind.sizes("PluginWithExtension", in_cores=False)
        assert set(kind.sizes("Plugin", in_cores=False)) <= set(devices)
        cores = {kind.cores_per_device * count for count in devices}
        assert kind.family.degrees[0] == 1
        assert max(kind.family.degrees) <= max(other.cores for other in INSTANCE_TYPES.values())
        assert any(degree in cores for degree in kind.family.degrees)


def test_a_start_may_take_an_hour_or_three_times_what_reading_copying_and_compiling_take() -> None:
    assert start_seconds(LLAMA_8B, 0) == 3600
    assert start_seconds(LLAMA_8B, 12) == 3600
    assert start_seconds(LLAMA_8B, 60) == 3 * (160 + 16 + 3600)
    assert start_seconds(LLAMA_70B, 0) == 3 * (1411 + 141)
    assert start_seconds(msgspec.structs.replace(LLAMA_70B, weights_bytes=2**53), 2**31) == 86_400
