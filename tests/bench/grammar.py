"""Host time of steps whose rows all have a form, above that of steps without, and what a new form costs.

Used by the suite. The engine runs over the simulated device as in `host`, with a vocabulary as large as that of Qwen
models whose tokens are made here, and answers that visit their schema at random.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from bench import host
from bench.report import Load, Meter, Row, at_most
from neuron_runtime.core import Form, Request, Sampling
from neuron_runtime.engine.guides import Guide, Masks
from neuron_runtime.grammars.guides import GrammarGuides
from neuron_runtime.text.tokenizer import Tokenizer

VOCABULARY = 151_936
NUM_ROWS = 64
TARGET_MILLISECONDS = 0.5
NUM_FORMS = 5

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["device", "core", "node"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": PLACE,
    },
    "required": ["name", "age", "kind", "tags", "place"],
    "additionalProperties": False,
}


class TimedGuides:
    """Implements `Guides`. Sums the time of masks."""

    def __init__(self, guides: GrammarGuides) -> None:
        self._guides = guides
        self.wall: list[float] = []
        self.cpu: list[float] = []
        """CPU seconds of all threads."""

    def prepare(self, request: Request) -> Future[Guide]:
        return self._guides.prepare(request)

    def masks(self, guides: Sequence[Guide], drafts: Sequence[Sequence[int]] = ()) -> Masks:
        began, cpu_began = time.perf_counter(), time.process_time()
        masks = self._guides.masks(guides, drafts)
        self.wall.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu_began)
        return masks

    def close(self) -> None:
        self._guides.close()


def measure(num_rounds: int, *, vocabulary_size: int = VOCABULARY, num_rows: int = NUM_ROWS) -> tuple[Row, ...]:
    """The engine's thread per step, the masks of a step, and the time until a new form's first mask."""
    tokenizer = words(vocabulary_size)
    guides = TimedGuides(GrammarGuides(lambda: tokenizer, vocabulary_size))
    try:
        meter = Meter()
        compiling = statistics.median(list(_compilations(guides))[1:])
        row = Row("a new form, until its first mask", (1e3 * compiling,), "ms", note="on a thread", load=meter.read())
        return (*_steps(guides, num_rounds, vocabulary_size, num_rows), row)
    finally:
        guides.close()


def _steps(guides: TimedGuides, num_rounds: int, vocabulary_size: int, num_rows: int) -> tuple[Row, Row]:
    form = Form("json_schema", json.dumps(PERSON), field="response_format")
    guides.prepare(_request(form)).result()
    free, kept = (
        host.measure(num_rows, "host", num_rounds=num_rounds, vocabulary_size=vocabulary_size, form=one, guides=guides)
        for one in (None, form)
    )
    above = (kept.step_seconds - kept.backend_seconds) - (free.step_seconds - free.backend_seconds)
    load = Load.together([free.load, kept.load])
    cpu = 1e3 * statistics.median(guides.cpu)
    return (
        Row(
            f"host time per step, {num_rows} rows with a form, above rows without",
            (1e3 * above,),
            "ms",
            at_most(TARGET_MILLISECONDS),
            f"of the engine's thread; without {1e3 * (free.step_seconds - free.backend_seconds):.3f}",
            load,
        ),
        Row(
            f"masks of {num_rows} rows",
            (1e3 * statistics.median(guides.wall),),
            "ms",
            None,
            f"on all cores, while the step runs; {cpu:.2f} ms of CPU, {1e3 * cpu / num_rows:.0f} microseconds a row",
            kept.load,
        ),
    )


def _compilations(guides: TimedGuides) -> Iterator[float]:
    """Seconds of forms that were not seen before; the first one starts the process that tries them."""
    for number in range(NUM_FORMS + 1):
        form = Form("json_schema", json.dumps({**PERSON, "title": f"form {number}"}), field="response_format")
        began = time.perf_counter()
        guides.prepare(_request(form)).result()
        yield time.perf_counter() - began


def _request(form: Form) -> Request:
    return Request("r", (1,), Sampling(form=form, stop_token_ids=frozenset({0})))


LETTERS, WEIGHTS = "etaoinshrdlucmfwypvbgkxqjz", (12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, *range(15, 0, -1))


def words(vocabulary_size: int) -> Tokenizer:
    """A byte-level vocabulary like that of a language model: bytes, punctuation, numbers, and words of 2 to 12 letters,
    most of them behind a space. Its merges are left out: nothing encodes text here."""
    dice, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: at for at, letter in enumerate(alphabet, 1)}
    for pieces in ('"', '":', '",', '"}', '"]', "},", "}}", "]}", "[]", "{}", '":"', '","', "Ġ{", 'Ġ"', "\u010a\u0120"):
        vocabulary.setdefault(pieces, len(vocabulary))
    for number in range(100):
        vocabulary.setdefault(str(number), len(vocabulary))
    while len(vocabulary) < vocabulary_size:
        word = "".join(dice.choices(LETTERS, WEIGHTS, k=min(dice.randint(2, 8) + dice.randint(0, 4), 12)))
        word = dice.choice(("", "Ġ", "Ġ")) + dice.choice((word, word, word.capitalize()))
        vocabulary.setdefault(word, len(vocabulary))
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    return Tokenizer(fast)
