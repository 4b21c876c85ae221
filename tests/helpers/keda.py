"""KEDA on an API server of a test: its own operator and metrics adapter with its own rights, and a Prometheus that
answers from what a test says, by Prometheus' own code for queries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from cluster.rig.binaries import ensure
from cluster.rig.commands import run
from cluster.rig.machine import GO_SETTINGS
from helpers.apiserver import ApiServer, service_account
from helpers.ports import free_ports
from helpers.promql import Scraped, evaluate

NAMESPACE, ACCOUNT = "keda", "keda-operator"
USER = service_account(NAMESPACE, ACCOUNT)
SERVICE = "keda-metrics-apiserver"


def certificate(folder: Path) -> Path:
    """A folder with `tls.crt`, `tls.key` and `ca.crt`: one certificate, by which the API server, the adapter and the
    operator trust each other."""
    folder.mkdir(parents=True)
    names = f"subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:{SERVICE}.{NAMESPACE}.svc"
    run(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", "/CN=front-proxy-client", "-addext", names),
        *("-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")),
    )
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    return folder


def aggregator_flags(certificates: Path) -> tuple[str, ...]:
    """Flags of an API server that passes requests on to the adapter."""
    return (
        f"--proxy-client-cert-file={certificates / 'tls.crt'}",
        f"--proxy-client-key-file={certificates / 'tls.key'}",
        f"--requestheader-client-ca-file={certificates / 'tls.crt'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    )


@contextlib.contextmanager
def running(server: ApiServer, certificates: Path) -> Iterator[None]:
    """KEDA runs, and the API server has its metrics. Raises NotPossibleHere if it cannot be built."""
    programs = ensure("keda", "hyper")
    with free_ports(3) as port, contextlib.ExitStack() as stack:
        _install(server, programs["keda"], programs["hyper"] / "kubectl", certificates, port)
        kubeconfig = server.kubeconfig(USER)
        operator = (
            *("--metrics-bind-address=0", "--health-probe-bind-address=0"),
            f"--metrics-service-bind-address=127.0.0.1:{port + 1}",
            f"--cert-dir={certificates}",
        )
        adapter = (
            *("--bind-address=127.0.0.1", f"--secure-port={port}", f"--port={port + 2}"),
            f"--metrics-service-address=127.0.0.1:{port + 1}",
            f"--client-ca-file={certificates / 'ca.crt'}",
            f"--tls-cert-file={certificates / 'tls.crt'}",
            f"--tls-private-key-file={certificates / 'tls.key'}",
            f"--cert-dir={certificates}",
            *(f"--{about}-kubeconfig={kubeconfig}" for about in ("authentication", "authorization", "lister")),
        )
        for name, flags in (("keda-operator", operator), ("keda-adapter", adapter)):
            stack.enter_context(_started(programs["keda"] / name, flags, server.folder / f"{name}.log", kubeconfig))
        yield


def _install(server: ApiServer, manifests: Path, kubectl: Path, certificates: Path, port: int) -> None:
    """What KEDA's own manifests say besides its pods, and the adapter's Service, which leads to this machine."""
    api_service = yaml.safe_load((manifests / "api_service.yaml").read_text())
    api_service["spec"]["service"]["port"] = port
    api_service["spec"]["caBundle"] = b64encode((certificates / "ca.crt").read_bytes()).decode()
    place = {"namespace": NAMESPACE}
    own = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, **place}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": SERVICE, **place},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        },
        api_service,
    ]
    apply = (str(kubectl), f"--kubeconfig={server.kubeconfig('admin')}", "apply", "--server-side", "-f")
    run(*apply, "-", stdin=yaml.safe_dump_all(own))
    files = sorted(file for file in manifests.glob("*.yaml") if file.name != "api_service.yaml")
    run(*apply, "-", stdin="\n---\n".join(file.read_text() for file in files))
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
    server.tokens[USER] = server.call("POST", path, asked)["status"]["token"]


@contextlib.contextmanager
def _started(program: Path, flags: tuple[str, ...], log: Path, kubeconfig: Path) -> Iterator[None]:
    place = {"POD_NAMESPACE": NAMESPACE, "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE, "WATCH_NAMESPACE": ""}
    env = {**os.environ, **GO_SETTINGS, **place, "KUBECONFIG": str(kubeconfig)}
    with log.open("wb") as file:
        process = subprocess.Popen([program, *flags], stdout=file, stderr=file, env=env)
    try:
        yield
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def prometheus(scrape: Callable[[], str]) -> AsyncIterator[str]:
    """The address of a server that has just scraped what `scrape` returns; it knows instant queries."""

    async def query(request: web.Request) -> web.Response:
        now = time.time()
        scraped = Scraped(scrape(), at=now - 1, labels={})
        answer = await asyncio.to_thread(evaluate, [scraped], [(request.query["query"], now)])
        (result,) = answer.results
        if result.error:
            return web.json_response({"status": "error", "error": result.error}, status=400)
        found: list[Any] = [{"metric": labels, "value": [now, f"{value:g}"]} for labels, value in result.samples]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": found}})

    app = web.Application()
    app.add_routes([web.get("/api/v1/query", query)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
