"""Results of the methods of `LLM`, with the fields of vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_runtime.offline.adapters import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position; `rank` is its rank in the whole vocabulary, from 1."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """Includes the token that ended the answer, although the text does not."""
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """Per token, the chosen one first."""
    finish_reason: str | None
    """`stop` or `length`."""
    stop_reason: int | str | None
    """The stop string or stop token that ended the answer; None for the tokenizer's end token and for `length`."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if only token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    lora_request: LoRARequest | None = None
    """The adapter that answered."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, that token first, then the alternatives; None for the first token."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector, by vLLM's name."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of the pair; of a model that compares vectors, of the second text."""
    finished: bool = True
