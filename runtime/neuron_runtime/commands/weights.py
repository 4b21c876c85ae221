"""`neuron-runtime weights ls|verify|prune DIR`, and the same of `artifacts`: looks after a store."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_runtime import record
from neuron_runtime.console import AmountLine, bytes_text, say
from neuron_runtime.errors import FatalError

if TYPE_CHECKING:
    from neuron_runtime.weights.store import Store

DEFAULT_UNUSED_DAYS = 30.0


@dataclass(frozen=True)
class Contents:
    """What a store holds, in the words of the commands."""

    name: str
    """Of the command."""
    noun: str
    work: str
    """What makes one."""
    made: str
    key: str
    open: Callable[[Path], Store]


def _models(folder: Path) -> Store:
    from neuron_runtime.weights.store import Store  # noqa: PLC0415

    return Store(folder)


def _artifacts(folder: Path) -> Store:
    from neuron_runtime.artifacts.store import artifact_store  # noqa: PLC0415

    return artifact_store(folder)


WEIGHTS = Contents("weights", "model", "download", "fetched", "DIGEST", _models)
ARTIFACTS = Contents("artifacts", "artifact", "compilation", "compiled", "KEY", _artifacts)


def add_commands(parser: argparse.ArgumentParser, contents: Contents = WEIGHTS) -> None:
    commands = parser.add_subparsers(dest=contents.name, required=True, metavar="COMMAND")
    noun, work, made = contents.noun, contents.work, contents.made

    def add(name: str, run: Callable[[argparse.Namespace, Store], None], meaning: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
        command.add_argument("folder", type=Path, metavar="DIR", help=f"Store of {noun}s")
        record.add_flag(command)
        command.set_defaults(look_after=run)
        return command

    listing = add("ls", _ls, f"list the {noun}s of a store and unfinished {work}s")
    listing.add_argument("--json", action="store_true", help="Print a JSON list")
    add("verify", _verify, f"compare the contents of every file with the checksum from when it was {made}")
    pruning = add("prune", _prune, f"delete {noun}s that nobody uses, and {work}s abandoned for a day")
    pruning.add_argument(
        "--keep", nargs="+", action="extend", default=[], metavar=contents.key, help="Mark these as used now"
    )
    pruning.add_argument(
        "--unused-days",
        type=_days,
        default=DEFAULT_UNUSED_DAYS,
        metavar="N",
        help=f"Delete what was neither {made}, found nor marked for so long (default: %(default)g)",
    )
    pruning.add_argument("--dry-run", action="store_true", help="Only print what would be deleted; mark nothing")
    parser.set_defaults(run=run, contents=contents)


def run(options: argparse.Namespace, began: float) -> record.Record:
    contents: Contents = options.contents
    options.look_after(options, contents.open(options.folder))
    return record.success(contents.name, seconds=time.monotonic() - began)


def _ls(options: argparse.Namespace, store: Store) -> None:
    rows = list(_rows(store))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    cells = [(options.contents.key, "SIZE", "LAST USED", "STATE", "SOURCE")]
    cells += [
        (row["name"], bytes_text(row["bytes"]), row["used"].partition("T")[0], row["state"], row["uri"]) for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _rows(store: Store) -> Iterator[dict[str, Any]]:
    from neuron_runtime.weights.store import Damaged, bytes_in  # noqa: PLC0415

    for key in store.all_keys():
        try:
            entry = store.read(key)
        except Damaged as error:
            folder = store.folder / key
            yield _row(key, "damaged", bytes_in(folder), folder.lstat().st_mtime) | {"problem": error.reason}
            continue
        if entry is not None:
            yield _row(key, "complete", entry.manifest.num_bytes, entry.used, entry.manifest.uri)
    for partial in store.partials():
        yield _row(partial.key, "partial", partial.num_bytes, partial.written)


def _row(name: str, state: str, num_bytes: int, used: float, uri: str = "") -> dict[str, Any]:
    then = datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds")
    return {"name": name, "state": state, "bytes": num_bytes, "used": then, "uri": uri}


def _verify(options: argparse.Namespace, store: Store) -> None:
    from neuron_runtime.weights.store import Damaged  # noqa: PLC0415

    keys, num_damaged = store.all_keys(), 0
    for key in keys:
        try:
            entry = store.read(key)
            if entry is None:
                continue  # deleted meanwhile
            wrong = entry.verify(_Progress(key, entry.manifest.num_bytes))
        except Damaged as error:
            wrong = [error.reason]
        num_damaged += bool(wrong)
        for problem in wrong:
            print(f"{key}: {problem}")
        if not wrong:
            print(f"{key}: intact")
    if num_damaged:
        message = f"{num_damaged} of {len(keys)} {store.kind.noun}s in {store.folder} are damaged"
        raise FatalError(store.kind.damaged, f"{message}; delete them: they are {options.contents.made} again")


class _Progress:
    """Counts the bytes of one model and shows them."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._line = AmountLine(title)
        self._done_bytes = 0
        self._total_bytes = total_bytes

    def __call__(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._line(self._done_bytes, self._total_bytes)


def _prune(options: argparse.Namespace, store: Store) -> None:
    from neuron_runtime.weights.store import DAY_SECONDS, check_key, prune  # noqa: PLC0415

    for digest in options.keep:
        check_key(digest)
    num_bytes = 0
    for pruned in prune(store, options.keep, options.unused_days * DAY_SECONDS, dry_run=options.dry_run):
        num_bytes += pruned.num_bytes
        did = "would delete" if options.dry_run else "deleted"
        print(f"{did} {pruned.name}: {bytes_text(pruned.num_bytes)}, {pruned.why}", flush=True)
    say(f"{store.folder}: {bytes_text(num_bytes)} {'would be' if options.dry_run else 'are'} free again")


def _days(text: str) -> float:
    days = float(text)
    if not 0 <= days <= 36_500:
        raise argparse.ArgumentTypeError("must be 0 to 36500")
    return days
