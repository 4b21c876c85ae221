"""A prompt and its answers while the engine runs them: events in, outputs out. Used by `llm`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from neuron_runtime.core import FinishReason, Request, TokenEvent, TokenLogprobs
from neuron_runtime.offline.outputs import CompletionOutput, Logprob, RequestOutput
from neuron_runtime.offline.sampling_params import SamplingParams
from neuron_runtime.requests.admission import Ask
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.tokenizer import Tokenizer


class RunningChoice:
    """One answer while the engine generates it."""

    def __init__(self, index: int, number: str, ask: Ask, params: SamplingParams, tokenizer: Tokenizer) -> None:
        (prompt,), (sampling,) = ask.prompts, ask.sampling
        self.index = index
        self.num_cached_tokens = 0
        self.answer = ChoiceText(
            tokenizer,
            prompt,
            stop=ask.stop,
            include_stop=ask.include_stop,
            skip_special_tokens=ask.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
        # All choices have the same prompt, so only the first one requests its logprobs.
        chosen = replace(sampling, choice=index, prompt_logprobs=None if index else sampling.prompt_logprobs)
        self.request = Request(f"{number}-{index}", prompt, chosen, ask.priority, ask.cache_salt)
        self._end_token_id = None if params.ignore_eos else tokenizer.eos_token_id
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def feed(self, event: TokenEvent) -> None:
        self._pieces.append(self.answer.feed(event.token_ids, event.finish_reason))
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        self._prompt_logprobs += event.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)

    def output(self, tokenizer: Tokenizer) -> CompletionOutput:
        # A step may return tokens after the one that completed a stop string.
        token_ids = self._token_ids[: self.answer.num_tokens]
        logprobs = self._logprobs[: self.answer.num_tokens]
        reported = self.request.sampling.logprobs is not None
        reason = self.answer.finish_reason
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=token_ids,
            cumulative_logprob=sum(one.logprob for one in logprobs) if reported else None,
            logprobs=[_candidates(one, tokenizer) for one in logprobs] if reported else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=self._stop_reason(token_ids[-1]) if reason is FinishReason.STOP else None,
        )

    def prompt_logprobs(self, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return [None, *(_candidates(one, tokenizer) for one in self._prompt_logprobs)]

    def _stop_reason(self, last: int) -> int | str | None:
        if self.answer.stop_string is not None:
            return self.answer.stop_string
        return None if last == self._end_token_id else last


@dataclass(frozen=True, slots=True)
class RunningPrompt:
    """One prompt and its answers."""

    request_id: str
    text: str | None
    choices: list[RunningChoice]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def finished(self) -> bool:
        return all(choice.answer.finish_reason is not None for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.choices[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=list(first.request.prompt_token_ids),
            outputs=[choice.output(self.tokenizer) for choice in self.choices],
            finished=self.finished,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs(self.tokenizer),
        )


def _candidates(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    candidates = {position.token_id: (position.logprob, position.rank)}
    candidates |= {token_id: (value, rank) for rank, (token_id, value) in enumerate(position.top, start=1)}
    return {
        token_id: Logprob(value, rank, tokenizer.decode((token_id,), skip_special_tokens=False))
        for token_id, (value, rank) in candidates.items()
    }
