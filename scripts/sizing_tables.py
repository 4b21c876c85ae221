"""Tables of docs/sizing.md: what the operator plans for public models, and how that compares with what is published.

Called by `generate`. The facts of the models and the published figures are in tests/cases/sizing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from markdown_table import table
from neuron_operator.api.errors import Unplaceable
from neuron_operator.api.model import ModelSource, NeuronModel, Spec
from neuron_operator.place.catalog import FAMILIES, GIB, INSTANCE_TYPES
from neuron_operator.place.planner import Option, choose
from neuron_operator.place.sizing import Load, Memory, Widths, memory_of, quantized, weights_bytes
from neuron_operator.read.records import Facts
from neuron_operator.read.world import FreeDevices, Provisionable, Settings

CASES = Path(__file__).resolve().parents[1] / "tests" / "cases" / "sizing"
GB = 10**9


def public_models() -> str:
    """A line for each model, a column for each family."""
    rows = ((_short(name), *(_cell(planned(name, family)) for family in FAMILIES)) for name in models())
    return table(("Model", *FAMILIES), rows)


def recipes() -> str:
    """A line for each published recipe."""
    return table(
        ("Recipe", "Memory of a core", "Planned", "Difference"),
        (
            (
                f"{_short(one['model'])}, {one['source']}: {one['cores']} cores of {one['family']}, {_load(one)}",
                _memory(memory(one)),
                _cell(planned(one["model"], one["family"])),
                one["because"],
            )
            for one in published("recipes")
        ),
    )


def reported_memory() -> str:
    """A line for each report of a full core."""
    rows = []
    for one in published("reports"):
        estimated = memory(one)
        tensors, rest = one["tensors"] * GIB, one["rest"] * GIB
        ours = estimated.weights + estimated.cache
        others = estimated.total - ours
        rows.append(
            (
                f"{_short(one['model'])} on {one['cores']} cores of {one['family']}, {_load(one)}, {one['source']}",
                f"{tensors / GB:.1f} GB, estimated {ours / GB:.1f} ({ours / tensors - 1:+.0%})",
                f"{rest / GB:.1f} GB, estimated {others / GB:.1f} ({others / rest - 1:+.0%})",
                "does not fit" if not estimated.fits else "fits",
            )
        )
    return table(("Report", "Weights and cache", "The rest", "Estimate says"), rows)


QUANTIZED = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct")


def quantized_models() -> str:
    """A line for each model: its weights, and what of them is on each core."""
    rows = []
    for name in QUANTIZED:
        facts = models()[name]
        forms = (facts, quantized(facts, "int8"))
        cores = ([f"{weights_bytes(one, Widths(), tensor) / GB:.2f}" for one in forms] for tensor in (8, 32))
        rows.append(
            (_short(name), *(f"{one.read_bytes / GB:.1f}" for one in forms), *(cell for of in cores for cell in of))
        )
    at = [f"{form}, TP {tensor}" for tensor in (8, 32) for form in ("bfloat16", "Int8 or Fp8")]
    return table(("Model", "bfloat16", "Int8 or Fp8", *at), rows)


@cache
def models() -> dict[str, Facts]:
    found = yaml.safe_load((CASES / "models.yaml").read_text())
    return {name: msgspec.convert(facts, Facts) for name, facts in found.items()}


@cache
def published(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((CASES / "recipes.yaml").read_text())[kind]
    return found


def planned(name: str, family: str) -> Option | None:
    """What is chosen if all types of a family can be had; None: nothing fits."""
    types = tuple(kind for kind in INSTANCE_TYPES if kind.startswith(family))
    settings = Settings(
        runtime_image="", device_mode="PluginWithExtension", provisionable=Provisionable(instance_types=types)
    )
    model = NeuronModel("model", "default", "", "", Spec(model=ModelSource(uri=f"hf://{name}")))
    try:
        return choose(model, models()[name], settings, FreeDevices(())).chosen
    except Unplaceable:
        return None


def memory(one: dict[str, Any]) -> Memory:
    family = FAMILIES[one["family"]]
    widths = Widths(weights=one.get("weights", 2))
    facts, load = models()[one["model"]], Load(one["length"], one["sequences"])
    return memory_of(facts, widths, load, one["cores"], family=family, logical_core=family.logical_core)


def _cell(option: Option | None) -> str:
    if option is None:
        return "-"
    held = f"{option.placement.size} of {option.site.name}"
    return f"{held}, TP {option.tensor}, {_load_words(option.load)}, {_memory(option.memory)}"


def _memory(found: Memory) -> str:
    return f"{found.total / GB:.1f} of {found.limit / GB:.1f}"


def _load(one: dict[str, Any]) -> str:
    return _load_words(Load(one["length"], one["sequences"]))


def _load_words(load: Load) -> str:
    return f"{load.sequences} x {load.length:,}"


def _short(name: str) -> str:
    return name.partition("/")[2]
