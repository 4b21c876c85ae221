"""Prompts and decoding of the torch backend compared with those of vLLM's build for CPUs: the same model, lengths and
threads, a process of each in turns.

Called by the suite, which runs this file in both environments: the classes `LLM` of both take the same arguments.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PROMPT, DECODED, FED = 512, 64, 16
"""Tokens of a long prompt, of an answer, and of the prompt of that."""
NUM_PROMPTS = 12
ROWS = (1, 8)
LAST_LINE = "measured: "


class Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: tuple[float, ...]
    """By the number of `ROWS`."""


def measure(python: Path, model: Path, num_threads: int) -> Rates:
    """Those of the environment that has this interpreter."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = {"OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    command = [str(python), __file__, str(model)]
    said = subprocess.run(command, env=own | variables, capture_output=True, check=False)
    last = next((line for line in said.stdout.decode().splitlines() if line.startswith(LAST_LINE)), None)
    if last is None:
        raise RuntimeError(f"{python} ended with {said.returncode}: {said.stderr.decode()[-2000:]}")
    prefill, decode = json.loads(last.removeprefix(LAST_LINE))
    return Rates(prefill, tuple(decode))


def main() -> None:
    try:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    except ImportError:
        from neuron_runtime.offline import LLM, SamplingParams
    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=2 * PROMPT,
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=2 * PROMPT,
        enable_prefix_caching=False,
    )
    drawn = random.Random(1)

    def seconds(num_prompts: int, length: int, answer: int) -> float:
        prompts = [{"prompt_token_ids": [drawn.randrange(10, 2000) for _ in range(length)]} for _ in range(num_prompts)]
        parameters = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - began

    seconds(2, PROMPT, 1)
    prefill = PROMPT / statistics.median(seconds(1, PROMPT, 1) for _ in range(NUM_PROMPTS))
    for rows in ROWS:
        seconds(rows, FED, DECODED)
    decode = [rows * DECODED / seconds(rows, FED, DECODED) for rows in ROWS]
    print(f"\n{LAST_LINE}{json.dumps([prefill, decode])}", flush=True)


if __name__ == "__main__":
    main()
