"""The cluster as kubectl sees it: reads objects and logs, and connects to a model's Service.

Called by `command`. kubectl itself does everything, so kubeconfig, context, namespace, credentials, plugins for login
and proxies are exactly the user's. Nothing is retried or written.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from neuron_operator.api import names
from neuron_operator.read.objects import items, name_of, text

START_SECONDS = 30.0
"""How long kubectl may take to open a connection."""
ANSWER_TIMEOUTS = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)
MODELS = f"{names.PLURAL}.{names.GROUP}"
ADAPTERS = f"{names.ADAPTER_PLURAL}.{names.GROUP}"
_RESOURCES = {
    **dict.fromkeys(("", names.SHORT, names.KIND.lower(), names.PLURAL, MODELS), MODELS),
    **dict.fromkeys((names.ADAPTER_SHORT, names.ADAPTER_KIND.lower(), names.ADAPTER_PLURAL, ADAPTERS), ADAPTERS),
}
"""By what stands before the name, as kubectl has it; nothing: a model."""


class KubectlFailed(Exception):
    """kubectl is missing or ended with an error; the text is kubectl's own."""


@dataclass(frozen=True)
class Address:
    session: aiohttp.ClientSession
    url: str
    """Without `/v1`."""
    way: str
    """How requests reach it, for people."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with the flags that choose cluster, user and namespace."""

    flags: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlFailed("kubectl is not in PATH")
        return [program, *self.flags, *arguments]

    def read(self, *arguments: str) -> str:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, errors="replace")
        if done.returncode:
            raise KubectlFailed(" ".join(done.stderr.split()) or f"kubectl ended with code {done.returncode}")
        return done.stdout

    def model(self, name: str) -> Any:
        return self._get(MODELS, name)

    def named(self, name: str) -> Any:
        """The model `chat` or `nm/chat`, or the adapter `na/support-de`."""
        kind, _, own = name.rpartition("/")
        resource = _RESOURCES.get(kind.lower())
        if resource is None:
            shorts = f"{names.SHORT}/NAME or {names.ADAPTER_SHORT}/NAME"
            raise KubectlFailed(f"{name} is neither a model nor an adapter: write NAME, {shorts}")
        return self._get(resource, own)

    def adapters(self, namespace: str) -> list[Any]:
        return [*items(self._get(ADAPTERS, "--namespace", namespace), "items")]

    def matching(self, kind: str, namespace: str, selector: str) -> list[Any]:
        return [*items(self._get(kind, "--namespace", namespace, "--selector", selector), "items")]

    def nodes(self, node_names: Sequence[str]) -> list[Any]:
        """Those of the nodes that exist."""
        if not node_names:
            return []
        nodes_here = self._get("nodes", *node_names, "--ignore-not-found")
        return [*items(nodes_here, "items")] or ([nodes_here] if name_of(nodes_here) else [])

    def holder(self, namespace: str) -> str:
        """The installation that acts in the namespace; empty: none yet."""
        held = self._get("configmap", names.HOLDING, "--namespace", namespace, "--ignore-not-found")
        return text(held, "data", "holder")

    @contextlib.asynccontextmanager
    async def connected(self, model: Any) -> AsyncIterator[Address]:
        """A connection to the model's Service, through the API server.

        A model with API keys gets a forwarded port: the API server's proxy would take the key for its own token.
        """
        namespace, name = text(model, "metadata", "namespace"), name_of(model)
        key = self._api_key(model, namespace)
        if key is None:
            with tempfile.TemporaryDirectory(prefix="kubectl-neuron-") as folder:
                socket = str(Path(folder) / "proxy")  # not a port: every user of this machine could act with it
                async with self._running("proxy", f"--unix-socket={socket}", say="Starting to serve"):
                    path = f"/api/v1/namespaces/{namespace}/services/{name}:{names.PORT_NAME}/proxy"
                    connector = aiohttp.UnixConnector(socket, limit=0)
                    async with aiohttp.ClientSession(connector=connector, timeout=ANSWER_TIMEOUTS) as session:
                        yield Address(session, f"http://localhost{path}", "the API server's proxy")
            return
        target = (f"service/{name}", f":{names.PORT}", "--namespace", namespace, "--address", "127.0.0.1")
        async with self._running("port-forward", *target, say="Forwarding from") as line:
            port = line.partition("127.0.0.1:")[2].partition(" ")[0]
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(headers=headers, timeout=ANSWER_TIMEOUTS) as session:
                yield Address(session, f"http://127.0.0.1:{port}", "a forwarded port of one replica")

    def _get(self, *arguments: str) -> Any:
        output = self.read("get", *arguments, "--output", "json")
        return msgspec.json.decode(output) if output.strip() else {}

    def _api_key(self, model: Any, namespace: str) -> str | None:
        """The first key of the model's Secret, which the user must be allowed to read; None if it has no keys."""
        name, key = (text(model, "spec", "serving", "apiKeySecretRef", part) for part in ("name", "key"))
        if not name:
            return None
        try:
            content = base64.b64decode(text(self._get("secret", name, "--namespace", namespace), "data", key))
        except binascii.Error:
            content = b""
        keys = content.decode(errors="replace").split()
        if not keys:
            raise KubectlFailed(f"Secret {name} has no API key in {key}")
        return keys[0]

    @contextlib.asynccontextmanager
    async def _running(self, *arguments: str, say: str) -> AsyncIterator[str]:
        """A kubectl that runs until the end of the block; the line that begins with `say` says that it is ready."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.command(*arguments), stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    line = (await process.stdout.readline()).decode(errors="replace").strip()
            if not line.startswith(say):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                error = (await process.stderr.read()).decode(errors="replace")
                raise KubectlFailed(" ".join(error.split()) or f"kubectl {arguments[0]} did not start: {line}")
            unread = [asyncio.create_task(_discard(stream)) for stream in (process.stdout, process.stderr)]
            try:
                yield line
            finally:
                for task in unread:
                    task.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _discard(stream: asyncio.StreamReader) -> None:
    """Reads on, so that kubectl never waits for a full pipe."""
    while await stream.read(65536):
        pass
