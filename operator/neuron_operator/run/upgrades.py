"""Which models move to a newer runtime image by themselves, one after another (chart value `runtimeUpgrade`: Rolling).

`decide` tells how far each model is; `reconcile` asks here whether it is a model's turn. Does no I/O. A new leader
first hears of every model, so that one in the middle of its upgrade, or a failed one, comes before all that wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from neuron_operator.cluster.reflector import Key
from neuron_operator.read.world import Upgrade


class Turns:
    """Single-threaded; `wake` requests another pass over a model."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._unheard: set[Key] = set()
        self._found: dict[Key, Upgrade] = {}
        """In the order in which they came."""

    def begin(self, models: Iterable[Key]) -> None:
        """A term begins: nobody's turn comes before all of these have told how far they are, or are gone."""
        self._unheard, self._found = set(models), {}

    def take(self, key: Key) -> bool:
        """Whether the model may begin, or has begun. At most one is running; a failed one stops all others.

        A model that has told that it waits holds the turn from here until it tells otherwise: passes overlap.
        """
        if key not in self._found or not self._is_free_for(key):
            return False
        self._found[key] = "Running"
        return True

    def _is_free_for(self, key: Key) -> bool:
        return not self._unheard and all(state == "Waiting" for other, state in self._found.items() if other != key)

    def tell(self, key: Key, state: Upgrade | None) -> None:
        """How far the model is; None: nothing to do, or it is gone."""
        self._unheard.discard(key)
        if state is None:
            self._found.pop(key, None)
        else:
            self._found[key] = state
        first = next((other for other, one in self._found.items() if one == "Waiting"), None)
        if first is not None and self._is_free_for(first):
            self._wake(first)

    def count(self) -> Counter[Upgrade]:
        return Counter(self._found.values())
