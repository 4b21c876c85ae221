"""Flags of the benchmarks that take a number, each declared once with its default, meaning and range."""

from __future__ import annotations

import argparse


def add_number(
    parser: argparse._ActionsContainer,
    flag: str,
    default: float | list[int] | list[float] | None,
    metavar: str,
    meaning: str,
    *,
    kind: type[int] | type[float] | None = None,
    positive: bool = False,
    least: float | None = None,
) -> None:
    """The flag's parser refuses a number outside the range.

    Args:
        default: also in the help, unless it is None; a list: the flag takes several numbers.
        kind: of the numbers; None: that of the default.
    """
    defaults = default if isinstance(default, list) else [default]
    number = kind or (int if isinstance(defaults[0], int) else float)

    def read(text: str) -> float:
        value = number(text)
        if positive and not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        if least is not None and not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    read.__name__ = number.__name__  # argparse names it where the text is no number
    shown = "" if default is None else f" ({' '.join(map(str, defaults))})"
    nargs = "+" if isinstance(default, list) else None
    parser.add_argument(flag, type=read, nargs=nargs, default=default, metavar=metavar, help=meaning + shown)
