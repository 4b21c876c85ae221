"""Model URIs, and models that are read in place: folders and mounted volumes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_model import write_tiny_model
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.inspection import inspect_model
from neuron_runtime.uris import ClaimModel, FolderModel, HubModel, ImageModel, S3Model, parse_uri
from neuron_runtime.weights.fetching import CLAIMS_DIR_VARIABLE, IMAGE_DIR_VARIABLE, materialize


def quiet(stage: str, share: float) -> None:
    """A ProgressCallback without output."""


class TestUris:
    @pytest.mark.parametrize(
        ("uri", "model"),
        [
            ("hf://Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
            ("hf://org/name.v1_2@v1.0", HubModel("org/name.v1_2", "v1.0")),
            ("hf://org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
            ("s3://bucket/some/prefix/", S3Model("bucket", "some/prefix")),
            ("s3://my.bucket-1", S3Model("my.bucket-1", "")),
            ("pvc://claim/models/chat", ClaimModel("claim", "models/chat")),
            ("pvc://claim", ClaimModel("claim", "")),
            (
                "oci://registry.example:5000/org/model@sha256:00#/chat/",
                ImageModel("registry.example:5000/org/model@sha256:00", "chat"),
            ),
            ("oci://model:1", ImageModel("model:1", "")),
            ("file:///models/demo", FolderModel(Path("/models/demo"))),
            ("file:///models/with%20blank", FolderModel(Path("/models/with blank"))),
        ],
    )
    def test_every_scheme_is_parsed(self, uri: str, model: object) -> None:
        assert parse_uri(uri) == model

    @pytest.mark.parametrize(
        "uri",
        ["", "Qwen/Qwen3-8B", "/models/demo", "ftp://host/x", "hf://name", "hf://a/b/c", "hf://../x", "hf://a/b@",
         "hf://a/b@..", "hf:a/b", "file:./demo", "file://host/demo", "file://demo", "hf://a/b?x=1",
         "s3://", "s3:bucket/x", "s3://UPPER/x", "s3://b/x", "s3://bucket/../x", "s3://bucket/a//b", "s3://bucket/a?b",
         "pvc://", "pvc:///path", "pvc://Claim/x", "pvc://claim/../x", "pvc://claim/a/./b", "pvc://claim/\0",
         "oci://", "oci://#a", "oci://a b", "oci://a/../b", "oci://a#../b", "oci://a#b//c"],
    )  # fmt: skip
    def test_malformed_uris_are_refused_with_the_expected_form(self, uri: str) -> None:
        with pytest.raises(InvalidConfig, match=r"^\$\.model\.uri: .*(hf://|file:///|s3://|pvc://|oci://)"):
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


class TestClaims:
    @pytest.fixture(autouse=True)
    def claims(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv(CLAIMS_DIR_VARIABLE, str(tmp_path / "claims"))
        return tmp_path / "claims"

    def test_a_model_in_a_volume_is_served_and_inspected_in_place(self, claims: Path, tmp_path: Path) -> None:
        folder = write_tiny_model(claims / "shared/models/chat")
        (folder / "tokenizer.json").write_text("{}")
        source = ModelSource(uri="pvc://shared/models/chat")
        assert materialize(source, tmp_path / "weights", quiet) == folder
        digest = inspect_model(source.uri).digest
        assert materialize(ModelSource(uri=source.uri, digest=digest), tmp_path / "weights", quiet) == folder
        assert not (tmp_path / "weights").exists()

    def test_a_volume_that_is_not_mounted_is_model_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FatalError, match=r"pvc://other/x: the volume is not mounted at .*/claims/other") as caught:
            materialize(ModelSource(uri="pvc://other/x"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND

    def test_a_named_template_that_is_a_link_out_of_the_volume_is_refused(self, claims: Path, tmp_path: Path) -> None:
        folder = write_tiny_model(claims / "shared/chat")
        (tmp_path / "password").write_text("p")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/default.jinja").symlink_to(tmp_path / "password")
        with pytest.raises(FatalError, match=r"default\.jinja leaves the volume by a symbolic link"):
            materialize(ModelSource(uri="pvc://shared/chat"), tmp_path, quiet)

    def test_a_link_out_of_the_volume_is_refused(self, claims: Path, tmp_path: Path) -> None:
        outside = write_tiny_model(tmp_path / "secret")
        (claims / "shared").mkdir(parents=True)
        (claims / "shared/chat").symlink_to(outside)
        with pytest.raises(FatalError, match="the path leaves the volume") as caught:
            materialize(ModelSource(uri="pvc://shared/chat"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.INVALID_MODEL

    def test_a_file_that_is_a_link_may_lead_to_another_in_the_volume_only(self, claims: Path, tmp_path: Path) -> None:
        folder = write_tiny_model(claims / "shared/snapshots/main")
        (folder / "tokenizer.json").write_text("{}")
        blob = claims / "shared/blobs/tokenizer"
        blob.parent.mkdir()
        (folder / "tokenizer.json").rename(blob)
        (folder / "tokenizer.json").symlink_to("../../blobs/tokenizer")
        source = ModelSource(uri="pvc://shared/snapshots/main")
        assert materialize(source, tmp_path, quiet) == folder
        (tmp_path / "password").write_text("{}")
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.json").symlink_to(tmp_path / "password")
        with pytest.raises(FatalError, match=r"main: tokenizer\.json leaves the volume by a symbolic link") as caught:
            materialize(source, tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.INVALID_MODEL
        with pytest.raises(FatalError, match=r"tokenizer\.json leaves the volume"):
            inspect_model(source.uri)

    @pytest.mark.parametrize("path", ["loop", "loop/x"])
    def test_a_link_to_itself_is_no_folder(self, claims: Path, tmp_path: Path, path: str) -> None:
        (claims / "shared").mkdir(parents=True)
        (claims / "shared/loop").symlink_to("loop")
        with pytest.raises(FatalError, match="is not a folder") as caught:
            materialize(ModelSource(uri=f"pvc://shared/{path}"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND


class TestImages:
    def test_a_model_in_an_image_is_read_where_the_image_is_mounted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(IMAGE_DIR_VARIABLE, str(tmp_path / "image"))
        folder = write_tiny_model(tmp_path / "image/models/chat")
        (folder / "tokenizer.json").write_text("{}")
        uri = "oci://registry.example/model@sha256:00#models/chat"
        digest = inspect_model(uri).digest
        assert materialize(ModelSource(uri=uri, digest=digest), tmp_path / "weights", quiet) == folder
        with pytest.raises(FatalError, match="is pinned"):
            materialize(ModelSource(uri=uri, digest="0000"), tmp_path / "weights", quiet)

    def test_an_image_that_is_not_mounted_is_model_not_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(IMAGE_DIR_VARIABLE, str(tmp_path / "image"))
        with pytest.raises(FatalError, match=r"oci://m#x: the image is not mounted at .*/image") as caught:
            materialize(ModelSource(uri="oci://m#x"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND

    def test_a_link_out_of_the_image_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(IMAGE_DIR_VARIABLE, str(tmp_path / "image"))
        (tmp_path / "image").mkdir()
        (tmp_path / "image/chat").symlink_to(write_tiny_model(tmp_path / "secret"))
        with pytest.raises(FatalError, match="leaves the image") as caught:
            materialize(ModelSource(uri="oci://m#chat"), tmp_path, quiet)
        assert caught.value.exit_code is ExitCode.INVALID_MODEL


@pytest.mark.parametrize("uri", ["https://me:pa55@host/m", "s3://key:pa55@bucket/x", "hf://me:pa55@org/name"])
def test_a_password_in_a_uri_is_not_printed(uri: str) -> None:
    with pytest.raises(InvalidConfig, match=r"//\*\*\*@") as caught:
        parse_uri(uri)
    assert "pa55" not in str(caught.value)
