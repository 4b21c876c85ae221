"""Tries forms in a process of its own, within limits of processor time and memory.

Some forms, such as joined patterns, would keep the library busy for ever or take gigabytes, and none of its limits acts
while it compiles. So `Checker`, which `guides` calls on a thread, has a child compile them first, and the system ends
the child at its limits; as a command this module is that child: a form per line in, a grammar or a refusal out.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from neuron_runtime.core import Form
from neuron_runtime.errors import InvalidRequest

MAX_CPU_SECONDS = 2
MAX_MEMORY_BYTES = 256 << 20
"""What a form may take while it is compiled, beside Python and the library."""
MAX_REFUSAL_CHARACTERS = 1000
STACK_BYTES = 4 << 20
"""Half of what the threads have that compile a form which the child has found to be good."""
_ANY_BYTE = (1 << 256) - 1
ANSWERS = [(_ANY_BYTE, 500), *[(_ANY_BYTE, 100)] * 5]
"""Tried with a form: what they consist of, and how long they are."""
STATE_BYTES = 1536
"""Of an automaton: up to 1,080 bytes in 18 of 19 quite different forms, but 5 KiB with 300 patterns at one place. So
those that answers reach while a form is tried are measured, and a quarter more is counted if they are larger."""
TRIED_STATES = 1024
FILLING = [(_ANY_BYTE, 4096)]
"""An answer that then fills an automaton of as many states as the form may have: those far from the beginning may be
larger than the others. Those that no answer at random comes to are not measured."""
MAX_FILLING_SECONDS = 0.5
"""Of processor time."""
MIN_STATES = 256
MAX_SECONDS = 60.0
"""How long to wait for the child, on a machine that is busy with other things."""


class Checked(msgspec.Struct):
    """The child's answer."""

    grammar: str = ""
    max_states: int = 0
    """Of the automaton of its answers."""
    refusal: str = ""


class Checker:
    """One child, started when it is needed, and again after a form has ended it. Used by one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of a compiled form with the automaton of its answers."""
        self._max_bytes = max_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._is_interrupted = False

    def checked(self, form: Form) -> Checked:
        """The grammar of a form that compiles within the limits. Raises InvalidRequest."""
        child = self._started()
        if self._is_interrupted:  # before there was a child
            child.kill()
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
        """Let `checked` on another thread end soon, and for good."""
        self._is_interrupted = True
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
            command = [sys.executable, "-m", "neuron_runtime.grammars.checker", str(self._max_bytes)]
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

    from neuron_runtime.grammars.answers import FULL, Grammar, try_answers  # noqa: PLC0415 - the child's work
    from neuron_runtime.grammars.language import grammar_of, parts_of  # noqa: PLC0415 - the child's work

    tokenizer, max_bytes = LLTokenizer("byte"), int(sys.argv[1])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _address_space() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

    def grammar_tried(form: Form) -> Checked:
        begin = time.process_time()
        text = grammar_of(form)
        before = allocated()
        grammar = Grammar(text, tokenizer, TRIED_STATES)
        made = allocated()
        sizes = [STATE_BYTES]

        def measure() -> None:
            sizes.append((allocated() - made) * 5 // 4 // TRIED_STATES)

        try_answers(grammar, ANSWERS, on_full=measure)
        measure()
        num_bytes = max(0, made - before)

        def most_states(state_bytes: int) -> int:
            number = (max_bytes - num_bytes) // state_bytes
            if number < MIN_STATES:
                needed = num_bytes + MIN_STATES * state_bytes
                raise ValueError(f"it takes {needed / 2**20:.1f} MiB, and a form may take {max_bytes / 2**20:.1f} MiB")
            return number

        max_states = most_states(max(sizes))
        del grammar
        filled = bytes_filled(text, max_states, time.process_time() - begin)
        return Checked(text, min(max_states, most_states(max(1, (filled - num_bytes) * 3 // 2 // max_states))))

    def bytes_filled(text: str, max_states: int, spent: float) -> int:
        """What a form takes with an automaton of so many states, as far as the child has time to fill it; 0 if it has
        none. spent: seconds that it took to compile and try the form."""
        left = resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time() - spent - MAX_FILLING_SECONDS
        if left < 0:
            return 0
        before = allocated()
        grammar = Grammar(text, tokenizer, max_states)
        sizes = [0]

        def full() -> None:
            sizes.append(allocated() - before)
            raise ValueError(FULL)

        # An answer that is cut this far from its beginning is no reason to refuse the form.
        with contextlib.suppress(ValueError):
            try_answers(grammar, FILLING, MAX_FILLING_SECONDS, full, time.process_time)
        return max(*sizes, allocated() - before)

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


def allocated() -> int:
    """Bytes that this process has allocated and not freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    account = mallinfo()
    return int(account.uordblks + account.hblkhd)


if __name__ == "__main__":
    main()
