"""The vision model answers questions about pictures, through the torch backend and the processor of its files."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from neuron_runtime import LLM, RequestOutput, SamplingParams
from neuron_runtime.inspection import inspect_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "vision-model"
TRAINING: dict[str, Any] = json.loads((FOLDER / "training.json").read_bytes())
SIZES = ((96, 96), (640, 480), (101, 77), (333, 250), (101, 150), (1203, 901), (48, 33), (200, 199))
"""Of pictures, in pixels; the model sees all of them with at most 48."""


@pytest.fixture(scope="module")
def train() -> Iterator[ModuleType]:
    """The module examples/vision-model/train.py, a program outside any package."""
    spec = importlib.util.spec_from_file_location("vision_model_train", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        patch.setattr(sys, "dont_write_bytecode", True)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(FOLDER), max_num_seqs=8, max_model_len=256) as model:
        yield model


def user(question: str, picture: bytes = b"") -> dict[str, Any]:
    """A message, as a page for chats sends it."""
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    shown = [{"type": "image_url", "image_url": {"url": url}}] if picture else []
    return {"role": "user", "content": [{"type": "text", "text": question}, *shown]}


def ask(llm: LLM, chats: Sequence[Sequence[dict[str, Any]]]) -> list[RequestOutput]:
    asked: Any = chats
    return llm.chat(asked, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)


def answers(llm: LLM, *chats: Sequence[dict[str, Any]]) -> list[str]:
    return [one.outputs[0].text for one in ask(llm, chats)]


def file(image: Image.Image, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    image.save(held, kind)
    return held.getvalue()


def drawn(train: ModuleType, rng: random.Random, width: int, height: int) -> tuple[Any, bytes]:
    """A scene of other seeds than the training's, and the file of a picture of so many pixels."""
    scale = max(width, height) / train.LONGEST
    scene = train.filled(rng, width / scale, height / scale)
    return scene, file(train.draw(scene, scale))


def test_most_answers_about_unseen_pictures_of_any_size_are_right(train: ModuleType, llm: LLM) -> None:
    rng, chats, expected = random.Random(7), [], []
    for size in SIZES:
        scene, picture = drawn(train, rng, *size)
        for kind in train.ASK:
            question, answer = kind(scene, rng)
            chats.append([user(question, picture)])
            expected.append(answer)
    found = answers(llm, *chats)
    wrong = [(one, other) for one, other in zip(found, expected, strict=True) if one != other]
    assert len(wrong) <= 2 * len(expected) * (1 - train.REQUIRED), wrong
    # No answer is so frequent that it could be given without a look.
    assert max(map(expected.count, expected)) <= len(expected) // 4


def test_the_answer_of_the_docs_is_given_and_true(train: ModuleType, llm: LLM) -> None:
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    told = re.findall(r"^  > (.*)\n  (.*)$", page, re.MULTILINE)
    assert told
    picture = (FOLDER / "shapes.png").read_bytes()
    assert answers(llm, *([user(question, picture)] for question, _ in told)) == [answer for _, answer in told]
    assert told[0][1] == train.upper(train.listed(train.PICTURE.groups())) + "."
    assert picture == file(train.draw(train.PICTURE, 10))


def test_a_question_after_an_answer_is_about_the_same_picture(train: ModuleType, llm: LLM) -> None:
    seen = file(train.draw(train.PICTURE, 7.3), "JPEG")
    chat = [user("What colour is the circle?", seen), {"role": "assistant", "content": "The circle is red."}]
    assert answers(llm, [*chat, user("How many squares are there?")]) == ["There are two squares."]


def test_without_a_picture_the_model_says_that_it_sees_none(train: ModuleType, llm: LLM) -> None:
    assert answers(llm, [user("What is in the picture?")]) == [train.NO_PICTURE]


def test_a_chat_has_the_tokens_of_the_training(train: ModuleType, llm: LLM) -> None:
    picture = file(train.draw(train.PICTURE, 3))
    question, answer = "What colour is the circle?", "The circle is red."
    chat = [{"role": "system", "content": "Answer briefly."}, user(question, picture)]
    (found,) = ask(llm, [chat])
    encoder = train.Encoder(llm.get_tokenizer().backend_tokenizer)
    sample = encoder([(question, answer)], train.in_place(48, 40), system="Answer briefly.")
    begin = sample.generated.index(True)
    assert [*found.prompt_token_ids, *found.outputs[0].token_ids] == sample.ids
    assert len(found.prompt_token_ids) == begin


def test_the_model_is_small_and_what_its_training_wrote(train: ModuleType) -> None:
    facts = inspect_model(f"file://{FOLDER}")
    assert (facts.architecture, facts.dtype) == ("LlavaForConditionalGeneration", "bfloat16")
    assert facts.parameters == TRAINING["parameters"]
    assert TRAINING["right"] >= train.REQUIRED
    assert TRAINING["cpuSeconds"] <= 60 * 60
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000
    for name, content in train.FILES.items():
        assert json.loads((FOLDER / name).read_bytes()) == content
    assert (FOLDER / "chat_template.jinja").read_text(encoding="utf-8") == train.CHAT_TEMPLATE
