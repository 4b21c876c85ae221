"""What tells apart models that are read in place: their digest is one of names, types and shapes, which all fine-tunes
of a model share, and a converted model is found by its digest alone.

Called by `inspection` and `converting`: both must come to the same hash, on any machine. It takes seconds: whole files
besides the weights, and of each tensor a few parts.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path

from neuron_runtime.checkpoint import QUANTIZATION_FILE, Checkpoint, InvalidModel, TensorInfo
from neuron_runtime.uris import ModelInPlace, parse_uri
from neuron_runtime.weights.selection import is_small, is_small_folder

PART_BYTES = 4096
NUM_PARTS = 3
"""Of each tensor: at the begin, in the middle and at the end."""


def contents_of(uri: str, checkpoint: Checkpoint) -> str:
    """A hash of what a converted model has of this one. "": the source's digest is one of the contents."""
    if not isinstance(parse_uri(uri), ModelInPlace):
        return ""
    contents, path = hashlib.sha256(), checkpoint.folder
    try:
        # What that file says is in the source's digest, where it is read at all; the converted model does not have it.
        for name in sorted(small_files(checkpoint.folder) - {QUANTIZATION_FILE}):
            path = checkpoint.folder / name
            contents.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        with ExitStack() as stack:
            files = {}
            for name, tensor in sorted(checkpoint.tensors.items()):
                path = checkpoint.folder / tensor.file
                if tensor.file not in files:
                    files[tensor.file] = stack.enter_context(path.open("rb", buffering=0)).fileno()
                contents.update(f"{name} {tensor.num_bytes}\n".encode())
                for begin, end in _parts(tensor):
                    contents.update(os.pread(files[tensor.file], end - begin, begin))
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from error
    return contents.hexdigest()


def small_files(folder: Path) -> set[str]:
    """Names of the files of a model besides its weights."""
    names = {entry.name for entry in os.scandir(folder) if entry.is_file()}
    for inner in (entry.name for entry in os.scandir(folder) if is_small_folder(entry.name) and entry.is_dir()):
        names |= {f"{inner}/{entry.name}" for entry in os.scandir(folder / inner) if entry.is_file()}
    return set(filter(is_small, names))


def _parts(tensor: TensorInfo) -> list[tuple[int, int]]:
    if tensor.num_bytes <= NUM_PARTS * PART_BYTES:
        return [(tensor.begin, tensor.end)]
    last = tensor.end - PART_BYTES
    step = (last - tensor.begin) // (NUM_PARTS - 1)
    return [(begin, begin + PART_BYTES) for begin in (*range(tensor.begin, last - step + 1, step), last)]
