"""What a compiled artifact consists of: the facts that its graphs were traced with, and the input shapes of each graph.

Made from an InferenceConfig by `compile`, kept as JSON in `model.pt`, and all that a loaded program knows. Errors that
NxDI raises while it traces are raised here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import fake_nxdi
from fake_nxdi import lora, quantized
from fake_nxdi.decoder import Shape, shape_of

CONTEXT = "context_encoding_model"
TOKEN = "token_generation_model"
SPECULATION = "speculation_model"
"""Computes several tokens of each row, in place of `TOKEN`."""
FUSED = "fused_speculation_model"
"""The same, with the model that makes the drafts in the graph."""
MASK_PAD = 128
"""Positions that `apply_seq_ids_mask` adds to each line, for what inactive rows write."""

Shapes = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Graph:
    tag: str
    rows: int
    width: int
    """New tokens of a row."""
    keys: int
    """Cached positions that a row attends; blocks: the prefix bucket."""
    shapes: Shapes

    @property
    def name(self) -> str:
        size = f"{self.width}+{self.keys}" if self.tag == CONTEXT else str(self.keys)
        return f"{self.tag} {self.rows}x{size}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    release: int
    decoder: Shape
    dtype: str
    layout: Literal["slots", "blocks"]
    max_rows: int
    lines: int
    max_length: int
    line_pad: int
    continuous: bool
    chooses_rows: bool
    """Graphs for several numbers of decode rows."""
    num_blocks: int
    block_size: int
    block_tiles: int
    """Parts that a block is stored in; 0: whole."""
    sampling: dict[str, Any] | None
    output_logits: bool
    logical_core: int
    attention_kernel: bool | None
    decode_kernel: bool
    world_size: int
    platform: str
    lora: dict[str, Any] | None = None
    """See `lora.facts_of`."""
    speculation: int = 0
    """Tokens of each row of a decode step, the last ones drafts; 0: one, and no graphs for several."""
    draft: Shape | None = None
    """The model that makes the drafts; None: the caller does."""
    eagle: int = 0
    """The version of the EAGLE head that it is."""
    sequence_parallel: bool = False
    quantized: dict[str, Any] | None = None
    """See `quantized.facts_of`."""
    cache_dtype: str = ""
    sees: bool = False
    """Prompts take features of pictures, and where they go."""
    deeper: int = 0
    """Layers that take features too; then positions that turn are an input of their own."""

    @property
    def line_length(self) -> int:
        return self.max_length + self.line_pad

    def masks_prefix(self, width: int) -> bool:
        """Whether a prefill of `width` new tokens leaves out the unused places of its prefix bucket."""
        if self.attention_kernel is False:
            return False
        if self.logical_core > 1:
            return True
        return width >= 4096 or bool(self.attention_kernel and width >= 512)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Keys, or values, of a layer, as the real cache has them."""
        heads, size = self.decoder.kv_heads, self.decoder.head_size
        if self.layout == "slots":
            return (self.lines, heads, self.line_length, size)
        if self.block_tiles:
            return (self.num_blocks + 1, self.block_tiles, self.block_size // self.block_tiles, heads, size)
        return (self.num_blocks + 1, self.block_size, heads, size)

    @property
    def num_cache_bytes(self) -> int:
        width = 1 if self.cache_dtype else {"float32": 4}.get(self.dtype, 2)
        drafts = 0 if self.draft is None else math.prod(self.draft_cache_shape) * self.draft.layers
        return 2 * (self.decoder.layers * math.prod(self.cache_shape) + drafts) * width

    @property
    def draft_cache_shape(self) -> tuple[int, ...]:
        assert self.draft is not None
        if self.layout == "blocks":
            return (self.num_blocks + 1, self.block_size, self.draft.kv_heads, self.draft.head_size)
        return (self.lines, self.draft.kv_heads, self.line_length, self.draft.head_size)


def as_json(plan: Plan, graphs: list[Graph]) -> dict[str, Any]:
    return {"plan": asdict(plan), "graphs": [asdict(graph) for graph in graphs]}


def from_json(document: dict[str, Any]) -> tuple[Plan, list[Graph]]:
    plan = dict(document["plan"])
    draft = Shape(**plan["draft"]) if plan["draft"] else None
    plan |= {"decoder": Shape(**plan["decoder"]), "draft": draft}
    return Plan(**plan), [Graph(**graph) for graph in document["graphs"]]


def plan_of(config: Any, platform: str) -> Plan:
    neuron = config.neuron_config
    blocks = neuron.is_block_kv_layout
    if blocks and not neuron.is_prefix_caching:
        raise AttributeError("'BlockKVCacheManager' object has no attribute 'k_shape'")
    if neuron.is_prefix_caching and not blocks:
        raise RuntimeError("prefix caching without the block layout: shapes of keys and blocks do not match")
    per_sequence = -(-neuron.max_length // neuron.pa_block_size)
    tiles = 0
    if blocks and per_sequence < 128 and not neuron.attn_block_tkg_nki_kernel_enabled:
        tiles = 2 ** math.ceil(math.log2(128 / per_sequence))
        if neuron.pa_block_size % tiles:
            raise RuntimeError(
                f"shape '[{neuron.pa_num_blocks + 1}, {tiles}, {neuron.pa_block_size // tiles}, ...]' is invalid: "
                f"blocks of {neuron.pa_block_size} positions in {tiles} tiles (rule 20-17)"
            )
    sampling = neuron.on_device_sampling_config
    shape = shape_of(config)
    if sampling is not None and (sampling.do_sample or sampling.dynamic) and sampling.global_topk > shape.vocabulary:
        raise RuntimeError("selected index k out of range")
    return Plan(
        release=fake_nxdi.SETTINGS.release,
        decoder=shape,
        dtype=str(neuron.torch_dtype).removeprefix("torch."),
        layout="blocks" if blocks else "slots",
        max_rows=neuron.max_batch_size,
        lines=neuron.kv_cache_batch_size,
        max_length=neuron.max_length,
        line_pad=MASK_PAD if neuron.apply_seq_ids_mask else 0,
        continuous=neuron.is_continuous_batching,
        chooses_rows=getattr(neuron, "token_generation_batches", None) is not None,
        num_blocks=neuron.pa_num_blocks,
        block_size=neuron.pa_block_size,
        block_tiles=tiles,
        sampling=dict(vars(sampling)) if sampling is not None else None,
        output_logits=neuron.output_logits,
        logical_core=int(neuron.logical_nc_config),
        attention_kernel=neuron.attn_kernel_enabled,
        decode_kernel=neuron.attn_block_tkg_nki_kernel_enabled,
        world_size=neuron.world_size,
        platform=platform,
        lora=lora.facts_of(neuron),
        speculation=neuron.speculation_length,
        draft=shape_of(config.fused_spec_config.draft_config) if neuron.enable_fused_speculation else None,
        eagle=(3 if neuron.is_eagle3 else 1) if neuron.enable_eagle_speculation else 0,
        sequence_parallel=neuron.sequence_parallel_enabled,
        quantized=quantized.facts_of(neuron),
        cache_dtype=quantized.cache_dtype(neuron),
        sees=getattr(config, "sees", False),
        deeper=len(getattr(config, "deepstack_visual_indexes", ())),
    )


def trace(plan: Plan, tag: str, buckets: list[Any], rows: int) -> list[Graph]:
    """The graphs of a submodel, one for each bucket."""
    context = tag == CONTEXT
    if context and plan.layout == "slots" and plan.continuous and rows != 1:
        raise AssertionError("only supports single seq_id")
    if plan.draft is not None:
        _trace_drafts(plan)
    elif plan.speculation and plan.layout == "blocks":
        raise RuntimeError("verification over blocks: the shape of slot_mapping does not fit (section 13)")
    if plan.speculation and plan.lora:
        raise AttributeError("'NoneType' object has no attribute 'shape' (adapters with speculation, 3.5)")
    found: list[Graph] = []
    for bucket in buckets:
        if plan.layout == "slots":
            count, keys = bucket if isinstance(bucket, list) else (rows, bucket)
            width = keys if context else plan.speculation or 1
            if context and width == plan.speculation:
                raise RuntimeError(f"a context bucket of {width} tokens is taken for a verification (3.2)")
            fed = 1 if tag == FUSED else width
            shapes = _line_shapes(count, fed, keys)
            if plan.deeper:
                features = [count, plan.max_length, plan.decoder.hidden]
                shapes += [[3, count, width]]
                shapes += [features, [count, width, 1], [plan.deeper, *features]] if context else [[0], [0], [0]]
            elif plan.sees:
                shapes += [[count, width, plan.decoder.hidden], [count, width, 1]] if context else [[0], [0]]
            found.append(Graph(tag=tag, rows=count, width=width, keys=keys, shapes=shapes))
            continue
        active, prefix = bucket
        if prefix % plan.block_size:
            raise RuntimeError(f"a bucket of {prefix} cached positions does not consist of blocks of {plan.block_size}")
        if context and prefix and active < 128:
            if fake_nxdi.strict():
                fake_nxdi.refuse(
                    "20-13", f"active bucket {active}: a prefill after a prefix is taken for a decode step"
                )
            raise RuntimeError(f"The size of tensor a ({active}) must match the size of tensor b ({prefix})")
        width = active if context else plan.speculation or 1
        if context and width == plan.speculation:
            raise RuntimeError(f"a context bucket of {width} tokens is taken for a verification (3.2)")
        shapes = _block_shapes(plan, rows, 1 if tag == FUSED else width, prefix, width)
        found.append(Graph(tag=tag, rows=rows, width=width, keys=prefix, shapes=shapes))
    return found


def _trace_drafts(plan: Plan) -> None:
    """What tracing a graph with two models raises."""
    assert plan.draft is not None
    assert plan.sampling is not None
    if plan.layout == "blocks" and plan.eagle:
        raise NotImplementedError("the fake has no EAGLE heads over blocks")
    if plan.output_logits:
        raise RuntimeError("the alias of the draft's cache points at logits (3.4)")
    if plan.eagle == 3 and not plan.sequence_parallel:
        raise RuntimeError("size mismatch, got input (1), mat (1x0), vec (64) (the last token keeps H of 4H columns)")
    if plan.eagle == 3 and len({1, plan.decoder.layers // 2 - 1, plan.decoder.layers - 4}) < 3:
        raise RuntimeError("EAGLE3 reads three different layers of a model (1404)")
    if plan.sampling["do_sample"] and not plan.eagle:
        raise IndexError("index 1 is out of bounds for dimension 1 with size 1 (FIXME at 1162)")
    if plan.draft.vocabulary != plan.decoder.vocabulary:
        raise IndexError("index out of range in self (another vocabulary, 3.1)")


def _line_shapes(rows: int, width: int, keys: int) -> Shapes:
    return [[rows, width], [rows, keys], [rows, width], [rows], [rows, 3], [rows], [rows]]


def _block_shapes(plan: Plan, rows: int, width: int, prefix: int, stored: int) -> Shapes:
    """width: tokens of a row that are given. stored: those whose keys and values have a slot."""
    blocks = prefix // plan.block_size
    adapters = [rows] if plan.release >= 8 else [0]
    return [
        [rows, width],
        [rows, prefix] if prefix else [1],
        [rows, width],
        [rows],
        [rows, 3],
        [0],
        adapters,
        *([0] for _ in range(4)),
        [rows, stored],
        [rows, blocks] if blocks else [1],
        [rows, 1],
        [rows, 1],
    ]
