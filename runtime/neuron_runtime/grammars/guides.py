"""Guides by llguidance: the engine's `Guides` for a model.

Forms are compiled on threads, tried first in a process with limits (`checker`), and kept by their content. Masks are
made on the engine's thread, for all rows of a step together.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from neuron_runtime.core import FORM_BYTES, BackendLimits, Form, Request, grammar_bytes
from neuron_runtime.engine.guides import Guide, Masks
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.grammars.answers import Answer, Grammar, try_answers
from neuron_runtime.grammars.checker import MAX_REFUSAL_CHARACTERS, Checker
from neuron_runtime.grammars.vocabulary import Vocabulary
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

ENTRY_BYTES = 64 << 10
"""Counted for each form that is kept, also for one that is refused, beside its text and its grammar."""
NUM_THREADS = 2
"""Forms compiled at the same time. A hostile form holds one for some seconds; known forms wait for none."""
WAITING_SECONDS = 0.02
"""Between looks for room, where all forms that are kept have answers."""
MAX_TRIED_TOKENS, MAX_TRIED_SECONDS = 24, 1.0
"""Of each answer at random that tries a form with the model's tokens, and for all of them."""


def grammar_guides(model_dir: Path, limits: BackendLimits) -> GrammarGuides:
    """For a model's folder. Costs nothing before the first form arrives."""
    return GrammarGuides(lambda: load_tokenizer(model_dir), limits.vocabulary_size, limits.max_rows)


@dataclass(slots=True)
class GrammarGuide:
    answer: Answer
    end_token_ids: tuple[int, ...]

    def advance(self, token_ids: Sequence[int]) -> None:
        # Matchers learn them in `masks`, all together on all cores.
        self.answer.tokens.extend(token_ids)

    def num_kept(self, drafts: Sequence[int]) -> int:
        return self.answer.num_kept(drafts)

    def forced(self, most: int) -> tuple[int, ...]:
        return tuple(self.answer.forced()[:most])


class GrammarGuides:
    """Implements `engine.guides.Guides`. All methods are called on the engine's thread."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocabulary_size: int, max_rows: int = 1, max_bytes: int | None = None
    ) -> None:
        """
        load: the model's tokenizer; called when the first form arrives, on a thread.
        vocabulary_size: of the model; 0: that of its tokenizer.
        max_rows: answers at the same time.
        max_bytes: of forms; by default `grammar_bytes`.
        """
        max_bytes = grammar_bytes(max_rows) if max_bytes is None else max_bytes
        self._max_kept_bytes = max(0, max_bytes - NUM_THREADS * FORM_BYTES)  # those are being compiled
        self._load = load
        self._vocabulary_size = vocabulary_size
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._executor: LLExecutor | None = None
        self._checkers = [Checker(FORM_BYTES) for _ in range(NUM_THREADS)]
        self._idle_checkers = list(self._checkers)
        self._grammars: OrderedDict[Form, Future[Grammar]] = OrderedDict()
        self._keeping = threading.Lock()
        self._is_closed = False

    def prepare(self, request: Request) -> Future[Guide]:
        assert request.sampling.form is not None
        field, form = request.sampling.form.field, msgspec.structs.replace(request.sampling.form, field="")
        ends = tuple(sorted(request.sampling.stop_token_ids))
        with self._keeping:
            grammar = self._grammars.get(form)
            if grammar is None:
                grammar = self._grammars[form] = self._threads.submit(self._compile, form)
            self._grammars.move_to_end(form)
        guide: Future[Guide] = Future()
        asked = [guide]

        def made(done: Future[Grammar]) -> None:
            guide = asked.pop()  # `done` keeps this function, which must not keep the answer
            if done.cancelled():
                guide.cancel()
                return
            error = done.exception()
            if isinstance(error, InvalidRequest):
                guide.set_exception(InvalidRequest(f"`{field}` {error}", field=field))
            elif error is not None:
                guide.set_exception(error)
            else:
                guide.set_result(GrammarGuide(Answer(done.result()), ends))

        grammar.add_done_callback(made)
        return guide

    def masks(self, guides: Sequence[Guide], drafts: Sequence[Sequence[int]] = ()) -> Masks:
        vocabulary = self._vocabulary
        if not guides or vocabulary is None:
            return Masks(memoryview(b""), ())
        ours = [guide for guide in guides if isinstance(guide, GrammarGuide)]
        most = max(map(len, drafts), default=0)
        if not most:
            bits, failed = self._masks(ours, vocabulary)
            return Masks(bits.reshape(-1).data, failed)
        all_bits = np.full((len(ours), 1 + most, vocabulary.mask_bytes), 0xFF, dtype=np.uint8)
        all_bits[:, 0], failed = self._masks(ours, vocabulary)
        num_positions = 1
        while num_positions <= most:
            here = [at for at, one in enumerate(drafts) if num_positions <= len(one) and at not in failed]
            for at in here:
                ours[at].advance((drafts[at][num_positions - 1],))
            bits, stuck = self._masks([ours[at] for at in here], vocabulary)
            if stuck:
                break
            all_bits[here, num_positions] = bits
            num_positions += 1
        for at, guide in enumerate(ours):
            guide.answer.retract(0 if at in failed else min(len(drafts[at]), num_positions))
        return Masks(all_bits[:, :num_positions].reshape(-1).data, failed, num_positions)

    def _masks(
        self, guides: Sequence[GrammarGuide], vocabulary: Vocabulary
    ) -> tuple[npt.NDArray[np.uint8], Sequence[int]]:
        """`[guides, bytes]`, and the guides that have failed; see `Masks`."""
        size, end = vocabulary.mask_bytes, vocabulary.end_token_id
        bits = np.empty((len(guides), size), dtype=np.uint8)
        executor = self._executor = self._executor or LLExecutor()
        answers = [guide.answer for guide in guides]
        byte, bit = end // 8, np.uint8(1 << end % 8)
        asked, may_end = list(enumerate(answers)), list[int]()
        while asked:
            # A token that does not fit leaves its matcher in an error, which is found below.
            while behind := [
                (answer.matcher, answer.followed()) for answer in answers if answer.num_followed < len(answer.tokens)
            ]:
                executor.consume_token_par(behind)
            matchers = [(answer.matcher, at) for at, answer in asked]
            executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, size, len(answers))
            may_end = np.flatnonzero(bits[:, byte] & bit).tolist()
            asked = [(at, answers[at]) for at in may_end if answers[at].restart()]
        failed = []
        for at in may_end:
            # The answer may end here, or the matcher has given up, as it does where no token fits.
            bits[at, byte] &= ~bit
            for token in guides[at].end_token_ids:
                if token < end:
                    bits[at, token // 8] |= 1 << token % 8
            if answers[at].matcher.is_error() or not bits[at].any():
                bits[at] = 0xFF
                failed.append(at)
        return bits, failed

    def close(self) -> None:
        self._is_closed = True
        for checker in self._checkers:
            checker.interrupt()
        self._threads.shutdown(cancel_futures=True)
        for checker in self._checkers:
            checker.close()

    # On a thread

    def _compile(self, form: Form) -> Grammar:
        checker = self._idle_checkers.pop()
        try:
            checked = checker.checked(form)
        finally:
            self._idle_checkers.append(checker)
        self._make_room()
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._load(), self._vocabulary_size)
        try:
            grammar = Grammar(checked.grammar, self._vocabulary.for_grammars, checked.max_states)
            answers = [(kind, MAX_TRIED_TOKENS) for kind in self._vocabulary.kinds]
            try_answers(grammar, answers, MAX_TRIED_SECONDS)
        except ValueError as error:
            raise InvalidRequest(f"cannot be compiled: {str(error)[:MAX_REFUSAL_CHARACTERS]}") from error
        return grammar

    def _make_room(self) -> None:
        """Forget forms that no answer has, those first that were unused for longest. Wait until there is room."""
        while not self._is_closed:
            with self._keeping:
                num_bytes = sum(_bytes_of(*entry) for entry in self._grammars.items())
                for entry in list(self._grammars.items()):
                    if num_bytes <= self._max_kept_bytes:
                        return
                    if _is_unused(entry[1]):
                        num_bytes -= _bytes_of(*entry)
                        del self._grammars[entry[0]]
            if num_bytes <= self._max_kept_bytes:
                return
            time.sleep(WAITING_SECONDS)


def _bytes_of(form: Form, grammar: Future[Grammar]) -> int:
    """The most that a known form takes, or a refused one."""
    return grammar.done() * (ENTRY_BYTES + 2 * len(form.text)) + _is_made(grammar) * FORM_BYTES


def _is_made(grammar: Future[Grammar]) -> bool:
    return grammar.done() and not grammar.cancelled() and grammar.exception() is None


def _is_unused(grammar: Future[Grammar]) -> bool:
    return grammar.done() and not (_is_made(grammar) and grammar.result().answers)
