"""`neuron-operator plan`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml

from helpers.manifests import CASES
from helpers.quantized import FORMATS, quantize
from helpers.tiny_model import write_tiny_model
from neuron_operator.__main__ import main
from neuron_operator.api.manifest import parse
from neuron_operator.decide.pin import pin
from neuron_operator.local.plan import SETTINGS
from neuron_operator.read.records import Facts
from neuron_operator.read.world import FreeDevices, Provisionable
from neuron_runtime.commands.command_line import main as runtime_main
from neuron_runtime.inspection import facts_as_json, inspect_model

MODELS = yaml.safe_load((CASES / "sizing" / "models.yaml").read_text())
LLAMA, LARGE = MODELS["meta-llama/Llama-3.1-8B-Instruct"], MODELS["meta-llama/Llama-3.3-70B-Instruct"]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(
        "apiVersion: neuron-serving.dev/v1alpha1\nkind: NeuronModel\nmetadata: {name: chat}\n"
        'spec: {model: {uri: "hf://acme/llama"}}\n'
    )
    return path


def facts(folder: Path, found: object) -> str:
    path = folder / "facts.json"
    path.write_text(json.dumps(found))
    return str(path)


def test_it_prints_the_summary_of_the_status_and_the_arithmetic(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--facts", facts(tmp_path, LLAMA), "--instance-types", "inf2.8xlarge,inf2.xlarge,trn2.3xlarge"]
    assert main(["plan", "-f", str(manifest), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    model = parse(yaml.safe_load(manifest.read_text()))
    types = Provisionable(("inf2.8xlarge", "inf2.xlarge", "trn2.3xlarge"))
    pinned = pin(model, msgspec.convert(LLAMA, Facts), replace(SETTINGS, provisionable=types), 1, free=FreeDevices(()))
    assert lines[0] == pinned.pinned.plan.summary
    text = "\n".join(lines)
    for part in (
        "each of 2 NeuronCores of inf2\n  weights         8.0 GB",
        "cache           4.3 GB  16 sequences of 4096 tokens",
        "total          15.0 GB\n  may be used    16.3 GB",
        "cheapest   1 Neuron device of inf2.8xlarge, about $1.97 per hour",
        "runner-up  1 Neuron device of trn2.3xlarge: 16 sequences of 4096 tokens, about $2.23 per hour "
        "(a node to add)\n",
        "1 Neuron device of inf2.xlarge  loading takes 32.9 GB of host memory, and a node has 14.8 GB",
    ):
        assert part in text


def test_it_says_when_replicas_are_taken_away(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write_text(manifest.read_text().replace("spec: {", "spec: {idle: {afterSeconds: 900, minReplicas: 1}, "))
    flags = ["--facts", facts(tmp_path, LLAMA), "--instance-types", "inf2.8xlarge"]
    assert main(["plan", "-f", str(manifest), *flags]) == 0
    assert capsys.readouterr().out.endswith("after 900 s without a request: 1 replica (spec.idle)\n")


def test_the_shown_plan_is_what_is_printed(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
    shown = page.partition("```console\n")[2].partition("```")[0]
    command, _, output = shown.partition("\n")
    flags = command.split()[2:]
    flags[flags.index("model.yaml")], flags[flags.index("facts.json")] = str(manifest), facts(tmp_path, LLAMA)
    assert main(flags) == 0
    assert capsys.readouterr().out == output


def test_the_manifest_may_be_in_a_list_and_come_from_standard_input(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--facts", facts(tmp_path, LLAMA), "--instance-types", "inf2.8xlarge"]
    assert main(["plan", "-f", str(manifest), *flags]) == 0
    expected = capsys.readouterr().out
    listed = {"apiVersion": "v1", "kind": "List", "items": [{"kind": "Pod"}, yaml.safe_load(manifest.read_text())]}
    for text in (manifest.read_text(), json.dumps(listed)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["plan", "-f", "-", *flags]) == 0
        assert capsys.readouterr().out == expected


def test_a_reader_that_has_seen_enough_is_no_error(manifest: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuron_operator", "plan", "-f", str(manifest), "-o", "yaml"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*command, "--facts", facts(tmp_path, LLAMA)], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_prints_the_objects(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", str(manifest), "--facts", facts(tmp_path, {"facts": LLAMA}), "-o", "yaml"]) == 0
    text = capsys.readouterr().out
    assert "&id" not in text
    found = {obj["kind"]: obj for obj in yaml.safe_load_all(text)}
    assert found.keys() >= {"Job", "ConfigMap", "Deployment", "Service", "ControllerRevision"}
    assert json.loads(found["ConfigMap"]["data"]["config.json"])["limits"] == {
        "maxModelLength": 4096,
        "maxSequences": 16,
    }
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"aws.amazon.com/neuron": "1"}


def test_it_prints_the_configuration_from_which_the_runtime_lists_the_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{write_tiny_model(tmp_path / 'model')}"
    manifest = tmp_path / "model.yaml"
    model = {"apiVersion": "neuron-serving.dev/v1alpha1", "kind": "NeuronModel", "metadata": {"name": "chat"}}
    manifest.write_text(json.dumps({**model, "spec": {"model": {"uri": uri}, "serving": {"maxModelLength": 96}}}))
    assert main(["plan", "-f", str(manifest), "--instance-types", "inf2.xlarge"]) == 0
    assert "at most 2: see neuron-runtime plan-buckets\n" in capsys.readouterr().out
    assert main(["plan", "-f", str(manifest), "--instance-types", "inf2.xlarge", "-o", "config"]) == 0
    (tmp_path / "config.json").write_text(capsys.readouterr().out)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2")
    assert runtime_main(["plan-buckets", "--config", str(tmp_path / "config.json")]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("llama, 2 cores, 16 sequences of 96 tokens")
    assert "\n2 graphs, " in listed


def test_cores_that_no_degree_uses_are_counted(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 heads: of the 24 cores of an inf2.48xlarge only 8 share them."""
    flags = ["--facts", facts(tmp_path, LARGE), "--instance-types", "inf2.48xlarge,trn1.32xlarge"]
    assert main(["plan", "-f", str(manifest), *flags]) == 0
    assert "12 Neuron devices of inf2.48xlarge  each of 8 of 24 cores would need" in capsys.readouterr().out


def test_a_refusal_is_the_one_of_the_condition(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--facts", facts(tmp_path, LARGE), "--instance-types", "inf2.48xlarge"]
    assert main(["plan", "-f", str(manifest), *flags]) == 1
    assert capsys.readouterr().err.startswith("ModelTooLarge: the model does not fit on")
    manifest.write_text(manifest.read_text().replace("spec: {", "spec: {serving: {maxModelLength: 999999}, "))
    assert main(["plan", "-f", str(manifest), *flags]) == 1
    assert capsys.readouterr().err.startswith("InvalidSpec: spec.serving.maxModelLength: 999999 exceeds")


def test_the_facts_are_those_that_the_runtime_prints(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspect_model(f"file://{write_tiny_model(tmp_path / 'model')}")
    (tmp_path / "facts.json").write_text(facts_as_json(found))
    assert main(["plan", "-f", str(manifest), "--facts", str(tmp_path / "facts.json")]) == 0
    assert "16 sequences of 128 tokens" in capsys.readouterr().out
    local = manifest.with_name("local.yaml")
    local.write_text(manifest.read_text().replace("hf://acme/llama", f"file://{tmp_path / 'model'}"))
    assert main(["plan", "-f", str(local)]) == 0
    assert "16 sequences of 128 tokens" in capsys.readouterr().out


def test_quantized_weights_are_planned_with_what_the_runtime_would_convert_them_to(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = manifest.read_text().replace("spec: {", "spec: {serving: {quantization: Int8}, ")
    manifest.write_text(wanted)
    assert main(["plan", "-f", str(manifest), "--facts", facts(tmp_path, LARGE)]) == 2
    cure = "the facts tell of no conversion, which serving.quantization asks for: inspect with --backend nxdi"
    assert cure in capsys.readouterr().err
    model = write_tiny_model(tmp_path / "model")
    manifest.write_text(wanted.replace("hf://acme/llama", f"file://{model}"))
    assert main(["plan", "-f", str(manifest)]) == 0
    found = inspect_model(f"file://{model}", "nxdi", quantization="int8")
    assert found.conversion is not None
    assert f", int8 {found.conversion.bytes} bytes" in capsys.readouterr().out
    assert main(["plan", "-f", str(manifest), "-o", "yaml"]) == 0
    made = yaml.safe_load_all(capsys.readouterr().out)
    assert [one["metadata"]["name"].partition("-")[0] for one in made if one["kind"] == "Job"] == [
        "converted",
        "artifact",
    ]


def test_what_the_engine_converts_that_the_devices_choose_is_planned(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, stored = write_tiny_model(tmp_path / "model"), tmp_path / "stored"
    quantize(plain, stored, FORMATS["fp8 in blocks"])
    shutil.copy(plain / "tokenizer.json", stored)
    text, flags = manifest.read_text(), ["--engine-defaults", '{"trn2": "vllm"}', "--instance-types", "inf2.8xlarge"]
    manifest.write_text(text.replace("hf://acme/llama", f"file://{stored}"))
    assert main(["plan", "-f", str(manifest), *flags]) == 0
    assert ", fp8 " in capsys.readouterr().out
    asked = text.replace("spec: {", "spec: {serving: {quantization: Int8}, ")
    manifest.write_text(asked.replace("hf://acme/llama", f"file://{plain}"))
    assert main(["plan", "-f", str(manifest), *flags]) == 0
    assert ", int8 " in capsys.readouterr().out


def test_a_model_that_is_computed_on_the_host_is_not_planned(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write_text(manifest.read_text().replace("spec: {", "spec: {accelerator: {type: CPU}, "))
    assert main(["plan", "-f", str(manifest), "--facts", facts(tmp_path, LLAMA)]) == 0
    assert "computed on the host, so nothing is planned: a pod needs about " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ("[1]", [], "has no facts about a model"),
        ('{"facts": {}}', [], "has no facts about a model"),
        (json.dumps(LLAMA), ["--instance-types", "p5.48xlarge"], "p5.48xlarge is of no known family"),
        (json.dumps(LLAMA), ["--cluster", "--kubeconfig", "/does/not/exist"], "no kubeconfig at /does/not/exist"),
    ],
)
def test_what_cannot_be_read_ends_with_code_2_and_one_line(
    manifest: Path, capsys: pytest.CaptureFixture[str], content: str, flags: list[str], says: str
) -> None:
    path = manifest.with_name("facts.json")
    path.write_text(content)
    assert main(["plan", "-f", str(manifest), "--facts", str(path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("neuron-operator plan: ")
    assert says in line


def test_without_facts_and_without_the_runtime_it_says_what_to_pass(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["plan", "-f", str(manifest)]) == 2
    assert "pass the facts with --facts FILE" in capsys.readouterr().err
    assert main(["plan", "-f", str(tmp_path / "missing.yaml")]) == 2


def test_a_plan_says_which_default_engine_the_model_gets(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = yaml.safe_load(manifest.read_text())
    body["spec"]["storage"] = {"weights": {"persistentVolumeClaim": {"claimName": "kept"}}}
    manifest.write_text(yaml.safe_dump(body))
    command = ["plan", "-f", str(manifest), "--facts", facts(tmp_path, LLAMA), "--engine-defaults"]
    for output in ("text", "yaml", "config"):
        assert main([*command, '{"trn2": "vllm"}', "--instance-types", "trn2.3xlarge", "-o", output]) == 0
    printed = capsys.readouterr().out
    assert "with backend vllm, the default for trn2, tensor-parallel degree" in printed
    assert "image: vllm\n" in printed
    assert main([*command, '{"trn3": "optimum"}']) == 2
    assert "trn3: optimum does not run on trn3; nxdi, vllm do" in capsys.readouterr().err


def test_a_plan_is_for_the_version_of_the_engine_that_the_installation_has(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = yaml.safe_load(manifest.read_text())
    body["spec"]["engine"] = {"backend": "vllm"}
    manifest.write_text(yaml.safe_dump(body))
    command = ["plan", "-f", str(manifest), "--instance-types", "trn2.3xlarge"]
    mistral = {**LLAMA, "architecture": "MistralForCausalLM"}
    assert main([*command, "--facts", facts(tmp_path, mistral)]) == 1
    assert "MistralForCausalLM has no implementation" in capsys.readouterr().err
    assert main([*command, "--facts", facts(tmp_path, mistral), "--engine-version", "0.16", "-o", "yaml"]) == 0
    assert "--gpu-memory-utilization" not in capsys.readouterr().out
    command += ["--facts", facts(tmp_path, LLAMA), "-o", "yaml"]
    assert main([*command, "--engine-version", "0.24"]) == 0
    assert "neuron_native" not in capsys.readouterr().out
    assert main(command) == 0
    assert "neuron_native" in capsys.readouterr().out
    # Only this version runs there.
    defaults = ["--engine-defaults", '{"inf2": "vllm"}']
    assert [main([*command, *defaults, "--engine-version", one]) for one in ("0.16", "0.29")] == [0, 2]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--engine-version", "0.17"])


def test_facts_of_a_draft_model_that_the_manifest_no_longer_has_do_not_count(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of the newest revision of a model that was edited since."""
    plans = []
    for found in (LLAMA, {**LLAMA, "draft": LLAMA}):
        assert main(["plan", "-f", str(manifest), "--facts", facts(tmp_path, found), "-o", "config"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]
