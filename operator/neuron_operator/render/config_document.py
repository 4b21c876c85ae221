"""Writes `RuntimeConfig`, the JSON document that configures a serving pod.

Called when a revision is pinned. The runtime parses it strictly (`neuron_runtime.config`; a contract test checks both
sides). Fields that the spec does not set are omitted, so that the runtime's defaults apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from neuron_operator.api.fields import ConfigKey, as_json, walk
from neuron_operator.api.model import DraftModel, ModelSource, NeuronModel, Serving, Spec, Speculation
from neuron_operator.place.planner import Option
from neuron_operator.read.objects import dig
from neuron_operator.read.records import Facts

VERSION = 1

WHOLE = Spec(model=ModelSource(uri=""), serving=Serving(speculation=Speculation(model=DraftModel(uri=""))))
"""With every part that may be left out."""
COMPILED_PATHS = (
    *("version", "model.digest", "model.converted", "speculation.model.digest"),
    *(to.path for _, one, _ in walk(WHOLE, "spec") for to in one.annotations(ConfigKey) if to.compiled),
)
"""What a compiled artifact depends on; the runtime marks the same fields with `COMPILED`."""


def config_document(model: NeuronModel, facts: Facts, option: Option | None = None) -> dict[str, Any]:
    """The document of one revision: the fields that have a ConfigKey, over the operator's own defaults.

    option: the devices that the model is compiled for, if it runs on some: the Job that compiles it has none to ask.
    """
    document: dict[str, Any] = {
        "version": VERSION,
        "model": {"digest": facts.digest, **_converted(model, facts)},
        "servedNames": [model.name],
        "backend": model.spec.backend,
        "dtype": "auto",
        "limits": {},
        **({"compile": True} if model.spec.is_compiled else {}),
    }
    if option is not None:
        _put(document, "parallelism.tensor", option.tensor)
        _put(document, "accelerator.logicalNeuronCore", option.logical_core)
        _put(document, "limits", {"maxModelLength": option.load.length, "maxSequences": option.load.sequences})
        if option.load.block_size:
            _put(document, "limits", {"blockSize": option.load.block_size, "numBlocks": option.load.num_blocks})
    elif (ranks := ranks_of(model)) > 1:
        _put(document, "parallelism.tensor", ranks)
    for path, one, value in walk(model.spec, "spec"):
        for to in one.annotations(ConfigKey):
            written = to.words.get(value, value) if to.words else value
            if written not in (None, {}) and not one.is_idle(path, model.spec.runs.honours):
                _put(document, to.path, as_json(written))
    if facts.draft is not None:
        _put(document, "speculation.model.digest", facts.draft.digest)
    return document


def _converted(model: NeuronModel, facts: Facts) -> dict[str, str]:
    return {"converted": facts.conversion.digest} if model.reads_converted and facts.conversion else {}


def ranks_of(model: NeuronModel) -> int:
    """The processes that share a model which is computed on the host."""
    parallelism = model.spec.parallelism
    return parallelism.tensor or parallelism.nodes or 1


def compiled_part(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document without what compiled artifacts do not depend on. Models with an equal part share an artifact."""
    part: dict[str, Any] = {"servedNames": ["compiled"]}  # a document must have some
    for path in COMPILED_PATHS:
        value = dig(document, *path.split("."))
        if value is not None:
            _put(part, path, value)
    return part


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    head, _, rest = path.partition(".")
    if rest:
        _put(document.setdefault(head, {}), rest, value)
    elif isinstance(value, dict):
        document[head] = {**document.get(head, {}), **value}
    else:
        document[head] = value


def sampling_mode(model: NeuronModel) -> str:
    """Where the runtime will sample tokens; empty: it depends on the model."""
    runs, serving = model.spec.runs, model.spec.serving
    return serving.sampling or runs.sampling_of_drafts.get(serving.speculation.method or "", runs.sampling)


def to_json(document: Mapping[str, Any] | Struct) -> str:
    """Canonical and readable: a ConfigMap is named by the hash of this text."""
    return _readable(msgspec.json.encode(document))


@lru_cache(maxsize=1024)
def _readable(encoded: bytes) -> str:
    """Each pass asks for it; Python's own encoder is slow with line breaks."""
    return json.dumps(json.loads(encoded), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
