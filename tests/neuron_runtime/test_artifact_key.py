"""The key of an artifact: what it covers, and that nothing else changes it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from neuron_runtime.artifacts.key import compiled_part, covered, differences, key_of
from neuron_runtime.backend_protocol import Needs
from neuron_runtime.config import (
    DraftSource,
    EngineLimits,
    ModelSource,
    RuntimeConfig,
    ServerOptions,
    Speculation,
    TextOptions,
    parse_config,
)

NEEDS = Needs(
    shapes={"rows": [1, 8], "length": 4096},
    settings={"dtype": "bfloat16"},
    libraries={"torch": "2.9.1"},
    target={"processor": "x86-64-v3", "cores": 4, "ranks": 1},
)
COVER = covered("torch", "ab" * 20, NEEDS)


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(
        version=1, model=ModelSource(uri="hf://acme/tiny", digest="ab" * 20), served_names=("chat",), **given
    )


def test_fields_that_graphs_do_not_depend_on_are_no_part_of_what_is_compiled() -> None:
    plain = config(limits=EngineLimits(max_sequences=4), dtype="bfloat16", compile=True)
    other = msgspec.structs.replace(
        plain,
        served_names=("a", "b"),
        text=TextOptions(reasoning_parser="qwen3"),
        server=ServerOptions(max_choices=3),
        limits=msgspec.structs.replace(plain.limits, max_queued_requests=7),
    )
    assert other != plain
    assert compiled_part(other) == compiled_part(plain)
    assert compiled_part(plain).limits.max_sequences == 4
    assert compiled_part(plain).model == plain.model


def test_the_compiled_part_is_a_valid_document() -> None:
    part = compiled_part(config(override_neuron_config={"a": [1, {"b": 2}]}, layout="blocks"))
    assert parse_config(msgspec.json.encode(part)) == part
    assert compiled_part(part) == part
    drafting = compiled_part(config(speculation=Speculation(method="Draft", model=DraftSource(uri="file:///d"))))
    assert parse_config(msgspec.json.encode(drafting)) == drafting


@pytest.mark.parametrize("part", ["shapes", "settings", "libraries", "target"])
def test_every_need_changes_the_key(part: str) -> None:
    changed = replace(NEEDS, **{part: {**getattr(NEEDS, part), "more": 1}})
    assert key_of(covered("torch", "ab" * 20, changed)) != key_of(COVER)


def test_backend_and_model_change_the_key() -> None:
    assert len({key_of(covered(name, digest, NEEDS)) for name in ("torch", "nxdi") for digest in ("a", "b")}) == 4


def test_order_of_keys_and_kind_of_list_do_not_change_the_key() -> None:
    shuffled = {name: COVER[name] for name in reversed(COVER)} | {"shapes": {"length": 4096, "rows": (1, 8)}}
    assert key_of(shuffled) == key_of(COVER)
    assert key_of(json.loads(json.dumps(shuffled))) == key_of(COVER)
    assert differences(COVER, shuffled) == []


def test_another_process_comes_to_the_same_key() -> None:
    program = "import json, sys; from neuron_runtime.artifacts.key import key_of; print(key_of(json.load(sys.stdin)))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(COVER),
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == key_of(COVER)


def test_differences_name_the_field_and_both_values() -> None:
    found = covered("torch", "ab" * 20, replace(NEEDS, shapes={"rows": [1], "length": 4096}, settings={}))
    assert differences(COVER, found) == [
        'settings.dtype: nothing instead of "bfloat16"',
        "shapes.rows: [1] instead of [1,8]",
    ]
