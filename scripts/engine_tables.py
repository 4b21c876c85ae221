"""Tables of docs/engines.md: fields by engine, what vLLM's releases have, and panels and alerts that lack series there.
`generate.py` calls them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from markdown_table import table
from neuron_operator.api.engines import ENGINES
from neuron_operator.api.engines.vllm_flags import (
    FLAGS,
    FORBIDDEN,
    FORBIDDEN_ENV,
    LACKS_METRICS,
    SET_BY_FIELDS,
    VERSIONS,
)
from neuron_operator.api.model import Spec
from operator_tables import rows, shown

CHART = Path(__file__).resolve().parents[1] / "charts" / "neuron-serving"
KNOWN = {
    "run": "its own parser",
    "source": "its source",
    "documentation": "AWS's documentation only",
    None: "no plugin",
}


def fields() -> str:
    """What each engine accepts of the fields that not all of them have; `FieldNotSupported` follows from the same."""
    return table(
        ("Field", *(f"`{name}`" for name in ENGINES)),
        (
            (
                f"`{row.path}`" + (f": `{support.about}`" if support.about else ""),
                *(
                    "any"
                    if name in row.engines(support)
                    else ", ".join(map(shown, (row.field.default, *support.values)))
                    for name in ENGINES
                ),
            )
            for row in rows(Spec)
            for support in row.supported
            if row.engines(support)
        ),
    )


def vllm_versions() -> str:
    return table(
        (
            *("Version", "Releases", "Flags checked by", "The plugin's settings by", "Compiles without devices"),
            *("Several nodes by", "Models"),
        ),
        (
            (
                f"`{name}`",
                one.release,
                KNOWN[one.flags],
                KNOWN[one.plugin],
                f"yes, by {KNOWN[one.compiles]}" if one.compiles else "no" if one.settings else "compiles nothing",
                {**KNOWN, "run": "two of its processes", None: "refused"}[one.nodes],
                words(sorted(one.architectures)) or "any",
            )
            for name, one in VERSIONS.items()
        ),
    )


def vllm_flags() -> str:
    return table(
        ("Field", "Flag", "Not in"),
        (
            (
                f"`{flag.field}`" if flag.field else "(free for `engine.args`)",
                f"`{flag.name}`",
                words(name for name, one in VERSIONS.items() if flag.name in one.lacks),
            )
            for flag in FLAGS
        ),
    )


def vllm_settings() -> str:
    fields = dict.fromkeys(field for keys in SET_BY_FIELDS.values() for field in keys.values())
    return table(
        ("Field", *(f"`{key}` ({where(key)})" for key in SET_BY_FIELDS)),
        (
            (f"`{field}`", *(words(key for key, by in keys.items() if by == field) for keys in SET_BY_FIELDS.values()))
            for field in fields
        ),
    )


def where(settings: str) -> str:
    return ", ".join(name for name, one in VERSIONS.items() if one.settings == settings)


def vllm_refused() -> str:
    """Flags and variables, as they begin."""
    rows = [(one.flags, one.cure, one.versions) for one in FORBIDDEN]
    rows += [((f"{name}*" if name.endswith("_") else name,), cure, versions) for name, cure, versions in FORBIDDEN_ENV]
    return table(
        ("Argument or variable", "Instead", "Refused in"),
        (
            (words(name for name in names if not re.match("-[a-z]", name)), cure, in_versions(versions))
            for names, cure, versions in rows
        ),
    )


def in_versions(versions: tuple[str, ...]) -> str:
    return "all" if versions == tuple(VERSIONS) else words(versions)


def vllm_lacking() -> str:
    """Panels and alerts with a query over a metric that the engine lacks."""
    return table(("Panel or alert", "Lacks", "Instead"), _lacking())


def _lacking() -> Iterator[tuple[str, str, str]]:
    board = json.loads((CHART / "dashboards" / "neuron-serving.json").read_text())
    queries = [(panel["title"], [one["expr"] for one in panel.get("targets", ())]) for panel in board["panels"]]
    rules = yaml.safe_load((CHART / "rules" / "neuron-serving.yaml").read_text())
    queries += [(f"`{one['alert']}`", [one["expr"]]) for group in rules["groups"] for one in group["rules"]]
    for title, expressions in queries:
        lacking = dict.fromkeys(
            name
            for expression in expressions
            if not re.search(r" or (vllm:|neuron_operator_)", expression)
            for name in re.findall(r"\b(?:neuron_serving_(?!gateway_)|process_)\w+", expression)
        )
        if lacking:
            yield title, words(lacking), "; ".join(dict.fromkeys(filter(None, map(instead, lacking))))


def instead(metric: str) -> str:
    name = re.sub(r"_bucket$", "", metric)
    return LACKS_METRICS["process_*" if name.startswith("process_") else name]


def words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
