"""`LLM` with a backend whose device only the end of a process frees: the engine runs in a process of its own.

The simulated backend stands for such a device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from neuron_runtime import LLM, SamplingParams
from neuron_runtime.backend import simulated
from neuron_runtime.errors import BackendFailed, ExitCode, FatalError, InvalidConfig
from neuron_runtime.offline.engines import LocalEngine
from neuron_runtime.offline.process_engine import ProcessEngine

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
PROMPTS = ["The", "A model", "Neuron devices are"]
FAST, SLOW = {"stepMilliseconds": 0.01}, {"stepMilliseconds": 50}

SCRIPT = f"""
import sys, time
import neuron_runtime.backend.simulated as simulated
simulated.FREED_BY_EXIT = True
from neuron_runtime import LLM, SamplingParams

llm = LLM({str(MODEL)!r}, backend="simulated", max_model_len=128, override_neuron_config={{"stepMilliseconds": 20}})
print(llm._engine._child.process.pid, flush=True)
"""
"""A program at module level, which a process that imports it would run again."""


@pytest.fixture(autouse=True)
def freed_by_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "FREED_BY_EXIT", True)


def made(times: dict[str, Any] = FAST, **arguments: Any) -> LLM:
    return LLM(str(MODEL), backend="simulated", max_model_len=128, override_neuron_config=times, **arguments)


def pid_of(llm: LLM) -> int:
    assert isinstance(llm._engine, ProcessEngine)
    return llm._engine._child.process.pid


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 60
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_are_those_of_an_engine_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=1, max_tokens=20, seed=one, logprobs=1, n=2, stop="q") for one in range(3)]
    found = []
    for own_process in (True, False):
        monkeypatch.setattr(simulated, "FREED_BY_EXIT", own_process)
        with made(sampling_mode="Host", block_size=4, enable_prefix_caching=True) as llm:
            assert isinstance(llm._engine, ProcessEngine if own_process else LocalEngine)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([output.outputs for output in outputs])
            (chat,) = llm.chat([{"role": "user", "content": "hi"}], params[0], use_tqdm=False)
            found[-1].append(chat.outputs)
            assert llm._engine.stats.num_running == 0
    assert found[0] == found[1]


def test_an_engine_process_ends_with_its_llm() -> None:
    with made() as closed:
        pid = pid_of(closed)
        assert lives(pid)
    wait_for_end(pid)
    deleted = made()
    pid = pid_of(deleted)
    del deleted
    wait_for_end(pid)


def test_the_death_of_the_engine_process_is_raised_and_final() -> None:
    with made(SLOW) as llm:
        threading.Timer(0.3, os.kill, (pid_of(llm), signal.SIGKILL)).start()
        with pytest.raises(BackendFailed, match="the engine process was killed by SIGKILL"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=120, ignore_eos=True), use_tqdm=False)
        with pytest.raises(BackendFailed, match="can no longer be used"):
            llm.generate(PROMPTS, use_tqdm=False)


def test_an_interrupt_ends_the_engine_process() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a server of an earlier test may have another
    try:
        with made(SLOW) as llm:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, SamplingParams(max_tokens=120, ignore_eos=True), use_tqdm=False)
            wait_for_end(pid_of(llm))
    finally:
        signal.signal(signal.SIGINT, before)


def test_errors_of_the_engine_process_are_those_of_an_engine_in_the_process(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as invalid:
        LLM(str(MODEL), backend="simulated", max_model_len=9999)
    assert str(invalid.value).startswith("max_model_len ($.limits.maxModelLength): must be from 2 to the model's 2048")
    with pytest.raises(FatalError) as missing:
        LLM(str(tmp_path), backend="simulated")
    assert missing.value.exit_code == ExitCode.INVALID_MODEL


def test_an_engine_process_outlives_the_thread_that_made_it() -> None:
    found: list[LLM] = []
    thread = threading.Thread(target=lambda: found.append(made()))
    thread.start()
    thread.join()
    with found.pop() as llm:
        assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=False)) == 3


@pytest.mark.parametrize(
    ("ending", "code", "printed"),
    [
        (
            "print(len(llm.generate('The', SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids))",
            0,
            ["4"],
        ),
        ("raise SystemExit(3)", 3, []),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, []),
        ("import os; os.fork() or sys.exit(0); os.wait(); print(len(llm.generate('The')))", 0, ["1"]),
    ],
    ids=["end", "exception", "kill", "fork"],
)
def test_a_program_at_module_level_leaves_no_engine_process(ending: str, code: int, printed: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + ending], capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == code, ended.stderr
    pid, *lines = ended.stdout.splitlines()
    assert lines == printed
    wait_for_end(int(pid))
