"""Models that answer with vectors or scores: what they may ask for, what they must be made for, what they need, and
where their task is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.operator_worlds import FACTS, SETTINGS, body, condition, find, finished, fresh, resolved_pod, settle
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.fields import walk
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import FOR_TEXT
from neuron_operator.api.reasons import Reason
from neuron_operator.decide.pin import pin, spec_hash
from neuron_operator.decide.steps import check_task
from neuron_operator.local import command
from neuron_operator.place.sizing import vector_bytes
from neuron_operator.read.records import Facts
from neuron_operator.read.world import Decision
from neuron_operator.render.config_document import WHOLE
from neuron_operator.render.resources import in_host_memory, serving_memory

MODEL = {"uri": "hf://acme/tiny"}
ENCODER: dict[str, Any] = {
    **FACTS,
    "architecture": "BertModel",
    "modelType": "bert",
    "task": "embed",
    "vectorSize": 192,
}
SCORER: dict[str, Any] = {**FACTS, "architecture": "BertForSequenceClassification", "task": "rerank"}


def spec_of(task: str = "Embed", **serving: Any) -> dict[str, Any]:
    return {"model": MODEL, "accelerator": {"type": "CPU"}, "serving": {"task": task, **serving}}


def resolved(spec: dict[str, Any], facts: dict[str, Any]) -> Decision:
    """What is decided after the Job has reported these facts."""
    world, decision = settle(fresh(spec=spec))
    world, _ = settle(replace(world, pods=(*world.pods, resolved_pod(find(decision.desired, "Job"), facts))))
    return settle(finished(world))[1]


@pytest.mark.parametrize("backend", ["nxdi", "optimum", "vllm", "transformers-neuronx", "simulated"])
def test_an_engine_that_makes_no_vectors_refuses_the_task_and_names_one_that_does(backend: str) -> None:
    with pytest.raises(InvalidSpec, match=r"set engine\.backend: torch") as refused:
        parse(body({"model": MODEL, "engine": {"backend": backend}, "serving": {"task": "Embed"}}))
    assert (refused.value.field, refused.value.reason) == ("spec.serving.task", Reason.FIELD_NOT_SUPPORTED)


VALUES: dict[str, Any] = {
    "blockSize": 16,
    "numBlocks": 8,
    "kvCacheDtype": "Fp8",
    "prefixCaching": "Enabled",
    "chunkedPrefill": "Enabled",
    "quantization": "Int8",
    "contextBuckets": [128],
    "tokenGenerationBuckets": [128],
    "sampling": "Host",
    "generationConfig": "Disabled",
    "chatTemplate": "{{ 1 }}",
    "reasoningParser": "qwen3",
    "toolCallParser": "hermes",
    "adapters": {"maxActive": 1},
    "speculation": {"method": "NGram"},
    "media": {"maxImages": 2},
}


OTHERS: dict[str, Any] = {"engine.compile": "Enabled", "parallelism.tensor": 2, "parallelism.nodes": 2}


def test_each_field_for_text_exists_and_is_tried() -> None:
    paths = {path.removeprefix("spec.") for path, _, _ in walk(WHOLE, "spec")}
    assert paths >= FOR_TEXT.keys() == {f"serving.{name}" for name in VALUES} | OTHERS.keys()


@pytest.mark.parametrize("task", ["Embed", "Rerank"])
@pytest.mark.parametrize("name", VALUES)
def test_a_field_for_text_is_refused_by_name_with_another_task(name: str, task: str) -> None:
    with pytest.raises(InvalidSpec, match="models that generate text") as refused:
        parse(body(spec_of(task, **{name: VALUES[name]})))
    assert refused.value.field == f"spec.serving.{name}"


@pytest.mark.parametrize("path", OTHERS)
def test_one_process_computes_each_text_as_it_is(path: str) -> None:
    part, _, name = path.partition(".")
    with pytest.raises(InvalidSpec, match="models that generate text") as refused:
        parse(body(spec_of() | {part: {name: OTHERS[path]}}))
    assert refused.value.field == f"spec.{path}"


def test_values_that_change_nothing_are_accepted_with_another_task() -> None:
    for path, accepted in FOR_TEXT.items():
        for value in accepted:
            part, _, name = path.partition(".")
            spec = spec_of()
            parse(body({**spec, part: {**spec.get(part, {}), name: value}}))


def test_fields_for_all_tasks_are_accepted_and_reach_the_document() -> None:
    serving = {"maxModelLength": 512, "maxSequences": 4, "maxQueuedRequests": 9, "dtype": "float32"}
    pinned = pin(parse(body(spec_of(**serving))), msgspec.convert(ENCODER, Facts), SETTINGS, 1).pinned
    assert pinned.config["task"] == "embed"
    assert pinned.config["limits"] == {"maxModelLength": 512, "maxSequences": 4, "maxQueuedRequests": 9}
    assert "task" not in pin(parse(body()), msgspec.convert(FACTS, Facts), SETTINGS, 1).pinned.config


def test_a_model_without_the_field_keeps_its_revision() -> None:
    assert spec_hash(parse(body(spec_of("Generate")))) == spec_hash(
        parse(body({"model": MODEL, "accelerator": {"type": "CPU"}}))
    )
    assert spec_hash(parse(body(spec_of("Embed")))) != spec_hash(parse(body(spec_of("Rerank"))))


@pytest.mark.parametrize(
    ("task", "facts", "says"),
    [
        ("Generate", ENCODER, "set serving.task: Embed"),
        ("Generate", SCORER, "set serving.task: Rerank"),
        ("Embed", SCORER, "set serving.task: Rerank"),
        ("Rerank", ENCODER, "set serving.task: Embed"),
        ("Rerank", FACTS, "choose a model that"),
    ],
)
def test_a_model_that_was_made_for_another_task_is_refused_before_a_pod_starts(
    task: str, facts: dict[str, Any], says: str
) -> None:
    decision = resolved(spec_of(task), facts)
    found = condition(decision.status, "ModelResolved")
    assert (found["status"], found["reason"]) == ("False", "UnsupportedArchitecture")
    assert found["message"].startswith(f"spec.serving.task: {task}: {facts['architecture']}")
    assert says in found["message"]
    assert condition(decision.status, "Stalled")["reason"] == "UnsupportedArchitecture"
    assert not [made for made in decision.desired if made["kind"] == "Deployment"]


@pytest.mark.parametrize(("task", "facts"), [("Embed", FACTS), ("Embed", ENCODER), ("Rerank", SCORER)])
def test_a_model_that_was_made_for_the_task_is_served(task: str, facts: dict[str, Any]) -> None:
    decision = resolved(spec_of(task), facts)
    assert condition(decision.status, "ModelResolved")["status"] == "True"
    assert find(decision.desired, "Deployment")


def test_the_cure_on_devices_names_the_engine_too() -> None:
    model = parse(body({"model": MODEL, "engine": {"backend": "nxdi"}}))
    with pytest.raises(InvalidSpec, match=r"serving.task: Embed, and engine.backend: torch$"):
        check_task(model, msgspec.convert(ENCODER, Facts))


def test_the_task_and_the_size_of_vectors_are_shown_where_one_looks() -> None:
    status = resolved(spec_of(), ENCODER).status
    assert status is not None
    assert condition(status, "ModelResolved")["message"].endswith("; vectors of 192 numbers")
    assert status["plan"]["task"] == "Embed"
    assert "; task Embed" in status["plan"]["summary"]
    assert "sampling" not in status["plan"]
    assert "task" not in (resolved(spec_of("Generate"), FACTS).status or {})["plan"]


def test_the_memory_of_a_model_for_vectors_has_no_cache_but_the_largest_step() -> None:
    facts = msgspec.convert(ENCODER, Facts)
    needed = in_host_memory(parse(body(spec_of())), facts)
    assert (needed.weights, needed.embedding, needed.cache, needed.block) == (facts.weights_bytes, 0, 0, 0)
    assert needed.activations == 2048 * 192 * 2 + 2048 * (10 * 192 + 3 * 576) * 4
    # Short texts are computed together.
    assert vector_bytes(facts, 16) == vector_bytes(facts, 2048) < vector_bytes(facts, 4096)
    long = msgspec.structs.replace(facts, max_position_embeddings=40_000)
    assert vector_bytes(long, 0) == vector_bytes(facts, 8192)
    many = msgspec.structs.replace(facts, num_layers=80)
    assert serving_memory(parse(body(spec_of())), many) < serving_memory(parse(body(spec_of("Generate"))), many)


@pytest.mark.parametrize(("task", "route"), [("Embed", "/v1/embeddings"), ("Rerank", "/v1/rerank")])
def test_a_question_to_a_model_that_answers_with_numbers_is_refused_with_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, route: str
) -> None:
    manifest = {**body(spec_of(task)), "metadata": {"name": "vectors"}}
    file = tmp_path / "model.yaml"
    file.write_bytes(msgspec.yaml.encode(manifest))
    options = ["-f", str(file), "--cache-dir", str(tmp_path / "cache"), "--port", "8123", "--ask", "it's"]
    assert command.main(options) == command.EXIT_USAGE
    said = capsys.readouterr().err
    assert f"spec.serving.task is {task}: leave it out" in said
    assert f"curl -s http://127.0.0.1:8123{route} " in said
    assert '"model": "vectors"' in said
