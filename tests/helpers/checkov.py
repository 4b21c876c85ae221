"""checkov, a checker of manifests of another maker: what it complains about. Used by the tests of the chart.

It has too many dependencies for the project's own environment, so it is installed apart, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.rig.needs import NotPossibleHere
from helpers.environments import python_environment

PINS = Path(__file__).parents[1] / "cluster" / "build" / "checkov" / "requirements.txt"


def complaints(objects: Mapping[str, Sequence[Any]], folder: Path) -> dict[str, set[tuple[str, str]]]:
    """Kinds of objects and identifiers of the checks that they fail, for each of several lists of objects: one run,
    because the program takes seconds to start. `folder` is an empty one. Raises NotPossibleHere."""
    for name, some in objects.items():
        # A document for each object, with the keys in lines of their own: the program counts lines.
        (folder / f"{name}.json").write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": some}, indent=1))
    program = python_environment("checkov", PINS) / "checkov"
    command = [program, "--directory", folder, "--framework", "kubernetes", "--compact", "--output", "json"]
    done = subprocess.run([*command, "--skip-download", "--soft-fail"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert not report["results"]["parsing_errors"], report["results"]["parsing_errors"]
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in objects}
    for check in report["results"]["failed_checks"]:
        found[Path(check["file_path"]).stem].add((check["resource"].partition(".")[0], check["check_id"]))
    return found


if __name__ == "__main__":
    try:
        python_environment("checkov", PINS)
    except NotPossibleHere as error:
        sys.exit(str(error))
