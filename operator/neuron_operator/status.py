"""Reasons to conditions: the whole status of a NeuronModel from what a pass found. Called by `decide`.

No phase, no counter, no clock but `lastTransitionTime`: the same findings give the same status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from neuron_operator import names
from neuron_operator.objects import condition, dig, items
from neuron_operator.revision import Revision
from neuron_operator.why import CONDITIONS, MAX_MESSAGE, Finding
from neuron_operator.world import Announcement, Object

MAX_WORD = 256
"""Of strings that a runtime reports; the schema of the status has the same bounds."""

PASSING = {"Resolving", "Loading", "RollingOut", "Draining", "Paused", "Fetching", "Compiling", "NodeProvisioning"}
"""Reasons that are a step on the way and not a trouble: Events about them are Normal."""


def complete(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One Finding for every condition: what nobody could say yet waits for the first that is not true. Ready last.

    Where several speak of one condition, the last one that is not true wins.
    """
    told: dict[str, Finding] = {}
    for finding in findings:
        if finding.condition not in told or finding.status != "True":
            told[finding.condition] = finding
    first = next((told[kind] for kind in CONDITIONS if kind in told and told[kind].status != "True"), None)
    reason = first.reason if first else "Resolving"
    waits = f"waits for {first.condition}" if first else "not looked at yet"
    all_found = [told.get(kind) or Finding(kind, "Unknown", reason, waits) for kind in CONDITIONS]
    return (*all_found, _roll_up(all_found))


def build(
    body: Object,
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
        "selector": names.selector_string(names.serving_selector(str(dig(body, "metadata", "name")))),
        "conditions": [_condition(body, finding, now) for finding in findings],
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


def announcements(body: Object, status: Object) -> tuple[Announcement, ...]:
    """An Event where Ready or its reason changed."""
    ready = condition({"status": status}, "Ready")
    before = condition(body, "Ready")
    if (before.get("status"), before.get("reason")) == (ready["status"], ready["reason"]):
        return ()
    calm = ready["status"] == "True" or ready["reason"] in PASSING
    return (Announcement("Normal" if calm else "Warning", ready["reason"], ready["message"]),)


def _roll_up(findings: Sequence[Finding]) -> Finding:
    first = next((finding for finding in findings if finding.status != "True"), None)
    if first is not None:
        return Finding("Ready", "False", first.reason, first.message)
    available = next(finding for finding in findings if finding.condition == "Available")
    reason = "ScaledToZero" if available.reason == "ScaledToZero" else "Ready"
    return Finding("Ready", "True", reason, available.message)


def _condition(body: Object, finding: Finding, now: datetime) -> Object:
    before = next((c for c in items(body, "status", "conditions") if c.get("type") == finding.condition), {})
    kept = before.get("lastTransitionTime") if before.get("status") == finding.status else None
    message = finding.message
    return {
        "type": finding.condition,
        "status": finding.status,
        "reason": finding.reason,
        "message": message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...",
        "observedGeneration": dig(body, "metadata", "generation") or 0,
        "lastTransitionTime": kept or now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
