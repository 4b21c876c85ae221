"""How often an answer differs when its request is computed in a batch with others instead of alone.

    PYTHONPATH=tests .venv/bin/python -m bench.batching MODEL

Run by hand; docs/sampling.md quotes the counts. Each prompt has a fixed seed and becomes a chat if the model has a chat
template. It is computed alone, then again with the other prompts, so only the batch's rounding can change a token.
It measures no time.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuron_runtime import LLM, SamplingParams

SUBJECTS = ("a block", "a slot", "InsufficientNeuron", "Llama 3", "the operator", "a lease", "Trainium", "streaming")
QUESTIONS = ("What is {}?", "Why does my pod report {}?", "Explain {} to a colleague.", "Who needs {}?")


def prompts(number: int) -> list[str]:
    """Different questions of different lengths, the same in every run."""
    rng = random.Random(7)
    questions = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    return [f"{' '.join(rng.choices(questions, k=1 + i % 4))} ({i})" for i in range(number)]


@dataclass(frozen=True)
class Differences:
    """Compared answers, and for each that differs the number of equal tokens before the first different one."""

    num_answers: int
    num_tokens: int
    equal_tokens: tuple[int, ...]

    def __str__(self) -> str:
        first = f", first at token {min(self.equal_tokens) + 1}" if self.equal_tokens else ""
        return f"{len(self.equal_tokens)} of {self.num_answers} answers differ ({self.num_tokens} tokens{first})"


def compare(alone: Sequence[Sequence[int]], together: Sequence[Sequence[int]]) -> Differences:
    unequal = [(one, other) for one, other in zip(alone, together, strict=True) if list(one) != list(other)]
    equal = (
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in unequal
    )
    return Differences(len(alone), sum(map(len, alone)), tuple(equal))


def measure(
    model: str, *, dtype: str, temperature: float, num_prompts: int, batch: int, max_tokens: int
) -> Differences:
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens) for seed in range(num_prompts)]
    with LLM(model, dtype=dtype, max_num_seqs=batch, max_model_len=512) as llm:
        template = llm.get_tokenizer().chat_template
        asked: list[Any] = [[{"role": "user", "content": text}] if template else text for text in prompts(num_prompts)]
        compute: Any = llm.chat if template else llm.generate
        alone = [compute(one, its, use_tqdm=False)[0] for one, its in zip(asked, params, strict=True)]
        together = compute(asked, params, use_tqdm=False)
    return compare(*([out.outputs[0].token_ids for out in outputs] for outputs in (alone, together)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    sizes = {"num_prompts": args.prompts, "batch": args.batch, "max_tokens": args.max_tokens}
    for dtype in ("float32", "bfloat16"):
        for temperature in (0.0, 0.7):
            found = measure(args.model, dtype=dtype, temperature=temperature, **sizes)
            print(f"{dtype}, temperature {temperature}: {found}", flush=True)


if __name__ == "__main__":
    main()
