"""The tokens of pictures are those of the processors of transformers, for each family."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from transformers import AutoImageProcessor

from helpers.picture_models import MODELS, PictureModel, write_picture_model
from neuron_runtime.config import MediaOptions, TextOptions
from neuron_runtime.core import BackendLimits
from neuron_runtime.errors import InvalidRequest, Overloaded
from neuron_runtime.pictures.families import family_of
from neuron_runtime.pictures.reader import PixelRoom, load_reader
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.pictures.tiling import Tiling
from neuron_runtime.requests.admission import Admission, Admissions
from neuron_runtime.requests.chats import Chat, ChatTurn
from neuron_runtime.requests.options import CompletionOptions
from neuron_runtime.requests.targets import Targets
from neuron_runtime.requests.texts import load_text

SIZES = [(24, 16), (7, 61), (33, 32), (1, 1), (200, 150)]
PROCESSORS = {
    "pixtral": ("pixtral", "PixtralProcessor"),
    "mistral3": ("pixtral", "PixtralProcessor"),
    "qwen2.5-vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3-vl": ("qwen3_vl", "Qwen3VLProcessor"),
    "gemma3": ("gemma3", "Gemma3Processor"),
    "llama4": ("llama4", "Llama4Processor"),
}
LENGTH = 4096
SEES = BackendLimits(
    max_rows=2,
    max_model_length=LENGTH,
    max_step_tokens=LENGTH,
    block_size=LENGTH,
    num_blocks=2,
    max_pictures=4,
)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of transformers that only write tokens import it, and do without."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = None
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers.models."):
            del sys.modules[name]


def theirs(name: str, folder: Path, model: PictureModel) -> Any:
    """The processor of transformers, with what writes the tokens of a picture."""
    kind, of_class = PROCESSORS[name]
    module = importlib.import_module(f"transformers.models.{kind}.processing_{kind}")
    processor = getattr(module, of_class).__new__(getattr(module, of_class))
    if name == "llama4":
        # Theirs needs torchvision. test_picture_tiling.py compares it.
        tiling = Tiling(model.preprocessor, 16)
        processor.image_processor = lambda images, **options: tiling(images[0])
        processor.downsample_ratio = 4
    else:
        processor.image_processor = AutoImageProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
    vars(processor).update({"patch_size": 0, "spatial_merge_size": 1, **model.processor})
    vars(processor).update(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    if "qwen" in name:
        processor.image_token = "<|image_pad|>"
    if name == "gemma3":
        tokens = "<image_soft_token>" * model.processor["image_seq_length"]
        processor.full_image_sequence = f"\n\n<start_of_image>{tokens}<end_of_image>\n\n"
    return processor


def admission_of(folder: Path, limits: BackendLimits = SEES) -> Admission:
    text = load_text(folder, TextOptions())
    reader = load_reader(folder, text.tokenizer, MediaOptions(), limits.max_pictures)
    return Admissions(text, limits, Targets(("m",)), 4, pictures=reader).of(None)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_chat_has_the_tokens_of_their_processor(name: str, tmp_path: Path, torchvision: None) -> None:
    model = MODELS[name]
    admission = admission_of(write_picture_model(tmp_path, model))
    processor, family = theirs(name, tmp_path, model), family_of(model.config)
    assert family is not None
    more = family.options(model.config)
    for size, other in zip(SIZES, reversed(SIZES), strict=True):
        images = [Image.new("RGB", one, "red") for one in (size, other)]
        content = ["Look: ", PictureAt(images[0], "a"), "and\n", PictureAt(images[1], "b"), "Which is larger?\n"]
        chat = Chat([ChatTurn("user", content, "messages[0]")])
        ask = admission.chat(chat)
        text = admission.chat_text(chat)
        for image in images:
            made = processor.image_processor(images=[image], return_tensors="np", **more)
            written = processor.replace_image_token(made, 0)
            text = text.replace(family.placeholder, written.replace(family.placeholder, "\ue000"), 1)
        expected = admission.tokenizer.encode(text.replace("\ue000", family.placeholder), add_special_tokens=False)
        assert ask.prompts == (expected,)
        feature = admission.tokenizer.id_of(family.feature)
        inside = {at for one in ask.pictures[0] for at in range(one.start, one.end)}
        assert {at for at, token in enumerate(expected) if token == feature} <= inside


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_prompt_with_placeholders_has_the_tokens_of_the_chat(name: str, tmp_path: Path) -> None:
    admission = admission_of(write_picture_model(tmp_path, MODELS[name]))
    image = Image.new("RGB", (20, 30), "blue")
    chat = Chat([ChatTurn("user", ["What is it? ", PictureAt(image, "a")], "messages[0]")])
    options = CompletionOptions(add_special_tokens=False)
    ask = admission.completion(admission.chat_text(chat), options, [PictureAt(image, "a")])
    assert (ask.prompts, ask.pictures[0][0].digest) == (
        admission.chat(chat).prompts,
        admission.chat(chat).pictures[0][0].digest,
    )
    with pytest.raises(InvalidRequest, match="which stands for a picture, and 2 pictures"):
        admission.completion(admission.chat_text(chat), options, [PictureAt(image, "a")] * 2)
    ids = list(admission.tokenizer.encode(admission.chat_text(chat), add_special_tokens=False))
    if name != "gemma3":  # whose placeholder is not what the tokens take the place of
        assert admission.completion(ids, options, [PictureAt(image, "a")]).prompts == ask.prompts


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_client_cannot_write_what_stands_for_a_picture(name: str, tmp_path: Path) -> None:
    admission = admission_of(write_picture_model(tmp_path, MODELS[name]))
    family = family_of(MODELS[name].config)
    assert family is not None
    for mark in family.marks:
        with pytest.raises(InvalidRequest, match="which stands for a picture"):
            admission.chat(Chat([ChatTurn("user", f"Say {mark}!", "messages[0]")]))


def test_a_picture_of_qwen_stands_right_behind_the_token_that_opens_it(tmp_path: Path) -> None:
    admission = admission_of(write_picture_model(tmp_path, MODELS["qwen3-vl"]))
    pictures = [PictureAt(Image.new("RGB", (20, 30), "blue"), "a")]
    start, end, pad = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
    options = CompletionOptions(add_special_tokens=False)
    admission.completion(f"See {start}{pad}{end}", options, pictures)
    for text, message in (
        (f"See {pad}{end}", "has 0 times <|vision_start|>"),
        (f"See {start}{pad}{end} {start}", "has 2 times <|vision_start|>"),
        (f"See {start} {pad}{end}", "must have <|vision_start|> right before each <|image_pad|>"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(message)):
            admission.completion(text, options, pictures)


def test_pictures_of_a_request_have_at_most_as_many_tokens_as_a_backend_takes(tmp_path: Path) -> None:
    admission = admission_of(write_picture_model(tmp_path), replace(SEES, max_tokens_of_pictures=60))
    pictures = [PictureAt(Image.new("RGB", (20, 30), "blue"), at) for at in ("first", "second")]
    options = CompletionOptions(add_special_tokens=False)
    (one,) = admission.completion("[IMG]", options, pictures[:1]).pictures[0]
    assert 30 < one.num_tokens <= 60
    with pytest.raises(InvalidRequest, match=r"`second` is the last of pictures that have .* at most 60 of all"):
        admission.completion("[IMG][IMG]", options, pictures)


def test_pixels_that_are_read_have_a_bound_until_they_are_dropped(tmp_path: Path) -> None:
    folder = write_picture_model(tmp_path)
    tokenizer, room = load_text(folder, TextOptions()).tokenizer, PixelRoom(20_000)
    reader = load_reader(folder, tokenizer, MediaOptions(), 4, room=room)
    assert reader is not None
    pictures = [PictureAt(Image.new("RGB", (20, 30), "blue"), at) for at in ("first", "second", "third")]
    held = reader.read(pictures[:1])
    assert 7_000 < room.num_bytes == len(held[0].pixels) < 10_000
    with pytest.raises(Overloaded, match="pictures of other requests"):
        reader.read(pictures[:2])
    del held
    assert room.num_bytes == 0
    with pytest.raises(
        InvalidRequest, match=r"`third` is one of pictures that have \d+ bytes .* max 20000: send fewer"
    ):
        reader.read(pictures)
    assert room.num_bytes == 0
