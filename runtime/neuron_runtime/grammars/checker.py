"""Tries forms in a process of its own, within limits of processor time and memory.

Some forms, such as joined patterns, would keep the library busy for ever or take gigabytes, and none of its limits acts
while it compiles. So `Checker`, which `guides` calls on a thread, has a child compile them first, and the system ends
the child at its limits; as a command this module is that child: a form per line in, a grammar or a refusal out.
"""

from __future__ import annotations

import ctypes
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from neuron_runtime.core import FORMS_BYTES, Form
from neuron_runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CPU_SECONDS = 2
MAX_MEMORY_BYTES = 256 << 20
"""What a form may take while it is compiled, beside Python and the library."""
MAX_REFUSAL_CHARACTERS = 1000
STACK_BYTES = 4 << 20
"""Half of what the threads have that compile a form which the child has found to be good."""
NUM_ANSWERS = 8
MAX_ANSWER_BYTES = 1000
"""How many answers are tried with a form, and how long they are together."""
MAX_SECONDS = 60.0
"""How long to wait for the child, on a machine that is busy with other things."""


class Checked(msgspec.Struct):
    """The child's answer."""

    grammar: str = ""
    num_bytes: int = 0
    """Of the compiled grammar."""
    refusal: str = ""


class Checker:
    """One child, started when it is needed, and again after a form has ended it. Used by one thread at a time."""

    def __init__(self, max_states: int) -> None:
        """max_states: of the automaton of one answer."""
        self._max_states = max_states
        self._child: subprocess.Popen[bytes] | None = None

    def checked(self, form: Form) -> Checked:
        """The grammar of a form that compiles within the limits, and its size. Raises InvalidRequest."""
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(MAX_SECONDS, child.kill)
        timer.start()
        try:
            child.stdin.write(msgspec.json.encode(form) + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self.close()
            raise InvalidRequest(
                f"is too complex: it cannot be compiled in {MAX_CPU_SECONDS} s and {MAX_MEMORY_BYTES >> 20} MiB"
            )
        checked = msgspec.json.decode(line, type=Checked)
        if checked.refusal:
            raise InvalidRequest(f"cannot be compiled: {checked.refusal[:MAX_REFUSAL_CHARACTERS]}")
        return checked

    def interrupt(self) -> None:
        """Let `checked` on another thread end soon."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            command = [sys.executable, "-m", "neuron_runtime.grammars.checker", str(self._max_states)]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._child


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_check_lines)
    thread.start()
    thread.join()


def _check_lines() -> None:
    from llguidance import LLTokenizer  # noqa: PLC0415 - the child's work

    from neuron_runtime.grammars.language import compiled, grammar_of, parts_of  # noqa: PLC0415 - the child's work

    tokenizer, max_states = LLTokenizer("byte"), int(sys.argv[1])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _address_space() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

    def grammar_tried(form: Form) -> Checked:
        grammar = grammar_of(form)
        before = _allocated()
        start = compiled(grammar, tokenizer, max_states)
        num_bytes = max(0, _allocated() - before)
        if num_bytes > FORMS_BYTES:
            raise ValueError(f"it takes {num_bytes >> 20} MiB, and all forms together may take {FORMS_BYTES >> 20} MiB")
        follow(start)
        return Checked(grammar, num_bytes)

    def refusal_of(form: Form, error: Exception) -> str:
        for name, part in parts_of(form).items():
            try:
                grammar_tried(part)
            except ValueError as of_part:
                return f"{name}: {of_part}"
        return str(error) or type(error).__name__

    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(used.ru_utime + used.ru_stime) + 1 + MAX_CPU_SECONDS
        # The system ends the process at this limit, whatever it is busy with.
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        form = msgspec.json.decode(line, type=Form)
        try:
            checked = grammar_tried(form)
        except Exception as error:  # noqa: BLE001 - whatever a form causes is its refusal
            checked = Checked(refusal=refusal_of(form, error))
        sys.stdout.buffer.write(msgspec.json.encode(checked) + b"\n")
        sys.stdout.buffer.flush()


def follow(start: LLMatcher) -> None:
    """Write answers at random, a byte at a time.

    Raises:
        ValueError: a limit of the library was reached on the way; says which.
    """
    dice, num_bytes = random.Random(0), 0  # noqa: S311 - not for secrets
    for _ in range(NUM_ANSWERS):
        answer = start.deep_copy()
        while num_bytes < MAX_ANSWER_BYTES and (may_follow := _bytes_of(answer.compute_bitmask())):
            first = dice.randrange(256)
            above = may_follow >> first << first or may_follow
            answer.consume_token((above & -above).bit_length() - 1)
            num_bytes += 1
        if answer.is_error():
            raise ValueError(f"an answer would reach a limit: {answer.get_error()}")


def _address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class _Mallinfo(ctypes.Structure):
    """The C library's account of what is allocated."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated() -> int:
    """Bytes that this process has allocated and not freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    account = mallinfo()
    return int(account.uordblks + account.hblkhd)


def _bytes_of(mask: bytes) -> int:
    """The bits of the 256 tokens that are bytes."""
    return int.from_bytes(mask[:32], "little")


if __name__ == "__main__":
    main()
