"""Plan a model without serving it: the decision, its arithmetic, and the alternatives.

Called by `__main__` for `neuron-operator plan`. Facts about the model come from a file, or from `neuron-runtime
inspect` if that is installed; the nodes are those of a cluster, or all that could be bought. It decides by the
functions of the operator and changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import yaml

from neuron_operator.api import engines
from neuron_operator.api.errors import ClusterFault, InvalidSpec, Unplaceable
from neuron_operator.api.fields import as_json
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import NeuronModel
from neuron_operator.decide import pin
from neuron_operator.decide.course import decide
from neuron_operator.decide.steps import check_draft, check_task
from neuron_operator.local.command import read_manifest
from neuron_operator.local.pods import CannotRunHere
from neuron_operator.place.catalog import INSTANCE_TYPES, family_of, wrong_default
from neuron_operator.place.planner import MAX_NODES, Choice, Option, Supply, dollars
from neuron_operator.place.sizing import gb, is_quantized
from neuron_operator.read.objects import printable
from neuron_operator.read.placement import counted
from neuron_operator.read.records import Facts
from neuron_operator.read.revision import Revision
from neuron_operator.read.world import (
    DEVICE_MODES,
    ClaimTemplate,
    EngineSettings,
    FreeDevices,
    GroupSettings,
    Object,
    Place,
    Provisionable,
    Settings,
    StorageSettings,
    World,
)
from neuron_operator.render.config_document import to_json
from neuron_operator.render.jobs import compile_jobs, convert_job, leaves_open, wanted_format

EXIT_OK, EXIT_REFUSED, EXIT_USAGE = 0, 1, 2

SETTINGS = Settings(
    runtime_image="neuron-serving-runtime",
    engines={name: EngineSettings(image=name) for name, engine in engines.SETTINGS.items() if not engine.is_ours},
    storage=StorageSettings(artifacts=Place(pvc_template=ClaimTemplate(size="10Gi"))),
)
"""Those of an installation that is not known here."""


WITH_WEIGHTS = msgspec.structs.replace(SETTINGS.storage, weights=Place(pvc_template=ClaimTemplate(size="1Ti")))
"""Of one where a Job can convert weights."""

DESCRIPTION = str(__doc__).partition("\n")[0]


def add_arguments(parser: argparse.ArgumentParser, *, takes_name: bool = False) -> None:
    """`takes_name`: the caller reads the NeuronModel of this name."""
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("-f", "--file", type=Path, help="manifest that contains one NeuronModel; -: standard input")
    if takes_name:
        of.add_argument("name", nargs="?", metavar="NAME", help="name of a NeuronModel of the cluster")
    parser.add_argument(
        "--facts",
        type=Path,
        help="facts about the model, as `neuron-runtime inspect URI --json` prints them (default: run that command)",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=["text", "yaml", "config"],
        default="text",
        help="yaml: the objects; config: the pods' configuration, which `neuron-runtime plan-buckets --config` reads",
    )
    parser.add_argument(
        "--instance-types",
        default="",
        help="comma-separated instance types that can be added (default: all known ones, none with --cluster)",
    )
    parser.add_argument("--cluster", action="store_true", help="plan for the nodes of the cluster")
    parser.add_argument("--kubeconfig", default="", help="of that cluster")
    parser.add_argument("--context", default="", help="of the kubeconfig (default: its current one)")
    parser.add_argument("--device-mode", choices=DEVICE_MODES, default="Plugin", help="as the chart value devices.mode")
    parser.add_argument(
        "--engine-defaults",
        type=_defaults,
        default={},
        metavar="JSON",
        help='as the chart value engines.defaults, such as {"trn2": "vllm"}',
    )
    parser.add_argument(
        "--engine-version",
        choices=[version for row in engines.SETTINGS.values() for version in row.versions],
        default="",
        help="as the chart value version of the engine that has it (default: the newest of each)",
    )
    parser.add_argument(
        "--max-nodes",
        type=int,
        choices=range(1, MAX_NODES + 1),
        default=1,
        metavar="N",
        help="as the chart value groups.maxNodes: nodes of a replica that no node holds (default: %(default)s)",
    )


def _defaults(value: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(value, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _engines(version: str) -> dict[str, EngineSettings]:
    """version: of the engine that has it; empty: the newest."""
    return {
        name: EngineSettings(setting.image, version if version in engines.SETTINGS[name].versions else "")
        for name, setting in SETTINGS.engines.items()
    }


def run(options: argparse.Namespace, live: tuple[Object, Revision] | None = None) -> int:
    """Print the plan, or why there is none. Returns the exit code of the command. `live`: a model of the cluster, with
    its newest revision, whose engine it keeps unless defaults are given."""
    try:
        body, before = live or (read_manifest(options.file), None)
        settings, free = _where(options)
        kept = None if settings.engine_defaults else before
        has_defaults = bool(settings.engine_defaults or (kept and kept.default_for))
        model = pin.as_pinned(parse(body, has_defaults=has_defaults), kept)
        known = before.pinned.facts if before else None
        facts = read_facts(options.facts) if options.facts else known or inspected(model, settings)
        check_task(model, facts)
        if wanted_format(model) in ("int8", "fp8") and not (facts.conversion or facts.quantization):
            cure = f"inspect with --backend {model.spec.backend} --quantization {wanted_format(model)}"
            raise CannotRunHere(f"the facts tell of no conversion, which serving.quantization asks for: {cure}")
        if model.draft is None:  # the newest revision of a model may have had one
            facts = msgspec.structs.replace(facts, draft=None)
        else:
            is_head = model.spec.serving.speculation.method == "Eagle"
            draft = facts.draft or inspected(model.draft, settings, ("--eagle-head",) if is_head else ())
            check_draft(model, facts, draft, settings)
            facts = msgspec.structs.replace(facts, draft=draft)
        if leaves_open(model, settings) and not (options.facts or known) and is_quantized(facts):
            of_choice, _ = pin.chosen(model, facts, settings, free)
            conversion = inspected(of_choice, settings).conversion if of_choice.spec.may_convert else None
            facts = msgspec.structs.replace(facts, conversion=conversion)
        settings = replace(settings, storage=WITH_WEIGHTS) if facts.conversion else settings
        pinned = pin.pin(model, facts, settings, 1, free=free)
        model, choice = pin.chosen(pin.as_pinned(model, pinned), facts, settings, free)
    except (InvalidSpec, Unplaceable) as refusal:
        print(f"{refusal.reason}: {refusal}", file=sys.stderr)
        return EXIT_REFUSED
    except (CannotRunHere, ClusterFault) as error:
        print(f"neuron-operator plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.output == "config":
        print(to_json(pinned.pinned.config), end="")
    elif options.output == "yaml":
        print(yaml.safe_dump_all(objects(body, model, pinned, settings), sort_keys=False, width=120), end="")
    else:
        print("\n".join((*report(pinned, choice), *_idle(model))))
    return EXIT_OK


def read_facts(path: Path) -> Facts:
    """The facts in a file: those that `inspect` prints, or its record. Raises CannotRunHere."""
    try:
        facts = yaml.safe_load(path.read_text())
        facts = facts.get("facts") or facts if isinstance(facts, dict) else facts
        return msgspec.convert(facts, Facts)
    except OSError as error:
        raise CannotRunHere(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CannotRunHere(f"{path} has no facts about a model: {' '.join(str(error).split())}") from error


def inspected(model: NeuronModel, settings: Settings, flags: Sequence[str] = ()) -> Facts:
    """The facts that the runtime of this environment finds. Raises CannotRunHere."""
    beside = Path(sys.executable).with_name("neuron-runtime")
    program = str(beside) if beside.is_file() else shutil.which("neuron-runtime")
    if program is None:
        raise CannotRunHere("neuron-runtime is not installed here: pass the facts with --facts FILE")
    command = [program, "inspect", model.spec.model.uri, "--json", *flags]
    wanted = wanted_format(model)
    command += ["--backend", model.spec.backend] if wanted or not leaves_open(model, settings) else []
    command += ["--quantization", wanted] if wanted else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CannotRunHere(f"{' '.join(command[1:3])}: {printable(lines[-1])}; or pass the facts with --facts FILE")
    try:
        return msgspec.json.decode(done.stdout, type=Facts)
    except msgspec.DecodeError as error:
        raise CannotRunHere(f"{program} is of another version: {error}; pass the facts with --facts FILE") from error


def _where(options: argparse.Namespace) -> tuple[Settings, FreeDevices]:
    """The settings and nodes to plan for. Raises CannotRunHere for a type that nothing is known of, and for a default
    engine that cannot be one."""
    images = _engines(options.engine_version)
    for family, backend in options.engine_defaults.items():
        if wrong := wrong_default(family, backend, images):
            raise CannotRunHere(f"--engine-defaults: {family}: {wrong}")
    types = tuple(filter(None, options.instance_types.split(",")))
    if unknown := [kind for kind in types if family_of(kind) is None]:
        text = f"{unknown[0]} is of no known family; known are {', '.join(INSTANCE_TYPES)}"
        raise CannotRunHere(f"--instance-types: {text}")
    types = types or (() if options.cluster else tuple(INSTANCE_TYPES))
    groups = GroupSettings(max_nodes=options.max_nodes)
    settings = replace(
        SETTINGS,
        device_mode=options.device_mode,
        provisionable=Provisionable(types),
        groups=groups,
        engines=images,
        engine_defaults=options.engine_defaults,
    )
    reading = partial(_nodes, options.kubeconfig, options.context, claims_devices=settings.claims_devices)
    return settings, asyncio.run(reading()) if options.cluster else FreeDevices(())


async def _nodes(kubeconfig: str, context: str, *, claims_devices: bool) -> FreeDevices:
    from neuron_operator.cluster.client import connect  # noqa: PLC0415 - the client is not needed without a cluster
    from neuron_operator.cluster.on_demand import OnDemand  # noqa: PLC0415

    async with connect(kubeconfig, context) as cluster:
        return await OnDemand(cluster, claims_devices=claims_devices).free_devices()


def objects(body: Object, model: NeuronModel, pinned: Revision, settings: Settings) -> Iterator[Object]:
    """What the operator would create, without owners: these do not exist yet."""
    world = World(body=body, children=(pin.to_object(model, pinned),), pods=(), now=datetime.now(UTC))
    decided = decide(replace(world, body={**body, "status": decide(world, settings, ()).status}), settings, ())
    jobs = (*convert_job(model, settings, pinned), *compile_jobs(model, settings, pinned)[:1])
    for obj in (*jobs, *decided.desired):
        metadata = {key: value for key, value in obj["metadata"].items() if key != "ownerReferences"}
        # Through JSON: YAML would refer from one object to a part of another.
        yield as_json({**obj, "metadata": metadata})


def report(pinned: Revision, choice: Choice | None) -> Iterator[str]:
    """The plan for people; begins with `status.plan.summary`."""
    yield str(pinned.pinned.plan.summary)
    if choice is None:
        needs = gb(pinned.pinned.plan.host_bytes or 0)
        yield f"computed on the host, so nothing is planned: a pod needs about {needs} and takes what memory is free"
        return
    best, second = choice.chosen, choice.runner_up
    yield ""
    yield from _table(best, is_ours=pinned.engine.is_ours)
    yield ""
    rows = {
        "cheapest": f"{best.words}, {_costs(best)}",
        "runner-up": f"{second.words}: {second.load.words}, {_costs(second)}" if second else "none",
    }
    yield from _aligned(rows)
    if choice.others:
        yield ""
        yield "does not fit:"
        yield from _aligned({f"  {option.words}": option.problem for option in choice.others})


def _idle(model: NeuronModel) -> Iterator[str]:
    """What becomes of replicas that nobody asks."""
    if (rule := model.spec.idle) is not None:
        left = counted(rule.min_replicas, "replica")
        yield f"\nafter {rule.after_seconds} s without a request: {left} (spec.idle)"


def _table(option: Option, *, is_ours: bool) -> Iterator[str]:
    memory, load, facts = option.memory, option.load, option.memory.parts
    notes = {
        "cache": load.words + (f", of at most {gb(most)}" if (most := memory.cache_limit) is not None else ""),
        "graphs": f"at most {load.num_graphs}{': see neuron-runtime plan-buckets' if is_ours else ''}",
        "weights": f"a share of {option.tensor}",
    }
    of_all = f"{option.tensor} of {option.cores}" if option.tensor < option.cores else f"{option.tensor}"
    yield f"each of {of_all} NeuronCores of {option.site.family.name}"
    for name, part in {**facts, "total": memory.total, "may be used": memory.limit}.items():
        yield f"  {name:<12}{gb(part):>10}  {notes.get(name, '')}".rstrip()
    has = f" of {gb(option.site.host_memory)}" if option.site.host_memory else ""
    why = "requested" if option.host.is_requested else "while loading"
    yield f"  {'host':<12}{gb(option.host.memory):>10}  {why}{has}"
    if is_ours:
        yield f"  {'Neuron SDK':<12}{option.site.family.last_sdk:>10}  or older"


def _costs(option: Option) -> str:
    where = {
        Supply.THERE: "free on a node of the cluster",
        Supply.TO_BUY: "a node to add",
        Supply.TAKEN: "on a node, but held by other pods",
    }
    return f"about {dollars(option.cost)} per hour ({where[option.supply]})"


def _aligned(rows: dict[str, str]) -> Iterator[str]:
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="neuron-operator plan", description=DESCRIPTION)
    add_arguments(parser)
    return printing(lambda: run(parser.parse_args(argv)))


def printing(run: Callable[[], int]) -> int:
    """Its exit code; 0 if nobody reads on."""
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:  # who read it has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code
