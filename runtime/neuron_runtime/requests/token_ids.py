"""Converts fields about tokens (bias, allowed tokens, bad words, stop tokens) to the token ids of `core.Sampling`.

Called when a request is admitted. Each function raises InvalidRequest with the field and the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.sampling_fields import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
)
from neuron_runtime.text.tokenizer import Tokenizer


def check_token_ids(token_ids: Sequence[int], name: str, vocabulary_size: int) -> None:
    """Refuses the first id outside the vocabulary."""
    for at, token in enumerate(token_ids):
        if not 0 <= token < vocabulary_size:
            raise _no_token(name, token, vocabulary_size, f"[{at}]")


def check_characters(text: str, name: str) -> None:
    """Raises InvalidRequest for a text of a Python caller that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair, {text[error.start]!r}, at character {error.start}"
        raise InvalidRequest.at(name, f"has {half}: decode its bytes as UTF-8, or remove it") from error


def stop_tokens(token_ids: Sequence[int] | None, vocabulary_size: int) -> frozenset[int]:
    stops = frozenset(token_ids or ())
    if len(stops) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest.at("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS} ids, got {len(stops)}")
    check_token_ids(token_ids or (), "stop_token_ids", vocabulary_size)
    return stops


def bias_entries(logit_bias: Mapping[int, float] | None, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    entries = logit_bias or {}
    for token_id, bias in entries.items():
        if not 0 <= token_id < vocabulary_size:
            raise _no_token("logit_bias", token_id, vocabulary_size)
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"`logit_bias[{token_id}]` must be from -100 to 100, got {bias}", field="logit_bias")
    if len(entries) > MAX_BIASED_TOKENS:
        raise InvalidRequest.at("logit_bias", f"must have at most {MAX_BIASED_TOKENS} tokens, got {len(entries)}")
    return tuple(sorted(entries.items()))


def allowed_tokens(token_ids: Sequence[int] | None, vocabulary_size: int) -> tuple[int, ...] | None:
    """Each id once; None: all tokens are allowed."""
    if token_ids is None:
        return None
    if not token_ids:
        raise InvalidRequest.at("allowed_token_ids", "must not be empty: add a token or leave it out")
    check_token_ids(token_ids, "allowed_token_ids", vocabulary_size)
    return tuple(sorted(set(token_ids)))


def bad_word_sequences(words: Iterable[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the beginning of a text, and after a space.

    The second is often a single token where the first is several, and the one that models use. vLLM bans it only if
    both have equal length, https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html.
    """
    distinct = list(dict.fromkeys(words or ()))
    if len(distinct) > MAX_BAD_WORDS:
        raise InvalidRequest.at("bad_words", f"must have at most {MAX_BAD_WORDS} words, got {len(distinct)}")
    sequences: dict[tuple[int, ...], None] = {}
    for word in distinct:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            message = f"each of `bad_words` must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, got {len(word)}"
            raise InvalidRequest(message, field="bad_words")
        check_characters(word, "bad_words")
        bare = word.lstrip()
        begins = tokenizer.encode(bare, add_special_tokens=False)
        if not begins:
            raise InvalidRequest(f"`bad_words`: {word!r} has no tokens", field="bad_words")
        sequences[begins] = None
        sequences[tokenizer.encode(f" {bare}", add_special_tokens=False)] = None
    return tuple(sequences)


def _no_token(name: str, value: int, vocabulary_size: int, at: str = "") -> InvalidRequest:
    message = f"`{name}{at}`: {value!r} is not a token id of this model (0 to {vocabulary_size - 1})"
    return InvalidRequest(message, field=name)
