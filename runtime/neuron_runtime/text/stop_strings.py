"""Stop strings: texts at which the output ends, independent of token boundaries.

One `StopStrings` per stream, fed by the detokenizer. Text that could be the beginning of a stop string is held back
until it is known not to be. The caller aborts the request in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a stream of text for the first stop string that completes (the longest, if several do at once).

    The output ends before the stop string, or after it with `include`. The result depends only on the text, not on how
    it was split into pieces.

    Args:
        stops: non-empty strings; without any, text passes through.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def feed(self, piece: str, may_stop: bool = True) -> str:
        """The text that may be emitted now; empty once stopped.

        may_stop: whether a stop string that ends in this piece stops the text.
        """
        if not self._stops:
            return piece
        if self.stopped is not None:
            return ""
        text, num_held = self._held + piece, len(self._held)
        positions = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(num_held + 1 - len(stop), 0))) >= 0
        ]
        if positions and may_stop:
            end, at, self.stopped = min(positions)
            self._held = ""
            return text[: end if self._include else at]
        keep = num_possible_start_characters(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, at the end of a stream without a stop string."""
        held, self._held = self._held, ""
        return held


def num_possible_start_characters(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `stops`."""
    longest = min(len(text), max(map(len, stops)) - 1)
    ends = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops))
    return next(ends, 0)
