"""instructor: classes from forced calls of a tool, from a JSON schema, and from any JSON, whole and streamed."""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

ASKED: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]


class Report(BaseModel):
    """A report of the weather"""

    city: Literal["Oslo", "Bergen"]
    degrees: int


class Loose(BaseModel):
    """What the model says if nothing but JSON is asked for"""

    city: str
    degrees: str


def structured(client: OpenAI, name: str) -> None:
    report, loose = Report(city="Oslo", degrees=7), Loose(city="Oslo in Norway", degrees="7 C")
    for mode, expected in (
        (instructor.Mode.TOOLS, report),
        (instructor.Mode.TOOLS_STRICT, report),
        (instructor.Mode.JSON_SCHEMA, report),
        (instructor.Mode.JSON, loose),
    ):
        asking = instructor.from_openai(client, mode=mode)
        asked = {"model": name, "messages": ASKED, "response_model": type(expected), "max_retries": 0}
        whole = asking.chat.completions.create(**asked)
        assert whole.model_dump() == expected.model_dump(), (mode, whole)
        *_, streamed = asking.chat.completions.create_partial(**asked)
        assert streamed.model_dump() == expected.model_dump(), (mode, streamed)
    # This mode sends a forced call and a format of the text.
    asking = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    called = asking.responses.create(model=name, input=ASKED, response_model=Report, max_retries=0)
    assert called.model_dump() == report.model_dump(), called


url, name = sys.argv[1:3]
structured(OpenAI(base_url=url, api_key="any", max_retries=0), name)
