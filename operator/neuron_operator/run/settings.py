"""Settings of `neuron-operator run`: each is a flag and an environment variable; the flag wins. Read once at start.

The chart sets the variables. Settings of models, not of the process, are the fields of `world.Settings`. An invalid
value is refused, with its name, before anything starts.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from neuron_operator.api.engines import SETTINGS as SETTINGS_OF_ENGINES
from neuron_operator.api.errors import OperatorError
from neuron_operator.api.reasons import TROUBLESHOOTING
from neuron_operator.cluster.lease import LeaseTimings
from neuron_operator.place.catalog import FAMILIES, wrong_default
from neuron_operator.read.world import (
    DEVICE_MODES,
    RUNTIME_UPGRADES,
    CaBundle,
    EngineSettings,
    GroupSettings,
    InferencePools,
    JobSettings,
    Object,
    Provisionable,
    Settings,
    StorageSettings,
)

ENV_PREFIX = "NEURON_OPERATOR_"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class InvalidSetting(OperatorError):
    """A flag or variable has an invalid value; the message names it."""


@dataclass(frozen=True)
class RunSettings:
    models: Settings
    namespace: str
    identity: str
    lease_name: str
    lease: LeaseTimings
    watch_namespaces: tuple[str, ...]
    num_workers: int
    http_host: str
    http_port: int
    health_port: int
    kubeconfig: str
    log_level: str

    @property
    def installation(self) -> str:
        """The same for all its replicas: they share the Lease."""
        return f"{self.namespace}/{self.lease_name}"


_text = str.strip


def _words(value: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in value.split(",") if word.strip())


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(word or 'empty' for word in allowed)}")
        return value

    return parse


def _between(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.isascii() or not value.isdigit() or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


def _families(value: str) -> dict[str, str]:
    families = msgspec.json.decode(value, type=dict[str, str])
    if unknown := [family for family in families.values() if family not in FAMILIES]:
        raise ValueError(f"{unknown[0]} is no family of devices; known are {', '.join(FAMILIES)}")
    return families


def _engines(value: str) -> tuple[dict[str, EngineSettings], dict[str, str]]:
    """The images, and the defaults by family of devices."""
    given = msgspec.json.decode(value, type=dict[str, dict[str, str]])
    defaults = given.pop("defaults", {})
    engines = msgspec.convert(given, dict[str, EngineSettings])
    for name, setting in engines.items():
        if name not in SETTINGS_OF_ENGINES:
            raise ValueError(f"{name} is no engine; known are {', '.join(SETTINGS_OF_ENGINES)}")
        versions = ("", *SETTINGS_OF_ENGINES[name].versions)
        if setting.version not in versions:
            raise ValueError(f"{name}.version must be one of {', '.join(word or 'empty' for word in versions)}")
    for family, backend in defaults.items():
        if wrong := wrong_default(family, backend, engines):
            raise ValueError(f"defaults.{family}: {wrong}")
    return engines, defaults


@dataclass(frozen=True)
class _Setting:
    """`name` gives the flag `--a-b` and the variable `NEURON_OPERATOR_A_B`."""

    name: str
    help: str
    parse: Callable[[str], Any] = _text
    default: str | None = ""
    """None: it must be set."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _json(name: str, kind: Any, help_text: str, default: str = "{}") -> _Setting:
    return _Setting(name, f"JSON: {help_text}", lambda value: msgspec.json.decode(value, type=kind), default)


SETTINGS = (
    _Setting("runtime_image", "runtime image of models that set none", default=None),
    _Setting("compile_image", "image of Jobs that compile, for models that set none; empty: the runtime image"),
    _Setting(
        "engines",
        "JSON: images of engines with one of their own, and their versions; as defaults, by family of devices, the "
        'engine of models that name none, e.g. {"vllm": {"image": "...", "version": "0.29"}, "defaults": {"trn2": '
        '"vllm"}}',
        _engines,
        "{}",
    ),
    _Setting(
        "image_pull_policy",
        "pull policy of the runtime image; empty: Kubernetes' default",
        _one_of("", "Always", "IfNotPresent", "Never"),
    ),
    _Setting("image_pull_secrets", "comma-separated pull secrets of all pods", _words),
    _json(
        "jobs",
        JobSettings,
        'nodeSelector, tolerations, resources, labels, annotations and env of Jobs, e.g. {"env": [...]}',
    ),
    _json(
        "ca_bundle",
        CaBundle,
        "certificate authorities for downloads, a key of a ConfigMap or Secret in each model's namespace, e.g. "
        '{"configMap": {"name": "private-ca", "key": "ca.crt"}}',
    ),
    _json(
        "storage",
        StorageSettings,
        "weights and artifacts, each one of emptyDir (weights only), pvcTemplate, persistentVolumeClaim and "
        "objectStore; imageVolumes; keepDays, e.g. "
        '{"weights": {"pvcTemplate": {"storageClassName": "efs", "size": "1Ti"}}}',
    ),
    _json(
        "provisionable",
        Provisionable,
        'instance types that an autoscaler can add, e.g. {"instanceTypes": ["inf2.8xlarge", "trn2.48xlarge"]}',
    ),
    _Setting(
        "runtime_upgrade",
        "when running models move to another runtime image: OnEdit (with their next edit) or Rolling (by themselves, "
        "one model after another)",
        _one_of(*RUNTIME_UPGRADES),
        "OnEdit",
    ),
    _json(
        "groups",
        GroupSettings,
        "replicas on several nodes: restartSeconds, maxRestarts, placeSeconds, topologyKey, hostNetwork, "
        'controller, maxNodes, e.g. {"restartSeconds": 60, "maxRestarts": 5}',
    ),
    _json(
        "inference_pools",
        InferencePools,
        "an InferencePool for each model, for gateways with an endpoint picker: enabled, picker, pickerPort, e.g. "
        '{"enabled": true, "picker": "NAME-epp"}',
    ),
    _Setting(
        "device_mode",
        "how nodes give devices: Plugin, or PluginWithExtension if the Neuron scheduler extension is installed, which "
        "allows more device counts; DRA: by claims of the Neuron DRA driver; Auto: as each node does, claims first",
        _one_of(*DEVICE_MODES),
        "Plugin",
    ),
    _Setting(
        "device_families",
        f"JSON: families of devices by instance type, for types whose name does not tell: {', '.join(FAMILIES)}, e.g. "
        '{"lab-1": "trn1"}',
        _families,
        "{}",
    ),
    _Setting("device_scheduler_name", "scheduler that has the extension; required with PluginWithExtension"),
    _Setting(
        "troubleshooting_url",
        "where your people read docs/troubleshooting.md, for the links of messages; empty: its path in the repository",
        lambda value: _text(value) or TROUBLESHOOTING,
    ),
    _json(
        "network_policy_ingress_from",
        tuple[Object, ...],
        "list of NetworkPolicyPeers that may call models; empty: all",
        "[]",
    ),
    _json(
        "network_policy_operator",
        tuple[Object, ...],
        "list of NetworkPolicyPeers of the operator itself, which asks replicas with adapters about these",
        "[]",
    ),
    _Setting("namespace", "namespace of the Lease; empty: the pod's own"),
    _Setting("identity", "name of this replica, usually the pod's; empty: the host name"),
    _Setting("lease_name", "name of the Lease", default="neuron-operator"),
    _Setting("lease_seconds", "seconds until a standby takes over; renewed every third of it", _between(3, 3600), "12"),
    _Setting("watch_namespaces", "comma-separated namespaces to watch; empty: all", _words),
    _Setting("num_workers", "maximum NeuronModels reconciled at the same time", _between(1, 256), "16"),
    _Setting(
        "http_host", "address for /healthz, /readyz and /metrics; :: or 0.0.0.0: all, of IPv4 and IPv6", default="::"
    ),
    _Setting("http_port", "port of /readyz and /metrics; 0: any free port", _between(0, 65535), "8080"),
    _Setting("health_port", "port of /healthz", _between(1, 65535), "8081"),
    _Setting("kubeconfig", "path of the kubeconfig; empty: the pod's ServiceAccount, or $KUBECONFIG outside a pod"),
    _Setting("log_level", "debug, info, warning or error", _one_of("debug", "info", "warning", "error"), "info"),
)


def parser() -> argparse.ArgumentParser:
    """The flags of `neuron-operator run`, each with its variable and default in the help."""
    result = argparse.ArgumentParser(prog="neuron-operator run", description="Run the operator in a cluster.")
    for setting in SETTINGS:
        default = "required" if setting.default is None else f"default {setting.default!r}"
        help_text = f"{setting.help} (${setting.variable}, {default})".replace("%", "%%")
        result.add_argument(setting.flag, dest=setting.name, metavar="VALUE", help=help_text)
    return result


def load(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> RunSettings:
    """Settings from flags and environment. Raises InvalidSetting; argparse itself exits on unknown flags."""
    flags = vars(parser().parse_args(argv))
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        flag = flags[setting.name]
        text = flag if flag is not None else environ.get(setting.variable, setting.default)
        source = setting.flag if flag is not None else f"${setting.variable}"
        if text is None or (setting.default is None and not text.strip()):
            raise InvalidSetting(f"{setting.flag} (or ${setting.variable}) must be set: {setting.help}")
        try:
            values[setting.name] = setting.parse(text)
        except (ValueError, msgspec.DecodeError) as error:
            raise InvalidSetting(f"{source} is {text!r}: {error}") from error
    values["engines"], values["engine_defaults"] = values["engines"]
    models = Settings(**{one.name: values.pop(one.name) for one in fields(Settings)})
    if (models.device_mode == "PluginWithExtension") != bool(models.device_scheduler_name):
        raise InvalidSetting(
            "--device-scheduler-name and --device-mode PluginWithExtension belong together: set both or neither"
        )
    own_namespace = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.is_file() else "default"
    values["namespace"] = values["namespace"] or own_namespace
    values["identity"] = values["identity"] or socket.gethostname()
    return RunSettings(models=models, lease=LeaseTimings.of(values.pop("lease_seconds")), **values)
