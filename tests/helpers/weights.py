"""Models in a local hub and a local S3 server, and a fetch in a process of its own. Used by tests of the weights."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.hub import Shelf
from helpers.tiny_model import write_tiny_model

CHUNK_BYTES = 2**16
NUM_READERS = 4


def write_model(folder: Path, **options: Any) -> Path:
    """A model of about 5 MB in four files, so about eighty chunks."""
    write_tiny_model(folder, num_shards=4, vocab_size=40_000, **options)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name, without hidden ones."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def shelf_with_model(root: Path) -> Shelf:
    write_model(root / "acme/model/main")
    return Shelf(root)


SCRIPT = """
    import sys
    from pathlib import Path
    from neuron_runtime.weights.fetching import fetch
    from neuron_runtime.weights.store import Store
    from neuron_runtime.weights.transfer import Tools, TransferLimits
    uri, folder, chunk_bytes, num_readers = sys.argv[1:]
    limits = TransferLimits(int(num_readers), int(chunk_bytes))
    found = fetch(uri, Store(Path(folder)), lambda amount: None, tools=Tools(limits=limits))
    import resource
    print(found.read_bytes, found.folder, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def start_fetch(
    uri: str, folder: Path, environment: Mapping[str, str], chunk_bytes: int = CHUNK_BYTES
) -> subprocess.Popen[str]:
    """Fetches in small chunks; prints the bytes read, the folder and the most memory in KiB."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), uri, str(folder), str(chunk_bytes), str(NUM_READERS)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
