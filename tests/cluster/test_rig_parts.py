"""The cluster's parts that need no cluster: what the device plugin decides, the cache, archives, what is missing."""

from __future__ import annotations

import json
import os
import stat
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.conftest import not_possible
from cluster.rig import binaries, needs
from cluster.rig.binaries import BUILD_FOLDER, COMPONENTS, pinned_version
from cluster.rig.cache import Cache, cache_root, content_key
from cluster.rig.cache import main as cache_main
from cluster.rig.commands import CommandFailed, run
from cluster.rig.device_plugin import free_major, make_device_nodes, read_unhealthy
from cluster.rig.needs import DEBIAN_PACKAGES, DebianPackage, NotPossibleHere, cgroup_hierarchies, missing_packages
from cluster.rig.neuron_devices import (
    CORE_RESOURCE,
    DEVICE_RESOURCE,
    DeviceNode,
    InvalidSize,
    allocate,
    resource_ids,
    unhealthy_ids,
)
from cluster.rig.node_images import read_archive, write_program_archive
from cluster.rig.topology import TOPOLOGY, NeuronHardware

INF2_24XLARGE = NeuronHardware(num_devices=6, cores_per_device=2)


def test_a_device_is_numbered_from_0_and_keeps_the_host_s_minor_number() -> None:
    allocation = allocate(INF2_24XLARGE, DEVICE_RESOURCE, ["neuron4"])
    assert allocation.devices == (DeviceNode(4, "/dev/neuron0"),)
    assert allocation.environment == {"NEURON_LOGICAL_NC_CONFIG": "1"}


@pytest.mark.parametrize(
    ("resource", "ids", "minors", "visible"),
    [
        (DEVICE_RESOURCE, [f"neuron{i}" for i in range(6)], [0, 1, 2, 3, 4, 5], None),
        (CORE_RESOURCE, ["neuroncore0"], [0], "0"),
        (CORE_RESOURCE, ["neuroncore7"], [3], "1"),
        (CORE_RESOURCE, [f"neuroncore{i}" for i in range(12)], [0, 1, 2, 3, 4, 5], "0-11"),
    ],
)
def test_one_or_all_is_given(resource: str, ids: list[str], minors: list[int], visible: str | None) -> None:
    allocation = allocate(INF2_24XLARGE, resource, ids)
    assert allocation.devices == tuple(DeviceNode(m, f"/dev/neuron{i}") for i, m in enumerate(minors))
    assert allocation.environment.get("NEURON_RT_VISIBLE_CORES") == visible


@given(st.sampled_from([DEVICE_RESOURCE, CORE_RESOURCE]), st.data())
def test_any_size_in_between_needs_the_scheduler_extension(resource: str, data: st.DataObject) -> None:
    known = resource_ids(INF2_24XLARGE, resource)
    chosen = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=2, max_size=len(known) - 1))
    with pytest.raises(InvalidSize, match="invalid without the k8s-neuron-scheduler"):
        allocate(INF2_24XLARGE, resource, chosen)


def test_an_unhealthy_device_takes_its_cores_along() -> None:
    assert unhealthy_ids(INF2_24XLARGE, DEVICE_RESOURCE, {2}) == {"neuron2"}
    assert unhealthy_ids(INF2_24XLARGE, CORE_RESOURCE, {2, 5}) == {f"neuroncore{i}" for i in (4, 5, 10, 11)}
    assert unhealthy_ids(INF2_24XLARGE, DEVICE_RESOURCE, {6}) == set()


def test_the_list_of_unhealthy_devices_is_read_with_care(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "unhealthy-devices"
    assert read_unhealthy(file) == frozenset()
    file.write_text("3\nneuron4\n 5 ")
    assert read_unhealthy(file) == {3, 5}
    assert "'neuron4' is not a device number" in capsys.readouterr().out


def test_device_numbers_that_a_driver_has_are_left_alone() -> None:
    proc_devices = "Character devices:\n  1 mem\n120 some\n121 other\n\nBlock devices:\n122 disk\n"
    assert free_major(proc_devices) == 122
    taken = "Character devices:\n" + "\n".join(f"{n} x" for n in (*range(60, 64), *range(120, 128)))
    with pytest.raises(ValueError, match="no character device number"):
        free_major(taken)


@pytest.mark.skipif(os.geteuid() != 0, reason="making device files needs root: run as root")
def test_device_files_have_the_minor_numbers_of_their_names(tmp_path: Path) -> None:
    make_device_nodes(tmp_path, 3, 120)
    make_device_nodes(tmp_path, 3, 120)  # as after a restart
    found = {p.name: (stat.S_ISCHR(p.stat().st_mode), os.minor(p.stat().st_rdev)) for p in tmp_path.iterdir()}
    assert found == {f"neuron{i}": (True, i) for i in range(3)}


def test_nodes_have_the_labels_of_their_instances() -> None:
    assert TOPOLOGY.node("n1").labels["node.kubernetes.io/instance-type"] == "inf2.24xlarge"
    assert "neuron.amazonaws.com/present" not in TOPOLOGY.node("n3").labels
    with pytest.raises(KeyError, match="there are n1, n2, n3"):
        TOPOLOGY.node("n4")


# Cache


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_root({"NEURON_SERVING_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert cache_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/neuron-serving")
    assert cache_root({}) == Path.home() / ".cache" / "neuron-serving"


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    made = []

    def build(folder: Path) -> None:
        made.append(folder)
        (folder / "program").write_text("it")

    first = cache.entry("bin", "it", "k1", build)
    assert cache.entry("bin", "it", "k1", build) == first
    assert ((first / "program").read_text(), len(made)) == ("it", 1)


def test_a_failed_build_leaves_no_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")

    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise NotPossibleHere("no Go")

    with pytest.raises(NotPossibleHere):
        cache.entry("bin", "it", "k1", build)
    assert cache.find("bin", "it", "k1") is None
    assert list((cache.root / "bin").iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    (cache.folder("bin") / ".making-it-abc").mkdir()
    cache.entry("bin", "it", "k1", lambda folder: None)
    assert [p.name for p in (cache.root / "bin").iterdir()] == ["it@k1"]


def test_entries_used_last_are_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for key in ("k1", "k2", "k3"):
        path = cache.entry("bin", "it", key, lambda folder: None)
        os.utime(path, ns=(0, int(key[1])))
    assert cache.find("bin", "it", "k1") is not None  # used now, so k2 is the oldest
    cache.entry("bin", "other", "k1", lambda folder: None)
    cache.entry("bin", "it", "k4", lambda folder: None)
    kept = sorted(p.name for p in (cache.root / "bin").iterdir())
    assert kept == ["it@k1", "it@k3", "it@k4", "other@k1"]


def test_a_folder_that_grew_too_large_is_emptied(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    (cache.folder("go", "build") / "package").write_bytes(b"x" * 10_000)
    cache.bound("go", 1_000_000)
    assert (cache.root / "go" / "build" / "package").exists()
    cache.bound("go", 5_000)
    assert not (cache.root / "go").exists()
    cache.bound("go", 5_000)


def test_two_runs_that_want_the_same_entry_make_it_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    made = []
    second_waits = threading.Event()

    def build(folder: Path) -> None:
        made.append(folder)
        second_waits.wait(10)

    threads = [threading.Thread(target=cache.entry, args=("bin", "it", "k", build)) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not made:
        time.sleep(0.01)
    second_waits.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_the_key_is_of_content_names_and_modes(tmp_path: Path) -> None:
    def key(name: str, text: str, mode: int) -> str:
        folder = tmp_path / f"{name}-{text}-{mode}"
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / name).chmod(mode)
        return content_key("flags", folder)

    keys = [key("a", "x", 0o644), key("b", "x", 0o644), key("a", "y", 0o644), key("a", "x", 0o755)]
    assert len(set(keys)) == 4
    assert content_key("ab", "c") != content_key("a", "bc")


def test_only_a_cache_of_this_project_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "home"
    (precious / "work").mkdir(parents=True)
    with pytest.raises(ValueError, match="nothing was removed"):
        Cache(precious).clear()
    monkeypatch.setenv("NEURON_SERVING_CACHE", str(tmp_path / "cache"))
    run_folder = Cache.default().folder("run")
    assert cache_main(["clear"]) == 1
    assert "make cluster-down" in capsys.readouterr().err
    run_folder.rmdir()
    assert cache_main(["clear"]) == 0
    assert not (tmp_path / "cache").exists()


# Components


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_is_pinned_and_names_no_registry(name: str) -> None:
    files = {file.name: file.read_text() for file in (BUILD_FOLDER / name).iterdir()}
    assert "://" not in files["go.mod"] + files.get("go.sum", "")
    component = COMPONENTS[name]
    assert bool(pinned_version(component)) == bool(component.version_module)


def test_a_component_that_nothing_pins_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    (tmp_path / "etcd" / "go.mod").write_text("module x\n")
    with pytest.raises(ValueError, match=r"does not require go\.etcd\.io"):
        pinned_version(COMPONENTS["etcd"], tmp_path)


_GO = """#!/bin/sh
echo "$*" >> calls
case $1 in
  list) [ "$(wc -l < calls)" -gt "$BREAKS_OFF" ] || { echo 'reading module: connection reset by peer' >&2; exit 1; } ;;
  build) [ "$BREAKS_OFF" -lt 9 ] || { echo 'reading module: connection reset by peer' >&2; exit 1; }
    while [ "$1" != -o ]; do shift; done; echo program > "$2" ;;
esac
"""


@pytest.fixture
def breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Builds the component `pause` with a Go whose first downloads break off, so often; gives the program's folder."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(_GO)
    go.chmod(0o755)
    (tmp_path / "build" / "pause").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(binaries, "BUILD_FOLDER", tmp_path / "build")
    monkeypatch.setattr(binaries, "_PAUSES_SECONDS", (0, 0, 0))

    def build(times: int) -> Path:
        monkeypatch.setenv("BREAKS_OFF", str(times))
        return binaries.ensure("pause", cache=Cache(tmp_path / "cache"))["pause"]

    return build


def test_downloads_that_break_off_are_begun_again(
    breaks_off: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (breaks_off(2) / "pause").read_text() == "program\n"
    assert capsys.readouterr().out.count("connection reset by peer; again in 0 s") == 2


def test_downloads_that_always_break_off_are_told(breaks_off: Callable[[int], Path]) -> None:
    with pytest.raises(NotPossibleHere, match="building pause failed: reading module: connection reset by peer"):
        breaks_off(9)


# Images


def test_an_archive_says_what_is_in_it_and_is_the_same_each_time(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    for name in ("a.tar", "b.tar"):
        write_program_archive(tmp_path / name, "localhost/it:1", program)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    archive = read_archive(tmp_path / "a.tar")
    assert archive.name == "localhost/it:1"
    assert archive == read_archive(tmp_path / "b.tar"), "the same image, wherever the file is"


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (None, "is not an OCI archive"),
        ({"manifests": []}, "0 images in one archive"),
        ({"manifests": [{"digest": "sha256:0"}]}, "has no name"),
    ],
)
def test_an_archive_that_is_none_is_refused(tmp_path: Path, index: object, complaint: str) -> None:
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as archive:
        if index is not None:
            file = tmp_path / "index.json"
            file.write_text(json.dumps(index))
            archive.add(file, "index.json")
    with pytest.raises(ValueError, match=complaint):
        read_archive(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match="is not an OCI archive"):
        read_archive(path)


# What a machine must have


def test_missing_packages_are_named_for_apt() -> None:
    packages = (DebianPackage("there", ("sh",)), DebianPackage("not-there", ("no-such-program",)))
    assert missing_packages(packages) == ["not-there"]
    assert {p.name for p in DEBIAN_PACKAGES} >= {"runc", "containernetworking-plugins", "iptables"}


def test_a_machine_with_cgroup_version_2_only_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("")
    for slice_name in ("system.slice", "memory"):
        folder = tmp_path / slice_name
        folder.mkdir()
        for file in ("cgroup.procs", "cgroup.controllers"):
            (folder / file).write_text("")
    assert cgroup_hierarchies(tmp_path) == []
    monkeypatch.setattr(needs, "missing_packages", list)
    monkeypatch.setattr(needs, "cgroup_hierarchies", list)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(NotPossibleHere, match="runs on version 1 only"):
        needs.require_machine()


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotPossibleHere, match="needs root"):
        needs.require_machine()


def test_what_is_missing_skips_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="run `make cluster-deps`"):
        not_possible("packages are missing: run `make cluster-deps`")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="run `make cluster-deps`"):
        not_possible("packages are missing: run `make cluster-deps`")


def test_a_failed_command_says_what_it_said() -> None:
    with pytest.raises(CommandFailed, match="exit status 3: it broke") as caught:
        run("sh", "-c", "echo it broke >&2; exit 3")
    assert (caught.value.status, caught.value.output) == (3, "it broke")


def test_a_command_that_does_not_end_has_failed_too() -> None:
    with pytest.raises(CommandFailed, match=r"sleep 1000: did not end in time: killed after 0\.1 s") as caught:
        run("sleep", "1000", timeout_seconds=0.1)
    assert caught.value.status is None
