"""Words that an answer must not contain, as the token sequences in which a tokenizer writes them.

Called when a request is admitted. What becomes of the sequences is the backend's business.
"""

from __future__ import annotations

from collections.abc import Iterable

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.sampling_modes import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS
from neuron_runtime.text.tokenizer import Tokenizer


def bad_word_sequences(tokenizer: Tokenizer, words: Iterable[str] | None) -> tuple[tuple[int, ...], ...]:
    """`core.Sampling.bad_words`: each word as it is written at the beginning of a text, and behind a space.

    Often the second spelling is one token where the first is several, and the one that answers use. vLLM counts it only
    where both have as many, https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html.

    Raises:
        InvalidRequest: too many words, or one that is empty or too long.
    """
    given = list(dict.fromkeys(words or ()))
    if len(given) > MAX_BAD_WORDS:
        raise InvalidRequest(f"`bad_words` takes at most {MAX_BAD_WORDS} words, got {len(given)}", field="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in given:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            message = f"`bad_words` have from 1 to {MAX_BAD_WORD_CHARACTERS} characters, got {len(word)}"
            raise InvalidRequest(message, field="bad_words")
        bare = word.lstrip()
        begins = tokenizer.encode(bare, add_special_tokens=False)
        if not begins:
            raise InvalidRequest(f"`bad_words`: {word!r} has no tokens", field="bad_words")
        sequences[begins] = None
        sequences[tokenizer.encode(f" {bare}", add_special_tokens=False)] = None
    return tuple(sequences)
