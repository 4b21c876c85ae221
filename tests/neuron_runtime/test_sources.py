"""Models from a folder and from a hub: downloads, pinned revisions, and the message of each failure."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.hub import Shelf, serving
from helpers.tiny_model import write_tiny_model
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.sources import RETRY_SECONDS, Hub, HubUnreachable, materialize
from neuron_runtime.uris import FolderModel, HubModel, parse_uri

MODEL = "hf://acme/tiny"


def quiet(stage: str, share: float) -> None:
    """A ProgressCallback without output."""


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A hub with acme/tiny in two shards and files that serving does not need; acme/secret and acme/gated likewise."""
    root = tmp_path / "hub"
    main = write_tiny_model(root / "acme/tiny/main", num_shards=2)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (main / name).write_text(f"{{}} {name}")
    for name in ("README.md", "training_args.bin", "consolidated.safetensors", "onnx/model.onnx"):
        (main / name).parent.mkdir(exist_ok=True)
        (main / name).write_bytes(b"x" * 1000)
    write_tiny_model(root / "acme/tiny/v1", seed=1)
    write_tiny_model(root / "acme/secret/main")
    write_tiny_model(root / "acme/gated/main")
    return Shelf(root, private={"acme/secret": "hf_reader"}, gated={"acme/gated": "hf_member"})


@pytest.fixture
def endpoint(shelf: Shelf) -> Iterator[str]:
    with serving(shelf) as address:
        yield address


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def hub(endpoint: str, pauses: list[float]) -> Hub:
    return Hub(endpoint, token=None, sleep=pauses.append)


def failure(source: ModelSource, weights_dir: Path, hub: Hub) -> FatalError:
    with pytest.raises(FatalError) as caught:
        materialize(source, weights_dir, quiet, hub)
    assert "\n" not in str(caught.value)
    return caught.value


class TestUris:
    @pytest.mark.parametrize(
        ("uri", "model"),
        [
            ("hf://Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
            ("hf://org/name.v1_2@v1.0", HubModel("org/name.v1_2", "v1.0")),
            ("hf://org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
            ("file:///models/demo", FolderModel(Path("/models/demo"))),
            ("file:///models/with%20blank", FolderModel(Path("/models/with blank"))),
        ],
    )
    def test_both_schemes_are_parsed(self, uri: str, model: object) -> None:
        assert parse_uri(uri) == model

    @pytest.mark.parametrize("uri", ["s3://bucket/prefix", "pvc://claim/path", "oci://image@sha256:00"])
    def test_unsupported_schemes_are_refused_naming_the_supported_ones(self, uri: str) -> None:
        with pytest.raises(InvalidConfig, match=r"not supported yet: use hf://.* or file:///"):
            parse_uri(uri)

    @pytest.mark.parametrize(
        "uri",
        ["", "Qwen/Qwen3-8B", "/models/demo", "ftp://host/x", "hf://name", "hf://a/b/c", "hf://../x", "hf://a/b@",
         "hf://a/b@..", "hf:a/b", "file:./demo", "file://host/demo", "file://demo", "hf://a/b?x=1"],
    )  # fmt: skip
    def test_malformed_uris_are_refused_with_the_expected_form(self, uri: str) -> None:
        with pytest.raises(InvalidConfig, match=r"^\$\.model\.uri: .*(hf://|file:///)"):
            parse_uri(uri)

    @given(st.text())
    def test_no_text_crashes_the_parser(self, uri: str) -> None:
        with contextlib.suppress(InvalidConfig):
            assert str(parse_uri(uri)).startswith(uri[:3])


class TestFolders:
    def test_a_folder_is_served_in_place(self, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "model")
        assert materialize(ModelSource(uri=f"file://{folder}"), tmp_path / "weights", quiet) == folder
        assert not (tmp_path / "weights").exists()

    def test_a_missing_source_folder_is_model_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FatalError, match="nowhere") as caught:
            materialize(ModelSource(uri=f"file://{tmp_path}/nowhere"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND

    def test_a_folder_that_differs_from_its_pinned_digest_is_refused(self, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "model")
        with pytest.raises(FatalError, match=r"0000.* is pinned") as caught:
            materialize(ModelSource(uri=f"file://{folder}", digest="0000"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.CHECKSUM_MISMATCH

    def test_without_weights_a_folder_needs_only_its_config(self, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "model")
        (folder / "model.safetensors").unlink()
        source = ModelSource(uri=f"file://{folder}", digest="0000")
        assert materialize(source, tmp_path, quiet, with_weights=False) == folder
        (folder / "config.json").unlink()
        with pytest.raises(FatalError, match=r"config\.json is missing"):
            materialize(source, tmp_path, quiet, with_weights=False)


class TestDownloads:
    def test_only_files_needed_for_serving_are_downloaded(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        shares: list[float] = []
        folder = materialize(
            ModelSource(uri=MODEL), tmp_path / "weights", lambda stage, share: shares.append(share), hub
        )
        names = {path.name for path in folder.iterdir()}
        assert names == {
            ".complete",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        }
        for name in names - {".complete"}:
            assert (folder / name).read_bytes() == (shelf.root / "acme/tiny/main" / name).read_bytes()
        assert shares[-1] == 1.0
        assert shares == sorted(shares)

    def test_small_files_are_downloaded_first_and_weights_on_demand(self, hub: Hub, tmp_path: Path) -> None:
        folder = materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub, with_weights=False)
        assert (folder / "config.json").exists()
        assert (folder / "tokenizer.json").exists()
        assert not list(folder.glob("*.safetensors"))
        assert materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub) == folder
        assert len(list(folder.glob("*.safetensors"))) == 2
        assert materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub, with_weights=False) == folder

    def test_the_revision_comes_from_the_uri(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        folder = materialize(ModelSource(uri=f"{MODEL}@v1"), tmp_path, quiet, hub)
        weights = "model.safetensors"
        assert (folder / weights).read_bytes() == (shelf.root / "acme/tiny/v1" / weights).read_bytes()

    def test_a_pinned_commit_is_downloaded_after_its_branch_moved(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        pinned = shelf.commit("acme/tiny", "v1")
        folder = materialize(ModelSource(uri=MODEL, digest=pinned), tmp_path, quiet, hub)
        assert pinned in folder.name
        assert (folder / "config.json").exists()
        assert not (folder / "model.safetensors.index.json").exists()

    def test_a_cached_pinned_model_needs_no_hub(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        pinned = ModelSource(uri=MODEL, digest=shelf.commit("acme/tiny"))
        first = materialize(pinned, tmp_path, quiet, hub)
        num_asked = len(shelf.asked)
        assert materialize(pinned, tmp_path, quiet, hub) == first
        assert len(shelf.asked) == num_asked

    def test_an_interrupted_download_is_resumed(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        source = ModelSource(uri=MODEL)
        whole = materialize(source, tmp_path, quiet, hub)
        (whole / ".complete").unlink()
        (whole / "model-00002-of-00002.safetensors").unlink()
        shelf.asked.clear()
        assert materialize(source, tmp_path, quiet, hub) == whole
        fetched = {asked.path.rpartition("/")[2] for asked in shelf.asked if asked.method == "GET" and not asked.range}
        assert "model-00002-of-00002.safetensors" in fetched
        assert "model-00001-of-00002.safetensors" not in fetched

    def test_a_digest_that_is_not_a_commit_is_refused(self, hub: Hub, tmp_path: Path) -> None:
        assert failure(ModelSource(uri=MODEL, digest="v1"), tmp_path, hub).exit_code is ExitCode.CHECKSUM_MISMATCH

    def test_a_repository_without_safetensors_is_an_invalid_model(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        (shelf.root / "acme/tiny/v1/model.safetensors").unlink()
        error = failure(ModelSource(uri=f"{MODEL}@v1"), tmp_path, hub)
        assert error.exit_code is ExitCode.INVALID_MODEL
        assert str(error).startswith(f"{MODEL}@v1/model.safetensors.index.json is missing")

    def test_weights_larger_than_the_disk_are_refused_before_the_download(
        self, shelf: Shelf, hub: Hub, tmp_path: Path
    ) -> None:
        with pytest.raises(FatalError, match=r"needs [\d,]+ more bytes in .*, but 1,000 are free") as caught:
            materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub, free_bytes=lambda folder: 1000)
        assert caught.value.exit_code is ExitCode.STORAGE_FULL
        assert not any("/large/" in asked.path for asked in shelf.asked)

    def test_a_disk_that_fills_up_is_reported(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
    ) -> None:
        def full(*args: object, **kwargs: object) -> str:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("neuron_runtime.sources.hf_hub_download", full)
        assert failure(ModelSource(uri=MODEL), tmp_path, hub).exit_code is ExitCode.STORAGE_FULL
        assert pauses == []

    def test_an_unwritable_weights_folder_is_reported(self, hub: Hub, tmp_path: Path) -> None:
        (tmp_path / "weights").write_text("a file in the way")
        with pytest.raises(InvalidConfig, match=r"^--weights-dir: .* cannot be written"):
            materialize(ModelSource(uri=MODEL), tmp_path / "weights", quiet, hub)


class TestRefusals:
    def test_a_hub_model_that_does_not_exist_is_not_found(self, hub: Hub, tmp_path: Path, pauses: list[float]) -> None:
        error = failure(ModelSource(uri="hf://acme/typo"), tmp_path, hub)
        assert error.exit_code is ExitCode.MODEL_NOT_FOUND
        assert "check the spelling" in str(error)
        assert pauses == []

    def test_a_model_unknown_to_an_authenticated_user_is_not_found(self, endpoint: str, tmp_path: Path) -> None:
        error = failure(ModelSource(uri="hf://acme/typo"), tmp_path, Hub(endpoint, "hf_reader"))
        assert error.exit_code is ExitCode.MODEL_NOT_FOUND

    def test_a_revision_that_does_not_exist_is_not_found(self, hub: Hub, tmp_path: Path) -> None:
        error = failure(ModelSource(uri=f"{MODEL}@v9"), tmp_path, hub)
        assert error.exit_code is ExitCode.MODEL_NOT_FOUND
        assert "no revision 'v9'" in str(error)

    def test_a_private_model_is_downloaded_with_its_token(self, endpoint: str, tmp_path: Path) -> None:
        folder = materialize(ModelSource(uri="hf://acme/secret"), tmp_path, quiet, Hub(endpoint, "hf_reader"))
        assert (folder / "model.safetensors").exists()

    def test_an_invalid_token_is_unauthorized_and_not_printed(self, endpoint: str, tmp_path: Path) -> None:
        error = failure(ModelSource(uri="hf://acme/secret"), tmp_path, Hub(endpoint, "hf_stale"))
        assert error.exit_code is ExitCode.WEIGHTS_UNAUTHORIZED
        assert "credentialsSecretRef" in str(error)
        assert "hf_stale" not in str(error)

    @pytest.mark.parametrize("token", [None, "hf_reader"])
    def test_a_gated_model_is_unauthorized_until_its_terms_are_accepted(
        self, endpoint: str, tmp_path: Path, token: str | None
    ) -> None:
        error = failure(ModelSource(uri="hf://acme/gated"), tmp_path, Hub(endpoint, token))
        assert error.exit_code is ExitCode.WEIGHTS_UNAUTHORIZED
        assert "accept its terms" in str(error)
        assert materialize(ModelSource(uri="hf://acme/gated"), tmp_path, quiet, Hub(endpoint, "hf_member"))


class TestRetries:
    @pytest.mark.parametrize("status", [0, 429, 500, 503])
    def test_temporary_hub_errors_are_retried(
        self, shelf: Shelf, hub: Hub, tmp_path: Path, pauses: list[float], status: int
    ) -> None:
        shelf.fail_next(status, status)
        assert materialize(ModelSource(uri=f"{MODEL}@v1"), tmp_path, quiet, hub).is_dir()
        assert pauses == list(RETRY_SECONDS[:2])

    def test_an_unreachable_hub_is_reported_with_its_address(
        self, tmp_path: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        nowhere = Hub("http://127.0.0.1:9", token=None, sleep=pauses.append)
        with pytest.raises(HubUnreachable, match=r"^http://127.0.0.1:9 cannot be reached for hf://acme/tiny after 5"):
            materialize(ModelSource(uri=MODEL), tmp_path, quiet, nowhere)
        assert pauses == list(RETRY_SECONDS)
        assert capsys.readouterr().err.count("retrying in") == len(RETRY_SECONDS)

    def test_hub_address_and_token_come_from_the_environment(
        self, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint + "/")
        monkeypatch.setenv("HF_TOKEN", "hf_reader")
        assert materialize(ModelSource(uri="hf://acme/secret"), tmp_path, quiet).is_dir()
