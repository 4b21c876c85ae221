"""Why the API server refuses an object: the operator's own writes (`explain_refusals`, for `decide`), and pods that a
controller tries to create for it (`explain_denial`, for `why.replicas` and `why.jobs`).

The cause is only in the text of the answer: a quota, a policy and a missing right all give 403.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neuron_operator.api import names
from neuron_operator.api.reasons import Finding, Reason, unmet
from neuron_operator.read.objects import number_of, requested
from neuron_operator.read.world import Object, Refusal, RefusalCause


@dataclass(frozen=True)
class Denial:
    """A check of the API server, recognised by its text."""

    pattern: str
    reason: Reason
    cure: str
    """For an object or a replica's pod."""
    cure_of_job: str = ""
    """For a Job's pod if it differs: no field of podTemplate reaches it."""


_JOB_RESOURCES = "jobs.resources in the model or in the chart's values"
_DEFAULT_LIMIT = "a LimitRange of the namespace gives what has none a lower one"
_ADMINISTRATOR = "comply with it, or ask its owner for an exception"

DENIALS = (
    Denial(
        rf"failed quota: .*must specify .*\b{names.FETCH_CONTAINER}\b",
        Reason.QUOTA_EXCEEDED,
        f"set them in podTemplate.spec.resources, those of container {names.FETCH_CONTAINER} in {_JOB_RESOURCES}: the "
        "ResourceQuota demands them",
    ),
    Denial(
        r"failed quota: \S+: must specify",
        Reason.QUOTA_EXCEEDED,
        "set them in podTemplate.spec.resources: the ResourceQuota demands them",
        f"set them in {_JOB_RESOURCES}: the ResourceQuota demands them",
    ),
    Denial("exceeded quota: ", Reason.QUOTA_EXCEEDED, "raise the ResourceQuota, or request less"),
    Denial(
        "insufficient quota to match these scopes",
        Reason.QUOTA_EXCEEDED,
        "let a ResourceQuota of the namespace admit the PriorityClass, or remove podTemplate.spec.priorityClassName",
    ),
    Denial(
        r"must be less than or equal to \S+ limit",
        Reason.ADMISSION_DENIED,
        f"set the limit in podTemplate.spec.resources.limits: {_DEFAULT_LIMIT}",
        f"set the limit in {_JOB_RESOURCES}: {_DEFAULT_LIMIT}",
    ),
    Denial(
        "unable to validate against any security context constraint",
        Reason.POD_SECURITY_DENIED,
        "let the pods' ServiceAccount use a SecurityContextConstraints such as nonroot-v2",
    ),
    Denial(
        "label selector conflicts with its namespace",
        Reason.ADMISSION_DENIED,
        "change podTemplate.spec.nodeSelector: the namespace has one of its own",
        "change the chart value jobs.nodeSelector: the namespace has one of its own",
    ),
    Denial("violates PodSecurity", Reason.POD_SECURITY_DENIED, "check podTemplate, or the namespace's level"),
    Denial(
        "no PriorityClass with name",
        Reason.ADMISSION_DENIED,
        "create the PriorityClass, or correct podTemplate.spec.priorityClassName",
    ),
    Denial(
        r"RuntimeClass \S+ not found",
        Reason.ADMISSION_DENIED,
        "create the RuntimeClass, or correct podTemplate.spec.runtimeClassName",
    ),
    Denial(
        "error looking up service account",
        Reason.ADMISSION_DENIED,
        "create the ServiceAccount, or correct podTemplate.spec.serviceAccountName",
    ),
    Denial(
        r"(usage|ratio) per (Container|Pod|PersistentVolumeClaim)",
        Reason.ADMISSION_DENIED,
        "change podTemplate.spec.resources: a LimitRange of the namespace bounds them",
        f"change {_JOB_RESOURCES}: a LimitRange of the namespace bounds them",
    ),
    Denial("ValidatingAdmissionPolicy", Reason.ADMISSION_DENIED, f"that is a policy of the cluster: {_ADMINISTRATOR}"),
    Denial(
        "failed calling webhook",
        Reason.ADMISSION_DENIED,
        "see that the webhook's Service answers, or ask its owner to delete its configuration",
    ),
    Denial("admission webhook .* denied", Reason.ADMISSION_DENIED, f"that is a webhook's rule: {_ADMINISTRATOR}"),
)


def explain_denial(message: str, *, of_job: bool = False) -> tuple[Reason, str]:
    """The reason for a pod that cannot be created, and the cure: empty if the text is no refusal."""
    denial = _denial(message)
    if denial is None:
        is_refusal = re.search("is invalid|is forbidden|denied", message) is not None
        fields = "jobs in the model or in the chart's values" if of_job else "podTemplate"
        cure = f"correct what it names in {fields}; if it is not from there, a LimitRange, a policy or a webhook set it"
        return Reason.ADMISSION_DENIED, cure if is_refusal else ""
    return denial.reason, (of_job and denial.cure_of_job) or denial.cure


def explain_trial(message: str, ending: Sequence[Object], num_next: int) -> tuple[Reason, str] | None:
    """The reason and the message for a pod that was only tried; None if it could be created once another has ended.

    ending: the pods that end for `num_next` like it.
    """
    if not message or re.search(_OF_TRIALS, message):
        return None
    if "exceeded quota: " in message and not _stays_exceeded(message, ending, num_next):
        return None
    reason, cure = explain_denial(message)
    return reason, f"{message}; {cure}" if cure else message


_OF_TRIALS = r'cannot create resource "pods"|does not support dry run'
"""Of the trial alone."""
_AMOUNTS = r"exceeded quota: .*?requested: (\S+), used: (\S+), limited: (\S+)"


def _stays_exceeded(message: str, ending: Sequence[Object], num_next: int) -> bool:
    """Whether a quota would not suffice either for the first pod once one has ended, or for all once all have. One ends
    at a time, so that between the two no step needs more than both."""
    answer = re.search(_AMOUNTS, message)
    if answer is None:
        return False
    amounts = [dict(part.split("=", 1) for part in one.split(",") if "=" in part) for one in answer.groups()]
    wanted, held, most = ({name: number_of(amount) for name, amount in one.items()} for one in amounts)
    for name, of_next in wanted.items():
        kind, _, resource = name.partition(".")
        if kind in ("requests", "limits"):
            freed = [requested(pod, resource, (kind,)) for pod in ending]
        elif name in ("cpu", "memory", "ephemeral-storage"):
            freed = [requested(pod, name, ("requests",)) for pod in ending]
        else:  # the number of pods
            freed = [of_next] * len(ending)
        of_others = held.get(name, 0.0) - sum(freed)
        needed = of_next + (num_next - 1) * max(of_next, sum(freed) / max(len(freed), 1))
        if round(of_others + needed - most.get(name, 0.0), 6) > 0:
            return True
    return False


def explain_refusals(refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """One finding for each kind of refusal of this pass; the last one is shown."""
    denied = [(refusal, _denial(refusal.message)) for refusal in refusals if refusal.why in _ANSWERED]
    by_cause = {why: [refusal for refusal in refusals if refusal.why is why] for why in RefusalCause}
    if rejected := [r for r, denial in denied if denial is None and r.why is RefusalCause.REJECTED]:
        text = f"the API server rejected {_quoted(rejected)}; correct the fields that it names, or delete an object"
        yield unmet("Accepted", Reason.INVALID_SPEC, f"{text} that was edited by hand")
    if taken := by_cause[RefusalCause.TAKEN]:
        listed = ", ".join(f"{refusal.kind} {refusal.name}" for refusal in taken)
        verbs = "exists and does" if len(taken) == 1 else "exist and do"
        cure = f"delete or rename {'it' if len(taken) == 1 else 'them'}, or rename the model"
        yield unmet("Accepted", Reason.NAME_CONFLICT, f"{listed} {verbs} not belong to this model; {cure}")
    if heavy := by_cause[RefusalCause.HEAVY]:
        text = f"the operator does not read {_quoted(heavy)}; remove what others have added, or delete the object"
        yield unmet("Accepted", Reason.NAME_CONFLICT, text)
    for known in DENIALS:
        if refused := [refusal for refusal, denial in denied if denial is known]:
            yield unmet("Accepted", known.reason, f"the API server refused {_quoted(refused)}; {known.cure}")
    if forbidden := [r for r, denial in denied if denial is None and r.why is RefusalCause.FORBIDDEN]:
        text = f"the API server denied the operator a request: {_quoted(forbidden)}"
        yield unmet("Accepted", Reason.OPERATOR_FORBIDDEN, text)
    if failed := by_cause[RefusalCause.FAILED]:
        text = f"the operator cannot write and tries again, at most a minute apart: {_quoted(failed)}"
        yield unmet("Accepted", Reason.WRITE_FAILED, text)
    if undone := by_cause[RefusalCause.UNDONE]:
        cure = "set the field in the manifest or the chart's values, or exempt the object"
        who = "kubectl get --show-managed-fields -o yaml tells who it is, unless an admission policy is it"
        text = f"somebody else undoes what the operator writes, so it is written ever more rarely: {_quoted(undone)}"
        yield Finding("Contested", "True", Reason.CONTESTED, f"{text}; {cure}; {who}")
        if astray := [r for r in undone if r.kind == "Service" and r.message.startswith("spec.")]:
            text = f"requests may not reach the replicas: {_quoted(astray)}"
            yield unmet("Available", Reason.CONTESTED, f"{text}; {cure}; {who}")
    if by_cause[RefusalCause.TERMINATING]:
        text = "the namespace is being deleted, so nothing can be created in it"
        yield unmet("Accepted", Reason.NAMESPACE_TERMINATING, text)


_ANSWERED = (RefusalCause.REJECTED, RefusalCause.FORBIDDEN)


def _denial(message: str) -> Denial | None:
    return next((denial for denial in DENIALS if re.search(denial.pattern, message)), None)


def _quoted(refusals: Sequence[Refusal]) -> str:
    return "; ".join(f"{refusal.kind} {refusal.name}: {refusal.message}" for refusal in refusals)
