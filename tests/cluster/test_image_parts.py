"""What image builds are made of, each part by itself: nothing here needs root, Go or a network."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from cluster.rig.image_base import read_layout, tree_members, write_layout
from cluster.rig.image_runc import BUNDLE, BUNDLE_IN_STEP, bundle_folder, with_certificates
from cluster.rig.image_torch import Wheel


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_text("#!/bin/sh\n")
    (root / "bin" / "tool").chmod(0o755)
    (root / "bin" / "again").hardlink_to(root / "bin" / "tool")
    (root / "bin" / "link").symlink_to("tool")
    (root / "tmp").mkdir()
    (root / "tmp" / "left-over").touch()
    (root / "lib" / "__pycache__").mkdir(parents=True)
    os.mkfifo(root / "lib" / "pipe")
    return root


def test_a_tree_becomes_members_in_order_without_what_does_not_belong(tree: Path) -> None:
    members = {m.name: (m.type, m.linkname, oct(m.mode)) for m, _ in tree_members(tree)}
    assert list(members) == ["bin", "bin/again", "bin/link", "bin/tool", "lib", "tmp"]
    assert members["bin/again"] == (tarfile.REGTYPE, "", "0o755")
    assert members["bin/tool"] == (tarfile.LNKTYPE, "bin/again", "0o755")
    assert members["bin/link"][:2] == (tarfile.SYMTYPE, "tool")


def test_one_tree_gives_one_digest_whatever_its_times(tree: Path, tmp_path: Path) -> None:
    digests = set()
    for number, moment in enumerate((1_000_000_000, 1_700_000_000)):
        os.utime(tree / "bin" / "tool", (moment, moment))
        layout = tmp_path / f"layout{number}"
        write_layout(layout, tree_members(tree), environment={"A": "b"}, command=["tool"])
        digests.add(read_layout(layout).digest)
    assert len(digests) == 1


def test_every_blob_of_a_layout_is_what_its_name_says(tree: Path, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", tree_members(tree), environment={}, command=["tool"])
    blobs = {blob.name: blob.read_bytes() for blob in (tmp_path / "layout" / "blobs" / "sha256").iterdir()}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in blobs.items()} == {name: name for name in blobs}
    manifest = json.loads(blobs[read_layout(tmp_path / "layout").digest.removeprefix("sha256:")])
    config = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    (layer,) = (blobs[part["digest"].removeprefix("sha256:")] for part in manifest["layers"])
    plain = gzip.decompress(layer)
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        assert tar.getnames() == ["bin", "bin/again", "bin/link", "bin/tool", "lib", "tmp"]


def test_a_step_trusts_what_the_machine_trusts_unless_it_says_otherwise() -> None:
    spec = {"process": {"env": ["PATH=/bin", "PIP_CERT=/own"], "args": ["true"]}, "mounts": [{"destination": "/proc"}]}
    lent = with_certificates(spec)
    assert [mount["destination"] for mount in lent["mounts"]] == ["/proc", BUNDLE_IN_STEP]
    assert lent["mounts"][1]["source"] == str(BUNDLE)
    assert "ro" in lent["mounts"][1]["options"]
    environment = dict(entry.split("=", 1) for entry in lent["process"]["env"])
    assert environment["PIP_CERT"] == "/own"
    assert environment["SSL_CERT_FILE"] == BUNDLE_IN_STEP
    assert lent["process"]["args"] == ["true"]
    assert len(spec["mounts"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--log", "x", "run", "--bundle", "/b", "id"],
        ["run", "--bundle=/b", "id"],
        ["create", "-b", "/b", "id"],
    ],
)
def test_the_bundle_of_a_step_is_found_in_runcs_arguments(arguments: list[str]) -> None:
    assert bundle_folder(arguments) == Path("/b")


def test_without_the_argument_it_is_the_working_directory() -> None:
    assert bundle_folder(["run", "id"]) == Path()


def test_a_wheel_records_every_file_it_holds(tmp_path: Path) -> None:
    with Wheel(tmp_path, "thing", "1.0+local", "py3-none-any") as wheel:
        wheel.add("thing/bin/tool", b"#!/bin/sh\n")
        wheel.add_metadata("METADATA", b"Name: thing\n")
    with zipfile.ZipFile(wheel.path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        assert archive.getinfo("thing/bin/tool").external_attr >> 16 == 0o100755
    rows = list(csv.reader(contents.pop("thing-1.0+local.dist-info/RECORD").decode().splitlines()))
    assert rows.pop() == ["thing-1.0+local.dist-info/RECORD", "", ""]
    assert {name for name, _, _ in rows} == set(contents)
    for name, digest, size in rows:
        expected = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(contents[name]))
