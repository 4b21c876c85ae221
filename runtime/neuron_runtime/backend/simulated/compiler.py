"""Compiles nothing, slowly: takes the time and memory of a compiler for each size, and leaves a small file.

Everything around compiling (Jobs, stores, keys, what happens when memory runs out) can be tried with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from neuron_runtime.backend.simulated.options import Options
from neuron_runtime.backend_protocol import Compiler, CompileUnit, Needs
from neuron_runtime.core import BackendLimits

FORMAT = 1
BLOCK_BYTES = 2**24
"""Memory is taken in such blocks, so that the time is spread over them."""


class SimulatedCompiler(Compiler):
    """See `backend_protocol.Compiler`."""

    def __init__(self, limits: BackendLimits, options: Options) -> None:
        self._limits = limits
        self._options = options

    @property
    def needs(self) -> Needs:
        limits, options = self._limits, self._options
        return Needs(
            shapes={
                "decode": list(options.decode_buckets),
                "prefill": list(options.prefill_buckets),
                "rows": limits.max_rows,
                "length": limits.max_model_length,
                "stepTokens": limits.max_step_tokens,
                "blockSize": limits.block_size,
                "blocks": limits.num_blocks,
            },
            settings={"layout": limits.layout, "prefill": options.prefill, "sampling": limits.sampling},
            libraries={"simulated": str(FORMAT)},
            target={"device": "simulated", "cores": 1, "ranks": 1},
        )

    def tools(self) -> Mapping[str, str]:
        return {"simulated": str(FORMAT)}

    def graphs(self) -> Sequence[CompileUnit]:
        return [CompileUnit(name, partial(self._compile, name)) for name in self._names()]

    def check(self, folder: Path) -> None:
        for name in self._names():
            graph = msgspec.json.decode((folder / _file(name)).read_bytes())
            if graph != name:
                raise ValueError(f"{_file(name)} has the graph {graph!r}")

    def _names(self) -> Iterator[str]:
        for phase, unit, buckets in (
            ("decode", "rows", self._options.decode_buckets),
            ("prefill", "tokens", self._options.prefill_buckets),
        ):
            yield from [f"{phase} of {bucket} {unit}" for bucket in buckets] or [phase]

    def _compile(self, name: str, folder: Path) -> None:
        options = self._options
        blocks = [BLOCK_BYTES] * (options.compile_bytes // BLOCK_BYTES) + [options.compile_bytes % BLOCK_BYTES]
        held = []
        for num_bytes in blocks:
            held.append(b"\1" * num_bytes)
            time.sleep(options.compile_seconds / len(blocks))
        (folder / _file(name)).write_bytes(msgspec.json.encode(name))


def _file(name: str) -> str:
    return f"{name.replace(' ', '-')}.json"
