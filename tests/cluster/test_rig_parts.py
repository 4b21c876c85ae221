"""Parts of the test cluster that need no cluster: sizes of devices, the cache, pinned programs, requirements."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.conftest import not_possible
from cluster.rig import host_state, needs
from cluster.rig.binaries import BUILD_FOLDER, COMPONENTS, Cut, pinned_version
from cluster.rig.cache import Cache, content_key
from cluster.rig.cache import main as cache_main
from cluster.rig.needs import DEBIAN_PACKAGES, DebianPackage, NotPossibleHere, cgroup_hierarchies, missing_packages
from cluster.rig.neuron_devices import (
    CORE_RESOURCE,
    DEVICE_RESOURCE,
    InvalidSize,
    allocate,
    resource_ids,
)
from cluster.rig.topology import NeuronHardware

INF2_24XLARGE = NeuronHardware(num_devices=6, cores_per_device=2)


@given(st.sampled_from([DEVICE_RESOURCE, CORE_RESOURCE]), st.data())
def test_any_size_between_one_and_all_is_refused(resource: str, data: st.DataObject) -> None:
    known = resource_ids(INF2_24XLARGE, resource)
    chosen = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=2, max_size=len(known) - 1))
    with pytest.raises(InvalidSize, match="invalid without the k8s-neuron-scheduler"):
        allocate(INF2_24XLARGE, resource, chosen)


def test_what_a_cluster_changes_on_the_machine_is_put_back(tmp_path: Path) -> None:
    """But not what somebody else has changed since."""
    sysctls, file = tmp_path / "sys", tmp_path / "before.json"
    for name, before in (("vm/overcommit_memory", "0"), ("kernel/panic", "5"), ("kernel/panic_on_oops", "0")):
        (sysctls / name).parent.mkdir(parents=True, exist_ok=True)
        (sysctls / name).write_text(f"{before}\n")
    host_state.record(file, tmp_path, sysctls)
    for name, value in host_state.OF_KUBELETS.items():
        (sysctls / name).write_text(value)
    host_state.record(file, tmp_path, sysctls)  # a second start knows nothing of what was before
    (sysctls / "kernel/panic").write_text("20")
    host_state.put_back(file, tmp_path, sysctls)
    found = [(sysctls / name).read_text() for name in host_state.OF_KUBELETS]
    assert found == ["0", "20", "0"]
    host_state.put_back(file, tmp_path, sysctls)


# Cache


def test_a_cache_entry_is_built_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    made = []

    def build(folder: Path) -> None:
        made.append(folder)
        (folder / "program").write_text("it")

    first = cache.entry("bin", "it", "k1", build)
    assert cache.entry("bin", "it", "k1", build) == first
    assert ((first / "program").read_text(), len(made)) == ("it", 1)


def test_a_failed_build_leaves_no_cache_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")

    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise NotPossibleHere("no Go")

    with pytest.raises(NotPossibleHere):
        cache.entry("bin", "it", "k1", build)
    assert cache.find("bin", "it", "k1") is None
    assert list((cache.root / "bin").iterdir()) == []


def test_two_concurrent_runs_build_an_entry_once(tmp_path: Path) -> None:
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


def test_the_cache_key_depends_on_content_names_and_modes(tmp_path: Path) -> None:
    def key(name: str, text: str, mode: int) -> str:
        folder = tmp_path / f"{name}-{text}-{mode}"
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / name).chmod(mode)
        return content_key("flags", folder)

    keys = [key("a", "x", 0o644), key("b", "x", 0o644), key("a", "y", 0o644), key("a", "x", 0o755)]
    assert len(set(keys)) == 4
    assert content_key("ab", "c") != content_key("a", "bc")


def test_clear_refuses_a_foreign_folder(
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
def test_every_component_is_pinned_and_names_no_registry_host(name: str) -> None:
    files = {file.name: file.read_text() for file in (BUILD_FOLDER / name).iterdir()}
    assert "://" not in files["go.mod"] + files.get("go.sum", "")
    component = COMPONENTS[name]
    assert bool(pinned_version(component)) == bool(component.version_module)


SCALERS = """switch kind {
\tcase "queue":
\t\treturn queue()
\tcase "prometheus":
\t\treturn prometheus()
\tdefault:
\t\treturn nothing()
\t}
}
"""


def test_what_is_cut_out_of_a_module_is_neither_compiled_nor_named(tmp_path: Path) -> None:
    for name in ("queue.go", "prometheus.go", "build.go"):
        (tmp_path / name).write_text(SCALERS)
    cut = Cut(folder=".", files=("build.go", "prometheus.go"), switch="build.go", cases=("prometheus",))
    cut.apply(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build.go", "prometheus.go"]
    left = SCALERS.replace('\tcase "queue":\n\t\treturn queue()\n', "")
    assert (tmp_path / "build.go").read_text() == left
    with pytest.raises(ValueError, match="has changed"):
        dataclasses.replace(cut, cases=("queue",)).apply(tmp_path)


# Images


# Requirements of the machine


def test_missing_debian_packages_are_named() -> None:
    packages = (DebianPackage("there", ("sh",)), DebianPackage("not-there", ("no-such-program",)))
    assert missing_packages(packages) == ["not-there"]
    assert {p.name for p in DEBIAN_PACKAGES} >= {"runc", "containernetworking-plugins", "iptables"}


def test_a_machine_with_only_cgroup_version_2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_user_without_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotPossibleHere, match="needs root"):
        needs.require_machine()


def test_a_missing_prerequisite_skips_locally_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="run `make cluster-deps`"):
        not_possible("packages are missing: run `make cluster-deps`")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="run `make cluster-deps`"):
        not_possible("packages are missing: run `make cluster-deps`")
