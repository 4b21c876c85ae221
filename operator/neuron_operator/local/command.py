"""Serve a manifest on this machine, without a cluster.

Called by `__main__` for `neuron-operator local`. Runs the same pure decision as the operator in a cluster against a
`Machine`, and prints what changes, the addresses, and optionally the answer to one question.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from neuron_operator.api import engines, manifest, names
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.fields import as_json
from neuron_operator.api.reasons import CONDITIONS
from neuron_operator.decide.course import decide
from neuron_operator.local.answers import AnswerRefused, stream
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
from neuron_operator.read.objects import is_shared, items, written
from neuron_operator.read.objects import text as text_of
from neuron_operator.read.world import (
    ClaimTemplate,
    EngineSettings,
    FreeDevices,
    GroupSettings,
    Place,
    Settings,
    StorageSettings,
    World,
)

DEMO = Path(str(files("neuron_operator"))) / "data" / "neuronmodel-local.yaml"
"""Its model is in the same folder. In a checkout both are links into `examples`."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", type=Path, help="manifest that contains one NeuronModel; -: standard input")
    source.add_argument("--demo", action="store_const", dest="file", const=DEMO, help="use the demo model's manifest")
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port of the first replica; others take the next ones (default %(default)s)",
    )
    parser.add_argument("--ask", metavar="QUESTION", help="stream the answer to this question once the model is ready")
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
    """The NeuronModel of a YAML file (`-`: of standard input), with the metadata an API server would add. It may be in
    a List, as `kubectl get -o yaml` prints it.

    Raises CannotRunHere if the file is missing, is not YAML, does not contain exactly one NeuronModel of this version,
    or contains an invalid name or namespace.
    """
    try:
        # Like kubectl, which sends JSON to the API server.
        text = sys.stdin.read() if path == Path("-") else path.read_text()
        documents = [as_json(d) for d in yaml.safe_load_all(text) if d]
    except OSError as error:
        raise CannotRunHere(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotRunHere(f"{path} is not YAML that converts to JSON: {' '.join(str(error).split())}") from error
    documents += [item for d in documents if text_of(d, "kind").endswith("List") for item in items(d, "items")]
    models = [d for d in documents if text_of(d, "kind") == names.KIND]
    if len(models) != 1:
        raise CannotRunHere(f"{path} contains {len(models)} NeuronModels; name a file with exactly one")
    body: dict[str, Any] = models[0]
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
    body = _with_absolute_files(body, path.resolve().parent)
    created = written(datetime.now(UTC))
    body["metadata"] = {**metadata, "uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": created}
    return body


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


@dataclass
class _Session:
    """One run of the command: the loop around `decide`, and its output."""

    body: dict[str, Any]
    root: Path
    options: argparse.Namespace
    status: dict[str, Any] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)
    shown: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    announced: bool = False
    held: list[str] | None = None
    """Lines that wait until an answer on standard output is complete; None: none wait."""

    async def run(self) -> int:
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
            before = self.status
            requeue = await self._pass(machine)
            if self.status != before:
                continue  # in a cluster, too, a written status wakes the operator
            ready = self._condition_ready().get("status") == "True"
            trouble = None if ready else self._trouble(machine)
            self._show_conditions(trouble or "")
            if ready and not self.announced:
                self.announced = True
                await self._announce(machine)
                if self.options.exit:
                    return EXIT_OK
            if trouble is not None:
                print(f"neuron-operator local: {trouble}", file=sys.stderr)
                return EXIT_FAILED
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), requeue)
        return EXIT_OK

    async def _pass(self, machine: Machine) -> float | None:
        objects = machine.children
        world = World(
            body={**self.body, "status": self.status},
            children=tuple(obj for obj in objects if not is_shared(obj)),
            shared=tuple(filter(is_shared, objects)),
            pods=machine.pods,
            free=FreeDevices((machine.node,)),
            now=datetime.now(UTC),
        )
        decision = decide(world, SETTINGS)
        for desired in decision.desired:
            await machine.apply(desired)
        for change in decision.changes:
            machine.change(change.live, change.patch)
        for body in decision.delete:
            await machine.delete(body)
        self.status = decision.status or self.status
        return decision.requeue_after_seconds

    def _trouble(self, machine: Machine) -> str | None:
        """Why the command gives up: nothing runs, or a server ended before it was ready."""
        pods = machine.running
        failed = any(p.process.terminated and p.process.terminated.exit_code and not p.was_ready for p in pods)
        working = any(p.process.terminated is None or p.was_ready for p in pods)
        # Once it was ready, what ends is started again; a group has no pods for a moment then.
        if self.wake.is_set() or self.announced or (working and not failed):
            return None
        ready = self._condition_ready()
        return f"{ready['reason']}: {ready['message']}" if ready else "nothing is running and the model is not ready"

    def _condition_ready(self) -> Mapping[str, str]:
        return next((c for c in self.status.get("conditions", ()) if c["type"] == "Ready"), {})

    def _show_conditions(self, trouble: str) -> None:
        """Print the conditions that changed, except what the line about `trouble` is about to say."""
        for condition in self.status.get("conditions", ()):
            kind, message = condition["type"], condition.get("message", "")
            now = (condition["status"], condition["reason"], message)
            if self.shown.get(kind) == now or kind not in CONDITIONS or now[0] == "Unknown":
                continue
            self.shown[kind] = now
            reason = "" if now[1] == kind else f"{now[1]}: "
            if not (message and trouble.endswith(message)):
                self._say(f"{kind:<13} {now[0]:<5}  {reason}{message}")

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
            if self.options.ask:
                self.held = held = list[str]()
                try:
                    await _ask(session, ports[0], name, self.options.ask)
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


async def _ask(session: aiohttp.ClientSession, port: int, model: str, question: str) -> None:
    """Stream the answer to one chat question to standard output."""
    print(f"\n  > {question}\n  ", end="", flush=True)
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
    url = f"http://{LOOPBACK}:{port}/v1/chat/completions"
    try:
        answer = await stream(session, url, body, lambda piece: print(piece, end="", flush=True))
    except AnswerRefused as refused:
        raise CannotRunHere(f"the model rejected the question: {refused}") from refused
    first = f"first token after {1000 * answer.first_seconds:.0f} ms"
    print(f"\n\n  {first}, {answer.num_tokens} tokens in {answer.last_seconds:.2f} s\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM (or `--exit`). Returns the exit code of the command."""
    parser = argparse.ArgumentParser(prog="neuron-operator local", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        body = read_manifest(options.file)
        with _locked_root(options.cache_dir, body, fresh=options.fresh) as root:
            return asyncio.run(_Session(body, root, options).run())
    except CannotRunHere as error:
        print(f"neuron-operator local: {error}", file=sys.stderr)
        return EXIT_USAGE
