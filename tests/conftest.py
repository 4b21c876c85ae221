"""Settings for every test: with CI=true no test may skip, torch uses two threads, and with `--dist loadscope` the tests
of a file stay in one test process.

A property is tried with a few examples; `make test-long` tries many (`--hypothesis-profile=many`). Properties have no
deadline and no limit on the time to draw examples: both would only measure the machine.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling, Scheduling

from cluster.rig.machine import GO_SETTINGS

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", parent=UNTIMED, max_examples=10)
settings.register_profile("many", parent=UNTIMED, max_examples=300)
settings.load_profile("few")

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
for name, value in GO_SETTINGS.items():  # kubectl and helm then take three quarters of their time
    os.environ.setdefault(name, value)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays to the end: to look for garbage in it would take a third of the time in
    which each test process collects the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"nothing may skip in CI, but this test did: {reason}"
    return report


@pytest.fixture(autouse=True)
def _recursion_limit() -> Iterator[None]:
    """A test that runs a command in this process leaves no other limit to those after it: what is too deep for them
    would end the process."""
    before = sys.getrecursionlimit()
    yield
    if sys.getrecursionlimit() != before:
        sys.setrecursionlimit(before)


SHARE_A_LOAD = ("test_board.py", "test_server_metrics_load.py")
"""Files whose tests look at the same run of a server: see `helpers/scripted_load.py`."""


def scope_of(path: PurePath) -> str:
    """The tests of one scope run in one process, one after another: those that use the cluster, those that share a
    load, and those of any other file, so that what a file starts is started once."""
    if path.name in SHARE_A_LOAD:
        return "load"
    uses_the_cluster = path.parent.name == "cluster" and path.name.startswith(("test_rig_", "test_story"))
    return "cluster" if uses_the_cluster else f"{path.parent.name}/{path.name}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scopes that take long begin first: the cluster, then files with slow tests, of these last the ones that need
    programs, which may still be building."""
    slow = {scope_of(item.path) for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        scope = scope_of(item.path)
        return scope != "cluster", scope not in slow, scope.startswith("cluster/")

    for item in items:
        # Building programs takes minutes, once, and must not count towards the limit of a test.
        if item.get_closest_marker("slow") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(float(config.getini("timeout")), func_only=True))
    items.sort(key=place)


class ScopeScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(PurePath(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return ScopeScheduling(config, log) if config.getvalue("dist") == "loadscope" else None
