"""A prompt and its answers while the engine runs them: events in, outputs out. Used by `llm`."""

from __future__ import annotations

from neuron_runtime.apis.generation import Choice, Generation, Piece, TokenDetails
from neuron_runtime.core import FinishReason, TokenEvent, TokenLogprobs
from neuron_runtime.offline.adapters import LoRARequest
from neuron_runtime.offline.outputs import CompletionOutput, Logprob, RequestOutput
from neuron_runtime.requests.admission import Ask
from neuron_runtime.text.tokenizer import Tokenizer


class RunningPrompt(Generation):
    """One prompt and its answers.

    end_token_id: the token with which an answer ends without a reason to tell.
    """

    def __init__(
        self,
        request_id: str,
        text: str | None,
        ask: Ask,
        tokenizer: Tokenizer,
        *,
        end_token_id: int | None,
        adapter: LoRARequest | None,
    ) -> None:
        super().__init__(ask, tokenizer)
        self._adapter = adapter
        self.request_id = request_id
        self._text = text
        self._end_token_id = end_token_id
        self._details = [TokenDetails() for _ in self.choices]
        self.answers = [Piece(index, details=details) for index, details in enumerate(self._details)]
        """What it has so far."""

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def feed(self, index: int, event: TokenEvent) -> Choice:
        self.take(event, self.answers[index])
        return self.choices[index]

    def output(self) -> RequestOutput:
        prompt_logprobs = None
        if self.ask.sampling[0].prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self._candidates, self._details[0].prompt_logprobs)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._text,
            prompt_token_ids=list(self.ask.prompts[0]),
            outputs=[self._output(index) for index in range(len(self.choices))],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            lora_request=self._adapter,
            prompt_logprobs=prompt_logprobs,
        )

    def _output(self, index: int) -> CompletionOutput:
        choice, details = self.choices[index], self._details[index]
        logprobs = [one.logprobs for one in details.located if one.logprobs is not None]
        reported, reason = self.ask.sampling[0].logprobs is not None, choice.finish_reason
        ended = None if choice.stop_token_id == self._end_token_id else choice.stop_token_id
        return CompletionOutput(
            index=index,
            text=self.answers[index].text,
            token_ids=details.token_ids,
            cumulative_logprob=sum(one.logprob for one in logprobs) if reported else None,
            logprobs=list(map(self._candidates, logprobs)) if reported else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=(choice.stop_string or ended) if reason is FinishReason.STOP else None,
        )

    def _candidates(self, position: TokenLogprobs) -> dict[int, Logprob]:
        candidates = {position.token_id: (position.logprob, position.rank)}
        candidates |= {token_id: (value, rank) for rank, (token_id, value) in enumerate(position.top, start=1)}
        return {
            token_id: Logprob(value, rank, self.tokenizer.decode((token_id,), skip_special_tokens=False))
            for token_id, (value, rank) in candidates.items()
        }
