"""Kubeconfig files for tests that connect the operator's client to their own server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, server: str, user: dict[str, Any] | None = None, **cluster: str) -> str:
    """Writes a kubeconfig for `server` with the credentials `user` to `path` and returns `path`."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "test", "user": user or {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(document))
    return str(path)
