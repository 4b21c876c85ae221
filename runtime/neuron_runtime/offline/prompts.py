"""Reads the forms of prompts and parameters that `LLM` accepts. Used by `llm`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.sources import PictureAt

IMAGE = "multi_modal_data['image']"

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, either with a `cache_salt` and,
for models that see pictures, with `multi_modal_data`: `{"image": image}`, or a list of them, and as many placeholders
in the prompt."""


def listed(prompts: Any) -> list[Prompt]:
    """One or several prompts as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    values = list(prompts)
    return [values] if values and hasattr(values[0], "__index__") else values


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Fields of a completion body for a prompt, and `text` if the prompt has both text and ids."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt": _token_ids(prompt)}
    fields = {name: value for name, value in prompt.items() if value is not None}
    text, token_ids, salt = (fields.pop(name, None) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    pictures = _pictures(fields.pop("multi_modal_data", {}))
    for name in fields:
        raise InvalidRequest.at(name, "of a prompt is not supported yet: leave it out")
    if text is None and token_ids is None:
        raise InvalidRequest("a prompt needs `prompt` or `prompt_token_ids`", field="prompt")
    prompt = text if token_ids is None else _token_ids(token_ids)
    return {"prompt": prompt, "text": text, "cache_salt": salt, "pictures": pictures}


def _pictures(media: Any) -> list[PictureAt]:
    """One image, or a list of them."""
    if not isinstance(media, Mapping):
        raise InvalidRequest.at("multi_modal_data", 'must be a dict, such as `{"image": image}`')
    for kind, given in media.items():
        if kind != "image" and given:
            raise InvalidRequest.at(f"multi_modal_data[{kind!r}]", "is not supported yet: only `image` is")
    images = media.get("image")
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        return [PictureAt(images, IMAGE)]
    return [PictureAt(one, f"{IMAGE}[{at}]") for at, one in enumerate(images)]


def _token_ids(values: Any) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in values]
    except TypeError as error:
        message = "a prompt is a text, token ids, or a dict with `prompt` or `prompt_token_ids`"
        raise InvalidRequest(message, field="prompt") from error


def one_each(given: Any, count: int, default: Callable[[], Any], name: str) -> list[Any]:
    """One value per prompt, from one for all, one per prompt, or none."""
    if given is None or not isinstance(given, Iterable):
        return [default() if given is None else given] * count
    values = list(given)
    if len(values) != count:
        raise InvalidRequest.at(name, f"has {len(values)} values for {count} prompts")
    return values


@contextmanager
def naming_prompt(number: int, count: int) -> Iterator[None]:
    """Add the prompt's index to errors about one of several prompts."""
    try:
        yield
    except InvalidRequest as error:
        if count == 1:
            raise
        raise InvalidRequest(f"prompt {number}: {error}", error.field, error.status, error.code) from error
