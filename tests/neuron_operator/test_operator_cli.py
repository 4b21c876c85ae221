"""The command line of the operator before it starts."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from neuron_operator.__main__ import main


def test_without_a_command_usage_is_printed_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["dance"]) == 2
    assert "neuron-operator COMMAND" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "local -f FILE" in capsys.readouterr().out


def test_an_unusable_setting_ends_with_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_OPERATOR_RUNTIME_IMAGE", raising=False)
    assert main(["run"]) == 2
    assert main(["run", "--runtime-image", "x", "--lease-seconds", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("neuron-operator: --") for line in lines] == [True, True]


def test_a_missing_cluster_ends_with_code_1_and_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["run", "--runtime-image", "x", "--kubeconfig", "/does/not/exist"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("neuron-operator: no kubeconfig at /does/not/exist; set KUBECONFIG or pass --kubeconfig")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"neuron-operator {version('neuron-serving')}\n"
