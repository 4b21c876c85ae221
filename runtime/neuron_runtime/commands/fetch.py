"""`neuron-runtime fetch URI DIR`: brings a model or an adapter into a store, once, before anything serves it.

The store is a folder or a prefix in S3. Prints where the model is. May be killed and run again at any time; see
`weights.fetching`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from neuron_runtime import record
from neuron_runtime.adapters.peft import reading
from neuron_runtime.console import AmountLine, bytes_text, say, seconds_text
from neuron_runtime.flags import model_uri
from neuron_runtime.uris import FORMS, parse_uri
from neuron_runtime.weights.fetching import ADAPTER, MODEL, Fetched, Parts, fetch, open_remote, supply, with_recipe
from neuron_runtime.weights.store import Store

if TYPE_CHECKING:
    from neuron_runtime.weights.transfer import Amount


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uri", metavar="URI", help=FORMS)
    parser.add_argument(
        "store",
        metavar="DIR",
        help="Store of models: a folder (for `serve --weights-dir`) or s3://bucket/prefix (for `--weights-store`)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="Folder on the way to a store in S3; kept, so that a killed fetch resumes (default: a temporary one)",
    )
    parser.add_argument(
        "--digest", default="", metavar="DIGEST", help="Fetch this version, as found by `inspect` (default: today's)"
    )
    parser.add_argument("--adapter", action="store_true", help="URI is a LoRA adapter; it is stored beside models")
    record.add_flag(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> record.StoredWeights:
    began = time.monotonic()
    uri = model_uri(options.uri)
    parse_uri(uri, "URI")
    with reading() if options.adapter else nullcontext():
        entry = _fetched(uri, options, ADAPTER if options.adapter else with_recipe(MODEL))
    if entry.read_bytes:
        say(f"{uri}: {bytes_text(entry.num_bytes)} in {seconds_text(time.monotonic() - began)}")
    else:
        say(f"{uri}: {bytes_text(entry.num_bytes)}, nothing to fetch")
    print(entry.address)
    return record.StoredWeights(digest=entry.digest, bytes=entry.num_bytes, read_bytes=entry.read_bytes)


def _fetched(uri: str, options: argparse.Namespace, parts: Parts) -> Fetched:
    if "://" not in options.store:
        store = Store(Path(options.store))
        found = fetch(uri, store, _shown(uri), options.digest, parts=parts)
        if parts is ADAPTER and not found.read_bytes and _is_damaged(found.folder, store):
            store.prepare()
            with store.lock(found.folder.name, uri):
                if found.folder.exists():
                    store.discard(found.folder.name)
            found = fetch(uri, store, _shown(uri), options.digest, parts=parts)
        return found
    remote = open_remote(options.store, "DIR")
    with ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(TemporaryDirectory(prefix="neuron-fetch-")))
        upload = _shown(f"{uri} to {remote.address}")
        return supply(uri, remote, Store(scratch), _shown(uri), upload, digest=options.digest, parts=parts)


def _is_damaged(folder: Path, store: Store) -> bool:
    """Whether an entry has other contents than were fetched: who serves adapters reads them all, and refuses it."""
    entry = store.read(folder.name) if folder.parent == store.folder else None
    wrong = entry.verify(lambda num_bytes: None) if entry is not None else []
    for one in wrong:
        say(f"{folder}: {one}: fetching it again")
    return bool(wrong)


def _shown(title: str) -> Callable[[Amount], None]:
    line = AmountLine(title)
    return lambda amount: line(amount.done_bytes, amount.total_bytes)
