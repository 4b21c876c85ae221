"""The memory that a session of processes uses now, from /proc. Called by `compiling` while a compiler runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROC = Path("/proc")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
SESSION = 3
"""Index among the fields of `stat` behind the name: state, parent, group, session."""


def session_bytes(session: int, proc: Path = PROC) -> int:
    """Memory of all its processes together; a page that several share counts once. 0 where there is no /proc."""
    total = 0
    for name in os.listdir(proc) if proc.is_dir() else ():
        if not name.isdigit():
            continue
        try:
            stat = (proc / name / "stat").read_bytes()
            if int(stat.rpartition(b")")[2].split()[SESSION]) != session:
                continue
            share = _PSS.search((proc / name / "smaps_rollup").read_bytes())
        except OSError:
            continue  # it ended meanwhile
        total += int(share[1]) * 1024 if share else 0
    return total
