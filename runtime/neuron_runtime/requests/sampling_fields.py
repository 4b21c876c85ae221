"""The sampling parameters that HTTP bodies and the offline class share, each declared once.

A new one is a field here (meaning, range, neutral values, default, sampling modes, name in generation_config.json), a
field of `core.Sampling` with the same name, and the backends that act on it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from neuron_runtime.config import ServerOptions
from neuron_runtime.requests.parameters import ON_DEVICE, ON_LOGITS, ON_PROMPT_LOGITS, ON_TOKENS, parameter

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where neither client nor model sets it, as in OpenAI's API."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256


class SamplingFields(msgspec.Struct, kw_only=True):
    """None means the model's default. Mutable, as vLLM's `SamplingParams` is."""

    max_tokens: Annotated[
        int | None,
        parameter(
            "The largest number of tokens of the answer; prompt and answer together must fit. Left out: the model's "
            "`max_new_tokens`, else all that fits",
            ON_TOKENS,
            ge=1,
            setting="max_new_tokens",
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        parameter(
            "Before this many tokens no end token is drawn and no stop text ends the answer; at most `max_tokens`",
            ON_LOGITS,
            ge=0,
            neutral=(0,),
            default=0,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        parameter(
            "Divides the logits; 0 is greedy: the likeliest token, and of several equally likely ones the first",
            ON_DEVICE,
            ge=0,
            le=100,
            neutral=(1,),
            default=1.0,
            setting="temperature",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        parameter(
            "Draw only from the smallest set of likeliest tokens whose probabilities sum up to this",
            ON_DEVICE,
            gt=0,
            le=1,
            neutral=(1,),
            default=1.0,
            setting="top_p",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        parameter(
            "Draw only from this many likeliest tokens; 0 and -1: from all",
            ON_DEVICE,
            ge=-1,
            neutral=(0, -1),
            default=0,
            setting="top_k",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        parameter(
            "Draw only tokens that are at least this many times as likely as the likeliest one",
            ON_LOGITS,
            ge=0,
            le=1,
            neutral=(0,),
            default=0.0,
            setting="min_p",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        parameter(
            "Divides positive logits of the tokens in prompt and answer, and multiplies negative ones",
            ON_LOGITS,
            ge=0.01,
            le=100,
            neutral=(1,),
            default=1.0,
            setting="repetition_penalty",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        parameter(
            "Subtracted from the logit of every token in the answer", ON_LOGITS, ge=-2, le=2, neutral=(0,), default=0.0
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        parameter(
            "Subtracted from the logit of a token once for each time it is in the answer",
            ON_LOGITS,
            ge=-2,
            le=2,
            neutral=(0,),
            default=0.0,
        ),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        parameter(
            "Token ids with numbers from -100 to 100 that are added to their logits; at most "
            f"{MAX_BIASED_TOKENS} tokens",
            ON_LOGITS,
            neutral=({},),
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, parameter("The only tokens that may be drawn; at least one", ON_LOGITS)
    ] = None
    bad_words: Annotated[
        list[str] | None,
        parameter(
            "Words that the answer must not contain, at the beginning of a text or after a space; at most "
            f"{MAX_BAD_WORDS} of up to {MAX_BAD_WORD_CHARACTERS} characters",
            ON_LOGITS,
            neutral=([],),
        ),
    ] = None
    seed: Annotated[
        int | None,
        parameter(
            "The same seed draws the same answer, whatever else is computed beside it. Left out: a random one",
            ON_LOGITS,
            ge=-(2**63),
            le=2**63 - 1,
        ),
    ] = None
    n: Annotated[
        int | None,
        parameter(
            f"Answers per prompt, each with its own random numbers; prompts times `n` at most "
            f"{ServerOptions().max_choices}, and no more than can run and wait",
            ON_TOKENS,
            ge=1,
            neutral=(1,),
            default=1,
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        parameter(
            f"A text or up to {MAX_STOP_STRINGS} texts of up to {MAX_STOP_CHARACTERS} characters that end the answer, "
            "also across the borders of tokens",
            ON_TOKENS,
            neutral=([],),
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, parameter(f"Up to {MAX_STOP_TOKEN_IDS} tokens that end the answer", ON_TOKENS, neutral=([],))
    ] = None
    ignore_eos: Annotated[
        bool | None,
        parameter("The model's own end tokens do not end the answer", ON_TOKENS, neutral=(False,), default=False),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, parameter("What ended the answer stays in its text", ON_TOKENS, neutral=(False,), default=False)
    ] = None
    skip_special_tokens: Annotated[bool | None, parameter("Special tokens do not appear in the text", default=True)] = (
        None
    )
    truncate_prompt_tokens: Annotated[
        int | None,
        parameter(
            "Only this many last tokens of the prompt are used, special tokens of a text included; -1: as many as fit "
            "beside `max_tokens`. Left out: all"
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        parameter(
            "Log-probabilities of the prompt's tokens, the first one excepted, with this many alternatives each; not "
            "together with `stream`. Such a prompt is computed whole, once for all its answers",
            ON_PROMPT_LOGITS,
            ge=0,
        ),
    ] = None
