"""The sampling parameters of all APIs and of the offline class, each declared once.

An API with few of them uses the types below; one that calls a parameter otherwise renames the field of its body.

A new one is a field here (meaning, range, neutral values, default, name in generation_config.json), a field of
`core.Sampling` with the same name, which says what acts on it, and the backends that do.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from neuron_runtime.config import ServerOptions
from neuron_runtime.core import ACTS, Acts
from neuron_runtime.requests.forms import MAX_FORM_CHARACTERS, ResponseFormat, StructuredOutputs
from neuron_runtime.requests.parameters import Parameter

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions if neither client nor model sets it, as in OpenAI's API."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256

MaxTokens = Annotated[
    int | None,
    "Maximum number of output tokens; prompt plus output must fit the model's length. Default: the model's "
    "`max_new_tokens`, else all that fit",
    Parameter(lowest=1, setting="max_new_tokens"),
]
Temperature = Annotated[
    float | None,
    "Divides the logits; 0: greedy, the likeliest token, and the first one on a tie",
    Parameter(lowest=0, highest=100, neutral=(1,), default=1.0, setting="temperature"),
]
TopP = Annotated[
    float | None,
    "Sample from the smallest set of likeliest tokens whose probabilities add up to this; a device may drop the "
    "last of several; 0: the likeliest",
    Parameter(lowest=0, highest=1, neutral=(1,), default=1.0, setting="top_p"),
]
TopK = Annotated[
    int | None,
    "Sample from this many likeliest tokens; 0 and -1: from all, or on a device from as many as it has",
    Parameter(lowest=-1, neutral=(0, -1), default=0, setting="top_k"),
]


class SamplingFields(msgspec.Struct, kw_only=True):
    """None means the model's default. Mutable, as vLLM's `SamplingParams` is."""

    max_tokens: MaxTokens = None
    min_tokens: Annotated[
        int | None,
        "Minimum number of output tokens before an end token or stop text may end the answer; at most `max_tokens`",
        Parameter(lowest=0, neutral=(0,), default=0),
    ] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: Annotated[
        float | None,
        "Sample only tokens with at least this fraction of the likeliest token's probability",
        Parameter(lowest=0, highest=1, neutral=(0,), default=0.0, setting="min_p"),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        "Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones",
        Parameter(lowest=0.01, highest=100, neutral=(1,), default=1.0, setting="repetition_penalty"),
    ] = None
    presence_penalty: Annotated[
        float | None,
        "Subtracted from the logit of every token in the answer",
        Parameter(lowest=-2, highest=2, neutral=(0,), default=0.0),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        "Subtracted from the logit of a token once per occurrence in the answer",
        Parameter(lowest=-2, highest=2, neutral=(0,), default=0.0),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        f"Map from token id to a number from -100 to 100 added to its logit; at most {MAX_BIASED_TOKENS} tokens",
        Parameter(neutral=({},)),
    ] = None
    allowed_token_ids: Annotated[list[int] | None, "Sample only these tokens; at least one"] = None
    bad_words: Annotated[
        list[str] | None,
        "Words that must not occur at the beginning of the answer or after a space; at most "
        f"{MAX_BAD_WORDS} words of up to {MAX_BAD_WORD_CHARACTERS} characters",
        Parameter(neutral=([],)),
    ] = None
    seed: Annotated[
        int | None,
        "Requests with the same seed draw the same random numbers, independent of other requests. Answers can still "
        "differ at near ties, because batching changes rounding. Default: random",
        Parameter(lowest=-(2**63), highest=2**63 - 1),
    ] = None
    n: Annotated[
        int | None,
        f"Number of answers per prompt, sampled independently; prompts times `n` at most "
        f"{ServerOptions().max_choices}, and no more than can run and wait",
        Parameter(Acts.TOKENS, lowest=1, neutral=(1,), default=1),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        f"A text, or up to {MAX_STOP_STRINGS} texts, of up to {MAX_STOP_CHARACTERS} characters that end the answer, "
        "also across token boundaries",
        Parameter(Acts.TOKENS, neutral=([],)),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, f"Up to {MAX_STOP_TOKEN_IDS} tokens that end the answer", Parameter(neutral=([],))
    ] = None
    ignore_eos: Annotated[
        bool | None, "Continue after the model's end tokens", Parameter(Acts.TOKENS, neutral=(False,), default=False)
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        "Keep the stop text or token in the answer",
        Parameter(Acts.TOKENS, neutral=(False,), default=False),
    ] = None
    skip_special_tokens: Annotated[bool | None, "Omit special tokens from the text", Parameter(default=True)] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        "Use only this many last tokens of the prompt, including special tokens of a text; -1: as many as fit with "
        "`max_tokens`. Default: all",
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        "What the answer is: `text`, `json_object`, `json_schema` (a `schema` in `json_schema`) or `structural_tag`. "
        "The answer fits unless `max_tokens` or a stop text cuts it; with reasoning, the answer behind it",
        Parameter(ACTS["form"], neutral=({"type": "text"},)),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        "One of `json` (a schema), `regex`, `choice`, `grammar`, `json_object` and `structural_tag`, of up to "
        f"{MAX_FORM_CHARACTERS} characters",
        Parameter(ACTS["form"]),
    ] = None
    guided_json: Annotated[
        dict[str, Any] | bool | str | None, "Older name of `structured_outputs.json`", Parameter(ACTS["form"])
    ] = None
    guided_regex: Annotated[str | None, "Older name of `structured_outputs.regex`", Parameter(ACTS["form"])] = None
    guided_choice: Annotated[list[str] | None, "Older name of `structured_outputs.choice`", Parameter(ACTS["form"])] = (
        None
    )
    guided_grammar: Annotated[str | None, "Older name of `structured_outputs.grammar`", Parameter(ACTS["form"])] = None
    prompt_logprobs: Annotated[
        int | None,
        "Log-probabilities of the prompt's tokens except the first, with this many alternatives each; not with "
        "`stream`. Such a prompt does not use the prefix cache",
        Parameter(lowest=0),
    ] = None


def sampling_of(body: msgspec.Struct) -> dict[str, Any]:
    """The sampling parameters of a body, which may call them otherwise and lack some."""
    return {name: getattr(body, name) for name in SamplingFields.__struct_fields__ if hasattr(body, name)}
