"""Memory and CPUs of this process: limits of every control group on its path, in both versions, and in containers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.memory_groups import memory_group
from neuron_runtime.backend.torch import before_import
from neuron_runtime.backend.torch.before_import import check_room_for_torch
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.host import FreeMemory, free_memory, memory_limit, num_oom_kills, usable_cpus

MEMINFO = {"proc/meminfo": "MemTotal:      16000 kB\nMemAvailable:   8000 kB\n"}
MACHINE = 8000 * 1024
V2 = "35 24 0:30 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 24 0:31 {top} /sys/fs/cgroup/{name} rw,nosuid shared:9 - cgroup cgroup rw,{name}\n"


def version_2(path: str = "/", top: str = "/") -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2.format(top=top)}


def version_1(path: str = "/", top: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"4:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:/elsewhere\n0::/\n",
        "proc/self/mountinfo": "22 24 0:5 / /proc rw - proc proc rw\n"
        + V1.format(top=top, name="memory")
        + V1.format(top=top, name="cpu,cpuacct"),
    }


def group_2(path: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": str(used), f"{folder}/memory.stat": stat}


def group_1(path: str, limit: int, used: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}/memory."
    return {f"{folder}limit_in_bytes": str(limit), f"{folder}usage_in_bytes": str(used), f"{folder}stat": stat}


FREE = {
    "no control groups": ({}, FreeMemory(MACHINE)),
    "no limit": ({**version_2(), **group_2("", "max", 5)}, FreeMemory(MACHINE)),
    "a container with its own namespace": (
        {**version_2(), **group_2("", "5000", 2000)},
        FreeMemory(3000, 5000),
    ),
    "more used than allowed": ({**version_2(), **group_2("", "5000", 6000)}, FreeMemory(0, 5000)),
    "the page cache is not used": (
        {**version_2(), **group_2("", "5000", 4500, "anon 900\ninactive_file 3000\nactive_file 100\nshmem 400\n")},
        FreeMemory(3600, 5000),
    ),
    "its own group, not the root": (
        {**version_2("/a.slice/b c"), **group_2("", "9000", 0), **group_2("/a.slice/b c", "5000", 1000)},
        FreeMemory(4000, 5000),
    ),
    "a group above it": (
        {**version_2("/pods/one"), **group_2("/pods", "6000", 5900), **group_2("/pods/one", "5000", 1000)},
        FreeMemory(100, 6000),
    ),
    "a group beside it": (
        {**version_2("/pods/one"), **group_2("/pods/two", "10", 5), **group_2("/pods/one", "5000", 1000)},
        FreeMemory(4000, 5000),
    ),
    "a mount that shows only the container's group": (
        {**version_2("/pods/one", "/pods/one"), **group_2("", "5000", 1000)},
        FreeMemory(4000, 5000),
    ),
    "a group within such a mount": (
        {**version_2("/pods/one/in", "/pods/one"), **group_2("", "9000", 0), **group_2("/in", "5000", 1000)},
        FreeMemory(4000, 5000),
    ),
    "a path outside of the namespace": ({**version_2("/../x"), **group_2("", "5000", 1000)}, FreeMemory(4000, 5000)),
    "version 1, the root": (
        {**version_1(), **group_1("", 5000, 1000, "cache 900\ntotal_inactive_file 300\n")},
        FreeMemory(4300, 5000),
    ),
    "version 1, a nested group": (
        {**version_1("/a/b"), **group_1("", 2**63 - 4096, 9), **group_1("/a", 5000, 4900), **group_1("/a/b", 9000, 0)},
        FreeMemory(100, 5000),
    ),
    "version 1, a mount that shows only the container's group": (
        {**version_1("/docker/abc", "/docker/abc"), **group_1("", 5000, 1000)},
        FreeMemory(4000, 5000),
    ),
}


@pytest.mark.parametrize("case", FREE)
def test_free_memory_is_the_least_that_the_machine_and_each_group_on_the_path_leave(case: str, tmp_path: Path) -> None:
    files, expected = FREE[case]
    write(tmp_path, {**MEMINFO, **files})
    assert free_memory(tmp_path) == expected


def test_the_memory_limit_is_the_smallest_on_the_path_if_the_machine_has_more(tmp_path: Path) -> None:
    write(tmp_path, {**MEMINFO, **version_2("/a/b"), **group_2("/a", "6000", 0), **group_2("/a/b", "5000", 0)})
    assert memory_limit(tmp_path) == 5000
    write(tmp_path, {**group_2("/a", "max", 0), **group_2("/a/b", str(2**40), 0)})
    assert memory_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1),
        ({"sys/fs/cgroup/pods/cpu.max": "50000 100000", "sys/fs/cgroup/pods/one/cpu.max": "max 100000"}, 1),
        ({"sys/fs/cgroup/other/cpu.max": "50000 100000"}, None),
    ],
)
def test_cpu_count_respects_the_quota_of_each_group(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    write(tmp_path, {**version_2("/pods/one"), **files})
    assert usable_cpus(tmp_path) == (expected or usable_cpus(tmp_path / "empty"))


@pytest.mark.parametrize(("quota", "expected"), [("100000", 1), ("-1", None)])
def test_cpu_count_respects_a_quota_of_version_1(quota: str, expected: int | None, tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/a"
    write(tmp_path, {**version_1("/a/b"), f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"})
    assert usable_cpus(tmp_path) == (expected or usable_cpus(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({**version_2("/one"), "sys/fs/cgroup/one/memory.events": "oom 4\noom_kill 3\noom_group_kill 0\n"}, 3),
        ({**version_1("/one"), "sys/fs/cgroup/memory/one/memory.oom_control": "under_oom 0\noom_kill 2\n"}, 2),
        (version_2("/one"), 0),
    ],
)
def test_the_kernel_counts_the_processes_that_it_killed(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert num_oom_kills(tmp_path) == expected


@pytest.mark.parametrize("has_cuda", [False, True])
def test_torch_is_not_imported_where_it_does_not_fit(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_import, "_has_cuda", lambda: has_cuda)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    needed = before_import.CUDA_IMPORT_BYTES if has_cuda else before_import.IMPORT_BYTES
    check_room_for_torch(lambda: FreeMemory(needed))
    with pytest.raises(FatalError, match=r"not enough memory to import torch: .* raise the memory limit to") as caught:
        check_room_for_torch(lambda: FreeMemory(needed - 1, 2**30))
    assert caught.value.exit_code is ExitCode.DEVICE_OUT_OF_MEMORY


def test_limits_of_a_real_nested_group_are_found() -> None:
    code = "from neuron_runtime import host as h; print(h.free_memory().limit, h.memory_limit(), h.num_oom_kills())"
    with memory_group(64 * 2**20) as group:
        assert group.output(sys.executable, "-c", code) == f"{64 * 2**20} {64 * 2**20} 0"
        group.output(sys.executable, "-c", "bytearray(100 * 2**20)", code=-9)
        assert group.output(sys.executable, "-c", code) == f"{64 * 2**20} {64 * 2**20} 1"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
