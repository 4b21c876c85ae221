"""Keys, certificates and kubeconfig files of one cluster, created with openssl at its first start."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.rig.commands import run
from cluster.rig.topology import Topology

_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = "365"


@dataclass(frozen=True)
class Certificate:
    name: str
    subject: str
    usages: tuple[str, ...] = ("clientAuth",)
    alternative_names: tuple[str, ...] = ()
    authority: str = "ca"


def certificates(topology: Topology) -> list[Certificate]:
    service = ["kubernetes", "default", "svc", "cluster", "local"]
    api_names = [f"DNS:{'.'.join(service[:length])}" for length in (1, 2, 3, 5)]
    api_addresses = [f"IP:{a}" for a in (topology.api_address, topology.kubernetes_service_address, "127.0.0.1")]
    return [
        Certificate("api-server", "/CN=kube-apiserver", ("serverAuth",), (*api_names, *api_addresses)),
        Certificate("kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client"),
        Certificate("front-proxy-client", "/CN=front-proxy-client", authority="front-proxy-ca"),
        Certificate("admin", "/O=system:masters/CN=admin"),
        Certificate("controller-manager", "/CN=system:kube-controller-manager"),
        Certificate("scheduler", "/CN=system:kube-scheduler"),
        Certificate("kube-proxy", "/CN=system:kube-proxy"),
        *(
            Certificate(
                f"kubelet-{node.name}",
                f"/O=system:nodes/CN=system:node:{node.name}",
                ("clientAuth", "serverAuth"),
                (f"DNS:{node.name}", f"IP:{node.address}"),
            )
            for node in topology.nodes
        ),
    ]


@dataclass(frozen=True)
class Pki:
    """The files, in one folder: NAME.crt and NAME.key of each certificate, NAME.kubeconfig of each client."""

    folder: Path

    def crt(self, name: str) -> str:
        return str(self.folder / f"{name}.crt")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def kubeconfig(self, name: str) -> str:
        return str(self.folder / f"{name}.kubeconfig")


def make_pki(folder: Path, topology: Topology) -> Pki:
    """Creates the files unless they exist; a partial set is never in place."""
    pki = Pki(folder)
    if folder.exists():
        return pki
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".pki-", dir=folder.parent))
    made = Pki(temporary)
    for name in ("ca", "front-proxy-ca"):
        _make_authority(made, name)
    run("openssl", "genrsa", "-out", made.key("service-accounts"), "2048")
    run(
        "openssl",
        "rsa",
        "-in",
        made.key("service-accounts"),
        "-pubout",
        "-out",
        str(temporary / "service-accounts.pub"),
    )
    wanted = certificates(topology)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda certificate: _make_certificate(made, certificate), wanted))
    for certificate in wanted:
        if "clientAuth" in certificate.usages and certificate.authority == "ca":
            config = kubeconfig(topology.api_server, pki, certificate.name)
            Path(made.kubeconfig(certificate.name)).write_text(config)
    temporary.rename(folder)
    return pki


def kubeconfig(server: str, pki: Pki, user: str) -> str:
    # JSON is valid YAML and needs no quoting rules.
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rig", "cluster": {"server": server, "certificate-authority": pki.crt("ca")}}],
            "users": [{"name": user, "user": {"client-certificate": pki.crt(user), "client-key": pki.key(user)}}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": user}}],
            "current-context": "rig",
        },
        indent=2,
    )


def _make_authority(pki: Pki, name: str) -> None:
    extensions = ("keyUsage=critical,keyCertSign,cRLSign,digitalSignature", "basicConstraints=critical,CA:true")
    options = [option for extension in extensions for option in ("-addext", extension)]
    files = ("-keyout", pki.key(name), "-out", pki.crt(name))
    run("openssl", "req", "-x509", *_EC_KEY, "-days", _DAYS, "-subj", f"/CN=rig {name}", *options, *files)


def _make_certificate(pki: Pki, certificate: Certificate) -> None:
    request = pki.folder / f"{certificate.name}.csr"
    extensions = pki.folder / f"{certificate.name}.ext"
    extensions.write_text("\n".join(_extensions(certificate.usages, certificate.alternative_names)))
    run(
        "openssl",
        "req",
        "-new",
        *_EC_KEY,
        "-keyout",
        pki.key(certificate.name),
        "-out",
        str(request),
        "-subj",
        certificate.subject,
    )
    authority = ("-CA", pki.crt(certificate.authority), "-CAkey", pki.key(certificate.authority))
    serial = ("-set_serial", str(secrets.randbits(63)))
    made = ("-in", str(request), "-extfile", str(extensions), "-out", pki.crt(certificate.name))
    run("openssl", "x509", "-req", *authority, *serial, "-days", _DAYS, *made)
    request.unlink()
    extensions.unlink()


def _extensions(usages: Sequence[str], alternative_names: Sequence[str]) -> list[str]:
    lines = ["keyUsage=critical,digitalSignature", f"extendedKeyUsage={','.join(usages)}"]
    return [*lines, f"subjectAltName={','.join(alternative_names)}"] if alternative_names else lines
