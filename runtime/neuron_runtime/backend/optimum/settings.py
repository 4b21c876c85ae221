"""What a model is compiled with for optimum-neuron: `Settings`, and the limits that follow from them.

Derived once from the configuration and config.json by whoever compiles and whoever serves. Pure: it imports neither
optimum-neuron nor torch, and knows nothing of this machine but the `Target` and what it is told of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neuron_runtime.backend.neuron.devices import TIMEOUT_SHARE, Target
from neuron_runtime.backend.neuron.model_config import dtype_of, number_of
from neuron_runtime.backend.neuron.override import PATH, check_kind, near
from neuron_runtime.backend.neuron.unread import UNREAD, read_unread
from neuron_runtime.backend.optimum.models import OptimumFamily, family_of, window_of
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import MAX_LOGPROBS, BackendLimits, PrefillBucket, SamplingMode
from neuron_runtime.errors import ConfigProblems

DEFAULT_MAX_SEQUENCES = 16
DEFAULT_MAX_LENGTH = 4096
DEFAULT_CHUNK_TOKENS = 1024
"""The library's own: chunks of so many tokens for every longer sequence. Its cache of graphs has these."""
DEFAULT_TOPK = 256

COMPILE_TARGETS = {"inf2": "trn1", "trn1": "trn1", "trn2": "trn2"}
"""What optimum-neuron calls the platforms. Graphs for trn1 run on Inferentia2 too."""

OVERRIDES: Mapping[str, type] = {"max_topk": int, "fused_qkv": bool, "capacity_factor": float, "glu_mlp": bool}
"""Keys of `overrideNeuronConfig` that are passed on to NxDNeuronConfig."""
OURS = {
    "batch_size": "limits.maxSequences",
    "max_batch_size": "limits.maxSequences",
    "sequence_length": "limits.maxModelLength",
    "max_context_length": "limits.maxModelLength",
    "prefill_chunk_size": "limits.maxStepTokens",
    "tp_degree": "parallelism.tensor",
    "torch_dtype": "dtype",
    "on_device_sampling": "sampling",
}
"""Fields of NxDNeuronConfig, by the one of ours that decides them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the graphs and the limits."""

    model_type: str
    target: str
    """One of `COMPILE_TARGETS`."""
    tensor: int
    """Tensor-parallel degree: the number of cores that a model runs on."""
    dtype: str
    max_rows: int
    max_model_length: int
    chunk_tokens: int
    """Tokens of a prompt that one call computes, over those before; 0: a call computes a whole prompt."""
    sampling: SamplingMode
    max_topk: int
    """Candidates that the device samples from; 0 without sampling on the device."""
    vocabulary_size: int
    override: Mapping[str, Any]
    """What is passed on to NxDNeuronConfig."""
    unread_weights: tuple[str, ...] = ()
    """Patterns of names of tensors that may stay unread; no part of a graph."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens that each prefill computes."""
        return self.chunk_tokens or self.max_model_length

    @property
    def prefills_on_host(self) -> bool:
        """The graph of chunks never samples, although the one for decoding does."""
        return self.sampling == "Device" and self.chunk_tokens > 0


def settings_of(config: RuntimeConfig, model: Mapping[str, Any], target: Target, *, has_chunks: bool) -> Settings:
    """The settings of a model.

    Args:
        model: config.json.
        has_chunks: whether the installed library computes prompts in chunks.

    Raises:
        InvalidConfig: names every field that contradicts another one, the model, the device or the library.
        InvalidModel: config.json lacks a number.
        FatalError: UNSUPPORTED_ARCHITECTURE.
    """
    return _Derivation(config, model, target, family_of(model), has_chunks).settings()


def check_override(override: Mapping[str, Any]) -> None:
    """Raises InvalidConfig for keys that are not passed on, or that have a field of ours."""
    problems = ConfigProblems()
    for key, value in override.items():
        at = f"{PATH}.{key}"
        if key in OURS:
            problems.add(at, f"is decided by {OURS[key]}: set that")
        elif key == UNREAD:
            with problems.collecting():
                read_unread(value, at)
        elif key not in OVERRIDES:
            problems.add(at, f"is not passed on to optimum-neuron{near(key, [*OVERRIDES, UNREAD])}: leave it out")
        else:
            with problems.collecting():
                check_kind(OVERRIDES[key], float(value) if _is_count_for(OVERRIDES[key], value) else value, at)
    problems.check()


def _is_count_for(kind: type, value: Any) -> bool:
    """A whole number where any number will do."""
    return kind is float and isinstance(value, int) and not isinstance(value, bool)


@dataclass
class _Derivation:
    """One pass over the fields. What is wrong is collected."""

    _config: RuntimeConfig
    _model: Mapping[str, Any]
    _target: Target
    _family: OptimumFamily
    _has_chunks: bool
    _found: ConfigProblems = field(default_factory=ConfigProblems)

    def settings(self) -> Settings:
        config, limits = self._config, self._config.limits
        vocabulary_size = number_of(self._model, "vocab_size")
        platform = self._target.platform.name
        if platform not in COMPILE_TARGETS:
            names = ", ".join(COMPILE_TARGETS)
            self._found.add("$.backend", f"optimum-neuron runs on {names}, not on {platform}: use another backend")
        elif self._target.logical_core != self._target.platform.logical_core:
            message = "optimum-neuron compiles for the device's own logical cores alone: leave it out"
            self._found.add("$.accelerator.logicalNeuronCore", message)
        rows = limits.max_sequences or DEFAULT_MAX_SEQUENCES
        length, tensor = self._length(), self._tensor()
        sampling = self._sampling(rows, tensor)
        topk = config.override_neuron_config.get("max_topk", DEFAULT_TOPK)
        if topk < 1:
            self._found.add(f"{PATH}.max_topk", f"must be 1 or more, got {topk}")
        chunk = self._chunk(length)
        dtype = dtype_of(config.dtype, self._model, self._found)
        self._found.check()
        return Settings(
            model_type=self._family.model_type,
            target=COMPILE_TARGETS[platform],
            tensor=tensor,
            dtype=dtype,
            max_rows=rows,
            max_model_length=length,
            chunk_tokens=chunk,
            sampling=sampling,
            max_topk=min(topk, vocabulary_size) if sampling == "Device" else 0,
            vocabulary_size=vocabulary_size,
            override={key: value for key, value in config.override_neuron_config.items() if key != UNREAD},
            unread_weights=tuple(config.override_neuron_config.get(UNREAD, ())),
        )

    def _length(self) -> int:
        positions, window = number_of(self._model, "max_position_embeddings", 2), window_of(self._model)
        longest = min(positions, window or positions)
        length = self._config.limits.max_model_length or min(longest, DEFAULT_MAX_LENGTH)
        if not 2 <= length <= longest:
            reason = f"the model's {positions} positions" if longest == positions else f"its window of {window} tokens"
            self._found.add("$.limits.maxModelLength", f"must be from 2 to {reason}, got {length}")
        return length

    def _tensor(self) -> int:
        """The tensor-parallel degree. Left open: as many of this process's cores as divide the heads, or one."""
        config, cores = self._config, self._target.granted_cores
        heads = number_of(self._model, "num_attention_heads")
        degree = config.parallelism.tensor or max(d for d in range(1, max(cores, 1) + 1) if heads % d == 0)
        if 0 < config.accelerator.cores < degree:
            message = f"is {degree}, but accelerator.cores is {config.accelerator.cores}"
            self._found.add("$.parallelism.tensor", message)
        return degree

    def _sampling(self, rows: int, tensor: int) -> SamplingMode:
        garbage = self._family.wrong_on_two_cores and tensor == 2 and rows > 1
        mode = self._config.sampling or ("Device" if self._family.samples and not garbage else "Host")
        if mode == "Device" and garbage:
            message = f"Device: tokens of {self._family.model_type} on two cores would be garbage: use Host"
            self._found.add("$.sampling", message)
        return mode

    def _chunk(self, length: int) -> int:
        """Tokens of a chunk; 0: none."""
        config, given, path = self._config, self._config.limits.max_step_tokens, "$.limits.maxStepTokens"
        if config.chunked_prefill == "enabled" and not self._has_chunks:
            message = "the installed optimum-neuron computes whole prompts: leave it out, or use a newer image"
            self._found.add("$.chunkedPrefill", message)
        wanted = config.chunked_prefill == "enabled" or (
            config.chunked_prefill == "auto" and self._has_chunks and length > (given or DEFAULT_CHUNK_TOKENS)
        )
        if not wanted:
            if 0 < given < length:
                message = f"is {given}, but a call computes a whole prompt of up to {length} tokens: leave it out"
                self._found.add(path, message)
            return 0
        chunk = min(given or DEFAULT_CHUNK_TOKENS, length)
        if chunk < 2:
            self._found.add(path, "must be 2 or more, because the library takes one token for a decode step")
        return chunk


def limits_of(settings: Settings, exec_timeout_seconds: float) -> BackendLimits:
    """The limits of a model. exec_timeout_seconds: after which the Neuron runtime gives up a step."""
    on_device = settings.sampling == "Device"
    computed = settings.prefill_tokens
    return BackendLimits(
        max_rows=settings.max_rows,
        max_model_length=settings.max_model_length,
        max_step_tokens=max(computed, settings.max_rows),
        prefill_buckets=(PrefillBucket(computed, computed),),
        layout="slots",
        block_size=settings.max_model_length,
        num_blocks=settings.max_rows,
        mixes_phases=False,
        chunks_prefill=settings.chunk_tokens > 0,
        sampling=settings.sampling,
        vocabulary_size=settings.vocabulary_size,
        max_top_k=settings.max_topk,
        top_p_keeps_crossing=not on_device,
        max_logprobs=0 if on_device else MAX_LOGPROBS,
        steps_in_flight=2,
        token_feedback="device",
        max_step_seconds=TIMEOUT_SHARE * exec_timeout_seconds,
    )
