"""Known features that are not built yet: a table of names with their neutral values and cures, and `refuse`.

Called by the parsers of request bodies, messages, `SamplingParams`, arguments of `LLM` and flags. Names
that are not in the table are left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType
from typing import Any

import msgspec

from neuron_runtime.errors import InvalidConfig, InvalidRequest

LEAVE_OUT = "leave it out"


class Surface(Flag):
    """Where a name is used."""

    BODY = auto()
    """Fields of /v1/completions and /v1/chat/completions, and options of `LLM.chat`."""
    SAMPLING_PARAMS = auto()
    """Fields of the offline class `SamplingParams`."""
    LLM = auto()
    """Arguments of the class `LLM`."""
    FLAG = auto()
    """Flags of `neuron-runtime serve`, here with underscores."""
    SPECULATIVE = auto()
    """Keys of vLLM's speculative config."""
    RESPONSES = auto()
    """Fields of /v1/responses."""
    MESSAGES = auto()
    """Fields of /v1/messages."""
    MESSAGE = auto()
    """Fields of a chat message."""
    ROLE = auto()
    """Roles of chat messages."""
    GENERATION_CONFIG = auto()
    """Settings in a model's generation_config.json, which are reported instead of refused."""


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """One name.

    neutral: values besides None that have no effect and are accepted.
    cure: what the user should do instead.
    has_effect: False if no value can change an answer here; all values are accepted.
    unless: another field; where that is "none", all values of this one are accepted.
    """

    name: str
    where: Surface
    neutral: tuple[Any, ...] = ()
    cure: str = LEAVE_OUT
    has_effect: bool = True
    unless: str = ""

    @property
    def is_switch(self) -> bool:
        """Whether a flag takes no value."""
        return any(isinstance(value, bool) for value in self.neutral)

    def accepts(self, value: Any) -> bool:
        """Whether the value is served."""
        return not self.has_effect or is_neutral(value, self.neutral)


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether a value is None or one of the neutral ones; 0 equals 0.0 but not False, and a Struct its JSON."""
    value = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


_BODY, _PARAMS, _MESSAGE, _FLAG = Surface.BODY, Surface.SAMPLING_PARAMS, Surface.MESSAGE, Surface.FLAG
_LLM = Surface.LLM | _FLAG
_MESSAGES, _RESPONSES = Surface.MESSAGES, Surface.RESPONSES
_SPECULATIVE = Surface.SPECULATIVE
_OF_DRAFT_MODELS = "leave it out: a draft model is as the model"


def _without_effect(where: Surface, names: str, neutral: tuple[Any, ...] = ()) -> tuple[NotBuilt, ...]:
    return tuple(NotBuilt(name, where, neutral, has_effect=False) for name in names.split())


ROWS = (
    NotBuilt("api_server_count", _FLAG, (1,), cure="add replicas: a server has one front end"),
    NotBuilt("audio", _BODY),
    NotBuilt("audio", _MESSAGE, ([],)),
    NotBuilt("background", _RESPONSES, (False,)),
    NotBuilt("chat_template", _BODY, cure="set the server's flag --chat-template instead"),
    NotBuilt("chat_template_content_format", _FLAG, ("auto",), cure="leave it out: the template is tried with both"),
    NotBuilt("container", _MESSAGES),
    NotBuilt("conversation", _RESPONSES, cure="send the whole conversation in `input`"),
    NotBuilt("cpu_offload_gb", _LLM, (0,)),
    NotBuilt("data_parallel_size", _LLM, (1,)),
    NotBuilt("detokenize", _PARAMS, (True,)),
    NotBuilt("disable_by_batch_size", _SPECULATIVE, cure="leave it out: drafts stop where they do not pay"),
    NotBuilt("disable_sliding_window", _LLM, (False,)),
    NotBuilt("documents", _BODY, ([],)),
    NotBuilt("download_dir", _FLAG, cure="set --weights-dir instead"),
    NotBuilt("draft_sample_method", _SPECULATIVE, ("greedy",), cure=_OF_DRAFT_MODELS),
    NotBuilt("draft_tensor_parallel_size", _SPECULATIVE, cure=_OF_DRAFT_MODELS),
    NotBuilt("early_stopping", _PARAMS, (False,)),
    NotBuilt("enable_log_requests", _FLAG, (False,), cure="set --log-prompts instead"),
    NotBuilt("enable_prompt_embeds", _LLM, (False,)),
    NotBuilt("enable_sleep_mode", _LLM, (False,)),
    NotBuilt("extra_args", _PARAMS, ({},)),
    NotBuilt("function", Surface.ROLE, cure="leave such messages out"),
    NotBuilt("function_call", _BODY, ("none", "auto")),
    NotBuilt("function_call", _MESSAGE, ([],)),
    NotBuilt("functions", _BODY, ([],), 'leave it out, or send "function_call": "none"', unless="function_call"),
    NotBuilt("guided_decoding", _PARAMS, cure="set `structured_outputs` instead"),
    NotBuilt("hf_config_path", _LLM),
    NotBuilt("hf_overrides", _LLM, ({},)),
    NotBuilt("hf_token", _LLM, cure="set the environment variable HF_TOKEN"),
    NotBuilt("kv_transfer_params", _BODY),
    NotBuilt("length_penalty", _BODY | _PARAMS, (1,)),
    NotBuilt("load_format", _LLM, ("auto", "safetensors")),
    NotBuilt("logits_processors", _BODY | _PARAMS | _LLM, ([],)),
    NotBuilt("max_logprobs", _LLM, (20,), cure="leave it out: the backend says how many there are at most"),
    NotBuilt("max_model_len", _SPECULATIVE, cure=_OF_DRAFT_MODELS),
    NotBuilt("mcp_servers", _MESSAGES, ([],)),
    NotBuilt(
        "method",
        _SPECULATIVE,
        ("ngram", "[ngram]", "draft_model", "eagle", "eagle3"),
        cure="set ngram, draft_model, eagle or eagle3",
    ),
    NotBuilt("mm_processor_kwargs", _BODY | _LLM, ({},)),
    NotBuilt("modalities", _BODY, (["text"],)),
    NotBuilt("moderation", _BODY),
    NotBuilt("no_repeat_ngram_size", Surface.GENERATION_CONFIG, (0,)),
    NotBuilt("num_beams", Surface.GENERATION_CONFIG, (1,)),
    NotBuilt("num_scheduler_steps", _LLM, (1,)),
    NotBuilt(
        "num_speculative_tokens_per_batch_size",
        _SPECULATIVE,
        cure="leave it out: drafts stop where they do not pay",
    ),
    NotBuilt("output_format", _MESSAGES, cure="send it as `output_config.format`"),
    NotBuilt("override_generation_config", _LLM, ({},)),
    NotBuilt("parallel_drafting", _SPECULATIVE, (False,), cure=_OF_DRAFT_MODELS),
    NotBuilt("pipeline_parallel_size", _LLM, (1,)),
    NotBuilt("prediction", _BODY),
    NotBuilt("previous_response_id", _RESPONSES, cure="send the whole conversation in `input`"),
    NotBuilt("prompt", _RESPONSES, cure="send the text in `input`"),
    NotBuilt("prompt_embeds", _BODY),
    NotBuilt("quantization", _SPECULATIVE, cure=_OF_DRAFT_MODELS),
    NotBuilt("rejection_sample_method", _SPECULATIVE, ("standard",)),
    NotBuilt("refusal", _MESSAGE),
    NotBuilt("repetition_detection", _BODY),
    NotBuilt("response_role", _FLAG, ("assistant",)),
    NotBuilt("revision", _FLAG, cure="write it behind the model: org/name@revision"),
    NotBuilt("revision", _SPECULATIVE, cure="write it behind the model: org/name@revision"),
    NotBuilt("root_path", _FLAG, ("",)),
    NotBuilt("rope_scaling", _LLM, ({},)),
    NotBuilt("rope_theta", _LLM),
    NotBuilt("seed", _FLAG, (0,), cure="set `seed` in requests instead"),
    NotBuilt("skip_tokenizer_init", _LLM, (False,)),
    NotBuilt("spaces_between_special_tokens", _BODY | _PARAMS, (True,)),
    NotBuilt("speculative_draft_tensor_parallel_size", _LLM),
    NotBuilt("ssl_certfile", _FLAG, cure="put a proxy in front that ends TLS"),
    NotBuilt("ssl_keyfile", _FLAG, cure="put a proxy in front that ends TLS"),
    NotBuilt("store", _RESPONSES, (False,), cure="leave it out: nothing is stored"),
    NotBuilt("suffix", _BODY, ("",)),
    NotBuilt("thinking_token_budget", _BODY),
    NotBuilt("tokenizer", _LLM),
    NotBuilt("tokenizer_mode", _LLM, ("auto",)),
    NotBuilt("tokenizer_revision", _LLM),
    NotBuilt("typical_p", Surface.GENERATION_CONFIG, (1,)),
    NotBuilt("use_beam_search", _BODY | _PARAMS, (False,)),
    NotBuilt("vllm_xargs", _BODY, ({},)),
    NotBuilt("web_search_options", _BODY),
    # Metadata of the caller, and what clients set for every model.
    *_without_effect(
        _BODY,
        "metadata prompt_cache_key prompt_cache_options prompt_cache_retention request_id safety_identifier "
        "service_tier store user verbosity",
    ),
    *_without_effect(
        _RESPONSES,
        "context_management max_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention "
        "safety_identifier service_tier truncation user",
    ),
    *_without_effect(_MESSAGES, "cache_control context_management inference_geo metadata service_tier speed"),
    # Settings of GPUs or of vLLM's internals: values, then switches.
    *_without_effect(
        _LLM,
        "compilation_config distributed_executor_backend gpu_memory_utilization max_parallel_loading_workers "
        "max_seq_len_to_capture preemption_mode scheduling_policy swap_space",
    ),
    *_without_effect(
        _LLM,
        "async_scheduling disable_async_output_proc disable_custom_all_reduce disable_log_stats enforce_eager "
        "trust_remote_code use_v2_block_manager worker_use_ray",
        (False,),
    ),
    *_without_effect(
        _FLAG,
        "disable_fastapi_docs disable_frontend_multiprocessing disable_log_requests enable_auto_tool_choice "
        "enable_prompt_tokens_details enable_request_id_headers enable_server_load_tracking",
        (False,),
    ),
    *_without_effect(_FLAG, "guided_decoding_backend uvicorn_log_level"),
)

_ROWS = {(row.name, where): row for row in ROWS for where in row.where}
_SUBJECTS = {
    Surface.LLM: "{value!r}",
    Surface.FLAG: "{value!r}",
    Surface.SPECULATIVE: "{value!r}",
    Surface.ROLE: "`{at}`: the role `{name}`",
}


def rows(where: Surface) -> list[NotBuilt]:
    """The rows of one surface, ordered by name."""
    return [row for row in ROWS if where in row.where]


def refuse(
    where: Surface, name: str, value: Any, at: str | None = None, others: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Refuse a value that is not supported yet.

    Args:
        value: the given value; the whole URI for a scheme.
        at: name of the field in the error; default: `name`.
        others: the fields beside it.

    Returns:
        Whether the table has the name; the value is then neutral or has no effect.

    Raises:
        InvalidRequest: for a body, a message or a sampling parameter.
        InvalidConfig: for an argument, a flag or a model URI.
    """
    row = _ROWS.get((name, where))
    if row is not None and not row.accepts(value) and others.get(row.unless) != "none":
        at = name if at is None else at
        subject = _SUBJECTS.get(where, "`{at}`").format(name=name, value=value, at=at)
        message = f"{subject} is not supported yet: {row.cure}"
        if where in Surface.LLM | Surface.FLAG | Surface.SPECULATIVE:
            raise InvalidConfig(at, message)
        raise InvalidRequest(message, field=at)
    return row is not None
