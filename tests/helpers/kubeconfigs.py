"""Kubeconfig files for tests that connect the operator's client to a server of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, server: str, user: dict[str, Any] | None = None, **cluster: str) -> str:
    """Write a kubeconfig for `server` to `path`, which is returned; `user` holds the credentials."""
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
