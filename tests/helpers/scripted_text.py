"""A model that says what a test wants: the strict backend draws the tokens of a given text, then the end token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import strict_backend
from neuron_runtime.text.tokenizer import load_tokenizer


def sayer(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Callable[[str], None]:
    """A function that sets the text of all later answers."""
    tokenizer = load_tokenizer(model_dir)

    def say(text: str) -> None:
        ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        monkeypatch.setattr(
            strict_backend, "next_token", lambda context, sampling, position, **_: ids[position % len(ids)]
        )

    return say
