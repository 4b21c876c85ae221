"""A field is declared once: its flag, its parser and its help."""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from neuron_runtime.flags import Flag, add_flags, fields_of, json_or_text


class Part(msgspec.Struct, rename="camel"):
    num_things: Annotated[int, Meta(ge=1), "How many", Flag("things")] = 3
    share: Annotated[float, "Which part", Flag()] = 1.0


class Keyed(msgspec.Struct, rename="camel"):
    num_more: Annotated[int, "How many more"] = 1


def keyed(given: Any) -> dict[str, Any]:
    return {"numMore": (json_or_text(given) if isinstance(given, str) else given)["more"]}


class Whole(msgspec.Struct, rename="camel"):
    names: Annotated[tuple[str, ...], "Names", Flag(default="from `MODEL`")]
    kind: Annotated[Literal["", "a", "b"], "Of `a` or `b`", Flag()] = ""
    switch: Annotated[Literal["auto", "enabled", "disabled"], "On or off", Flag()] = "auto"
    loud: Annotated[bool, "Say more", Flag()] = False
    origins: Annotated[tuple[str, ...], "Where from", Flag(metavar="JSON", read=json_or_text)] = ()
    inner: Annotated[str, "Only in the document"] = ""
    part: Part = msgspec.field(default_factory=Part)
    keyed: Annotated[Keyed, "As an object", Flag(metavar="JSON", read=keyed)] = msgspec.field(default_factory=Keyed)


FIELDS = {field.path: field for field in fields_of(Whole)}


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser()
    add_flags(flags, FIELDS.values())
    return flags


def test_flag_names_follow_field_paths_and_fields_without_a_flag_have_none() -> None:
    top = ["names", "kind", "switch", "loud", "origins", "inner"]
    assert list(FIELDS) == [*top, "part.numThings", "part.share", "keyed", "keyed.numMore"]
    assert FIELDS["part.numThings"].option == "--things"
    assert "inner" not in vars(parser().parse_args([]))


def test_an_absent_flag_is_none() -> None:
    assert set(vars(parser().parse_args([])).values()) == {None}


@pytest.mark.parametrize(
    ("path", "words", "value"),
    [
        ("names", ["--names", "x", "y"], ["x", "y"]),
        ("kind", ["--kind", "b"], "b"),
        ("switch", ["--switch"], "enabled"),
        ("switch", ["--no-switch"], "disabled"),
        ("loud", ["--no-loud"], False),
        ("origins", ["--origins", '["x", "y"]'], ["x", "y"]),
        ("origins", ["--origins", "x"], ["x"]),
        ("part.numThings", ["--things", "7"], 7),
        ("part.numThings", ["--things", "1.5k"], 1500),
        ("part.numThings", ["--things", "2K"], 2048),
        ("part.share", ["--share", "0.5"], 0.5),
        ("keyed", ["--keyed", '{"more": 2}'], {"numMore": 2}),
    ],
)
def test_a_flag_is_parsed_by_the_type_of_its_field(path: str, words: list[str], value: Any) -> None:
    field = FIELDS[path]
    assert field.read(getattr(parser().parse_args(words), field.argument)) == value


def test_an_argument_for_a_whole_part_is_read_as_its_flag_is() -> None:
    assert FIELDS["keyed"].read({"more": 2}) == {"numMore": 2}


def test_the_help_shows_description_choices_and_default() -> None:
    text = " ".join(parser().format_help().split())
    assert "--names NAME [NAME ...] Names (default: from MODEL)" in text
    assert "--kind a|b Of a or b (default: none)" in text
    assert "--loud, --no-loud Say more (default: off)" in text
    assert "--things N How many (default: 3)" in text
    assert "--share N Which part (default: 1)" in text


@pytest.mark.parametrize("text", ["k", "1.5", "1kk", "x", ""])
def test_what_is_no_number_is_refused_with_examples(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--things={text}"])
    assert "must be a whole number, such as 4096, 4k (4000) or 4K (4096)" in capsys.readouterr().err
