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

from neuron_runtime.errors import InvalidConfig, InvalidRequest, ServingError

LEAVE_OUT = "leave it out"


class Surface(Flag):
    """Where a name is used."""

    BODY = auto()
    """Fields of /v1/completions and /v1/chat/completions, and options of `LLM.chat`."""
    SAMPLING_PARAMS = auto()
    """Fields of the offline class `SamplingParams`."""
    CALL = auto()
    """Arguments of `LLM.generate` and `LLM.chat`."""
    LLM = auto()
    """Arguments of the class `LLM`."""
    FLAG = auto()
    """Flags of `neuron-runtime serve`, here with underscores."""
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
class Row:
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

ROWS = (
    Row("api_server_count", _FLAG, (1,), cure="add replicas: a server has one front end"),
    Row("audio", _BODY),
    Row("audio", _MESSAGE, ([],)),
    Row("background", _RESPONSES, (False,)),
    Row("chat_template", _BODY, cure="set the server's flag --chat-template instead"),
    Row("container", _MESSAGES),
    Row("context_management", _MESSAGES),
    Row("conversation", _RESPONSES, cure="send the whole conversation in `input`"),
    Row("convert", _LLM, ("auto", "none")),
    Row("cpu_offload_gb", _LLM, (0,)),
    Row("data_parallel_size", _LLM, (1,)),
    Row("detokenize", _PARAMS, (True,)),
    Row("disable_sliding_window", _LLM, (False,)),
    Row("documents", _BODY, ([],)),
    Row("download_dir", _FLAG, cure="set --weights-dir instead"),
    Row("early_stopping", _PARAMS, (False,)),
    Row("enable_lora", _LLM, (False,)),
    Row("enable_prompt_embeds", _LLM, (False,)),
    Row("enable_sleep_mode", _LLM, (False,)),
    Row("extra_args", _PARAMS, ({},)),
    Row("function", Surface.ROLE, cure="leave such messages out"),
    Row("function_call", _BODY, ("none", "auto")),
    Row("function_call", _MESSAGE, ([],)),
    Row("functions", _BODY, ([],), 'leave it out, or send "function_call": "none"', unless="function_call"),
    Row("guided_decoding", _PARAMS, cure="set `structured_outputs` instead"),
    Row("hf_config_path", _LLM),
    Row("hf_overrides", _LLM, ({},)),
    Row("hf_token", _LLM, cure="set the environment variable HF_TOKEN"),
    Row("kv_cache_dtype", _LLM, ("auto",)),
    Row("kv_transfer_params", _BODY),
    Row("length_penalty", _BODY | _PARAMS, (1,)),
    Row("limit_mm_per_prompt", _LLM, ({},)),
    Row("load_format", _LLM, ("auto", "safetensors")),
    Row("logits_processors", _BODY | _PARAMS | _LLM, ([],)),
    Row("lora_request", Surface.CALL),
    Row("mcp_servers", _MESSAGES, ([],)),
    Row("mm_processor_kwargs", _BODY | _LLM, ({},)),
    Row("modalities", _BODY, (["text"],)),
    Row("moderation", _BODY),
    Row("no_repeat_ngram_size", Surface.GENERATION_CONFIG, (0,)),
    Row("num_beams", Surface.GENERATION_CONFIG, (1,)),
    Row("num_scheduler_steps", _LLM, (1,)),
    Row("num_speculative_tokens", _LLM),
    Row("output_config", _MESSAGES, ({},)),
    Row("output_format", _MESSAGES),
    Row("override_generation_config", _LLM, ({},)),
    Row("pipeline_parallel_size", _LLM, (1,)),
    Row("prediction", _BODY),
    Row("previous_response_id", _RESPONSES, cure="send the whole conversation in `input`"),
    Row("prompt", _RESPONSES, cure="send the text in `input`"),
    Row("prompt_embeds", _BODY),
    Row("quantization", _LLM),
    Row("refusal", _MESSAGE),
    Row("repetition_detection", _BODY),
    Row("revision", _FLAG, cure="write it behind the model: org/name@revision"),
    Row("root_path", _FLAG, ("",)),
    Row("rope_scaling", _LLM, ({},)),
    Row("rope_theta", _LLM),
    Row("runner", _LLM, ("auto", "generate")),
    Row("seed", _FLAG, cure="set `seed` in requests instead"),
    Row("skip_tokenizer_init", _LLM, (False,)),
    Row("spaces_between_special_tokens", _BODY | _PARAMS, (True,)),
    Row("speculative_config", _LLM, ({},)),
    Row("speculative_draft_tensor_parallel_size", _LLM),
    Row("speculative_max_model_len", _LLM),
    Row("speculative_model", _LLM, cure="leave it out, it does not change answers"),
    Row("ssl_certfile", _FLAG, cure="put a proxy in front that ends TLS"),
    Row("ssl_keyfile", _FLAG, cure="put a proxy in front that ends TLS"),
    Row("store", _RESPONSES, (False,), cure="leave it out: nothing is stored"),
    Row("suffix", _BODY, ("",)),
    Row("task", _LLM, ("auto", "generate")),
    Row("thinking_token_budget", _BODY),
    Row("tokenizer", _LLM),
    Row("tokenizer_mode", _LLM, ("auto",)),
    Row("tokenizer_revision", _LLM),
    Row("truncation", _RESPONSES, ("disabled",)),
    Row("typical_p", Surface.GENERATION_CONFIG, (1,)),
    Row("use_beam_search", _BODY | _PARAMS, (False,)),
    Row("vllm_xargs", _BODY, ({},)),
    Row("web_search_options", _BODY),
    # Metadata of the caller, and what clients set for every model.
    *(
        Row(name, _BODY, has_effect=False)
        for name in (
            *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"),
            *("safety_identifier", "service_tier", "store", "user", "verbosity"),
        )
    ),
    *(
        Row(name, _RESPONSES, has_effect=False)
        for name in (
            *("context_management", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "user"),
        )
    ),
    *(
        Row(name, _MESSAGES, has_effect=False)
        for name in ("cache_control", "inference_geo", "metadata", "service_tier", "speed")
    ),
    # Settings of GPUs or of vLLM's internals: values, then switches.
    *(
        Row(name, _LLM, has_effect=False)
        for name in (
            *("compilation_config", "distributed_executor_backend", "gpu_memory_utilization"),
            *("max_parallel_loading_workers", "max_seq_len_to_capture", "preemption_mode", "scheduling_policy"),
            "swap_space",
        )
    ),
    *(
        Row(name, _LLM, (False,), has_effect=False)
        for name in (
            *(
                "async_scheduling",
                "disable_async_output_proc",
                "disable_custom_all_reduce",
                "disable_log_stats",
                "enforce_eager",
            ),
            *("trust_remote_code", "use_v2_block_manager", "worker_use_ray"),
        )
    ),
    Row("disable_log_requests", _FLAG, (False,), has_effect=False),
    Row("enable_auto_tool_choice", _FLAG, (False,), has_effect=False),
    Row("enable_server_load_tracking", _FLAG, (False,), has_effect=False),
    Row("uvicorn_log_level", _FLAG, has_effect=False),
)

_ROWS: dict[str, dict[Surface, Row]] = {}
for _row in ROWS:
    _ROWS.setdefault(_row.name, {}).update(dict.fromkeys(_row.where, _row))
_SUBJECTS = {
    Surface.LLM: "{value!r}",
    Surface.FLAG: "{value!r}",
    Surface.ROLE: "`{at}`: the role `{name}`",
}


def rows(where: Surface) -> list[Row]:
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
    found = _ROWS.get(name)
    row = None if found is None else found.get(where)
    if row is not None and not row.accepts(value) and others.get(row.unless) != "none":
        at = name if at is None else at
        subject = _SUBJECTS.get(where, "`{at}`").format(name=name, value=value, at=at)
        raise _error(where, at, f"{subject} is not supported yet: {row.cure}")
    return row is not None


def _error(where: Surface, at: str, message: str) -> ServingError:
    if where in Surface.LLM | Surface.FLAG:
        return InvalidConfig(at, message)
    return InvalidRequest(message, field=at)
