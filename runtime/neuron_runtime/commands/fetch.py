"""`neuron-runtime fetch URI DIR`: brings a model into a store, once, before anything serves it.

Prints the folder of the model. May be killed and run again at any time; see `weights.fetching`.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

from neuron_runtime import record
from neuron_runtime.arguments import model_uri
from neuron_runtime.console import AmountLine, bytes_text, say, seconds_text
from neuron_runtime.uris import FORMS, parse_uri


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uri", metavar="URI", help=FORMS)
    parser.add_argument("folder", type=Path, metavar="DIR", help="Store of models; `serve --weights-dir DIR` finds it")
    parser.add_argument(
        "--digest", default="", metavar="DIGEST", help="Fetch this version, as found by `inspect` (default: today's)"
    )
    record.add_flag(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, began: float) -> record.Record:
    from neuron_runtime.weights.fetching import fetch  # noqa: PLC0415
    from neuron_runtime.weights.store import Store  # noqa: PLC0415

    # As the first process of a container, this one would otherwise ignore SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    uri = model_uri(options.uri)
    parse_uri(uri, "URI")
    line = AmountLine(uri)
    found = fetch(
        uri, Store(options.folder), lambda amount: line(amount.done_bytes, amount.total_bytes), options.digest
    )
    seconds = time.monotonic() - began
    if found.read_bytes:
        say(f"{uri}: {bytes_text(found.num_bytes)} in {seconds_text(seconds)}")
    else:
        say(f"{uri}: {bytes_text(found.num_bytes)}, nothing to fetch")
    print(found.folder)
    stored = record.StoredWeights(digest=found.digest, bytes=found.num_bytes, read_bytes=found.read_bytes)
    return record.success("fetch", seconds=seconds, weights=stored)
