"""Models from a hub: downloads, pinned revisions, and the message of each failure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.hub import Shelf, serving
from helpers.tiny_model import write_tiny_model
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.checkpoint import check_tokenizer
from neuron_runtime.config import ModelSource
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.uris import HubModel, parse_uri
from neuron_runtime.weights.fetching import MODEL as MODEL_PARTS
from neuron_runtime.weights.fetching import materialize as _materialize
from neuron_runtime.weights.hub import HubSource
from neuron_runtime.weights.source import RETRY_SECONDS, SourceUnreachable
from neuron_runtime.weights.transfer import Tools

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
    (main / "additional_chat_templates").mkdir()
    (main / "additional_chat_templates/tool_use.jinja").write_text("by name")
    for name in ("README.md", "training_args.bin", "consolidated.safetensors", "onnx/model.onnx", "onnx/x.jinja"):
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


@dataclass(frozen=True)
class Hub:
    """A hub as seen by the tests: its address, and a token."""

    endpoint: str
    token: str | None = None
    sleep: Callable[[float], None] = time.sleep


@pytest.fixture
def hub(endpoint: str, pauses: list[float]) -> Hub:
    return Hub(endpoint, token=None, sleep=pauses.append)


def materialize(source: ModelSource, weights_dir: Path, progress: ProgressCallback, hub: Hub, **more: Any) -> Path:
    model = parse_uri(source.uri)
    assert isinstance(model, HubModel)
    tools = Tools(sleep=hub.sleep)
    return _materialize(source, weights_dir, progress, HubSource(model, hub.endpoint, hub.token), tools=tools, **more)


def failure(source: ModelSource, weights_dir: Path, hub: Hub) -> FatalError:
    with pytest.raises(FatalError) as caught:
        materialize(source, weights_dir, quiet, hub, check=check_tokenizer)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def age(folder: Path, lacking: Collection[str]) -> None:
    """Make of an entry what an earlier version fetched."""
    path = folder / ".manifest.json"
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("rule") == MODEL_PARTS.rule
    manifest["files"] = [one for one in manifest["files"] if one["name"] not in lacking]
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    for name in lacking:
        (folder / name).unlink()


class TestDownloads:
    def test_only_files_needed_for_serving_are_downloaded(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        shares: list[float] = []
        folder = materialize(
            ModelSource(uri=MODEL), tmp_path / "weights", lambda stage, share: shares.append(share), hub
        )
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert names == {
            ".manifest.json",
            "additional_chat_templates/tool_use.jinja",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        }
        for name in names - {".manifest.json"}:
            assert (folder / name).read_bytes() == (shelf.root / "acme/tiny/main" / name).read_bytes()
        assert shares[-1] == 1.0
        assert shares == sorted(shares)

    def test_a_backend_without_weights_gets_the_small_files_alone(self, hub: Hub, tmp_path: Path) -> None:
        small = materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub, with_weights=False)
        assert (small / "config.json").exists()
        assert (small / "tokenizer.json").exists()
        assert not list(small.glob("*.safetensors"))
        assert materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub, with_weights=False) == small
        folder = materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub)
        assert len(list(folder.glob("*.safetensors"))) == 2
        assert materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub, with_weights=False) == folder

    def test_a_missing_tokenizer_is_found_before_weights_are_downloaded(
        self, shelf: Shelf, hub: Hub, tmp_path: Path
    ) -> None:
        (shelf.root / "acme/tiny/main/tokenizer.json").unlink()
        error = failure(ModelSource(uri=MODEL), tmp_path / "weights", hub)
        assert str(error).startswith(f"{MODEL}: tokenizer is missing; add tokenizer.json or")
        assert not [one for one in shelf.asked if "safetensors" in one.path and "index" not in one.path]

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

    def test_what_makes_vectors_is_fetched_where_an_earlier_version_left_it_out(
        self, shelf: Shelf, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main, recipe = shelf.root / "acme/tiny/main", ("modules.json", "1_Pooling/config.json")
        for name in recipe:
            (main / name).parent.mkdir(exist_ok=True)
            (main / name).write_text("{}")
        pinned, store = ModelSource(uri=MODEL, digest=shelf.commit("acme/tiny")), tmp_path / "weights"
        folder = materialize(pinned, store, quiet, hub)
        age(folder, recipe)
        num_asked = len(shelf.asked)
        assert materialize(pinned, store, quiet, hub) == folder
        assert len(shelf.asked) == num_asked
        unreachable = Hub("http://127.0.0.1:1")
        assert materialize(pinned, store, quiet, unreachable, has_recipe=True) == folder
        assert "without the files of sentence-transformers" in capsys.readouterr().err
        assert not (folder / "modules.json").exists()
        assert materialize(pinned, store, quiet, hub, has_recipe=True) == folder
        assert [(folder / name).read_text() for name in recipe] == ["{}", "{}"]
        num_asked = len(shelf.asked)
        assert materialize(pinned, store, quiet, hub, has_recipe=True) == folder
        assert len(shelf.asked) == num_asked

    def test_a_whole_model_of_an_earlier_version_is_not_copied_again(
        self, shelf: Shelf, hub: Hub, tmp_path: Path
    ) -> None:
        pinned = ModelSource(uri=MODEL, digest=shelf.commit("acme/tiny"))
        folder = materialize(pinned, tmp_path, quiet, hub)
        age(folder, ())
        num_asked = len(shelf.asked)
        assert materialize(pinned, tmp_path, quiet, hub, has_recipe=True) == folder
        assert not [one for one in shelf.asked[num_asked:] if "resolve" in one.path]

    def test_a_digest_that_is_not_a_commit_is_refused(self, hub: Hub, tmp_path: Path) -> None:
        assert failure(ModelSource(uri=MODEL, digest="v1"), tmp_path, hub).exit_code is ExitCode.CHECKSUM_MISMATCH

    def test_a_repository_without_safetensors_is_an_invalid_model(self, shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
        (shelf.root / "acme/tiny/v1/model.safetensors").unlink()
        error = failure(ModelSource(uri=f"{MODEL}@v1"), tmp_path, hub)
        assert error.exit_code is ExitCode.INVALID_MODEL
        assert str(error).startswith(f"{MODEL}@v1/model.safetensors.index.json is missing")


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

    @pytest.mark.parametrize(("token", "is_told"), [(None, True), ("hf_reader", False)])
    def test_it_is_said_that_no_token_was_given(
        self, endpoint: str, tmp_path: Path, token: str | None, is_told: bool
    ) -> None:
        error = failure(ModelSource(uri="hf://acme/gated"), tmp_path, Hub(endpoint, token))
        assert ("no token was given" in str(error)) is is_told


def test_a_mirror_that_lists_files_without_sizes_is_asked_for_each(shelf: Shelf, hub: Hub, tmp_path: Path) -> None:
    def without_sizes(answer: Any) -> Any:
        return answer | {"siblings": [{"rfilename": one["rfilename"]} for one in answer["siblings"]]}

    shelf.info = without_sizes
    folder = materialize(ModelSource(uri=f"{MODEL}@v1"), tmp_path, quiet, hub)
    assert (folder / "model.safetensors").stat().st_size > 0
    assert any(asked.method == "HEAD" for asked in shelf.asked)


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
        with pytest.raises(SourceUnreachable, match=r"^http://127.0.0.1:9 cannot be read for hf://acme/tiny after 5"):
            materialize(ModelSource(uri=MODEL), tmp_path, quiet, nowhere)
        assert pauses == list(RETRY_SECONDS)
        assert capsys.readouterr().err.count("retrying in") == len(RETRY_SECONDS)

    def test_a_password_in_the_address_is_not_printed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        nowhere = Hub("http://user:pa55word@127.0.0.1:9", token=None, sleep=lambda seconds: None)
        with pytest.raises(SourceUnreachable, match=r"^http://\*\*\*@127.0.0.1:9 cannot be read") as caught:
            materialize(ModelSource(uri=MODEL), tmp_path, quiet, nowhere)
        assert "pa55word" not in str(caught.value) + capsys.readouterr().err

    def test_hub_address_and_token_come_from_the_environment(
        self, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint + "/")
        monkeypatch.setenv("HF_TOKEN", "hf_reader")
        assert _materialize(ModelSource(uri="hf://acme/secret"), tmp_path, quiet).is_dir()


def without_files(**fields: Any) -> Callable[[Any], Any]:
    return lambda answer: answer | {"siblings": [{"rfilename": "config.json", "size": 2} | fields]}


@pytest.mark.parametrize(
    "info",
    [
        lambda answer: b"<html>Log in</html>",
        lambda answer: [1],
        lambda answer: None,
        lambda answer: answer | {"siblings": [None]},
        lambda answer: answer | {"siblings": "files"},
        lambda answer: answer | {"sha": None},
        lambda answer: answer | {"sha": "../" * 1000},
        lambda answer: answer | {"sha": 5},
        without_files(rfilename=5),
        without_files(size="2"),
        without_files(size=-2),
        without_files(lfs={"size": 2}),
    ],
)
def test_an_answer_that_is_no_listing_is_reported(
    shelf: Shelf, hub: Hub, tmp_path: Path, info: Callable[[Any], Any]
) -> None:
    shelf.info = info
    with pytest.raises(SourceUnreachable, match=r"no listing of a model; is HF_ENDPOINT the URL of a hub") as caught:
        materialize(ModelSource(uri=MODEL), tmp_path, quiet, hub)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("size", [2**50, 2**70])
def test_a_file_of_an_absurd_size_is_refused_at_once(shelf: Shelf, hub: Hub, tmp_path: Path, size: int) -> None:
    shelf.info = without_files(size=size)
    error = failure(ModelSource(uri=MODEL), tmp_path, hub)
    assert error.exit_code is ExitCode.STORAGE_FULL
    assert f"more bytes in {tmp_path}" in str(error)
