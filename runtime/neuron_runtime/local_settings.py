"""Settings of one machine that are no part of the configuration: where a serving process finds what it loads.

The command `serve` and its processes parse the same flags, declared here once; the supervisor passes them on.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self

from neuron_runtime.arguments import default_artifacts_dir, default_weights_dir
from neuron_runtime.flags import as_flag
from neuron_runtime.uris import store_address

RUNTIME_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Of vLLM: whether requests may load and unload adapters."""


@dataclass(frozen=True)
class Settings:
    """A field is a flag with its name."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Raises InvalidConfig with the flag."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def arguments(self) -> list[str]:
        """The command line that `of` reads."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [f"{as_flag(name)}={value}" for name, value in values if value not in ("", None)]


@dataclass(frozen=True)
class AdapterSettings(Settings):
    """Who says which adapters are served, besides the command line. Of the front end alone."""

    adapters_file: Path | None = None
    runtime_adapters: Literal["refuse", "allow"] = "refuse"


ONLY_NAMED = AdapterSettings()
"""Only the command line says it."""


@dataclass(frozen=True)
class LocalSettings(Settings):
    weights_dir: Path
    artifacts_dir: Path
    weights_store: str = ""
    artifacts_store: str = ""
    on_weights_miss: Literal["fetch", "fail"] = "fetch"
    on_artifact_miss: Literal["compile", "fail"] = "compile"

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Raises InvalidConfig with the flag."""
        check_stores(options)
        return super().of(options)


def check_stores(options: argparse.Namespace) -> None:
    """Raises InvalidConfig with the flag of a store that is no address of one."""
    for name in ("weights_store", "artifacts_store"):
        if address := getattr(options, name, ""):
            store_address(address, as_flag(name))


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    add_weights_flags(parser)
    add_artifact_flags(parser)
    parser.add_argument(
        "--on-weights-miss",
        choices=("fetch", "fail"),
        default="fetch",
        help="If no store has the model: fetch it from its source, or fail with code 16 (default: %(default)s)",
    )
    parser.add_argument(
        "--on-artifact-miss",
        choices=("compile", "fail"),
        default="compile",
        help="With --compile, if no store has the artifact: compile it, or fail with code 20 (default: %(default)s)",
    )


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapters-file",
        type=Path,
        metavar="FILE",
        help='List of adapters, {"adapters": [{"name": ..., "uri": ...}]}; looked at every second',
    )
    parser.add_argument(
        "--runtime-adapters",
        choices=("refuse", "allow"),
        default="allow" if os.environ.get(RUNTIME_VARIABLE, "").lower() in ("1", "true") else "refuse",
        help="Whether requests may load and unload adapters: from any folder that the server can read "
        f"(default: allow if ${RUNTIME_VARIABLE} is true, else refuse)",
    )


def add_weights_flags(parser: argparse.ArgumentParser) -> None:
    _add_places(parser, "weights", default_weights_dir(), "models", "fetched")


def add_artifact_flags(parser: argparse.ArgumentParser) -> None:
    also = ", what is compiled is copied there"
    _add_places(parser, "artifacts", default_artifacts_dir(), "compiled models", "compiled", also=also)


def _add_places(
    parser: argparse.ArgumentParser, name: str, folder: Path, contents: str, made: str, *, also: str = ""
) -> None:
    parser.add_argument(
        f"--{name}-dir",
        type=Path,
        metavar="DIR",
        default=folder,
        help=f"Store of {contents}: found there, or {made} into it "
        f"(default: neuron-serving/{name} in $XDG_CACHE_HOME, else in ~/.cache)",
    )
    parser.add_argument(
        f"--{name}-store",
        metavar="URI",
        default="",
        help=f"Store of {contents} in S3 (s3://bucket/prefix): what the folder lacks is copied from there{also}",
    )
