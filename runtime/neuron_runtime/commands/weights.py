"""`neuron-runtime weights ls|verify|prune DIR`, and the same of `artifacts`: looks after a store."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_runtime import record
from neuron_runtime.artifacts import store as artifacts
from neuron_runtime.console import AmountLine, bytes_text, printable, say
from neuron_runtime.errors import FatalError
from neuron_runtime.weights.fetching import open_remote
from neuron_runtime.weights.store import DAY_SECONDS, MODELS, EntryKind, ListedEntry, Store, check_key

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore

    AnyStore = Store | RemoteStore

DEFAULT_UNUSED_DAYS = 30.0


@dataclass(frozen=True)
class Contents:
    """What a store holds, in the words of the commands."""

    kind: EntryKind
    made: str
    key: str


WEIGHTS = Contents(MODELS, "fetched", "DIGEST")
ARTIFACTS = Contents(artifacts.ARTIFACTS, "compiled", "KEY")


def add_commands(parser: argparse.ArgumentParser, contents: Contents = WEIGHTS) -> None:
    commands = parser.add_subparsers(dest="task", required=True, metavar="COMMAND")
    noun, work, made = contents.kind.noun, contents.kind.work, contents.made

    def add(name: str, run: Callable[[argparse.Namespace, AnyStore], None], meaning: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
        command.add_argument("store", metavar="DIR", help=f"Store of {noun}s: a folder or s3://bucket/prefix")
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


def run(options: argparse.Namespace) -> None:
    address, kind = options.store, options.contents.kind
    store: AnyStore = open_remote(address, "DIR", kind) if "://" in address else Store(Path(address), kind)
    options.look_after(options, store)


def _ls(options: argparse.Namespace, store: AnyStore) -> None:
    rows = list(store.rows())
    if options.json:
        print(json.dumps([_row(row) for row in rows], indent=2))
        return
    cells = [(options.contents.key, "SIZE", "LAST USED", "STATE", "SOURCE")]
    for row in rows:
        used = _time(row.used).partition("T")[0]
        cells.append((printable(row.name), bytes_text(row.num_bytes), used, row.state, printable(row.uri)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _row(row: ListedEntry) -> dict[str, Any]:
    shown = {"name": row.name, "state": row.state, "bytes": row.num_bytes, "used": _time(row.used), "uri": row.uri}
    return shown | ({"problem": row.problem} if row.problem else {})


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _verify(options: argparse.Namespace, store: AnyStore) -> None:
    num_entries = num_damaged = 0
    for key, wrong in store.verify(_Progress):
        num_entries += 1
        num_damaged += bool(wrong)
        for problem in wrong or ["intact"]:
            print(printable(f"{key}: {problem}"), flush=True)
    if num_damaged:
        message = f"{num_damaged} of {num_entries} {store.kind.noun}s in {store.address} are damaged"
        raise FatalError(store.kind.damaged, f"{message}; delete them: they are {options.contents.made} again")


class _Progress:
    """Counts the bytes of one entry and shows them. Called by several threads."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._line = AmountLine(title)
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self._line(self._done_bytes, self._total_bytes)


def _prune(options: argparse.Namespace, store: AnyStore) -> None:
    for digest in options.keep:
        check_key(digest)
    num_bytes = 0
    for pruned in store.prune(options.keep, options.unused_days * DAY_SECONDS, dry_run=options.dry_run):
        num_bytes += pruned.num_bytes
        did = "would delete" if options.dry_run else "deleted"
        print(printable(f"{did} {pruned.name}: {bytes_text(pruned.num_bytes)}, {pruned.why}"), flush=True)
    say(f"{store.address}: {bytes_text(num_bytes)} {'would be' if options.dry_run else 'are'} free again")


def _days(text: str) -> float:
    days = float(text)
    if not 0 <= days <= 36_500:
        raise argparse.ArgumentTypeError("must be 0 to 36500")
    return days
