"""Reasons to conditions: the whole status of a NeuronModel from what a pass found. Called by `decide`.

No phase, no counter, no clock but `lastTransitionTime`: the same findings give the same status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from neuron_operator import names
from neuron_operator.reasons import CONDITIONS, Finding, Reason
from neuron_operator.revision import Revision
from neuron_operator.views import ModelView
from neuron_operator.world import Announcement, Object

MAX_MESSAGE = 1024

MAX_WORD = 256
"""Of strings that a runtime reports; the schema of the status has the same bounds."""


def complete(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One Finding for every condition, Ready last. A condition without one waits for the first that is not true.

    Where several findings are about one condition, the last one that is not true wins.
    """
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.condition not in found or finding.status != "True":
            found[finding.condition] = finding
    first = next((found[kind] for kind in CONDITIONS if kind in found and found[kind].status != "True"), None)
    reason = first.reason if first else Reason.RESOLVING
    waits = f"waits for {first.condition}" if first else "not looked at yet"
    all_found = [found.get(kind) or Finding(kind, "Unknown", reason, waits) for kind in CONDITIONS]
    return (*all_found, _roll_up(all_found))


def build(
    model: ModelView,
    findings: Sequence[Finding],
    *,
    counts: Mapping[str, int],
    shown: Revision | None,
    current_revision: str,
    update_revision: str,
    url: str,
    now: datetime,
) -> Object:
    """The whole status. `findings` are complete; `shown` is the revision whose facts and plan a reader wants to see."""
    status: dict[str, Any] = {
        **counts,
        "selector": names.selector_string(names.serving_selector(model.name)),
        "conditions": [_condition(model, finding, now) for finding in findings],
    }
    named = {"url": url, "currentRevision": current_revision, "updateRevision": update_revision}
    status.update({key: value for key, value in named.items() if value})
    if shown is not None:
        facts = shown.pinned.facts
        status["model"] = {
            "architecture": facts.architecture[:MAX_WORD],
            "parameters": facts.parameters,
            "layers": facts.num_layers,
            "heads": facts.num_heads,
            "bytes": facts.weights_bytes,
            "digest": facts.digest[:MAX_WORD],
        }
        status["plan"] = shown.pinned.plan
    return status


def announcements(model: ModelView, status: Object) -> tuple[Announcement, ...]:
    """An Event where Ready or its reason changed."""
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    before = model.conditions.get("Ready")
    if before is not None and (before.status, before.reason) == (ready["status"], ready["reason"]):
        return ()
    reason = Reason.named(ready["reason"])
    is_trouble = ready["status"] != "True" and not (reason and reason.row.passing)
    return (Announcement("Warning" if is_trouble else "Normal", ready["reason"], ready["message"]),)


def _roll_up(findings: Sequence[Finding]) -> Finding:
    first = next((finding for finding in findings if finding.status != "True"), None)
    if first is not None:
        return Finding("Ready", "False", first.reason, first.message)
    available = next(finding for finding in findings if finding.condition == "Available")
    reason = "ScaledToZero" if available.reason == "ScaledToZero" else "Ready"
    return Finding("Ready", "True", reason, available.message)


def _condition(model: ModelView, finding: Finding, now: datetime) -> Object:
    before = model.conditions.get(finding.condition)
    since = before.since if before is not None and before.status == finding.status else ""
    message = finding.message
    return {
        "type": finding.condition,
        "status": finding.status,
        "reason": str(finding.reason),
        "message": message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...",
        "observedGeneration": model.generation,
        "lastTransitionTime": since or now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
