"""Guides by llguidance: the engine's `Guides` for a model.

Forms are compiled on threads, tried first in a process with limits (`checker`), and kept by their content. Masks are
made on the engine's thread, for all rows of a step together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher

from neuron_runtime.core import FORMS_BYTES, BackendLimits, Form, Request, guide_bytes
from neuron_runtime.engine.guides import Guide, Masks
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.grammars.checker import MAX_REFUSAL_CHARACTERS, Checker
from neuron_runtime.grammars.language import STATE_BYTES, compiled
from neuron_runtime.grammars.vocabulary import Vocabulary
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

ENTRY_BYTES = 64 << 10
"""Counted for each form that is kept, also for one that is refused, beside its text and its grammar."""
NUM_THREADS = 2
"""Forms compiled at the same time. A hostile form holds one for some seconds; known forms wait for none."""


def grammar_guides(model_dir: Path, limits: BackendLimits) -> GrammarGuides:
    """For a model's folder. Costs nothing before the first form arrives."""
    return GrammarGuides(lambda: load_tokenizer(model_dir), limits.vocabulary_size, limits.max_rows)


@dataclass(frozen=True, slots=True)
class _Compiled:
    start: LLMatcher
    num_bytes: int


@dataclass(slots=True)
class _GrammarGuide:
    matcher: LLMatcher
    end_token_ids: tuple[int, ...]
    accepted: list[int] = field(default_factory=list)
    """Tokens that the matcher does not know yet: `masks` tells all matchers together, on all cores."""

    def advance(self, token_ids: Sequence[int]) -> None:
        self.accepted += token_ids


class GrammarGuides:
    """Implements `engine.guides.Guides`. All methods are called on the engine's thread."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocabulary_size: int, max_rows: int = 1, max_bytes: int = FORMS_BYTES
    ) -> None:
        """
        load: the model's tokenizer; called when the first form arrives, on a thread.
        vocabulary_size: of the model; 0: that of its tokenizer.
        max_rows: answers at the same time.
        max_bytes: of the forms that are kept; beyond it the one that was unused for longest is forgotten.
        """
        self._max_states = guide_bytes(max_rows) // STATE_BYTES
        self._max_bytes = max_bytes
        self._load = load
        self._vocabulary_size = vocabulary_size
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._executor: LLExecutor | None = None
        self._checkers = [Checker(self._max_states) for _ in range(NUM_THREADS)]
        self._idle_checkers = list(self._checkers)
        self._compiled: OrderedDict[Form, Future[_Compiled]] = OrderedDict()

    def prepare(self, request: Request) -> Future[Guide]:
        assert request.sampling.form is not None
        field, form = request.sampling.form.field, msgspec.structs.replace(request.sampling.form, field="")
        ends = tuple(sorted(request.sampling.stop_token_ids))
        compiled = self._compiled.get(form)
        if compiled is None:
            compiled = self._compiled[form] = self._threads.submit(self._compile, form)
            num_bytes = sum(_bytes_of(one, done) for one, done in self._compiled.items())
            while num_bytes > self._max_bytes and len(self._compiled) > 1:
                num_bytes -= _bytes_of(*self._compiled.popitem(last=False))
        self._compiled.move_to_end(form)
        guide: Future[Guide] = Future()

        def made(done: Future[_Compiled]) -> None:
            if done.cancelled():
                guide.cancel()
                return
            error = done.exception()
            if isinstance(error, InvalidRequest):
                guide.set_exception(InvalidRequest(f"`{field}` {error}", field=field))
            elif error is not None:
                guide.set_exception(error)
            else:
                guide.set_result(_GrammarGuide(done.result().start.deep_copy(), ends))

        compiled.add_done_callback(made)
        return guide

    def masks(self, guides: Sequence[Guide]) -> Masks:
        vocabulary = self._vocabulary
        if not guides or vocabulary is None:
            return Masks(memoryview(b""), ())
        size, end = vocabulary.mask_bytes, vocabulary.end_token_id
        bits = np.empty((len(guides), size), dtype=np.uint8)
        executor = self._executor = self._executor or LLExecutor()
        ours = [guide for guide in guides if isinstance(guide, _GrammarGuide)]
        # A token that does not fit leaves its matcher in an error, which is found below.
        while behind := [guide for guide in ours if guide.accepted]:
            executor.consume_token_par([(guide.matcher, guide.accepted.pop(0)) for guide in behind])
        executor.unsafe_compute_mask_ptr(
            [(guide.matcher, at) for at, guide in enumerate(ours)], bits.ctypes.data, size, len(ours)
        )
        failed = []
        byte, bit = end // 8, np.uint8(1 << end % 8)
        for at in np.flatnonzero(bits[:, byte] & bit).tolist():
            # The answer may end here, or the matcher has given up, as it does where no token fits.
            guide = ours[at]
            bits[at, byte] &= ~bit
            for token in guide.end_token_ids:
                if token < end:
                    bits[at, token // 8] |= 1 << token % 8
            if guide.matcher.is_error() or not bits[at].any():
                bits[at] = 0xFF
                failed.append(at)
        return Masks(bits.reshape(-1).data, failed)

    def close(self) -> None:
        for checker in self._checkers:
            checker.interrupt()
        self._threads.shutdown(cancel_futures=True)
        for checker in self._checkers:
            checker.close()

    # On a thread

    def _compile(self, form: Form) -> _Compiled:
        checker = self._idle_checkers.pop()
        try:
            checked = checker.checked(form)
        finally:
            self._idle_checkers.append(checker)
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._load(), self._vocabulary_size)
        try:
            start = compiled(checked.grammar, self._vocabulary.for_grammars, self._max_states)
            return _Compiled(start, checked.num_bytes)
        except ValueError as error:
            raise InvalidRequest(f"cannot be compiled: {str(error)[:MAX_REFUSAL_CHARACTERS]}") from error


def _bytes_of(form: Form, compiled: Future[_Compiled]) -> int:
    """The memory of a form that is kept; what is still being compiled has no grammar yet."""
    is_made = compiled.done() and not compiled.cancelled() and compiled.exception() is None
    return ENTRY_BYTES + len(form.text) + (compiled.result().num_bytes if is_made else 0)
