"""The chart value `caBundle`: pods that download trust a hub with a certificate of a private authority."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.hub import Shelf, serving
from helpers.operator_worlds import SETTINGS, body, find, fresh, resolved_world, settle
from helpers.tiny_model import write_tiny_model
from neuron_operator.api import names
from neuron_operator.read.world import CaBundle, KeyRef, Object, Settings

KEY = KeyRef("private-ca", "bundle.pem")
BUNDLES = {
    "configMap": (CaBundle(config_map=KEY), {"name": "private-ca"}),
    "secret": (CaBundle(secret=KEY), {"secretName": "private-ca"}),
}


def using(bundle: CaBundle) -> Settings:
    return Settings(runtime_image=SETTINGS.runtime_image, ca_bundle=bundle)


def pods_of(settings: Settings, uri: str = "hf://acme/tiny") -> tuple[Object, Object]:
    """The pod specs of the resolve Job and of the replicas."""
    spec = {**body()["spec"], "model": {"uri": uri}}
    _, before = settle(fresh(spec=spec), settings)
    _, after = resolved_world(settings, spec=spec)
    job, deployment = find(before.desired, "Job"), find(after.desired, "Deployment")
    return job["spec"]["template"]["spec"], deployment["spec"]["template"]["spec"]


def variables(pod: Object) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]}


@pytest.mark.parametrize("kind", BUNDLES)
def test_what_downloads_mounts_the_bundle_and_names_it_to_every_library(kind: str) -> None:
    bundle, reference = BUNDLES[kind]
    for pod in pods_of(using(bundle)):
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == names.CA_VOLUME]
        assert volume[kind].items() >= reference.items()
        assert volume[kind]["items"] == [{"key": "bundle.pem", "path": "ca.crt"}]
        assert not volume[kind].get("optional")
        (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == names.CA_VOLUME]
        assert mount["readOnly"]
        found = variables(pod)
        path = f"{mount['mountPath']}/ca.crt"
        assert {found[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")} == {path}


def test_a_model_in_the_image_needs_no_bundle() -> None:
    for pod in pods_of(using(BUNDLES["configMap"][0]), "file:///models/demo"):
        assert names.CA_VOLUME not in [volume["name"] for volume in pod["volumes"]]
        assert "SSL_CERT_FILE" not in variables(pod)


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private authority `ca.crt` and a certificate `hub.crt` of it for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("authority")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    is_authority = ("-addext", "basicConstraints=critical,CA:true", "-addext", "keyUsage=critical,keyCertSign")
    own = ("-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    openssl("req", "-x509", *new_key, "-subj", "/CN=private authority", *is_authority, *own)
    signed = ("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-addext", "subjectAltName=IP:127.0.0.1")
    hub = ("-keyout", folder / "hub.key", "-out", folder / "hub.crt", "-addext", "basicConstraints=CA:false")
    openssl("req", "-x509", *new_key, "-subj", "/CN=hub", *signed, *hub)
    return folder


@pytest.fixture(scope="module")
def endpoint(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("hub")
    write_tiny_model(root / "acme" / "tiny" / "main")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority / "hub.crt", authority / "hub.key")
    with serving(Shelf(root), tls) as address:
        yield address


def job_of(pod: Object, endpoint: str, authority: Path, folder: Path) -> subprocess.Popen[str]:
    """Starts the Job's command with its variables; its mounted bundle is the authority's folder."""
    inside = {name: value.replace(names.CA_DIR, str(authority)) for name, value in variables(pod).items()}
    plain = {name: value for name, value in os.environ.items() if not name.endswith(("CA_BUNDLE", "CERT_FILE"))}
    environment = {**plain, **inside, "HOME": str(folder), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    arguments = pod["containers"][0]["command"][1:-2]
    command = [sys.executable, "-m", "neuron_runtime", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_job_reads_a_hub_with_a_private_certificate(endpoint: str, authority: Path, tmp_path: Path) -> None:
    pod, _ = pods_of(using(BUNDLES["configMap"][0]))
    with job_of(pod, endpoint, authority, tmp_path) as job:
        output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert "LlamaForCausalLM (supported)" in output


def test_without_the_bundle_a_job_reports_the_certificate(endpoint: str, authority: Path, tmp_path: Path) -> None:
    pod, _ = pods_of(SETTINGS)
    with job_of(pod, endpoint, authority, tmp_path) as job:
        assert job.stderr is not None
        first = job.stderr.readline()
        job.kill()  # it would try again for a while
    assert "certificate verify failed" in first
