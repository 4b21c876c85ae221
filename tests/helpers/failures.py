"""The failures of tests/cases/failures.yaml: what the docs say about each, and what its message must say. Read by the
tests that induce them; `make generate` writes them into docs/troubleshooting.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

CASES = Path(__file__).parents[1] / "cases" / "failures.yaml"


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    reason: str
    what: str
    """What happened, for the docs."""
    says: str
    """Part of the message; `...` stands for anything."""
    ends: str
    """What ends it, for the docs."""
    shown_by: str = "failures.py"
    """The file of tests/cluster that induces it; contract/test_failures.py shows it without a cluster."""

    def is_said_in(self, message: str) -> bool:
        """Whether a condition's message says it, and ends with the section of its reason."""
        pattern = ".*".join(map(re.escape, self.says.split("...")))
        return bool(re.search(f"{pattern}.*#{self.reason.lower()}$", message))


FAILURES = {one.name: one for one in msgspec.convert(yaml.safe_load(CASES.read_text()), list[Failure])}


OTHER_REASONS = {
    "AdapterMismatch": "neuron_runtime/test_adapters.py",
    "DraftMismatch": "neuron_operator/test_draft_models.py",
    "TooManyAdapters": "neuron_operator/test_neuronadapter.py",
    "AdapterNotLoaded": "neuron_operator/test_neuronadapter.py",
    "AdapterNotSupported": "neuron_runtime/test_adapters.py",
    "AdaptersNotServed": "neuron_operator/test_neuronadapter.py",
    "ArtifactMissing": "neuron_operator/test_compile_step.py",
    "ArtifactUnusable": "neuron_operator/test_vllm.py",
    "Checking": "cluster/test_operator_api_server.py",
    "Compiling": "neuron_operator/test_compile_step.py",
    "ConversionFailed": "neuron_operator/test_converting.py",
    "Converting": "neuron_operator/test_converting.py",
    "CrashLoop": "neuron_operator/test_why.py",
    "DeviceFailed": "neuron_operator/test_groups.py",
    "DeviceUnhealthy": "neuron_operator/test_nodes.py",
    "Draining": "neuron_operator/test_why.py",
    "DriverIncompatible": "neuron_runtime/test_nxdi_loading.py",
    "Evicted": "neuron_operator/test_why.py",
    "Fetching": "neuron_operator/test_fetching.py",
    "GroupIncomplete": "neuron_runtime/test_group_commands.py",
    "InvalidAdapter": "neuron_runtime/test_adapters.py",
    "ModelTooLarge": "neuron_operator/test_plan_command.py",
    "NameTaken": "neuron_operator/test_neuronadapter.py",
    "NoSuchModel": "neuron_operator/test_neuronadapter.py",
    "RankTooHigh": "neuron_runtime/test_adapters.py",
    "Resolving": "cluster/test_operator_api_server.py",
    "RestartBudgetExhausted": "cluster/test_operator_groups.py",
    "RolledBack": "cluster/test_operator_api_server.py",
    "RollingOut": "neuron_operator/test_rollout.py",
    "StorageNotConfigured": "neuron_operator/test_compile_step.py",
    "TargetsNotServed": "neuron_runtime/test_adapters.py",
    "WeightsMissing": "neuron_runtime/test_weights_remote.py",
}
"""The reasons of docs/troubleshooting.md that no failure above has, and the file of tests/ that shows each."""


def check_says(name: str, condition: dict[str, Any]) -> None:
    failure = FAILURES[name]
    assert condition["reason"] == failure.reason, condition
    assert failure.is_said_in(condition["message"]), condition
