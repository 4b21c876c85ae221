"""A real etcd and kube-apiserver as plain processes on loopback: RBAC, TLS and an audit log, but no nodes and no
controllers. Used by tests of the operator's I/O; tests that need kubelets or controllers use the cluster instead.

Users come from a token file: `admin` (system:masters) and ServiceAccounts with the rights that a test grants. A server
takes some seconds of CPU to start, so files of tests share one: what they leave is taken out of its store (`put_back`).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import secrets
import select
import shutil
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cluster.rig import binaries
from cluster.rig.machine import GO_SETTINGS, WAIT_SECONDS
from helpers import kubeconfigs
from helpers.ports import free_ports
from neuron_operator.cluster.client import as_yaml

GROUPS = ("system:serviceaccounts", "system:authenticated")
"""Token of every user except `admin`."""
ITS_OWN = ("masterleases", "leases/kube-system", "peerserverleases", "services/endpoints/default", "events")
"""Keys of the store that the server itself changes all the time."""
NOT_YET_SERVED = (404, 429)
"""Responses for a new resource: unknown at first, then its storage is initializing."""


def service_account(namespace: str, name: str) -> str:
    """The user name of a ServiceAccount for RBAC."""
    return f"system:serviceaccount:{namespace}:{name}"


@dataclass
class ApiServer:
    """A running server: its address, its users and the requests that it received."""

    folder: Path
    port: int
    """The first of three ports: the server's, and two of its store."""
    tokens: dict[str, str]
    bodies_of: tuple[str, ...] = ()
    """Users whose writes the audit log has with their bodies."""
    host: str = "127.0.0.1"
    """Its address, of IPv4 or IPv6; it and its store listen on no other."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _idle: list[http.client.HTTPSConnection] = field(default_factory=list)
    _audited: list[dict[str, Any]] = field(default_factory=list)
    _num_audit_bytes: int = 0
    _audit_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"https://{self.authority}:{self.port}"

    @property
    def authority(self) -> str:
        """The host as addresses write it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def ca_file(self) -> Path:
        return self.folder / "certs" / "apiserver.crt"

    def kubeconfig(self, user: str, server: str | None = None) -> Path:
        """A kubeconfig for a user of `tokens`; `server` is the address of a proxy, if any."""
        path = self.folder / f"{user.replace(':', '_')}-{abs(hash(server))}.kubeconfig"
        credentials = {"token": self.tokens[user]}
        kubeconfigs.write(path, server or self.url, credentials, **{"certificate-authority": str(self.ca_file)})
        return path

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", user: str = ""
    ) -> Any:
        """Sends one request as admin, or as a `user` that admin impersonates. Raises HTTPError with the server's
        message."""
        data = as_yaml(body) if "yaml" in content_type else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {self.tokens['admin']}",
            "Content-Type": content_type,
            **({"Impersonate-User": user} if user else {}),
        }
        connection = self._take_connection()
        try:
            connection.request(method, path, None if body is None else data, headers)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if response.status >= 400:
            error = urllib.error.HTTPError(self.url + path, response.status, response.reason, response.headers, None)
            error.add_note(content.decode(errors="replace"))
            raise error
        return json.loads(content) if content.startswith(b"{") else content.decode()

    def _take_connection(self) -> http.client.HTTPSConnection:
        """One that earlier requests left open, unless the server has ended it: TLS costs more than a request."""
        while self._idle:
            connection = self._idle.pop()
            if not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        tls = ssl.create_default_context(cafile=str(self.ca_file))
        return http.client.HTTPSConnection(self.host, self.port, timeout=WAIT_SECONDS, context=tls)

    def apply(self, path: str, body: Any, manager: str = "hand") -> Any:
        """Server-side apply as admin; `path` is the object's."""
        return self.call("PATCH", f"{path}?fieldManager={manager}&force=true", body, "application/apply-patch+yaml")

    def requests(self, user: str = "", since: float = 0.0) -> list[dict[str, Any]]:
        """Audit events of finished requests about resources, of one user or of all but the server itself, oldest first.

        since: when the server got the first, by the wall clock. A client may get its response well before the event is
        logged.
        """
        with self._audit_lock, (self.folder / "audit.log").open("rb") as file:
            file.seek(self._num_audit_bytes)
            *lines, _ = file.read().split(b"\n")  # the last line may be incomplete
            self._num_audit_bytes += sum(len(line) + 1 for line in lines)
            self._audited += (msgspec.json.decode(line) for line in lines)
        return [
            event
            for event in self._audited
            if "objectRef" in event  # not the discovery, with which kopf starts
            and (event["user"]["username"] == user if user else event["user"]["username"] != "system:apiserver")
            and datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp() >= since
        ]

    def may(
        self, user: str, verb: str, resource: str, group: str = "", subresource: str = "", *, namespace: str = ""
    ) -> bool:
        """Whether the server allows it in all namespaces, or in one; a changed role takes effect after a delay."""
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": namespace}
        review = {"spec": {"user": user, "groups": list(GROUPS), "resourceAttributes": asked}}
        answer = self.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def stored(self) -> dict[str, dict[str, str]]:
        """All that the store has, by key."""
        every = {"key": _in_base64("/registry/"), "range_end": _in_base64("/registry0")}
        found = {base64.b64decode(one["key"]).decode(): one for one in self._ask_store("range", every)["kvs"]}
        own = tuple(f"/registry/{name}/" for name in ITS_OWN)
        return {key: one for key, one in found.items() if not key.startswith(own)}

    def put_back(self, before: dict[str, dict[str, str]]) -> None:
        """Makes the store what it was: everybody who watches, the server too, sees objects deleted and changed. The
        requests so far are forgotten."""
        now = self.stored()
        for key in now.keys() - before.keys():
            self._ask_store("deleterange", {"key": _in_base64(key)})
        for key, one in before.items():
            if key not in now or now[key]["value"] != one["value"]:
                self._ask_store("put", {"key": one["key"], "value": one["value"]})
        self.requests()
        self._audited.clear()

    def _ask_store(self, what: str, body: Any) -> Any:
        """One call of etcd's gateway."""
        url = f"http://{self.authority}:{self.port + 1}/v3/kv/{what}"
        asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)

    def pause(self, signal_number: int = signal.SIGSTOP) -> None:
        """Until it is called with SIGCONT: an idle server takes a fortieth of a core."""
        for process in self.processes:
            process.send_signal(signal_number)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        self.processes.clear()
        while self._idle:
            self._idle.pop().close()


def _in_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@contextlib.contextmanager
def running(
    folder: Path,
    users: tuple[str, ...] = (),
    bodies_of: tuple[str, ...] = (),
    host: str = ApiServer.host,
    flags: tuple[str, ...] = (),
) -> Iterator[ApiServer]:
    """A fresh server with its data in `folder`. Raises NotPossibleHere if its programs cannot be built."""
    programs = binaries.ensure("etcd", "hyper")
    with free_ports(3) as port:
        server = ApiServer(folder, port, {user: secrets.token_hex(16) for user in ("admin", *users)}, bodies_of, host)
        try:
            _start(server, programs["etcd"] / "etcd", programs["hyper"] / "kube-apiserver", flags)
            yield server
        finally:
            server.stop()
            shutil.rmtree(folder / "etcd", ignore_errors=True)


def _start(server: ApiServer, etcd: Path, kube_apiserver: Path, flags: tuple[str, ...]) -> None:
    folder = server.folder
    folder.mkdir(parents=True, exist_ok=True)
    client_url, peer_url = (f"http://{server.authority}:{server.port + more}" for more in (1, 2))
    groups = {"admin": '"system:masters"'}
    accounts = f'"{",".join(GROUPS)}"'
    tokens = "".join(f"{token},{user},{user},{groups.get(user, accounts)}\n" for user, token in server.tokens.items())
    (folder / "tokens.csv").write_text(tokens)
    # Each finished request once; a watch is logged when it starts.
    rules: list[dict[str, Any]] = [{"level": "Metadata", "omitStages": ["RequestReceived"]}]
    if server.bodies_of:
        verbs = ["create", "update", "patch", "delete"]
        rules.insert(0, {**rules[0], "level": "Request", "users": list(server.bodies_of), "verbs": verbs})
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}
    (folder / "audit.yaml").write_text(yaml.safe_dump(policy))
    key = folder / "service-accounts.key"
    subprocess.run(
        ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(key)],
        check=True,
        capture_output=True,
    )
    _spawn(
        server,
        etcd,
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        "--unsafe-no-fsync",
        "--log-level=error",
    )
    _spawn(
        server,
        kube_apiserver,
        f"--etcd-servers={client_url}",
        f"--bind-address={server.host}",
        f"--advertise-address={server.host}",
        f"--secure-port={server.port}",
        f"--cert-dir={folder / 'certs'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        f"--service-cluster-ip-range={'fd00:10:96::/112' if ':' in server.host else '10.96.0.0/16'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--feature-gates=MutatingAdmissionPolicy=true,HPAScaleToZero=true",
        "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
        "--disable-admission-plugins=ServiceAccount",  # no controller creates the account `default`
        f"--audit-policy-file={folder / 'audit.yaml'}",
        f"--audit-log-path={folder / 'audit.log'}",
        *flags,
    )
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if server.call("GET", "/readyz") == "ok":
                return
        if time.monotonic() > deadline or any(process.poll() is not None for process in server.processes):
            raise RuntimeError(f"the API server did not start: {(folder / 'kube-apiserver.log').read_text()[-2000:]}")
        time.sleep(0.1)


def _spawn(server: ApiServer, program: Path, *arguments: str) -> None:
    env = {**os.environ, **GO_SETTINGS}
    with (server.folder / f"{program.name}.log").open("wb") as log:
        command = [str(program), *arguments]
        server.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=server.folder, env=env))
