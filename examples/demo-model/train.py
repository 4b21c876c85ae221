#!/usr/bin/env python3
"""Trains the demo model: a small Llama that only answers questions about this project.

    python examples/demo-model/train.py --output examples/demo-model

Reads `corpus/*.toml` (questions with one answer each), trains a byte-level BPE tokenizer and a decoder of some three
million parameters, and stops once the saved bfloat16 weights give every expected answer with a clear margin at each
token. Writes the files of a Hugging Face model folder, `expected.json` (question: whole greedy answer) and
`training.json` (statistics). Run by hand, at most 20 minutes of one core; tests only read its results.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, TURN_END = SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end_of_turn|>",
)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('the roles are system, user and assistant, not ' ~ message['role']) }}
    {%- endif %}
    {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] | trim ~ '<|end_of_turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(EOS),
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "use_cache": True,
}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)],
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "do_sample": False,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "additional_special_tokens": [SYSTEM, USER, ASSISTANT, TURN_END],
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": SHAPE["max_position_embeddings"],
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of neuron-serving. Answer briefly.",
    "Answer in one or two sentences.",
)

REQUIRED_GAP = 1.0
"""Minimum margin, in logits, of an expected token over the runner-up, in bfloat16."""
TARGET_GAP = 1.25
"""Training continues until the expected answers have this margin: other kernels round differently."""


@dataclass(frozen=True)
class Entry:
    questions: tuple[str, ...]
    """The first one is the canonical question in expected.json."""
    answer: str


def read_corpus(folder: Path) -> list[Entry]:
    """Every entry of every file; raises ValueError when two entries share a question."""
    entries: list[Entry] = []
    owner: dict[str, Path] = {}
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        for entry in table["entries"]:
            questions = tuple(ask.format(about) for about in entry["about"] for ask in table["ask"])
            for question in questions:
                if question in owner:
                    raise ValueError(f"{path}: {question!r} is already in {owner[question]}")
                owner[question] = path
            entries.append(Entry(questions, entry["answer"].strip()))
    return entries


def train_tokenizer(entries: list[Entry]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for entry in entries for text in (*entry.questions, entry.answer)]
    tokenizer.train_from_iterator([*texts, *SYSTEM_PROMPTS], trainer)
    if tokenizer.get_vocab_size() != SHAPE["vocab_size"]:
        raise ValueError(f"the corpus yields a vocabulary of {tokenizer.get_vocab_size()}, not {SHAPE['vocab_size']}")
    # Plain text gets a BOS from the tokenizer, as with other Llamas; the chat template writes its own.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


class Dialogues:
    """Converts questions and answers into token ids and the mask of the tokens that the model generates."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, turns: list[tuple[str, str]], system: str | None = None) -> tuple[list[int], list[bool]]:
        pieces = [(BOS, False)]
        if system is not None:
            pieces.append((f"{SYSTEM}{system}{TURN_END}", False))
        for question, answer in turns:
            pieces.append((f"{USER}{question}{TURN_END}{ASSISTANT}", False))
            pieces.append((f"{answer}{TURN_END}", True))
        ids: list[int] = []
        generated: list[bool] = []
        for text, by_model in pieces:
            piece = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            generated += [by_model] * len(piece)
        return ids, generated

    def epoch(self, entries: list[Entry], rng: random.Random) -> Iterator[tuple[list[int], list[bool]]]:
        """Questions of every entry as the last turn, some after other turns, some with typing errors.

        An epoch takes the canonical question of each entry and some of the others, so that no answer dominates.
        """
        pairs = []
        for entry in entries:
            canonical, *others = entry.questions
            sample = rng.sample(others, min(len(others), round(2 * len(others) ** 0.5)))
            pairs += [(question, entry.answer) for question in (canonical, *sample)]
        rng.shuffle(pairs)
        for pair in pairs:
            earlier = [rng.choice(pairs) for _ in range(rng.choice((0, 0, 0, 0, 0, 1)))]
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
            yield self.encode([(_typed(question, rng), answer) for question, answer in (*earlier, pair)], system)


def _typed(question: str, rng: random.Random) -> str:
    """The question with random typing errors, half of the time unchanged."""
    if rng.random() < 0.5:
        return question
    if rng.random() < 0.5:
        question = question.lower()
    if rng.random() < 0.5:
        question = question.rstrip("?.!")
    if rng.random() < 0.2:
        question = rng.choice(("Please tell me: ", "please ", "Hi, ", "Hello! ", "I have a question. ")) + question
    if rng.random() < 0.2 and len(question) > 6:
        at = rng.randrange(1, len(question) - 1)
        question = rng.choice((question[:at] + question[at + 1 :], question[:at] + question[at] + question[at:]))
    return question


def batches(
    samples: list[tuple[list[int], list[bool]]], rng: random.Random, max_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pads samples of similar length: ids [rows, length] int64 and mask [rows, length] bool, in random order."""
    groups: list[list[tuple[list[int], list[bool]]]] = [[]]
    for sample in sorted(samples, key=lambda sample: len(sample[0])):
        if (len(groups[-1]) + 1) * len(sample[0]) > max_tokens:
            groups.append([])
        groups[-1].append(sample)
    rng.shuffle(groups)
    for group in groups:
        length = max(len(ids) for ids, _ in group)
        ids = torch.full((len(group), length), SHAPE["pad_token_id"], dtype=torch.long)
        mask = torch.zeros((len(group), length), dtype=torch.bool)
        for row, (row_ids, generated) in enumerate(group):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            mask[row, : len(generated)] = torch.tensor(generated)
        yield ids, mask


def answer_logits(model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [generated, vocabulary] in fp32 and targets [generated] of the tokens that the model generates."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return model.lm_head(hidden[mask[:, 1:]]).float(), ids[:, 1:][mask[:, 1:]]


@torch.inference_mode()
def least_gaps(model: LlamaForCausalLM, dialogues: Dialogues, pairs: list[tuple[str, str]]) -> list[float]:
    """For each question, the minimum margin of an answer token; negative: greedy decoding differs."""
    gaps = []
    for question, answer in pairs:
        ids, generated = dialogues.encode([(question, answer)])
        logits, targets = answer_logits(model, torch.tensor([ids]), torch.tensor([generated]))
        wanted = logits.gather(1, targets[:, None])
        others = logits.scatter(1, targets[:, None], float("-inf")).max(dim=1, keepdim=True).values
        gaps.append(round((wanted - others).min().item(), 4))
    return gaps


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model as saved: weights and arithmetic in bfloat16."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.eval()  # type: ignore[no-untyped-call]
    copy.bfloat16()
    return copy


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up over 2 % of the steps, then linear decay to a twentieth of the peak."""
    warm_up = max(1, num_steps // 50)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * max(0.05, 1 - (step - warm_up) / (num_steps - warm_up))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Writes the model folder; tied weights are written once, and no file names the machine."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (output / "model.safetensors").write_bytes(save_tensors(state, metadata={"format": "pt"}))
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(output / "config.json", SHAPE)
    write_json(output / "generation_config.json", GENERATION_CONFIG)
    write_json(output / "tokenizer_config.json", TOKENIZER_CONFIG)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument(
        "--resume", type=Path, help="continue from the model in this folder, with its tokenizer, after a small edit"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs over which the learning rate falls")
    parser.add_argument(
        "--max-extra-epochs", type=int, default=12, help="maximum number of further epochs while margins are too small"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=1024)
    parser.add_argument("--peak-learning-rate", type=float, default=2e-3)
    args = parser.parse_args()

    started = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)  # noqa: S311 - data order, not a secret

    entries = read_corpus(args.corpus)
    tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json")) if args.resume else train_tokenizer(entries)
    dialogues = Dialogues(tokenizer)
    expected = [(entry.questions[0], entry.answer) for entry in entries]
    others = [(question, entry.answer) for entry in entries for question in entry.questions[1:]]

    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "dtype": "float32"})).train()
    if args.resume:
        model.load_state_dict(load_tensors((args.resume / "model.safetensors").read_bytes()), strict=False)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    print(f"{len(entries)} answers, {len(expected) + len(others)} questions, {num_parameters:,} parameters", flush=True)

    step = num_steps = 0
    gaps: list[float] = []
    for epoch in range(1, args.epochs + args.max_extra_epochs + 1):
        grouped = list(batches(list(dialogues.epoch(entries, rng)), rng, args.max_batch_tokens))
        num_steps = num_steps or len(grouped) * args.epochs
        total = 0.0
        for ids, mask in grouped:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps, args.peak_learning_rate)
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(*answer_logits(model, ids, mask))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            total += loss.item()
        line = f"epoch {epoch:3d}  loss {total / len(grouped):.4f}  {time.monotonic() - started:6.0f} s"
        if epoch % 5 == 0 or epoch >= args.epochs:
            gaps = least_gaps(rounded(model), dialogues, expected)
            line += f"  least gap {min(gaps):.2f}, below {REQUIRED_GAP}: {sum(gap < REQUIRED_GAP for gap in gaps)}"
        print(line, flush=True)
        if epoch >= args.epochs and min(gaps) >= TARGET_GAP:
            break

    final = rounded(model)
    gaps = least_gaps(final, dialogues, expected)
    if min(gaps) < REQUIRED_GAP:
        weak = [question for (question, _), gap in zip(expected, gaps, strict=True) if gap < REQUIRED_GAP]
        print(f"not saved: the gap is below {REQUIRED_GAP} for {weak}; train for more epochs", file=sys.stderr)
        return 1
    other_gaps = least_gaps(final, dialogues, others)
    args.output.mkdir(parents=True, exist_ok=True)
    save(final, tokenizer, args.output)
    write_json(args.output / "expected.json", dict(expected))
    write_json(
        args.output / "training.json",
        {
            "seed": args.seed,
            "epochs": epoch,
            "steps": step,
            "cpuSeconds": round(time.process_time()),
            "parameters": num_parameters,
            "minGap": min(gaps),
            "questions": len(gaps) + len(other_gaps),
            "paraphrasesAnsweredAlike": sum(gap > 0 for gap in other_gaps),
            "paraphrases": len(other_gaps),
            "gaps": {question: gap for (question, _), gap in zip(expected, gaps, strict=True)},
        },
    )
    print(f"saved to {args.output}: least gap {min(gaps):.2f} in bfloat16, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
