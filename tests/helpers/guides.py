"""Guides by a rule of the tests instead of a grammar: which token ids may follow an output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from neuron_runtime.core import Form, Request
from neuron_runtime.engine.guides import Guide, Masks
from neuron_runtime.errors import InvalidRequest

FORM = Form("choice", '["what the rule says"]')
Rule = Callable[[list[int]], tuple[int, ...]]
"""Returns the token ids that may follow the output so far; none: it fails."""


def no_rule(request: Request) -> Rule | None:
    return None


def mask_of(token_ids: Iterable[int], vocabulary_size: int) -> memoryview:
    """The bits of these tokens, see `core.Late`."""
    bits = bytearray((vocabulary_size + 31) // 32 * 4)
    for token in token_ids:
        bits[token // 8] |= 1 << token % 8
    return memoryview(bits)


class RuleGuide:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.output: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> None:
        self.output += token_ids

    def num_kept(self, drafts: Sequence[int]) -> int:
        return next((at for at, one in enumerate(drafts) if one not in self._behind(drafts[:at])), len(drafts))

    def forced(self, most: int) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < most and len(allowed := self._behind(found)) == 1:
            found += allowed
        return tuple(found)

    def _behind(self, drafts: Sequence[int]) -> tuple[int, ...]:
        return self.rule([*self.output, *drafts])


class RuleGuides:
    """Implements `Guides`. `prepare` is done at once, unless the request is in `held`."""

    def __init__(self, rule_of: Callable[[Request], Rule | None], vocabulary_size: int) -> None:
        self._rule_of = rule_of
        self._vocabulary_size = vocabulary_size
        self.held: dict[str, Future[Guide]] = {}

    def prepare(self, request: Request) -> Future[Guide]:
        held = self.held.get(request.request_id)
        if held is not None:
            return held
        guide: Future[Guide] = Future()
        rule = self._rule_of(request)
        if rule is None:
            guide.set_exception(InvalidRequest("no rule for this form", field="response_format"))
        else:
            guide.set_result(RuleGuide(rule))
        return guide

    def masks(self, guides: Sequence[Guide], drafts: Sequence[Sequence[int]] = ()) -> Masks:
        every, most, bits = range(self._vocabulary_size), max(map(len, drafts), default=0), bytearray()
        failed, rows = [], []
        for at, guide in enumerate(guides):
            assert isinstance(guide, RuleGuide)
            of_guide = drafts[at] if drafts else ()
            rows.append([guide._behind(of_guide[:place]) for place in range(1 + len(of_guide))])
            if not rows[-1][0]:
                failed.append(at)
            elif () in rows[-1]:
                most = min(most, rows[-1].index(()) - 1)
        for row in rows:
            for allowed in (*row, *[every] * most)[: 1 + most]:
                bits += mask_of(allowed or every, self._vocabulary_size)
        return Masks(memoryview(bits), failed, 1 + most)

    def close(self) -> None:
        pass
