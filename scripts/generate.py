"""Generate files and marked parts of pages from declarations in the code.

`make generate` runs this; `make lint` runs it with --check, which only reports differences. A generated part of a page
is between `<!-- generated: NAME -->` and `<!-- end -->`. TARGETS lists all of them; their render functions, in
`scripts/*_tables.py` or next to the declarations, return the text without markers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import engine_tables
import nxdi_tables
import operator_tables
import runtime_tables
import sizing_tables
from bench_tables import published_step_times
from metric_tables import model_metrics
from neuron_operator.api import schema
from neuron_operator.api.adapter import AdapterSpec, AdapterStatus
from neuron_operator.api.reasons import ADAPTER_CONDITIONS, CONDITIONS, TROUBLESHOOTING
from neuron_runtime.apis.anthropic.body import MessagesBody
from neuron_runtime.apis.responses.body import ResponsesBody
from neuron_runtime.not_built import Surface
from request_tables import (
    as_json,
    fields,
    fields_of,
    names,
    offline_parameters,
    refused,
    sampling_modes,
    sampling_parameters,
    settings,
)

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


@dataclass(frozen=True)
class Target:
    path: str
    """Relative to the repository."""
    render: Callable[[], str]
    part: str = ""
    """Name of the marked part of a page; empty: the whole file."""


TARGETS = (
    Target("docs/sizing.md", sizing_tables.reported_memory, "reported memory"),
    Target("docs/sizing.md", sizing_tables.public_models, "public models"),
    Target("docs/sizing.md", sizing_tables.recipes, "recipes"),
    Target("docs/sizing.md", sizing_tables.quantized_models, "quantized models"),
    Target("docs/benchmarks.md", published_step_times, "published step times"),
    Target("docs/neuron.md", nxdi_tables.models, "models of NxD Inference"),
    Target("docs/neuron.md", nxdi_tables.statuses, "statuses of the Neuron runtime"),
    Target("docs/neuron.md", nxdi_tables.neuronx_fields, "settings of transformers-neuronx"),
    Target("docs/engines.md", engine_tables.fields, "fields by engine"),
    Target("docs/engines.md", engine_tables.vllm_versions, "versions of vLLM"),
    Target("docs/engines.md", engine_tables.vllm_flags, "flags of vLLM"),
    Target("docs/engines.md", engine_tables.vllm_settings, "settings of vLLM's plugin"),
    Target("docs/engines.md", engine_tables.vllm_refused, "refused arguments of vLLM"),
    Target("docs/engines.md", engine_tables.vllm_lacking, "panels without vLLM"),
    Target("docs/api.md", fields, "fields"),
    Target("docs/api.md", partial(fields_of, ResponsesBody), "fields of responses"),
    Target("docs/api.md", partial(names, Surface.RESPONSES, has_effect=True), "refused fields of responses"),
    Target("docs/api.md", partial(names, Surface.RESPONSES, has_effect=False), "fields of responses without effect"),
    Target("docs/api.md", partial(fields_of, MessagesBody), "fields of messages"),
    Target("docs/api.md", partial(names, Surface.MESSAGES, has_effect=True), "refused fields of messages"),
    Target("docs/api.md", partial(names, Surface.MESSAGES, has_effect=False), "fields of messages without effect"),
    Target("docs/sampling.md", sampling_parameters, "sampling parameters"),
    Target("docs/sampling.md", settings, "settings"),
    Target("docs/offline.md", offline_parameters, "parameters"),
    Target("docs/sampling.md", sampling_modes, "sampling modes"),
    *(
        Target("docs/neuronmodel.md", partial(operator_tables.reasons, kind), f"reasons of {kind}")
        for kind in CONDITIONS
    ),
    Target(TROUBLESHOOTING, operator_tables.sections, "reasons"),
    Target("docs/api.md", partial(refused, Surface.BODY, as_json), "refused fields"),
    Target("docs/api.md", partial(names, Surface.BODY, has_effect=False), "fields without effect"),
    Target("docs/offline.md", partial(refused, Surface.LLM, repr), "refused arguments"),
    Target("docs/offline.md", partial(names, Surface.LLM, has_effect=False), "arguments without effect"),
    Target("docs/offline.md", partial(names, Surface.SAMPLING_PARAMS, has_effect=True), "refused parameters"),
    Target("docs/runtime.md", runtime_tables.command_flags, "flags of serve"),
    Target("docs/runtime.md", runtime_tables.refused_flags, "refused flags"),
    Target("docs/runtime.md", runtime_tables.ignored_flags, "flags without effect"),
    Target("docs/runtime.md", runtime_tables.document_keys, "keys of the document"),
    Target("docs/metrics.md", model_metrics, "metrics of a model"),
    Target("docs/server.md", runtime_tables.server_keys, "keys of the server"),
    Target("docs/offline.md", runtime_tables.llm_arguments, "arguments of LLM"),
    *(
        Target(f"{folder}/{one.plural}.yaml", partial(schema.to_yaml, one))
        for folder in ("crds", "charts/neuron-serving/files")
        for one in schema.DEFINITIONS
    ),
    Target("docs/neuronmodel.md", operator_tables.fields, "fields of spec"),
    Target("docs/neuronmodel.md", operator_tables.not_supported, "fields not supported"),
    Target("docs/neuronmodel.md", operator_tables.status, "fields of status"),
    Target("docs/neuronmodel.md", operator_tables.columns, "columns"),
    Target("docs/adapters.md", partial(operator_tables.fields, AdapterSpec), "fields of spec"),
    Target("docs/adapters.md", partial(operator_tables.status, AdapterStatus), "fields of status"),
    Target("docs/adapters.md", partial(operator_tables.columns, schema.ADAPTER), "columns"),
    *(
        Target("docs/adapters.md", partial(operator_tables.reasons_of_adapters, kind), f"reasons of {kind}")
        for kind in (*ADAPTER_CONDITIONS, "Ready")
    ),
)


def generated(root: Path, targets: Iterable[Target]) -> dict[str, str]:
    """The expected text of each target's file, by path.

    Raises:
        ValueError: a page lacks the markers of a part.
    """
    files: dict[str, str] = {}
    for target in targets:
        text = target.render()
        if target.part:
            page = files.get(target.path) or (root / target.path).read_text()
            text = _replaced(page, target, text)
        files[target.path] = text
    return files


def _replaced(page: str, target: Target, text: str) -> str:
    begin = f"<!-- generated: {target.part} -->\n"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{target.path}: missing {begin.strip()} or its {END}")
    return f"{before}{begin}{text.strip()}\n{END}{after}"


def main(arguments: list[str] | None = None, root: Path = ROOT, targets: Iterable[Target] = TARGETS) -> int:
    parser = argparse.ArgumentParser(description="Write the generated files and parts of pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file differs")
    check = parser.parse_args(arguments).check
    status = 0
    for path, text in generated(root, targets).items():
        file = root / path
        if file.exists() and file.read_text() == text:
            continue
        if check:
            print(f'{path} is out of date: run "make generate"', file=sys.stderr)
            status = 1
        else:
            file.write_text(text)
            print(f"wrote {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
