"""`RuntimeConfig`, written: the JSON document that tells a serving pod what to serve.

Called when a revision is pinned. The runtime parses it strictly (`neuron_runtime.config`, held by a contract test);
this side leaves out what is not pinned, so that the runtime's documented defaults hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from neuron_operator.model import NeuronModel
from neuron_operator.records import Facts

VERSION = 1


def config_document(model: NeuronModel, facts: Facts) -> dict[str, Any]:
    """The document of one revision."""
    serving, rollout = model.spec.serving, model.spec.rollout
    limits = {
        "maxModelLength": serving.max_model_length,
        "maxSequences": serving.max_sequences,
        "blockSize": serving.block_size,
        "numBlocks": serving.num_blocks,
        "maxQueuedRequests": serving.max_queued_requests,
    }
    switches = {"prefixCaching": serving.prefix_caching, "chunkedPrefill": serving.chunked_prefill}
    text = {
        "generationConfig": "vllm" if serving.generation_config == "Disabled" else None,
        "chatTemplate": serving.chat_template,
        "reasoningParser": serving.reasoning_parser,
    }
    server = {
        "accessLog": False if serving.access_log == "Disabled" else None,
        "numFrontEnds": serving.num_front_ends,
    }
    sampling = {"sampling": serving.sampling} if model.backend == "simulated" else {}
    parts = {
        "text": _pinned(text),
        "server": _pinned(server),
        "overrideNeuronConfig": {**_pinned(sampling), **model.spec.engine.override_neuron_config},
    }
    return {
        "version": VERSION,
        "model": {"uri": model.spec.model.uri, "digest": facts.digest},
        "servedNames": list(model.served_names),
        "backend": model.backend,
        "dtype": serving.dtype or "auto",
        **{key: value.lower() for key, value in switches.items() if value != "Auto"},
        "limits": _pinned(limits),
        **{key: part for key, part in parts.items() if part},
        "drain": {"delaySeconds": rollout.drain_delay_seconds, "seconds": rollout.drain_seconds},
    }


def sampling_mode(model: NeuronModel) -> str:
    """Where tokens are chosen, as the runtime will have it."""
    return (model.spec.serving.sampling or "Device") if model.backend == "simulated" else "Host"


def _pinned(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if value is not None}


def to_json(document: dict[str, Any]) -> str:
    """Canonical and readable: the ConfigMap is named by the hash of this text."""
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
