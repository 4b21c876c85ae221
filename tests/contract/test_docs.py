"""The pages in `docs/` and the READMEs against the code: names, numbers, links, and shown manifests, JSON and commands.

A table's first cell names fields as dotted paths in backticks; a name that starts with a dot or `[]` is below the first
one of the cell. Most tables are written by `make generate` and not checked here.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from helpers.failures import FAILURES, OTHER_REASONS, Failure
from helpers.operator_worlds import FACTS, body
from helpers.rendered_cases import FILES, render
from neuron_operator.__main__ import USAGE
from neuron_operator.__main__ import main as operator
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.manifest import parse
from neuron_operator.api.reasons import Reason
from neuron_operator.place.catalog import FAMILIES as FAMILIES_OF_DEVICES
from neuron_operator.place.catalog import INSTANCE_TYPES
from neuron_operator.place.sizes import _ranges
from neuron_operator.read.world import BY_PLUGIN, Granting
from neuron_operator.render import jobs as render_jobs
from neuron_operator.run import metrics as operator_metrics
from neuron_runtime import config, not_built, offline
from neuron_runtime.apis.openai.body import DetokenizeBody, TokenizeBody
from neuron_runtime.backend.host_sampling.drawing import NUMBERS_OF_CANDIDATES
from neuron_runtime.backend.host_sampling.likeliest import GROUP
from neuron_runtime.backend.torch import choices, sizing
from neuron_runtime.backend.torch.architecture import FAMILIES, FIXED
from neuron_runtime.commands.command_line import COMMANDS, build_parser
from neuron_runtime.commands.serve import DRAIN_ON_THE_COMMAND_LINE
from neuron_runtime.core import MAX_LOGPROBS, FinishReason, Sampling
from neuron_runtime.engine.backpressure import DEFAULT_MAX_QUEUED_REQUESTS, MAX_RETRY_SECONDS, MOST_QUEUED_TOKENS
from neuron_runtime.errors import ExitCode, InvalidRequest
from neuron_runtime.not_built import Surface
from neuron_runtime.processes import restarts
from neuron_runtime.processes.watchdog import FIRST_STEP_SECONDS, MIN_STEP_SECONDS
from neuron_runtime.record import MAX_RECORD_BYTES, ModelFacts, Record
from neuron_runtime.requests import sampling_fields
from neuron_runtime.server import access_log, tracing
from neuron_runtime.server import metrics as server_metrics
from neuron_runtime.server.app import build_app
from neuron_runtime.server.exchange import OPEN_PATHS, Exchange

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHART = ROOT / "charts" / "neuron-serving"
NEURONMODEL = (DOCS / "neuronmodel.md").read_text()
MODELS = (DOCS / "models.md").read_text()
RUNTIME = (DOCS / "runtime.md").read_text()
API = (DOCS / "api.md").read_text()
SERVER = (DOCS / "server.md").read_text()
METRICS = (DOCS / "metrics.md").read_text()
OFFLINE = (DOCS / "offline.md").read_text()
SAMPLING = (DOCS / "sampling.md").read_text()
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()
VLLM_METRICS: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "cases" / "vllm_metrics.yaml").read_text())
CHART_README = (CHART / "README.md").read_text()
EKS = DOCS / "eks.md"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "charts/*/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def section(page: str, title: str) -> str:
    """Text under a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", page, re.MULTILINE)
    assert found, f"no heading {title!r}"
    rest = page[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {at for at, row in enumerate(cells) if at + 1 < len(cells) and re.fullmatch(r"-+", cells[at + 1][0])}
    return [row for at, row in enumerate(cells) if at not in heads and not re.fullmatch(r"-+", row[0])]


def words(text: str) -> list[str]:
    """Words in backticks, without fenced blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def paths(text: str) -> set[str]:
    """The dotted paths in first cells."""
    found: set[str] = set()
    for first, *_ in rows(text):
        base, *more = words(first) or [""]
        found |= {base, *(base + word if word[0] in ".[" else word for word in more)}
    return found - {""}


# Every page


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as on GitHub."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_has_a_target(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in (link for link in links if "://" not in link):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}: no such heading in {target.name}"


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def shown_manifests(page: Path) -> list[dict[str, Any]]:
    documents = [document for block in fenced(page, "yaml") for document in yaml.safe_load_all(block)]
    return [document for document in documents if document.get("kind") == "NeuronModel"]


def refused_at(document: Mapping[str, Any]) -> str:
    """The field that the operator refuses; empty if it accepts the manifest."""
    try:
        parse(document)
    except InvalidSpec as refusal:
        return refusal.field
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shown_manifest_is_accepted(page: Path) -> None:
    assert {refused_at(document) for document in shown_manifests(page)} <= {""}


def test_the_list_of_pages_names_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert listed | {"README.md"} == {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shown_json_is_valid(page: Path) -> None:
    for block in fenced(page, "json"):
        json.loads(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shown_runtime_command_parses(page: Path) -> None:
    for block in fenced(page, "console"):
        for line in block.splitlines():
            command = re.fullmatch(r"\$ (?:\S*/)?neuron-runtime (.*)", line)
            if command:
                build_parser().parse_args(shlex.split(command[1], comments=True))


@pytest.mark.parametrize(
    ("page", "title", "quantity"),
    [
        (RUNTIME, "Flags", f"{DRAIN_ON_THE_COMMAND_LINE['seconds']:.0f} s"),
        (RUNTIME, "Limits and their defaults", f"{sizing.SHARE_OF_MEMORY * 100:.0f} %"),
        (API, "Errors", f"1 to {MAX_RETRY_SECONDS} s"),
        (API, "Limits of a request", f"{config.ServerOptions().max_body_bytes // 2**20} MiB"),
        (API, "Limits of a request", f"{config.ServerOptions().max_choices} answers"),
        (API, "Limits of a request", f"{sampling_fields.MAX_STOP_STRINGS} stop"),
        (API, "Limits of a request", f"{sampling_fields.MAX_STOP_CHARACTERS} characters"),
        (API, "Limits of a request", f"{sampling_fields.MAX_STOP_TOKEN_IDS} stop"),
        (RUNTIME, "Restarts and drain", f"{restarts.MAX_RESTARTS} restarts"),
        (RUNTIME, "Restarts and drain", f"{restarts.RESTART_WINDOW_SECONDS / 60:.0f} minutes"),
        (RUNTIME, "Restarts and drain", f"{MIN_STEP_SECONDS:.0f} s"),
        (RUNTIME, "Restarts and drain", f"{FIRST_STEP_SECONDS:.0f} s"),
        (RUNTIME, "The record", f"{MAX_RECORD_BYTES // 1024} KiB"),
        (SAMPLING, "Log-probabilities", f"{MAX_LOGPROBS} alternatives"),
        (SAMPLING, "Cost", f"{GROUP} tokens"),
        *((SAMPLING, "Cost", str(number)) for number, unbounded in NUMBERS_OF_CANDIDATES.items() if unbounded),
    ],
)
def test_quantities_in_the_docs_are_those_of_the_code(page: str, title: str, quantity: str) -> None:
    assert re.search(rf"(?<![\d.]){re.escape(quantity)}(?!\w)", " ".join(section(page, title).split()))


# docs/neuronmodel.md


def exit_codes_given() -> set[ExitCode]:
    """The codes that a function or class of the runtime uses; tables at module level do not count."""
    names = set()
    for path in (ROOT / "runtime" / "neuron_runtime").rglob("*.py"):
        for part in ast.parse(path.read_text()).body:
            if isinstance(part, ast.FunctionDef | ast.ClassDef):
                names |= {ast.unparse(node) for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    return {code for code in ExitCode if f"ExitCode.{code.name}" in names}


def test_reserved_reasons_are_the_unused_ones() -> None:
    given = {str(code.reason) for code in exit_codes_given()}
    for path in (ROOT / "operator" / "neuron_operator").rglob("*.py"):
        if path.parent.name == "kubectl":  # it reads reasons and gives none
            continue
        constants = re.findall(r"\bReason\.([A-Z_]+)", path.read_text())
        given |= {Reason[name] for name in constants}
    assert {reason for reason in Reason if not reason.row.means} == set(Reason) - given


def test_the_table_of_sizes_matches_the_catalog() -> None:
    ways: list[tuple[Granting, bool]] = [(way, in_cores) for in_cores in (False, True) for way in BY_PLUGIN]
    ways.insert(len(BY_PLUGIN), ("DRA", False))
    expected = [
        [known.name, *(_ranges(list(known.sizes(way, in_cores=in_cores))) or "none" for way, in_cores in ways)]
        for known in INSTANCE_TYPES.values()
    ]
    assert rows(section(NEURONMODEL, "Devices and cores")) == expected


# docs/runtime.md


def test_the_newest_sdk_of_a_family_is_that_of_the_docs() -> None:
    table = rows(section((DOCS / "neuron.md").read_text(), "Versions"))
    lines = ((kinds.lower(), re.findall(r"2\.\d+", sdks)) for kinds, sdks, *_ in table)
    shown = {name: sdks[-1] for kinds, sdks in lines for name in kinds.split(", ") if sdks}
    assert {name: family.last_sdk for name, family in FAMILIES_OF_DEVICES.items()}.items() <= shown.items()


def test_the_docs_list_exactly_the_commands_of_the_runtime() -> None:
    assert sorted(words(first)[0] for first, *_ in rows(RUNTIME.partition("\n## ")[0])) == sorted(COMMANDS)


def test_the_runtime_reads_the_shown_configuration_document() -> None:
    text = section(RUNTIME, "The configuration document")
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    config.parse_config(example.encode())


def test_the_defaults_of_the_limits_are_those_of_the_torch_backend() -> None:
    documented = {
        words(limit)[0]: set(map(int, re.findall(r"\d+", default)))
        for limit, default in rows(section(RUNTIME, "Limits and their defaults"))
    }
    numbers = {
        "maxSequences": sizing.DEFAULT_MAX_SEQUENCES,
        "maxStepTokens": sizing.DEFAULT_MAX_STEP_TOKENS,
        "blockSize": choices.DEFAULT_BLOCK_SIZE,
        "maxModelLength": sizing.MIN_DEFAULT_LENGTH,
        "maxQueuedRequests": DEFAULT_MAX_QUEUED_REQUESTS,
        "maxQueuedTokens": MOST_QUEUED_TOKENS,
    }
    computed: dict[str, set[int]] = {"layout": set(), "numBlocks": set()}
    assert documented == {name: {number} for name, number in numbers.items()} | computed
    assert set(documented) == {"layout", *config.EngineLimits.__struct_encode_fields__}


def test_every_refused_message_part_is_documented() -> None:
    of_messages = {row.name for surface in (Surface.MESSAGE, Surface.ROLE) for row in not_built.rows(surface)}
    below_the_list = section(API, "Unsupported fields").partition("<!-- end -->")[2]
    assert of_messages <= set(words(below_the_list))


def test_every_route_is_documented() -> None:
    app = build_app(SimpleNamespace(has_keys=False, config=SimpleNamespace(backend="torch")))  # type: ignore[arg-type]
    routes = {re.sub(r"\{.*\}", "NAME", path) for path in app.openapi()["paths"]} | {app.openapi_url, "/docs"}
    documented = {word.partition(" ")[2] for word in words(API) if " /" in word}
    assert routes == documented
    fields_of_bodies = {*TokenizeBody.__struct_fields__, *DetokenizeBody.__struct_fields__} - {"model"}
    assert fields_of_bodies <= set(words(section(API, "Other routes")))


# docs/server.md


def an_exchange() -> Exchange:
    """An exchange with every field set."""
    sampling = Sampling(max_tokens=1)
    ask = SimpleNamespace(stream=True, num_choices=1, prompts=((1,),), num_prompt_tokens=1, sampling=(sampling,))
    choice = SimpleNamespace(queue_seconds=0.0, first_token_at=0.0, ended=FinishReason.ABORT)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x")
    generation: Any = SimpleNamespace(ask=ask, choices=[choice], num_cached_tokens=0, num_tokens=1, tokenizer=tokenizer)
    error = InvalidRequest("wrong", field="n")
    more: dict[str, Any] = {"key": 1, "error": error, "generation": generation, "model": "m"}
    return Exchange("id", "POST", "/v1/completions", "127.0.0.1", {}, 0.0, 0.0, **more)


def test_the_docs_list_exactly_the_fields_of_the_access_log() -> None:
    text = section(SERVER, "Access log")
    documented = [word for first, _ in rows(text) for word in words(first)]
    known = access_log.entry(an_exchange(), prompt_characters=1).keys()
    assert sorted(documented) == sorted(known)
    (line,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert list(json.loads(line)) == [name for name in known if name not in ("error", "param", "prompt_texts")]


def test_the_docs_list_exactly_the_attributes_of_a_span() -> None:
    documented = [word for first, _ in rows(section(SERVER, "Traces")) for word in words(first)]
    assert sorted(documented) == sorted(tracing.attributes(an_exchange()))
    assert tracing.SPAN_NAME in words(section(SERVER, "Traces"))


def test_the_docs_name_the_paths_without_a_key() -> None:
    assert set(words(section(SERVER, "API keys"))) >= OPEN_PATHS


# docs/runtime.md again


def test_the_docs_list_exactly_the_exit_codes_with_their_reasons() -> None:
    documented = {int(code): (words(reason) or [""])[0] for code, reason, _ in rows(section(RUNTIME, "Exit codes"))}
    own = {0: "", 1: "", 130: ""}
    assert documented == own | {int(code): code.reason for code in ExitCode}


def test_reserved_exit_codes_are_the_unused_ones() -> None:
    documented = {int(code) for code, _, meaning in rows(section(RUNTIME, "Exit codes")) if meaning == "*reserved*"}
    assert documented == {int(code) for code in set(ExitCode) - exit_codes_given()}


def test_every_field_of_the_record_is_documented() -> None:
    text = section(RUNTIME, "The record")
    assert {*Record.__struct_encode_fields__, *ModelFacts.__struct_encode_fields__} <= set(words(text))


def test_the_table_of_families_matches_the_torch_backend() -> None:
    table = rows(section(MODELS, "Families"))
    assert sorted(FAMILIES) == sorted(words(architectures)[0] for _, architectures, _ in table)


def test_fields_with_one_allowed_value_are_documented_as_such() -> None:
    documented = set(words(section(MODELS, "Refused configurations")))
    assert {name for family in FAMILIES.values() for name in {**FIXED, **family.fixed}} <= documented


# docs/metrics.md


def test_every_metric_of_vllm_is_exported_or_listed_as_missing() -> None:
    ours = {family.name for family in server_metrics.FAMILIES}
    names = {name for kind in ("gauge", "counter", "histogram") for name in VLLM_METRICS[kind].split()}
    patterns = [words(row[0]) for row in rows(section(METRICS, "Metrics of vLLM that are missing"))]
    missing = {name for name in names if any(fnmatchcase(name, one) for row in patterns for one in row)}
    assert names - ours == missing


def test_the_shown_configuration_of_prometheus_finds_the_pods_that_the_operator_renders() -> None:
    (shown,) = (block for block in fenced(DOCS / "metrics.md", "yaml") if block.startswith("scrape_configs"))
    keep, *rest = yaml.safe_load(shown)["scrape_configs"][0]["relabel_configs"]
    case = yaml.safe_load((ROOT / "tests" / "cases" / "rendered" / "cpu-demo.yaml").read_text())
    (deployment,) = (one for one in case["expect"]["objects"] if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    (port,) = (one for container in pod["spec"]["containers"] for one in container["ports"])
    found = {
        f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9]', '_', label)}": value
        for label, value in pod["metadata"]["labels"].items()
    }
    found["__meta_kubernetes_pod_container_port_name"] = port["name"]
    assert re.fullmatch(keep["regex"], ";".join(found[label] for label in keep["source_labels"]))
    assert {one["target_label"] for one in rest} == {"namespace", "pod"}


# charts/neuron-serving/README.md


def value_names(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value and key not in ("resources", "labels"):
            yield from value_names(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def test_the_docs_list_exactly_the_values_of_the_chart_with_defaults() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    table = rows(section(CHART_README, "Values"))
    assert sorted(word for row in table for word in words(row[0])) == sorted(value_names(values))
    for first, _, default in table:
        if words(default):
            actual: Any = values
            for key in words(first)[0].split("."):
                actual = actual[key]
            assert yaml.safe_load(words(default)[0]) == actual, first


def valid_values(given: Mapping[str, Any]) -> None:
    """Check values as helm does; the images, which have no default, are set."""
    jsonschema = pytest.importorskip("jsonschema")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rules = json.loads((CHART / "values.schema.json").read_text())
    images = {"image": {**values["image"], "operator": "operator:1", "runtime": "runtime:1"}}
    jsonschema.validate(over(over(values, images), given), rules)


def over(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """As helm merges them."""
    inside = {
        k: over(values[k], v) for k, v in given.items() if isinstance(v, dict) and isinstance(values.get(k), dict)
    }
    return {**values, **given, **inside}


@pytest.mark.parametrize("page", [CHART / "README.md", EKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shown_chart_value_exists(page: Path) -> None:
    documents = [document for block in fenced(page, "yaml") for document in yaml.safe_load_all(block)]
    shown = [document for document in documents if "apiVersion" not in document]
    assert shown
    for values in shown:
        valid_values(values)


def shown_commands(page: Path) -> list[str]:
    """The commands of console blocks; one that goes on after a backslash is one line."""
    lines = "\n".join(fenced(page, "console")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def test_every_value_that_a_command_sets_exists_in_the_chart() -> None:
    commands = [
        line for page in PAGES for line in shown_commands(page) if line.startswith("helm ") and "charts/" in line
    ]
    names = {name for line in commands for name in re.findall(r"--set ([\w.]+)=", line)}
    assert names >= {"image.operator", "image.runtime"}
    assert names <= set(value_names(yaml.safe_load((CHART / "values.yaml").read_text())))


# docs/eks.md


@pytest.mark.parametrize("manifest", shown_manifests(EKS), ids=lambda manifest: str(manifest["metadata"]["name"]))
def test_the_shown_plans_are_what_the_operator_prints(
    manifest: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, facts = tmp_path / f"{manifest['metadata']['name']}.yaml", tmp_path / "facts.json"
    model.write_text(json.dumps(manifest))
    uri = manifest["spec"]["model"]["uri"].removeprefix("hf://")
    facts.write_text(json.dumps(yaml.safe_load((ROOT / "tests/cases/sizing/models.yaml").read_text())[uri]))
    blocks = [block.splitlines() for block in fenced(EKS, "console")]
    ((command, *lines),) = (
        one for one in blocks if one[0].startswith(f"$ neuron-operator plan -f {model.name}") and one[1:]
    )
    monkeypatch.chdir(tmp_path)
    assert operator([*shlex.split(command)[2:], "--facts", str(facts)]) == 0
    assert set(lines) <= set(capsys.readouterr().out.splitlines())


def test_the_instance_types_are_in_the_catalog_with_the_shown_prices() -> None:
    text = EKS.read_text()
    assert set(re.findall(r"\b(?:inf|trn)\d\w*\.\w+large\b", text)) <= set(INSTANCE_TYPES)
    for name, devices, *prices in rows(section(text, "What an idle model costs")):
        known = INSTANCE_TYPES[name]
        assert devices == str(known.devices)
        assert prices == [f"${known.price:,.2f}", f"${known.price * 24:,.0f}", f"${known.price * 730:,.0f}"]


def test_every_object_of_a_model_is_in_the_table_of_created_objects() -> None:
    table = rows(section(NEURONMODEL, "Created objects"))
    shown = {pair for kinds, names, _ in table for pair in product(kinds.split(", "), names.split(", "))}
    jobs = (one for one in vars(render_jobs).values() if isinstance(one, render_jobs.JobKind))
    made = set(product(("Job", "ConfigMap"), (f"{job.prefix}-HASH" for job in jobs)))
    for case in FILES:
        for found in render(yaml.safe_load(case.read_text())["given"])["objects"]:
            name = re.sub(r"^([a-z]+)-[0-9a-f]{20}$", r"\1-HASH", found["metadata"]["name"])
            name = re.sub(r"^chat-0-[0-9a-f]{10}-1", "NAME-REPLICA-REVISION-ATTEMPT", name)
            name = re.sub(r"^chat-(config|devices)-[0-9a-f]{10}$", r"NAME-\1-HASH", name)
            made.add((found["kind"], re.sub(r"^chat", "NAME", re.sub(r"^chat-[0-9a-f]{10}$", "NAME-REVISION", name))))
    assert made <= shown


def test_the_shown_permissions_are_those_of_the_chart() -> None:
    rules = re.findall(
        r"\{apiGroups: \[(.*?)\], resources: \[(.*?)\], verbs: \[(.*?)\]\}",
        (CHART / "templates" / "rbac.yaml").read_text(),
    )
    granted = {(group.strip('"') or "core", resources, verbs) for group, resources, verbs in rules}
    documented = {
        (group, resources, verbs) for group, resources, verbs, _ in rows(section(CHART_README, "Permissions"))
    }
    assert granted - documented == {("coordination.k8s.io", "leases", "create")}
    assert documented <= granted


def test_the_docs_list_exactly_the_metrics_of_the_operator() -> None:
    numbers = operator_metrics.Metrics()
    numbers.report_models(lambda: [body()])
    numbers.report_adapters(lambda: [body()])
    declared = re.findall(r"^# TYPE (\S+) (\S+)$", numbers.exposition().decode(), re.MULTILINE)
    documented = [(words(first)[0], kind) for first, kind, _ in rows(section(CHART_README, "Metrics"))]
    assert sorted(documented) == sorted((name, kind) for name, kind in declared if not name.endswith("_created"))


# docs/troubleshooting.md


def test_the_index_of_troubleshooting_names_existing_reasons() -> None:
    index = rows(TROUBLESHOOTING.partition("\n## ")[0])
    named = {word for symptom, _ in index for word in words(symptom) if re.fullmatch(r"[A-Z]\w+", word)}
    of_kubernetes = {"ContainerCreating", "Pending", "UnexpectedAdmissionError"}
    assert of_kubernetes < named
    assert named - of_kubernetes <= set(Reason)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.row.means])
def test_the_link_at_the_end_of_a_message_leads_to_the_section_of_its_reason(reason: Reason) -> None:
    titles = re.findall(r"^#+ (.+)$", TROUBLESHOOTING, re.MULTILINE)
    assert [title for title in titles if title.lower() == reason.lower()] == [reason], "a second one has another anchor"


@pytest.mark.parametrize("failure", FAILURES.values(), ids=lambda failure: failure.name)
def test_every_failure_of_the_docs_is_induced_on_the_cluster(failure: Failure) -> None:
    assert failure.reason in set(Reason)
    assert f'"{failure.name}"' in (ROOT / "tests" / "cluster" / failure.shown_by).read_text()


def test_a_test_shows_every_reason_of_the_docs() -> None:
    documented = {reason for reason in Reason if reason.row.means}
    by_failures = {failure.reason for failure in FAILURES.values()}
    assert documented - by_failures == set(OTHER_REASONS)
    for reason, file in OTHER_REASONS.items():
        text = (ROOT / "tests" / file).read_text()
        assert not re.search("^pytestmark = .*long", text, re.MULTILINE), f"{file} is left to `make test-long`"
        assert reason in text or Reason(reason).name in text, f"{reason} in {file}"


def test_the_shown_facts_are_those_of_a_record() -> None:
    not_shown = {"quantization", "conversion", "task", "vectorSize", "seesPictures", "encoder"}
    assert {*FACTS} | not_shown == set(ModelFacts.__struct_encode_fields__)


# The answers of the demo model

ANSWERS: dict[str, str] = json.loads((ROOT / "examples" / "demo-model" / "expected.json").read_text())


def test_the_demo_model_knows_which_reasons_are_reserved() -> None:
    answers = {reason: ANSWERS.get(f"What does {reason} mean?", "") for reason in Reason}
    assert sum(answer.startswith(reason) for reason, answer in answers.items()) > 40
    reserved = {reason for reason in Reason if not reason.row.means}
    assert {reason for reason, answer in answers.items() if "reserved" in answer} == reserved


def test_the_demo_model_names_existing_commands_fields_and_pages() -> None:
    text = " ".join(ANSWERS.values())
    assert {*re.findall(r"neuron-operator (\w+)", text)} - {"are"} <= {*re.findall(r"^  (\w+)", USAGE, re.MULTILINE)}
    assert {*re.findall(r"neuron-runtime (\w+)", text)} - {"are"} <= set(COMMANDS)
    fields = {*re.findall(r"(?<![\w./-])(?:model|accelerator|serving|engine|rollout|storage)\.[a-zA-Z]+", text)}
    assert len(fields) > 10
    documented = paths(section(NEURONMODEL, "Fields"))
    assert all(any(f"{name}.".startswith(f"{field}.") for name in documented) for field in fields), fields
    assert all((ROOT / page).exists() for page in re.findall(r"\bdocs/\w+\.md", text))
    assert {*re.findall(r"\bmake (\w+)", text)} <= make_targets()
    for manifest in (yaml.safe_load(answer) for answer in ANSWERS.values() if answer.startswith("apiVersion")):
        assert refused_at(manifest) == ""


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# docs/offline.md


def test_the_docs_list_exactly_the_arguments_of_the_offline_class() -> None:
    signature = set(inspect.signature(offline.LLM).parameters) - {"arguments"}
    documented = {word for first, _ in rows(section(OFFLINE, "Arguments")) for word in words(first)}
    assert signature <= documented


def test_every_field_of_an_offline_output_is_documented() -> None:
    text = section(OFFLINE, "Outputs")
    assert {words(row[0])[0] for row in rows(text)} == {one.name for one in fields(offline.CompletionOutput)}
    assert {one.name for one in (*fields(offline.RequestOutput), *fields(offline.Logprob))} <= set(words(text))


def test_the_offline_example_uses_existing_names() -> None:
    examples = fenced(DOCS / "offline.md", "python")
    used = {node.attr for one in examples for node in ast.walk(ast.parse(one)) if isinstance(node, ast.Attribute)}
    known = {
        *dir(offline.LLM),
        *(one.name for one in (*fields(offline.RequestOutput), *fields(offline.CompletionOutput))),
    }
    assert used <= known
