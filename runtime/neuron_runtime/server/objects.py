"""JSON objects of the routes that generate nothing: models, tokens, versions, health and load.

The routes create them, and `server.openapi` publishes their schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from neuron_runtime.apis.objects import Count, Created, Positive, TokenId
from neuron_runtime.core import SamplingMode
from neuron_runtime.requests.parameters import Parameter


class ModelSampling(msgspec.Struct, kw_only=True):
    """Where and how the model's tokens are sampled."""

    mode: Annotated[SamplingMode, "The sampling mode."]
    max_top_k: Annotated[
        Count, "The device samples from at most this many likeliest tokens, also if `top_k` is not set; 0: from all."
    ]
    top_p_keeps_crossing: Annotated[
        bool, "Whether `top_p` on the device keeps the token at which the sum of probabilities crosses it."
    ]


class Model(msgspec.Struct, kw_only=True):
    """A served name: of the base model, or of an adapter on it."""

    id: Annotated[str, "The name, as `model` of a request."]
    object: Annotated[Literal["model"], "The kind of object."] = "model"
    created: Created
    owned_by: Annotated[str, "Always `neuron-serving`."] = "neuron-serving"
    root: Annotated[str, "The first served name; of an adapter, where it was loaded from."]
    parent: Annotated[str | None, "The base model of an adapter, else null."] = None
    max_model_len: Annotated[
        Positive | UnsetType, "Maximum tokens of prompt plus output; absent until the model is ready."
    ] = UNSET
    sampling: Annotated[
        ModelSampling | UnsetType, "Where and how tokens are sampled; absent until the model is ready."
    ] = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """The served names."""

    object: Annotated[Literal["list"], "The kind of object."] = "list"
    data: Annotated[list[Model], "One entry per name."]


StateName = Literal["Fetching", "Loading", "Ready", "Failed"]


class AdapterState(msgspec.Struct, kw_only=True):
    """One adapter, as this server is to serve it."""

    name: Annotated[str, "The name, as `model` of a request."]
    state: Annotated[
        StateName,
        "Requests are answered when it is `Ready`. What has `Failed` is tried again from time to time.",
    ]
    reason: Annotated[str, "Why it has failed, in one word."]
    message: Annotated[str, "The same with details and cure."]
    digest: Annotated[str, "SHA-256 of its configuration and tensors; empty until it was checked."]
    rank: Annotated[Count, "Its highest rank; 0 until it was checked."]
    bytes: Annotated[Count, "Size of its tensors; 0 until it was checked."]


class AdapterStates(msgspec.Struct, rename="camel"):
    """The adapters of this server."""

    max_active: Annotated[Count, "Adapters that running requests may use at the same time; 0: none are served."]
    max_rank: Annotated[Positive, "Largest rank of an adapter."]
    adapters: Annotated[list[AdapterState], "One entry per adapter that is wanted here."]


class LoadAdapterBody(msgspec.Struct):
    """An adapter to load, as in vLLM."""

    lora_name: Annotated[str | None, "The name that requests ask for"] = None
    lora_path: Annotated[str | None, "A folder on the server, `org/name` of the hub, or a URI as of models"] = None
    load_inplace: Annotated[
        bool | None, "Replace the adapter that has the name; requests in flight keep it", Parameter(default=False)
    ] = None


class UnloadAdapterBody(msgspec.Struct):
    """An adapter to unload, as in vLLM."""

    lora_name: Annotated[str | None, "The name that it was loaded with"] = None


class Tokens(msgspec.Struct):
    """The tokens of a text."""

    count: Annotated[Count, "Number of tokens."]
    max_model_len: Annotated[Positive, "Maximum tokens of prompt plus output."]
    tokens: Annotated[list[TokenId], "Ids of the tokens."]
    token_strs: Annotated[list[str | None] | None, "Vocabulary entries of the tokens."]


class Rendered(msgspec.Struct):
    """The tokens that the model would get."""

    token_ids: Annotated[list[TokenId], "Ids of the tokens."]
    features: Annotated[None, "Of images and sounds; always null."] = None
    cache_salt: Annotated[str | None, "As in the request."] = None


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: Annotated[str, "The text, including special tokens."]


class Version(msgspec.Struct):
    """Versions of the server and of what its backend runs on."""

    version: Annotated[str, "Version of neuron-serving."]
    backend: Annotated[str, "The backend."]
    libraries: Annotated[dict[str, str], "Versions of the backend's libraries and drivers, by name."]


class Load(msgspec.Struct):
    """How busy the server is."""

    server_load: Annotated[Count, "Running requests of the front end that answers."]


class ServerInfo(msgspec.Struct):
    """How the server is configured."""

    vllm_config: Annotated[dict[str, Any], "The configuration document, under vLLM's name."]


class Health(msgspec.Struct):
    """Whether the server can serve."""

    status: Annotated[Literal["ok", "draining", "not ready"], "`ok` with status 200."]
    detail: Annotated[str | UnsetType, "Progress of the startup; with `not ready`."] = UNSET
