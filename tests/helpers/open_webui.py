"""The real Open WebUI in an environment of its own, and asked as its page asks it. Used by its test.

It is told to ask nobody but the servers of the test, and listens on loopback alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from cluster.rig.needs import NotPossibleHere
from helpers.environments import python_environment
from helpers.ports import free_ports

PINS = Path(__file__).parents[1] / "neuron_runtime" / "open_webui" / "requirements.txt"
START_SECONDS = 240.0
"""It imports for long, and makes its database."""
_ENVIRONMENT = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
    "ENABLE_OLLAMA_API": "false",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",  # else it loads a model of its own
    "RAG_EMBEDDING_MODEL": "vectors",
    "RAG_OPENAI_API_KEY": "any",
    "SCARF_NO_ANALYTICS": "true",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of a test, which is long enough for it",
}


def folder() -> Path:
    """The folder that has the program `open-webui`. Raises NotPossibleHere."""
    return python_environment("open-webui", PINS)


@contextlib.contextmanager
def open_webui(chats: Sequence[str], vectors: str, data: Path) -> Iterator[httpx.Client]:
    """Its API, as the user that it has without accounts. Raises NotPossibleHere.

    chats: the URLs of its models.
    vectors: the URL of a server with the model `vectors`.
    data: an empty folder.
    """
    programs, log = folder(), data / "log"
    servers = {
        "OPENAI_API_BASE_URLS": ";".join(chats),
        "OPENAI_API_KEYS": ";".join("any" for _ in chats),
        "RAG_OPENAI_API_BASE_URL": vectors,
    }
    with free_ports() as port, log.open("wb") as output:
        process = subprocess.Popen(
            ["nice", str(programs / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **_ENVIRONMENT, **servers, "DATA_DIR": str(data)},
            cwd=data,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as client:
                _wait(client, process, log)
                user = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status()
                client.headers["Authorization"] = f"Bearer {user.json()['token']}"
                yield client
        finally:
            process.kill()
            process.wait()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            client.get("/health").raise_for_status()
            return
        time.sleep(0.5)
    raise AssertionError(f"Open WebUI did not start within {START_SECONDS:g} s:\n{log.read_text()}")


if __name__ == "__main__":
    try:
        print(folder())
    except NotPossibleHere as error:
        sys.exit(str(error))
