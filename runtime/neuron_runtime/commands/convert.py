"""`neuron-runtime convert URI DIR`: converts the weights of a model for a backend, once, before anything serves it.

The result is a model in the same store, which `serve --converted DIGEST` reads. May be killed and run again at any
time; see `conversion`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, get_args

from neuron_runtime import record
from neuron_runtime.backend.torch.before_import import check_room_for_torch
from neuron_runtime.config import ModelSource
from neuron_runtime.console import AmountLine, bytes_text, say, seconds_text
from neuron_runtime.engine.backends import PACKAGES
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.flags import model_uri
from neuron_runtime.quantization import Quantizing
from neuron_runtime.uris import FORMS, parse_uri
from neuron_runtime.weights.fetching import open_remote
from neuron_runtime.weights.store import Store, check_key

if TYPE_CHECKING:
    from neuron_runtime.weights.transfer import Amount


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uri", metavar="URI", help=FORMS)
    parser.add_argument(
        "store",
        metavar="DIR",
        help="Store of models, with the model unless it is read in place: a folder or s3://bucket/prefix",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="Folder on the way to a store in S3; kept, so that a killed conversion resumes (default: a temporary one)",
    )
    parser.add_argument(
        "--digest",
        default="",
        metavar="DIGEST",
        help="Of the unconverted model, as found by `inspect` (default: today's)",
    )
    parser.add_argument(
        "--converted",
        default="",
        metavar="DIGEST",
        help="Of the converted model, as found by `inspect`; another one fails with `ChecksumMismatch` (default: any)",
    )
    parser.add_argument(
        "--backend", choices=sorted(PACKAGES), default="nxdi", help="Which is to compute it (default: %(default)s)"
    )
    parser.add_argument(
        "-q",
        "--quantization",
        choices=get_args(Quantizing),
        default="auto",
        help="As of `serve` (default: %(default)s)",
    )
    record.add_flag(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> record.Converted:
    with _failing():
        check_room_for_torch()
    from neuron_runtime.conversion.converting import convert  # noqa: PLC0415 - torch takes seconds to import

    began = time.monotonic()
    uri = model_uri(options.uri)
    parse_uri(uri, "URI")
    if options.converted:
        check_key(options.converted)
    remote = open_remote(options.store, "DIR") if "://" in options.store else None
    with ExitStack() as stack:
        stack.enter_context(_failing())
        folder = Path(options.store)
        if remote is not None:
            folder = options.scratch or Path(stack.enter_context(TemporaryDirectory(prefix="neuron-convert-")))
        converted, address = convert(
            ModelSource(uri=uri, digest=options.digest),
            Store(folder),
            _shown,
            backend=options.backend,
            wanted=options.quantization,
            pinned=options.converted,
            remote=remote,
        )
    weights, figures = converted
    size, took = bytes_text(weights.bytes), seconds_text(time.monotonic() - began)
    say(f"{uri}: {size} in {took}" if weights.read_bytes else f"{uri}: {size}, nothing to convert")
    say(f"the outputs of linear layers differ by {figures.layer_error:.2%} at most, on random activations")
    if figures.perplexity is None or figures.converted_perplexity is None:
        say(f"no perplexity was computed: {figures.unmeasured}")
    else:
        say(f"perplexity on a short text: {figures.perplexity:.3f}, then {figures.converted_perplexity:.3f}")
    say(f"serve it with: neuron-runtime serve {uri} --converted {weights.digest}")
    print(address)
    return converted


LASTING = frozenset(
    {
        ExitCode.INVALID_ENGINE_CONFIG,
        ExitCode.UNSUPPORTED_ARCHITECTURE,
        ExitCode.INVALID_MODEL,
        ExitCode.DEVICE_OUT_OF_MEMORY,
    }
)
"""Who waits for the conversion has one reason for all of these: the next attempt would end the same way."""


@contextmanager
def _failing() -> Iterator[None]:
    """What cannot be converted ends with CONVERSION_FAILED. Errors of stores and sources keep their codes."""
    try:
        yield
    except FatalError as error:
        if error.exit_code not in LASTING:
            raise
        raise FatalError(ExitCode.CONVERSION_FAILED, str(error)) from error


def _shown(title: str) -> Callable[[Amount], None]:
    line = AmountLine(title)
    return lambda amount: line(amount.done_bytes, amount.total_bytes)
