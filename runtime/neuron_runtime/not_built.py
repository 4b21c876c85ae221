"""What is known and not built yet: one table of names with their neutral values and cures, and one function, `refuse`.

Called for the names that a reader of request bodies, messages, `SamplingParams`, arguments of `LLM`, flags or model
URIs does not serve. It does not judge names that are not in the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

from neuron_runtime.errors import InvalidConfig, InvalidRequest, ServingError

LEAVE_OUT = "leave it out"


class Surface(Flag):
    """Where a name may be written."""

    BODY = auto()
    """Of /v1/completions and /v1/chat/completions; also the options of `LLM.chat`."""
    SAMPLING_PARAMS = auto()
    """Fields of the offline class `SamplingParams`."""
    CALL = auto()
    """Arguments of `LLM.generate` and `LLM.chat`."""
    LLM = auto()
    """Arguments of the class `LLM`."""
    FLAG = auto()
    """Flags of `neuron-runtime serve`, written with underscores here."""
    MESSAGE = auto()
    """Fields of a message of a chat."""
    ROLE = auto()
    """Roles of such messages."""
    SCHEME = auto()
    """Schemes of model URIs."""
    GENERATION_CONFIG = auto()
    """Settings in a model's generation_config.json; they are reported, not refused."""


@dataclass(frozen=True, slots=True)
class Row:
    """One name.

    neutral: the values besides None that change nothing; they are accepted.
    cure: what to do about a refusal.
    has_effect: False for what cannot change an answer here, whatever its value: it is accepted.
    """

    name: str
    where: Surface
    neutral: tuple[Any, ...] = ()
    cure: str = LEAVE_OUT
    has_effect: bool = True

    def accepts(self, value: Any) -> bool:
        """Whether a value needs nothing that is not built."""
        return not self.has_effect or is_neutral(value, self.neutral)


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether a value is None or one of the neutral ones; 0 and 0.0 are one number, False and 0 are not."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


_BODY, _PARAMS, _LLM, _MESSAGE = Surface.BODY, Surface.SAMPLING_PARAMS, Surface.LLM, Surface.MESSAGE

ROWS = (
    Row("additional_config", Surface.FLAG, ({},)),
    Row("audio", _BODY),
    Row("audio", _MESSAGE, ([],)),
    Row("chat_template", _BODY, cure="the server uses its own template, which its flag --chat-template sets"),
    Row("convert", _LLM, ("auto", "none")),
    Row("cpu_offload_gb", _LLM, (0,)),
    Row("data_parallel_size", _LLM, (1,)),
    Row("detokenize", _PARAMS, (True,)),
    Row("disable_sliding_window", _LLM, (False,)),
    Row("documents", _BODY, ([],)),
    Row("early_stopping", _PARAMS, (False,)),
    Row("enable_lora", _LLM, (False,)),
    Row("enable_prompt_embeds", _LLM, (False,)),
    Row("enable_sleep_mode", _LLM, (False,)),
    Row("extra_args", _PARAMS, ({},)),
    Row("function", Surface.ROLE, cure="leave such messages out"),
    Row("function_call", _BODY, ("none", "auto")),
    Row("function_call", _MESSAGE, ([],)),
    Row("functions", _BODY, ([],)),
    Row("guided_choice", _BODY),
    Row("guided_decoding", _PARAMS),
    Row("guided_grammar", _BODY),
    Row("guided_json", _BODY),
    Row("guided_regex", _BODY),
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
    Row("mm_processor_kwargs", _BODY | _LLM, ({},)),
    Row("modalities", _BODY, (["text"],)),
    Row("moderation", _BODY),
    Row("no_repeat_ngram_size", Surface.GENERATION_CONFIG, (0,)),
    Row("num_beams", Surface.GENERATION_CONFIG, (1,)),
    Row("num_scheduler_steps", _LLM, (1,)),
    Row("num_speculative_tokens", _LLM),
    Row("oci", Surface.SCHEME, cure="use hf://org/name[@revision] or file:///absolute/path"),
    Row("override_generation_config", _LLM, ({},)),
    Row("parallel_tool_calls", _BODY, (True, False)),
    Row("pipeline_parallel_size", _LLM, (1,)),
    Row("prediction", _BODY),
    Row("prompt_embeds", _BODY),
    Row("pvc", Surface.SCHEME, cure="use hf://org/name[@revision] or file:///absolute/path"),
    Row("quantization", _LLM),
    Row("refusal", _MESSAGE),
    Row("repetition_detection", _BODY),
    Row("response_format", _BODY, ({"type": "text"},)),
    Row("rope_scaling", _LLM, ({},)),
    Row("rope_theta", _LLM),
    Row("runner", _LLM, ("auto", "generate")),
    Row("s3", Surface.SCHEME, cure="use hf://org/name[@revision] or file:///absolute/path"),
    Row("skip_tokenizer_init", _LLM, (False,)),
    Row("spaces_between_special_tokens", _BODY | _PARAMS, (True,)),
    Row("speculative_config", _LLM, ({},)),
    Row("speculative_draft_tensor_parallel_size", _LLM),
    Row("speculative_max_model_len", _LLM),
    Row("speculative_model", _LLM, cure="leave it out, the answers are the same"),
    Row("structured_outputs", _BODY | _PARAMS),
    Row("suffix", _BODY, ("",)),
    Row("task", _LLM, ("auto", "generate")),
    Row("tensor_parallel_size", _LLM | Surface.FLAG, (1,), cure="the torch backend has one rank, leave it out"),
    Row("thinking_token_budget", _BODY),
    Row("tokenizer", _LLM),
    Row("tokenizer_mode", _LLM, ("auto",)),
    Row("tokenizer_revision", _LLM),
    Row("tool", Surface.ROLE, cure="leave such messages out"),
    Row("tool_call_id", _MESSAGE),
    Row("tool_calls", _MESSAGE, ([],)),
    Row("tool_choice", _BODY, ("none", "auto")),
    Row("tools", _BODY, ([],)),
    Row("typical_p", Surface.GENERATION_CONFIG, (1,)),
    Row("use_beam_search", _BODY | _PARAMS, (False,)),
    Row("verbosity", _BODY, ("medium",)),
    Row("vllm_xargs", _BODY, ({},)),
    Row("web_search_options", _BODY),
    # They describe the caller.
    *(
        Row(name, _BODY, has_effect=False)
        for name in (
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "request_id",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        )
    ),
    # They tune a GPU or vLLM's own parts.
    *(
        Row(name, _LLM, has_effect=False)
        for name in (
            "compilation_config",
            "disable_async_output_proc",
            "disable_custom_all_reduce",
            "disable_log_stats",
            "distributed_executor_backend",
            "enforce_eager",
            "gpu_memory_utilization",
            "max_parallel_loading_workers",
            "max_seq_len_to_capture",
            "preemption_mode",
            "scheduling_policy",
            "swap_space",
            "trust_remote_code",
            "use_v2_block_manager",
            "worker_use_ray",
        )
    ),
)

_ROWS: dict[str, dict[Surface, Row]] = {}
for _row in ROWS:
    _ROWS.setdefault(_row.name, {}).update(dict.fromkeys(_row.where, _row))
_SUBJECTS = {
    Surface.LLM: "{value!r}",
    Surface.FLAG: "{value!r}",
    Surface.ROLE: "`{at}`: the role `{name}`",
    Surface.SCHEME: "the scheme {name}: of {value!r}",
}


def rows(where: Surface) -> list[Row]:
    """The rows of one surface, by name."""
    return [row for row in ROWS if where in row.where]


def refuse(where: Surface, name: str, value: Any, at: str | None = None) -> bool:
    """Refuse a value that needs what is not built.

    Args:
        value: what was written there; the whole URI for a scheme.
        at: how the place is called in the error, if not by the name.

    Returns:
        Whether the table has the name there; its value is then neutral or without effect.

    Raises:
        InvalidRequest: of a body, a message or a sampling parameter.
        InvalidConfig: of an argument, a flag or a model URI.
    """
    found = _ROWS.get(name)
    row = None if found is None else found.get(where)
    if row is not None and not row.accepts(value):
        at = name if at is None else at
        subject = _SUBJECTS.get(where, "`{at}`").format(name=name, value=value, at=at)
        raise _error(where, at, f"{subject} is not supported yet: {row.cure}")
    return row is not None


def _error(where: Surface, at: str, message: str) -> ServingError:
    if where in Surface.LLM | Surface.FLAG | Surface.SCHEME:
        return InvalidConfig(at, message)
    return InvalidRequest(message, field=at)
