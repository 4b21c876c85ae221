"""A complete chat model of some hundred kilobytes: random weights, a byte-level tokenizer, a chat template, end tokens.

Its answers are meaningless but deterministic, which is enough to test the handling of tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from helpers.tiny_model import write_tiny_model

BOS, EOS, USER_START, END = "<|begin|>", "<|end_of_text|>", "<|start|>", "<|end|>"
SPECIAL = [BOS, EOS, USER_START, END]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + message['role']) }}"
    "{% endif %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

CORPUS = [
    "A node holds devices, a device holds cores, a core runs what was compiled for it.",
    "Requests wait in a queue until a row is free; then their tokens are computed, step by step.",
    "naïve café – snow ☃ and 東京, ελληνικά, emoji 😀🎉 👩‍👩‍👧 end.",
]


def byte_level_tokenizer(vocabulary_size: int = 320) -> Tokenizer:
    """Byte-level BPE with a BOS before every text, as in Llama-3 style models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def metaspace_tokenizer(vocabulary_size: int = 400) -> Tokenizer:
    """A converted SentencePiece model with byte fallback: a space is part of the word, the first one is dropped."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=specials[:3], show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()] * 4, trainer)
    tokenizer.add_tokens([])
    # The trainer has no byte tokens: add them to the vocabulary as in a converted model.
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for token in specials[3:]:
        vocabulary.setdefault(token, len(vocabulary))
    return Tokenizer.from_str(json.dumps(state))


def write_chat_model(folder: Path, *, max_length: int = 512, **changes: Any) -> Path:
    """Writes all files that serving needs; returns the folder."""
    tokenizer = byte_level_tokenizer()
    write_tiny_model(
        folder,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=max_length,
        eos_token_id=tokenizer.token_to_id(EOS),
        **changes,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ends = [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)]
    generation = {"eos_token_id": ends, "bos_token_id": tokenizer.token_to_id(BOS)}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder
