"""`neuron-runtime inspect URI`: prints facts about a model, or with --adapter-of about an adapter, without loading it.

The operator runs it in a Job.
"""

from __future__ import annotations

import argparse
from typing import get_args

from neuron_runtime import record
from neuron_runtime.adapters.peft import TARGETS, AdapterRules
from neuron_runtime.config import AdapterOptions
from neuron_runtime.engine.backends import PACKAGES, package_of
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.flags import model_uri
from neuron_runtime.quantization import Quantizing
from neuron_runtime.uris import FORMS

DEFAULT_MAX_RANK = AdapterOptions().max_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uri", metavar="URI", help=FORMS)
    parser.add_argument(
        "--backend",
        choices=sorted({*PACKAGES, "vllm"}),
        default="",
        help="The backend that must support it; default: any. vllm: only the configuration is read, for that engine",
    )
    parser.add_argument(
        "--application-class",
        metavar="CLASS",
        default="",
        help="Take the model's architecture as one that this class runs with nxdi, see the flag of `serve`",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantizing),
        default="auto",
        help="As of `serve`: with --backend, what the weights have to be converted to (default: %(default)s)",
    )
    parser.add_argument(
        "--digest", metavar="DIGEST", default="", help="Of the model, as an earlier `inspect` found it (default: any)"
    )
    parser.add_argument(
        "--eagle-head", action="store_true", help="URI is an EAGLE head, which makes drafts and has no tokenizer"
    )
    parser.add_argument(
        "--adapter-of", metavar="MODEL_URI", default="", help="URI is a LoRA adapter: whether it fits this model"
    )
    parser.add_argument(
        "--max-rank", type=int, metavar="N", default=DEFAULT_MAX_RANK, help="Of an adapter (default: %(default)s)"
    )
    parser.add_argument(
        "--targets",
        type=_targets,
        default=(),
        metavar="NAMES",
        help=f"The projections that an adapter may change, with commas between them (default: {','.join(TARGETS)})",
    )
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="Of an adapter: do not try it, because the model's is set"
    )
    parser.add_argument("--json", action="store_true", help="Print the facts as JSON")
    record.add_flag(parser)
    parser.set_defaults(run=run)


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if others := [name for name in names if name not in TARGETS]:
        raise argparse.ArgumentTypeError(f"{', '.join(others)}: choose among {', '.join(TARGETS)}")
    return names


def _min_rank(backend: str) -> int:
    """The smallest rank that a backend computes; empty: any. Raises InvalidConfig if it serves no adapters."""
    if not backend:
        return 1
    smallest = package_of(backend).MIN_ADAPTER_RANK if backend in PACKAGES else 0
    if not smallest:
        raise InvalidConfig("--backend", f"{backend} serves no adapters: name another one, or leave it out")
    return smallest


def run(options: argparse.Namespace) -> record.ModelFacts | record.AdapterFacts:
    from neuron_runtime import inspection  # noqa: PLC0415 - brings the backends

    if options.adapter_of:
        rules = AdapterRules(options.max_rank, options.targets, _min_rank(options.backend))
        adapter = inspection.inspect_adapter(
            model_uri(options.uri),
            model_uri(options.adapter_of),
            rules,
            tries_template=not options.ignore_chat_template,
        )
        print(inspection.facts_as_json(adapter) if options.json else inspection.adapter_as_text(options.uri, adapter))
        return adapter
    uri = model_uri(options.uri)
    facts = (
        inspection.inspect_head(uri)
        if options.eagle_head
        else inspection.inspect_model(
            uri, options.backend, options.application_class, options.quantization, options.digest
        )
    )
    print(inspection.facts_as_json(facts) if options.json else inspection.facts_as_text(options.uri, facts))
    return facts
