"""Conversions as commands: killed and run again, into a store in S3, and served."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import write_chat_model
from helpers.s3_server import BUCKET, S3Server
from helpers.weights import contents
from neuron_runtime import LLM, SamplingParams
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import ModelSource
from neuron_runtime.conversion import converting
from neuron_runtime.errors import FatalError
from neuron_runtime.weights.fetching import described, materialize, open_remote
from neuron_runtime.weights.store import Store


def converted(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The record of the command."""
    record = tmp_path / "record.json"
    main(["convert", *arguments, "--backend", "torch", "-q", "int8", "--record", str(record)])
    outcome: dict[str, Any] = json.loads(record.read_text())
    return outcome


def test_a_killed_command_goes_on_where_it_ended(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    store = tmp_path / "store"
    command = [sys.executable, "-m", "neuron_runtime", "convert", str(model), str(store), "--backend", "torch"]
    with subprocess.Popen([*command, "-q", "int8"], stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(store.glob(".partial/*/errors")):
            time.sleep(0.001)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    (work,) = (store / ".partial").iterdir()
    done = len((work / "errors").read_bytes().splitlines())
    assert done < 42
    assert not Store(store).all_keys()
    rest = converted(tmp_path, str(model), str(store))
    whole = converted(tmp_path, str(model), str(tmp_path / "other"))
    assert rest["weights"]["digest"] == whole["weights"]["digest"]
    assert rest["conversion"] == whole["conversion"]
    if done:
        assert rest["weights"]["readBytes"] < whole["weights"]["readBytes"]
    digest = rest["weights"]["digest"]
    assert {name: raw for name, raw in contents(store / digest).items() if name != ".manifest.json"} == {
        name: raw for name, raw in contents(tmp_path / "other" / digest).items() if name != ".manifest.json"
    }


@pytest.mark.slow
def test_a_converted_model_is_stored_in_s3_once(server: S3Server, tmp_path: Path) -> None:
    server.upload(write_chat_model(tmp_path / "model"), "origin/chat")
    uri, store = f"s3://{BUCKET}/origin/chat", f"s3://{BUCKET}/stores/converted"
    first = converted(tmp_path, uri, store)
    assert first["weights"]["readBytes"] > 0
    second = converted(tmp_path, uri, store)
    assert second["weights"] == {**first["weights"], "readBytes": 0}
    assert second["conversion"] == first["conversion"]
    digest = first["weights"]["digest"]
    assert open_remote(store).find(digest) is not None
    model = ModelSource(uri=uri, converted=digest)
    with described(model, tmp_path / "empty", store) as (folder, found):
        assert found == digest
        assert "quantization_config" in json.loads((folder / "config.json").read_text())
    folder = materialize(model, tmp_path / "serving", lambda stage, share: None, weights_store=store)
    assert folder == tmp_path / "serving" / digest
    small = materialize(model, tmp_path / "front", lambda stage, share: None, weights_store=store, with_weights=False)
    assert not list(small.glob("*.safetensors"))
    with pytest.raises(FatalError, match=f"is not in {store}; convert it there: neuron-runtime convert {uri} {store}"):
        materialize(
            ModelSource(uri=uri, converted="ab" * 32), tmp_path / "serving", lambda *_: None, weights_store=store
        )


@pytest.mark.slow
def test_who_is_killed_while_a_model_in_s3_is_measured_repeats_that_alone(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.upload(write_chat_model(tmp_path / "model"), "origin/evicted")
    uri, store = f"s3://{BUCKET}/origin/evicted", f"s3://{BUCKET}/stores/evicted"

    def evicted(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(converting, "perplexity", evicted)
        with pytest.raises(KeyboardInterrupt):
            converted(tmp_path, uri, store)
    with monkeypatch.context() as context:
        context.setattr(converting, "_make", lambda *_, **more: pytest.fail("converted again"))
        second = converted(tmp_path, uri, store)
        assert second["weights"]["readBytes"] == 0
        context.setattr(converting, "perplexity", lambda *_: pytest.fail("measured again"))
        third = converted(tmp_path, uri, store)
    assert third == second | {"seconds": third["seconds"]}
    whole = converted(tmp_path, str(tmp_path / "model"), str(tmp_path / "other"))["conversion"]
    assert second["conversion"] == whole
    assert whole["perplexity"] > 0


def test_a_converted_model_answers_in_the_place_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_chat_model(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = tmp_path / "neuron-serving" / "weights"
    outcome = converted(tmp_path, str(model), str(store))
    digest = outcome["weights"]["digest"]
    parameters = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    with LLM(str(store / digest)) as llm:
        expected = llm.generate("Hello", parameters)[0].outputs[0].token_ids
    (model / "model.safetensors").unlink()
    with LLM(str(model), converted=digest) as llm:
        assert llm.generate("Hello", parameters)[0].outputs[0].token_ids == expected
    command = ["serve", str(model), "--converted", digest, "--weights-dir", str(store), "--check"]
    assert main([*command, "-q", "int8"]) == 0
    assert main([*command, "-q", "fp8"]) == 2
    assert "quantized already" in capsys.readouterr().err
