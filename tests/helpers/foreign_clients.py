"""Clients of other makers, each a program that asks a server and fails if it does not understand an answer.

They need packages that the project does not have, so they run in environments of their own, which are installed once
and kept in the cache folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.rig.cache import Cache, content_key
from cluster.rig.needs import NotPossibleHere
from helpers import environments

CLIENTS = Path(__file__).parents[1] / "neuron_runtime" / "foreign_clients"
RUN_SECONDS = 120
"""A client that waits for an answer that never comes is ended then."""
_ENVIRONMENT = {
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
    "OPENAI_API_KEY": "any",
}
"""Nothing asks a server but the one of the test."""
_INSTALLED: dict[Callable[[], Path], Path | NotPossibleHere] = {}


def python_environment() -> Path:
    """The Python that has the clients. Raises NotPossibleHere."""
    return environments.python_environment("clients", CLIENTS / "requirements.txt") / "python"


def optimum_library() -> Path:
    """The Python that has optimum-neuron, without torch. Raises NotPossibleHere."""
    pins = CLIENTS.with_name("optimum_library") / "requirements.txt"
    return environments.python_environment("optimum", pins) / "python"


def node_modules() -> Path:
    """The folder of packages for Node. Raises NotPossibleHere."""
    pins = CLIENTS / "package.json"
    if not (shutil.which("node") and (npm := shutil.which("npm"))):
        raise NotPossibleHere("node or npm is not installed: install Node 20 or newer")
    version = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < 20:
        raise NotPossibleHere(f"Node {version} is too old: install Node 20 or newer")

    def build(folder: Path) -> None:
        shutil.copy(pins, folder)
        environments.install(
            [npm, "install", "--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund", "--fetch-retries=1"],
            folder,
        )

    return Cache.default().entry("clients", "node", content_key(pins), build) / "node_modules"


async def run(client: str, *arguments: str, folder: Path) -> None:
    """Runs a client to its end; it must succeed. `folder` is an empty one."""
    script = CLIENTS / client
    if script.suffix == ".py":
        command = [str(await asyncio.to_thread(_once, python_environment)), str(script)]
    else:
        # Node looks for packages beside the program.
        (folder / "node_modules").symlink_to(await asyncio.to_thread(_once, node_modules))
        command = ["node", shutil.copy(script, folder)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        cwd=folder,
        env=os.environ | _ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()


def _once(install: Callable[[], Path]) -> Path:
    """What `install` returned or raised the first time: a registry that fails costs its time once, not in each test."""
    if install not in _INSTALLED:
        try:
            _INSTALLED[install] = install()
        except NotPossibleHere as error:
            _INSTALLED[install] = error
    if isinstance(found := _INSTALLED[install], NotPossibleHere):
        raise found
    return found


def main() -> int:
    """`python -m helpers.foreign_clients`: installs what can be installed, and says what cannot."""
    failures = 0
    for install in (python_environment, optimum_library, node_modules):
        try:
            install()
        except NotPossibleHere as error:
            print(error, file=sys.stderr)
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(main())
