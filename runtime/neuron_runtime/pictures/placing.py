"""Puts the tokens of pictures where a prompt has a place for each of them. Pure functions; called by admission.

A place is where the chat template writes one. The text of a client cannot make another: the number of places must be
that of the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuron_runtime.core import Picture
from neuron_runtime.errors import InvalidRequest
from neuron_runtime.pictures.families import Family
from neuron_runtime.pictures.reader import ReadPicture
from neuron_runtime.text.tokenizer import Tokenizer


def check_places(text: str, family: Family, num_pictures: int, name: str) -> None:
    """Raises InvalidRequest unless the text has a place for each picture, and no other."""
    _check_number(text.count(family.placeholder), family.placeholder, num_pictures, name)


def find_seeds(
    token_ids: Sequence[int], family: Family, tokenizer: Tokenizer, num_pictures: int, name: str
) -> list[int]:
    """Where the tokens of each picture will be. Raises InvalidRequest."""
    seed, feature = tokenizer.id_of(family.seed), tokenizer.id_of(family.feature)
    seeds = [at for at, token in enumerate(token_ids) if token == seed]
    _check_number(len(seeds), family.seed, num_pictures, name)
    if feature != seed:
        _check_number(token_ids.count(feature), family.feature, 0, name)
    if family.opening:
        opening = tokenizer.id_of(family.opening)
        _check_number(token_ids.count(opening), family.opening, num_pictures, name)
        if any(at == 0 or token_ids[at - 1] != opening for at in seeds):
            raise InvalidRequest.at(name, f"must have {family.opening} right before each {family.seed}")
    return seeds


def place(
    token_ids: Sequence[int], seeds: Sequence[int], pictures: Sequence[ReadPicture], tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """The prompt with the tokens of the pictures, and where they are."""
    known = {token: tokenizer.id_of(token) for token in {one for picture in pictures for one in picture.tokens}}
    whole, placed, begin = list[int](), list[Picture](), 0
    for seed, picture in zip(seeds, pictures, strict=True):
        whole += token_ids[begin:seed]
        placed.append(Picture(picture.digest, len(whole), len(picture.tokens), picture.pixels))
        whole += [known[token] for token in picture.tokens]
        begin = seed + 1
    return (*whole, *token_ids[begin:]), tuple(placed)


def _check_number(found: int, token: str, num_pictures: int, name: str) -> None:
    if found != num_pictures:
        problem = f"has {found} times {token}, which stands for a picture, and {num_pictures} pictures"
        cure = "leave it out of the texts" if found > num_pictures else "the chat template does not show all pictures"
        raise InvalidRequest.at(name, f"{problem}: {cure}")
