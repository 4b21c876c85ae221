"""Artifacts that nobody compiled, published in a local store."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from neuron_runtime.artifacts.key import key_of
from neuron_runtime.artifacts.store import DOCUMENT, Artifact
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.weights.store import Entry, Manifest, Store, StoredFile

COVER = {"version": 1, "model": "ab", "shapes": {"rows": [1, 8], "length": 64}}
GRAPHS = {"one.bin": b"graph", "weights/tp0.bin": b"shard"}


def places(
    artifacts: Path, store: str = "", *, on_miss: Literal["compile", "fail"] = "compile", weights: Path = Path("none")
) -> LocalSettings:
    """Settings with this store of artifacts."""
    return LocalSettings(weights, artifacts, artifacts_store=store, on_artifact_miss=on_miss)


def publish(store: Store, cover: Mapping[str, Any], graphs: Mapping[str, bytes], created: float = 0.0) -> Entry:
    store.prepare()
    key = key_of(cover)
    document = msgspec.json.encode(Artifact(cover=dict(cover), tools={}, graphs=(), seconds=1.0, peak_bytes=1))
    with store.lock(key, "artifact") as work:
        files = []
        for name, raw in {**graphs, DOCUMENT: document}.items():
            path = work / "files" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(raw)
            files.append(StoredFile(name, len(raw), hashlib.sha256(raw).hexdigest()))
        manifest = Manifest(digest=key, uri="", created=created or time.time(), files=tuple(files))
        return store.publish(key, work, manifest)
