"""The adapters of a front end: brings each wanted one to this machine, checks it, and has the engine load it.

The routes ask it for states, and to load or unload one; the front end tells it what the engine says. What is ready is
in the table of targets. Each adapter goes its own way: one that fails, or takes long, holds up nothing else.
"""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from neuron_runtime.config import AdapterOptions
from neuron_runtime.console import say
from neuron_runtime.errors import BackendFailed, ExitCode, FatalError, InvalidRequest, ServingError
from neuron_runtime.flags import model_uri
from neuron_runtime.reading_threads import ReadingThreads
from neuron_runtime.record import MAX_MESSAGE_CHARACTERS, AdapterFacts
from neuron_runtime.requests.targets import Target, Targets
from neuron_runtime.requests.texts import Text
from neuron_runtime.server.adapter_list import NAME_RULE, ListFile, Wanted, is_name, keep, kept
from neuron_runtime.server.objects import AdapterState, AdapterStates, StateName

PRUNE_SECONDS = 600.0
"""How often what was fetched and is not needed any more is looked for."""
LOOK_SECONDS = 1.0
"""How often the list file is read."""
NUM_AT_ONCE = 4
"""Adapters that are fetched and checked at the same time."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0
"""A failed adapter is tried again after this time, which doubles each time."""
START_SECONDS = 60.0
"""A model that is ready waits so long for the adapters that it starts with."""


class Client(Protocol):
    """The engine, as `EngineClient` has it."""

    ready: bool

    def load_adapter(self, digest: str, folder: Path, name: str) -> None:
        """Have it loaded; `Adapters.loaded` is told how it went. name: one that clients ask for."""

    def drop_adapter(self, digest: str) -> None:
        """No further request uses it."""

    def uses_adapter(self, digest: str) -> bool:
        """Whether a request that has not ended does."""


Bring = Callable[[Wanted, Path], tuple[Path, AdapterFacts, Text]]
"""Fetches an adapter and checks that it fits the model in a folder; returns its own folder, what it is, and its chat
template and defaults. Raises ServingError."""


@dataclass(eq=False)
class _Version:
    """An adapter as it is wanted now, on its way."""

    wanted: Wanted
    state: StateName = "Fetching"
    reason: str = ""
    message: str = ""
    error: ServingError | None = None
    facts: AdapterFacts | None = None
    text: Text | None = None
    folder: Path = Path()
    created: int = field(default_factory=lambda: int(time.time()))
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """It is ready, or has failed."""
    task: asyncio.Task[None] | None = None
    pause_seconds: float = 0.0
    """Before it is tried."""

    @property
    def digest(self) -> str:
        return "" if self.facts is None else self.facts.digest

    def fail(self, error: ServingError, reason: str) -> None:
        self.state, self.reason, self.message, self.error = "Failed", reason, str(error), error
        self.pause_seconds = min(max(RETRY_SECONDS, 2 * self.pause_seconds), MAX_RETRY_SECONDS)
        self.ended.set()


class Adapters:
    """See the module. All methods run on the event loop.

    Args:
        bring: called on threads.
        prune: deletes what was brought to this machine, but for these folders; called on a thread.
        run_dir: where the adapters of commands and requests are kept.
        list_file: the adapters of whoever serves the model; they win over kept ones with the same name.
        allows_requests: whether requests may load and unload adapters.
    """

    def __init__(
        self,
        options: AdapterOptions,
        targets: Targets,
        client: Client,
        bring: Bring,
        *,
        prune: Callable[[Collection[Path]], None] = lambda in_use: None,
        run_dir: Path,
        list_file: Path | None = None,
        allows_requests: bool = False,
    ) -> None:
        self._options = options
        self._targets = targets
        self._client = client
        self._bring = bring
        self._prune = prune
        self._pruned = time.monotonic()
        self._run_dir = run_dir
        self._list_file = None if list_file is None or not options.max_active else ListFile(list_file)
        self._allows_requests = allows_requests
        self._kept = kept(run_dir) if options.max_active else {}
        self._listed: Mapping[str, Wanted] = {}
        self._versions: dict[str, _Version] = {}
        self._sent: dict[str, Path] = {}
        """Folders of the adapters that the engine knows, by digest."""
        self._leaving: set[str] = set()
        """Digests that nobody could ask for at the last look."""
        self._threads = ReadingThreads(NUM_AT_ONCE, "adapters")
        """Of their own: a thread goes on after its adapter has left, and the text of a model must not wait for it."""
        self._model_dir: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._first: list[_Version] | None = None
        """The adapters that the server starts with; None: the engine was not ready yet."""
        self._first_until = 0.0
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._look()
        self._apply()
        if self._options.max_active:
            self._looking = asyncio.create_task(self._keep_looking())

    def close(self) -> None:
        for task in (self._looking, *(version.task for version in self._versions.values())):
            if task is not None:
                task.cancel()
        self._threads.close()

    # What the engine says

    def model_found(self, model_dir: Path) -> None:
        """It is on this machine, and its text is loaded."""
        if not self._model_dir.done():
            self._model_dir.set_result(model_dir)

    def engine_ready(self) -> None:
        """An engine is ready: a new one knows no adapters, and one that is not new may know others."""
        if self._first is None:
            self._first, self._first_until = list(self._versions.values()), time.monotonic() + START_SECONDS
        wanted = self._referenced()
        checked = {one.digest: one.folder for one in self._versions.values() if one.facts is not None}
        folders = {digest: folder for digest, folder in {**self._sent, **checked}.items() if digest in wanted}
        self._sent.clear()
        for version in self._versions.values():
            if version.facts is not None:
                # Requests for one that was ready may come: the engine holds them until it has read the adapter.
                version.state = "Loading"
        for digest, folder in folders.items():
            self._send(digest, folder)

    def loaded(self, digest: str, failure: str) -> None:
        """The engine has loaded an adapter, or cannot, or cannot read it again."""
        for version in self._versions.values():
            if version.digest != digest:
                continue
            if failure:
                self._fail(version, FatalError(ExitCode.INVALID_ADAPTER, failure), "LoadFailed")
                version.facts = None
                version.task = asyncio.create_task(self._prepare(version))
            else:
                self._become_ready(version)
        if failure:
            self._targets.lose(digest)

    def check_start(self) -> None:
        """Raises BackendFailed while adapters that the server starts with are not loaded, for a time at most: a
        replica that replaces another one should be able to do the same."""
        if self._first is None or time.monotonic() > self._first_until:
            return
        ahead = [one.wanted.name for one in self._first if not one.ended.is_set() and self._is_current(one)]
        if ahead:
            raise BackendFailed(f"not ready: loading the adapters {', '.join(ahead)}")

    # What routes ask

    @property
    def states(self) -> AdapterStates:
        options = self._options
        return AdapterStates(
            max_active=options.max_active,
            max_rank=options.max_rank,
            adapters=[_shown(version) for version in self._versions.values()],
        )

    async def load(self, name: str | None, path: str | None, *, in_place: bool) -> None:
        """Load an adapter for a request, and keep it. Raises InvalidRequest, and BackendFailed without an engine."""
        self._check_allowed()
        if not name or not path:
            raise InvalidRequest(
                "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name"
            )
        if not is_name(name):
            raise InvalidRequest.at("lora_name", f"must be {NAME_RULE}")
        if self._targets.is_base(name):
            raise InvalidRequest.at("lora_name", f"'{name}' is a name of the base model")
        if name in self._listed:
            raise InvalidRequest.at("lora_name", f"'{name}' is an adapter of this server's list: change it there")
        if name in self._versions and not in_place:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                field="lora_name",
            )
        if name in self._versions and not self._versions[name].ended.is_set():
            raise InvalidRequest(f"The lora adapter '{name}' is being loaded: wait for it.", field="lora_name")
        if not self._client.ready:
            raise BackendFailed("not ready: adapters are loaded once the model is")
        try:
            wanted = Wanted(name, model_uri(path))
        except (FatalError, OSError) as error:
            raise InvalidRequest.at("lora_path", f"names no adapter: {error}") from error
        before = self._kept.get(name)
        if name in self._versions:
            # The same path may have other weights now.
            self._end(self._versions.pop(name))
        self._kept[name] = wanted
        self._apply()
        version = self._versions[name]
        await version.ended.wait()
        if not self._is_current(version):
            raise InvalidRequest(f"the adapter '{name}' was unloaded while it was loaded", field="lora_name")
        if version.error is None:
            self._keep()
            return
        del self._kept[name]
        if before is not None:
            self._kept[name] = before
        self._apply()
        missing = getattr(version.error, "exit_code", None) == ExitCode.MODEL_NOT_FOUND
        message = f"the adapter '{name}' cannot be loaded: {version.reason}: {version.message}"
        raise InvalidRequest(message, field="lora_path", status=404 if missing else 400)

    def unload(self, name: str | None) -> None:
        """Forget an adapter that a command or a request named. Running requests go on. Raises InvalidRequest."""
        self._check_allowed()
        if not name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", field="lora_name")
        if name in self._listed:
            raise InvalidRequest.at("lora_name", f"'{name}' is an adapter of this server's list: remove it there")
        if name not in self._kept:
            raise InvalidRequest(f"The lora adapter '{name}' cannot be found.", field="lora_name", status=404)
        del self._kept[name]
        self._keep()
        self._apply()

    def names(self, digests: Iterable[str]) -> list[str]:
        """The names that stand for these adapters now."""
        wanted = set(digests)
        return [name for name, target in self._targets if target.adapter and target.adapter in wanted]

    # What is wanted, and how it gets there

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._look():
                self._apply()
            self._drop_unused()
            if time.monotonic() - self._pruned > PRUNE_SECONDS:
                self._pruned = time.monotonic()
                in_use = {*self._sent.values(), *(one.folder for one in self._versions.values())}
                self._threads.submit(self._prune, in_use)

    def _look(self) -> bool:
        changed = None if self._list_file is None else self._list_file.changed()
        if changed is None:
            return False
        self._listed = changed
        return True

    def _keep(self) -> None:
        keep(self._kept, self._run_dir)

    def _apply(self) -> None:
        """Begin what is wanted and new, end what is not wanted any more."""
        wanted = {**self._kept, **self._listed}
        for name in [one for one in self._versions if one not in wanted]:
            self._end(self._versions.pop(name))
            self._targets.remove(name)
            say(f"adapter {name}: removed")
        for name, one in wanted.items():
            version = self._versions.get(name)
            if version is None or version.wanted != one:
                if version is not None:
                    self._end(version)
                # What is served under this name goes on until the new version is ready.
                version = self._versions[name] = _Version(one)
                self._begin(version)

    def _begin(self, version: _Version) -> None:
        name = version.wanted.name
        if self._targets.is_base(name):
            self._fail(version, InvalidRequest(f"{name} is a name of the base model: choose another one"), "NameTaken")
        elif not is_name(name):
            self._fail(version, InvalidRequest(f"the name must be {NAME_RULE}"), "InvalidName")
        else:
            self._targets.hold(name, "Fetching")
            version.task = asyncio.create_task(self._prepare(version))

    def _end(self, version: _Version) -> None:
        if version.task is not None:
            version.task.cancel()
        version.ended.set()

    async def _prepare(self, version: _Version) -> None:
        """Fetch and check a version until it succeeds, then have the engine load it."""
        while version.facts is None:
            await asyncio.sleep(version.pause_seconds)
            await self._try(version)
        self._proceed(version, "Loading")
        if self._client.ready:
            self._send(version.digest, version.folder)

    async def _try(self, version: _Version) -> None:
        try:
            model_dir = await asyncio.shield(self._model_dir)
            brought = asyncio.get_running_loop().run_in_executor(self._threads, self._bring, version.wanted, model_dir)
            version.folder, version.facts, version.text = await brought
        except FatalError as error:
            self._fail(version, error, error.exit_code.reason)
        except ServingError as error:
            self._fail(version, error, "SourceUnreachable")
        except Exception as error:  # noqa: BLE001 - a bug that one adapter meets must not end the server
            traceback.print_exception(error)
            self._fail(version, ServingError(f"{type(error).__name__}: {error}"), "InternalError")

    def _send(self, digest: str, folder: Path) -> None:
        self._sent[digest] = folder
        name = next((one.wanted.name for one in self._versions.values() if one.digest == digest), "")
        self._client.load_adapter(digest, folder, name)

    def _proceed(self, version: _Version, state: StateName) -> None:
        """A state on the way; what has failed shows its failure until it is ready."""
        if version.error is None:
            version.state = state
            self._targets.hold(version.wanted.name, state)

    def _fail(self, version: _Version, error: ServingError, reason: str) -> None:
        name, again = version.wanted.name, (reason, str(error)) == (version.reason, version.message)
        version.fail(error, reason)
        if not self._targets.is_base(name):
            self._targets.hold(name, f"{reason}: {_public(str(error))}")
        if not again:
            say(f"adapter {name}: {reason}: {error}")

    def _become_ready(self, version: _Version) -> None:
        wanted, facts = version.wanted, version.facts
        assert facts is not None
        if version.state == "Ready":
            return
        version.state, version.reason, version.message, version.error = "Ready", "", "", None
        version.pause_seconds = 0.0
        root, parent = wanted.uri.removeprefix("file://"), wanted.parent or self._targets.base.name
        self._targets.serve(Target(wanted.name, facts.digest, root, parent, version.created, version.text))
        version.ended.set()
        say(f"adapter {wanted.name}: ready (rank {facts.rank}, {facts.digest[:12]})")

    def _referenced(self) -> set[str]:
        """Digests that requests may ask for now or soon."""
        return {target.adapter for _, target in self._targets} | {one.digest for one in self._versions.values()}

    def _drop_unused(self) -> None:
        """Have the engine forget what nobody can ask for since the last look, once no request uses it."""
        unused = self._sent.keys() - self._referenced()
        for digest in unused & self._leaving:
            if not self._client.uses_adapter(digest):
                del self._sent[digest]
                if self._client.ready:
                    self._client.drop_adapter(digest)
        self._leaving = unused & self._sent.keys()

    def _is_current(self, version: _Version) -> bool:
        return self._versions.get(version.wanted.name) is version

    def _check_allowed(self) -> None:
        if not self._options.max_active:
            raise InvalidRequest("this server serves no adapters: start it with --enable-lora or --max-loras")
        if not self._allows_requests:
            message = (
                "requests may not change the adapters of this server: start it with --runtime-adapters allow or "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=true"
            )
            raise InvalidRequest(message, status=403, code="not_allowed")


def _shown(version: _Version) -> AdapterState:
    facts = version.facts
    return AdapterState(
        name=version.wanted.name,
        state=version.state,
        reason=version.reason,
        message=_public(version.message),
        digest=version.digest,
        rank=0 if facts is None else facts.rank,
        bytes=0 if facts is None else facts.num_bytes,
    )


_NAME = r"[^\s/:;,'\"()]"
_PATH = re.compile(rf"(?:file://|(?<![\w/:.]))(?:/{_NAME}+)*/({_NAME}+)/?")
_USER = re.compile(r"(?<=://)[^\s/]*@")
_QUERY = re.compile(r"(\w://[^\s?]*)\?[^\s'\"]*?(?=[):;,.]*(?:[\s'\"]|$))")


def _public(message: str) -> str:
    """An error for whoever may ask, without a key: files by their names alone, no paths of this machine, and addresses
    without what may be secret in them. The log has it whole, this has whole words of its beginning."""
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[:MAX_MESSAGE_CHARACTERS].rpartition(' ')[0]} ..."
    return _PATH.sub(r"\1", _QUERY.sub(r"\1", _USER.sub("", message)))
