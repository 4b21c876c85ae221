"""A pod as a process on this machine: the part of a kubelet that `neuron-operator local` needs.

`interpret` turns a rendered pod into a `ContainerPlan` (pure, strict: what it does not understand is an error, never
ignored), and `PodProcess` runs that plan: files, command, probes, SIGTERM and grace, termination message. Called by
`local.machine`; it knows pods, and no field of NeuronModel.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import aiohttp

Json = Mapping[str, Any]

LOOPBACK = "127.0.0.1"
MAX_TERMINATION_MESSAGE_BYTES = 4096

# Fields that mean something only to a cluster: isolation, scheduling, accounts. Everything that is neither here nor
# interpreted below is refused, so that a pod never runs with half of what it asked for.
_CLUSTER_ONLY_POD_FIELDS = frozenset(
    {
        "affinity", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "nodeSelector",
        "priorityClassName", "runtimeClassName", "schedulerName", "securityContext", "serviceAccountName",
        "tolerations", "topologySpreadConstraints",
    }
)  # fmt: skip
_POD_FIELDS = frozenset({"containers", "volumes", "restartPolicy", "terminationGracePeriodSeconds"})
_CLUSTER_ONLY_CONTAINER_FIELDS = frozenset({"image", "imagePullPolicy", "securityContext", "terminationMessagePolicy"})
_CONTAINER_FIELDS = frozenset(
    {
        "name", "command", "args", "env", "ports", "resources", "volumeMounts", "startupProbe", "readinessProbe",
        "livenessProbe", "terminationMessagePath",
    }
)  # fmt: skip
_VOLUME_SOURCES = ("configMap", "emptyDir", "persistentVolumeClaim")
_HOST_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})


class CannotRunHere(Exception):
    """This machine cannot run the pod as rendered; the message names the field and the cure."""


@dataclass(frozen=True)
class Probe:
    """An HTTP probe, with Kubernetes' defaults."""

    path: str
    port: int
    period_seconds: float = 10.0
    timeout_seconds: float = 1.0
    failure_threshold: int = 3
    initial_delay_seconds: float = 0.0


@dataclass(frozen=True)
class ContainerPlan:
    """One container, ready to be started: nothing in it refers to a path or port inside an image any more."""

    pod: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folders: tuple[Path, ...]
    files: Mapping[Path, str]
    termination_message: Path
    ports: Mapping[str, int]
    startup: Probe | None
    readiness: Probe | None
    liveness: Probe | None
    grace_seconds: float


@dataclass(frozen=True)
class Host:
    """What of this machine the interpretation of a pod depends on."""

    root: Path
    """Folder for this workload's volumes and files."""
    environment: Mapping[str, str]
    """Inherited by every process below the pod's own variables; also stands in for Secrets (key = variable)."""
    num_neuron_devices: int
    config_maps: Mapping[str, Json] = field(default_factory=dict)
    """name -> ConfigMap object."""


def interpret(pod: Json, host: Host, ports: Mapping[int, int]) -> ContainerPlan:
    """The plan for a pod with one container; `ports` maps declared container ports to ports of this machine.

    Raises:
        CannotRunHere: naming the field that this machine cannot honour, and the cure.
    """
    name, spec = str(pod["metadata"]["name"]), pod["spec"]
    _refuse_unknown(spec, _POD_FIELDS | _CLUSTER_ONLY_POD_FIELDS, "spec")
    if len(spec["containers"]) != 1:
        raise CannotRunHere(f"spec.containers: {len(spec['containers'])} containers; a pod here is one process")
    container = spec["containers"][0]
    _refuse_unknown(container, _CONTAINER_FIELDS | _CLUSTER_ONLY_CONTAINER_FIELDS, "spec.containers[0]")
    _check_devices(container, host.num_neuron_devices)

    volumes = {v["name"]: v for v in spec.get("volumes", [])}
    places: dict[str, Path] = {}  # path in the container -> path here
    folders: list[Path] = []
    files: dict[Path, str] = {}
    for mount in container.get("volumeMounts", []):
        _refuse_unknown(mount, {"name", "mountPath", "readOnly", "subPath"}, "volumeMounts")
        folder = _volume(volumes[mount["name"]], name, host, files) / mount.get("subPath", "")
        folders.append(folder)
        places[mount["mountPath"]] = folder
    message = host.root / name / "termination-message"
    places[container.get("terminationMessagePath", "/dev/termination-log")] = message

    declared = {str(inside): str(outside) for inside, outside in ports.items()}

    def here(value: str) -> str:
        return "127.0.0.1" if value == "0.0.0.0" else declared.get(value) or _translate(value, places)

    argv = [here(word) for word in (*container.get("command", []), *container.get("args", []))]
    if not argv:
        raise CannotRunHere("spec.containers[0].command: missing; there is no image here whose command could run")
    env = {**host.environment, **{k: here(v) for k, v in _environment(container, pod, host).items()}}
    named = {p.get("name", str(p["containerPort"])): ports[p["containerPort"]] for p in container.get("ports", [])}
    return ContainerPlan(
        pod=name,
        argv=(_program(argv[0], env), *argv[1:]),
        env=env,
        folders=tuple(folders),
        files=files,
        termination_message=message,
        ports=named,
        startup=_probe(container.get("startupProbe"), "startupProbe", named, ports),
        readiness=_probe(container.get("readinessProbe"), "readinessProbe", named, ports),
        liveness=_probe(container.get("livenessProbe"), "livenessProbe", named, ports),
        grace_seconds=float(spec.get("terminationGracePeriodSeconds", 30)),
    )


def _refuse_unknown(value: Json, known: frozenset[str] | set[str], where: str) -> None:
    if unknown := sorted(set(value) - known):
        raise CannotRunHere(f"{where}.{unknown[0]}: cannot be interpreted without a cluster; remove it for `local`")


def _check_devices(container: Json, num_devices: int) -> None:
    wanted = container.get("resources", {}).get("limits", {})
    for resource, amount in wanted.items():
        if resource in _HOST_RESOURCES:
            continue
        if resource != "aws.amazon.com/neuron":
            raise CannotRunHere(f"resources.limits.{resource}: this machine has none; use spec.accelerator.type: CPU")
        if int(amount) > num_devices:
            raise CannotRunHere(
                f"{amount} Neuron device(s) wanted, {num_devices} under /dev/neuron*: "
                "set spec.accelerator.type: CPU in the manifest, or run on an inf2, trn1 or trn2 machine"
            )


def _volume(volume: Json, pod: str, host: Host, files: dict[Path, str]) -> Path:
    source = next((s for s in _VOLUME_SOURCES if s in volume), None)
    if source is None:
        kind = next(iter(set(volume) - {"name"}), "nothing")
        raise CannotRunHere(f"volume {volume['name']}: {kind} cannot be interpreted without a cluster")
    if source == "persistentVolumeClaim":
        return host.root.parent / "claims" / str(volume[source]["claimName"])
    folder = host.root / pod / str(volume["name"])
    if source == "configMap":
        config_map = host.config_maps.get(volume[source]["name"])
        if config_map is None:
            raise CannotRunHere(f"volume {volume['name']}: there is no ConfigMap {volume[source]['name']}")
        files.update({folder / key: text for key, text in config_map.get("data", {}).items()})
    return folder


def _translate(value: str, places: Mapping[str, Path]) -> str:
    """A path at or below a mount path becomes the path here; everything else stays."""
    if not value.startswith("/"):
        return value
    path = PurePosixPath(value)
    for mount in sorted(places, key=len, reverse=True):
        if path.is_relative_to(mount):
            return str(places[mount] / path.relative_to(mount))
    return value


def _environment(container: Json, pod: Json, host: Host) -> dict[str, str]:
    env: dict[str, str] = {}
    for entry in container.get("env", []):
        name = entry["name"]
        if "valueFrom" not in entry:
            env[name] = str(entry.get("value", ""))
            continue
        source = entry["valueFrom"]
        if "fieldRef" in source:
            env[name] = _field(source["fieldRef"]["fieldPath"], pod)
        elif "configMapKeyRef" in source or "secretKeyRef" in source:
            ref = source.get("configMapKeyRef") or source["secretKeyRef"]
            data = host.config_maps.get(ref["name"], {}).get("data", {}) if "configMapKeyRef" in source else {}
            value = data.get(ref["key"], host.environment.get(ref["key"]))
            if value is not None:
                env[name] = value
            elif not ref.get("optional", False):
                raise CannotRunHere(
                    f"env {name}: {ref['name']}/{ref['key']} is not here; export {ref['key']}=... first"
                )
        else:
            raise CannotRunHere(f"env {name}: {next(iter(source))} cannot be interpreted without a cluster")
    return env


def _field(path: str, pod: Json) -> str:
    fields = {
        "status.podIP": LOOPBACK,
        "status.hostIP": LOOPBACK,
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"].get("namespace", "default"),
        "metadata.uid": pod["metadata"].get("uid", ""),
        "spec.nodeName": "localhost",
    }
    if path not in fields:
        raise CannotRunHere(f"fieldRef {path}: cannot be interpreted without a cluster")
    return str(fields[path])


def _program(program: str, env: Mapping[str, str]) -> str:
    """Our own programs come from the environment this command runs in, others from PATH."""
    found = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}")
    if found is None:
        raise CannotRunHere(f"{program} is not installed here: pip install 'neuron-serving[runtime]'")
    return found


def _probe(probe: Json | None, where: str, named: Mapping[str, int], ports: Mapping[int, int]) -> Probe | None:
    if probe is None:
        return None
    _refuse_unknown(
        probe,
        {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold", "initialDelaySeconds", "successThreshold"},
        where,
    )
    get = probe.get("httpGet")
    if get is None:
        raise CannotRunHere(f"{where}: only httpGet probes can be interpreted without a cluster")
    port = named.get(str(get["port"]), ports.get(get["port"]) if isinstance(get["port"], int) else None)
    if port is None:
        raise CannotRunHere(f"{where}.httpGet.port: {get['port']} is not a declared port")
    return Probe(
        path=get.get("path", "/"),
        port=port,
        period_seconds=float(probe.get("periodSeconds", 10)),
        timeout_seconds=float(probe.get("timeoutSeconds", 1)),
        failure_threshold=int(probe.get("failureThreshold", 3)),
        initial_delay_seconds=float(probe.get("initialDelaySeconds", 0)),
    )


@dataclass(frozen=True)
class Terminated:
    exit_code: int
    signal: int
    message: str
    finished_at: str


class PodProcess:
    """Runs one plan and keeps what a kubelet would report of it.

    `start` once, then `watch` (returns when the process has ended, by itself, by a failed liveness or start-up probe,
    or because `stop` was called). `ready`, `started` and `terminated` may be read at any time.
    """

    def __init__(self, plan: ContainerPlan, log: Callable[[str, str], None]) -> None:
        self.plan = plan
        self.ready = False
        self.was_ready = False
        self.started = False
        self.terminated: Terminated | None = None
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Lay out files and start the command. Raises CannotRunHere on a full disk or a busy port."""
        try:
            for folder in self.plan.folders:
                folder.mkdir(parents=True, exist_ok=True)
            for path, text in self.plan.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            self.plan.termination_message.parent.mkdir(parents=True, exist_ok=True)
            self.plan.termination_message.write_bytes(b"")
        except OSError as error:
            raise CannotRunHere(f"cannot write {error.filename}: {error.strerror}; see --cache-dir") from error
        self._process = await asyncio.create_subprocess_exec(
            *self.plan.argv,
            env=dict(self.plan.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to translate into SIGTERM and grace
            preexec_fn=_end_with_parent,  # one prctl call: no pod outlives a killed `local`
        )

    async def watch(self, changed: Callable[[], None]) -> Terminated:
        """Poll probes, forward output, and return how the process ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        probing = asyncio.create_task(self._probe_forever(changed))
        try:
            async for line in self._process.stdout:
                self._log(self.plan.pod, line.decode(errors="replace").rstrip("\n"))
            code = await self._process.wait()
        finally:
            probing.cancel()
            await asyncio.wait([probing])  # unlike awaiting the task, this never swallows our own cancellation
        self.ready = False
        message = self.plan.termination_message.read_bytes()[:MAX_TERMINATION_MESSAGE_BYTES]
        self.terminated = Terminated(
            exit_code=code if code >= 0 else 128 - code,
            signal=-code if code < 0 else 0,
            message=message.decode(errors="replace"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        changed()
        return self.terminated

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole process group when the grace period is over."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.plan.grace_seconds)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _probe_forever(self, changed: Callable[[], None]) -> None:
        async with aiohttp.ClientSession() as session:
            if self.plan.startup is not None and not await self._until_started(session, self.plan.startup):
                await self.stop()
                return
            self.started = True
            changed()
            watches = [self._readiness(session, changed)]
            if self.plan.liveness is not None:
                watches.append(self._liveness(session, self.plan.liveness))
            await asyncio.gather(*watches)

    async def _until_started(self, session: aiohttp.ClientSession, probe: Probe) -> bool:
        await asyncio.sleep(probe.initial_delay_seconds)
        for _ in range(probe.failure_threshold):
            if await _answers(session, probe):
                return True
            await asyncio.sleep(probe.period_seconds)
        self._log(self.plan.pod, f"start-up probe {probe.path} failed {probe.failure_threshold} times: stopping")
        return False

    async def _readiness(self, session: aiohttp.ClientSession, changed: Callable[[], None]) -> None:
        probe, failures = self.plan.readiness, 0
        if probe is None:
            self.ready = True
            changed()
            return
        while True:
            good = await _answers(session, probe)
            failures = 0 if good else failures + 1
            ready = good or (self.ready and failures < probe.failure_threshold)
            if ready != self.ready:
                self.ready = ready
                self.was_ready = self.was_ready or ready
                changed()
            await asyncio.sleep(probe.period_seconds)

    async def _liveness(self, session: aiohttp.ClientSession, probe: Probe) -> None:
        failures = 0
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period_seconds)
            failures = 0 if await _answers(session, probe) else failures + 1
        self._log(self.plan.pod, f"liveness probe {probe.path} failed {failures} times: stopping")
        await self.stop()


async def _answers(session: aiohttp.ClientSession, probe: Probe) -> bool:
    timeout = aiohttp.ClientTimeout(total=probe.timeout_seconds)
    try:
        async with session.get(f"http://{LOOPBACK}:{probe.port}{probe.path}", timeout=timeout) as response:
            return 200 <= response.status < 400
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def environment_to_inherit(environment: Mapping[str, str]) -> dict[str, str]:
    """What an image would have brought along: this shell's variables, without those that would change our ranks."""
    return {k: v for k, v in environment.items() if not k.startswith("NEURON_SERVING_")}


def count_neuron_devices(names: Sequence[str]) -> int:
    """Number of Neuron devices among the names of /dev."""
    return sum(name.removeprefix("neuron").isdigit() for name in names if name.startswith("neuron"))
