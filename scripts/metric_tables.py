"""The table of docs/metrics.md, from the metric families of the front end. Called by `generate`."""

from __future__ import annotations

from markdown_table import table
from neuron_runtime.server.metrics import FAMILIES


def model_metrics() -> str:
    """Every series of a serving process."""
    lines = (
        (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.text.rstrip("."), one.use)
        for one in FAMILIES
    )
    return table(("Metric", "Type", "Labels", "Meaning", "Use"), lines)
