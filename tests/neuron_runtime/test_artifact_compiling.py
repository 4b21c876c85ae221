"""Compiling into a store: in a process of its own, once for all, with a named end whatever the compiler does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.artifacts import places
from helpers.compiling_backend import SEEN, compiler
from helpers.hub import serving
from helpers.memory_groups import memory_group
from helpers.tiny_model import write_tiny_model
from helpers.weights import shelf_with_model
from neuron_runtime import record
from neuron_runtime.artifacts.compiling import Wanted, cause, make, wanted_artifact
from neuron_runtime.artifacts.key import covered
from neuron_runtime.artifacts.loading import ARTIFACT_VARIABLE, check_artifact, provide
from neuron_runtime.artifacts.store import artifact_store, read_artifact
from neuron_runtime.backend import simulated as simulated_package
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import ModelSource, RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.host import session_bytes
from neuron_runtime.weights.fetching import materialize
from neuron_runtime.weights.store import PARTIAL, Damaged, Entry, Store

TESTS = Path(__file__).parents[1]
BUCKETS = {"decodeBuckets": [1, 4], "compileSeconds": 0.0}


def quiet(stage: str, share: float) -> None:
    pass


@pytest.fixture(autouse=True)
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv(SEEN, str(tmp_path / "seen"))
    return tmp_path / "seen"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return artifact_store(tmp_path / "artifacts")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def odd(behaviour: str = "") -> Wanted:
    """An artifact of the odd compiler."""
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri="hf://acme/tiny"),
        served_names=("x",),
        override_neuron_config={"behaviour": behaviour},
    )
    cover = covered("torch", "ab" * 20, compiler(config, Path()).needs)
    return Wanted("helpers.compiling_backend", config, Path("/"), cover)


def simulated(model: Path, **given: Any) -> RuntimeConfig:
    return RuntimeConfig(
        version=1,
        model=ModelSource(uri=model.as_uri()),
        served_names=("x",),
        backend="simulated",
        compile=True,
        override_neuron_config={**BUCKETS, **given},
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_lines(path: Path, count: int) -> list[list[str]]:
    for _ in range(600):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [line.split() for line in lines]
        time.sleep(0.05)
    raise AssertionError(f"{path} has fewer than {count} lines")


def test_an_artifact_is_compiled_once_with_a_record_of_how(store: Store, seen: Path) -> None:
    stages: list[str] = []
    entry, reused = make(odd(), store, lambda stage, share: stages.append(stage))
    assert not reused
    assert sorted(path.name for path in entry.folder.iterdir()) == [".manifest.json", "artifact.json", "one", "two"]
    artifact = read_artifact(entry)
    assert artifact.tools == {"g++": "13"}
    assert [graph.name for graph in artifact.graphs] == ["one", "two"]
    assert artifact.peak_bytes > 2**20
    assert list(dict.fromkeys(stages)) == [
        "preparing to compile",
        "compiling graph 1 of 2 (one)",
        "compiling graph 2 of 2 (two)",
        "checking the compiled graphs",
    ]
    assert make(odd(), store, quiet) == (entry, True)
    assert len(seen.read_text().splitlines()) == 2


def test_graphs_that_are_compiled_together_are_reported_one_by_one(
    store: Store, seen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[tuple[str, float]] = []
    entry, _ = make(odd("together"), store, lambda stage, share: stages.append((stage, share)))
    # Followed by the memory, unless the compiler has ended before anybody looked.
    lines = re.findall(r"graph (\d) of 3 is ready: (\w+), \d+ s", capsys.readouterr().err)
    assert lines == [("1", "second"), ("2", "first"), ("3", "third")]
    assert [graph.name for graph in read_artifact(entry).graphs] == ["second", "first", "third"]
    shares = [share for stage, share in stages if stage == "compiling 3 graphs (both)"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_compilers_run_in_a_scratch_folder_that_is_deleted(store: Store, seen: Path) -> None:
    make(odd(), store, quiet)
    (pid, folder, temporary), _ = [line.split() for line in seen.read_text().splitlines()]
    assert int(pid) != os.getpid()
    assert folder == temporary
    assert not Path(folder).parent.exists()


@pytest.mark.parametrize(
    ("behaviour", "code", "says"),
    [
        ("raise", ExitCode.COMPILE_FAILED, "compiling graph 2 of 2 (two): RuntimeError: g++ exited with 1; its last l"),
        ("raise", ExitCode.COMPILE_FAILED, "error: unknown instruction vfoo"),
        ("exit", ExitCode.COMPILE_FAILED, "the compiler exited with code 3; its last lines: note: compiling one"),
        ("crash", ExitCode.COMPILE_FAILED, "the compiler was killed by SIGABRT"),
        ("no tools", ExitCode.COMPILE_FAILED, "there is no C++ compiler: install g++"),
        ("unloadable", ExitCode.COMPILE_FAILED, "checking the compiled graphs: OSError: one: undefined symbol"),
        ("refuse memory", ExitCode.COMPILE_OUT_OF_MEMORY, "compiling graph 2 of 2 (two): the compiler needs more mem"),
        ("full disk", ExitCode.STORAGE_FULL, "No space left on device"),
        ("link", ExitCode.COMPILE_FAILED, "the compiler left 'host', which is no plain, visible file"),
        ("hide", ExitCode.COMPILE_FAILED, "the compiler left '.hidden'"),
    ],
)
def test_whatever_a_compiler_does_has_a_named_end_and_publishes_nothing(
    store: Store, behaviour: str, code: ExitCode, says: str
) -> None:
    with pytest.raises(FatalError) as caught:
        make(odd(behaviour), store, quiet)
    assert caught.value.exit_code == code
    assert says in str(caught.value)
    assert len(str(caught.value)) < record.MAX_MESSAGE_CHARACTERS
    assert store.all_keys() == []


def test_a_compiler_that_is_killed_because_memory_ran_out_says_the_limit(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    model = tmp_path / "model"
    write_tiny_model(model)
    config.write_bytes(msgspec.json.encode(simulated(model, compileBytes=2**40, compileSeconds=30)))
    with memory_group(2**28) as group:
        command = (sys.executable, "-m", "neuron_runtime", "compile", f"--config={config}")
        group.output(*command, f"--artifacts-dir={tmp_path / 'store'}", f"--record={tmp_path / 'record'}", code=22)
    outcome = msgspec.json.decode((tmp_path / "record").read_bytes(), type=record.Record)
    assert outcome.reason == "CompileOutOfMemory"
    assert "compiling graph 1 of 3 (decode of 1 rows): the compiler needs more memory than the memory limit of 256" in (
        outcome.message
    )
    assert artifact_store(tmp_path / "store").all_keys() == []


def test_of_two_compilers_one_waits_and_takes_the_result(
    store: Store, seen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[tuple[Entry, bool]] = []
    others = [threading.Thread(target=lambda: found.append(make(odd("slow"), store, quiet))) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert sorted(reused for _, reused in found) == [False, True]
    assert found[0][0] == found[1][0]
    waiting = f"artifact {found[0][0].key}: waiting for another process that compiles it into this store"
    assert waiting in capsys.readouterr().err
    assert len(seen.read_text().splitlines()) == 2


def start_waiting(store: Store) -> subprocess.Popen[bytes]:
    """A command whose compiler never ends."""
    program = """
        import signal, sys
        from pathlib import Path
        from neuron_runtime.artifacts.compiling import make
        from neuron_runtime.artifacts.store import artifact_store
        sys.path.insert(0, sys.argv[2])
        from test_artifact_compiling import odd, quiet
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        make(odd("wait"), artifact_store(Path(sys.argv[1])), quiet)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(store.folder), str(Path(__file__).parent)],
        stderr=subprocess.DEVNULL,
    )


def test_sigterm_ends_the_compiler_with_everything_it_started(store: Store, seen: Path) -> None:
    command = start_waiting(store)
    pids = [int(line[0]) for line in wait_for_lines(seen, 3)]
    command.send_signal(signal.SIGTERM)
    command.wait(30)
    assert not any(map(is_alive, pids))
    assert store.all_keys() == []


def test_a_killed_compilation_leaves_nothing_that_is_loaded_and_does_not_block_the_next(
    store: Store, seen: Path
) -> None:
    command = start_waiting(store)
    pids = [int(line[0]) for line in wait_for_lines(seen, 3)]
    command.kill()
    command.wait(30)
    for _ in range(600):
        if not any(map(is_alive, pids)):
            break
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    assert store.all_keys() == []
    work = store.folder / PARTIAL / odd("wait").key / "files"
    assert (work / "two").exists()
    # The same key again, by a compiler that leaves fewer files.
    wanted = odd("")
    (work.parent).rename(store.folder / PARTIAL / wanted.key)
    entry, _ = make(wanted, store, quiet)
    assert entry.verify(lambda num_bytes: None) == []


def test_memory_counts_every_process_of_a_session() -> None:
    program = "import os, sys, time; x = b'1' * 2**25; pid = os.fork(); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        found = session_bytes(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    # Shared pages count once.
    assert 2**25 < found < 2 * 2**25


# What is needed, and what is there


def test_a_miss_names_the_key_and_the_cure(model: Path, store: Store) -> None:
    config = simulated(model)
    with pytest.raises(FatalError) as caught:
        provide(config, model, places(store.folder, on_miss="fail"), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    key = wanted_artifact(config, model).key
    assert f"{store.folder} has no artifact, {key} is needed: compile it with" in str(caught.value)


def test_a_miss_names_what_differs_from_the_nearest_artifact(model: Path, store: Store) -> None:
    settings = places(store.folder)
    folder = provide(simulated(model), model, settings, quiet)
    assert provide(simulated(model), model, places(store.folder, on_miss="fail"), quiet) == folder
    with pytest.raises(FatalError) as caught:
        provide(simulated(model, decodeBuckets=[1, 8]), model, places(store.folder, on_miss="fail"), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert (
        f"the nearest one, {folder.name}, was compiled for something else: shapes.decode: [1,4] instead of [1,8]"
        in (str(caught.value))
    )


def test_a_damaged_artifact_is_an_error_that_names_the_file_or_is_compiled_again(model: Path, store: Store) -> None:
    folder = provide(simulated(model), model, places(store.folder), quiet)
    path = folder / "prefill.json"
    path.chmod(0o644)
    path.write_bytes(b'"PREFILL"')
    with pytest.raises(Damaged) as caught:
        provide(simulated(model), model, places(store.folder, on_miss="fail"), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert f"{folder} is damaged: prefill.json: its sha256 is" in str(caught.value)
    assert provide(simulated(model), model, places(store.folder), quiet) == folder
    assert path.read_bytes() == b'"prefill"'


def test_the_variable_names_an_artifact_that_is_loaded_instead(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = provide(simulated(model), model, places(store.folder), quiet)
    shipped = tmp_path / "shipped"
    folder.rename(shipped)
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(shipped))
    settings = places(tmp_path / "none", on_miss="fail")
    assert provide(simulated(model), model, settings, quiet) == shipped
    with pytest.raises(FatalError) as caught:
        provide(simulated(model, decodeBuckets=[2]), model, places(tmp_path / "none"), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert f"{ARTIFACT_VARIABLE}: the artifact in {shipped} was compiled for something else: shapes.decode: [1,4]" in (
        str(caught.value)
    )
    assert provide(simulated(model), model, settings, quiet) == shipped
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("spoil", ["store", "changed"])
def test_the_variable_that_names_no_intact_artifact_advises_nobody_to_delete_the_folder(
    model: Path, store: Store, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    folder = provide(simulated(model), model, places(store.folder), quiet)
    if spoil == "store":
        folder = store.folder
    else:
        (folder / "decode-of-1-rows.json").unlink()
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(folder))
    with pytest.raises(FatalError) as caught:
        provide(simulated(model), model, places(store.folder), quiet)
    what = "it has no manifest" if spoil == "store" else "decode-of-1-rows.json: No such file or directory"
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert str(caught.value) == (
        f"{ARTIFACT_VARIABLE}: {folder} is no intact artifact: {what}; name the folder of one, or copy it again"
    )


@pytest.mark.parametrize("exists", [False, True])
def test_the_variable_names_where_to_store_an_artifact_that_is_not_there(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    folder = tmp_path / "mine" / "tiny"
    if exists:
        folder.mkdir(parents=True)
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(folder))
    with pytest.raises(FatalError, match="has no artifact") as caught:
        provide(simulated(model), model, places(store.folder, on_miss="fail"), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert provide(simulated(model), model, places(store.folder), quiet) == folder
    assert provide(simulated(model), model, places(tmp_path / "none", on_miss="fail"), quiet) == folder
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("on_miss", ["fail", "compile"])
def test_the_variable_names_what_cannot_be_read(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_miss: Any
) -> None:
    loop, long = tmp_path / "loop", tmp_path / ("x" * 300)
    loop.symlink_to(loop)
    for folder, why in (
        (loop, f"{loop} is no intact artifact: it is not a folder"),
        (long, f"cannot read {long}: File name too"),
    ):
        monkeypatch.setenv(ARTIFACT_VARIABLE, str(folder))
        with pytest.raises(FatalError) as caught:
            provide(simulated(model), model, places(store.folder, on_miss=on_miss), quiet)
        assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
        assert why in str(caught.value)


# The command


def compile_model(tmp_path: Path, *arguments: str) -> tuple[int, record.Record]:
    path = tmp_path / "record"
    code = main(
        [
            *("compile", "--backend=simulated", f"--artifacts-dir={tmp_path / 'artifacts'}", f"--record={path}"),
            *(f"--weights-dir={tmp_path / 'weights'}", f"--override-neuron-config={json.dumps(BUCKETS)}", *arguments),
        ]
    )
    return code, msgspec.json.decode(path.read_bytes(), type=record.Record)


def test_the_command_records_what_it_stored(
    model: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, outcome = compile_model(tmp_path, str(model))
    assert (code, outcome.ok, outcome.command) == (0, True, "compile")
    assert outcome.artifact is not None
    printed = capsys.readouterr()
    assert Path(printed.out.strip()) == store.folder / outcome.artifact.key
    assert "compiling graph 3 of 3 (prefill)" in printed.err
    code, again = compile_model(tmp_path, str(model))
    assert again.artifact == msgspec.structs.replace(outcome.artifact, reused=True)
    assert "nothing to compile" in capsys.readouterr().err


def test_folders_may_be_named_from_where_the_user_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler runs in another folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["compile", "--backend=simulated", "--artifacts-dir=out", "model"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder.parent, (folder / "decode.json").is_file()) == (Path("out"), True)
    wanted = replace(odd(), model_dir=Path("model"))
    assert make(wanted, artifact_store(Path("out")), quiet)[0].folder == Path("out") / wanted.key


def test_the_command_refuses_what_it_cannot_compile(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile"]) == 2
    assert "MODEL: is missing: use `neuron-runtime compile MODEL` or `compile --config FILE`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compile", str(model), "--access-log"])
    assert "unrecognized arguments: --access-log" in capsys.readouterr().err


def test_a_model_on_the_hub_is_compiled_without_its_weights_to_the_key_that_serving_needs(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_with_model(tmp_path / "hub")
    digest = shelf.commit("acme/model")
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        _, unpinned = compile_model(tmp_path, "hf://acme/model")
        assert not (tmp_path / "weights").exists()
        document = msgspec.to_builtins(simulated(tmp_path)) | {"model": {"uri": "hf://acme/model", "digest": digest}}
        (tmp_path / "config").write_text(json.dumps(document))
        path = tmp_path / "record"
        main(["compile", f"--config={tmp_path / 'config'}", f"--artifacts-dir={store.folder}", f"--record={path}"])
        pinned = msgspec.json.decode(path.read_bytes(), type=record.Record)
        assert main(["fetch", "hf://acme/model", str(tmp_path / "weights")]) == 0
    assert unpinned.artifact is not None
    assert pinned.artifact is not None
    assert (pinned.artifact.key, pinned.artifact.reused) == (unpinned.artifact.key, True)
    config = msgspec.structs.replace(simulated(tmp_path), model=ModelSource(uri="hf://acme/model"))
    folder = provide(config, tmp_path / "weights" / digest, places(store.folder, on_miss="fail"), quiet)
    assert folder == store.folder / unpinned.artifact.key


def test_a_miss_is_found_before_weights_are_fetched(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_with_model(tmp_path / "hub")
    source = ModelSource(uri="hf://acme/model")
    config = msgspec.structs.replace(simulated(tmp_path), model=source)
    weights = tmp_path / "weights"
    settings = places(store.folder, on_miss="fail", weights=weights)
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        with pytest.raises(FatalError) as caught:
            check_artifact(config, settings, quiet)
        compile_model(tmp_path, "hf://acme/model")
        check_artifact(config, settings, quiet)
        materialize(source, weights, quiet, with_weights=False)
        folder = provide(config, weights / f"{shelf.commit('acme/model')}-text", settings, quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert store.all_keys() == [folder.name]


def test_a_compiler_that_reads_weights_gets_them(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = shelf_with_model(tmp_path / "hub")
    monkeypatch.setattr(simulated_package, "compiler_reads_weights", lambda config: True)
    monkeypatch.setattr(simulated_package, "needs_weights", lambda config: True)
    with serving(shelf) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        code, _ = compile_model(tmp_path, "hf://acme/model")
    assert code == 0
    assert list((tmp_path / "weights" / shelf.commit("acme/model")).glob("*.safetensors"))


def test_the_key_of_a_changed_model_is_another(model: Path, tmp_path: Path) -> None:
    before = wanted_artifact(simulated(model), model).key
    write_tiny_model(model, vocab_size=300)
    assert wanted_artifact(simulated(model), model).key != before
    assert wanted_artifact(simulated(model), model, "ab" * 20).cover["model"] == "ab" * 20


def test_the_error_is_found_behind_the_command_of_a_compiler() -> None:
    command = "g++ graph.cpp " + "-I/a/folder " * 200
    said = f"CppCompileError: C++ compile error\n\nCommand:\n{command}\n\nOutput:\n"
    wrong = "graph.cpp:1:10: fatal error: torch/cpu.h: No such file or directory"
    assert cause(f"{said}{wrong}\n    1 | #include <torch/cpu.h>\n") == wrong
    assert cause("Killed\n") == ""
