"""The exit codes of runtime and operator are equal: both sides declare them."""

from neuron_operator.api.reasons import Reason
from neuron_runtime.errors import ExitCode


def test_every_exit_code_has_the_reason_of_the_conditions() -> None:
    declared = {code: str(reason) for reason in Reason for code in reason.row.exit_codes}
    assert declared == {int(code): code.reason for code in ExitCode}
