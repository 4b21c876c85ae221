"""`neuron-runtime bench serve --base-url URL`: throughput and latency of any OpenAI server under load.

Sends random prompts and streams the answers, with a fixed number of streams or Poisson arrivals. Options have the names
of `vllm bench serve` where the meaning is the same. `--spawn MODEL` starts and stops our own server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from neuron_runtime.bench.model import PREFIX, SHAPES, model_folder_or_uri
from neuron_runtime.bench.number_flags import add_number
from neuron_runtime.bench.offline import FIRST_TOKEN_ID
from neuron_runtime.bench.report import (
    Load,
    Meter,
    Report,
    Row,
    Table,
    check_outputs,
    deliver,
    machine_line,
    percentile,
)
from neuron_runtime.errors import InvalidConfig, ServingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from neuron_runtime.bench.client import Ask, Run, Sample, Server

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
DEFAULT_VOCABULARY_SIZE = 4096
"""Nearly every vocabulary has this many ids."""
BUSY_CLIENT_SHARE = 0.8
"""Share of one CPU beyond which a client process may limit the result."""
MAX_SHOWN_ERRORS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("the server (one of the first two)")
    where.add_argument("--base-url", metavar="URL", help="http://host:port of a running server")
    where.add_argument(
        "--spawn",
        metavar="MODEL",
        help="start `neuron-runtime serve MODEL` on a free port for this run; "
        f"{', '.join(PREFIX + shape for shape in SHAPES)}: random weights of that shape",
    )
    where.add_argument("--spawn-args", default="", metavar="'FLAGS'", help="flags for `serve`, as one argument")
    where.add_argument("--model", metavar="NAME", help="name in requests (default: the first that the server lists)")
    where.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="default: %(default)s")
    where.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="sent with each request")
    load = parser.add_argument_group("the load")
    number = partial(add_number, load)
    number("--num-prompts", 100, "N", "number of requests", least=1)
    number("--request-rate", inf, "R", "requests per second; inf: as fast as --max-concurrency allows", positive=True)
    meaning = "shape of the gamma distribution of gaps between requests; 1: Poisson, above 1: more even"
    number("--burstiness", 1.0, "B", meaning, positive=True)
    number("--max-concurrency", None, "C", "maximum number of requests in flight", kind=int, least=1)
    number("--random-input-len", 1024, "N", "tokens of a prompt", least=1)
    number("--random-output-len", 128, "N", "tokens of an answer", least=1)
    number("--random-range-ratio", 0.0, "X", "draw lengths uniformly from (1-X) to (1+X) times these")
    number("--random-prefix-len", 0, "N", "tokens of a prefix of all prompts", least=0)
    number("--vocabulary-size", DEFAULT_VOCABULARY_SIZE, "N", "prompt ids are below N", least=2)
    number("--num-warmups", 0, "N", "requests before the measurement", least=0)
    load.add_argument("--ignore-eos", action="store_true", help="generate the full output length (not an OpenAI field)")
    number("--temperature", 0.0, "T", "sampling temperature")
    load.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="extra fields of each request")
    number("--seed", 0, "N", "seed of prompts, lengths and arrivals")
    number("--timeout", 600.0, "SECONDS", "time limit of one request", positive=True)
    number("--client-processes", 1, "N", "processes that send requests", least=1)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send. Lengths in tokens; see the flags of the command."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    request_rate: float = inf
    burstiness: float = 1.0
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE
    seed: int = 0
    body: Mapping[str, Any] | None = None
    """Fields of every request."""
    as_messages: bool = False
    """Chat: the prompt is text, about one token per word."""

    def asks(self) -> list[Ask]:
        """The requests, in order."""
        from neuron_runtime.bench.client import Ask  # noqa: PLC0415 - imports an event loop

        source = random.Random(self.seed)  # noqa: S311 - not a secret
        prefix = self._tokens(source, self.prefix_len)
        asks, at = [], 0.0
        for _ in range(self.num_prompts):
            tokens = prefix + self._tokens(source, self._length(source, self.input_len))
            asks.append(Ask(self._encode(tokens, self._length(source, self.output_len)), at))
            if self.request_rate != inf:
                at += source.gammavariate(self.burstiness, 1 / (self.request_rate * self.burstiness))
        return asks

    def _length(self, source: random.Random, length: int) -> int:
        if not self.range_ratio:
            return length
        return max(1, source.randint(int(length * (1 - self.range_ratio)), int(length * (1 + self.range_ratio))))

    def _tokens(self, source: random.Random, length: int) -> list[int]:
        low = min(FIRST_TOKEN_ID, self.vocabulary_size // 2)
        return [source.randrange(low, self.vocabulary_size) for _ in range(length)]

    def _encode(self, tokens: Sequence[int], max_tokens: int) -> bytes:
        prompt: dict[str, Any] = {"prompt": list(tokens)}
        if self.as_messages:
            prompt = {"messages": [{"role": "user", "content": " ".join(_word(token) for token in tokens)}]}
        fixed = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**prompt, **fixed, **(self.body or {})}).encode()


def _word(number: int) -> str:
    """Three letters, which are one or two tokens in byte-level vocabularies."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(3))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Client-side results; times in seconds."""

    num_completed: int
    errors: Mapping[str, int]
    """Number of failed requests by error."""
    seconds: float
    """From the first request to the last end."""
    num_prompt_tokens: int
    num_output_tokens: int
    first_token: tuple[float, ...]
    """Per request."""
    per_token: tuple[float, ...]
    """Per request: time per token after the first."""
    gaps: tuple[float, ...]
    """Between consecutive events of each stream; 0 for events of one packet."""
    end_to_end: tuple[float, ...]
    client_cpu_seconds: tuple[float, ...]
    """CPU time of each client process."""
    load: Load

    @property
    def output_rate(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def client_is_busy(self) -> bool:
        return max(self.client_cpu_seconds) > BUSY_CLIENT_SHARE * self.seconds


def outcome_of(run: Run, load: Load) -> Outcome:
    """Summarize a run. Raises ServingError if every request failed."""
    good = [sample for sample in run.samples if not sample.error]
    errors = Counter(sample.error for sample in run.samples if sample.error)
    if not good:
        raise ServingError(f"every request failed: {errors.most_common(1)[0][0]}")
    outputs = [_num_output_tokens(sample) for sample in good]
    return Outcome(
        num_completed=len(good),
        errors=dict(errors),
        seconds=max(s.ended for s in run.samples) - min(s.began for s in run.samples),
        num_prompt_tokens=sum(sample.num_prompt_tokens or 0 for sample in good),
        num_output_tokens=sum(outputs),
        first_token=tuple(s.tokens_at[0] - s.began for s in good if s.tokens_at),
        per_token=tuple(
            (s.tokens_at[-1] - s.tokens_at[0]) / (count - 1)
            for s, count in zip(good, outputs, strict=True)
            if s.tokens_at and count > 1
        ),
        gaps=tuple(b - a for s in good for a, b in zip(s.tokens_at, s.tokens_at[1:], strict=False)),
        end_to_end=tuple(s.ended - s.began for s in good),
        client_cpu_seconds=run.cpu_seconds,
        load=load,
    )


def _num_output_tokens(sample: Sample) -> int:
    """As reported by the server, else the number of events."""
    return len(sample.tokens_at) if sample.num_output_tokens is None else sample.num_output_tokens


def apply_load(
    server: Server, workload: Workload, max_concurrency: int | None, num_processes: int = 1, num_warmups: int = 0
) -> Outcome:
    """Send a workload to a server. Raises ServingError if every request failed."""
    from neuron_runtime.bench.client import run_clients  # noqa: PLC0415 - imports an event loop

    asks = workload.asks()
    if num_warmups:
        run_clients(server, [type(ask)(ask.body) for ask in asks[:num_warmups]], max_concurrency)
    meter = Meter()
    run = run_clients(server, asks, max_concurrency, num_processes)
    return outcome_of(run, meter.read())


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The base URL of the server in `--base-url`, or of one started for `--spawn`."""
    from neuron_runtime.bench.spawned import SpawnedServer  # noqa: PLC0415

    if (options.base_url is None) == (options.spawn is None):
        raise InvalidConfig("--base-url", "set exactly one of --base-url URL and --spawn MODEL")
    if options.base_url is not None:
        yield options.base_url.rstrip("/").removesuffix("/v1")
        return
    with SpawnedServer([model_folder_or_uri(options.spawn), *shlex.split(options.spawn_args)]) as server:
        yield server.base_url


def first_model(base_url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises ServingError."""
    from urllib.error import URLError  # noqa: PLC0415 - every command reads this module's flags
    from urllib.request import Request, urlopen  # noqa: PLC0415

    request = Request(f"{base_url}/v1/models", headers=dict(headers))  # noqa: S310 - the user's own URL
    try:
        with urlopen(request, timeout=30) as answer:  # noqa: S310
            return str(json.loads(answer.read())["data"][0]["id"])
    except (URLError, OSError, ValueError, LookupError, TypeError) as error:
        message = f"cannot get a model from {base_url}/v1/models ({error}): check that a server runs, or set --model"
        raise ServingError(message) from error


def run(options: argparse.Namespace) -> None:
    from neuron_runtime.bench.client import Server  # noqa: PLC0415 - imports an event loop

    check_outputs(options)
    _check(options)
    headers = _headers(options.header)
    with served(options) as base_url:
        body = {
            "model": options.model or first_model(base_url, headers),
            "temperature": options.temperature,
            **({"ignore_eos": True} if options.ignore_eos else {}),
            **options.extra_body,
        }
        workload = Workload(
            num_prompts=options.num_prompts,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            request_rate=options.request_rate,
            burstiness=options.burstiness,
            vocabulary_size=options.vocabulary_size,
            seed=options.seed,
            body=body,
            as_messages=options.endpoint == ENDPOINTS[1],
        )
        server = Server(base_url, options.endpoint, headers, options.timeout)
        outcome = apply_load(server, workload, options.max_concurrency, options.client_processes, options.num_warmups)
    deliver(_report(options, outcome), options)


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.random_range_ratio < 1:
        raise InvalidConfig("--random-range-ratio", f"must be >= 0 and < 1, got {options.random_range_ratio}")
    if not isinstance(options.extra_body, dict):
        raise InvalidConfig("--extra-body", "must be a JSON object")


def _headers(given: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` headers. Like vLLM's client, sends $OPENAI_API_KEY as a bearer token."""
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    for one in given:
        name, separator, value = one.partition("=")
        if not (name and separator):
            raise InvalidConfig("--header", f"must be NAME=VALUE, got {one!r}")
        headers[name.lower()] = value
    return headers


def _report(options: argparse.Namespace, outcome: Outcome) -> Report:
    load, seconds = outcome.load, outcome.seconds
    failed = sum(outcome.errors.values())
    shown = "; ".join(f"{count} x {message}" for message, count in list(outcome.errors.items())[:MAX_SHOWN_ERRORS])
    client = max(outcome.client_cpu_seconds) / seconds
    counts = (
        Row("requests completed", (outcome.num_completed,)),
        Row("requests failed", (failed,), note=shown),
        Row("duration", (seconds,), "s", load=load),
        Row("requests", (outcome.num_completed / seconds,), "per s", load=load),
        Row("prompt tokens", (outcome.num_prompt_tokens,)),
        Row("output tokens", (outcome.num_output_tokens,)),
        Row("output", (outcome.output_rate,), "tokens/s", load=load),
        Row("all tokens", ((outcome.num_prompt_tokens + outcome.num_output_tokens) / seconds,), "tokens/s", load=load),
        Row(
            "client CPU",
            (client,),
            "of one CPU",
            note="busy: the client may be the bottleneck, try --client-processes" if outcome.client_is_busy else "",
        ),
    )
    latencies = tuple(
        Row(name, tuple(_summary([1000 * seconds for seconds in values])), "ms", load=load)
        for name, values in (
            ("time to first token", outcome.first_token),
            ("time per output token", outcome.per_token),
            ("gap between events", outcome.gaps),
            ("end to end", outcome.end_to_end),
        )
        if values
    )
    title = f"{options.spawn or options.base_url}, {options.endpoint}; {machine_line()}"

    def draw(figure: Figure) -> None:
        figure.suptitle(title)
        first, gaps = figure.subplots(1, 2)
        for axes, values, name, what in (
            (first, outcome.first_token, "Time to first token", "requests"),
            (gaps, outcome.gaps, "Gap between events", "gaps"),
        ):
            ordered = sorted(1000 * value for value in values)
            within = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
            axes.step([0.0, *ordered], [0.0, *within], where="post")
            axes.set(title=name, xlabel="milliseconds", ylabel=f"% of {what} within", xlim=(0, None), ylim=(0, 100))

    plain = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str | dict)}
    if options.request_rate == inf:
        plain["request_rate"] = "inf"
    plain.pop("header", None)
    return Report(
        command="bench serve",
        options=plain,
        tables=(Table(title, counts), Table("latencies", latencies, ("mean", "p50", "p90", "p99"))),
        data={"errors": dict(outcome.errors), "time_to_first_token_seconds": list(outcome.first_token)},
        draw=draw,
    )


def _summary(values: Sequence[float]) -> Iterator[float | None]:
    yield statistics.fmean(values)
    for share in (0.5, 0.9, 0.99):
        yield percentile(values, share)
