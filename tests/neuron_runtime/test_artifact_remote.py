"""Artifacts in an S3 store, on a real S3 server: compiled once, copied to whoever serves, damaged ones replaced."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import msgspec
import pytest

from helpers.artifacts import COVER, GRAPHS, publish
from helpers.s3_server import BUCKET, S3Server
from helpers.tiny_model import write_tiny_model
from neuron_runtime import record
from neuron_runtime.artifacts.compiling import make, wanted_artifact
from neuron_runtime.artifacts.loading import check_artifact, provide
from neuron_runtime.artifacts.store import artifact_store, find, remote_artifacts
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.commands.command_line import main
from neuron_runtime.config import EngineLimits, ModelSource, RuntimeConfig
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.weights.fetching import described, supply
from neuron_runtime.weights.remote import RemoteStore
from neuron_runtime.weights.store import Store
from neuron_runtime.weights.transfer import Amount

pytestmark = pytest.mark.slow


def quiet(stage: str, share: float) -> None:
    pass


def unseen(amount: Amount) -> None:
    pass


@pytest.fixture
def remote(server: S3Server, tmp_path: Path) -> RemoteStore:
    """An empty store."""
    made = remote_artifacts(f"s3://{BUCKET}/{tmp_path.name}")
    assert made is not None
    return made


@pytest.fixture
def config(tmp_path: Path) -> RuntimeConfig:
    write_tiny_model(tmp_path / "model")
    return RuntimeConfig(
        version=1,
        model=ModelSource(uri=(tmp_path / "model").as_uri()),
        served_names=("x",),
        backend="simulated",
        compile=True,
        override_neuron_config={"compileSeconds": 0.0},
    )


def places(folder: Path, remote: RemoteStore) -> LocalSettings:
    return LocalSettings(folder.parent / "none", folder, artifacts_store=remote.address, on_artifact_miss="fail")


def replace(server: S3Server, remote: RemoteStore, key: str, name: str, raw: bytes) -> None:
    """Replace an object of an entry, past the runtime."""
    (found,) = [item for item in remote.objects(f"{key}/") if item.name.endswith(f"/{name}")]
    prefix = remote.address.removeprefix(f"s3://{BUCKET}/")
    server.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{key}/{found.name}", Body=raw)


def test_what_one_machine_compiles_another_one_loads(
    config: RuntimeConfig, remote: RemoteStore, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    with pytest.raises(FatalError) as caught:
        provide(config, model, places(tmp_path / "serving", remote), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    wanted = wanted_artifact(config, model)
    assert str(caught.value).startswith(f"{remote.address} has no artifact, {wanted.key} is needed")
    made, reused = make(wanted, artifact_store(tmp_path / "compiling"), quiet, remote)
    assert not reused
    folder = provide(config, model, places(tmp_path / "serving", remote), quiet)
    assert folder == tmp_path / "serving" / made.key
    other = msgspec.structs.replace(config, limits=EngineLimits(max_sequences=4, num_blocks=256))
    with pytest.raises(FatalError, match=rf"nearest one, {made.key}, was .* else: shapes.rows: 32 instead of 4;"):
        provide(other, model, places(tmp_path / "serving", remote), quiet)
    # Another compiler finds it, too.
    found, reused = make(wanted, artifact_store(tmp_path / "other"), quiet, remote)
    assert reused
    assert found.manifest == made.manifest


def test_an_artifact_of_the_folder_is_copied_to_a_store_that_lacks_it(
    config: RuntimeConfig, remote: RemoteStore, tmp_path: Path
) -> None:
    wanted, store = wanted_artifact(config, tmp_path / "model"), artifact_store(tmp_path / "compiling")
    made, _ = make(wanted, store, quiet)
    assert make(wanted, store, quiet, remote) == (made, True)
    assert remote.find(made.key) is not None


def test_a_replaced_object_is_an_error_where_compiling_is_not_allowed_and_otherwise_compiled_again(
    config: RuntimeConfig, remote: RemoteStore, server: S3Server, tmp_path: Path
) -> None:
    wanted = wanted_artifact(config, tmp_path / "model")
    made, _ = make(wanted, artifact_store(tmp_path / "first"), quiet, remote)
    replace(server, remote, made.key, "decode.json", b'"DECODE"')
    with pytest.raises(FatalError) as caught:
        provide(config, tmp_path / "model", places(tmp_path / "serving", remote), quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    assert "decode.json" in str(caught.value)
    _, reused = make(wanted, artifact_store(tmp_path / "second"), quiet, remote)
    assert not reused
    folder = provide(config, tmp_path / "model", places(tmp_path / "serving", remote), quiet)
    assert (folder / "decode.json").read_bytes() == b'"decode"'


def test_a_model_is_compiled_from_what_a_store_of_weights_has_without_its_source(
    config: RuntimeConfig, remote: RemoteStore, server: S3Server, tmp_path: Path
) -> None:
    server.upload(tmp_path / "model", f"{tmp_path.name}-origin")
    weights = f"s3://{BUCKET}/{tmp_path.name}-weights"
    origin = f"s3://{BUCKET}/{tmp_path.name}-origin"
    supplied = supply(origin, RemoteStore(weights), Store(tmp_path / "scratch"), unseen, unseen)
    gone = ModelSource(uri="s3://no-such-bucket/model", digest=supplied.digest)
    with described(gone, tmp_path / "none", weights) as (folder, digest):
        assert digest == supplied.digest
        assert read_checkpoint(folder).digest == read_checkpoint(tmp_path / "model").digest
    config = msgspec.structs.replace(config, model=gone)
    settings = dataclasses.replace(places(tmp_path / "serving", remote), weights_store=weights)
    with pytest.raises(FatalError) as caught:
        check_artifact(config, settings, quiet)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING
    (tmp_path / "config").write_bytes(msgspec.json.encode(config))
    options = (f"--config={tmp_path / 'config'}", f"--weights-store={weights}", f"--artifacts-store={remote.address}")
    assert main(["compile", *options, f"--artifacts-dir={tmp_path / 'compiling'}"]) == 0
    check_artifact(config, settings, quiet)
    assert not (tmp_path / "none").exists()


def test_files_in_subfolders_are_copied(remote: RemoteStore, tmp_path: Path) -> None:
    made = publish(artifact_store(tmp_path / "first"), COVER, GRAPHS)
    remote.upload(made, lambda amount: None)
    store = artifact_store(tmp_path / "second")
    assert remote.download(made.key, store, lambda amount: None) is not None
    found = find(store, COVER, whole=True)
    assert found is not None
    assert (found.folder / "weights/tp0.bin").read_bytes() == b"shard"


def test_the_command_compiles_into_a_store_in_s3(
    config: RuntimeConfig,
    remote: RemoteStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config").write_bytes(msgspec.json.encode(config))
    outcomes = []
    for _ in range(2):
        arguments = (f"--config={tmp_path / 'config'}", f"--artifacts-store={remote.address}")
        path = tmp_path / "record"
        assert main(["compile", *arguments, f"--artifacts-dir={tmp_path / 'scratch'}", f"--record={path}"]) == 0
        outcomes.append(msgspec.json.decode(path.read_bytes(), type=record.Record).artifact)
        shutil.rmtree(tmp_path / "scratch")
    assert outcomes[0] is not None
    assert outcomes[1] == msgspec.structs.replace(outcomes[0], reused=True)
    assert remote.find(outcomes[0].key) is not None
    assert main(["compile", "org/name", "--artifacts-store=/tmp"]) == 2
    assert "--artifacts-store" in capsys.readouterr().err
