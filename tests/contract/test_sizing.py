"""Bytes of cache and activations, and numbers of graphs: what the operator plans with is what the runtime counts."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import FACTS, body
from neuron_operator.api.engines import own
from neuron_operator.api.manifest import parse
from neuron_operator.place import planner, sizing
from neuron_operator.place.catalog import FAMILIES
from neuron_operator.place.planner import adapter_room
from neuron_operator.place.sizing import AdapterRoom, Load, Widths, memory_of
from neuron_operator.read.records import EncoderFacts, Facts
from neuron_operator.render import resources
from neuron_operator.render.resources import MAX_MEASURED, MEASURED_TOKENS, in_host_memory, measuring_bytes
from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.backend.neuron import bucket_plan
from neuron_runtime.backend.neuron.devices import Target
from neuron_runtime.backend.nxdi import graph_plan
from neuron_runtime.backend.nxdi.graph_plan import plan_of
from neuron_runtime.backend.nxdi.models import BY_ARCHITECTURE
from neuron_runtime.backend.nxdi.settings import DEFAULT_SEGMENT_TOKENS, MIN_KERNEL_TOKENS
from neuron_runtime.backend.nxdi.vision import CHUNKS, needs_of
from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.sizing import _adapter_bytes, _memory
from neuron_runtime.backend.torch.vector_limits import DEFAULT_MAX_LENGTH, DEFAULT_STEP_TOKENS, vector_limits
from neuron_runtime.backend.torch.vector_models import shapes_of, vector_model
from neuron_runtime.checkpoint import TensorInfo
from neuron_runtime.config import AdapterOptions, MediaOptions, parse_config
from neuron_runtime.conversion import measuring
from neuron_runtime.conversion.plan import conversion_of
from neuron_runtime.core import grammar_bytes
from neuron_runtime.dtypes import BY_NAME, COMPUTED
from neuron_runtime.errors import FatalError
from neuron_runtime.host import FreeMemory
from neuron_runtime.pictures import reader
from neuron_runtime.recipes import Recipe

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2**20,
    "torch_dtype": "bfloat16",
}
NAMES = {
    "numLayers": "num_hidden_layers",
    "hiddenSize": "hidden_size",
    "numHeads": "num_attention_heads",
    "numKvHeads": "num_key_value_heads",
    "headDim": "head_dim",
    "vocabularySize": "vocab_size",
    "maxPositionEmbeddings": "max_position_embeddings",
    "intermediateSize": "intermediate_size",
}


def facts_of(config: dict[str, Any]) -> Facts:
    return msgspec.convert(FACTS | {ours: config[name] for ours, name in NAMES.items()}, Facts)


@pytest.mark.parametrize("max_rows", [1, 8, 32, 64, 256])
def test_operator_and_runtime_count_the_same_memory_for_forms(max_rows: int) -> None:
    assert own.grammar_bytes(max_rows) == grammar_bytes(max_rows)


def test_operator_and_runtime_have_the_same_constants() -> None:
    assert {name: BY_NAME[name].num_bytes for name in COMPUTED} == sizing.DTYPE_BYTES
    assert sizing.MAX_CONTEXT_BUCKETS == bucket_plan.MAX_CONTEXT_BUCKETS
    assert sizing.MAX_SEGMENT_BUCKETS == bucket_plan.MAX_SEGMENT_BUCKETS
    assert sizing.MAX_TOKEN_BUCKETS == bucket_plan.MAX_TOKEN_BUCKETS
    assert sizing.BUCKET_STEP == bucket_plan.STEP
    assert sizing.COMPILE_SECONDS_PER_LAYER == graph_plan.COMPILE_SECONDS_PER_LAYER
    assert sizing.SEGMENT_TOKENS == DEFAULT_SEGMENT_TOKENS
    assert sizing.SHORTEST_PREFIX == MIN_KERNEL_TOKENS


@given(
    st.fixed_dictionaries(
        {
            "num_hidden_layers": st.integers(1, 90),
            "hidden_size": st.sampled_from([512, 2048, 5120]),
            "num_key_value_heads": st.sampled_from([1, 2, 4, 8, 16]),
            "head_dim": st.sampled_from([64, 128, 256]),
            "vocab_size": st.integers(1000, 260_000),
        }
    ),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(1, 64),
    st.integers(4, 1024).map(lambda blocks: blocks * 32),
    st.sampled_from(["slots", "blocks"]),
)
def test_cache_and_activations_of_a_core_are_what_the_runtime_plans(
    shape: dict[str, Any], tensor: int, rows: int, length: int, layout: str
) -> None:
    model = CONFIG | shape
    num_blocks = rows * length // 32 if layout == "blocks" else 0
    document = {
        "version": 1,
        "model": {"uri": "hf://acme/tiny", "digest": "d"},
        "servedNames": ["chat"],
        "backend": "nxdi",
        "dtype": "auto",
        "limits": {
            "maxModelLength": length,
            "maxSequences": rows,
            **({"blockSize": 32, "numBlocks": num_blocks} if num_blocks else {}),
        },
        "parallelism": {"tensor": tensor},
        "compile": True,
    }
    planned = plan_of(parse_config(json.dumps(document).encode()), model, Target("trn2", 2, 64))
    prefill = sizing.longest_segment(length, 2) if num_blocks else length
    load = Load(length, rows, 32 if num_blocks else 0, num_blocks, longest_prefill=prefill)
    memory = memory_of(facts_of(model), Widths(), load, tensor, family=FAMILIES["trn2"], logical_core=2)
    assert memory.cache == -(-planned.cache_bytes // tensor)
    assert memory.scratch - sizing.SCRATCHPAD_BYTES == max(graph.activation_bytes for graph in planned.graphs)
    assert load.num_graphs >= len(planned.graphs)


ENCODERS: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": 10,
        "text_config": CONFIG | {"model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "Llama4ForConditionalGeneration": {
        "text_config": CONFIG,
        "vision_config": {"image_size": 336, "pixel_shuffle_ratio": 0.5, "hidden_size": 1408},
    },
    "Qwen3VLForConditionalGeneration": {"text_config": CONFIG, "vision_config": {}},
}


@pytest.mark.parametrize("length", [1024, 4096, 32768])
@pytest.mark.parametrize("pictures", [1, 8])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoder_of_pictures_takes_what_the_runtime_plans(architecture: str, pictures: int, length: int) -> None:
    model = ENCODERS[architecture] | {"architectures": [architecture]}
    document = {
        "version": 1,
        "model": {"uri": "hf://acme/tiny", "digest": "d"},
        "servedNames": ["chat"],
        "backend": "nxdi",
        "dtype": "bfloat16",
        "compile": True,
        "limits": {"maxModelLength": length, "maxSequences": 2},
        "media": {"maxImages": pictures},
    }
    planned = plan_of(parse_config(json.dumps(document).encode()), model, Target("trn2", 2, 1))
    encoders = [graph for graph in planned.graphs if graph.name.startswith("encode_")]
    counts = BY_ARCHITECTURE[architecture].pictures
    assert counts
    needs = EncoderFacts(**needs_of(model, counts, CONFIG["hidden_size"]))
    load = Load(length, 2, pictures=pictures)
    # One may be the largest for the runtime, which counts whole chunks, an even number of them.
    num_graphs = sizing.num_encoder_graphs(needs, load)
    assert num_graphs - len(encoders) in ((0, 1) if counts == CHUNKS else (0,))
    graphs = num_graphs * needs.layers * sizing.GRAPH_BYTES_PER_LAYER
    counted = sizing.encoder_bytes(needs, Widths(), load) - graphs
    assert counted == pytest.approx(encoders[-1].activation_bytes, rel=0.2 if length == 1024 else 0.06)
    # It is a part of what a core holds, and of the time to compile.
    facts = [msgspec.structs.replace(facts_of(CONFIG), encoder=one) for one in (needs, None)]
    seen, blind = (memory_of(one, Widths(), load, 1, family=FAMILIES["trn2"], logical_core=2) for one in facts)
    assert seen.parts["encoder"] == seen.total - blind.total == counted + graphs
    assert sizing.compile_minutes(facts[0], load) > sizing.compile_minutes(facts[1], load)


def test_operator_and_runtime_have_the_same_number_of_pictures() -> None:
    assert MediaOptions().max_images == planner.DEFAULT_PICTURES


def test_operator_and_runtime_bound_the_memory_of_pictures_alike() -> None:
    assert reader.NUM_AT_ONCE == resources.PICTURES_AT_ONCE
    assert reader.MAX_READ_BYTES == resources.READ_BYTES
    assert MediaOptions().max_pixels == resources.DEFAULT_MAX_PIXELS


@pytest.mark.parametrize("tied", [False, True])
def test_on_the_host_a_token_takes_as_many_bytes_as_the_runtime_counts(tied: bool) -> None:
    config = decoder_config(CONFIG | {"tie_word_embeddings": tied})
    counted = _memory(config, 2, FreeMemory(2**40), rows=8, places=8, step_tokens=512)
    facts = facts_of(CONFIG)
    assert sizing.cached_numbers(facts) * 2 == counted.per_token
    embedding = 128_256 * 4096
    stored = counted.weights // 2 - embedding * (1 + tied)
    facts = msgspec.structs.replace(facts, parameters=stored, weights_bytes=2 * stored)
    model = parse(body({"model": {"uri": "hf://acme/tiny"}, "accelerator": {"type": "CPU"}}))
    assert own.packed(in_host_memory(model, facts)) >= counted.weights


@pytest.mark.parametrize("length", [0, 128, 8192])
def test_a_pod_requests_what_a_model_for_vectors_takes(length: int) -> None:
    assert (sizing.VECTOR_STEP_TOKENS, sizing.VECTOR_LENGTH) == (
        DEFAULT_STEP_TOKENS,
        DEFAULT_MAX_LENGTH,
    )
    encoder = CONFIG | {"architectures": ["XLMRobertaModel"], "vocab_size": 250_002, "pad_token_id": 1}
    encoder |= {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    model = vector_model(encoder | {"max_position_embeddings": 8194})
    num_bytes = 4 * sum(map(math.prod, shapes_of(model).values()))
    shape = {"num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 8192}
    facts = msgspec.structs.replace(
        facts_of(encoder | shape), parameters=num_bytes // 4, weights_bytes=num_bytes, dtype="float32"
    )
    serving = {"task": "Embed", **({"maxModelLength": length} if length else {})}
    spec = {"model": {"uri": "hf://acme/tiny"}, "accelerator": {"type": "CPU"}, "serving": serving}
    needed = own.TORCH.memory(in_host_memory(parse(body(spec)), facts))
    document = {"version": 1, "model": {"uri": "hf://acme/tiny"}, "servedNames": ["a"], "backend": "torch"}
    document |= {"task": "embed", "limits": {"maxModelLength": length} if length else {}}
    limits = vector_limits(parse_config(json.dumps(document).encode()), model, Recipe(), 4, FreeMemory(needed))
    assert limits.max_model_length == (length or 8192)
    less = FreeMemory(int(needed * 0.6))
    with pytest.raises(FatalError, match="not enough memory"):
        vector_limits(parse_config(json.dumps(document).encode()), model, Recipe(), 4, less)


@pytest.mark.parametrize("tied", [False, True])
def test_the_advice_to_quantize_counts_the_bytes_that_the_runtime_would_write(tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    tensors = {
        name: TensorInfo(name, "BF16", shape, "model.safetensors", 0, 2 * math.prod(shape))
        for name, shape in tensor_shapes(decoder_config(config)).items()
    }
    planned = conversion_of(config, tensors, "nxdi", "int8")
    num_bytes = sum(one.num_bytes for one in tensors.values())
    facts = msgspec.structs.replace(
        facts_of(config), parameters=num_bytes // 2, weights_bytes=num_bytes, tied_embeddings=tied
    )
    assert planned is not None
    assert sizing.quantized(facts, "int8").read_bytes == planned.num_bytes


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_operator_and_runtime_count_the_same_memory_for_adapters(targets: tuple[str, ...]) -> None:
    options = AdapterOptions(max_active=4, max_rank=16, targets=targets, max_loaded=9)  # type: ignore[arg-type]
    serving = {"adapters": {"maxActive": 4, "maxLoaded": 9, "targets": list(targets)}}
    room = adapter_room(
        parse(body({"model": {"uri": "hf://acme/tiny"}, "engine": {"backend": "torch"}, "serving": serving}))
    )
    assert room is not None
    facts = facts_of(CONFIG)
    assert 14 * sizing.adapter_bytes(facts, room, 2) == _adapter_bytes(decoder_config(CONFIG), options, 2)


def test_each_core_holds_adapters_for_all_places_and_sequences() -> None:
    facts, load = facts_of(CONFIG), Load(length=4096, sequences=8)
    room = AdapterRoom(num_places=3, num_loaded=3, rank=16, targets=TARGETS)
    with_room = Load(length=4096, sequences=8, adapters=room)
    trn1 = FAMILIES["trn1"]
    one, eight = (
        memory_of(facts, Widths(), with_room, tensor, family=trn1, logical_core=1).adapters for tensor in (1, 8)
    )
    assert one == (3 + 1 + 8) * sizing.adapter_bytes(facts, room, 2)
    assert one // 8 < eight < one
    assert memory_of(facts, Widths(), load, 1, family=trn1, logical_core=1).adapters == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_job_that_converts_requests_what_measuring_the_result_takes(dtype: str, tied: bool) -> None:
    model = decoder_config({**CONFIG, "tie_word_embeddings": tied})
    parameters = sum(math.prod(shape) for shape in tensor_shapes(model).values())
    facts = msgspec.convert(
        FACTS
        | {
            "vocabularySize": model.vocabulary_size,
            "hiddenSize": model.hidden_size,
            "numLayers": model.num_layers,
            "parameters": parameters,
            "tiedEmbeddings": tied,
            "dtype": dtype,
        },
        Facts,
    )
    assert measuring_bytes(facts) == measuring.memory_of(model, parameters, BY_NAME[dtype].num_bytes)
    assert (MAX_MEASURED, MEASURED_TOKENS) == (measuring.MAX_PARAMETERS, measuring.MAX_TOKENS)
