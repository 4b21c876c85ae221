"""Prometheus without its server: evaluates queries over given scrapes, lints names and checks rules with its own code.

The program is built from `tests/cluster/build/promql` like those of the cluster.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from cluster.rig.binaries import ensure


@dataclass(frozen=True)
class Scraped:
    """An exposition, the time of its scrape, and the attached labels. `honor_labels`: the exposition's own win."""

    text: str
    at: float
    labels: Mapping[str, str]
    content_type: str = CONTENT_TYPE
    honor_labels: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a query. `metrics`: the names that it selects."""

    error: str
    metrics: tuple[str, ...]
    samples: tuple[tuple[Mapping[str, str], float], ...]

    @property
    def numbers(self) -> list[float]:
        """Values that a panel can show."""
        return [value for _, value in self.samples if not math.isnan(value)]

    def value(self, **labels: str) -> float:
        (found,) = (value for have, value in self.samples if labels.items() <= have.items())
        return found


@dataclass(frozen=True)
class Answer:
    results: tuple[Result, ...]
    lint_problems: tuple[str, ...]
    rule_errors: tuple[str, ...]


def evaluate(scrapes: Iterable[Scraped], queries: Sequence[tuple[str, float]], rules: str = "") -> Answer:
    """Evaluates (expression, time) pairs over scrapes. Raises NotPossibleHere without Go."""
    program = ensure("promql")["promql"] / "promql"
    asked: dict[str, Any] = {
        "scrapes": [
            {
                "at": one.at,
                "labels": dict(one.labels),
                "content_type": one.content_type,
                "text": one.text,
                "honor_labels": one.honor_labels,
            }
            for one in scrapes
        ],
        "queries": [{"expression": expression, "at": at} for expression, at in queries],
        "rules": rules,
    }
    done = subprocess.run([program], input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    results = tuple(
        Result(
            one.get("error", ""),
            tuple(one["metrics"]),
            tuple((sample["labels"], float(sample["value"])) for sample in one["samples"]),
        )
        for one in output["results"]
    )
    return Answer(results, tuple(output["lint_problems"]), tuple(output["rule_errors"]))
