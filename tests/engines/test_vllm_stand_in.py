"""The stand-in for `vllm serve` as a process: what it accepts, says and does, where no device is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.vllm_serve.serve import FAULTS, parse, refusals
from helpers.ports import free_ports
from neuron_operator.api.engines import vllm as vllm_engine
from neuron_operator.api.engines.vllm_flags import (
    LOG_REASONS,
    LOGGING_VARIABLE,
    MAX_ERRORS_BYTES,
    VERSIONS,
    logging_config,
    served,
)
from neuron_operator.api.reasons import Reason
from neuron_operator.read.records import parse_record
from neuron_runtime.artifacts.store import artifact_store

PROGRAM = Path(__file__).parents[1] / "fakes" / "vllm_serve" / "serve.py"
MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
DOCUMENT = {
    "servedNames": ["chat"],
    "dtype": "bfloat16",
    "limits": {"maxModelLength": 4096, "maxSequences": 8},
    "parallelism": {"tensor": 8},
    "drain": {"delaySeconds": 10, "seconds": 300},
}


@contextlib.contextmanager
def running(
    folder: Path, *arguments: str, model: Path = MODEL, **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The process, its address, and its termination file."""
    ended, config = folder / "ended", folder / "logging.json"
    config.write_text(json.dumps(logging_config(str(ended))))
    with free_ports() as port, (folder / "log").open("wb") as log:
        command = [sys.executable, str(PROGRAM), "serve", str(model), "--host=127.0.0.1", f"--port={port}", *arguments]
        variables = {**os.environ, LOGGING_VARIABLE: str(config), **env}
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            yield process, f"http://127.0.0.1:{port}", ended
        finally:
            process.kill()
            process.wait()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", verify=False).status_code == 200
    return False


@pytest.mark.parametrize("version", ["0.16", "0.24", "0.29"])
@pytest.mark.parametrize(
    "parts", [{}, {"buckets": {"context": [512], "tokenGeneration": [1024, 4096]}}, {"sampling": "Host"}]
)
def test_each_version_accepts_the_command_that_is_written_for_it(version: str, parts: dict[str, Any]) -> None:
    command = served({**DOCUMENT, **parts}, version=version, model_dir="/m", port=8000).command
    assert list(refusals(parse(list(command[1:]), version), version, {})) == []


def test_the_plugin_with_nxdi_compiles_outside_of_the_folder_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "neuron-compiled-artifacts").touch()  # as a read-only mount, which a test as root has not
    env = {name: value.replace("/tmp", str(tmp_path)) for name, value in VERSIONS["0.16"].env.items()}
    with running(tmp_path, model=model, FAKE_VLLM_VERSION="0.16", **env) as (process, url, _):
        until(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None, (tmp_path / "log").read_text()
    assert (tmp_path / "neuron-compiled-artifacts").is_dir()


COMPILING = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}


def compiled(folder: Path, *flags: str, **env: str) -> dict[str, Any]:
    """The record that the program of the Job leaves, with graphs below `folder`/store/KEY."""
    vllm, record = [sys.executable, str(PROGRAM), "serve", str(MODEL), "--host=127.0.0.1", *flags], folder / "record"
    with free_ports() as port:
        health = f"http://127.0.0.1:{port}/health"
        command = [sys.executable, "-c", vllm_engine.PROGRAM, str(record), str(folder / "store" / KEY), health]
        variables = {"VLLM_CACHE_ROOT": str(folder / f"cache{port}"), "PYTHONPATH": str(PROGRAM.parent), **env}
        variables |= {"TMPDIR": str(folder)}
        code = subprocess.call([*command, *vllm, f"--port={port}"], env={**os.environ, **variables}, timeout=120)
    found = dict(json.loads(record.read_text()))
    assert code == found.get("exitCode", 0)
    return found


SHAPES = ("--max-model-len=1024", "--max-num-seqs=2", "--num-gpu-blocks-override=65")
KEY = "ab" * 32


def serving(folder: Path, *flags: str) -> contextlib.AbstractContextManager[Any]:
    """A start on a device that finds graphs in the store only, with a cache of its own."""
    compiled_env = VERSIONS["0.24"].compiled_env | {"NEURON_LIBTORCH_REMOTE_CACHE": str(folder / "store" / KEY)}
    env = {"VLLM_CACHE_ROOT": str(folder / "local"), "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", **compiled_env}
    return running(folder, *flags, **env)


def test_graphs_that_a_job_compiled_serve_with_the_same_numbers_and_no_others(tmp_path: Path) -> None:
    record = compiled(tmp_path, *SHAPES, **COMPILING)
    parsed = parse_record(json.dumps(record))
    assert parsed is not None
    assert parsed.artifact is not None
    assert (parsed.artifact.key, parsed.artifact.reused) == (KEY, False)
    assert parsed.artifact.bytes == 3 * 4, "prompts, and decoding of one and two sequences"
    assert not list(Path().glob("neuronxcc-*")), "the folder of the image is read-only"
    assert compiled(tmp_path, *SHAPES, **COMPILING)["artifact"]["reused"]
    with serving(tmp_path, *SHAPES, "--served-model-name=other") as (_, url, _):
        until(lambda: is_ready(url))
    with serving(tmp_path, *SHAPES[:2], "--num-gpu-blocks-override=66") as (process, _, ended):
        assert process.wait(60) == 1
    assert vllm_engine.explain(1, ended.read_text())[0] is Reason.ARTIFACT_MISSING


def test_a_store_that_takes_no_graph_is_no_success(tmp_path: Path) -> None:
    record = compiled(tmp_path, *SHAPES, **COMPILING, FAKE_VLLM_STORE="full")
    assert (record["ok"], record["reason"]) == (False, "CompileFailed")
    assert "could not be written" in record["message"]
    assert not (tmp_path / "store" / KEY).exists()


def test_a_number_of_blocks_that_is_not_pinned_is_never_found(tmp_path: Path) -> None:
    assert compiled(tmp_path, *SHAPES[:2], **COMPILING)["ok"]
    with serving(tmp_path, *SHAPES[:2]) as (process, _, _):
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"VLLM_NEURON_CPU_COMPILE": "1"}, "NEURON_PLATFORM_TARGET_OVERRIDE is required"),
        ({**COMPILING, "FAKE_VLLM_FAULT": "compile-failed"}, "NCC_EVRF007"),
    ],
    ids=["target", "compiler"],
)
def test_a_compilation_that_fails_leaves_its_cause_and_nothing_in_the_store(
    tmp_path: Path, env: dict[str, str], says: str
) -> None:
    record = compiled(tmp_path, *SHAPES, **env)
    assert (record["ok"], record["reason"]) == (False, "CompileFailed")
    assert says in record["message"]
    assert not (tmp_path / "store" / KEY).exists()


def test_graphs_that_were_lost_or_damaged_in_the_store_are_compiled_again(tmp_path: Path) -> None:
    assert compiled(tmp_path, *SHAPES, **COMPILING)["ok"]
    first, second, _ = sorted((tmp_path / "store" / KEY).glob("*/graph.neff"))
    shutil.rmtree(first.parent)
    again = compiled(tmp_path, *SHAPES, **COMPILING)["artifact"]
    assert (again["reused"], again["bytes"]) == (False, 3 * 4)
    second.write_bytes(b"ffen")
    assert not compiled(tmp_path, *SHAPES, **COMPILING)["artifact"]["reused"]
    assert second.read_bytes() == b"neff"
    assert compiled(tmp_path, *SHAPES, **COMPILING)["artifact"]["reused"]
    assert not list((tmp_path / "store" / ".partial").iterdir())


def test_graphs_of_another_image_of_the_same_name_are_compiled_again(tmp_path: Path) -> None:
    metadata = tmp_path / "packages" / "neuronx_cc.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    env = {**COMPILING, "PYTHONPATH": f"{PROGRAM.parent}:{tmp_path / 'packages'}"}
    for version, is_reused in (("1", False), ("1", True), ("2", False)):
        metadata.write_text(f"Metadata-Version: 2.1\nName: neuronx-cc\nVersion: {version}\n")
        assert compiled(tmp_path, *SHAPES, **env)["artifact"]["reused"] == is_reused


def pruned(store: Path, *keep: str) -> list[str]:
    """What the daily clean-up by our runtime deletes."""
    return [one.name for one in artifact_store(store).prune(keep, 30 * 86_400, dry_run=False)]


def last_used(folder: Path, days: float) -> None:
    at = time.time() - days * 86_400
    os.utime(folder, (at, at))


def test_graphs_that_nobody_uses_are_deleted_and_those_that_a_model_or_a_job_uses_stay(tmp_path: Path) -> None:
    assert compiled(tmp_path, *SHAPES, **COMPILING)["ok"]
    store = tmp_path / "store"
    last_used(store / KEY, 40)
    assert pruned(store, KEY) == pruned(store) == []
    last_used(store / KEY, 40)
    assert compiled(tmp_path, *SHAPES, **COMPILING)["artifact"]["reused"]
    assert pruned(store) == []
    last_used(store / KEY, 40)
    assert pruned(store) == [KEY]
    assert not (store / KEY).exists()


def test_what_a_job_writes_stays_and_what_a_killed_one_left_is_deleted_after_a_day(tmp_path: Path) -> None:
    job = of_job(tmp_path, "sh", "-c", f"touch {tmp_path}/began; exec sleep 60")
    until((tmp_path / "began").exists)
    (partial,) = (tmp_path / ".partial").iterdir()
    last_used(partial, 0.3)  # its deadline is after six hours
    assert pruned(tmp_path) == []
    job.terminate()
    job.wait()
    last_used(partial, 1.1)
    assert pruned(tmp_path) == [f".partial/{partial.name}"]
    assert not partial.exists()


def of_job(folder: Path, *command: str, **env: str) -> subprocess.Popen[bytes]:
    """The program of the Job, with something else than vLLM."""
    words = [
        sys.executable,
        "-c",
        vllm_engine.PROGRAM,
        str(folder / "record"),
        str(folder / KEY),
        "http://127.0.0.1:9/",
    ]
    variables = {"VLLM_CACHE_ROOT": str(folder / "cache"), "PYTHONPATH": str(PROGRAM.parent), **env}
    return subprocess.Popen([*words, *command], env={**os.environ, **variables})


def test_what_keeps_graphs_from_the_claim_is_found_before_they_are_compiled(tmp_path: Path) -> None:
    began = ("touch", str(tmp_path / "began"))
    assert of_job(tmp_path, *began, PYTHONPATH="").wait(30) == 21
    assert "libtorch_neuronx_lite" in json.loads((tmp_path / "record").read_text())["message"]
    (tmp_path / ".partial").touch()
    assert of_job(tmp_path, *began).wait(30) == 21
    assert "cannot write" in json.loads((tmp_path / "record").read_text())["message"]
    assert not (tmp_path / "began").exists()


def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path: Path) -> None:
    says = ["ValueError: " + "\u4e00" * 3000, "RuntimeError: Engine core initialization failed. See root cause above."]
    of_job(tmp_path, "sh", "-c", "\n".join([*(f"echo '{one}'" for one in says), "exit 1"])).wait(30)
    written = (tmp_path / "record").read_bytes()
    assert len(written) < 4096
    record = parse_record(written.decode())
    assert record is not None
    assert "ValueError: \u4e00" in record.message


def test_a_compiler_that_outlives_its_vllm_does_not_keep_the_job(tmp_path: Path) -> None:
    job = of_job(tmp_path, "sh", "-c", "sleep 60 & echo 'RuntimeError: NCC_EVRF007'; exit 1")
    assert job.wait(30) == Reason.COMPILE_FAILED.row.exit_codes[0]
    assert "NCC_EVRF007" in json.loads((tmp_path / "record").read_text())["message"]


def test_a_compiler_that_lacks_memory_is_told_from_one_that_fails(tmp_path: Path) -> None:
    assert of_job(tmp_path, "sh", "-c", 'echo "RuntimeError: can\'t allocate memory"; exit 1').wait(30) == 22
    record = parse_record((tmp_path / "record").read_text())
    assert record is not None
    assert record.reason == Reason.COMPILE_OUT_OF_MEMORY


def test_a_job_that_is_deleted_ends_at_once(tmp_path: Path) -> None:
    job = of_job(tmp_path, "sh", "-c", f"touch {tmp_path}/began; exec sleep 60")
    until((tmp_path / "began").exists)
    job.terminate()
    assert job.wait(10) == 128 + signal.SIGTERM
    assert not (tmp_path / "record").exists()


REASONS = {
    "no-device": Reason.DRIVER_INCOMPATIBLE,
    "cache-miss": Reason.ARTIFACT_MISSING,
    "too-many-blocks": Reason.DEVICE_OUT_OF_MEMORY,
    "cores-busy": Reason.DEVICE_HELD,
    "kv-budget": Reason.DEVICE_OUT_OF_MEMORY,
    "compile-failed": Reason.COMPILE_FAILED,
    "engine-dies": Reason.DEVICE_FAILED,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_kubelet_keeps_of_a_failure_tells_its_reason(tmp_path: Path, fault: str) -> None:
    with running(tmp_path, FAKE_VLLM_FAULT=fault) as (process, _, ended):
        code = process.wait(60)
    kept = ended.read_text() if ended.exists() else (tmp_path / "log").read_text()[-2048:]
    assert next(reason for pattern, reason in LOG_REASONS if pattern.search(kept)) is REASONS[fault]
    assert code == (0 if fault == "engine-dies" else 1)


@pytest.mark.parametrize(
    ("own", "args", "codes"),
    [
        ({}, (), (200, 200)),
        ({}, ("--async-scheduling",), (500, 500)),
        ({"enable_structured_outputs": False}, ("--async-scheduling",), (400, 200)),
    ],
)
def test_a_request_for_structured_outputs_does_not_end_the_engine(
    tmp_path: Path, own: dict[str, Any], args: tuple[str, ...], codes: tuple[int, int]
) -> None:
    command = served({**DOCUMENT, "overrideNeuronConfig": own}, version="0.24", model_dir="/m", port=1).command
    flags = [word for word in command[4:] if not word.startswith("--host")]
    body = {"model": "chat", "prompt": "a", "max_tokens": 1}
    with running(tmp_path, *flags, *args, VLLM_CACHE_ROOT=str(tmp_path)) as (_, url, _):
        until(lambda: is_ready(url))
        asked = ({**body, "response_format": {"type": "json_object"}}, body)
        assert tuple(httpx.post(f"{url}/v1/completions", json=one).status_code for one in asked) == codes


def test_errors_for_a_kubelet_have_a_limit_and_quote_no_request(tmp_path: Path) -> None:
    """The file cannot be renamed: in a pod it is a mount."""
    folder, config = tmp_path / "dev", tmp_path / "logging.json"
    ended = folder / "termination-log"
    folder.mkdir()
    ended.touch()
    config.write_text(json.dumps({**logging_config(str(ended)), "formatters": {"plain": {}, "vllm": {}}}))
    program = (
        "import json, logging.config, os, sys, types; sys.modules['vllm'] = vllm = types.ModuleType('vllm');"
        "vllm.envs = types.SimpleNamespace(VLLM_LOGGING_LEVEL='DEBUG');"
        "logging.config.dictConfig(json.load(open(sys.argv[1])));"
        "logging.getLogger('vllm.v1').debug('a detail');"
        "os.rename = lambda *_: os.remove('/nowhere');"
        "logging.getLogger('vllm.entrypoints.openai').error('a prompt');"
        "logging.getLogger('vllm.tool_parsers.hermes_tool_parser').error('a prompt');"
        "logging.getLogger('vllm.v1.engine').error('the cause');"
        "[logging.getLogger('vllm.v1.engine').error('x' * 10_000) for _ in range(200)]"
    )
    done = subprocess.run([sys.executable, "-c", program, config], capture_output=True, text=True, check=True)
    assert ended.read_text().startswith("the cause\n")
    assert "a prompt" not in ended.read_text()
    assert ended.stat().st_size <= MAX_ERRORS_BYTES
    assert "a prompt" in done.stdout
    assert done.stdout.count("x" * 10_000) == 200, "the log has all"
    assert done.stdout.startswith("a detail\n"), "of the level that the manifest chose"


def test_it_refuses_connections_until_it_has_loaded_and_ignores_sigterm_before(tmp_path: Path) -> None:
    with running(tmp_path, FAKE_VLLM_LOAD_SECONDS="1") as (process, url, _):
        until(lambda: b"Starting to load model" in (tmp_path / "log").read_bytes())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        process.terminate()
        until(lambda: is_ready(url))


def test_it_drains_behind_a_healthy_probe_and_ends_with_zero(tmp_path: Path) -> None:
    body = {"model": str(MODEL), "prompt": "a", "max_tokens": 40, "stream": True}
    with running(tmp_path, "--shutdown-timeout=60", FAKE_VLLM_VERSION="0.29") as (process, url, _):
        until(lambda: is_ready(url))
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.post(f"{url}/v1/completions", json=body).status_code == 500)
            assert is_ready(url)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0


def test_a_stream_that_outlives_the_time_to_drain_keeps_the_process(tmp_path: Path) -> None:
    body = {"model": str(MODEL), "prompt": "a", "max_tokens": 1000, "stream": True}
    with running(tmp_path) as (process, url, _):
        until(lambda: is_ready(url))
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            until(lambda: b"Waiting for connections to close" in (tmp_path / "log").read_bytes())
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
