"""Servers that models and images come from, in pods of the cluster: a hub, an S3 server and a registry. Stories start
them, order their faults and read what they sent; the programs are `helpers.hub`, `helpers.registry` and the one of
`tests/cluster/build/s3`."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cluster.rig.binaries import ensure
from cluster.rig.images import Image, read_manifest
from cluster.rig.node_images import write_program_archive
from cluster.rig.rig import WAITING, Rig
from helpers.registry import digest_of
from helpers.s3_server import ACCESS_KEY, SECRET_KEY

HELPERS = Path(__file__).parents[1] / "helpers"
MODEL_FILE = "model.safetensors"
S3_IMAGE = "localhost/s3:1"
S3_PORT = 7070
REGISTRY_PORT = 5005
REGISTRY = f"localhost:{REGISTRY_PORT}"
"""As its node calls it: containerd speaks plain HTTP with this name only."""


@dataclass(frozen=True)
class Hub:
    """A hub in a pod. A model is a copy of the demo model: its answers are the same."""

    rig: Rig
    namespace: str

    @property
    def endpoint(self) -> str:
        return f"http://hub.{self.namespace}.svc.cluster.local:8080"

    def order(self, **faults: object) -> dict[str, Any]:
        """Orders the faults of `helpers.hub.ControlHandler`; returns what the hub was asked and sent."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/hub:8082/proxy/?{urlencode(faults)}"
        answer: dict[str, Any] = json.loads(self.rig.kubectl("get", "--raw", path))
        return answer

    def sent_bytes(self) -> int:
        """Bytes of weights that it sent, killed downloads included."""
        sent: dict[str, int] = self.order()["sent_bytes"]
        return sum(number for name, number in sent.items() if name.endswith(".safetensors"))

    def commit(self, repository: str) -> str:
        path = f"/api/v1/namespaces/{self.namespace}/pods/hub:8080/proxy/api/models/{repository}"
        commit: str = json.loads(self.rig.kubectl("get", "--raw", path))["sha"]
        return commit

    def pod(self) -> Any:
        return self.rig.get("pod", "hub", "-n", self.namespace)


@contextlib.contextmanager
def hub_in_pod(
    rig: Rig,
    namespace: str,
    image: str,
    *,
    node: str,
    models: Mapping[str, int],
    gated: Mapping[str, str] | None = None,
    edits: Mapping[str, str] | None = None,
) -> Iterator[Hub]:
    """A hub in a namespace of its own.

    models: repository to the bytes that are added to its weights.
    gated: repository to the token that opens it.
    edits: repository to a shell command that changes its files, in their folder.
    """
    rig.create_namespace(namespace)
    try:
        rig.apply(*_hub(namespace, image, node, models, gated or {}, edits=edits or {}))
        rig.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/hub", WAITING)
        yield Hub(rig, namespace)
    finally:
        rig.kubectl("delete", "namespace", namespace, "--wait=false")


def _hub(
    namespace: str,
    image: str,
    node: str,
    models: Mapping[str, int],
    gated: Mapping[str, str],
    *,
    edits: Mapping[str, str],
) -> list[dict[str, Any]]:
    sources = {f"{name}.py": (HELPERS / f"{name}.py").read_text() for name in ("hub", "file_faults", "grown")}
    lines = ["set -e"]
    for repository, num_bytes in models.items():
        folder = f"/tmp/hub/{repository}/main"
        lines += [f"mkdir -p {folder}", f"cp /models/demo/*.* {folder}"]
        lines += [f"python -m helpers.grown {folder}/{MODEL_FILE} {num_bytes}"] if num_bytes else []
        lines += [f"(cd {folder}; {edits[repository]})"] if repository in edits else []
    flags = "".join(f" --gated {repository}={token}" for repository, token in gated.items())
    lines += [f"exec python -m helpers.hub --root /tmp/hub --port 8080{flags}"]
    metadata = {"namespace": namespace, "labels": {"app": "hub"}}
    container = {
        "name": "hub",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "\n".join(lines)],
        "env": [{"name": "PYTHONPATH", "value": "/programs"}],
        "workingDir": "/programs",
        "volumeMounts": [{"name": "programs", "mountPath": "/programs/helpers"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8080}, "periodSeconds": 1},
    }
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "programs", "configMap": {"name": "hub"}}],
    }
    # The hub redirects downloads of weights to its store, on the next port of the same host.
    ports = [{"name": "hub", "port": 8080}, {"name": "store", "port": 8081}]
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub", **metadata}, "data": sources},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub", **metadata}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub", **metadata},
            "spec": {"selector": {"app": "hub"}, "ports": ports},
        },
    ]


@dataclass(frozen=True)
class ObjectStore:
    """An S3 server in a pod. `folder` holds its objects, on the host: BUCKET/KEY."""

    rig: Rig
    namespace: str
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"http://s3.{self.namespace}.svc.cluster.local:{S3_PORT}"

    def secret(self, name: str, *, secret_key: str = SECRET_KEY) -> dict[str, Any]:
        """A Secret with the credentials, for `credentialsSecretRef`."""
        data = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}

    def pod(self) -> Any:
        return self.rig.get("pod", "s3", "-n", self.namespace)


@contextlib.contextmanager
def object_store_in_pod(rig: Rig, namespace: str, *, node: str, buckets: Collection[str]) -> Iterator[ObjectStore]:
    """An S3 server with empty buckets, in a namespace of its own."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "s3.tar"
        write_program_archive(archive, S3_IMAGE, ensure("s3")["s3"] / "versitygw")
        rig.load_image(archive, [node])
    rig.create_namespace(namespace)
    try:
        rig.apply(*_object_store(namespace, node))
        rig.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/s3", WAITING)
        uid = rig.get("pod", "s3", "-n", namespace)["metadata"]["uid"]
        kubelet = rig.machine(node).mounts["/var/lib/kubelet"]
        data = kubelet / f"pods/{uid}/volumes/kubernetes.io~empty-dir/data"
        for bucket in buckets:
            (data / bucket).mkdir()
        yield ObjectStore(rig, namespace, data)
    finally:
        rig.kubectl("delete", "namespace", namespace, "--wait=false")


def _object_store(namespace: str, node: str) -> list[dict[str, Any]]:
    metadata = {"name": "s3", "namespace": namespace, "labels": {"app": "s3"}}
    container = {
        "name": "s3",
        "image": S3_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["--port", f":{S3_PORT}", "--health", "/health", "posix", "/data"],
        "env": [
            {"name": "ROOT_ACCESS_KEY", "value": ACCESS_KEY},
            {"name": "ROOT_SECRET_KEY", "value": SECRET_KEY},
        ],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": S3_PORT}, "periodSeconds": 1},
    }
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}],
    }
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": {"app": "s3"}, "ports": [{"port": S3_PORT}]},
        },
    ]


@contextlib.contextmanager
def registry_in_pod(rig: Rig, namespace: str, image: Image, *, node: str, login: str) -> Iterator[None]:
    """A registry for one node, in a namespace of its own. Any name is `image`, which the node has, with another id:
    a node gives an image that it pulled with a password to no pod without."""
    manifest, config = _renamed(image, namespace)
    data = {
        "registry.py": (HELPERS / "registry.py").read_text(),
        "manifest.json": manifest,
        "config.json": config,
    }
    metadata = {"name": "registry", "namespace": namespace}
    command = ["python", "/registry/registry.py", "--folder=/registry", f"--login={login}", f"--port={REGISTRY_PORT}"]
    container = {
        "name": "registry",
        "image": image.name,
        "imagePullPolicy": "Never",
        "command": command,
        "volumeMounts": [{"name": "data", "mountPath": "/registry"}],
        "readinessProbe": {
            "httpGet": {"host": "127.0.0.1", "path": "/health", "port": REGISTRY_PORT},
            "periodSeconds": 1,
        },
    }
    spec = {
        "hostNetwork": True,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "data", "configMap": {"name": "registry"}}],
    }
    rig.create_namespace(namespace)
    try:
        rig.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        )
        rig.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/registry", WAITING)
        yield
    finally:
        rig.kubectl("delete", "namespace", namespace, "--wait=false")


def _renamed(image: Image, label: str) -> tuple[str, str]:
    """Manifest and configuration of the image with one more label."""
    manifest, config = read_manifest(image.archive)
    config["config"] = {**config["config"], "Labels": {**(config["config"].get("Labels") or {}), "test": label}}
    text = json.dumps(config)
    described = {**manifest["config"], "digest": digest_of(text.encode()), "size": len(text.encode())}
    return json.dumps({**manifest, "config": described}), text
