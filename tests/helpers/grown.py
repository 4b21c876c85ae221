"""Makes a model as large as a test needs, without changing its answers. Used by tests of the weights and by hubs in a
cluster: `python -m helpers.grown FILE BYTES`. It needs the standard library only."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NAME = "padding.rotary_emb.inv_freq"
"""Loaders skip tensors with this ending."""


def grow(path: Path, num_bytes: int, block: bytes = bytes(2**20)) -> None:
    """Add a tensor of `num_bytes` to a safetensors file; its data are copies of a block."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header[NAME] = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [len(data), len(data) + num_bytes]}
    new = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(new).to_bytes(8, "little") + new + data)
        for begin in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - begin])


if __name__ == "__main__":
    grow(Path(sys.argv[1]), int(sys.argv[2]), os.urandom(2**20))
