"""Models in S3, from a real server that checks signatures: digests, checks, and the message of each failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from helpers.s3_server import BUCKET, S3Server
from helpers.weights import CHUNK_BYTES, NUM_READERS, contents, size, write_model
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.inspection import inspect_model
from neuron_runtime.uris import S3Model
from neuron_runtime.weights.fetching import Fetched, fetch
from neuron_runtime.weights.hashing import FileHash
from neuron_runtime.weights.s3 import S3Source
from neuron_runtime.weights.source import Listing, SourceFile, SourceUnreachable
from neuron_runtime.weights.store import Store
from neuron_runtime.weights.transfer import Amount, Tools, TransferLimits

MODEL = f"s3://{BUCKET}/chat/v1"
PART_BYTES = 5 * 2**20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "chat")
    (folder / "README.md").write_text("not part of the model")
    return folder


@pytest.fixture(scope="module", autouse=True)
def uploaded(running: S3Server, model: Path) -> None:
    running.upload(model, "chat/v1")


def quiet(amount: Amount) -> None:
    """A report that nobody reads."""


def fetched(folder: Path, uri: str = MODEL, digest: str = "") -> Fetched:
    tools = Tools(sleep=lambda seconds: None, limits=TransferLimits(NUM_READERS, CHUNK_BYTES))
    return fetch(uri, Store(folder), quiet, digest, tools=tools)


def refusal(folder: Path, uri: str = MODEL, digest: str = "") -> FatalError:
    with pytest.raises(FatalError) as caught:
        fetched(folder, uri, digest)
    assert "\n" not in str(caught.value)
    return caught.value


def parts(folder: Path) -> dict[str, bytes]:
    return {name: raw for name, raw in contents(folder).items() if name != "README.md"}


class TestModels:
    def test_a_model_is_inspected_and_fetched(self, server: S3Server, model: Path, tmp_path: Path) -> None:
        digest = inspect_model(MODEL).digest
        assert server.faults.num_sent_bytes < size(model) / 4
        found = fetched(tmp_path, digest=digest)
        assert found.digest == digest
        assert contents(found.folder) == parts(model)
        num_asked = len(server.asked)
        assert fetched(tmp_path, digest=digest).read_bytes == 0
        assert len(server.asked) == num_asked

    def test_a_copy_elsewhere_has_the_same_digest_and_is_not_downloaded_again(
        self, server: S3Server, model: Path, tmp_path: Path
    ) -> None:
        server.upload(model, "other/place")
        (model / "README.md").write_text("changed: still not part of the model")
        server.upload(model, "third")
        first = fetched(tmp_path)
        server.faults.sent_bytes.clear()
        for uri in (f"s3://{BUCKET}/other/place", f"s3://{BUCKET}/third/"):
            assert fetched(tmp_path, uri).folder == first.folder
        assert server.faults.num_sent_bytes == 0

    def test_other_contents_have_another_digest(self, server: S3Server, model: Path, tmp_path: Path) -> None:
        server.upload(model, "edited")
        server.client().put_object(Bucket=BUCKET, Key="edited/config.json", Body=b"{}")
        error = refusal(tmp_path, f"s3://{BUCKET}/edited", inspect_model(MODEL).digest)
        assert error.exit_code is ExitCode.CHECKSUM_MISMATCH
        assert "is pinned" in str(error)

    def test_a_digest_of_before_its_quantization_file_counted_is_still_found(
        self, server: S3Server, model: Path, tmp_path: Path
    ) -> None:
        uri = f"s3://{BUCKET}/models/modelopt"
        server.upload(model, "models/modelopt")
        before = fetched(tmp_path / "a", uri).digest
        said = b'{"quantization": {"quant_algo": null}}'
        server.client().put_object(Bucket=BUCKET, Key="models/modelopt/hf_quant_config.json", Body=said)
        assert fetched(tmp_path / "b", uri, digest=before).digest == before

    def test_objects_below_deeper_prefixes_are_not_part_of_the_model(
        self, server: S3Server, model: Path, tmp_path: Path
    ) -> None:
        client = server.client()
        server.upload(model, "deep")
        before = inspect_model(f"s3://{BUCKET}/deep").digest
        client.put_object(Bucket=BUCKET, Key="deep/old/config.json", Body=b"{}")
        client.put_object(Bucket=BUCKET, Key="deep2/config.json", Body=b"{}")
        assert inspect_model(f"s3://{BUCKET}/deep").digest == before

    def test_named_templates_are_part_of_the_model(self, server: S3Server, model: Path, tmp_path: Path) -> None:
        server.upload(model, "named")
        before = inspect_model(f"s3://{BUCKET}/named").digest
        key = "additional_chat_templates/tool_use.jinja"
        server.client().put_object(Bucket=BUCKET, Key=f"named/{key}", Body=b"by name")
        uri = f"s3://{BUCKET}/named"
        assert inspect_model(uri).digest != before
        assert (fetch(uri, Store(tmp_path), lambda amount: None).folder / key).read_text() == "by name"


class TestChecks:
    @pytest.mark.parametrize(
        ("more", "algorithm"),
        [({"ChecksumAlgorithm": "SHA256"}, "sha256"), ({"ChecksumAlgorithm": "CRC32"}, "crc32"), ({}, "md5 in parts")],
    )
    def test_each_kind_of_upload_is_checked(
        self, server: S3Server, model: Path, tmp_path: Path, more: dict[str, Any], algorithm: str
    ) -> None:
        prefix = f"checked-{algorithm.partition(' ')[0]}"
        big = model / "model-00001-of-00004.safetensors"
        server.upload(model, prefix, **more)
        if algorithm == "md5 in parts":
            _upload_in_parts(server.client(), f"{prefix}/{big.name}", big.read_bytes() + bytes(PART_BYTES))
            source = S3Source(S3Model(BUCKET, prefix))
            listing = source.listing()
            check = source.check(listing, listing.files[big.name])
            assert check is not None
            assert (check.algorithm, check.part_bytes) == ("md5", PART_BYTES)
        server.faults.flipped[big.name] = 12_345
        try:
            error = refusal(tmp_path, f"s3://{BUCKET}/{prefix}")
        finally:
            server.faults.flipped.clear()
        assert error.exit_code is ExitCode.CHECKSUM_MISMATCH
        assert f"{big.name}: its {algorithm} is" in str(error)

    @pytest.mark.parametrize("algorithm", ["", "CRC32", "SHA256", "SHA1"])
    def test_an_intact_upload_in_parts_passes(
        self, server: S3Server, model: Path, tmp_path: Path, algorithm: str
    ) -> None:
        raw = b"x" * (2 * PART_BYTES + 7)
        _upload_in_parts(server.client(), "parts/big.safetensors", raw, algorithm)
        source = S3Source(S3Model(BUCKET, "parts"))
        listing = source.listing()
        file = listing.files["big.safetensors"]
        check = source.check(listing, file)
        assert check is not None
        assert check.algorithm == (algorithm.lower() or "md5")
        found = FileHash(file.num_bytes, check)
        found.update(raw)
        assert found.difference() == ""
        assert FileHash(file.num_bytes, check).difference() != ""

    @pytest.mark.parametrize(
        "head",
        [
            {"ServerSideEncryption": "aws:kms"},
            {"SSECustomerAlgorithm": "AES256"},
            {"ChecksumType": "COMPOSITE", "ChecksumCRC32": "AAAAAA==-2", "ServerSideEncryption": "aws:kms"},
            {"ContentLength": 3},
        ],
    )
    def test_an_etag_that_is_no_hash_is_not_compared(self, head: dict[str, Any]) -> None:
        class Client:
            def head_object(self, **asked: Any) -> dict[str, Any]:
                return head

        file = SourceFile("a.safetensors", 100, version="0" * 32 + "-2")
        assert S3Source(S3Model("bucket", ""), Client()).check(Listing("", {}), file) is None

    def test_an_object_that_is_replaced_during_the_download_is_an_error(
        self, server: S3Server, model: Path, tmp_path: Path
    ) -> None:
        server.upload(model, "moving")
        source = S3Source(S3Model(BUCKET, "moving"))
        listing = source.listing()
        server.client().put_object(Bucket=BUCKET, Key="moving/config.json", Body=b"{ }")

        class Stale(S3Source):
            def listing(self, digest: str = "") -> Listing:
                return listing

        with pytest.raises(FatalError, match="was replaced while the model was fetched") as caught:
            fetch(f"s3://{BUCKET}/moving", Store(tmp_path), quiet, source=Stale(S3Model(BUCKET, "moving")))
        assert caught.value.exit_code is ExitCode.CHECKSUM_MISMATCH


class TestRefusals:
    def test_a_bucket_that_does_not_exist_is_not_found(self, server: S3Server, tmp_path: Path) -> None:
        error = refusal(tmp_path, "s3://no-such-bucket/chat")
        assert error.exit_code is ExitCode.MODEL_NOT_FOUND
        assert "the bucket does not exist" in str(error)

    def test_an_empty_prefix_is_not_found(self, server: S3Server, tmp_path: Path) -> None:
        error = refusal(tmp_path, f"s3://{BUCKET}/typo")
        assert error.exit_code is ExitCode.MODEL_NOT_FOUND
        assert "no object is below this prefix" in str(error)

    @pytest.mark.parametrize("variables", [{"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, {"AWS_PROFILE": "none"}])
    def test_wrong_credentials_are_unauthorized_and_not_printed(
        self, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        error = refusal(tmp_path)
        assert error.exit_code is ExitCode.WEIGHTS_UNAUTHORIZED
        assert "s3:GetObject" in str(error)
        assert "credentialsSecretRef" in str(error)
        assert "wrong-secret" not in str(error)

    def test_no_credentials_are_unauthorized(
        self, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        error = refusal(tmp_path)
        assert error.exit_code is ExitCode.WEIGHTS_UNAUTHORIZED
        assert "anonymous access" in str(error)

    @pytest.mark.parametrize(
        ("status", "code", "headers", "exit_code", "words"),
        [
            (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}, 10, "set AWS_REGION=eu-west-1"),
            (400, "AuthorizationHeaderMalformed", {}, 10, "set AWS_REGION to the region of the bucket"),
            (400, "ExpiredToken", {}, 11, "refused these credentials (ExpiredToken)"),
            (403, "403", {}, 11, "refused these credentials (403)"),
            (403, "RequestTimeTooSkewed", {}, 11, "RequestTimeTooSkewed"),
            (403, "InvalidObjectState", {}, 10, "is archived; restore it"),
            (404, "404", {}, 10, "no longer has an object that it listed"),
            (405, "MethodNotAllowed", {}, 10, "the store answered 405"),
            (412, "412", {}, 14, "was replaced"),
            (416, "InvalidRange", {}, 14, "was replaced"),
        ],
    )
    def test_each_answer_of_s3_has_its_meaning(
        self, server: S3Server, *, status: int, code: str, headers: dict[str, str], exit_code: int, words: str
    ) -> None:
        answer: Any = {
            "Error": {"Code": code, "Message": "because"},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        }
        verdict = S3Source(S3Model(BUCKET, "chat")).verdict(ClientError(answer, "GetObject"))
        assert verdict is not None
        assert verdict.exit_code == exit_code
        assert words in str(verdict)

    @pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (400, "RequestTimeout")])
    def test_a_busy_store_is_asked_again(self, server: S3Server, status: int, code: str) -> None:
        answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        assert S3Source(S3Model(BUCKET, "chat")).verdict(ClientError(answer, "GetObject")) is None

    def test_a_public_bucket_needs_no_credentials(
        self, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
    ) -> None:
        client = server.client()
        client.create_bucket(Bucket="public")
        for path in sorted(model.iterdir()):
            client.upload_file(str(path), "public", f"chat/{path.name}")
        everyone = (
            '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":'
            '["s3:ListBucket","s3:GetObject"],"Resource":["arn:aws:s3:::public","arn:aws:s3:::public/*"]}]}'
        )
        client.put_bucket_policy(Bucket="public", Policy=everyone)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        assert contents(fetched(tmp_path, "s3://public/chat").folder) == parts(model)

    def test_a_malformed_endpoint_is_an_invalid_configuration(
        self, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
        assert refusal(tmp_path).exit_code is ExitCode.INVALID_ENGINE_CONFIG

    @pytest.mark.parametrize("status", [0, 500, 503])
    def test_temporary_errors_are_retried(self, server: S3Server, model: Path, tmp_path: Path, status: int) -> None:
        server.failures += [status, status]
        assert contents(fetched(tmp_path).folder) == parts(model)
        assert not server.failures

    def test_an_unreachable_store_is_reported_with_its_address(
        self, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(
            SourceUnreachable, match=r"^http://127.0.0.1:9 cannot be read for s3://models/chat/v1 after"
        ):
            fetched(tmp_path)

    def test_truncated_and_silent_answers_are_continued(
        self, server: S3Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("neuron_runtime.weights.s3.TIMEOUT_SECONDS", 0.5)
        server.faults.num_cuts, server.faults.num_hangs, server.faults.cut_bytes = 2, 2, 30_000
        assert contents(fetched(tmp_path).folder) == parts(model)
        assert (server.faults.num_cuts, server.faults.num_hangs) == (0, 0)


def _upload_in_parts(client: Any, key: str, raw: bytes, algorithm: str = "") -> None:
    """As tools with or without checksums do it."""
    more = {"ChecksumAlgorithm": algorithm} if algorithm else {}
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key, **more)["UploadId"]
    done = []
    for number, begin in enumerate(range(0, len(raw), PART_BYTES), 1):
        part = client.upload_part(
            Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=raw[begin : begin + PART_BYTES], **more
        )
        sums = {name: value for name, value in part.items() if name.startswith("Checksum")}
        done.append({"PartNumber": number, "ETag": part["ETag"], **(sums if algorithm else {})})
    client.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": done})
