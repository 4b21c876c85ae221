"""Serving compiled models: a miss ends the command by name, or is compiled; what was compiled is found again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from helpers.serve_command import get, serve
from neuron_runtime import LLM, SamplingParams, record
from neuron_runtime.artifacts.loading import ARTIFACT_VARIABLE

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
OPTIONS = {"decodeBuckets": [1, 8], "compileSeconds": 0.0, "stepMilliseconds": 1.0}


def arguments(store: Path, **options: object) -> tuple[str, ...]:
    override = json.dumps({**OPTIONS, **options})
    return (
        *(str(MODEL), "--port=0", "--backend=simulated", "--compile", f"--override-neuron-config={override}"),
        f"--artifacts-dir={store}",
    )


def test_a_server_compiles_what_it_lacks_once_and_one_that_must_not_says_what_differs(tmp_path: Path) -> None:
    store, path = tmp_path / "artifacts", tmp_path / "record"
    with serve(*arguments(store)) as command:
        assert get(f"{command.until_ready()}/health").status_code == 200
        assert "compiling graph 2 of 3 (decode of 8 rows)" in command.text
    with serve(*arguments(store), "--on-artifact-miss=fail") as command:
        assert get(f"{command.until_ready()}/health").status_code == 200
        assert "compiling" not in command.text
    with serve(*arguments(store, decodeBuckets=[1, 4]), "--on-artifact-miss=fail", f"--record={path}") as command:
        assert command.wait() == 20
    outcome = msgspec.json.decode(path.read_bytes(), type=record.Record)
    assert outcome.reason == "ArtifactMissing"
    assert "shapes.decode: [1,8] instead of [1,4]; compile it with" in outcome.message


def test_the_offline_class_compiles_and_finds_artifacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for compiles in (True, False):
        with LLM(
            str(MODEL), backend="simulated", compile=True, override_neuron_config=OPTIONS, artifacts_dir=tmp_path
        ) as model:
            (output,) = model.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        assert ("compiling graph" in capsys.readouterr().err) is compiles


def test_the_variable_without_compiling_has_no_effect_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(tmp_path))
    with LLM(str(MODEL), backend="simulated"):
        assert f"{ARTIFACT_VARIABLE} has no effect" in capsys.readouterr().err
