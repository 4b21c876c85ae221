"""Messages between engine and front end: the events of a step survive encoding, and absent values take no bytes."""

from __future__ import annotations

import msgspec

from neuron_runtime.core import FinishReason, First, TokenEvent, TokenLogprobs
from neuron_runtime.engine.messages import Step, decode_from_engine, encoder
from neuron_runtime.engine.stats import EngineStats


def over_the_border(event: TokenEvent) -> Step:
    decoded = decode_from_engine(encoder.encode(Step((event,), (), EngineStats())))
    assert isinstance(decoded, Step)
    return decoded


def test_logprobs_stay_with_their_tokens_across_processes() -> None:
    logprobs = (TokenLogprobs(7, -0.5, ((3, -0.25), (7, -0.5)), rank=2), TokenLogprobs(8, float("-inf"), (), rank=90))
    prompt = (TokenLogprobs(1, -2.0, ((2, -1.0),), rank=5),)
    event = TokenEvent("a", (7, 8), FinishReason.STOP, logprobs, First(3, 2.0, prompt))
    (found,) = over_the_border(event).events
    assert (found.request_id, found.token_ids, found.finish_reason) == ("a", (7, 8), FinishReason.STOP)
    assert (found.logprobs, found.prompt_logprobs) == (logprobs, prompt)
    assert found.first is not None
    assert (found.first.num_cached_tokens, found.first.queue_seconds) == (3, 2.0)


def test_later_tokens_have_no_data_of_the_prompt() -> None:
    (found,) = over_the_border(TokenEvent("a", (7,))).events
    assert (found.first, found.prompt_logprobs) == (None, ())


def test_a_token_without_optional_data_takes_two_more_bytes() -> None:
    plain = encoder.encode(TokenEvent("a", (7,)))
    assert plain[-2:] == msgspec.msgpack.encode(()) + msgspec.msgpack.encode(None)
    assert len(plain) == len(msgspec.msgpack.encode(["a", [7], None])) + 2
