"""Keeps results of pure functions of a manifest with the parsed manifest: passes ask for the same again and again.

Decorates functions in `revision` and `render`. A result is shared: nobody changes what such a function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import is_not
from typing import TypeVar, TypeVarTuple

from neuron_operator.api.model import NeuronModel

Others = TypeVarTuple("Others")
Result = TypeVar("Result")


def remembered(
    function: Callable[[NeuronModel, *Others], Result],
) -> Callable[[NeuronModel, *Others], Result]:
    """Computes the result again only if another argument is not the object that it was last time."""

    @wraps(function)
    def recall(model: NeuronModel, *others: *Others) -> Result:
        last = model.remembered.get(function)
        if last is None or any(map(is_not, last[0], others)):
            last = model.remembered[function] = others, function(model, *others)
        result: Result = last[1]
        return result

    return recall
