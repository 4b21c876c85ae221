"""The arguments of `kubectl neuron`."""

from __future__ import annotations

import pytest

from neuron_operator.kubectl.command import parsed

FLAGS = ["-n", "team", "--temperature", "0"]


@pytest.mark.parametrize(
    "arguments", [["chat", "Who?", *FLAGS], ["chat", *FLAGS, "Who?"], ["chat", *FLAGS[:2], "Who?", *FLAGS[2:]]]
)
def test_a_question_stands_before_behind_or_between_flags(arguments: list[str]) -> None:
    options = parsed(["chat", *arguments])
    assert (options.name, options.question, options.namespace, options.temperature) == ("chat", "Who?", ["team"], 0)


def test_a_chat_needs_no_question() -> None:
    assert parsed(["chat", "chat", *FLAGS]).question is None


@pytest.mark.parametrize(
    "arguments",
    [["chat", "chat", "-n", "team", "Who?", "Why?"], ["why", "chat", "-n", "team", "x"], ["why", "c", "--x"]],
)
def test_other_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(arguments)
    assert "unrecognized arguments" in capsys.readouterr().err
