"""End tokens and sampling defaults from a model's own files.

Read once by the front end and by the offline class. Fields of a request override these defaults; defaults that this
runtime does not support are reported and not applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, InvalidRequest
from neuron_runtime.not_built import Surface, is_neutral, rows
from neuron_runtime.requests.conversion import typed
from neuron_runtime.requests.parameters import Parameter, Where, parameters_of
from neuron_runtime.requests.sampling_fields import SamplingFields
from neuron_runtime.text.tokenizer import Tokenizer, read_json

FILE = "generation_config.json"
AUTO = "auto"
NEUTRAL = "vllm"
"""vLLM's name for its own neutral defaults."""

PARAMETERS = parameters_of(SamplingFields)


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of one model; None or empty if its files set none."""

    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingFields = field(default_factory=SamplingFields)
    not_applied: tuple[str, ...] = ()
    """Settings of the file that are not applied, as `name=value`."""
    on_host: tuple[str, ...] = ()
    """Settings with which the host samples, beside a device that samples other requests."""

    unnamed_end_id: int | None = None
    """The token with which the chat template ends an answer, if the files do not name it as an end."""

    def value(self, name: str) -> Any:
        """The value of a parameter that a request leaves out: the model's default, else the parameter's."""
        own = getattr(self.sampling, name)
        return PARAMETERS[name].default if own is None else own

    def served(self, limits: BackendLimits) -> GenerationDefaults:
        """The defaults that the model's sampling mode serves; others are added to `not_applied`.

        Where a device is greedy alone, the default temperature is 0. In mode DeviceWithLogits all are served, and those
        that the device cannot apply are named by `on_host`.
        """
        if limits.sampling == "Host":
            return self
        beyond_device = {
            name: f"{name}={value}"
            for name, row in PARAMETERS.items()
            if row.acts
            and row.where("Device") is Where.REFUSED
            and not is_neutral(value := getattr(self.sampling, name), row.neutral)
        }
        if 0 < limits.max_top_k < self.value("top_k"):
            beyond_device["top_k"] = f"top_k={self.value('top_k')} (the device has {limits.max_top_k})"
        if limits.greedy_only and self.sampling.temperature:
            beyond_device["temperature"] = f"temperature={self.sampling.temperature}"
        settings = tuple(beyond_device.values())
        if limits.sampling == "DeviceWithLogits":
            return replace(self, on_host=settings)
        sampling = msgspec.structs.replace(self.sampling, **dict.fromkeys(beyond_device))
        if limits.greedy_only:
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        left_out = (f"{setting} with Device sampling" for setting in settings)
        return replace(self, sampling=sampling, not_applied=(*self.not_applied, *left_out))

    @property
    def notices(self) -> list[str]:
        """For the log, what the file sets and the model does not do, or does more slowly, and what it lacks."""
        missing = f"eos_token_id lacks {self.unnamed_end_id}, the chat template's end of an answer"
        slower = "the host samples requests that leave it out, which is slower than the device"
        return [
            *(f"generation_config.json: {setting} is not supported and not applied" for setting in self.not_applied),
            *(f"generation_config.json: {setting} needs logits: {slower}" for setting in self.on_host),
            *(
                []
                if self.unnamed_end_id is None
                else [f"generation_config.json: {missing}: answers may go on to max_tokens"]
            ),
        ]


def load_generation_defaults(
    model_dir: Path, eos_token_id: int | None, source: str = AUTO, answer_end_id: int | None = None
) -> GenerationDefaults:
    """Defaults from `generation_config.json`; end tokens also from `config.json` and the tokenizer.

    `do_sample: false` makes greedy the default, as in transformers.

    Args:
        source: AUTO: the model's own folder; NEUTRAL: no defaults; else another folder. The model's end tokens always
            apply, in addition to those of another folder.
        answer_end_id: the token with which the chat template ends an answer.

    Raises:
        FatalError: INVALID_MODEL, naming the invalid file and field; INVALID_ENGINE_CONFIG for a `source` without such
            a file.
    """
    path = model_dir / FILE
    settings = read_json(path)
    ends = _token_ids(settings, path) or _token_ids(read_json(model_dir / "config.json"), model_dir / "config.json")
    if eos_token_id is not None:
        ends |= {eos_token_id}
    if source == NEUTRAL:
        settings = {}
    elif source != AUTO:
        path = Path(source, FILE)
        if not path.is_file():
            raise InvalidConfig(
                "$.text.generationConfig", f"{source} has no generation_config.json: set its folder, auto or vllm"
            )
        settings = read_json(path)
        ends |= _token_ids(settings, path)
    values = {name: _number(settings, row, path) for name, row in PARAMETERS.items() if row.setting}
    if settings.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        sampling = typed(values, SamplingFields)
    except InvalidRequest as error:
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: {error}") from error
    not_applied = tuple(
        f"{row.name}={settings[row.name]}"
        for row in rows(Surface.GENERATION_CONFIG)
        if not row.accepts(settings.get(row.name))
    )
    unnamed = None if answer_end_id in ends else answer_end_id
    return GenerationDefaults(ends, sampling, not_applied, unnamed_end_id=unnamed)


def adapted_defaults(
    base: GenerationDefaults, folder: Path, tokenizer: Tokenizer, source: str = AUTO
) -> GenerationDefaults:
    """Those of an adapter in a folder: of its `generation_config.json`, if it has one. Its own ends apply besides those
    of its model. Arguments and errors as of `load_generation_defaults`; an end that is no token is an error, too."""
    own = load_generation_defaults(folder, tokenizer.eos_token_id, NEUTRAL if source != AUTO else AUTO)
    if wrong := sorted(one for one in own.stop_token_ids if one >= tokenizer.vocabulary_size):
        message = f"{folder / FILE}: eos_token_id {wrong[0]} is no token of the model"
        raise FatalError(ExitCode.INVALID_MODEL, message)
    ends = base.stop_token_ids | own.stop_token_ids
    unnamed = None if tokenizer.answer_end_id in ends else tokenizer.answer_end_id
    chosen = own if source == AUTO and (folder / FILE).exists() else base
    return replace(chosen, stop_token_ids=ends, unnamed_end_id=unnamed)


def _token_ids(settings: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = settings.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in values):
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: eos_token_id must be an id or a list of ids, got {value!r}")
    return frozenset(values)


def _number(settings: Mapping[str, Any], row: Parameter, path: Path) -> float | None:
    """A sampling default; None if it has no effect."""
    name, value = row.setting, settings.get(row.setting)
    if is_neutral(value, (*row.neutral, *_NO_EFFECT.get(name, ()))):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: `{name}` must be a number, got {value!r}")
    try:
        row.check(name, value)
    except InvalidRequest as error:
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: {error}") from error
    return int(value) if value == int(value) else value


_NO_EFFECT = {"max_new_tokens": (0, -1)}
"""What files have for "no limit", besides what requests may have."""
