"""Environments of Python programs that the project does not depend on: clients and checkers of other makers.

Each is installed once from a file of pins and kept in the cache folder. Used by the helpers that run these programs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.rig.cache import Cache, content_key
from cluster.rig.image_vllm import write_alias
from cluster.rig.needs import NotPossibleHere

INSTALL_SECONDS = 240


def python_environment(name: str, pins: Path, *, alias: str = "") -> Path:
    """The folder of programs of an environment that has the packages of `pins`. Raises NotPossibleHere.

    alias: `name==version` by which a program asks for a package whose wheel has another name.
    """
    uv = [str(Path(sys.executable).parent / "uv")]

    def build(folder: Path) -> None:
        install([*uv, "venv", "-q", "--relocatable", "--python", sys.executable, str(folder / "venv")])
        python = str(folder / "venv" / "bin" / "python")
        install([*uv, "pip", "install", "-q", "--no-deps", "--compile-bytecode", "--python", python, "-r", str(pins)])
        if alias:
            (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
            write_alias(packages, alias)

    folder = Cache.default().entry(
        name, "python", content_key(pins, *filter(None, [alias]), sys.version, sys.base_prefix), build
    )
    return folder / "venv" / "bin"


def install(command: Sequence[str], folder: Path | None = None) -> None:
    """Runs an installer, twice if the registry fails. Raises NotPossibleHere."""
    for last in (False, True):
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=INSTALL_SECONDS)
            return
        except subprocess.TimeoutExpired as error:
            raise NotPossibleHere(f"{command[0]} did not end within {INSTALL_SECONDS} s: try again") from error
        except subprocess.CalledProcessError as error:
            if last:
                message = f"{command[0]} cannot install programs of other makers: {error.stderr.decode()[-500:]}"
                raise NotPossibleHere(message) from error
