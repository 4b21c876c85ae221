"""The record and the progress lines between runtime and operator: the operator reads what the runtime writes; invalid
records read as none."""

import json
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_operator.api import names
from neuron_operator.read.records import (
    VERSION,
    AdapterFacts,
    ConversionFigures,
    Facts,
    PlannedConversion,
    Record,
    StoredArtifact,
    StoredWeights,
    parse_record,
)
from neuron_runtime import console
from neuron_runtime import record as runtime
from neuron_runtime.adapters.peft import TARGETS
from neuron_runtime.core import TASKS
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.quantization import Format

TEXT = st.text(max_size=200)
COUNT = st.integers(min_value=0, max_value=2**53)
FACTS = st.builds(
    runtime.ModelFacts,
    architecture=st.text(max_size=40),
    model_type=st.text(max_size=40),
    parameters=COUNT,
    weights_bytes=COUNT,
    dtype=st.text(max_size=10),
    num_layers=COUNT,
    hidden_size=COUNT,
    num_heads=COUNT,
    num_kv_heads=COUNT,
    head_dim=COUNT,
    vocabulary_size=COUNT,
    max_position_embeddings=COUNT,
    intermediate_size=COUNT,
    num_experts=COUNT,
    tied_embeddings=st.booleans(),
    graphs=st.text(max_size=100),
    quantization=st.text(max_size=80),
    conversion=st.none()
    | st.builds(
        runtime.PlannedConversion,
        digest=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        format=st.sampled_from(get_args(Format)),
        bytes=COUNT,
    ),
    task=st.sampled_from(TASKS),
    vector_size=COUNT,
    digest=st.text(max_size=80),
)


@given(FACTS, st.floats(min_value=0, max_value=1e6))
def test_the_operator_reads_the_facts_that_the_runtime_wrote(facts: runtime.ModelFacts, seconds: float) -> None:
    read = parse_record(runtime.encode(runtime.success("inspect", facts, seconds)).decode())
    assert read is not None
    assert read.ok
    assert msgspec.to_builtins(read.facts) == msgspec.to_builtins(facts)


@given(st.builds(runtime.StoredWeights, digest=st.text(max_size=80), bytes=COUNT, read_bytes=COUNT))
def test_the_operator_reads_what_fetch_stored(weights: runtime.StoredWeights) -> None:
    read = parse_record(runtime.encode(runtime.success("fetch", weights)).decode())
    assert read is not None
    assert msgspec.to_builtins(read.weights) == msgspec.to_builtins(weights)


@given(
    st.builds(runtime.StoredWeights, digest=st.text(max_size=80), bytes=COUNT, read_bytes=COUNT),
    st.builds(
        runtime.ConversionFigures,
        format=st.sampled_from(get_args(Format)),
        layer_error=st.floats(0, 1e9),
        perplexity=st.none() | st.floats(0, 1e9),
        converted_perplexity=st.none() | st.floats(0, 1e9),
        unmeasured=st.text(max_size=100),
    ),
)
def test_the_operator_reads_what_convert_stored_and_measured(
    weights: runtime.StoredWeights, figures: runtime.ConversionFigures
) -> None:
    read = parse_record(runtime.encode(runtime.success("convert", runtime.Converted(weights, figures))).decode())
    assert read is not None
    assert msgspec.to_builtins(read.weights) == msgspec.to_builtins(weights)
    assert msgspec.to_builtins(read.conversion) == msgspec.to_builtins(figures)


@given(
    st.builds(
        runtime.StoredArtifact,
        key=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        bytes=COUNT,
        seconds=st.floats(0, 1e6),
        reused=st.booleans(),
        peak_bytes=COUNT,
    )
)
def test_the_operator_reads_what_compile_stored(artifact: runtime.StoredArtifact) -> None:
    read = parse_record(runtime.encode(runtime.success("compile", artifact)).decode())
    assert read is not None
    assert msgspec.to_builtins(read.artifact) == msgspec.to_builtins(artifact)


@given(
    st.builds(
        runtime.AdapterFacts,
        digest=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        rank=COUNT,
        targets=st.lists(st.sampled_from(TARGETS), unique=True).map(tuple),
        num_bytes=COUNT,
        base_model=st.text(max_size=83),
        source_digest=st.from_regex(r"([0-9a-f]{40,64})?", fullmatch=True),
    )
)
def test_the_operator_reads_what_inspect_found_about_an_adapter(adapter: runtime.AdapterFacts) -> None:
    read = parse_record(runtime.encode(runtime.success("inspect", adapter)).decode())
    assert read is not None
    assert msgspec.to_builtins(read.adapter) == msgspec.to_builtins(adapter)


@given(st.sampled_from(ExitCode), st.text(max_size=5000))
def test_a_failure_keeps_code_and_reason_with_a_message_of_any_length(code: ExitCode, message: str) -> None:
    read = parse_record(runtime.encode(runtime.failure("serve", FatalError(code, message))).decode())
    assert read is not None
    assert (read.ok, read.exit_code, read.reason) == (False, int(code), code.reason)
    assert message.startswith(read.message)


def test_the_operator_recognises_the_progress_lines_of_the_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("graph 2 of 3")
    assert capsys.readouterr().err == f"{names.LOG_PREFIX}graph 2 of 3\n"


def test_operator_and_runtime_use_the_same_record_fields_and_version() -> None:
    assert Record.__struct_encode_fields__ == runtime.Record.__struct_encode_fields__
    # The operator adds the facts of the draft model, which another Job reports.
    assert Facts.__struct_encode_fields__ == (*runtime.ModelFacts.__struct_encode_fields__, "draft")
    assert StoredWeights.__struct_encode_fields__ == runtime.StoredWeights.__struct_encode_fields__
    assert StoredArtifact.__struct_encode_fields__ == runtime.StoredArtifact.__struct_encode_fields__
    assert PlannedConversion.__struct_encode_fields__ == runtime.PlannedConversion.__struct_encode_fields__
    assert ConversionFigures.__struct_encode_fields__ == runtime.ConversionFigures.__struct_encode_fields__
    assert AdapterFacts.__struct_encode_fields__ == runtime.AdapterFacts.__struct_encode_fields__
    assert Record.__annotations__.keys() == runtime.Record.__annotations__.keys()
    assert VERSION == runtime.RECORD_VERSION


@pytest.mark.parametrize(
    "message",
    [None, "", "null", "[]", "Traceback (most recent call last):", '{"version": 1}', '{"version": 1, "command": 3}', 7],
)
def test_an_invalid_record_reads_as_none(message: object) -> None:
    assert parse_record(message) is None


def test_a_record_of_another_version_reads_as_none() -> None:
    whole = json.loads(runtime.encode(runtime.success("inspect")))
    assert parse_record(json.dumps(whole)) is not None
    assert parse_record(json.dumps({**whole, "version": VERSION + 1})) is None


def test_unknown_fields_of_a_newer_runtime_are_ignored() -> None:
    whole = json.loads(runtime.encode(runtime.success("inspect")))
    assert parse_record(json.dumps({**whole, "colour": "blue"})) is not None


@given(FACTS, st.integers(min_value=0))
def test_a_truncated_record_reads_as_none(facts: runtime.ModelFacts, cut: int) -> None:
    text = runtime.encode(runtime.success("inspect", facts)).decode()
    assert parse_record(text[: cut % len(text)]) is None


@given(TEXT | st.binary(max_size=50).map(lambda raw: raw.decode(errors="surrogateescape")))
def test_no_message_crashes_the_reader(message: str) -> None:
    assert parse_record(message) is None or message.lstrip().startswith("{")
