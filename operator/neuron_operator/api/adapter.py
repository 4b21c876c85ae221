"""NeuronAdapter as a frozen value: its spec and status, each field declared once, like NeuronModel's in `model.py`.

`make generate` writes the CRD and the tables of docs/adapters.md from them; `manifest.py` parses with them. What an
adapter needs to be served is decided with its model (`decide/adapter.py`).
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from neuron_operator.api import names
from neuron_operator.api.field_types import NAME_PATTERN, Int64, Uri
from neuron_operator.api.fields import SpecPart
from neuron_operator.api.model import CredentialsSecret
from neuron_operator.api.model_status import ObjectStatus, Reported, StatusPart, Word


class AdapterSpec(SpecPart, frozen=True):
    """Which adapter to serve, and on which model. Clients ask for it by the name of the object."""

    model: Annotated[
        str,
        Meta(min_length=1, max_length=names.MAX_MODEL_NAME, pattern=NAME_PATTERN),
        "The NeuronModel in the same namespace.",
    ]
    uri: Annotated[
        Uri,
        "Where the adapter comes from: a folder in PEFT's format. `hf://org/name[@revision]` or `s3://bucket/prefix`, "
        "as of [models](storage.md#where-models-come-from); `file:///path` in the runtime image; `pvc://claim/path` "
        "only on the claim that the model itself is read from. `oci://` is refused.",
    ]
    credentials_secret_ref: Annotated[
        CredentialsSecret | None,
        "Secret with the keys to read the adapter, as `model.credentialsSecretRef` of a model, where a Job fetches it; "
        "by default the model's. Where replicas fetch it themselves it is refused, see [credentials](#credentials).",
    ] = None


class ServedAdapter(StatusPart, frozen=True):
    """The last version that passed all steps: what the replicas are told to serve."""

    model: Word
    uri: Annotated[str, Meta(max_length=1024)]
    key: Annotated[str, Meta(max_length=64), "Hash of what it was checked with."]
    digest: Annotated[Reported, "Hash of its configuration and tensors."]
    source_digest: Annotated[Reported | None, "The commit, or a hash of the files, that is fetched."] = None
    rank: int | None = None
    targets: Annotated[tuple[Word, ...], Meta(max_length=16), "The projections that it changes."] = ()
    bytes: Int64 | None = None
    base_model: Annotated[Reported | None, "The model that it was trained for, by its own words."] = None
    size: Annotated[Word | None, "`bytes` for people."] = None
    jobs: Annotated[tuple[Word, ...], Meta(max_length=4), "The Jobs whose records it needs."] = ()


class AdapterStatus(ObjectStatus, frozen=True):
    """What the operator observed and decided."""

    ready: Annotated[Word | None, "Replicas that serve it, of those of the model: `1/2`."] = None
    replicas: Annotated[int | None, "Replicas that the model requests."] = None
    ready_replicas: Annotated[int | None, "Replicas that serve the adapter."] = None
    served: ServedAdapter | None = None


@dataclass(frozen=True)
class NeuronAdapter:
    """One NeuronAdapter that this version can act on."""

    name: str
    namespace: str
    uid: str
    refresh: str
    """Value of the refresh annotation; a new token has the source read again."""
    spec: AdapterSpec
