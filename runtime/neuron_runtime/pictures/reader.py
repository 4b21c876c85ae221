"""Turns the pictures of a request into what a model's encoder reads, and into the tokens that stand for them.

Created by the front end and by `LLM` for a model that sees pictures, and only then is transformers imported, if its
processor is needed. Called by admission. Reading takes long and may wait for other machines: not for the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import MediaOptions
from neuron_runtime.errors import ExitCode, FatalError, InvalidRequest, Overloaded
from neuron_runtime.pictures.families import Family, Made, family_of
from neuron_runtime.pictures.fetching import Fetcher
from neuron_runtime.pictures.sources import BROKEN, TOO_LARGE, Fetch, PictureAt, read_source
from neuron_runtime.text.tokenizer import Tokenizer

NUM_AT_ONCE = 2
"""Pictures that are decoded and resized at the same time."""
MAX_READ_BYTES = 512 << 20
"""Of the pixels of all pictures that are read, until the engine has them."""
_RETRY_SECONDS = 1.0
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
"""M_MMAP_THRESHOLD of malloc.h. Setting it also ends its growing."""


@dataclass(frozen=True)
class ReadPicture:
    """A picture as the model gets it."""

    at: str
    tokens: tuple[str, ...]
    digest: str
    pixels: memoryview


def give_memory_back() -> None:
    """Makes the C library give large blocks back when they are freed. Else it keeps those of decoded pictures, for each
    thread its own. For a process of ours alone; without glibc nothing changes."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


class PixelRoom:
    """Bounds the memory of pixels that are read. Those of a picture give theirs back when they are dropped."""

    def __init__(self, max_bytes: int = MAX_READ_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.num_bytes = 0

    def take(self, picture: ReadPicture, num_before: int) -> None:
        """num_before: bytes of the same request.

        Raises Overloaded if those of other requests leave no room; InvalidRequest if there would never be any.
        """
        size = len(picture.pixels)
        if (whole := num_before + size) > self._max_bytes:
            problem = f"is one of pictures that have {whole} bytes as the model reads them, max {self._max_bytes}"
            raise InvalidRequest.at(picture.at, f"{problem}: send fewer")
        with self._lock:
            if self.num_bytes + size > self._max_bytes:
                raise Overloaded("pictures of other requests fill the memory to read them", _RETRY_SECONDS)
            self.num_bytes += size
        weakref.finalize(picture.pixels, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        with self._lock:
            self.num_bytes -= size


@dataclass(frozen=True)
class PictureReader:
    """Reads pictures for one model."""

    family: Family
    options: MediaOptions
    max_pictures: int
    """Of a prompt."""
    process: Callable[[Any], ReadPicture]
    """Of an image of Pillow. Raises ValueError if the model cannot see such a picture."""
    fetch: Fetch
    check_thread: Callable[[], None] = lambda: None
    """Raises what ends an attempt on a thread that must not wait."""
    room: PixelRoom | None = None
    """None: the caller bounds how many pictures there are."""
    note_seconds: Callable[[float], None] = lambda seconds: None
    """Told how long each picture took that was read."""

    def check(self, pictures: Sequence[PictureAt]) -> None:
        """Raises InvalidRequest for too many."""
        if len(pictures) > self.max_pictures:
            at = pictures[self.max_pictures].at
            problem = f"is one picture too many: at most {self.max_pictures} in a request"
            raise InvalidRequest.at(at, problem, TOO_LARGE)

    def read(self, pictures: Sequence[PictureAt]) -> list[ReadPicture]:
        """Raises InvalidRequest, which names the picture, and Overloaded."""
        if pictures:
            self.check_thread()
        found, num_bytes = list[ReadPicture](), 0
        for one in pictures:
            picture = self._read(one)
            if self.room is not None:
                self.room.take(picture, num_bytes)
            found.append(picture)
            num_bytes += len(picture.pixels)
        return found

    def _read(self, picture: PictureAt) -> ReadPicture:
        from neuron_runtime.pictures.decoding import check_pixels, decoded, plain  # noqa: PLC0415 - brings Pillow

        given, at, options, began = picture.given, picture.at, self.options, time.monotonic()
        if isinstance(given, str):
            given = read_source(given, at, options.max_image_bytes, self.fetch)
        with _turns:
            if isinstance(given, bytes):
                image = decoded(given, at, options.max_pixels)
            else:
                image = plain(_of_python(given, at))
                check_pixels(image.size, at, options.max_pixels)
            try:
                made = self.process(image)
            except (ValueError, ArithmeticError) as error:
                # Such as a picture that is two hundred times as long as it is wide.
                raise InvalidRequest.at(at, f"is no picture that this model can see: {error}", BROKEN) from error
        self.note_seconds(time.monotonic() - began)
        return ReadPicture(at, made.tokens, made.digest, made.pixels)


_turns = threading.Semaphore(NUM_AT_ONCE)


def load_reader(
    model_dir: Path,
    tokenizer: Tokenizer,
    options: MediaOptions,
    max_pictures: int,
    *,
    check_thread: Callable[[], None] = lambda: None,
    room: PixelRoom | None = None,
    note_seconds: Callable[[float], None] = lambda seconds: None,
) -> PictureReader | None:
    """For the model in a folder, with the settings of its processor; None: no family knows how it sees pictures.

    max_pictures: of a prompt, by the backend.

    Raises FatalError: INVALID_MODEL if its processor cannot be loaded, or its tokenizer lacks a token of pictures.
    """
    config = read_config(model_dir)
    family = family_of(config)
    if family is None:
        return None
    process = _processing(model_dir, family, config)
    try:
        for token in {*family.marks, *process(_example()).tokens}:
            tokenizer.id_of(token)
    except KeyError as error:
        message = f"{model_dir}: the tokenizer has no token {error.args[0]}, which stands for pictures"
        raise FatalError(ExitCode.INVALID_MODEL, message) from error
    most = min(max_pictures, options.max_images)
    fetch = Fetcher(options.allowed_hosts).fetch
    return PictureReader(family, options, most, process, fetch, check_thread, room, note_seconds)


def _example() -> Any:
    """A picture with tokens of each kind."""
    from PIL import Image  # noqa: PLC0415

    return Image.new("RGB", (640, 480))


def _processing(model_dir: Path, family: Family, config: dict[str, Any]) -> Callable[[Any], ReadPicture]:
    from safetensors.numpy import save  # noqa: PLC0415

    try:
        processor = _tiling(model_dir, config) if family.is_tiled else _of_transformers(model_dir, family, config)
    except Exception as error:
        message = f"{model_dir}: the settings of its pictures (preprocessor_config.json) cannot be used: {error!r:.300}"
        raise FatalError(ExitCode.INVALID_MODEL, message) from error

    def process(image: Any) -> ReadPicture:
        made = processor(image)
        pixels = save({name: made[name] for name in family.tensors})
        tokens = tuple(family.tokens(config, made))
        return ReadPicture("", tokens, hashlib.sha256(pixels).hexdigest(), memoryview(pixels))

    return process


def _of_transformers(model_dir: Path, family: Family, config: dict[str, Any]) -> Callable[[Any], Made]:
    from transformers import AutoImageProcessor  # noqa: PLC0415 - heavy, and brings torch

    processor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
        str(model_dir), local_files_only=True
    )
    more = family.options(config)

    def make(image: Any) -> Made:
        made: Made = processor(images=[image], return_tensors="np", **more)
        return made

    return make


def _tiling(model_dir: Path, config: dict[str, Any]) -> Callable[[Any], Made]:
    from neuron_runtime.pictures.tiling import Tiling  # noqa: PLC0415 - brings Pillow

    return Tiling(_settings(model_dir), int(config["vision_config"]["image_size"]))


def _settings(model_dir: Path) -> dict[str, Any]:
    """Those of the processor of pictures, as transformers 4 or 5 writes them."""
    for name, part in (("processor_config.json", "image_processor"), ("preprocessor_config.json", "")):
        with contextlib.suppress(FileNotFoundError):
            found = msgspec.json.decode((model_dir / name).read_bytes(), type=dict[str, Any])
            settings = found.get(part) if part else found
            if settings is not None:
                return dict(settings)
    raise FileNotFoundError(model_dir / "preprocessor_config.json")


def _of_python(given: Any, at: str) -> Any:
    from PIL import Image  # noqa: PLC0415

    if isinstance(given, Image.Image):
        return given
    try:
        return Image.fromarray(given)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        problem = f"must be a URL, an image of Pillow, an array of bytes or the bytes of a file, got {type(given)}"
        raise InvalidRequest.at(at, problem) from error
