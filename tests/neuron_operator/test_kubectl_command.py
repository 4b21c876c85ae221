"""The arguments of `kubectl neuron`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from helpers.operator_worlds import FACTS, SETTINGS, body, find, resolved_world
from neuron_operator.api import names
from neuron_operator.api.fields import as_json
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import Claim
from neuron_operator.decide.pin import pin, to_object
from neuron_operator.kubectl.command import main, parsed
from neuron_operator.read.records import Facts
from neuron_operator.read.world import FreeDevices, Place, Provisionable, StorageSettings

FLAGS = ["-n", "team", "--temperature", "0"]


@pytest.mark.parametrize(
    "arguments", [["chat", "Who?", *FLAGS], ["chat", *FLAGS, "Who?"], ["chat", *FLAGS[:2], "Who?", *FLAGS[2:]]]
)
def test_a_question_stands_before_behind_or_between_flags(arguments: list[str]) -> None:
    options = parsed(["chat", *arguments])
    assert (options.name, options.question, options.namespace, options.temperature) == ("chat", "Who?", ["team"], 0)


def test_a_chat_needs_no_question() -> None:
    assert parsed(["chat", "chat", *FLAGS]).question is None


@pytest.mark.parametrize(
    "arguments",
    [["chat", "chat", "-n", "team", "Who?", "Why?"], ["why", "chat", "-n", "team", "x"], ["why", "c", "--x"]],
)
def test_other_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(arguments)
    assert "unrecognized arguments" in capsys.readouterr().err


def answering(folder: Path, answers: dict[str, object]) -> str:
    """PATH with a kubectl that has these objects by what is read, and writes down how it was called."""
    cases = "\n".join(f"  {name}) cat <<'END'\n{json.dumps(body)}\nEND\n;;" for name, body in answers.items())
    program = folder / "kubectl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\nwhile [ "$1" != get ]; do shift; done\ncase $2 in\n{cases}\nesac\n'
    )
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_model_of_the_cluster_is_planned_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, decision = resolved_world()
    revisions = {"items": [find(decision.desired, "ControllerRevision")]}
    path = answering(tmp_path, {f"{names.PLURAL}.{names.GROUP}": world.body, "controllerrevisions": revisions})
    monkeypatch.setenv("PATH", path)
    assert main(["plan", "chat", "-n", "team", "--context", "c"]) == 0
    assert "computed on the host, so nothing is planned" in capsys.readouterr().out
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.startswith("--namespace=team --context=c get ")
    assert f"{names.MODEL_LABEL}=chat" in second


def test_a_model_of_the_cluster_is_planned_with_its_default_engine_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(persistent_volume_claim=Claim(claim_name="kept"))
    storage = StorageSettings(weights=place, artifacts=place)
    using = replace(SETTINGS, engine_defaults={"trn2": "nxdi"}, storage=storage)
    using = replace(using, provisionable=Provisionable(("trn2.3xlarge",)))
    model = parse(body({"model": {"uri": "hf://acme/tiny"}}), has_defaults=True)
    revision = pin(model, msgspec.convert(FACTS, Facts), using, 1, free=FreeDevices(()))
    revisions: dict[str, object] = {"items": [to_object(model, revision)]}
    written = body({"model": {"uri": "hf://acme/tiny"}, "storage": {"artifacts": as_json(place)}})
    path = answering(tmp_path, {f"{names.PLURAL}.{names.GROUP}": written, "controllerrevisions": revisions})
    monkeypatch.setenv("PATH", path)

    def planned(*flags: str) -> str:
        main(["plan", "chat", *flags])
        printed = capsys.readouterr()
        return printed.out + printed.err

    assert "with backend nxdi, the default for trn2, " in planned()
    assert "with backend vllm, the default for trn2, " in planned(
        "--engine-defaults", '{"trn2": "vllm"}', "--instance-types", "trn2.3xlarge"
    )
    elsewhere = planned("--instance-types", "inf2.8xlarge")
    assert "the backend is nxdi, the default for trn2, and what may be used is inf2: allow nodes of trn2" in elsewhere


def test_a_model_that_is_not_resolved_yet_has_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _ = resolved_world()
    path = answering(tmp_path, {f"{names.PLURAL}.{names.GROUP}": world.body, "controllerrevisions": {"items": []}})
    monkeypatch.setenv("PATH", path)
    assert main(["plan", "chat"]) == 1
    assert "chat is not planned yet: see kubectl neuron why chat" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan"])
    assert "one of the arguments -f/--file NAME is required" in capsys.readouterr().err


def test_a_chat_with_a_model_that_makes_vectors_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _ = resolved_world()
    spec = {**world.body["spec"], "serving": {"task": "Embed"}}
    body = {**world.body, "spec": spec, "status": {"url": "http://chat.team.svc:8000"}}
    monkeypatch.setenv("PATH", answering(tmp_path, {f"{names.PLURAL}.{names.GROUP}": body}))
    assert main(["chat", "chat", "What is a slot?"]) == 1
    said = capsys.readouterr().err
    assert "chat has serving.task Embed, and answers with numbers" in said
    assert "curl -s http://chat.team.svc:8000/v1/embeddings " in said


def test_of_two_installations_why_names_the_one_that_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _ = resolved_world()
    held = {"data": {"holder": "neuron-serving/neuron-operator"}}
    answers = {f"{names.PLURAL}.{names.GROUP}": world.body, "configmap": held}
    monkeypatch.setenv("PATH", answering(tmp_path, answers))
    assert main(["why", "chat"]) == 0
    line = "\n  operator  neuron-serving/neuron-operator acts in this namespace, and no other\n"
    assert line in capsys.readouterr().out
    asked = (tmp_path / "calls").read_text().splitlines()[-1]
    assert asked.startswith(f"get configmap {names.HOLDING} --namespace team --ignore-not-found")
    monkeypatch.setenv("PATH", answering(tmp_path, {**answers, "configmap": {}}))
    assert main(["why", "chat"]) == 0
    assert "  operator" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["na/support-de", "neuronadapter/support-de", "neuronadapters.neuron-serving.dev/support-de"]
)
def test_an_adapter_is_named_as_kubectl_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"name": "support-de", "namespace": "team"}
    adapter = {"kind": names.ADAPTER_KIND, "metadata": about, "spec": {"model": "chat", "uri": "hf://acme/support-de"}}
    monkeypatch.setenv("PATH", answering(tmp_path, {f"{names.ADAPTER_PLURAL}.{names.GROUP}": adapter}))
    assert main(["why", name]) == 0
    assert capsys.readouterr().out.startswith("NeuronAdapter team/support-de: no conditions yet\n  model     chat\n")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "get neuronadapters.neuron-serving.dev support-de --output json"
    assert f"{names.MODEL_LABEL}=chat" in calls[1]


def test_why_of_a_model_asks_for_the_adapters_of_its_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _ = resolved_world()
    adapter = {"kind": names.ADAPTER_KIND, "metadata": {"name": "support-de"}, "spec": {"model": "chat"}}
    of_both = {
        f"{names.PLURAL}.{names.GROUP}": world.body,
        f"{names.ADAPTER_PLURAL}.{names.GROUP}": {"items": [adapter]},
    }
    monkeypatch.setenv("PATH", answering(tmp_path, of_both))
    assert main(["why", "nm/chat"]) == 0
    assert "\n  support-de  none  no conditions yet\n" in capsys.readouterr().out


def test_a_name_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", answering(tmp_path, {}))
    assert main(["why", "pod/chat"]) == 1
    assert "pod/chat is neither a model nor an adapter: write NAME, nm/NAME or na/NAME" in capsys.readouterr().err
