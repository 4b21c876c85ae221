"""The adapters that somebody wants: entries of a list file, of `--lora-modules` and of `/v1/load_lora_adapter`.

A list file belongs to whoever serves the model: an operator mounts it, and replaces it as a whole. What a command or a
request names is kept in a file of the same form in the run directory, for a front end that replaces this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from neuron_runtime.console import say
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import model_uri

MAX_BYTES = 2**20
"""Of a list file; a ConfigMap has no more."""
MAX_ENTRIES = 256
"""Of a list file, as an operator writes it."""
KEPT_FILE = "adapters.json"
"""Of the run directory."""
MAX_NAME = 253
"""Characters of a name, as of names in Kubernetes."""
NAME_RULE = f"1 to {MAX_NAME} letters, digits and any of . _ : / @ -, beginning with a letter or digit"

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/@-]{{0,{MAX_NAME - 1}}}")


class Wanted(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One adapter, as somebody wants it."""

    name: str
    """What clients ask for."""
    uri: str
    digest: str = ""
    """What the adapter must be, as `AdapterFacts.digest`; empty: whatever is there."""
    source_digest: str = ""
    """Version of the source, as found by `inspect`; empty: today's."""
    parent: str = ""
    """The base model that `/v1/models` shows; empty: the first served name."""


class AdapterList(msgspec.Struct, frozen=True):
    adapters: tuple[Wanted, ...] = ()


def is_name(text: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(text) is not None


def by_name(wanted: Iterable[Wanted]) -> dict[str, Wanted]:
    return {one.name: one for one in wanted}


def keep(wanted: Mapping[str, Wanted], run_dir: Path) -> None:
    """Write what commands and requests want, in one piece."""
    path = run_dir / KEPT_FILE
    path.with_suffix(".new").write_bytes(msgspec.json.encode(AdapterList(tuple(wanted.values()))))
    os.replace(path.with_suffix(".new"), path)


def kept(run_dir: Path) -> dict[str, Wanted]:
    try:
        raw = (run_dir / KEPT_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    return by_name(msgspec.json.decode(raw, type=AdapterList).adapters)


class ListFile:
    """A list that somebody else writes. One that cannot be read changes nothing, and is reported once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: bytes | None = None
        self._complaint = ""

    def changed(self) -> dict[str, Wanted] | None:
        """What it says now; None: the same as before, or nothing that can be read."""
        try:
            raw = _read(self._path)
            if raw == self._raw:
                return None
            found = msgspec.json.decode(raw, type=AdapterList)
            if len(found.adapters) > MAX_ENTRIES:
                raise ValueError(f"it has {len(found.adapters)} adapters, at most {MAX_ENTRIES} are read")
        except (OSError, ValueError, RecursionError) as error:
            complaint = f"{self._path} is no list of adapters ({error}): the adapters stay as they are"
            if complaint != self._complaint:
                say(complaint)
            self._complaint = complaint
            return None
        self._raw, self._complaint = raw, ""
        return by_name(found.adapters)


def _read(path: Path) -> bytes:
    # Without waiting for whoever may write a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        raw = file.read(MAX_BYTES + 1) or b""
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return raw


def modules(given: Iterable[str], served_names: Iterable[str]) -> dict[str, Wanted]:
    """The values of `--lora-modules`, as in vLLM: `name=path`, or JSON with `name`, `path` and `base_model_name`.

    Raises InvalidConfig.
    """
    flag, names, wanted = "--lora-modules", frozenset(served_names), dict[str, Wanted]()
    for text in given:
        one = _module(text, flag)
        if not is_name(one.name):
            raise InvalidConfig(flag, f"{one.name!r} is no name of an adapter: a name is {NAME_RULE}")
        if one.name in names or one.name in wanted:
            raise InvalidConfig(flag, f"the name {one.name!r} is taken: choose another one")
        if one.parent and one.parent not in names:
            raise InvalidConfig(flag, f"base_model_name {one.parent!r} is none of the served names")
        wanted[one.name] = one
    return wanted


def _module(text: str, flag: str) -> Wanted:
    name, equals, path = text.partition("=")
    if equals and not text.lstrip().startswith("{"):
        return Wanted(name, model_uri(path))
    try:
        fields = msgspec.json.decode(text, type=dict[str, str])
        return Wanted(fields["name"], model_uri(fields["path"]), parent=fields.get("base_model_name", ""))
    except (msgspec.DecodeError, KeyError) as error:
        message = f'{text!r} must be name=path, or JSON such as {{"name": "sql", "path": "/adapters/sql"}}'
        raise InvalidConfig(flag, message) from error
