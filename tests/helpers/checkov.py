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
from helpers.answers import answer
from helpers.environments import python_environment

PINS = Path(__file__).parents[1] / "cluster" / "build" / "checkov" / "requirements.txt"


def complaints(objects: Mapping[str, Sequence[Any]], folder: Path) -> dict[str, set[tuple[str, str]]]:
    """Kinds of objects and identifiers of the checks that they fail, for each of several lists of objects: one run,
    because the program takes seconds to start. `folder` is an empty one. Raises NotPossibleHere."""
    program = python_environment("checkov", PINS) / "checkov"
    flags = ("--framework", "kubernetes", "--compact", "--output", "json", "--skip-download", "--soft-fail")
    # A document for each object, with the keys in lines of their own: the program counts lines.
    lists = {
        f"{name}.json": json.dumps({"kind": "List", "apiVersion": "v1", "items": some}, indent=1)
        for name, some in objects.items()
    }

    def report_on_lists() -> str:
        for name, text in lists.items():
            (folder / name).write_text(text)
        command = [program, "--directory", folder, *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    report = json.loads(answer("checkov", report_on_lists, PINS, *flags, json.dumps(lists)))
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
