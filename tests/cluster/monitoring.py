"""Prometheus and a metrics adapter in pods of the cluster, set up by the chart's PodMonitors. Used by stories.

The Prometheus operator's own code writes its configuration from the PodMonitors (`tests/cluster/build/monitoring`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cluster.rig.binaries import ensure
from cluster.rig.commands import run
from cluster.rig.node_images import write_program_archive
from cluster.rig.rig import WAITING, Rig
from helpers import external_metrics

NAMESPACE = "monitoring"
PROMETHEUS_IMAGE = "localhost/prometheus:1"
NODE = "n3"
_API = f"v1beta1.{external_metrics.GROUP_VERSION.partition('/')[0]}"


@dataclass(frozen=True)
class Monitoring:
    rig: Rig

    def query(self, expression: str) -> list[Any]:
        """Samples that Prometheus has now."""
        path = f"/api/v1/namespaces/{NAMESPACE}/services/prometheus:9090/proxy/api/v1/query"
        answer = json.loads(self.rig.kubectl("get", "--raw", f"{path}?{urlencode({'query': expression})}"))
        return list(answer["data"]["result"])

    def values(self, namespace: str, metric: str, **labels: str) -> list[Any]:
        """What the API server answers a HorizontalPodAutoscaler."""
        selector = urlencode({"labelSelector": ",".join(f"{name}={value}" for name, value in labels.items())})
        path = f"/apis/{external_metrics.GROUP_VERSION}/namespaces/{namespace}/{metric}?{selector}"
        return list(json.loads(self.rig.kubectl("get", "--raw", path))["items"])


@contextlib.contextmanager
def monitoring_kinds(rig: Rig) -> Iterator[None]:
    """The kinds of the Prometheus operator that the chart uses, but no Prometheus operator."""
    files = [str(ensure("crds")["crds"] / f"{kind}.yaml") for kind in ("podmonitors", "prometheusrules")]
    options = [option for file in files for option in ("-f", file)]
    try:
        rig.kubectl("apply", "--server-side", *options)
        rig.kubectl("wait", "--for=condition=Established", *options, WAITING)
        yield
    finally:
        rig.kubectl("delete", "--ignore-not-found", *options)


@contextlib.contextmanager
def monitoring(rig: Rig, image: str, rule: Mapping[str, Any]) -> Iterator[Monitoring]:
    """Prometheus with the targets of all PodMonitors of the cluster, and the adapter.

    image: one with Python, on the nodes.
    rule: of the adapter.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "prometheus.tar"
        write_program_archive(archive, PROMETHEUS_IMAGE, ensure("prometheus")["prometheus"] / "prometheus")
        rig.load_image(archive, [NODE])
        certificate = _certificate(Path(folder))
    rig.create_namespace(NAMESPACE)
    try:
        rig.apply(*_objects(rig, image, rule, certificate))
        for name in ("prometheus", "adapter"):
            rig.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", f"pod/{name}", WAITING)
        rig.kubectl("wait", "--for=condition=Available", f"apiservice/{_API}", WAITING)
        yield Monitoring(rig)
    finally:
        # First: the API server cannot finish a namespace while an extension does not answer.
        rig.kubectl("delete", "--ignore-not-found", f"apiservice/{_API}", "clusterrolebinding/test-prometheus")
        rig.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _objects(rig: Rig, image: str, rule: Mapping[str, Any], certificate: Mapping[str, str]) -> list[Any]:
    config = {"prometheus.yaml": _scrape_config(rig)}
    adapter = {"adapter.py": Path(external_metrics.__file__).read_text(), **certificate}
    command = ["python", "/etc/config/adapter.py", "http://prometheus:9090", json.dumps(rule)]
    command += [f"/etc/config/{name}" for name in certificate]
    prometheus = ["/prometheus", "--config.file=/etc/config/prometheus.yaml", "--storage.tsdb.path=/tmp/data"]
    ready = {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "prometheus", "namespace": NAMESPACE}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "test-prometheus"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
            "subjects": [{"kind": "ServiceAccount", "name": "prometheus", "namespace": NAMESPACE}],
        },
        *_program("prometheus", PROMETHEUS_IMAGE, prometheus, 9090, config, ready=ready),
        *_program("adapter", image, command, 6443, adapter, ready={"tcpSocket": {"port": 6443}, "periodSeconds": 1}),
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": _API},
            "spec": {
                "group": _API.partition(".")[2],
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"name": "adapter", "namespace": NAMESPACE, "port": 6443},
            },
        },
    ]


def _program(
    name: str, image: str, command: list[str], port: int, files: Mapping[str, str], *, ready: Mapping[str, Any]
) -> list[Any]:
    """A pod with files, and its Service."""
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "readinessProbe": ready,
        "volumeMounts": [{"name": "config", "mountPath": "/etc/config"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": NODE},
        "terminationGracePeriodSeconds": 0,
        "serviceAccountName": "prometheus",
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}, {"name": "tmp", "emptyDir": {}}],
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
        },
    ]


def _scrape_config(rig: Rig) -> str:
    """As the Prometheus operator would write it for a Prometheus that selects every PodMonitor."""
    prometheus = {
        "metadata": {"name": "prometheus", "namespace": NAMESPACE},
        "spec": {"scrapeInterval": "3s", "evaluationInterval": "3s"},
    }
    asked = {"prometheus": prometheus, "podMonitors": rig.get("podmonitors", "--all-namespaces")["items"]}
    config = run(str(ensure("monitoring")["monitoring"] / "scrape-config"), stdin=json.dumps(asked))
    return config.replace("$(SHARD)", "0")  # in a cluster, the program that reloads Prometheus replaces it


def _certificate(folder: Path) -> dict[str, str]:
    """A certificate that nobody checks, and its key, by file name."""
    files = {"tls.crt": folder / "tls.crt", "tls.key": folder / "tls.key"}
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(files["tls.key"]))
    run("openssl", "req", "-x509", *key, "-out", str(files["tls.crt"]), "-days", "2", "-subj", "/CN=adapter")
    return {name: file.read_text() for name, file in files.items()}
