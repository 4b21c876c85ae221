"""What a request asks for besides its prompt or conversation: the options that admission reads, whatever the API.

The bodies of OpenAI's API are these with a prompt or messages; the other APIs make them from bodies of their own.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from neuron_runtime.core import ACTS, Acts
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.requests.parameters import Parameter
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, SamplingFields

MAX_SALT_CHARACTERS = 256


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: Annotated[bool | None, "Send the usage in a last event"] = None
    continuous_usage_stats: Annotated[bool | None, "Send the usage in every event; with `include_usage`"] = None
    include_obfuscation: Annotated[bool | None, "Accepted without effect"] = None


class Generate(SamplingFields, kw_only=True):
    """Options of completions and chats."""

    model: Annotated[str | None, "One of the served names. Default: the served model"] = None
    add_special_tokens: Annotated[
        bool | None,
        "Add the tokenizer's special tokens, such as a BOS; chat templates write their own. Default: true for "
        "completions, false for chats",
    ] = None
    return_token_ids: Annotated[
        bool | None,
        "Return `token_ids` in each choice, and `prompt_token_ids` in each choice (chat: next to the choices)",
        Parameter(default=False),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, "Write tokens in log-probabilities as `token_id:N`", Parameter(default=False)
    ] = None
    priority: Annotated[
        int | None, "Lower numbers are served first", Parameter(lowest=-(2**31), highest=2**31 - 1, default=0)
    ] = None
    cache_salt: Annotated[
        str | None,
        f"Only requests with the same salt share cached prompt prefixes; at most {MAX_SALT_CHARACTERS} characters",
        Parameter(default=""),
    ] = None
    stream: Annotated[bool | None, "Send server-sent events, ended by `[DONE]`", Parameter(default=False)] = None
    stream_options: Annotated[
        StreamOptions | None,
        "With `stream`. `include_usage`: send the usage in a last event; `continuous_usage_stats`: send it in every "
        "event; `include_obfuscation`: accepted without effect, as is all of it without `stream`",
    ] = None


class CompletionOptions(Generate, kw_only=True):
    """How to continue prompts."""

    max_tokens: Annotated[
        int | None,
        "Maximum number of output tokens; prompt plus output must fit the model's length. 0 only with `echo`. "
        f"Default: the model's `max_new_tokens`, else {DEFAULT_COMPLETION_TOKENS}",
        Parameter(lowest=0),
    ] = None
    logprobs: Annotated[
        int | None, "Return log-probabilities of output tokens, with this many alternatives each", Parameter(lowest=0)
    ] = None
    echo: Annotated[
        bool | None,
        "Return the prompt before each answer; with `logprobs`, its log-probabilities too",
        Parameter(Acts.TOKENS, neutral=(False,), default=False),
    ] = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1 and not self.echo:
            raise InvalidRequest.at("max_tokens", f"must be at least 1 without `echo`, got {self.max_tokens}")


class FunctionName(msgspec.Struct, frozen=True):
    """Names a function."""

    name: Annotated[str, "Name of one of `tools`"]


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that the answer must call."""

    type: Annotated[Literal["function"], "`function`"]
    function: Annotated[FunctionName, "The function"]


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


class ChatOptions(Generate, kw_only=True):
    """How to answer a chat."""

    tool_choice: Annotated[
        ToolChoice,
        "`auto`: the model decides whether to call tools; `none`: it does not see them; `required`: the answer calls "
        "at least one; a named function: it calls this one",
        Parameter(ACTS["form"], neutral=("none", "auto"), default="auto"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, "false: at most one call in an answer", Parameter(neutral=(True, False), default=True)
    ] = None
    logprobs: Annotated[
        bool | None, "Return log-probabilities of output tokens", Parameter(neutral=(False,), default=False)
    ] = None
    top_logprobs: Annotated[
        int | None,
        "Number of alternatives per token; with `logprobs`",
        Parameter(ACTS["logprobs"], lowest=0, neutral=(0,), default=0),
    ] = None
    include_reasoning: Annotated[
        bool | None, "Return the reasoning of a reasoning model", Parameter(neutral=(True,), default=True)
    ] = None
