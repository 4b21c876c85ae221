"""`make bench-operator`: what the operator costs with 10, 100 and 500 models on a real API server.

The operator runs as a process with the chart's rights; the audit log says what it asked for and when. Nothing else runs
in the cluster: this module plays the Job controller and the kubelets. API server, store and operator share the machine,
so a cold start is compared with a bare client that repeats the same writes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from bench.delivery import Report, add_output_arguments, check_outputs, deliver
from bench.report import Load, Meter, Row, Table, at_most, cells, machine_line
from bench.suite import replaced
from cluster.rig.needs import NotPossibleHere
from helpers.apiserver import ApiServer
from helpers.operator_process import Process
from helpers.operators import BY_KIND, FACTS, OPERATOR_USER, SPEC, served
from helpers.ports import free_ports
from neuron_operator.api.names import HOLDING, MODEL_LABEL
from neuron_operator.cluster.client import CHILDREN, NEURON_MODELS, PODS
from neuron_operator.read.objects import name_of
from neuron_runtime.bench.report import percentile
from neuron_runtime.console import say
from neuron_runtime.errors import ServingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (500, 100, 10)
"""Numbers of models; the first is the one that the bounds hold for."""
MODELS_IN_NAMESPACE = 10
NUM_CONNECTIONS = 16
"""Connections of the bare client: as many as the operator has workers."""
NUM_FOREIGN_PODS = 10_000
IDLE_SECONDS = 60.0
QUIET_SECONDS = 2.0
"""The operator is done when it has written nothing for this long."""
MAX_EDITS = 100
EDITS_PER_SECOND = 5.0
WAIT_SECONDS = 600.0

MAX_COLD_RATIO = 1.3
MAX_RESTART_SECONDS = 5.0
MAX_EDIT_SECONDS = 1.0
MAX_RESIDENT_MIB = 150.0
MAX_FAILOVER_SECONDS = 15.0

JSON, MERGE = "application/json", "application/merge-patch+json"
WRITES = ("create", "update", "patch", "delete", "deletecollection")
METHODS = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}

Key = tuple[str, str]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    content_type: str = JSON


def request(method: str, path: str, body: Any, content_type: str = JSON) -> Request:
    return Request(method, path, json.dumps(body).encode(), content_type)


@dataclass(frozen=True)
class Call:
    """One finished request in the audit log."""

    verb: str
    resource: str
    key: Key
    uri: str
    body: Any
    began: float
    ended: float

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Call:
        ref = event["objectRef"]
        began, ended = (
            datetime.fromisoformat(event[stamp]).timestamp() for stamp in ("requestReceivedTimestamp", "stageTimestamp")
        )
        key = ref.get("namespace", ""), ref.get("name", "")
        body = event.get("requestObject")
        return cls(event["verb"], ref["resource"], key, event["requestURI"], body, began, ended)

    @property
    def is_write(self) -> bool:
        """It writes something else than the Lease and, once in a namespace, the name of the operator."""
        return self.verb in WRITES and self.resource != "leases" and name_of(self.body) != HOLDING

    @property
    def is_routine(self) -> bool:
        """Made at intervals, whatever happens: a renewal of the Lease, a watch that is resumed, a list of names."""
        lists_names = self.verb == "list" and self.resource == NEURON_MODELS.plural
        return self.resource == "leases" or self.verb == "watch" or lists_names

    @property
    def is_object(self) -> bool:
        """A create or an apply: its body is a whole object, not a patch."""
        return isinstance(self.body, dict) and "kind" in self.body

    @property
    def model(self) -> Key:
        """The model that a write is for."""
        namespace, name = self.key
        if self.resource == NEURON_MODELS.plural:
            return namespace, name
        if "involvedObject" in self.body:
            return namespace, self.body["involvedObject"]["name"]
        metadata = self.body["metadata"]
        return namespace, metadata.get("labels", {}).get(MODEL_LABEL) or metadata["ownerReferences"][0]["name"]


class Bare:
    """A client that knows nothing: it sends prepared requests over a number of connections."""

    def __init__(self, session: aiohttp.ClientSession, server: ApiServer) -> None:
        self._session = session
        self._server = server

    async def send(self, one: Request) -> None:
        headers = {"Content-Type": one.content_type}
        async with self._session.request(
            one.method, self._server.url + one.path, data=one.body, headers=headers
        ) as got:
            answer = await got.read()
            if got.status >= 300:
                raise RuntimeError(f"{one.method} {one.path}: {answer.decode()}")

    async def send_all(self, series: Iterable[Sequence[Request]]) -> float:
        """Sends several series at a time, each in its order; the seconds that this took."""
        waiting = iter(series)

        async def work() -> None:
            for some in waiting:
                for one in some:
                    await self.send(one)

        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CONNECTIONS):
                tasks.create_task(work())
        return time.monotonic() - began


@contextlib.asynccontextmanager
async def bare_client(server: ApiServer, user: str = "admin") -> AsyncIterator[Bare]:
    tls = ssl.create_default_context(cafile=str(server.ca_file))
    headers = {"Authorization": f"Bearer {server.tokens[user]}"}
    connector = aiohttp.TCPConnector(ssl=tls, limit=NUM_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield Bare(session, server)
    await asyncio.sleep(0.1)  # TLS connections shut down after the session is closed


class Scene:
    """An API server with models, and the operators that run on it."""

    def __init__(self, server: ApiServer, bare: Bare, folder: Path, num_models: int) -> None:
        self.server = server
        self.bare = bare
        self._folder = folder
        self.keys = self.keys_of("a", num_models)
        self._num_runs = 0
        self._read_bytes = 0
        self._calls: list[tuple[str, Call]] = []

    @staticmethod
    def keys_of(prefix: str, num_models: int) -> list[Key]:
        return [(f"{prefix}-{number // MODELS_IN_NAMESPACE:03}", f"model-{number:03}") for number in range(num_models)]

    async def put_models(self, keys: Sequence[Key]) -> None:
        """New models, each with a source of its own."""
        spaces = sorted({namespace for namespace, _ in keys})
        body = {"apiVersion": "v1", "kind": "Namespace"}
        await self.bare.send_all(
            [request("POST", "/api/v1/namespaces", {**body, "metadata": {"name": space}})] for space in spaces
        )
        about = {"apiVersion": NEURON_MODELS.api_version, "kind": NEURON_MODELS.kind}
        await self.bare.send_all(
            [
                request(
                    "POST",
                    NEURON_MODELS.path(namespace),
                    {
                        **about,
                        "metadata": {"name": name},
                        "spec": {**SPEC, "replicas": 1, "model": {"uri": f"file:///models/{name}"}},
                    },
                )
            ]
            for namespace, name in keys
        )

    @contextlib.contextmanager
    def operating(self, *flags: str) -> Iterator[Process]:
        """A process of the operator, ended by SIGTERM."""
        self._num_runs += 1
        with free_ports(2) as ports:
            log = self._folder / f"operator-{self._num_runs}.log"
            process = Process(self.server.kubeconfig(OPERATOR_USER), log, ports, *flags)
            try:
                yield process
                process.end()
            finally:
                process.kill()

    def calls(self, since: float, until: float = float("inf"), user: str = OPERATOR_USER) -> list[Call]:
        """Requests of a user that ended in this time, oldest first."""
        with (self.server.folder / "audit.log").open("rb") as log:
            log.seek(self._read_bytes)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                event = json.loads(line)
                if event["user"]["username"] in (OPERATOR_USER, "admin") and "objectRef" in event:
                    self._calls.append((event["user"]["username"], Call.of(event)))
        return [call for who, call in self._calls if who == user and since <= call.ended < until]

    def writes(self, since: float, until: float = float("inf")) -> list[Call]:
        return [call for call in self.calls(since, until) if call.is_write]

    async def quiet(self, process: Process, since: float, num_passes: int) -> None:
        """Returns when each model was passed and nothing was written for a while."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            # The log is only read once nothing is in work: reading it takes time from the two processors.
            if await asyncio.to_thread(has_passed, process, num_passes):
                last = max((call.ended for call in self.writes(since)), default=since)
                if time.time() > last + QUIET_SECONDS:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the operator is not done after {WAIT_SECONDS:.0f} s: {process.log.read_text()[-2000:]}"
                )
            await asyncio.sleep(0.5)

    def objects(self, path: str) -> list[Any]:
        items: list[Any] = self.server.call("GET", path)["items"]
        return items


def metrics(process: Process) -> dict[str, float]:
    """Metrics of the passes. Empty series have no value; a process that does not answer yet has none."""
    names = "&".join(f"name[]=neuron_operator_{name}" for name in ("passes_total", "queue_depth"))
    lines = process.get(f"/metrics?{names}")[1].splitlines()
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
    return {"neuron_operator_queue_depth": 1.0, **found}


def has_passed(process: Process, num_models: int) -> bool:
    """Whether as many passes ended well, and none waits."""
    found = metrics(process)
    passed = sum(found.get(f'neuron_operator_passes_total{{result="{how}"}}', 0.0) for how in ("changed", "unchanged"))
    return passed >= num_models and found["neuron_operator_queue_depth"] == 0


def resident_mib(process: Process, what: str = "VmRSS") -> float:
    """Resident memory of a process, or with VmHWM its peak."""
    lines = Path(f"/proc/{process.process.pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(what + ":"))
    return int(size) / 1024


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


# Played controllers


def pod_of(owner: Any, template: Any, name: str, status: Any) -> list[Request]:
    """A pod of `owner` and its status."""
    reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
        key: owner["metadata"][key] for key in ("name", "uid")
    }
    namespace = owner["metadata"]["namespace"]
    metadata = {"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [reference]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**template["spec"], "nodeName": "n1"}}
    return [
        request("POST", PODS.path(namespace), body),
        request("PATCH", PODS.path(namespace, name, "status"), {"status": status}, MERGE),
    ]


def container_status(name: str, state: Any, *, ready: bool) -> Any:
    return {
        "name": name,
        "image": "i",
        "imageID": "i",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    }


def finished_jobs(jobs: Iterable[Any]) -> Iterator[list[Request]]:
    """The pods of Jobs that resolved their models."""
    message = json.dumps({"version": 1, "command": "resolve", "ok": True, "facts": FACTS})
    for found in jobs:
        template, job = found["spec"]["template"], {**found, "apiVersion": "batch/v1", "kind": "Job"}
        ended = {"terminated": {"exitCode": 0, "message": message}}
        container = container_status(template["spec"]["containers"][0]["name"], ended, ready=False)
        status = {"phase": "Succeeded", "containerStatuses": [container]}
        yield pod_of(job, template, found["metadata"]["name"], status)


def ready_pods(deployments: Iterable[Any]) -> Iterator[list[Request]]:
    """The pods of Deployments, ready."""
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
    for found in deployments:
        template, deployment = found["spec"]["template"], {**found, "apiVersion": "apps/v1", "kind": "Deployment"}
        container = container_status(template["spec"]["containers"][0]["name"], running, ready=True)
        status = {"phase": "Running", "conditions": ready, "containerStatuses": [container]}
        yield pod_of(deployment, template, f"{found['metadata']['name']}-0", status)


# Measurements


@dataclass
class Figures:
    """What one number of models gave; seconds, MiB and counts."""

    num_models: int
    cold_seconds: float = 0.0
    """From the Lease to the last write, of both halves: before and after the Jobs."""
    bare_seconds: float = 0.0
    cold_writes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """The writes of a cold start by verb and resource."""
    restart_seconds: float = 0.0
    """From the start of the process until each model was passed."""
    restart_writes: int = 0
    idle_calls: float = 0.0
    """A minute."""
    idle_cpu_share: float = 0.0
    scale_seconds: list[float] = field(default_factory=list)
    """From the edit of a model to the change of its Deployment."""
    revision_seconds: list[float] = field(default_factory=list)
    burst_seconds: float = 0.0
    """All models edited at once: from the first edit to the last change of a Deployment."""
    resident_mib: float = 0.0
    foreign_mib: float | None = None
    """More resident memory with the foreign pods."""
    foreign_calls: int | None = None
    failover_seconds: float = 0.0
    load: Load | None = None

    @property
    def cold_ratio(self) -> float:
        return self.cold_seconds / self.bare_seconds


async def cold(scene: Scene, figures: Figures) -> list[list[Call]]:
    """Starts the operator before and after the Jobs ran; the writes of each half."""
    halves: list[list[Call]] = []
    for is_resolved in (False, True):
        if is_resolved:
            await scene.bare.send_all(finished_jobs(scene.objects(BY_KIND["Job"].path(None))))
        since = time.time()
        with scene.operating() as process:
            await scene.quiet(process, since, len(scene.keys))
            writes = scene.writes(since)
            led = next(call.ended for call in scene.calls(since) if call.verb in WRITES and call.resource == "leases")
        figures.cold_seconds += max(call.ended for call in writes) - led
        halves.append(writes)
    num_made = len(scene.objects(BY_KIND["Deployment"].path(None)))
    if num_made != len(scene.keys):
        raise RuntimeError(f"only {num_made} of {len(scene.keys)} models have a Deployment")
    figures.cold_writes = sum(map(len, halves))
    figures.kinds = Counter(f"{call.verb} {call.resource}" for half in halves for call in half)
    return halves


async def repeat(scene: Scene, halves: Sequence[Sequence[Call]]) -> float:
    """Seconds that a bare client takes for the same writes, for as many other models. It is the same user: the API
    server checks the same rights and logs the same bodies."""
    others = Scene.keys_of("b", len(scene.keys))
    before = uids(scene)
    await scene.put_models(others)
    now = uids(scene)
    twin = dict(zip(scene.keys, others, strict=True))
    seconds = 0.0
    for half in halves:
        series: dict[Key, list[Request]] = {}
        for call in half:
            key = call.model
            text = json.dumps(call.body).replace(before[key], now[twin[key]]).replace(key[0], twin[key][0])
            kind = JSON
            if call.verb == "patch":
                is_apply = "force=true" in call.uri
                kind = "application/apply-patch+yaml" if is_apply else MERGE
            path = call.uri.replace(key[0], twin[key][0])
            series.setdefault(key, []).append(Request(METHODS[call.verb], path, text.encode(), kind))
        async with bare_client(scene.server, OPERATOR_USER) as bare:
            seconds += await bare.send_all(series.values())
    return seconds


def deletions(keys: Sequence[Key]) -> Iterator[list[Request]]:
    """Deletes models and, as there is no garbage collector, of all children in their namespaces."""
    for key in keys:
        yield [Request("DELETE", NEURON_MODELS.path(*key), b"{}")]
    for namespace in dict.fromkeys(namespace for namespace, _ in keys):
        yield [Request("DELETE", resource.path(namespace), b"{}") for resource in CHILDREN]


def uids(scene: Scene) -> dict[Key, str]:
    found = (model["metadata"] for model in scene.objects(NEURON_MODELS.path(None)))
    return {(metadata["namespace"], metadata["name"]): metadata["uid"] for metadata in found}


def edit(key: Key, spec: Any) -> Request:
    return request("PATCH", NEURON_MODELS.path(*key), {"spec": spec}, MERGE)


async def edited(
    scene: Scene, process: Process, series: Sequence[tuple[Key, Any]], per_second: float, of: str = "deployments"
) -> dict[Key, float]:
    """Seconds from each edit to the last change of the model's Deployment, or of another resource, that follows;
    `per_second` 0: all at once."""
    since = time.time()
    if per_second:
        for number, (key, spec) in enumerate(series):
            await asyncio.sleep(max(0.0, since + number / per_second - time.time()))
            await scene.bare.send(edit(key, spec))
    else:
        await scene.bare.send_all([edit(key, spec)] for key, spec in series)
    await scene.quiet(process, since, 0)
    asked = {
        call.key: call.ended
        for call in scene.calls(since, user="admin")
        if call.resource == NEURON_MODELS.plural and call.verb == "patch"
    }
    applied = {call.model: call.ended for call in scene.writes(since) if call.resource == of and call.is_object}
    return {key: applied[key] - asked[key] for key, _ in series}


async def settle_and_edit(scene: Scene, figures: Figures, *, with_foreign: bool) -> None:
    """Everything about a process that runs on: its restart, idleness, edits and memory."""
    since, began = time.time(), time.monotonic()
    with scene.operating() as process:
        while not await asyncio.to_thread(has_passed, process, len(scene.keys)):
            await asyncio.sleep(0.02)
        figures.restart_seconds = time.monotonic() - began
        await asyncio.sleep(QUIET_SECONDS)
        figures.restart_writes = len(scene.writes(since))

        since, busy = time.time(), cpu_seconds(process)
        await asyncio.sleep(IDLE_SECONDS)
        figures.idle_calls = len(scene.calls(since)) / IDLE_SECONDS * 60
        figures.idle_cpu_share = (cpu_seconds(process) - busy) / IDLE_SECONDS

        if with_foreign:  # while nothing else is due: a model that is not ready is looked at again and again
            before, since = resident_mib(process), time.time()
            await scene.bare.send_all(foreign_pods())
            await asyncio.sleep(QUIET_SECONDS)
            figures.foreign_mib = resident_mib(process) - before
            figures.foreign_calls = len([call for call in scene.calls(since) if not call.is_routine])

        some = scene.keys[: MAX_EDITS // 2]
        found = await edited(scene, process, [(key, {"replicas": 2}) for key in some], EDITS_PER_SECOND)
        figures.scale_seconds = list(found.values())
        found = await edited(
            scene, process, [(key, {"serving": {"maxModelLength": 99}}) for key in some], EDITS_PER_SECOND, "jobs"
        )
        figures.revision_seconds = list(found.values())
        since = time.time()
        await edited(scene, process, [(key, {"replicas": 3}) for key in scene.keys], 0.0)
        changed = [call.ended for call in scene.writes(since) if call.resource == "deployments"]
        figures.burst_seconds = max(changed) - since
        figures.resident_mib = resident_mib(process, "VmHWM")


def foreign_pods() -> Iterator[list[Request]]:
    spec = {
        "containers": [{"name": "c", "image": "i", "env": [{"name": f"V{n}", "value": "x" * 50} for n in range(20)]}]
    }
    for number in range(NUM_FOREIGN_PODS):
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"foreign-{number}"}, "spec": spec}
        yield [request("POST", PODS.path("default"), body)]


async def fail_over(scene: Scene, figures: Figures) -> None:
    """Kills the leader, edits a model, and waits until the standby has applied the edit."""
    key = scene.keys[0]
    with (
        scene.operating("--identity", "b") as standby,
        contextlib.suppress(AssertionError),
        scene.operating("--identity", "a") as other,
    ):
        processes = {standby, other}
        while not (leaders := [one for one in processes if one.is_leading()]) or any(
            one.get("/readyz")[0] != 200 for one in processes
        ):
            await asyncio.sleep(0.1)
        await scene.quiet(leaders[0], time.time(), len(scene.keys))
        leaders[0].kill()
        since = time.time()
        await scene.bare.send(edit(key, {"replicas": 4}))
        while not [call for call in scene.writes(since) if (call.resource, call.key) == ("deployments", key)]:
            await asyncio.sleep(0.1)
        figures.failover_seconds = max(call.ended for call in scene.writes(since) if call.key == key) - since


async def measure(num_models: int, *, with_foreign: bool) -> Figures:
    """All figures of one number of models, on a fresh API server. Raises NotPossibleHere if it cannot be built."""
    figures, meter = Figures(num_models), Meter()
    with tempfile.TemporaryDirectory(prefix="bench-operator-") as name, served(Path(name), (OPERATOR_USER,)) as server:
        async with bare_client(server) as bare:
            scene = Scene(server, bare, Path(name), num_models)
            await scene.put_models(scene.keys)
            halves = await cold(scene, figures)
            figures.bare_seconds = await repeat(scene, halves)
            await scene.bare.send_all(deletions(Scene.keys_of("b", num_models)))
            await scene.bare.send_all(
                ready_pods(
                    found
                    for found in scene.objects(BY_KIND["Deployment"].path(None))
                    if found["metadata"]["namespace"].startswith("a-")
                )
            )
            since = time.time()
            with scene.operating() as process:
                await scene.quiet(process, since, num_models)
            await settle_and_edit(scene, figures, with_foreign=with_foreign)
            await fail_over(scene, figures)
    figures.load = meter.read()
    return figures


# Output


def table(found: Sequence[Figures]) -> Table:
    def row(
        name: str, value: Callable[[Figures], float | str | None], unit: str, bound: float | None = None, note: str = ""
    ) -> Row:
        target = None if bound is None else at_most(bound)
        return Row(name, tuple(map(value, found)), unit, target, note, found[0].load)

    rows = (
        row("cold start : bare client with the same writes", lambda f: f.cold_ratio, "ratio", MAX_COLD_RATIO),
        row(
            "cold start",
            lambda f: f.cold_seconds,
            "s",
            None,
            "from the Lease to the last write, without the Jobs' own time",
        ),
        row("writes of a cold start", lambda f: f.cold_writes / f.num_models, "a model", None, made_of(found[0])),
        row("restart with nothing changed: writes", lambda f: f.restart_writes, "", 0),
        row(
            "restart until each model is checked",
            lambda f: f.restart_seconds,
            "s",
            MAX_RESTART_SECONDS,
            "with the start of Python",
        ),
        row("edit of replicas to Deployment, p99", lambda f: percentile(f.scale_seconds, 0.99), "s", MAX_EDIT_SECONDS),
        row(
            "edit of a length to the Job that checks it, p99",
            lambda f: percentile(f.revision_seconds, 0.99),
            "s",
            MAX_EDIT_SECONDS,
            "a new revision",
        ),
        row("all models scaled at once", lambda f: f.burst_seconds, "s", None, "to the last Deployment"),
        row("resident memory, peak", lambda f: f.resident_mib, "MiB", MAX_RESIDENT_MIB),
        row(f"more memory with {NUM_FOREIGN_PODS:,} foreign pods", lambda f: f.foreign_mib, "MiB", 5),
        row(f"requests caused by {NUM_FOREIGN_PODS:,} foreign pods", lambda f: f.foreign_calls, "", 0),
        row(
            "requests while idle",
            lambda f: f.idle_calls,
            "a minute",
            None,
            "renewals of the Lease, and watches that are resumed",
        ),
        row("CPU while idle", lambda f: 100 * f.idle_cpu_share, "% of a core"),
        row("leader killed: the standby has applied an edit", lambda f: f.failover_seconds, "s", MAX_FAILOVER_SECONDS),
    )
    return Table("operator on a real API server", rows, tuple(f"{f.num_models} models" for f in found))


def made_of(figures: Figures) -> str:
    return ", ".join(f"{count / figures.num_models:.3g} {kind}" for kind, count in figures.kinds.most_common())


def markdown(found: Table) -> str:
    head = ["", *found.columns, "unit", "held to", "met", ""]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in found.rows:
        name, *values, unit, _, _, note = cells(one)
        bound = "" if one.target is None else f"{one.target.sign} {one.target.bound:g}"
        met = {None: "", True: "yes", False: "**no**"}[one.met]
        lines.append("| " + " | ".join([name, *values, unit, bound, met, note]) + " |")
    share = found.rows[0].load.foreign_cpu_share if found.rows[0].load else None
    others = "" if share is None else f" Other programs used {share:.0%} of the CPUs meanwhile."
    return "\n".join([*lines, "", f"{machine_line()}, {time.strftime('%Y-%m-%d', time.gmtime())}.{others}"]) + "\n"


def draw(figure: Figure, found: Sequence[Figures]) -> None:
    sizes = [f.num_models for f in found]
    first, second, third, fourth = figure.subplots(1, 4)
    first.plot(sizes, [f.cold_seconds for f in found], "o-", label="operator")
    first.plot(sizes, [f.bare_seconds for f in found], "s--", label="bare client")
    first.set(title="cold start", ylabel="seconds")
    first.legend()
    second.plot(sizes, [percentile(f.scale_seconds, 0.99) or 0 for f in found], "o-", label="replicas")
    second.plot(sizes, [percentile(f.revision_seconds, 0.99) or 0 for f in found], "s-", label="new revision")
    second.set(title="edit to Deployment, p99", ylabel="seconds")
    second.legend()
    third.plot(sizes, [f.restart_seconds for f in found], "o-")
    third.set(title="restart", ylabel="seconds")
    fourth.plot(sizes, [f.resident_mib for f in found], "o-")
    fourth.set(title="resident memory", ylabel="MiB")
    for axes in (first, second, third, fourth):
        axes.set(xlabel="models", xlim=(0, None), ylim=(0, None))


def run(options: argparse.Namespace) -> None:
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        options.json = options.json or options.folder / "operator.json"
        options.plot = options.plot or options.folder / "operator.png"
    check_outputs(options)
    for page in options.markdown:
        replaced(page, "")
    found = []
    for size in options.sizes:
        began = time.monotonic()
        found.append(asyncio.run(measure(size, with_foreign=size == max(options.sizes))))
        say(f"{size} models: {time.monotonic() - began:.0f} s")
    printed = table(found)
    report = Report(
        command="bench.operator_scale",
        options={"sizes": options.sizes},
        tables=(printed,),
        data={str(f.num_models): {"scale": f.scale_seconds, "revision": f.revision_seconds} for f in found},
        draw=lambda figure: draw(figure, found),
        size_inches=(16.0, 4.0),
    )
    deliver(report, options)
    for page in options.markdown:
        page.write_text(replaced(page, markdown(printed)), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.operator_scale", description="Measure the operator with many models.")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="numbers of models")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="folder for operator.json and operator.png")
    parser.add_argument(
        "--markdown", type=Path, nargs="+", default=[], metavar="FILE", help="rewrite the table in FILE"
    )
    add_output_arguments(parser)
    try:
        run(parser.parse_args(arguments))
    except (ServingError, NotPossibleHere) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
