"""`kubectl neuron bench`: a short load on a model and the figures that its users notice. Called by `command`.

For a check after an install or an edit. `neuron-runtime bench serve` measures capacity, without a proxy between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import aiohttp

from neuron_operator.local.answers import Answer, Refused, stream

PERCENTILES = (50, 90, 99)
_WORDS = [
    "the",
    "operator",
    "compiles",
    "a",
    "model",
    "once",
    "and",
    "serves",
    "it",
    "from",
    "the",
    "node",
    "that",
    "holds",
    "its",
    "devices",
    "while",
    "others",
    "wait",
]


@dataclass(frozen=True)
class Load:
    num_requests: int
    num_at_once: int
    num_words: int
    """Of each prompt."""
    max_tokens: int
    """Of each answer; the end of an answer is ignored, so that all have this many."""


@dataclass(frozen=True)
class Measured:
    load: Load
    seconds: float
    answers: tuple[Answer, ...]
    failures: tuple[str, ...]


async def measure(session: aiohttp.ClientSession, url: str, model_name: str, load: Load) -> Measured:
    """Sends the requests, `num_at_once` at a time."""
    answers: list[Answer] = []
    failures: list[str] = []
    waiting = iter([_prompt(number, load.num_words) for number in range(load.num_requests)])

    async def client() -> None:
        for prompt in waiting:
            body: Mapping[str, Any] = {
                "model": model_name,
                "prompt": prompt,
                "max_tokens": load.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            try:
                answers.append(await stream(session, f"{url}/v1/completions", body))
            except Refused as refused:
                failures.append(str(refused))
            except (aiohttp.ClientError, TimeoutError) as error:
                failures.append(str(error) or type(error).__name__)

    began = time.monotonic()
    async with asyncio.TaskGroup() as clients:
        for _ in range(load.num_at_once):
            clients.create_task(client())
    return Measured(load, time.monotonic() - began, tuple(answers), tuple(failures))


def _prompt(number: int, num_words: int) -> str:
    """Begins differently for each request, so that the prefix cache does not answer for the model."""
    return " ".join([f"{number}:", *(_WORDS[(number + i) % len(_WORDS)] for i in range(num_words))])


def figures(measured: Measured) -> dict[str, Any]:
    """As JSON. Times in milliseconds; percentiles over the answers."""
    answers = measured.answers
    num_tokens = sum(answer.num_tokens for answer in answers)
    made: dict[str, Any] = {
        "requests": measured.load.num_requests,
        "concurrency": measured.load.num_at_once,
        "failed": len(measured.failures),
        "seconds": round(measured.seconds, 3),
    }
    if answers:
        made |= {
            "prompt_tokens": round(fmean(answer.num_prompt_tokens for answer in answers), 1),
            "answer_tokens": round(fmean(answer.num_tokens for answer in answers), 1),
            "first_token_ms": _percentiles([answer.first_seconds for answer in answers]),
            "gap_ms": _percentiles([answer.gap_seconds for answer in answers]),
            "longest_gap_ms": round(1000 * max(answer.longest_gap_seconds for answer in answers), 1),
            "tokens_per_second": round(num_tokens / measured.seconds, 1),
        }
    return made


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Nearest rank."""
    ordered = sorted(seconds)
    ranks = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}
    return {name: round(1000 * value, 1) for name, value in ranks.items()}


def table(measured: Measured) -> str:
    made = figures(measured)
    if not measured.answers:
        return "  no request succeeded"

    def row(name: str, values: Mapping[str, float]) -> str:
        return f"  {name:<15}" + "".join(f"{value:>10.1f}" for value in values.values()) + "  ms"

    return "\n".join(
        [
            f"  {'failed':<15}{made['failed']:>10} of {made['requests']}",
            f"  {'prompt tokens':<15}{made['prompt_tokens']:>10}",
            f"  {'answer tokens':<15}{made['answer_tokens']:>10}",
            f"  {'':<15}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES),
            row("first token", made["first_token_ms"]),
            row("gap", made["gap_ms"]),
            f"  {'longest gap':<15}{made['longest_gap_ms']:>10}  ms",
            f"  {'tokens/s':<15}{made['tokens_per_second']:>10}  in {made['seconds']} s",
        ]
    )
