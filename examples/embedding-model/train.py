#!/usr/bin/env python3
"""Trains the embedding model: a small BERT that puts questions about this project near the texts that answer them.

    python examples/embedding-model/train.py --output examples/embedding-model

Reads the questions and answers of the demo model's corpus and the paragraphs of `docs/`, trains a WordPiece tokenizer
and an encoder of some half a million parameters, and saves it if it finds the answers to questions that it has not
seen. Writes the files of a sentence-transformers model, and `training.json` (statistics). Run by hand; two minutes of
one core. Tests only read its results.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import BertConfig, BertModel

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parent / "demo-model" / "corpus"
DOCS = HERE.parents[1] / "docs"

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST = 256
"""Tokens of a text."""

SHAPE: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "dtype": "float32",
    "vocab_size": 1280,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": LONGEST,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "position_embedding_type": "absolute",
}

KIND = "sentence_transformers.models."
FILES: dict[str, Any] = {
    "config.json": SHAPE,
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "cls_token": CLS,
        "sep_token": SEP,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": LONGEST,
    },
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{KIND}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{KIND}Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{KIND}Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": SHAPE["hidden_size"],
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False,
        "include_prompt": True,
    },
    "sentence_bert_config.json": {"max_seq_length": LONGEST, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
}
"""Beside the tokenizer and the weights."""

PAIR_TOKENS = 48
"""Of each text in training."""
SCALE = 20.0
"""Of cosines, before the softmax over the texts of a batch."""
HELD_OUT = 0.1
"""The share of questions that are kept for the test."""
REQUIRED = 0.8
"""The share of those whose answer must be nearest, among all answers of the corpus."""


def read_corpus(folder: Path) -> list[tuple[list[str], str]]:
    """Questions in several wordings, with the one answer."""
    entries: list[tuple[list[str], str]] = []
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        for entry in table.get("entries", ()) if path.stem != "unknown" else ():
            asked = [ask.format(about) for about in entry["about"] for ask in table["ask"]]
            entries.append((asked, entry["answer"].strip()))
    return entries


def read_sections(folder: Path) -> Iterator[tuple[str, str]]:
    """Paragraphs of the pages, each under its heading."""
    for path in sorted(folder.glob("*.md")):
        heading = ""
        for block in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)):
            if found := re.match(r"#+ (.*)", block):
                heading = found[1]
            elif len(text := plain(block)) > 80 and "|" not in text:
                yield plain(heading), text


def plain(text: str) -> str:
    """Without the marks of Markdown."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("**", "").split())


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=120,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in (CLS, SEP)],
    )
    return tokenizer


class Encoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.model = BertModel(BertConfig(**SHAPE))

    def __call__(self, texts: Sequence[str], longest: int = LONGEST) -> torch.Tensor:
        """The mean over the tokens of each text, of length one."""
        rows = [self.tokenizer.encode(text).ids for text in texts]
        rows = [row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in rows]
        width = max(map(len, rows))
        ids = torch.tensor([row + [SHAPE["pad_token_id"]] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def pair(rng: random.Random, entries: Sequence[tuple[list[str], str]], sections: Sequence[tuple[str, str]]) -> Any:
    """Two texts that belong together: a question and its answer or another wording; a heading or a sentence, and the
    paragraph without it."""
    if rng.random() < 0.5:
        asked, answer = rng.choice(entries)
        return rng.choice(asked), answer if rng.random() < 0.7 else rng.choice(asked)
    heading, text = rng.choice(sections)
    sentences = re.split(r"(?<=[.:]) ", text)
    if rng.random() < 0.4 or len(sentences) < 2:
        return heading, text
    at = rng.randrange(len(sentences))
    return sentences[at], " ".join((heading, *sentences[:at], *sentences[at + 1 :]))


def train(
    encoder: Encoder, entries: list[tuple[list[str], str]], sections: list[tuple[str, str]], args: argparse.Namespace
) -> None:
    """Each text of a batch is to be nearest to its other half, among those of all pairs."""
    rng = random.Random(args.seed)  # noqa: S311 - data order, not a secret
    optimizer = torch.optim.AdamW(encoder.model.parameters(), lr=args.learning_rate, weight_decay=0.01)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / args.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(args.steps):
        drawn = (pair(rng, entries, sections) for _ in range(args.batch))
        # An answer that is there twice would be its own wrong answer.
        pairs = list({right: (left, right) for left, right in drawn}.values())
        left, right = (encoder([one[side] for one in pairs], PAIR_TOKENS) for side in (0, 1))
        scores, targets = SCALE * left @ right.T, torch.arange(len(pairs))
        loss = functional.cross_entropy(scores, targets) + functional.cross_entropy(scores.T, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} s", flush=True)


@torch.no_grad()
def found(encoder: Encoder, questions: Sequence[tuple[str, str]], answers: Sequence[str]) -> float:
    """The share of the questions whose answer is the nearest of all."""
    kept = encoder(answers)
    nearest = (encoder([question for question, _ in questions]) @ kept.T).argmax(dim=1)
    return sum(answers[at] == answer for at, (_, answer) in zip(nearest, questions, strict=True)) / len(questions)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the embedding model.")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rng = random.Random(args.seed)  # noqa: S311 - data order, not a secret
    entries, tested = [], []
    for asked, answer in read_corpus(CORPUS):
        held = {question for question in asked if rng.random() < HELD_OUT}
        tested += [(question, answer) for question in asked if question in held]
        entries.append(([question for question in asked if question not in held] or asked, answer))
    sections = list(read_sections(DOCS))
    texts = [text for asked, answer in entries for text in (*asked, answer)]
    encoder = Encoder(train_tokenizer([*texts, *(text for section in sections for text in section)]))
    print(f"{len(texts)} texts and {len(sections)} paragraphs, {len(tested)} questions kept for the test")
    train(encoder, entries, sections, args)
    encoder.model.eval()
    share = found(encoder, tested, [answer for _, answer in entries])
    print(f"the nearest answer is right for {share:.1%} of {len(tested)} questions that it has not seen")
    if share < REQUIRED:
        print(f"less than {REQUIRED:.0%}: nothing is saved", file=sys.stderr)
        return 1
    for name, content in FILES.items():
        path = args.output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    encoder.tokenizer.save(str(args.output / "tokenizer.json"))
    tensors = {name: value.detach().contiguous() for name, value in encoder.model.state_dict().items()}
    (args.output / "model.safetensors").write_bytes(save_tensors(tensors, metadata={"format": "pt"}))
    statistics = {
        "parameters": sum(value.numel() for value in encoder.model.parameters()),
        "found": round(share, 4),
        "tested": len(tested),
        "cpuSeconds": round(time.process_time()),
    }
    (args.output / "training.json").write_text(json.dumps(statistics, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
