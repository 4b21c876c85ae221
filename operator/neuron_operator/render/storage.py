"""Where weights and compiled artifacts are kept, and what a pod needs to read or write them there.

Called by `revision.pin`, which pins the places, by `pods` for replicas, and by `steps` for Jobs. Pure: it renders no
pod and knows no credentials, only which remote stores a pod reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote

import msgspec

from neuron_operator.api import names
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.field_types import ParsedUri
from neuron_operator.api.fields import SpecPart, as_json
from neuron_operator.api.model import Claim, NeuronModel
from neuron_operator.api.reasons import Reason
from neuron_operator.read.world import Object, Place, Settings
from neuron_operator.render.objects import Mount, without_empty


@dataclass(frozen=True)
class Kept:
    """What is kept: its name and its volume's, the operator's claim for it, its folder in pods, the runtime's flags."""

    name: str
    claim: str
    folder: str
    folder_flag: str
    store_flag: str
    miss_flag: str


WEIGHTS = Kept(
    *(names.WEIGHTS_VOLUME, names.WEIGHTS_CLAIM, names.WEIGHTS_DIR),
    *("--weights-dir", "--weights-store", "--on-weights-miss"),
)
ARTIFACTS = Kept(
    *(names.ARTIFACTS_VOLUME, names.ARTIFACTS_CLAIM, names.ARTIFACTS_DIR),
    *("--artifacts-dir", "--artifacts-store", "--on-artifact-miss"),
)


@dataclass(frozen=True)
class Access:
    """What a pod needs: volumes, arguments of its command, and the schemes of the URIs that it reads over the network,
    which decide about credentials and certificate authorities."""

    mounts: tuple[Mount, ...] = ()
    arguments: tuple[str, ...] = ()
    remotes: frozenset[str] = frozenset()

    def __add__(self, other: Access) -> Access:
        return Access((*self.mounts, *other.mounts), (*self.arguments, *other.arguments), self.remotes | other.remotes)


def weights_place(model: NeuronModel, settings: Settings) -> Place:
    """Where the model's weights are kept; without a choice of manifest or chart, in each pod."""
    return _resolved(WEIGHTS, model.spec.storage.weights, settings.storage.weights)


def artifacts_place(model: NeuronModel, settings: Settings) -> Place | None:
    """Where the model's compiled artifacts are kept; None: neither manifest nor chart says."""
    place = _resolved(ARTIFACTS, model.spec.storage.artifacts, settings.storage.artifacts)
    return place if place.is_shared else None


def _resolved(kept: Kept, own: SpecPart | None, chosen: Place) -> Place:
    """The place of the manifest, or else the chart's, with the operator's own claim by its name."""
    place = msgspec.convert(as_json(own), Place) if own else chosen
    return Place(persistent_volume_claim=Claim(claim_name=kept.claim)) if place.pvc_template else place


def check_sources(model: NeuronModel, settings: Settings) -> None:
    """Raises InvalidSpec if pods of this installation cannot read the model, or its draft model."""
    _check_source(model, settings, "spec.model.uri")
    draft, path = model.draft, "spec.serving.speculation.model.uri"
    if draft is None:
        return
    _check_source(draft, settings, path)
    if draft.uri.scheme == "oci" and (model.uri.scheme, model.uri.place) != ("oci", draft.uri.place):
        text = "a pod mounts one image with models, that of model.uri; copy the draft model to a volume"
        raise InvalidSpec(path, text, Reason.FIELD_NOT_SUPPORTED)


def check_secret_of_draft(model: NeuronModel, place: Place) -> None:
    """Raises InvalidSpec if replicas with their weights in this place need a second Secret, for the draft model."""
    draft = model.draft
    if draft is None or draft.spec.model.credentials_secret_ref == model.spec.model.credentials_secret_ref:
        return
    if source(draft).remotes and not is_fetched_by_job(draft, place):
        text = (
            "replicas fetch the draft model themselves, with the Secret of the model: put the keys into that one "
            "(spec.model.credentialsSecretRef), or set spec.storage.weights or the chart value storage.weights to a "
            "place that pods share"
        )
        raise InvalidSpec("spec.serving.speculation.model.credentialsSecretRef", text, Reason.FIELD_NOT_SUPPORTED)


def _check_source(model: NeuronModel, settings: Settings, path: str) -> None:
    if model.uri.scheme == "oci" and not settings.storage.image_volumes:
        text = (
            "a model in an image is not enabled in this installation; copy it to a volume and use pvc://claim/path, or "
            "set the chart value storage.imageVolumes: true, if the cluster can mount images (Kubernetes' feature "
            "ImageVolume)"
        )
        raise InvalidSpec(path, text, Reason.FIELD_NOT_SUPPORTED)


def source(model: NeuronModel, volume: str = names.MODEL_VOLUME) -> Access:
    """To read the model where its URI says."""
    if model.uri.scheme == "oci":
        image = {"image": {"reference": model.uri.place}}
        return Access((Mount(volume, names.IMAGE_DIR, image, read_only=True),))
    if model.uri.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": model.uri.place}}
        return Access((Mount(volume, f"{names.CLAIMS_DIR}/{model.uri.place}", claim, read_only=True),))
    return Access(remotes=frozenset({model.uri.scheme} & names.CREDENTIALS.keys()))


def sources(model: NeuronModel) -> tuple[NeuronModel, ...]:
    """What a replica loads: the model, and its draft model."""
    return (model, model.draft) if model.draft else (model,)


def _with_draft(own: Access, model: NeuronModel, place: Place) -> Access:
    """The same, to read the draft model, too, where its URI says, unless a Job fetches it."""
    draft = model.draft
    if draft is None or is_fetched_by_job(draft, place):
        return own
    beside = source(draft, names.DRAFT_VOLUME)
    paths = {mount.path for mount in own.mounts}
    return own + replace(beside, mounts=tuple(mount for mount in beside.mounts if mount.path not in paths))


def loading(model: NeuronModel, place: Place) -> Access:
    """To load the weights: from where fetch Jobs put them, or else from where the URIs say."""
    own = Access() if is_filled_by_job(model, place) or is_fetched_before(model, place) else source(model)
    if model.reads_converted and model.spec.serves_adapters and model.uri.scheme == "pvc":
        own = source(model)  # its claim may have adapters
    own = _with_draft(own, model, place)
    if any(is_filled_by_job(one, place) for one in sources(model)):
        return own + reading(WEIGHTS, place)
    return replace(own, arguments=(WEIGHTS.folder_flag, WEIGHTS.folder)) + Access((_in_pod(place),))


def adapters_of(model: NeuronModel, place: Place) -> Access:
    """To serve adapters: their list, which the kubelet keeps up to date, and what replicas need that fetch them
    themselves. Nothing for a model that serves none."""
    if not model.spec.serves_adapters:
        return Access()
    listed = {"configMap": {"name": names.adapters_name(model.name)}}
    mount = Mount(names.ADAPTERS_VOLUME, names.ADAPTERS_DIR, listed, read_only=True)
    remotes = frozenset[str]() if adapters_claim(model, place) else frozenset(names.CREDENTIALS)
    return Access((mount,), ("--adapters-file", f"{names.ADAPTERS_DIR}/{names.ADAPTERS_KEY}"), remotes)


def adapters_claim(model: NeuronModel, place: Place) -> Place | None:
    """The claim into which Jobs fetch adapters: that of the model's weights; None: replicas fetch them themselves."""
    return place if is_filled_by_job(model, place) and place.persistent_volume_claim else None


def check_adapter(adapter: NeuronModel, has_own_secret: bool, base: NeuronModel, place: Place) -> None:
    """Raises InvalidSpec if the replicas of the base model cannot read the adapter."""
    uri, own = adapter.uri, base.uri
    if uri.scheme == "oci" or (uri.scheme == "pvc" and (own.scheme, own.place) != ("pvc", uri.place)):
        text = "a replica mounts nothing more while it runs; copy the adapter to s3:// or to a hub" + (
            f", or to the claim of the model, pvc://{own.place}" if own.scheme == "pvc" else ""
        )
        raise InvalidSpec("spec.uri", text, Reason.FIELD_NOT_SUPPORTED)
    nodes = base.spec.parallelism.nodes or 1
    if nodes > 1 and uri.scheme in names.CREDENTIALS and not adapters_claim(base, place):
        text = (
            f"the {nodes} nodes of a replica must all find the adapter: keep the model's weights "
            "in a claim (spec.storage.weights.persistentVolumeClaim of the model), into which a Job fetches it"
        )
        raise InvalidSpec("spec.uri", text, Reason.FIELD_NOT_SUPPORTED)
    if has_own_secret and not adapters_claim(base, place):
        text = (
            f"the replicas of {base.name} fetch adapters themselves, with the model's own Secret: put the keys into "
            "that one (spec.model.credentialsSecretRef of the model), or keep the model's weights in a claim "
            "(spec.storage.weights.persistentVolumeClaim of the model), into which a Job fetches adapters"
        )
        raise InvalidSpec("spec.credentialsSecretRef", text, Reason.FIELD_NOT_SUPPORTED)


def reading_adapter(adapter: NeuronModel, base: NeuronModel, claim: Place | None) -> Access:
    """To check an adapter against the configuration of its model, which is in the claim or where its URI says. What is
    not fetched lies in the same volume as the model."""
    model = Access(access_to(WEIGHTS, claim, read_only=True).mounts + source(adapter).mounts) if claim else source(base)
    return replace(model, remotes=model.remotes | (frozenset({adapter.uri.scheme}) & names.CREDENTIALS.keys()))


def folder_of(model: NeuronModel, place: Place, digest: str) -> str:
    """Where the model lies in a pod of an engine that downloads nothing. Raises InvalidSpec if it would have to."""
    uri = model.uri
    if uri.scheme == "file":
        return f"//{unquote(uri.path)}"  # no path of a volume, which `local` would translate
    if uri.scheme in ("pvc", "oci"):
        root = names.IMAGE_DIR if uri.scheme == "oci" else f"{names.CLAIMS_DIR}/{uri.place}"
        return f"{root}/{uri.path.strip('/')}".rstrip("/")
    if place.object_store is not None:
        text = (
            f"backend {model.spec.backend} reads the weights from a folder: set persistentVolumeClaim or emptyDir, or "
            "the chart value storage.weights, for example storage.weights.pvcTemplate.size=1Ti"
        )
        raise InvalidSpec("spec.storage.weights", text, Reason.STORAGE_NOT_CONFIGURED)
    return f"{WEIGHTS.folder}/{digest}"


def is_fetched_by_job(model: NeuronModel, place: Place) -> bool:
    """Whether a Job brings the weights to a place that all pods read."""
    return place.is_shared and bool(source(model).remotes)


def is_filled_by_job(model: NeuronModel, place: Place) -> bool:
    """Whether all pods read from that place what Jobs fetched or converted."""
    return model.reads_converted or is_fetched_by_job(model, place)


def is_fetched_before(model: NeuronModel, place: Place) -> bool:
    """Whether an init container of each pod brings the weights, because its engine fetches nothing."""
    return not model.spec.runs.is_ours and not place.is_shared and bool(source(model).remotes)


def fetch_command(model: NeuronModel, access: Access, digest: str) -> list[str]:
    """Brings the weights to where `access`, that of `fetching`, says."""
    arguments = (model.spec.model.uri, *access.arguments, "--digest", digest, "--record", names.TERMINATION_LOG)
    return ["neuron-runtime", "fetch", *arguments]


def fetching(model: NeuronModel, place: Place) -> Access:
    """To bring the weights from the URI to a shared place, or into the pod; the argument is the destination."""
    if not place.is_shared:
        return source(model) + Access((_in_pod(place),), (WEIGHTS.folder,))
    target = access_to(WEIGHTS, place)
    if place.object_store is not None:
        return source(model) + Access((), (place.object_store.uri,), target.remotes)
    return source(model) + replace(target, arguments=(WEIGHTS.folder,))


def compiling(model: NeuronModel, weights: Place | None, artifacts: Place) -> Access:
    """To compile a model into a shared place. Weights that a Job put into a claim are at hand; otherwise the URI has
    what the compiler reads. A draft model may have a Secret of its own, so it is read from where its Job put it, and
    what is converted is nowhere else."""
    if weights and (weights.persistent_volume_claim or model.reads_converted or _has_draft(model, weights)):
        in_claim = weights.persistent_volume_claim and is_fetched_by_job(model, weights)
        own = _with_draft(Access() if in_claim or model.reads_converted else source(model), model, weights)
        return own + access_to(WEIGHTS, weights, read_only=True) + access_to(ARTIFACTS, artifacts)
    return _with_draft(source(model), model, Place()) + access_to(ARTIFACTS, artifacts)


def _has_draft(model: NeuronModel, place: Place) -> bool:
    return model.draft is not None and is_fetched_by_job(model.draft, place)


def loading_artifact(model: NeuronModel, place: Place | None) -> Access:
    """To load the compiled model, from the place or from where the manifest names it. Replicas never compile."""
    if place is not None:
        return reading(ARTIFACTS, place)
    return Access(arguments=(ARTIFACTS.miss_flag, "fail")) if model.spec.is_compiled else Access()


def reading(kept: Kept, place: Place) -> Access:
    """To read from a shared place what a Job put there; that it is missing ends the pod."""
    return access_to(kept, place, read_only=True) + Access(arguments=(kept.miss_flag, "fail"))


def access_to(kept: Kept, place: Place, *, read_only: bool = False) -> Access:
    """To put something into a shared place, or only to read from it."""
    folder = (kept.folder_flag, kept.folder)
    if claim := place.persistent_volume_claim:
        volume = {"persistentVolumeClaim": {"claimName": claim.claim_name}}
        return Access((Mount(kept.name, kept.folder, volume, read_only, claim.sub_path or ""),), folder)
    if store := place.object_store:
        remotes = frozenset({ParsedUri.parse(store.uri).scheme})
        return Access((_folder(kept),), (*folder, kept.store_flag, store.uri), remotes)
    raise ValueError(f"{kept.name} are not kept in a shared place")


def words(place: Place) -> str:
    """The shared place, for messages."""
    if claim := place.persistent_volume_claim:
        return f"claim {claim.claim_name}" + (f", folder {claim.sub_path}" if claim.sub_path else "")
    return place.object_store.uri if place.object_store else "each pod"


def own_claims(model: NeuronModel, settings: Settings, places: Iterable[Place]) -> Iterator[Object]:
    """The claims of the operator among `places`. They belong to no model: they stay when the last one is deleted."""
    used = {place.persistent_volume_claim.claim_name for place in places if place.persistent_volume_claim}
    for kept, chosen in ((WEIGHTS, settings.storage.weights), (ARTIFACTS, settings.storage.artifacts)):
        if chosen.pvc_template is not None and kept.claim in used:
            labels = names.shared_labels(kept.name)
            spec = {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": chosen.pvc_template.storage_class_name,
                "resources": {"requests": {"storage": chosen.pvc_template.size}},
            }
            yield {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": kept.claim, "namespace": model.namespace, "labels": labels},
                "spec": without_empty(spec),
            }


def _in_pod(place: Place) -> Mount:
    return _folder(WEIGHTS, place.empty_dir.size_limit if place.empty_dir else None)


def _folder(kept: Kept, size_limit: str | int | None = None) -> Mount:
    return Mount(kept.name, kept.folder, {"emptyDir": without_empty({"sizeLimit": size_limit})})
