"""Stop strings: texts at which an answer ends, wherever the borders between tokens lie.

One per stream, fed with the pieces of the detokenizer. Text that could be the beginning of a stop string is held
back until it is known not to be. Aborting the request in the engine is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a stream of text for the first stop string that completes (of several at once, the longest).

    The answer ends before the stop string, or behind it with `include`. What comes out depends on the text alone,
    not on how it was cut into pieces.

    Args:
        stops: non-empty strings; none at all makes this a pass-through.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def feed(self, piece: str) -> str:
        """The text that may be shown now; nothing more once stopped."""
        if not self._stops:
            return piece
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include else at]
        keep = num_possible_start_characters(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back when the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def num_possible_start_characters(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`, and is not all of it."""
    longest = min(len(text), max(map(len, stops)) - 1)
    ends = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops))
    return next(ends, 0)
