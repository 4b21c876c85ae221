"""Tables of docs/neuron.md: models of NxD Inference, what its errors end with, and keywords of transformers-neuronx.

Used by `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from markdown_table import table
from neuron_runtime.backend.neuron.failures import CODES
from neuron_runtime.backend.nxdi.models import FAMILIES, NxdiFamily
from neuron_runtime.neuronx_fields import FIELDS


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
    for sdk, rows in family.least_rows.items():
        yield f"SDK {sdk} runs it with {rows} sequences or more only"
    if family.quantized:
        yield "also with [quantized weights](#quantized-weights)"
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


def neuronx_fields() -> str:
    """What becomes of each keyword of transformers-neuronx, with its own backend and with others."""
    rows: dict[tuple[str, str], list[str]] = {}
    for field in FIELDS:
        own = f"refused: {field.refused}" if field.refused else "Llama only" if field.llama_only else "honoured"
        other = f"refused: {field.cure}" if field.cure else "accepted without effect"
        if field.name == "continuous_batching":
            other = "`max_num_seqs` and `max_model_len` of it are those flags"
        rows.setdefault((own, other), []).append(f"`{field.name}`")
    return table(
        ("Keyword", "`transformers-neuronx`", "Other backends"),
        ((", ".join(names), own, other) for (own, other), names in rows.items()),
    )
