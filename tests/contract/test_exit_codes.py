"""The exit codes of the runtime are a contract with the operator: the numbers and reasons never change silently."""

from neuron_runtime.errors import ExitCode

CONTRACT = {
    2: "InvalidEngineConfig",
    10: "ModelNotFound",
    11: "WeightsUnauthorized",
    12: "UnsupportedArchitecture",
    13: "InvalidModel",
    14: "ChecksumMismatch",
    15: "StorageFull",
    20: "ArtifactMissing",
    21: "CompileFailed",
    22: "CompileOutOfMemory",
    30: "DeviceHeld",
    31: "DeviceOutOfMemory",
    32: "DeviceFailed",
    33: "DeviceFailed",
    34: "DriverIncompatible",
    35: "DevicesNotAdjacent",
    40: "GroupIncomplete",
    41: "GroupIncomplete",
    50: "RestartBudgetExhausted",
}


def test_every_exit_code_has_the_reason_the_conditions_show() -> None:
    assert {int(code): code.reason for code in ExitCode} == CONTRACT
