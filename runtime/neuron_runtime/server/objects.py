"""The JSON objects that the server answers with, as OpenAI's API and vLLM's additions to it define them.

The routes and `server.answers` fill them in; `server.openapi` publishes them as schemas. What clients send is declared
in `requests.bodies`. A field whose default is UNSET is present only where its description says so.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Created = Annotated[int, "Seconds since 1970."]
ModelName = Annotated[str, "The first served name."]
Index = Annotated[Count, "Position of the choice: the prompt's number times `n`, plus the answer's."]
FinishReason = Annotated[
    Literal["stop", "length", "abort", "error"],
    "`stop`: an end token or a stop text; `length`: `max_tokens` or the model's length is reached.",
]
StopReason = Annotated[
    int | str | None, "The stop text, or the id of the stop token; null for the tokenizer's own end token."
]
TokenIds = Annotated[list[TokenId], "Ids of the new tokens; with `return_token_ids`."]
PromptTokenIds = Annotated[list[TokenId], "Ids of the prompt's tokens; with `return_token_ids`."]
Reasoning = Annotated[str | None, "What the model thought; only where a reasoning parser is in use."]
ReasoningContent = Annotated[str | None, "The same as `reasoning`, under the field's older name."]
Text = Annotated[str, "Text of the answer, or the new part of it."]
RequestId = Annotated[str, "The server's own id of this answer."]


class PromptLogprob(msgspec.Struct):
    """One token that could stand at a position of the prompt."""

    logprob: Annotated[float, "Natural logarithm of the token's probability."]
    rank: Annotated[Positive, "1 for the likeliest token."]
    decoded_token: Annotated[str, "The token's text."]


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    "For each token of the prompt the likeliest ones by token id, null for the first; with `prompt_logprobs`.",
]


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: Annotated[Count, "Tokens found in the prefix cache."]


class CompletionTokensDetails(msgspec.Struct):
    """What the answer's tokens are."""

    reasoning_tokens: Annotated[Count, "Tokens of the reasoning."]


class Usage(msgspec.Struct):
    """Numbers of tokens. A prompt counts once, however many answers it got."""

    prompt_tokens: Annotated[Count, "Tokens of all prompts."]
    completion_tokens: Annotated[Count, "Tokens of all answers."]
    total_tokens: Annotated[Count, "Both together."]
    prompt_tokens_details: Annotated[PromptTokensDetails | UnsetType, "Absent from the usage of an event."] = UNSET
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, "Only where a reasoning parser is in use."
    ] = UNSET


ChunkUsage = Annotated[
    Usage | UnsetType | None,
    "With `stream_options.include_usage`: null but in the last event; "
    "with `continuous_usage_stats` the numbers so far in each.",
]


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion's tokens, one entry for each token."""

    text_offset: Annotated[list[int], "Character of the text at which each token begins."]
    token_logprobs: Annotated[list[float | None], "Null for the first token of an echoed prompt."]
    tokens: Annotated[list[str], "Texts of the tokens, or `bytes:\\x..` where they are not text."]
    top_logprobs: Annotated[list[dict[str, float] | None], "The likeliest tokens at each position, and the chosen one."]


class CompletionChoice(msgspec.Struct):
    """One answer of a completion."""

    index: Index
    text: Text
    logprobs: Annotated[CompletionLogprobs | None, "With `logprobs`, else null."]
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole completion."""

    id: RequestId
    object: Annotated[Literal["text_completion"], "The kind of object."]
    created: Created
    model: ModelName
    choices: Annotated[list[CompletionChoice], "`n` answers for each prompt, prompt by prompt."]
    usage: Annotated[Usage, "Numbers of tokens."]


class CompletionChunkChoice(msgspec.Struct):
    """New text of one answer."""

    index: Index
    text: Text
    logprobs: Annotated[CompletionLogprobs | None, "With `logprobs`, else null."]
    finish_reason: Annotated[FinishReason | None, "Null until the answer's last event."]
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET


class CompletionChunk(msgspec.Struct):
    """Data of one server-sent event of a completion."""

    id: RequestId
    object: Annotated[Literal["text_completion"], "The kind of object."]
    created: Created
    model: ModelName
    choices: Annotated[list[CompletionChunkChoice], "One choice; none in the event with the usage."]
    usage: ChunkUsage = UNSET


class TopLogprob(msgspec.Struct):
    """A token and its log-probability."""

    token: Annotated[str, "The token's text."]
    logprob: Annotated[float, "Natural logarithm of the token's probability."]
    bytes: Annotated[list[int], "The token's bytes; it may be a part of a character."]


class TokenLogprob(TopLogprob):
    """A token of the answer, with the likeliest ones at its position."""

    top_logprobs: Annotated[list[TopLogprob], "`top_logprobs` of them, the likeliest first."]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat completion's tokens."""

    content: Annotated[list[TokenLogprob], "One entry for each token."]
    refusal: Annotated[None, "Always null: no refusals are told apart."]


class ChatAnswer(msgspec.Struct):
    """The message that the model wrote."""

    role: Annotated[Literal["assistant"], "Role of the message."]
    content: Annotated[str | None, "Text of the message; null where everything is reasoning."]
    refusal: Annotated[None, "Always null: no refusals are told apart."]
    reasoning: Reasoning | UnsetType = UNSET
    reasoning_content: ReasoningContent | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: Index
    message: Annotated[ChatAnswer, "The message."]
    logprobs: Annotated[ChatLogprobs | None, "With `logprobs`, else null."]
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A whole chat completion."""

    id: RequestId
    object: Annotated[Literal["chat.completion"], "The kind of object."]
    created: Created
    model: ModelName
    choices: Annotated[list[ChatChoice], "`n` answers."]
    usage: Annotated[Usage, "Numbers of tokens."]
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What an event adds to a message."""

    role: Annotated[Literal["assistant"] | UnsetType, "In the first event of a choice."] = UNSET
    content: Text | UnsetType = UNSET
    reasoning: Reasoning | UnsetType = UNSET
    reasoning_content: ReasoningContent | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """New text of one answer."""

    index: Index
    delta: Annotated[ChatDelta, "What is new."]
    logprobs: Annotated[ChatLogprobs | None, "With `logprobs`, else null."]
    finish_reason: Annotated[FinishReason | None, "Null until the answer's last event."]
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """Data of one server-sent event of a chat completion."""

    id: RequestId
    object: Annotated[Literal["chat.completion.chunk"], "The kind of object."]
    created: Created
    model: ModelName
    choices: Annotated[list[ChatChunkChoice], "One choice; none in the event with the usage."]
    usage: ChunkUsage = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET


class ModelPermission(msgspec.Struct, kw_only=True):
    """What may be done with a model, in the form that older clients expect."""

    id: Annotated[str, "Id of the permission."]
    object: Annotated[Literal["model_permission"], "The kind of object."] = "model_permission"
    created: Created
    allow_create_engine: Annotated[bool, "Always false."] = False
    allow_sampling: Annotated[bool, "Always true."] = True
    allow_logprobs: Annotated[bool, "Always true."] = True
    allow_search_indices: Annotated[bool, "Always false."] = False
    allow_view: Annotated[bool, "Always true."] = True
    allow_fine_tuning: Annotated[bool, "Always false."] = False
    organization: Annotated[str, "Always `*`."] = "*"
    group: Annotated[None, "Always null."] = None
    is_blocking: Annotated[bool, "Always false."] = False


class Model(msgspec.Struct, kw_only=True):
    """A served name. All names are the same model."""

    id: Annotated[str, "The name, as `model` of a request."]
    object: Annotated[Literal["model"], "The kind of object."] = "model"
    created: Created
    owned_by: Annotated[str, "Always `neuron-serving`."] = "neuron-serving"
    root: ModelName
    parent: Annotated[None, "Always null."] = None
    permission: Annotated[list[ModelPermission], "One entry."]
    max_model_len: Annotated[
        Positive | UnsetType, "Tokens of prompt and answer together; absent until the model is ready."
    ] = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """The served names."""

    object: Annotated[Literal["list"], "The kind of object."] = "list"
    data: Annotated[list[Model], "One entry for each name."]


class Tokens(msgspec.Struct):
    """A text as the model reads it."""

    count: Annotated[Count, "Number of tokens."]
    max_model_len: Annotated[Positive, "Tokens of prompt and answer together."]
    tokens: Annotated[list[TokenId], "Ids of the tokens."]
    token_strs: Annotated[list[str | None] | None, "The tokens as the tokenizer writes them."]


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: Annotated[str, "The text, special tokens included."]


class Version(msgspec.Struct):
    """What answers."""

    version: Annotated[str, "Version of neuron-serving."]


class Health(msgspec.Struct):
    """Whether the server can serve."""

    status: Annotated[Literal["ok", "draining", "not ready"], "`ok` with status 200."]
    detail: Annotated[str | UnsetType, "How far the start is; with `not ready`."] = UNSET


class Error(msgspec.Struct):
    """What is wrong with a request, or with the server."""

    message: Annotated[str, "What happened and what to do."]
    type: Annotated[str, "Kind of the error, e.g. `invalid_request_error`."]
    param: Annotated[str | None, "The field that is wrong."]
    code: Annotated[str | None, "The reason as one word, e.g. `context_length_exceeded`."]


class ErrorObject(msgspec.Struct):
    """OpenAI's error object, the body of every error."""

    error: Annotated[Error, "The error."]
