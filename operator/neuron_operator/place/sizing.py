"""The memory that a compiled model takes on each NeuronCore, and on the host while it is loaded: `memory_of`.

Called by `placement`, and by `render.resources` for the host. An estimate from shapes, before anything is compiled.
Where the runtime counts the same bytes itself (cache, activations), a contract test holds both equal; the other terms
are upper bounds with their sources. Pure arithmetic: it knows no instance type and no field of a NeuronModel.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from neuron_operator.api.engines.engine import START_SECONDS, TORCH_BYTES, CacheBudget
from neuron_operator.place.catalog import MIB, Family
from neuron_operator.read.placement import counted
from neuron_operator.read.records import EncoderFacts, Facts, PlannedConversion

USABLE_SHARE = 0.95
"""The share of a core's memory to plan with; the rest is for what is not counted here. Reports of full cores
end at 15.97 of 16 GiB (aws-neuron/transformers-neuronx#49 and #92)."""

MICROCODE_BYTES = 96 * MIB
"""Each physical core holds so much ("Neuron device memory" in the documentation of the Neuron runtime)."""
COLLECTIVES_BYTES = 512 * MIB
"""Each logical core holds so much, if there are several: 367 and 518 MiB reported (transformers-neuronx#92 and #49)."""
SCRATCHPAD_BYTES = 512 * MIB
"""Shared by all graphs of a core, in addition to activations (the same reports)."""
GRAPH_BYTES_PER_LAYER = 2 * MIB
"""Code and DMA rings of one graph, each of which is loaded on every core. From 386 MiB of code and 1,471 MiB of rings
of a model with 80 layers in 12 graphs (transformers-neuronx#92)."""

COMPILE_SECONDS_PER_LAYER = 2.4
"""For one layer of one graph: AWS states 15 minutes for a model of 15 GB, with 32 layers and 12 graphs. As the
runtime's."""

READ_BYTES_PER_SECOND = 10**8
"""At which weights are read from a volume or over a network that is slow: a network of 1 Gbit/s, or a shared file
system."""
COPY_BYTES_PER_SECOND = 10**9
"""At which they are brought to devices, or to where the host computes with them."""
START_FACTOR = 3
"""A start may take so many times as long as that. Too long only delays a restart; too short would end a start that goes
well."""
MAX_START_SECONDS = 86_400

MAX_CONTEXT_BUCKETS = 12
MAX_SEGMENT_BUCKETS = 4
"""With blocks, each with every size of prefix."""
MAX_TOKEN_BUCKETS = 8
"""The runtime chooses at most so many sizes; a contract test compares the numbers of graphs."""
BUCKET_STEP = 128
SEGMENT_TOKENS = 2048
"""Longest prefill of one call where prompts are computed in segments; see `longest_segment`."""
SHORTEST_PREFIX = 512

VECTOR_STEP_TOKENS, VECTOR_LENGTH = 2048, 8192
"""Tokens of the texts that are computed together, and of the longest text, unless the manifest says. As the runtime's
defaults."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED = ("int8", "float8_e4m3fn")
"""What quantized weights are computed in without being multiplied out, where an engine can."""
COMPUTED_IN = "bfloat16"
"""What weights are computed in that are stored in none of these types (FP8, MXFP4)."""


def longest_segment(length: int, logical_core: int) -> int:
    """Tokens of the longest call where prompts are computed in segments, for a model of this length."""
    half = -(-length // (2 * BUCKET_STEP)) * BUCKET_STEP
    least = SHORTEST_PREFIX if logical_core == 1 else BUCKET_STEP
    return min(length, SEGMENT_TOKENS, max(half, least))


@dataclass(frozen=True)
class Widths:
    """Bytes of one number."""

    weights: int = 2
    cache: int = 2
    activations: int = 2


@dataclass(frozen=True)
class AdapterRoom:
    """What a replica has room for of adapters."""

    num_places: int
    """Of running requests."""
    num_loaded: int
    """In the host's memory."""
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """What a replica has room for, and what it is compiled for."""

    length: int
    """Tokens of a prompt and its answer together."""
    sequences: int
    block_size: int = 0
    """Tokens; 0: the layout is slots, a line of the model's length for each sequence."""
    num_blocks: int = 0
    longest_prefill: int = 0
    """The most tokens of one prefill; 0: the length."""
    context_buckets: int = 0
    """Number; 0: the runtime chooses them, as the token buckets."""
    token_buckets: int = 0
    adapters: AdapterRoom | None = None
    pictures: int = 0
    """Of a prompt."""
    decode_sizes: int = 0
    """Numbers of sequences that have their own graph for decoding; 0: as in NxD Inference."""

    @property
    def cached_tokens(self) -> int:
        """With blocks, engines add one for what is not kept."""
        return (self.num_blocks + 1) * self.block_size if self.block_size else self.sequences * self.length

    @property
    def num_graphs(self) -> int:
        """At most so many are compiled and loaded."""
        if self.decode_sizes:
            return (self.context_buckets or 1) + self.decode_sizes * (self.token_buckets or 1)
        steps = -(-self.length // BUCKET_STEP)
        tokens = self.token_buckets or min(MAX_TOKEN_BUCKETS, steps)
        if not self.block_size:
            return (self.context_buckets or min(MAX_CONTEXT_BUCKETS, steps)) + tokens
        prefixes, size = 2, max(SHORTEST_PREFIX, self.block_size)  # none, and the whole length
        while size < self.length:
            prefixes, size = prefixes + 1, size * 4
        return (self.context_buckets or min(MAX_SEGMENT_BUCKETS, steps)) * prefixes + tokens

    @property
    def words(self) -> str:
        blocks = f" in {self.num_blocks} blocks of {self.block_size}" if self.block_size else ""
        return f"{counted(self.sequences, 'sequence')} of {self.length} tokens{blocks}"


@dataclass(frozen=True)
class Memory:
    """Bytes of one logical core."""

    weights: int
    cache: int
    graphs: int
    """Code and DMA rings of all of them."""
    scratch: int
    """Activations of the largest graph, and the scratchpad."""
    runtime: int
    """Microcode and collectives."""
    limit: int
    """What may be used of the core's memory."""
    adapters: int = 0
    draft: int = 0
    """Weights, cache and graphs of a draft model."""
    encoder: int = 0
    """Graphs of an encoder of pictures, activations of the largest, and features; its weights are among the others."""
    cache_limit: int | None = None
    """What the engine leaves to the cache; None: all that is free."""
    least_cache: int = 0
    """With less to leave, it does not start."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit and self.cache_fits

    @property
    def cache_fits(self) -> bool:
        return self.cache_limit is None or max(self.cache, self.least_cache) <= self.cache_limit

    @property
    def parts(self) -> dict[str, int]:
        names = ("weights", "adapters", "draft", "encoder", "cache", "graphs", "scratch", "runtime")
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part or name not in ("adapters", "draft", "encoder")}


def memory_of(
    facts: Facts,
    widths: Widths,
    load: Load,
    tensor: int,
    *,
    family: Family,
    logical_core: int,
    budget: CacheBudget | None = None,
) -> Memory:
    """What each of the logical cores holds that share a model.

    Args:
        tensor: how many they are.
        logical_core: physical cores of each.
        budget: of the engine, if it has one.
    """
    weights, memory = weights_bytes(facts, widths, tensor), logical_core * family.core_memory
    shared = int(budget.utilization * memory) if budget else 0
    return Memory(
        weights=weights,
        cache=_up(cached_numbers(facts, tensor) * load.cached_tokens * widths.cache, tensor),
        graphs=load.num_graphs * facts.num_layers * GRAPH_BYTES_PER_LAYER,
        scratch=SCRATCHPAD_BYTES + activation_bytes(facts, widths, load, tensor),
        runtime=logical_core * MICROCODE_BYTES + (COLLECTIVES_BYTES if tensor > 1 else 0),
        limit=int(USABLE_SHARE * memory),
        adapters=core_adapter_bytes(facts, widths, load, tensor),
        draft=draft_bytes(facts.draft, widths, load, tensor) if facts.draft else 0,
        encoder=encoder_bytes(facts.encoder, widths, load) if facts.encoder and load.pictures else 0,
        cache_limit=max(0, min(shared - weights, int(budget.share * shared))) if budget else None,
        least_cache=budget.min_bytes if budget else 0,
    )


def draft_bytes(draft: Facts, widths: Widths, load: Load, tensor: int) -> int:
    """Per core: its weights, a cache for as many tokens as the model's, and its part of each graph. It is computed in
    the model's types."""
    cache = _up(cached_numbers(draft, tensor) * load.cached_tokens * widths.cache, tensor)
    graphs = load.num_graphs * draft.num_layers * GRAPH_BYTES_PER_LAYER
    return weights_bytes(draft, widths, tensor) + cache + graphs


def encoder_bytes(encoder: EncoderFacts, widths: Widths, load: Load) -> int:
    """Per core: what an encoder of pictures takes besides its weights. Each core counts with all of its activations."""
    tokens = encoder_tokens(encoder, load)
    scores = (encoder.scores + encoder.squared_scores * tokens) * DTYPE_BYTES["float32"]
    graphs = num_encoder_graphs(encoder, load) * encoder.layers * GRAPH_BYTES_PER_LAYER
    return graphs + tokens * (encoder.numbers * widths.activations + scores)


def encoder_tokens(encoder: EncoderFacts, load: Load) -> int:
    """That stand for the pictures of the largest call."""
    longest = (load.longest_prefill or load.length) - 1  # see `spare` of the runtime
    return min(load.pictures * encoder.picture_tokens, encoder.most_tokens or longest, longest)


def num_encoder_graphs(encoder: EncoderFacts, load: Load) -> int:
    return 1 + sum(size < encoder_tokens(encoder, load) for size in encoder.sizes)


def cached_heads(facts: Facts, tensor: int) -> int:
    """Heads of keys and values that the cores hold together: what they cannot share out evenly they hold repeatedly, at
    worst one for each head of queries."""
    cached = max(facts.num_kv_heads, 1)
    if cached % tensor == 0:
        return cached
    return tensor if tensor % cached == 0 else max(facts.num_heads, cached)


def cached_numbers(facts: Facts, tensor: int = 1) -> int:
    """Numbers of keys and values per token, on all cores together. Layers with a sliding window count as others."""
    return 2 * facts.num_layers * cached_heads(facts, tensor) * facts.head_dim


def weights_bytes(facts: Facts, widths: Widths, tensor: int) -> int:
    """Per core. Matrices are shared out, experts included. Each core has all norms and routers; and heads of keys and
    values that are held repeatedly have their weights repeated. Embedding and head are two matrices on the device, of
    which no conversion changes the head."""
    head = facts.vocabulary_size * facts.hidden_size if facts.tied_embeddings else 0
    repeated = cached_heads(facts, tensor) - max(facts.num_kv_heads, 1)
    projections = 2 * facts.num_layers * max(repeated, 0) * facts.head_dim * facts.hidden_size
    whole = facts.num_layers * facts.hidden_size * (2 + facts.num_experts) if tensor > 1 else 0
    if facts.conversion is None:
        shared = (facts.parameters + head + projections) * widths.weights
    else:
        stored = facts.conversion.bytes
        shared = stored + projections * stored // max(facts.parameters, 1) + head * widths.activations
    return _up(shared, tensor) + whole * widths.activations


def is_quantized(facts: Facts) -> bool:
    """Whether the checkpoint is, also by facts of versions that did not tell how."""
    return bool(facts.quantization or facts.conversion) or facts.dtype not in DTYPE_BYTES


def quantized(facts: Facts, stored_format: str) -> Facts:
    """The facts as a conversion to numbers of 8 bits would make them, which nobody has asked for: matrices of layers
    with a scale of 4 bytes for each output; embedding, head and norms as they are."""
    hidden, vocabulary = facts.hidden_size, facts.vocabulary_size * facts.hidden_size
    kept = vocabulary * (1 if facts.tied_embeddings else 2) + (2 * facts.num_layers + 1) * hidden
    outputs = facts.num_layers * sum(outputs for _, outputs in _projections(facts).values())
    numbers = max(facts.parameters - kept, 0) + 4 * outputs + kept * width_of(facts.dtype)
    return structs.replace(facts, conversion=PlannedConversion(digest="0" * 64, format=stored_format, bytes=numbers))


def adapter_bytes(facts: Facts, room: AdapterRoom, width: int) -> int:
    """One adapter of the largest rank on the host, on all projections that it may change."""
    shapes = _projections(facts)
    return facts.num_layers * room.rank * width * sum(sum(shapes[target]) for target in room.targets)


def core_adapter_bytes(facts: Facts, widths: Widths, load: Load, tensor: int) -> int:
    """Per core: NxD Inference has a copy for each place, for the base model and for each sequence. What a sum over
    cores follows is shared out by its input, the others by their output; the other side of a pair is held whole."""
    room = load.adapters
    if room is None:
        return 0
    shapes = _projections(facts)
    per_rank = 0
    for target in room.targets:
        shared, whole = shapes[target] if target in SUMMED else reversed(shapes[target])
        per_rank += _up(shared, tensor) + whole
    return (room.num_places + 1 + load.sequences) * facts.num_layers * room.rank * per_rank * widths.weights


SUMMED = ("o_proj", "down_proj")


def _projections(facts: Facts) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    query, cached = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, cached),
        "v_proj": (hidden, cached),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def activation_bytes(facts: Facts, widths: Widths, load: Load, tensor: int) -> int:
    """Per core, of the widest layer and the logits of the largest graph."""
    heads, inner = facts.num_heads * facts.head_dim, max(facts.intermediate_size, 1)
    widest = 2 * facts.hidden_size + max(2 * inner, 3 * heads) // tensor
    prefill = (load.longest_prefill or load.length) * widest * widths.activations + facts.vocabulary_size // tensor * 4
    decode = load.sequences * widest * widths.activations + load.sequences * facts.vocabulary_size // tensor * 4
    return max(prefill, decode)


def vector_bytes(facts: Facts, length: int) -> int:
    """Activations of the largest step of a model that makes vectors on the host, in float32. length: of a text, which
    is computed in one step; 0: the manifest does not say."""
    longest = length or min(facts.max_position_embeddings or VECTOR_LENGTH, VECTOR_LENGTH)
    return max(longest, VECTOR_STEP_TOKENS) * (10 * facts.hidden_size + 3 * facts.intermediate_size) * 4


def host_bytes(facts: Facts, widths: Widths, nodes: int = 1) -> int:
    """Memory of the engine on a node's host while it loads weights onto devices: the whole checkpoint, and
    the shards that are made from it for the cores of this node; of the draft model, too."""
    each = (one.read_bytes + _up(_held_bytes(one, widths), nodes) for one in facts.loaded)
    return TORCH_BYTES + sum(each)


def _held_bytes(facts: Facts, widths: Widths) -> int:
    """Of all weights as devices hold them."""
    return facts.conversion.bytes if facts.conversion else facts.parameters * widths.weights


def compile_minutes(facts: Facts, load: Load) -> int:
    """What compiling all graphs takes, by a statement of AWS about another model: it says hours from minutes."""
    layers = load.num_graphs * facts.num_layers
    if facts.encoder and load.pictures:
        layers += num_encoder_graphs(facts.encoder, load) * facts.encoder.layers
    return max(1, round(layers * COMPILE_SECONDS_PER_LAYER / 60))


def start_seconds(facts: Facts, minutes: int) -> int:
    """How long a replica may take to start before it is restarted. minutes: that it compiles, see `compile_minutes`."""
    weights = facts.read_bytes
    usual = weights // READ_BYTES_PER_SECOND + weights // COPY_BYTES_PER_SECOND + 60 * minutes
    return min(max(START_SECONDS, START_FACTOR * usual), MAX_START_SECONDS)


def width_of(dtype: str) -> int:
    return DTYPE_BYTES.get(dtype, DTYPE_BYTES[COMPUTED_IN])


def _up(number: int, parts: int) -> int:
    """The largest of equal parts."""
    return -(-number // parts)


def gb(number: int) -> str:
    """For people: `14.0 GB`."""
    return f"{number / 10**9:.1f} GB" if number < 10**15 else "more than 1000 TB"
