"""Changes to logits before a token is chosen: bias, penalties, allowed and banned tokens. Called by `sampler`.

The order is that of vLLM's sampler (https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler.html), except that
allowed and banned tokens come last instead of first. The result is the same, because logits at -inf stay there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuron_runtime.core import Sampling

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

ALWAYS = 2**62
"""A position that no sequence reaches."""

_ANY = -1
"""Pads banned sequences that are shorter than the longest; matches every token."""
_NOTHING = -2
"""Pads the output at its beginning; matches no token."""

_NO_IDS: IntArray = np.zeros(0, dtype=np.int64)


class SeenTokens:
    """The distinct tokens of a sequence, in order of first occurrence, and how often each occurs in the output."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._index = dict(zip(self._ids.tolist(), range(self._size), strict=True))
        for token in answer:
            self.add(token)

    @property
    def ids(self) -> IntArray:
        return self._ids[: self._size]

    @property
    def counts(self) -> FloatArray:
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count a token of the output."""
        at = self._index.setdefault(token, self._size)
        if at == self._size:
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(at + 64, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(at + 64, dtype=np.float32)))
            self._ids[at] = token
            self._size += 1
        self._counts[at] += 1


@dataclass(slots=True)
class Rules:
    """The adjustments of one sequence."""

    num_prompt_tokens: int
    bias_ids: IntArray
    bias: FloatArray
    repetition: float
    presence: float
    frequency: float
    seen: SeenTokens | None
    """None unless there is a penalty."""
    allowed: IntArray | None
    banned: IntArray
    """Tokens that are always banned."""
    prefixes: IntArray
    """`[sequences, length]`: tokens after which the token in `lasts` is banned; short ones are padded with `_ANY`."""
    lasts: IntArray
    early_ends: IntArray
    """Tokens that are banned at the first `min_tokens` positions of the output."""
    min_tokens: int

    def bans(self, tokens: npt.NDArray[np.int32], position: int) -> IntArray:
        """Tokens that are banned at `position` of the sequence `tokens`."""
        output_position = position - self.num_prompt_tokens
        banned = [self.banned]
        if len(self.lasts):
            length = self.prefixes.shape[1]
            behind = np.full(length, _NOTHING, dtype=np.int64)
            known = min(length, output_position)
            behind[length - known :] = tokens[position - known : position]
            matches = ((self.prefixes == behind) | (self.prefixes == _ANY)).all(axis=1)
            banned.append(self.lasts[matches])
        if output_position < self.min_tokens:
            banned.append(self.early_ends)
        return np.concatenate(banned)


class Adjustments:
    """Per slot: the position of the sequence up to which rows are adjusted, and how."""

    def __init__(self, num_slots: int, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self.until: IntArray = np.zeros(num_slots, dtype=np.int64)
        """0 for a slot without adjustments."""
        self._rules: dict[int, Rules] = {}
        self._counting = np.zeros(num_slots, dtype=bool)

    def set(self, slot: int, params: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Put a sequence into the slot; the first `num_prompt_tokens` of its tokens are the prompt."""
        repeats = params.repetition_penalty != 1.0
        counts = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        always = counts or params.logit_bias or params.bad_words or params.allowed_token_ids is not None
        early = params.min_tokens if params.stop_token_ids else 0
        self.until[slot] = ALWAYS if always else num_prompt_tokens + early if early else 0
        self._counting[slot] = counts
        if not self.until[slot]:
            self._rules.pop(slot, None)
            return
        bias = [(token, value) for token, value in params.logit_bias if token < self.vocabulary_size]
        words = [word for word in params.bad_words if max(word) < self.vocabulary_size]
        longer = [word for word in words if len(word) > 1]
        length = max(map(len, longer), default=1) - 1
        prompt, answer = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        self._rules[slot] = Rules(
            num_prompt_tokens=num_prompt_tokens,
            bias_ids=np.array([token for token, _ in bias], dtype=np.int64),
            bias=np.array([value for _, value in bias], dtype=np.float32),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seen=SeenTokens(prompt if repeats else (), answer) if counts else None,
            allowed=None if params.allowed_token_ids is None else self._known(params.allowed_token_ids),
            banned=np.array([word[0] for word in words if len(word) == 1], dtype=np.int64),
            prefixes=np.array(
                [[_ANY] * (length + 1 - len(word)) + list(word[:-1]) for word in longer], dtype=np.int64
            ).reshape(len(longer), length),
            lasts=np.array([word[-1] for word in longer], dtype=np.int64),
            early_ends=self._known(params.stop_token_ids),
            min_tokens=params.min_tokens,
        )

    def record(self, slots: IntArray, tokens: IntArray) -> None:
        """Token `tokens[i]` was chosen for `slots[i]`."""
        for i in np.flatnonzero(self._counting[slots]).tolist():
            seen = self._rules[int(slots[i])].seen
            assert seen is not None
            seen.add(int(tokens[i]))

    def adjusted(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Rows to adjust, where row i chooses the token at `positions[i]` of the sequence in `slots[i]`."""
        return np.flatnonzero(positions < self.until[slots])

    def apply(
        self,
        logits: FloatArray,
        slots: IntArray,
        positions: IntArray,
        tokens: npt.NDArray[np.int32],
        late: Mapping[int, IntArray],
    ) -> None:
        """Change `logits` `[rows, vocabulary]` in place.

        Args:
            slots, positions: of every row, as in `adjusted`.
            tokens: `[slots, length]`, the tokens of the sequences.
            late: by row, the only tokens that it may choose; takes precedence over the request's own parameters.
        """
        adjusted = self.adjusted(slots, positions).tolist()
        rules = [self._rules[int(slots[row])] for row in adjusted]
        flat = logits.reshape(-1)
        self._add_bias(flat, adjusted, rules)
        self._penalise(flat, adjusted, rules)
        for row, only in late.items():
            keep_only(logits[row], only)
        for row, rule in zip(adjusted, rules, strict=True):
            if rule.allowed is not None:
                both = np.intersect1d(rule.allowed, late[row]) if row in late else rule.allowed
                keep_only(logits[row], both if len(both) else late[row])
            ban(logits[row], rule.bans(tokens[slots[row]], int(positions[row])))

    def _add_bias(self, flat: FloatArray, rows: list[int], rules: list[Rules]) -> None:
        at = self._places(rows, [rule.bias_ids for rule in rules])
        if len(at):
            flat[at] += np.concatenate([rule.bias for rule in rules])

    def _penalise(self, flat: FloatArray, rows: list[int], rules: list[Rules]) -> None:
        """Repetition divides positive logits and multiplies others; frequency and presence are subtracted."""
        seen = [rule.seen.ids if rule.seen else _NO_IDS for rule in rules]
        at = self._places(rows, seen)
        if not len(at):
            return
        lengths = [len(ids) for ids in seen]
        repetition, presence, frequency = (
            np.repeat(np.array([getattr(rule, name) for rule in rules], dtype=np.float32), lengths)
            for name in ("repetition", "presence", "frequency")
        )
        counts = np.concatenate([rule.seen.counts for rule in rules if rule.seen])
        values = flat[at]
        values = np.where(values > 0, values / repetition, values * repetition)
        flat[at] = values - frequency * counts - presence * (counts > 0)

    def _places(self, rows: list[int], ids: list[IntArray]) -> IntArray:
        """Indexes of the tokens `ids[i]` of row `rows[i]` in the flat logits."""
        some = [ids_of_row + row * self.vocabulary_size for row, ids_of_row in zip(rows, ids, strict=True)]
        return np.concatenate(some) if some else _NO_IDS

    def _known(self, token_ids: Iterable[int]) -> IntArray:
        """The tokens that the model has; a tokenizer may have more."""
        return np.array(sorted(token for token in token_ids if token < self.vocabulary_size), dtype=np.int64)


def allowed_ids(mask: memoryview, vocabulary_size: int) -> IntArray:
    """The tokens of a mask, see `Late`."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocabulary_size, bitorder="little")
    return np.flatnonzero(bits)


def keep_only(row: FloatArray, token_ids: IntArray) -> None:
    """Set all other tokens to -inf. If the kept ones are all -inf already, they become equally likely."""
    kept = row[token_ids]
    row.fill(-np.inf)
    row[token_ids] = kept if kept.max() > -np.inf else 0.0


def ban(row: FloatArray, token_ids: IntArray) -> None:
    """Set these tokens to -inf, unless no other token would remain."""
    if not len(token_ids):
        return
    before = row[token_ids]
    row[token_ids] = -np.inf
    if row.max() == -np.inf:
        row[token_ids] = before
