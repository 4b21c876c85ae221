"""Tables of docs/neuron.md: the models that NxD Inference runs, and what its errors end with. Used by `generate`."""

from __future__ import annotations

from collections.abc import Iterator

from markdown_table import table
from neuron_runtime.backend.neuron.failures import CODES
from neuron_runtime.backend.nxdi.models import FAMILIES, NxdiFamily


def models() -> str:
    rows = (
        (
            ", ".join(f"`{name}`" for name in family.architectures),
            f"`{family.application}`",
            f"from {family.since}",
            "; ".join(_notes(family)),
        )
        for family in FAMILIES
    )
    return table(("`architectures`", "Application class", "NxD Inference", ""), rows)


def _notes(family: NxdiFamily) -> Iterator[str]:
    if family.before:
        yield f"older releases by `{family.before}`, up to the sliding window's length"
    if len(family.layouts) == 1:
        yield f"layout `{family.layouts[0]}` only"
    if family.note:
        yield family.note


def statuses() -> str:
    """Exit code by status of the Neuron runtime."""
    rows = (
        (
            f"{code.value} `{code.reason}`",
            ", ".join(f"`{one.name}` ({one.number})" for one in CODES if one.exit_code == code),
        )
        for code in sorted({one.exit_code for one in CODES})
    )
    return table(("Exit code", "Status of the Neuron runtime"), rows)
