"""Settings for every test: with CI=true no test may skip, torch uses two threads, and with `--dist loadscope` the tests
that use the cluster stay in one test process.

Properties have no deadline and no limit on the time to draw examples: both would only measure the machine.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling, Scheduling

settings.register_profile("untimed", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"nothing may skip in CI, but this test did: {reason}"
    return report


class ClusterScheduling(LoadScopeScheduling):
    """Tests that use the cluster run one after another. Every other file of its folder starts its own servers and stays
    together. All other tests go to any free process."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.partition("::")[0])
        if "cluster" not in file.parts:
            return nodeid
        return "cluster" if file.name.startswith(("test_rig_", "test_story")) else file.name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return ClusterScheduling(config, log) if config.getvalue("dist") == "loadscope" else None
