"""What a model's own files say about generating: end tokens and sampling defaults.

Read once by the front end. A client's field always wins over a default found here; a default that this runtime
cannot honour is reported, not silently applied or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_runtime import sampling_modes
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig, InvalidRequest
from neuron_runtime.not_built import Surface, rows
from neuron_runtime.text.tokenizer import read_json

AUTO = "auto"
NEUTRAL = "vllm"
"""vLLM's word for its own defaults, which change nothing."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of one model; None and empty where its files are silent."""

    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    not_applied: tuple[str, ...] = ()
    """Settings of the file that this runtime leaves out, as `name=value`."""


def load_generation_defaults(model_dir: Path, eos_token_id: int | None, source: str = AUTO) -> GenerationDefaults:
    """Defaults from `generation_config.json`; end tokens also from `config.json` and the tokenizer.

    `do_sample: false` makes greedy the default, as it does in transformers.

    Args:
        source: where the defaults come from: AUTO is the model's own folder, NEUTRAL nowhere, anything else another
            folder. End tokens are the model's in any case, those of another folder besides.

    Raises:
        FatalError: INVALID_MODEL with the file and field that is not what it must be; INVALID_ENGINE_CONFIG for a
            `source` that has no such file.
    """
    path = model_dir / "generation_config.json"
    settings = read_json(path)
    ends = _token_ids(settings, path) or _token_ids(read_json(model_dir / "config.json"), model_dir / "config.json")
    if eos_token_id is not None:
        ends |= {eos_token_id}
    if source == NEUTRAL:
        settings = {}
    elif source != AUTO:
        path = Path(source, "generation_config.json")
        if not path.is_file():
            raise InvalidConfig(
                "$.text.generationConfig", f"{source} has no generation_config.json: name its folder, auto or vllm"
            )
        settings = read_json(path)
        ends |= _token_ids(settings, path)
    greedy = settings.get("do_sample") is False
    defaults = GenerationDefaults(
        stop_token_ids=ends,
        temperature=0.0 if greedy else _number(settings, "temperature", 1.0, path),
        top_k=int(_number(settings, "top_k", 0, path)),
        top_p=_number(settings, "top_p", 1.0, path),
        min_p=_number(settings, "min_p", 0.0, path),
        repetition_penalty=_number(settings, "repetition_penalty", 1.0, path),
        max_tokens=int(_number(settings, "max_new_tokens", 0, path)) or None,
        not_applied=tuple(
            f"{row.name}={settings[row.name]}"
            for row in rows(Surface.GENERATION_CONFIG)
            if not row.accepts(settings.get(row.name))
        ),
    )
    try:
        sampling_modes.check_ranges(defaults)
    except InvalidRequest as error:
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: {error}") from error
    return defaults


def _token_ids(settings: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = settings.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in values):
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: eos_token_id must be an id or a list of ids, got {value!r}")
    return frozenset(values)


def _number(settings: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise FatalError(ExitCode.INVALID_MODEL, f"{path}: {name} must be a number from 0, got {value!r}")
    return value
