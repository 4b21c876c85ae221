"""The names that clients may ask for, and what each one stands for: the base model, or an adapter on it.

A front end owns one table, which its adapters change; admission asks it what a request is for, and `/v1/models` lists
it. `LLM` has one with the base model alone. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neuron_runtime.errors import AdapterNotReady, InvalidRequest, ServingError
from neuron_runtime.requests.texts import Text


@dataclass(frozen=True)
class Target:
    """What computes the answer to a request."""

    name: str
    """The name of the model in answers: the adapter's, or the first one of the base model."""
    adapter: str = ""
    """Digest of the adapter; empty: the base model alone."""
    root: str = ""
    """Where it comes from, as `/v1/models` has it."""
    parent: str | None = None
    """The base model of an adapter."""
    created: int | None = None
    """Seconds since 1970; None: as the server."""
    text: Text | None = None
    """Chat template and defaults; None: the model's."""


class Targets:
    """The served names of the base model, which stay, and the names of adapters, which come and go."""

    def __init__(self, served_names: Sequence[str]) -> None:
        base = Target(served_names[0], root=served_names[0])
        self._base = dict.fromkeys(served_names, base)
        self._adapters: dict[str, Target] = {}
        self._held: dict[str, str] = {}
        """How far an adapter is that cannot be used yet."""

    def __iter__(self) -> Iterator[tuple[str, Target]]:
        """Each name that is served now, with its target."""
        yield from self._base.items()
        yield from self._adapters.items()

    @property
    def base(self) -> Target:
        return next(iter(self._base.values()))

    def is_base(self, name: str) -> bool:
        return name in self._base

    def of(self, name: str | None) -> Target:
        """The target of a request; none or an empty name means the base model.

        Raises InvalidRequest (404) for an unknown name, and AdapterNotReady.
        """
        if not name:
            return self.base
        target = self._base.get(name) or self._adapters.get(name)
        if target is not None:
            return target
        if name in self._held:
            raise AdapterNotReady(f"the adapter `{name}` is not ready ({self._held[name]})")
        known = ", ".join((*self._base, *self._adapters))
        message = f"the model `{name}` does not exist; served models: {known}"
        raise InvalidRequest(message, field="model", status=404, code="model_not_found")

    def serve(self, target: Target) -> None:
        """Requests for this adapter have this target from now on."""
        self._held.pop(target.name, None)
        self._adapters[target.name] = target

    def hold(self, name: str, why: str) -> None:
        """Requests for this adapter are told why it is not ready, unless an earlier version is served."""
        self._held[name] = why

    def lose(self, digest: str) -> None:
        """The engine has this adapter no more: its names, each of which `hold` has told of, wait for a version."""
        self._adapters = {name: one for name, one in self._adapters.items() if one.adapter != digest}

    def loss(self, name: str, why: str) -> ServingError:
        """What a client is told whose request the engine refused, because it does not have this adapter any more."""
        try:
            self.of(name)
        except ServingError as error:
            return error
        return AdapterNotReady(f"the adapter `{name}` is not ready ({why})")

    def remove(self, name: str) -> None:
        """Nobody knows the adapter any more."""
        self._adapters.pop(name, None)
        self._held.pop(name, None)
