"""Translates a rendered pod to this machine: command, environment, files, ports and probes as a `ContainerPlan`.

Pure and strict: an unsupported pod field is an error. Called by `local.machine`; `local.process` runs the plan. It
knows no field of NeuronModel.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from neuron_operator.api.names import CLAIMS_DIR_VARIABLE

Json = Mapping[str, Any]

LOOPBACK = "127.0.0.1"

# Fields that matter only in a cluster: isolation, scheduling, accounts. A field that is neither here nor handled below
# is refused, so that a pod never runs with only part of its configuration.
_CLUSTER_ONLY_POD_FIELDS = (
    "affinity", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "nodeSelector",
    "priorityClassName", "runtimeClassName", "schedulerName", "securityContext", "serviceAccountName",
    "tolerations", "topologySpreadConstraints", "hostname", "nodeName",
)  # fmt: skip
_POD_FIELDS = ("containers", "initContainers", "volumes", "restartPolicy", "terminationGracePeriodSeconds", "subdomain")
_CLUSTER_ONLY_CONTAINER_FIELDS = ("image", "imagePullPolicy", "securityContext")
_CONTAINER_FIELDS = (
    "name", "command", "args", "env", "ports", "resources", "volumeMounts", "startupProbe", "readinessProbe",
    "livenessProbe", "lifecycle", "terminationMessagePath", "terminationMessagePolicy",
)  # fmt: skip
_VOLUME_SOURCES = ("configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "secret")
_HOST_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})


class CannotRunHere(Exception):
    """This machine cannot do what is asked; the message says what is in the way, and the cure."""


@dataclass(frozen=True)
class Probe:
    """An HTTP probe."""

    path: str
    port: int
    period_seconds: float
    timeout_seconds: float
    failure_threshold: int


@dataclass(frozen=True)
class ContainerPlan:
    """One container, ready to start: all paths and ports are those of this machine."""

    pod: str
    container: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folders: tuple[Path, ...]
    files: Mapping[Path, str]
    secrets: Mapping[Path, str]
    """Files with mode 0600 that are deleted when the process ends."""
    termination_message: Path
    takes_message_from_log: bool
    """If the process fails and leaves none."""
    ports: Mapping[str, int]
    startup: Probe | None
    readiness: Probe | None
    liveness: Probe | None
    grace_seconds: float
    stop_command: tuple[str, ...] = ()
    """Runs before the process gets SIGTERM; empty: nothing does."""
    first: ContainerPlan | None = None
    """The init container, which has to end well before this one starts."""


@dataclass(frozen=True)
class LocalHost:
    """The properties of this machine that a plan depends on."""

    root: Path
    """Folder for this workload's volumes and files."""
    environment: Mapping[str, str]
    """Inherited by every process; the pod's own variables win. Also replaces Secrets, see `_environment` and
    `_secret_files`."""
    num_neuron_devices: int
    instance_type: str = ""
    """Empty: unknown."""
    config_maps: Mapping[str, Json] = field(default_factory=dict)
    """name -> ConfigMap object."""
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """name -> content; those that the operator makes."""

    @property
    def claims(self) -> Path:
        """The folder with a folder for each PersistentVolumeClaim, which the workloads of this machine share."""
        return self.root.parent / "claims"


def interpret(pod: Json, host: LocalHost, ports: Mapping[int, int]) -> ContainerPlan:
    """The plan of a pod with one container and at most one init container; `ports` maps its container ports to those of
    this machine. Raises CannotRunHere, with the field and the cure, if the pod has an unsupported one."""
    spec = pod["spec"]
    _refuse_unknown(spec, (*_POD_FIELDS, *_CLUSTER_ONLY_POD_FIELDS), "spec")
    initial = spec.get("initContainers", [])
    for field_name, found, most in (("containers", spec["containers"], 1), ("initContainers", initial, 1)):
        if len(found) > most:
            raise CannotRunHere(f"spec.{field_name}: {len(found)} containers; `local` runs one per pod")
    first = _plan_of(initial[0], "spec.initContainers[0]", pod, host, ports) if initial else None
    return replace(_plan_of(spec["containers"][0], "spec.containers[0]", pod, host, ports), first=first)


def _plan_of(container: Json, where: str, pod: Json, host: LocalHost, ports: Mapping[int, int]) -> ContainerPlan:
    name, spec = str(pod["metadata"]["name"]), pod["spec"]
    lifecycle = container.get("lifecycle", {})
    _refuse_unknown(lifecycle, ("preStop",), f"{where}.lifecycle")
    # Here are no endpoints, which a pod would leave while it sleeps.
    _refuse_unknown(lifecycle.get("preStop", {}), ("sleep", "exec"), f"{where}.lifecycle.preStop")
    _refuse_unknown(container, (*_CONTAINER_FIELDS, *_CLUSTER_ONLY_CONTAINER_FIELDS), where)
    _check_devices(container, host.num_neuron_devices)

    volumes = {v["name"]: v for v in spec.get("volumes", [])}
    places: dict[str, Path] = {}  # path in the container -> path here
    folders: list[Path] = []
    files: dict[Path, str] = {}
    secrets: dict[Path, str] = {}
    for mount in container.get("volumeMounts", []):
        _refuse_unknown(mount, {"name", "mountPath", "readOnly", "subPath"}, "volumeMounts")
        volume = volumes[mount["name"]]
        if "secret" in volume:
            secrets |= _secret_files(volume, host.root / name / str(volume["name"]), host)
        folder = _volume(volume, pod, host, files) / mount.get("subPath", "")
        folders.append(folder)
        places[mount["mountPath"]] = folder
    message = host.root / name / ("termination-message" if container in spec["containers"] else "first-message")
    message_path = container.get("terminationMessagePath", "/dev/termination-log")
    places[message_path] = message
    # A program may learn it from a file.
    files = {file: text.replace(message_path, str(message)) for file, text in files.items()}

    declared = {str(inside): str(outside) for inside, outside in ports.items()}

    neighbours = f".{spec.get('subdomain', name)}.{pod['metadata'].get('namespace', 'default')}.svc"

    def here(value: str, flag: str = "") -> str:
        is_here = value in ("0.0.0.0", "::") or value.endswith(neighbours)
        may_be_port = not flag.startswith("--") or flag.endswith("port")
        return LOOPBACK if is_here else (may_be_port and declared.get(value)) or _translate(value, places)

    def argument(word: str, before: str) -> str:
        flag, is_both, value = word.partition("=")
        return f"{flag}={here(value, flag)}" if is_both and flag.startswith("--") else here(word, before)

    def arguments(words: Sequence[str]) -> list[str]:
        return [argument(word, before) for word, before in zip(words, ("", *words), strict=False)]

    variables = _environment(container, pod, host)
    words = (*container.get("command", []), *container.get("args", []))
    argv = arguments([expanded(word, variables) for word in words])
    if not argv:
        raise CannotRunHere(f"{where}.command: missing; `local` does not use the image's command")
    env = {
        **host.environment,
        CLAIMS_DIR_VARIABLE: str(host.claims),
        **{k: here(v) for k, v in variables.items()},
    }
    named = {p.get("name", str(p["containerPort"])): ports[p["containerPort"]] for p in container.get("ports", [])}
    stopping = arguments(lifecycle.get("preStop", {}).get("exec", {}).get("command", ()))
    return ContainerPlan(
        pod=name,
        container=str(container["name"]),
        argv=(_program(argv[0], env), *argv[1:]),
        env=env,
        folders=tuple(folders),
        files=files,
        secrets=secrets,
        termination_message=message,
        takes_message_from_log=container.get("terminationMessagePolicy") == "FallbackToLogsOnError",
        ports=named,
        startup=_probe(container.get("startupProbe"), "startupProbe", named, ports),
        readiness=_probe(container.get("readinessProbe"), "readinessProbe", named, ports),
        liveness=_probe(container.get("livenessProbe"), "livenessProbe", named, ports),
        grace_seconds=float(spec.get("terminationGracePeriodSeconds", 30)),
        stop_command=(_program(stopping[0], env), *stopping[1:]) if stopping else (),
    )


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """With the values of `$(NAME)`, as a kubelet replaces them: `$$` is `$`, and what it does not know stays."""
    found = {"$$": "$", **{f"$({name})": value for name, value in variables.items()}}
    return re.sub(r"\$\$|\$\([^)]*\)", lambda match: found.get(match[0], match[0]), word)


def _refuse_unknown(value: Json, known: Iterable[str], where: str) -> None:
    if unknown := sorted(set(value).difference(known)):
        raise CannotRunHere(f"{where}.{unknown[0]}: is not supported without a cluster; remove it for `local`")


def _check_devices(container: Json, num_devices: int) -> None:
    limits = container.get("resources", {}).get("limits", {})
    for resource, amount in limits.items():
        if resource in _HOST_RESOURCES:
            continue
        if resource != "aws.amazon.com/neuron":
            raise CannotRunHere(f"resources.limits.{resource}: this machine has none; use spec.accelerator.type: CPU")
        if int(amount) > num_devices:
            raise too_few_devices(f"the pod requests {amount} Neuron device(s)", num_devices)


def too_few_devices(needed: str, num_devices: int) -> CannotRunHere:
    return CannotRunHere(
        f"{needed}, this machine has {num_devices} (/dev/neuron*): "
        "set spec.accelerator.type: CPU in the manifest, or run on an inf2, trn1 or trn2 machine"
    )


def _volume(volume: Json, pod: Json, host: LocalHost, files: dict[Path, str]) -> Path:
    source = next((s for s in _VOLUME_SOURCES if s in volume), None)
    if source is None:
        kind = next(iter(set(volume) - {"name"}), "nothing")
        raise CannotRunHere(f"volume {volume['name']}: {kind} is not supported without a cluster")
    if source == "persistentVolumeClaim":
        return host.claims / str(volume[source]["claimName"])
    folder = host.root / str(pod["metadata"]["name"]) / str(volume["name"])
    if source == "downwardAPI":
        fields = {item["path"]: item["fieldRef"]["fieldPath"] for item in volume[source]["items"]}
        files.update({folder / path: _field(field, pod) for path, field in fields.items()})
    if source == "configMap":
        config_map = host.config_maps.get(volume[source]["name"])
        if config_map is None:
            raise CannotRunHere(f"volume {volume['name']}: there is no ConfigMap {volume[source]['name']}")
        files.update({folder / key: text for key, text in config_map.get("data", {}).items()})
    return folder


def _secret_files(volume: Json, folder: Path, host: LocalHost) -> dict[Path, str]:
    """Keys of a Secret as files: of one that the operator makes all, otherwise those that are named, each from the
    environment variable NAME_KEY in capitals."""
    secret = volume["secret"]
    if made := host.secrets.get(secret["secretName"]):
        return {folder / key: value for key, value in made.items()}
    _refuse_unknown(secret, {"secretName", "items", "defaultMode"}, f"volume {volume['name']}.secret")
    files = {}
    for item in secret.get("items", []):
        variable = re.sub(r"\W", "_", f"{secret['secretName']}_{item['key']}").upper()
        value = host.environment.get(variable)
        if not value:
            missing = f"{secret['secretName']}/{item['key']}"
            raise CannotRunHere(
                f"volume {volume['name']}: `local` has no Secret {missing}; export {variable}=... first"
            )
        files[folder / item["path"]] = value
    return files


def _translate(value: str, places: Mapping[str, Path]) -> str:
    """Maps a path at or below a mount path to this machine; other values stay unchanged."""
    if not value.startswith("/"):
        return value
    path = PurePosixPath(value)
    for mount in sorted(places, key=len, reverse=True):
        if path.is_relative_to(mount):
            return str(places[mount] / path.relative_to(mount))
    return value


def _environment(container: Json, pod: Json, host: LocalHost) -> dict[str, str]:
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
                    f"env {name}: `local` has no {ref['name']}/{ref['key']}; export {ref['key']}=... first"
                )
        else:
            raise CannotRunHere(f"env {name}: {next(iter(source))} is not supported without a cluster")
    return env


def _field(path: str, pod: Json) -> str:
    annotations, labels = pod["metadata"].get("annotations", {}), pod["metadata"].get("labels", {})
    fields = {
        **{f"metadata.labels['{key}']": text for key, text in labels.items()},
        **{f"metadata.annotations['{key}']": text for key, text in annotations.items()},
        "status.podIP": LOOPBACK,
        "status.hostIP": LOOPBACK,
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"].get("namespace", "default"),
        "metadata.uid": pod["metadata"].get("uid", ""),
        "spec.nodeName": "localhost",
    }
    if path not in fields:
        raise CannotRunHere(f"fieldRef {path}: is not supported without a cluster")
    return str(fields[path])


def _program(program: str, env: Mapping[str, str]) -> str:
    """The path of a program: of this Python environment first, then of PATH."""
    path = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}")
    if path is None:
        cure = "install neuron-serving with the extra 'runtime'"
        if program != "neuron-runtime":
            cure = "install it into an environment of its own, and put the folder of its program into PATH"
        raise CannotRunHere(f"{program} is not installed: {cure}")
    return path


def _probe(probe: Json | None, where: str, named: Mapping[str, int], ports: Mapping[int, int]) -> Probe | None:
    if probe is None:
        return None
    _refuse_unknown(probe, ("httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"), where)
    get = probe.get("httpGet")
    if get is None:
        raise CannotRunHere(f"{where}: only httpGet probes are supported without a cluster")
    port = named.get(str(get["port"]), ports.get(get["port"]) if isinstance(get["port"], int) else None)
    if port is None:
        raise CannotRunHere(f"{where}.httpGet.port: {get['port']} is not a declared port")
    return Probe(
        path=get.get("path", "/"),
        port=port,
        period_seconds=float(probe.get("periodSeconds", 10)),
        timeout_seconds=float(probe.get("timeoutSeconds", 1)),
        failure_threshold=int(probe.get("failureThreshold", 3)),
    )


def environment_to_inherit(environment: Mapping[str, str]) -> dict[str, str]:
    """This shell's variables, without those that the operator sets in pods."""
    return {k: v for k, v in environment.items() if not k.startswith("NEURON_SERVING_")}


def instance_type(sys: Path) -> str:
    """That of an EC2 instance, by the files of the kernel below /sys; empty if there is none."""
    try:
        return (sys / "devices/virtual/dmi/id/product_name").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def count_neuron_devices(names: Sequence[str]) -> int:
    return sum(name.removeprefix("neuron").isdigit() for name in names if name.startswith("neuron"))
