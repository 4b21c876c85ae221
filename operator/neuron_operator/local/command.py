"""Serve a manifest on this machine, without a cluster.

Called by `__main__` for `neuron-operator local`. Runs the same pure decision as the operator in a cluster against a
`Machine`, and prints what changes, the addresses, and optionally the answer to one question.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from neuron_operator.api import engines, manifest, names
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.fields import as_json
from neuron_operator.api.reasons import CONDITIONS, Asked
from neuron_operator.cluster.asking import told_at
from neuron_operator.decide.adapter import decide_adapter
from neuron_operator.decide.course import decide
from neuron_operator.local.answers import AnswerRefused, command_for, served_name, stream, task_of
from neuron_operator.local.machine import Machine
from neuron_operator.local.pods import (
    LOOPBACK,
    CannotRunHere,
    ContainerPlan,
    LocalHost,
    count_neuron_devices,
    environment_to_inherit,
    instance_type,
    too_few_devices,
)
from neuron_operator.read.objects import is_shared, items, name_of, written
from neuron_operator.read.objects import text as text_of
from neuron_operator.read.world import (
    ClaimTemplate,
    Decision,
    EngineSettings,
    FreeDevices,
    GroupSettings,
    Object,
    Place,
    Settings,
    StorageSettings,
    Told,
    World,
)

DEMO = Path(str(files("neuron_operator"))) / "data" / "neuronmodel-local.yaml"
"""Its model is in the same folder. In a checkout both are links into `examples`."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
MANIFESTS = frozenset((".yaml", ".yml", ".json"))
"""The files of a folder, as kubectl reads it."""

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

SETTINGS = Settings(
    runtime_image="this-machine",  # a placeholder: the programs of this environment run instead
    engines={
        name: EngineSettings(image="this-machine") for name, engine in engines.SETTINGS.items() if not engine.is_ours
    },
    storage=StorageSettings(artifacts=Place(pvc_template=ClaimTemplate(size="1Ti")), keep_days=0),
    groups=GroupSettings(restart_seconds=1),
)
"""Artifacts are kept in the cache folder, for all models of the namespace, until the user deletes them."""


FILE_HELP = "manifest, or folder of manifests, with one NeuronModel and any number of NeuronAdapters; -: standard input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", type=Path, help=FILE_HELP)
    source.add_argument("--demo", action="store_const", dest="file", const=DEMO, help="use the demo model's manifest")
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port of the first replica; others take the next ones (default %(default)s)",
    )
    parser.add_argument("--ask", metavar="QUESTION", help="stream the answer to this question once the model is ready")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="a picture that --ask is about")
    parser.add_argument("--exit", action="store_true", help="exit once the model is ready (and has answered --ask)")
    parser.add_argument("--quiet", action="store_true", help="hide the output of the pods")
    parser.add_argument("--fresh", action="store_true", help="delete the model's cached files first")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        help="where the volumes and files of the pods are kept (default %(default)s)",
    )


def default_cache_dir() -> Path:
    cache = os.environ.get("NEURON_SERVING_CACHE")
    return Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neuron-serving"


def read_manifest(path: Path) -> dict[str, Any]:
    """The NeuronModel of `read_manifests`."""
    return read_manifests(path)[0]


def read_manifests(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The NeuronModel and the NeuronAdapters of a YAML file (`-`: of standard input), or of all of a folder, with the
    metadata an API server would add. They may be in a List, as `kubectl get -o yaml` prints it.

    Raises CannotRunHere if a file is missing, is not YAML, if there is not exactly one NeuronModel, or if something is
    of another version, or has an invalid name or namespace.
    """
    documents = _documents(path)
    documents += [item for d in documents if text_of(d, "kind").endswith("List") for item in items(d, "items")]
    models, adapters = ([d for d in documents if text_of(d, "kind") == kind] for kind in names.KINDS)
    if len(models) != 1:
        raise CannotRunHere(f"{path} contains {len(models)} NeuronModels; name a file with exactly one")
    model = _as_stored(models[0], path)
    listed = [_as_stored(one, path) for one in adapters]
    own = [one for one in listed if one["metadata"]["namespace"] == model["metadata"]["namespace"]]
    by_name = {one["metadata"]["name"]: one for one in own}  # of two with a name the later one, as `kubectl apply` does
    return model, list(by_name.values())


def _documents(path: Path) -> list[Any]:
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in MANIFESTS) if path.is_dir() else [path]
    except OSError as error:
        raise CannotRunHere(f"cannot read {path}: {error.strerror}") from error
    documents: list[Any] = []
    for file in files:
        try:
            # Like kubectl, which sends JSON to the API server.
            text = sys.stdin.read() if file == Path("-") else file.read_text()
            documents += [as_json(d) for d in yaml.safe_load_all(text) if d]
        except OSError as error:
            raise CannotRunHere(f"cannot read {file}: {error.strerror}") from error
        except (yaml.YAMLError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CannotRunHere(f"{file} is not YAML that converts to JSON: {' '.join(str(error).split())}") from error
    return documents


def _as_stored(body: dict[str, Any], path: Path) -> dict[str, Any]:
    """As an API server would store it. Raises CannotRunHere if it would not, or if the name is no name of a folder."""
    if body.get("apiVersion") != names.API_VERSION:
        raise CannotRunHere(f"{path}: apiVersion must be {names.API_VERSION}")
    metadata = body.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise CannotRunHere(f"{path}: metadata.name is missing")
    metadata = {"namespace": "default", **metadata}
    for name in ("name", "namespace"):
        # They name the folder that `--fresh` empties.
        if not isinstance(metadata[name], str) or not re.fullmatch(_DNS_LABEL, metadata[name]):
            raise CannotRunHere(f"{path}: metadata.{name} must be a DNS label of at most 63 characters")
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    created = written(datetime.now(UTC))
    stored = {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": created}
    return {**_with_absolute_files(body, folder), "metadata": {**metadata, **stored}}


def _with_absolute_files(value: Any, folder: Path) -> Any:
    """Replaces `file:./path`, relative to the manifest, by an absolute URI."""
    if isinstance(value, dict):
        return {key: _with_absolute_files(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_files(item, folder) for item in value]
    if isinstance(value, str) and value.startswith(("file:./", "file:../")):
        return (folder / value.removeprefix("file:")).resolve().as_uri()
    return value


@contextlib.contextmanager
def _locked_root(cache_dir: Path, body: Mapping[str, Any], *, fresh: bool) -> Iterator[Path]:
    """The model's folder, locked: two commands would write the same volumes."""
    metadata = body["metadata"]
    root = cache_dir / "local" / f"{metadata['namespace']}.{metadata['name']}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root.parent / f"{root.name}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotRunHere(
                    f"another `neuron-operator local` is serving {metadata['name']} from {root}: "
                    "stop it, or choose another --cache-dir"
                ) from None
            if fresh:
                shutil.rmtree(root)
                root.mkdir()
            yield root
    except OSError as error:
        raise CannotRunHere(f"cannot use {root}: {error.strerror}; choose another --cache-dir") from error


def _check_devices(body: Mapping[str, Any], num_devices: int) -> None:
    """What no size would change is said before the model is read: raises CannotRunHere if it is for Neuron devices, and
    there are none. An invalid field is left to the conditions."""
    with contextlib.suppress(InvalidSpec):
        if manifest.parse(body).spec.accelerator.type == "Neuron" and not num_devices:
            raise too_few_devices("the model is for Neuron devices", num_devices)


def _check_question(body: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Raises CannotRunHere, with what to do instead, if the model does not answer questions with text."""
    if options.picture:
        if not options.ask:
            raise CannotRunHere("--picture goes with --ask QUESTION")
        _part(options.picture)
    if options.ask and (task := task_of(body)):
        command = command_for(task, f"http://{LOOPBACK}:{options.port}", served_name(body), options.ask)
        text = f"--ask is for models that generate text, and spec.serving.task is {task}: leave it out"
        raise CannotRunHere(f"{text}, and ask once the model is ready:\n  {command}")


@dataclass
class _Subject:
    """A NeuronModel or NeuronAdapter, and what its passes decided."""

    body: Object
    decide: Callable[[World, Settings], Decision]
    uses: frozenset[str] = frozenset()
    """What is shared with others."""

    @property
    def name(self) -> str:
        return name_of(self.body)

    @property
    def conditions(self) -> Mapping[str, Mapping[str, str]]:
        return {one["type"]: one for one in items(self.body, "status", "conditions")}

    @property
    def is_ready(self) -> bool:
        return self.conditions.get("Ready", {}).get("status") == "True"


@dataclass
class _Session:
    """One run of the command: the loop around `decide`, and its output."""

    body: dict[str, Any]
    root: Path
    options: argparse.Namespace
    manifests: Sequence[Object] = ()
    """Of the adapters."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)
    shown: dict[tuple[str, str], tuple[str, str, str]] = field(default_factory=dict)
    announced: bool = False
    held: list[str] | None = None
    """Lines that wait until an answer on standard output is complete; None: none wait."""

    def __post_init__(self) -> None:
        self.model = _Subject(self.body, decide)
        self.adapters = [_Subject(body, decide_adapter) for body in self.manifests]

    async def run(self) -> int:
        _check_question(self.body, self.options)
        num_devices = count_neuron_devices(os.listdir("/dev"))
        _check_devices(self.body, num_devices)
        host = LocalHost(self.root, environment_to_inherit(os.environ), num_devices, instance_type(Path("/sys")))
        machine = Machine(host, self.options.port, self.wake.set, self._log)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            if stop.is_set():
                self._say("killing the pods")
                machine.kill()
            stop.set()
            self.wake.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        try:
            return await self._drive(machine, stop)
        finally:
            if machine.running:
                self._say("stopping (press Ctrl-C again to kill the pods)")
            await machine.close()
            self._say("stopped")

    async def _drive(self, machine: Machine, stop: asyncio.Event) -> int:
        while not stop.is_set():
            self.wake.clear()
            before = self._statuses()
            requeue = await self._pass(machine)
            if self._statuses() != before:
                continue  # in a cluster, too, a written status wakes the operator
            trouble = None if self.model.is_ready else self._trouble(machine)
            self._show_conditions(trouble or "")
            if self.model.is_ready and not self.announced:
                self.announced = True
                await self._announce(machine)
            if self.announced and self.options.exit and all(map(_is_settled, self.adapters)):
                return EXIT_OK if all(one.is_ready for one in self.adapters) else EXIT_FAILED
            if trouble is not None:
                print(f"neuron-operator local: {trouble}", file=sys.stderr)
                return EXIT_FAILED
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), requeue)
        return EXIT_OK

    def _statuses(self) -> list[Any]:
        return [one.body.get("status") for one in (self.model, *self.adapters)]

    async def _pass(self, machine: Machine) -> float | None:
        """One over the model, then one over each adapter."""
        told: dict[Asked, Told] = {}
        delays = [await self._reconcile(machine, one, told) for one in (self.model, *self.adapters)]
        return min((delay for delay in delays if delay is not None), default=None)

    async def _reconcile(self, machine: Machine, subject: _Subject, told: dict[Asked, Told]) -> float | None:
        """`told`: what replicas have answered in this pass."""
        objects, model = machine.children, self.model
        children = tuple(obj for obj in objects if not is_shared(obj))
        others = (one.uses for one in (model, *self.adapters) if one is not subject)
        world = World(
            body=subject.body,
            children=children,
            shared=tuple(filter(is_shared, objects)),
            used_by_others=frozenset[str]().union(*others),
            pods=machine.pods,
            free=FreeDevices((machine.node,)),
            now=datetime.now(UTC),
            told=told,
        )
        if subject is model:
            world = replace(world, adapters=tuple(one.body for one in self.adapters if self._is_of_model(one)))
        else:
            base = model.body if self._is_of_model(subject) else None
            world = replace(world, children=(), base=base, of_base=children if base else (), has_turn=True)
        decision = subject.decide(world, SETTINGS)
        asked = [need for need in decision.needs if isinstance(need, Asked) and need not in told]
        if asked:
            answers = await asyncio.gather(*(told_at(machine.here(need.pod, need.address)) for need in asked))
            told.update(zip(asked, answers, strict=True))
            decision = subject.decide(world, SETTINGS)
        for desired in decision.desired:
            await machine.apply(desired)
        for change in decision.changes:
            machine.change(change.live, change.patch)
        for body in decision.delete:
            await machine.delete(body)
        subject.uses = subject.uses if decision.uses is None else decision.uses
        subject.body = {**subject.body, "status": decision.status or subject.body.get("status", {})}
        if decision.scale_to is not None:
            subject.body = {**subject.body, "spec": {**subject.body["spec"], "replicas": decision.scale_to}}
            return 0.0
        return decision.requeue_after_seconds

    def _is_of_model(self, adapter: _Subject) -> bool:
        return text_of(adapter.body, "spec", "model") == self.model.name

    def _trouble(self, machine: Machine) -> str | None:
        """Why the command gives up: nothing runs, or a server ended before it was ready. Not for an adapter."""
        of_adapters = frozenset[str]().union(*(one.uses for one in self.adapters)) - self.model.uses
        pods = [pod for pod in machine.running if pod.owner not in of_adapters]
        failed = any(p.process.terminated and p.process.terminated.exit_code and not p.was_ready for p in pods)
        working = any(p.process.terminated is None or p.was_ready for p in pods)
        # Once it was ready, what ends is started again; a group has no pods for a moment then.
        if self.wake.is_set() or self.announced or (working and not failed):
            return None
        ready = self.model.conditions.get("Ready")
        return f"{ready['reason']}: {ready['message']}" if ready else "nothing is running and the model is not ready"

    def _show_conditions(self, trouble: str) -> None:
        """Print the conditions that changed, except what the line about `trouble` is about to say."""
        for kind in CONDITIONS:
            self._show(self.model, kind, kind, trouble)
        for adapter in self.adapters:
            self._show(adapter, "Ready", f"{names.ADAPTER_SHORT}/{adapter.name}", trouble)

    def _show(self, subject: _Subject, kind: str, title: str, trouble: str) -> None:
        condition = subject.conditions.get(kind, {"status": "Unknown"})
        now = (condition["status"], condition.get("reason", ""), condition.get("message", ""))
        if self.shown.get((subject.name, title)) == now or now[0] == "Unknown":
            return
        self.shown[subject.name, title] = now
        reason = "" if now[1] == kind else f"{now[1]}: "
        if not (now[2] and trouble.endswith(now[2])):
            self._say(f"{title:<13} {now[0]:<5}  {reason}{now[2]}")

    async def _announce(self, machine: Machine) -> None:
        self._say("ready")
        plans = [pod.process.plan for pod in machine.running if pod.process.ready and pod.process.plan.ports]
        ports = [port for plan in plans for port in plan.ports.values()]
        async with aiohttp.ClientSession(headers=_authorization(plans[0])) as session:
            async with session.get(f"http://{LOOPBACK}:{ports[0]}/v1/models") as response:
                name = str((await response.json())["data"][0]["id"])
            for port in ports:
                print(f"  API      http://{LOOPBACK}:{port}/v1   (model: {name})")
                print(f"  metrics  http://{LOOPBACK}:{port}/metrics", flush=True)
            if task := task_of(self.body):
                print(f"  try      {command_for(task, f'http://{LOOPBACK}:{ports[0]}', name, 'Hello')}", flush=True)
            if self.options.ask:
                self.held = held = list[str]()
                try:
                    await _ask(session, ports[0], name, self.options.ask, self.options.picture)
                finally:
                    self.held = None
                    for line in held:
                        self._print(line)
        if not self.options.exit:
            print("  Ctrl-C stops it", flush=True)

    def _log(self, pod: str, line: str) -> None:
        if not self.options.quiet:
            self._print(f"            {pod} | {line}")

    def _say(self, text: str) -> None:
        self._print(f"{time.monotonic() - self.started:8.1f} s  {text}")

    def _print(self, line: str) -> None:
        if self.held is not None:
            self.held.append(line)
        else:
            print(line, file=sys.stderr, flush=True)


def _is_settled(adapter: _Subject) -> bool:
    """Waiting alone changes nothing."""
    return adapter.is_ready or "Stalled" in adapter.conditions


def _authorization(plan: ContainerPlan) -> dict[str, str]:
    """The headers for a pod with API keys: its first key. Raises CannotRunHere for one that no client can send."""
    files = (text for path, text in plan.secrets.items() if path.name == names.API_KEY_FILE)
    lines = (line.strip() for text in files for line in text.splitlines())
    variables = (plan.env.get(row.api_key_variable) for row in engines.SETTINGS.values())
    key = next(filter(None, (*lines, *variables)), None)
    if key is not None and not key.isprintable():
        cure = "the engine takes the whole value as one key: write one line without a line break at its end"
        raise CannotRunHere(f"spec.serving.apiKeySecretRef: {cure}")
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _ask(session: aiohttp.ClientSession, port: int, model: str, question: str, picture: Path | None) -> None:
    """Stream the answer to one chat question to standard output."""
    print(f"\n  > {question}\n  ", end="", flush=True)
    content = [{"type": "text", "text": question}, _part(picture)] if picture else question
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    url = f"http://{LOOPBACK}:{port}/v1/chat/completions"
    try:
        answer = await stream(session, url, body, lambda piece: print(piece, end="", flush=True))
    except AnswerRefused as refused:
        raise CannotRunHere(f"the model rejected the question: {refused}") from refused
    first = f"first token after {1000 * answer.first_seconds:.0f} ms"
    print(f"\n\n  {first}, {answer.num_tokens} tokens in {answer.last_seconds:.2f} s\n", flush=True)


def _part(picture: Path) -> dict[str, Any]:
    """A picture as a part of a message. The server finds its format from the bytes. Raises CannotRunHere."""
    try:
        url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    except OSError as error:
        raise CannotRunHere(f"--picture {picture}: {error.strerror}") from error
    return {"type": "image_url", "image_url": {"url": url}}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM (or `--exit`). Returns the exit code of the command."""
    parser = argparse.ArgumentParser(prog="neuron-operator local", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        body, adapters = read_manifests(options.file)
        with _locked_root(options.cache_dir, body, fresh=options.fresh) as root:
            return asyncio.run(_Session(body, root, options, adapters).run())
    except CannotRunHere as error:
        print(f"neuron-operator local: {error}", file=sys.stderr)
        return EXIT_USAGE
