"""What `kubectl neuron why` prints, and which container's log matters. Pure; called by `command`.

It reads the objects with the operator's own views and takes reasons and cures from the operator's table, so it says
the same as the conditions and adds what is next to them: pods, nodes, the last error line, the next command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.reasons import ADAPTER_CONDITIONS, CONDITIONS, Condition, Reason
from neuron_operator.local.answers import command_for, served_name, task_of
from neuron_operator.read.objects import dig, items, kind_of, labels_of, name_of, printable, text, whole
from neuron_operator.read.views import ContainerView, Observed, PodView, scaling_of
from neuron_operator.why import nodes
from neuron_operator.why.pods import MAX_LINE, how_it_ended, last_words

LOG_LINES = 200
"""Lines of a log that are searched for the last error."""
_ERROR = re.compile(r"error\b|exception\b|\b(fail(ed|ure|s)?|fatal|cannot|refused|denied|killed|out of memory)\b", re.I)
_OF_KUBERNETES = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
_GOOD_NODE = {**nodes.HEALTHY, **dict.fromkeys(_OF_KUBERNETES, "False")}


@dataclass(frozen=True)
class _Kind:
    """What is said of an object of this kind."""

    name: str
    short: str
    prefix: str
    """What stands before its name in commands of the plugin."""
    word: str
    conditions: tuple[Condition, ...]


_MODEL = _Kind(names.KIND, names.SHORT, "", "model", CONDITIONS)
_ADAPTER = _Kind(names.ADAPTER_KIND, names.ADAPTER_SHORT, f"{names.ADAPTER_SHORT}/", "adapter", ADAPTER_CONDITIONS)
MAX_ADAPTERS = 20
"""Adapters of a model that are shown."""


def _kind(body: Any) -> _Kind:
    return _ADAPTER if kind_of(body) == names.ADAPTER_KIND else _MODEL


def model_of(body: Any) -> str:
    """The name of the model: its own, or the one that an adapter is for."""
    return text(body, "spec", "model") if _kind(body) is _ADAPTER else name_of(body)


@dataclass(frozen=True)
class Culprit:
    """The container whose log matters."""

    pod: PodView
    container: ContainerView

    @property
    def log_options(self) -> tuple[str, ...]:
        """Options that show the log of the run that ended, if the container runs again after an error."""
        runs_again = bool(self.container.running_since) and self.container.ended is not None
        return ("--previous",) if runs_again else ()

    @property
    def has_log(self) -> bool:
        return self.container.has_run or self.container.ended is not None


def culprit(observed: Observed) -> Culprit | None:
    """The container that the reason of Ready is about; of a ready model one that serves. None: it has no pods."""
    ready = observed.model.conditions.get("Ready")
    job_pods = [pod for job in observed.jobs for pod in observed.pods_of(job)]
    job_pods.sort(key=lambda pod: pod.age_key, reverse=True)
    everyone = [*observed.replicas, *observed.followers, *job_pods]
    named = re.findall(r"(?:\bpod |; (?!pod ))([^\s:;,]+)", ready.message) if ready is not None else []
    about = [pod for pod in everyone if pod.name in named]
    if ready is not None and ready.status == "True":
        about = [pod for pod in observed.replicas if pod.is_answering]
    elif not about and _is_before_replicas(observed):
        about = job_pods or [pod for pod in everyone if not pod.is_answering]
        return Culprit(about[0], _container(about[0])) if about else None
    elif not about:
        about = [pod for pod in observed.replicas if not pod.is_answering]
    pod = next(iter(about or everyone), None)
    return None if pod is None else Culprit(pod, _container(pod))


def _is_before_replicas(observed: Observed) -> bool:
    """Whether a step before replicas is not done: an edit may be refused while all of them answer. What is not
    `Accepted` is no step: no pod tells of it."""
    conditions = observed.model.conditions
    before = (*CONDITIONS[1 : CONDITIONS.index("Available")], *ADAPTER_CONDITIONS[1:])
    is_refused = "UpToDate" in conditions and conditions["UpToDate"].reason in _OF_THE_CHECK
    return is_refused or any(conditions[kind].status != "True" for kind in before if kind in conditions)


_OF_THE_CHECK = (Reason.CHECKING, Reason.INVALID_ENGINE_CONFIG)


def _container(pod: PodView) -> ContainerView:
    """One that was added by others, if it failed and the runtime did not."""
    if pod.container.ended is None:
        for added in pod.additions:
            if added.ended is not None and added.ended.exit_code:
                return added
    return pod.container


def last_error(culprit: Culprit, log: str) -> str:
    """The last words of a container that ended, else the last line of its log that tells of an error. Empty: it ended
    as it should."""
    container, pod = culprit.container, culprit.pod
    if not culprit.has_log:
        return f"it has not started: {container.waiting_message or pod.unscheduled or pod.message}"
    if container.ended is not None:
        words = printable(last_words(container.ended))
        return f"{words} ({how_it_ended(container.ended)})" if words else ""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    if errors:
        return printable(errors[-1])[:MAX_LINE]
    said = f"; the last says: {printable(lines[-1])[:MAX_LINE]}" if lines else ""
    return f"no error in the last {LOG_LINES} lines{said}"


def report(
    body: Any,
    observed: Observed,
    nodes: Sequence[Any] | str,
    error: str,
    holder: str = "",
    *,
    adapters: Sequence[Any] | None = (),
) -> str:
    """The whole output about a model or an adapter. `nodes`: or why they cannot be read; `holder`: the installation
    that acts in the namespace; `adapters`: those of the namespace, None: they cannot be read."""
    view, kind = observed.model, _kind(body)
    ready = view.conditions.get("Ready")
    state = "no conditions yet" if ready is None else "ready" if ready.status == "True" else ready.reason
    lines = [
        f"{kind.name} {view.namespace}/{view.name}: {state}",
        *(f"  {name:<8}  {printable(value)}" for name, value in _facts(body, adapters, holder).items() if value),
        "",
        *_conditions(observed, kind),
        "",
        *_pods(observed),
        "",
        *_nodes(observed, nodes),
        *_adapters(body, adapters or ()),
    ]
    cause = culprit(observed)
    if cause is not None and error and not cause.pod.is_answering and (ready is None or ready.status != "True"):
        is_success = cause.container.ended is not None and cause.container.ended.exit_code == 0
        lines += [
            "",
            "Last result" if is_success else "Last error",
            f"  pod {cause.pod.name}, container {cause.container.name}: {error}",
        ]
    cure, command = next_step(body, observed, cause)
    lines += ["", "Next", *([f"  {cure}"] if cure else []), f"  $ {command}"]
    return "\n".join(lines)


def _facts(body: Any, adapters: Sequence[Any] | None, holder: str) -> dict[str, str]:
    replicas = text(body, "status", "ready") or "none"
    acts = f"{holder} acts in this namespace, and no other" if holder else ""
    if _kind(body) is _ADAPTER:
        uri, served = text(body, "spec", "uri"), text(body, "status", "served", "uri")
        before = f"{served}, the version before" if served not in ("", uri) else ""
        return {"model": model_of(body), "uri": uri, "served": before, "replicas": replicas, "operator": acts}
    return {
        "model": text(body, "spec", "model", "uri"),
        "task": task_of(body),
        "replicas": replicas,
        "adapters": _num_adapters(body, adapters),
        "weights": _weights(body),
        "drafts": _drafts(body),
        "engine": _default_engine(body),
        "url": text(body, "status", "url"),
        "zero": _zero(body),
        "operator": acts,
    }


def _zero(model: Any) -> str:
    """How long it takes to wake, and what the operator does by itself; empty: nobody knows, or nothing."""
    told, idle = scaling_of(model), dig(model, "spec", "idle")
    load = f"the last replica took {told.load_seconds} s to load" if told.load_seconds is not None else ""
    rule = f"scaled to {whole(dig(idle, 'minReplicas'))} after {whole(dig(idle, 'afterSeconds'))} s without requests"
    last = f"no request that the operator knows of since {told.active_at}" if told.active_at else ""
    waits = f"wakes since {told.waking_since}" if told.waking_since else ""
    return "; ".join(filter(None, (waits, load, rule if idle else "", last if idle else "")))


def _num_adapters(model: Any, adapters: Sequence[Any] | None) -> str:
    """Empty: it has none."""
    if adapters is None:
        return "cannot be read" if dig(model, "spec", "serving", "adapters") else ""
    mine = [one for one in adapters if model_of(one) == name_of(model)]
    return f"{sum(map(_is_ready, mine))} of {len(mine)} are ready" if mine else ""


def _adapters(model: Any, adapters: Sequence[Any]) -> list[str]:
    """Those of a model that are not ready."""
    mine = [one for one in adapters if model_of(one) == name_of(model) and not _is_ready(one)]
    rows = [
        (name_of(one), text(one, "status", "ready") or "none", text(_ready(one), "reason") or "no conditions yet")
        for one in mine[:MAX_ADAPTERS]
    ]
    more = [f"  and {len(mine) - MAX_ADAPTERS} more"] if len(mine) > MAX_ADAPTERS else []
    title = f"Adapters that are not ready; kubectl neuron why {_ADAPTER.prefix}NAME says more"
    return ["", title, *_table(rows), *more] if rows else []


def _ready(body: Any) -> Any:
    return next((one for one in items(body, "status", "conditions") if one.get("type") == "Ready"), {})


def _is_ready(body: Any) -> bool:
    return text(_ready(body), "status") == "True"


def _weights(model: Any) -> str:
    """How they are quantized, and what a conversion changed; empty: they are not."""
    made = dig(model, "status", "conversion")
    if not made:
        return text(model, "status", "model", "quantization")
    error, before, after = (text(made, name) for name in ("layerError", "perplexity", "convertedPerplexity"))
    told = [f"converted to {text(made, 'format')}", f"largest error of a layer {error}" if error else ""]
    told.append(f"perplexity {after}, before {before}" if after and before else text(made, "unmeasured"))
    return "; ".join(filter(None, told))


def _drafts(model: Any) -> str:
    """Where they come from, and how many tokens they yield; empty: there are none."""
    named = [text(model, "spec", "serving", "speculation", *path) for path in (("method",), ("model", "uri"))]
    length = text(model, "status", "acceptedLength")
    return ", ".join(filter(None, (*named, f"{length} tokens a step" if length else "")))


def _default_engine(model: Any) -> str:
    """Which engine it has, and why; empty: the manifest names it, or there are no defaults."""
    family = text(model, "status", "plan", "defaultFor")
    return f"{text(model, 'status', 'plan', 'backend')}, the default for {family}" if family else ""


def _conditions(observed: Observed, kind: _Kind) -> list[str]:
    view = observed.model
    if not view.conditions:
        return ["Conditions", f"  none: the operator has not seen the {kind.word} yet"]
    shown = [one for one in (*kind.conditions, "Ready", "Contested") if one in view.conditions]
    rows = [(one, view.conditions[one].status, view.conditions[one].reason) for one in shown]
    lines = ["Conditions", *_table(rows)]
    ready = view.conditions.get("Ready")
    if ready is not None and ready.status != "True":
        lines += [f"  since {ready.since}: {printable(ready.message)}"]
    elif contested := view.conditions.get("Contested"):
        lines += [f"  since {contested.since}: {printable(contested.message)}"]
    if ready is not None and ready.generation < view.generation:
        lines += [f"  of generation {ready.generation}: the operator has not seen generation {view.generation} yet"]
    return lines


def _pods(observed: Observed) -> list[str]:
    rows = [
        (
            pod.name,
            "server" if pod.role == names.ROLE_LEADER else pod.role,
            _pod_state(pod),
            f"restarts {pod.container.num_restarts}",
            pod.node,
        )
        for pod in _all_pods(observed)
    ]
    return ["Pods", *(_table(rows) or ["  none"])]


def _pod_state(pod: PodView) -> str:
    container = pod.container
    if pod.is_deleting:
        return "ends"
    if pod.is_answering:
        return "ready"
    if pod.unscheduled is not None:
        return "unschedulable"
    if container.ended is not None:
        waits = f", {container.waiting_reason}" if container.waiting_reason else ""
        return f"{how_it_ended(container.ended)}{waits}"
    return container.waiting_reason or pod.reason or ("not ready" if container.running_since else pod.phase)


def _nodes(observed: Observed, nodes: Sequence[Any] | str) -> list[str]:
    if isinstance(nodes, str):
        return ["Nodes", f"  cannot be read: {nodes}"]
    rows = [(name_of(n), labels_of(n).get(names.INSTANCE_TYPE_LABEL, "-"), _devices(n), _trouble(n)) for n in nodes]
    gone = nodes_of(observed) - {name_of(node) for node in nodes}
    rows += [(name, "-", "-", "does not exist") for name in sorted(gone)]
    return ["Nodes", *(_table(rows) or ["  no pod has a node"])]


def nodes_of(observed: Observed) -> set[str]:
    return {pod.node for pod in _all_pods(observed) if pod.node}


def _all_pods(observed: Observed) -> list[PodView]:
    return [*observed.replicas, *observed.followers, *(pod for job in observed.jobs for pod in observed.pods_of(job))]


def _devices(node: Any) -> str:
    allocatable = dig(node, "status", "allocatable") or {}
    if names.DEVICE_RESOURCE not in allocatable:
        return "no Neuron devices"
    healthy = whole(allocatable[names.DEVICE_RESOURCE])
    total = whole(dig(node, "status", "capacity", names.DEVICE_RESOURCE))
    return f"{healthy} Neuron devices" + (f" of {total}" if total > healthy else "")


def _trouble(node: Any) -> str:
    """What keeps pods away or ends them; `ok` if nothing does."""
    troubles = [
        f"{text(c, 'type')}={text(c, 'status')} {text(c, 'reason')}".strip()
        for c in items(node, "status", "conditions")
        if _GOOD_NODE.get(text(c, "type"), text(c, "status")) != text(c, "status")
    ]
    if dig(node, "spec", "unschedulable"):
        troubles.append("cordoned")
    return ", ".join(troubles) or "ok"


_EDIT = "kubectl edit {short} {name} -n {namespace}"
_POD = "kubectl describe pod {pod} -n {namespace}"
_LOGS = "kubectl neuron logs {prefix}{name} -n {namespace}"
_WATCH = "kubectl get {short} {name} -n {namespace} --watch"
_EVENTS = "kubectl describe {short} {name} -n {namespace}"
_OPERATOR = "kubectl get pods -A -l app.kubernetes.io/name=neuron-operator"
_OF_MODEL = "kubectl neuron why {model} -n {namespace}"
_NODES = f"kubectl get nodes -L {names.INSTANCE_TYPE_LABEL},karpenter.sh/nodepool"

_COMMANDS: Mapping[Reason, str] = {
    Reason.ADMISSION_DENIED: "kubectl get events -n {namespace} --field-selector type=Warning",
    Reason.QUOTA_EXCEEDED: "kubectl describe quota -n {namespace}",
    Reason.POD_SECURITY_DENIED: "kubectl get namespace {namespace} --show-labels",
    Reason.OPERATOR_FORBIDDEN: (
        "helm upgrade neuron-serving charts/neuron-serving -n neuron-serving --reset-then-reuse-values"
    ),
    Reason.NAME_CONFLICT: "kubectl get service,deployment,poddisruptionbudget,networkpolicy {name} -n {namespace}",
    Reason.CONTESTED: _EVENTS,
    Reason.WRITE_FAILED: "kubectl logs -n neuron-serving deploy/neuron-operator --tail=50",
    Reason.SECRET_NOT_FOUND: "kubectl get secrets -n {namespace}",
    Reason.WEIGHTS_UNAUTHORIZED: "kubectl get secrets -n {namespace}",
    Reason.CONFIG_MAP_NOT_FOUND: "kubectl get configmaps -n {namespace}",
    Reason.VOLUME_NOT_BOUND: "kubectl describe pvc -n {namespace}",
    Reason.INSUFFICIENT_NEURON: _NODES,
    Reason.NO_MATCHING_NODE: _NODES,
    Reason.NODE_LOST: "kubectl describe node {node}",
    Reason.DEVICE_UNHEALTHY: "kubectl describe node {node}",
    Reason.ALLOCATION_REJECTED: "kubectl describe node {node}",
    Reason.EVICTED: "kubectl describe node {node}",
    Reason.NAMESPACE_TERMINATING: "kubectl get namespace {namespace} -o yaml",
    Reason.PAUSED: f"kubectl annotate {{short}} {{name}} -n {{namespace}} {names.PAUSED_ANNOTATION}-",
    Reason.CHECKSUM_MISMATCH: (
        f"kubectl annotate {{short}} {{name}} -n {{namespace}} {names.REFRESH_ANNOTATION}=$(date +%s) --overwrite"
    ),
    Reason.ADAPTERS_NOT_SERVED: "kubectl edit nm {model} -n {namespace}",
    Reason.MODEL_NOT_FOUND: _EDIT,
    Reason.RANK_TOO_HIGH: _EDIT,
    Reason.TARGETS_NOT_SERVED: _EDIT,
    Reason.ADAPTER_MISMATCH: _EDIT,
    Reason.ADAPTER_NOT_SUPPORTED: _EDIT,
    Reason.INVALID_ADAPTER: _EDIT,
    Reason.INVALID_ENGINE_CONFIG: _EDIT,
    Reason.IMAGE_PULL: _POD,
}
"""For reasons about which the pod's log says nothing, or less. `final` reasons without a row here need an edit."""


def next_step(body: Any, observed: Observed, culprit: Culprit | None) -> tuple[str, str]:
    """The cure in words, and the command that helps most."""
    view, kind = observed.model, _kind(body)
    ready = view.conditions.get("Ready")
    places = {
        "short": kind.short,
        "prefix": kind.prefix,
        "model": model_of(body),
        "name": view.name,
        "namespace": view.namespace,
        "pod": culprit.pod.name if culprit else "",
        "node": culprit.pod.node if culprit else "",
    }
    if ready is None or ready.generation < view.generation:
        return "The operator does not act: see that it runs", _OPERATOR
    if ready.status == "True" and ready.reason != "Ready":
        return "The model is scaled to zero", f"kubectl scale nm {model_of(body)} -n {view.namespace} --replicas=1"
    if ready.status == "True" and (task := task_of(body)):
        return "From a pod of the cluster", command_for(task, text(body, "status", "url"), served_name(body), "Hello")
    if ready.status == "True":
        return "", f"kubectl neuron chat {kind.prefix}{view.name} -n {view.namespace}"
    reason = Reason.named(ready.reason)
    command = _COMMANDS.get(reason, "") if reason is not None else _EVENTS
    if ("{pod}" in command and not places["pod"]) or ("{node}" in command and not places["node"]):
        command = _EVENTS
    if not command and culprit is not None and culprit.has_log:
        command = _LOGS
    if not command:
        waits = _OF_MODEL if kind is _ADAPTER else _POD if culprit else _WATCH
        command = _EDIT if reason is not None and reason.row.final else waits
    quoted = {name: shlex.quote(value) if value else "" for name, value in places.items()}
    return plain(reason.row.do) if reason else "", command.format(**quoted)


def plain(markdown: str) -> str:
    """A cure of the table without Markdown: a link becomes its address in the documentation."""

    def address(link: re.Match[str]) -> str:
        file, _, section = link[2].partition("#")
        return f"{link[1]} (docs/{file or 'neuronmodel.md'}{'#' if section else ''}{section})"

    return re.sub(r"\[([^]]+)]\(([^)]+)\)", address, markdown).replace("`", "")


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
