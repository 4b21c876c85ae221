"""Findings to conditions and Events. Called by `decide`.

The same findings give the same status, except for `lastTransitionTime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from neuron_operator.api import model_status
from neuron_operator.api.model_status import MAX_MESSAGE, MAX_WORD, ConversionStatus, ModelFacts
from neuron_operator.api.reasons import ABNORMAL, CONDITIONS, Condition, Finding, Reason
from neuron_operator.read.objects import printable, written
from neuron_operator.read.records import ConversionFigures, Facts, PlannedConversion, StoredWeights
from neuron_operator.read.views import ModelView
from neuron_operator.read.world import Announcement


def complete(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One Finding for every condition, then Ready, then Reconciling or Stalled if Ready is not true, then Contested if
    somebody else undoes writes.

    A condition without a finding waits for the first that is not true. Of several findings about one condition, the
    last one that is not true wins. A finding about Ready says why replicas are missing although Available is true.
    """
    by_condition: dict[Condition, Finding] = {}
    for finding in findings:
        if finding.condition not in by_condition or finding.status != "True":
            by_condition[finding.condition] = finding
    first = next(
        (by_condition[kind] for kind in CONDITIONS if kind in by_condition and by_condition[kind].status != "True"),
        None,
    )
    reason = first.reason if first else Reason.RESOLVING
    waits = f"waiting for {first.condition}" if first else "not checked yet"
    all_found = [by_condition.get(kind) or Finding(kind, "Unknown", reason, waits) for kind in CONDITIONS]
    contested = by_condition.get("Contested")
    ready = _roll_up(all_found, by_condition.get("Ready"), contested)
    return (*all_found, ready, *abnormal(ready), *((contested,) if contested else ()))


def facts_of(facts: Facts) -> ModelFacts:
    return ModelFacts(
        architecture=printable(facts.architecture)[:MAX_WORD],
        parameters=facts.parameters,
        layers=facts.num_layers,
        heads=facts.num_heads,
        bytes=facts.weights_bytes,
        digest=printable(facts.digest)[:MAX_WORD],
        quantization=printable(facts.quantization)[:MAX_WORD] or None,
    )


def conversion_of(planned: PlannedConversion, weights: StoredWeights, figures: ConversionFigures) -> ConversionStatus:
    return ConversionStatus(
        format=planned.format,
        digest=planned.digest,
        bytes=weights.bytes,
        layer_error=f"{figures.layer_error:.4f}",
        perplexity=_figure(figures.perplexity),
        converted_perplexity=_figure(figures.converted_perplexity),
        unmeasured=printable(figures.unmeasured)[:MAX_WORD] or None,
    )


def _figure(number: float | None) -> str | None:
    return None if number is None else f"{number:.2f}"


def announcements(model: ModelView, findings: Sequence[Finding]) -> tuple[Announcement, ...]:
    """An Event if Ready or its reason changed, and one if Contested is new and not the reason of Ready."""
    told = []
    is_of_ready = any((one.condition, one.reason) == ("Ready", Reason.CONTESTED) for one in findings)
    telling = ("Ready",) if is_of_ready else ("Ready", "Contested")
    for finding in findings:
        before = model.conditions.get(finding.condition)
        is_new = before is None or (before.status, before.reason) != (finding.status, finding.reason)
        if is_new and finding.condition in telling:
            is_trouble = (finding.condition, finding.status) != ("Ready", "True") and not finding.row.passing
            kind: Literal["Warning", "Normal"] = "Warning" if is_trouble else "Normal"
            told.append(Announcement(kind, str(finding.reason), printable(finding.message)))
    return tuple(told)


def _roll_up(findings: Sequence[Finding], missing: Finding | None, contested: Finding | None) -> Finding:
    """`missing`: a reason of Available although that is true. It counts in Available's place. `contested`: time alone
    brings nothing about that somebody else undoes."""
    available = next(finding for finding in findings if finding.condition == "Available")
    in_order = [missing if missing and finding is available else finding for finding in findings]
    first = next((finding for finding in in_order if finding.status != "True"), None)
    if first is not None and first.row.passing and contested is not None:
        return Finding("Ready", "False", contested.reason, f"{first.message}; {contested.message}", first.needs)
    if first is not None:
        return Finding("Ready", "False", first.reason, first.message, first.needs)
    reason = "ScaledToZero" if available.reason == "ScaledToZero" else "Ready"
    return Finding("Ready", "True", reason, available.message)


def abnormal(ready: Finding) -> tuple[Finding, ...]:
    """Stalled if somebody must act, Reconciling if the operator or time can. Neither while an edit is held back."""
    if ready.status == "True" or ready.reason == Reason.PAUSED:
        return ()
    return (Finding("Stalled" if ready.row.final else "Reconciling", "True", ready.reason, ready.message),)


def condition_of(finding: Finding, model: ModelView, now: datetime, page: str) -> model_status.Condition:
    """`page`: with the section of its reason."""
    before = model.conditions.get(finding.condition)
    since = before.since if before is not None and before.status == finding.status else ""
    return model_status.Condition(
        type=finding.condition,
        status=finding.status,
        reason=str(finding.reason),
        message=_message_of(finding, page),
        observed_generation=model.generation,
        last_transition_time=since or written(now),
    )


def _message_of(finding: Finding, page: str) -> str:
    """The message that a condition shows. If something is missing, it ends with the section of its reason."""
    reason = Reason.named(finding.reason)
    is_missing = finding.status == "False" or finding.condition in ABNORMAL
    link = f"; see {page}#{reason.lower()}" if reason is not None and is_missing else ""
    # Nodes, registries and logs wrote parts of it. The verdict on an earlier Job is what the condition showed.
    message, room = printable(finding.message).removesuffix(link), MAX_MESSAGE - len(link)
    return (message if len(message) <= room else message[: room - 3] + "...") + link
