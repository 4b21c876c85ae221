"""The command `kubectl neuron`, installed as `kubectl-neuron`: parses the arguments and runs one subcommand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import aiohttp

from neuron_operator.api import names
from neuron_operator.kubectl import why
from neuron_operator.kubectl.cluster import Address, Kubectl, KubectlFailed
from neuron_operator.local.answers import AnswerRefused, command_for, error_message, served_name, stream, task_of
from neuron_operator.read.objects import is_owned, kind_of, name_of, text
from neuron_operator.read.revision import from_object
from neuron_operator.read.views import Observed, observe
from neuron_operator.read.world import World

PROGRAM = "kubectl neuron"
EXIT_OK, EXIT_FAILED = 0, 1
MAX_LOG_BYTES = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 for success, 1 for a fault; wrong usage exits with 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["plan"]:
            return _plan(arguments[1:])
        options = parsed(arguments)
        values = {flag: getattr(options, flag.replace("-", "_")) or () for flag in _FLAGS}
        kubectl = Kubectl(tuple(f"--{flag}={value}" for flag, given in values.items() for value in given))
        run: Callable[[Kubectl, argparse.Namespace], int] = options.run
        return run(kubectl, options)
    except (KubectlFailed, AnswerRefused, aiohttp.ClientError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_FAILED


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of a subcommand. Exits with 2 if they are wrong."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "question", "") is None:
        options.question = rest[0]  # argparse takes it only directly behind NAME, not behind a flag
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


_FLAGS = {
    "namespace": "namespace of the model (default: the context's)",
    "context": "context of the kubeconfig",
    "kubeconfig": "path of the kubeconfig",
    "cluster": "cluster of the kubeconfig",
    "user": "user of the kubeconfig",
    "as": "user to impersonate",
    "as-group": "group to impersonate; may be repeated",
}
"""Flags that kubectl gets as they are."""


def _parser() -> argparse.ArgumentParser:
    of_kubectl = argparse.ArgumentParser(add_help=False)
    group = of_kubectl.add_argument_group("flags of kubectl")
    for flag, meaning in _FLAGS.items():
        short = ("-n",) if flag == "namespace" else ()
        group.add_argument(*short, f"--{flag}", action="append", metavar=flag.upper(), help=meaning)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Look after NeuronModels and NeuronAdapters.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Kubectl, argparse.Namespace], int], meaning: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, parents=[of_kubectl], help=meaning, description=meaning)
        made.add_argument("name", metavar="NAME", help="of a NeuronModel; of a NeuronAdapter as na/NAME")
        made.set_defaults(run=run)
        return made

    says = "say why a model or an adapter is not ready: conditions, pods, nodes, last error, next command"
    command("why", _why, says)
    logs = command("logs", _logs, "print the log that matters: of the failing container, else of a replica")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing")
    logs.add_argument("--tail", type=_natural, default=100, metavar="N", help="lines (default %(default)s)")
    chat = command("chat", _chat, "talk to a model; without QUESTION, line by line with the whole conversation")
    chat.add_argument("question", nargs="?", metavar="QUESTION", help="ask this and exit")
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    chat.add_argument("--max-tokens", type=_natural, metavar="N", help="per answer (default: what fits)")
    chat.add_argument("--temperature", type=float, metavar="T", help="default: the model's")
    commands.add_parser("plan", add_help=False, help="show where a manifest's model would run, and why")
    return parser


def _plan(arguments: Sequence[str]) -> int:
    """Plans a model. One that is in the cluster has the facts, and the default engine, of its newest revision."""
    from neuron_operator.local import plan  # noqa: PLC0415 - the other subcommands do not need its imports

    parser = argparse.ArgumentParser(prog=f"{PROGRAM} plan", description=plan.DESCRIPTION)
    plan.add_arguments(parser, takes_name=True)
    parser.add_argument("-n", "--namespace", default="", help=_FLAGS["namespace"])
    options = parser.parse_args(arguments)
    if options.name is None:
        return plan.printing(lambda: plan.run(options))
    flags = {flag: getattr(options, flag) for flag in ("namespace", "kubeconfig", "context")}
    kubectl = Kubectl(tuple(f"--{flag}={value}" for flag, value in flags.items() if value))
    model = kubectl.model(options.name)
    selector = f"{names.MODEL_LABEL}={options.name}"
    keepers = kubectl.matching("controllerrevisions", text(model, "metadata", "namespace"), selector)
    revisions = filter(None, map(from_object, keepers))
    newest = max(revisions, key=lambda revision: revision.number, default=None)
    if newest is None:
        raise KubectlFailed(f"{options.name} is not planned yet: see {PROGRAM} why {options.name}")
    return plan.printing(lambda: plan.run(options, (model, newest)))


def _natural(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number from 1 to 1000000")
    return int(value)


def _read(kubectl: Kubectl, name: str) -> tuple[Any, Observed]:
    """The model or adapter with its own Jobs and their pods, and the replicas of the model."""
    body = kubectl.named(name)
    namespace, uid = text(body, "metadata", "namespace"), text(body, "metadata", "uid")
    pods = kubectl.matching("pods", namespace, f"{names.MODEL_LABEL}={why.model_of(body)}")
    jobs = [job for job in kubectl.matching("jobs", namespace, names.OWNED_SELECTOR) if is_owned(job, uid)]
    if jobs:
        pods += kubectl.matching("pods", namespace, f"batch.kubernetes.io/job-name in ({','.join(map(name_of, jobs))})")
    world = World(body=body, children=(), shared=tuple(jobs), pods=tuple(pods), now=datetime.now(UTC))
    return body, observe(world)


def _why(kubectl: Kubectl, options: argparse.Namespace) -> int:
    body, observed = _read(kubectl, options.name)
    culprit = why.culprit(observed)
    nodes: list[Any] | str
    try:
        nodes = kubectl.nodes(sorted(why.nodes_of(observed)))
    except KubectlFailed as failed:
        nodes = str(failed)
    log = ""
    if culprit is not None and culprit.has_log and culprit.container.ended is None:
        try:
            limits = (f"--tail={why.LOG_LINES}", f"--limit-bytes={MAX_LOG_BYTES}")
            log = kubectl.read(*_log_command(observed, culprit), *limits)
        except KubectlFailed as failed:
            log = f"the log cannot be read: {failed}"
    error = why.last_error(culprit, log) if culprit is not None else ""
    adapters: list[Any] | None = None
    if kind_of(body) == names.KIND:
        with contextlib.suppress(KubectlFailed):  # the user may not list them, or the cluster has no such kind
            adapters = kubectl.adapters(observed.model.namespace)
    holder = ""
    with contextlib.suppress(KubectlFailed):  # the user may not read ConfigMaps
        holder = kubectl.holder(observed.model.namespace)
    print(why.report(body, observed, nodes, error.rstrip(": "), holder, adapters=adapters))
    return EXIT_OK


def _log_command(observed: Observed, culprit: why.Culprit) -> tuple[str, ...]:
    where = ("--namespace", observed.model.namespace, "--container", culprit.container.name)
    return ("logs", culprit.pod.name, *where)


def _logs(kubectl: Kubectl, options: argparse.Namespace) -> int:
    _, observed = _read(kubectl, options.name)
    culprit = why.culprit(observed)
    if culprit is None or not culprit.has_log:
        raise KubectlFailed(f"nothing of {options.name} has run yet: {PROGRAM} why {options.name} says why")
    print(f"{PROGRAM}: pod {culprit.pod.name}, container {culprit.container.name}", file=sys.stderr)
    follow = ("--follow",) if options.follow else culprit.log_options
    sys.stderr.flush()
    command = kubectl.command(*_log_command(observed, culprit), *follow, f"--tail={options.tail}")
    os.execv(command[0], command)  # noqa: S606 - the user's own kubectl takes over the terminal


def _chat(kubectl: Kubectl, options: argparse.Namespace) -> int:
    body = kubectl.named(options.name)
    model, asked = body, served_name(body)
    if kind_of(body) == names.ADAPTER_KIND:
        model, asked = kubectl.model(why.model_of(body)), name_of(body)

    if task := task_of(model):
        command = command_for(task, text(model, "status", "url") or "http://...", asked, options.question or "Hello")
        told = f"{name_of(model)} has serving.task {task}, and answers with numbers: ask from a pod of the cluster"
        raise KubectlFailed(f"{told}\n  {command}")

    async def talk() -> int:
        async with kubectl.connected(model) as address:
            await _need_answer(address, name_of(model))
            history = [{"role": "system", "content": options.system}] if options.system else []
            if options.question:
                await _turn(address, asked, history, options.question, options)
                return EXIT_OK
            print(f"{options.name} listens, through {address.way}. An empty line ends the conversation.")
            while question := (await asyncio.to_thread(_line)).strip():
                history = await _turn(address, asked, history, question, options)
            return EXIT_OK

    return asyncio.run(talk())


def _line() -> str:
    """The next question; empty at the end of the input."""
    try:
        return input("> ")
    except EOFError:
        return ""


async def _turn(
    address: Address, model: str, history: list[dict[str, str]], question: str, options: argparse.Namespace
) -> list[dict[str, str]]:
    """Prints the answer as it comes; returns the conversation with it."""
    asked = [*history, {"role": "user", "content": question}]
    chosen = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    body = {"model": model, "messages": asked} | {k: v for k, v in chosen.items() if v is not None}
    url = f"{address.url}/v1/chat/completions"
    answer = await stream(address.session, url, body, lambda piece: print(piece, end="", flush=True))
    speed = f"first token after {1000 * answer.first_seconds:.0f} ms, {answer.num_tokens} tokens"
    print(f"\n\n{speed} in {answer.last_seconds:.2f} s", flush=True)
    return [*asked, {"role": "assistant", "content": answer.text}]


async def _need_answer(address: Address, name: str) -> None:
    """Raises KubectlFailed, with the next command, if no replica can serve; AnswerRefused if the user may not ask."""
    async with address.session.get(f"{address.url}/health") as response:
        if response.status == 200:
            return
        message = error_message(await response.read())
        if response.status not in (404, 503):
            raise AnswerRefused(response.status, message)
        raise KubectlFailed(f"no replica answers ({message}): {PROGRAM} why {name} says why")
