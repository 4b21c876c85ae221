"""`neuron-runtime inspect URI`: prints facts about a model without loading it. The operator runs it in a Job."""

from __future__ import annotations

import argparse

from neuron_runtime import record
from neuron_runtime.arguments import model_uri
from neuron_runtime.engine.backends import PACKAGES
from neuron_runtime.uris import FORMS


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
    parser.add_argument("--json", action="store_true", help="Print the facts as JSON")
    record.add_flag(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> record.ModelFacts:
    from neuron_runtime.inspection import facts_as_json, facts_as_text, inspect_model  # noqa: PLC0415 - brings the backends

    facts = inspect_model(model_uri(options.uri), options.backend, options.application_class)
    print(facts_as_json(facts) if options.json else facts_as_text(options.uri, facts))
    return facts
