"""Findings to conditions and Events. Called by `decide`.

The same findings give the same status, except for `lastTransitionTime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from neuron_operator.model_status import MAX_MESSAGE, MAX_WORD, Condition, ModelFacts
from neuron_operator.reasons import CONDITIONS, Finding, Reason
from neuron_operator.records import Facts
from neuron_operator.views import ModelView
from neuron_operator.world import Announcement, Object


def complete(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One Finding for every condition, Ready last. A condition without a finding waits for the first that is not true.

    Of several findings about one condition, the last one that is not true wins.
    """
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.condition not in found or finding.status != "True":
            found[finding.condition] = finding
    first = next((found[kind] for kind in CONDITIONS if kind in found and found[kind].status != "True"), None)
    reason = first.reason if first else Reason.RESOLVING
    waits = f"waiting for {first.condition}" if first else "not checked yet"
    all_found = [found.get(kind) or Finding(kind, "Unknown", reason, waits) for kind in CONDITIONS]
    return (*all_found, _roll_up(all_found))


def facts_of(facts: Facts) -> ModelFacts:
    return ModelFacts(
        architecture=facts.architecture[:MAX_WORD],
        parameters=facts.parameters,
        layers=facts.num_layers,
        heads=facts.num_heads,
        bytes=facts.weights_bytes,
        digest=facts.digest[:MAX_WORD],
    )


def announcements(model: ModelView, status: Object) -> tuple[Announcement, ...]:
    """An Event if Ready or its reason changed."""
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


def condition_of(finding: Finding, model: ModelView, now: datetime) -> Condition:
    before = model.conditions.get(finding.condition)
    since = before.since if before is not None and before.status == finding.status else ""
    message = finding.message
    return Condition(
        type=finding.condition,
        status=finding.status,
        reason=str(finding.reason),
        message=message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...",
        observed_generation=model.generation,
        last_transition_time=since or now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
