"""The pinned decision of one spec revision, as a ControllerRevision keeps it: facts, plan, configuration, pod template.

`decide/pin.py` makes one; `views` reads it back, so that neither a new operator nor a new default image changes running
pods. A lost ControllerRevision is rebuilt from what runs. Nothing here decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from neuron_operator.api import names
from neuron_operator.api.engines import ASSUMED, ENGINES, Engine
from neuron_operator.api.fields import as_json
from neuron_operator.api.model_status import Plan
from neuron_operator.read.objects import dig, items, name_of, text, whole
from neuron_operator.read.placement import Placement
from neuron_operator.read.records import Facts, PlannedConversion
from neuron_operator.read.world import Object, Place

FORMAT = 1
"""Version of `Pinned`; part of every revision's name, because a ControllerRevision's data is immutable."""


class Compiling(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """How a Job compiles the model."""

    image: str
    artifacts: Place
    family: str = ""
    """The family of devices that the model runs on; empty: it runs on none."""
    folder: str = ""
    """In pods, where the graphs of an engine lie that is not our runtime; empty: our runtime knows."""
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    """How that engine compiles them."""

    def __post_init__(self) -> None:
        if not self.artifacts.is_shared:
            raise ValueError("artifacts are kept where pods share them")


class Pinned(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`data` of the ControllerRevision."""

    format: int
    spec_hash: str
    refresh: str
    """The refresh annotation that it was decided for."""
    upgrade: str = ""
    """The runtime image that the model moved to by itself, or the `defaults` for which it was decided anew; empty: an
    edit led to this revision."""
    defaults: str = ""
    """Hash of the settings of the installation that it was decided with."""
    resolve_key: str
    """Hash of what the facts depend on: other edits keep facts and digest."""
    draft_key: str = ""
    """The same of the draft model; empty: there is none."""
    facts: Facts
    devices: int
    cores: int
    instance_type: str
    nodes: int = 1
    plan: Plan
    claim: dict[str, Any] = {}
    """The spec of the claim with a pod's devices; empty: it has none."""
    weights: Place | None = None
    """Where Jobs put the weights, or those of the draft model, for all pods; None: they do not."""
    compiling: Compiling | None = None
    """None: replicas need no artifact."""
    config: dict[str, Any]
    """The RuntimeConfig document."""
    files: dict[str, str] = {}
    """What the engine has beside it, by name: a later version of the operator may have another content. Revisions of
    versions that did not pin it have none."""
    template: dict[str, Any]
    """The pod template of a replica."""

    @property
    def conversion(self) -> PlannedConversion | None:
        """What replicas read in the place of the source; None: they read that."""
        return self.facts.conversion if dig(self.config, "model", "converted") else None

    @property
    def artifacts(self) -> Place | None:
        return self.compiling.artifacts if self.compiling else None


class Revision(Struct, frozen=True, kw_only=True):
    """A pinned decision with its identity."""

    number: int
    """The highest was decided, or wanted again, last."""
    pinned: Pinned
    shared: tuple[str, ...] = ()
    """Names of the Jobs whose results it uses: their records stay as long as the revision."""

    @property
    def name(self) -> str:
        """The value of the revision label."""
        return revision_hash(self.pinned.spec_hash, self.pinned.refresh, self.pinned.upgrade)

    @property
    def engine(self) -> Engine:
        """What the operator knows of its backend. Of one that only a newer operator knows, it assumes our runtime."""
        row = ENGINES.get(self.backend, ASSUMED)
        return row if self.placement.on_devices else row.on_host or row

    @property
    def backend(self) -> str:
        return str(self.pinned.config.get("backend"))

    @property
    def default_for(self) -> str:
        """The family of devices whose default its engine was, which it keeps; empty: the manifest named the engine, or
        there were no defaults, or only a newer operator knows it."""
        return (self.pinned.plan.default_for or "") if self.backend in ENGINES else ""

    @property
    def image(self) -> str:
        """The runtime image of its pods."""
        return text(self._container, "image")

    @property
    def fetch_image(self) -> str:
        """The runtime image of the init container that brings the weights; empty: its pods have none."""
        before = items(self.pinned.template, "spec", "initContainers")
        return next((text(one, "image") for one in before if one.get("name") == names.FETCH_CONTAINER), "")

    def has_images(self, image: str, fetch_image: str) -> bool:
        """Whether its pods have them, the second where they have an init container for the weights."""
        return self.image == image and self.fetch_image in ("", fetch_image)

    @property
    def start_seconds(self) -> int:
        """How long its pods may take to start before they are restarted; 0: unknown."""
        probe = self._container.get("startupProbe")
        return whole(dig(probe, "failureThreshold")) * whole(dig(probe, "periodSeconds"))

    @property
    def _container(self) -> Object:
        containers = items(self.pinned.template, "spec", "containers")
        return dict(next((one for one in containers if one.get("name") == names.RUNTIME_CONTAINER), {}))

    @property
    def places(self) -> tuple[Place, ...]:
        """What its pods read and Jobs fill."""
        return tuple(place for place in (self.pinned.weights, self.pinned.artifacts) if place)

    @property
    def placement(self) -> Placement:
        pinned = self.pinned
        return Placement(pinned.devices, pinned.cores, pinned.instance_type, pinned.nodes, by_claim=bool(pinned.claim))


@lru_cache(maxsize=1024)
def revision_hash(spec_hash: str, refresh: str, upgrade: str) -> str:
    return names.digest([spec_hash, refresh, upgrade] if upgrade else [spec_hash, refresh])


def from_object(keeper: Object) -> Revision | None:
    """The revision in a ControllerRevision; None if it has another format or is not ours."""
    return _parsed(whole(keeper.get("revision")), dig(keeper, "data"), keeper)


def shared_annotation(revision: Revision) -> dict[str, str]:
    """An annotation of the ControllerRevision, whose data never changes, and of the Deployment that runs it."""
    return {names.SHARED_ANNOTATION: ",".join(revision.shared)} if revision.shared else {}


def beside_template(revision: Revision) -> str:
    """What `from_running` cannot read from the pod template and its ConfigMap. An annotation of the Deployment, not of
    the pod template, so that pods of earlier versions are not replaced."""
    without = msgspec.structs.replace(revision.pinned, config={}, files={}, template={})
    kept = {key: value for key, value in as_json(without).items() if key not in ("config", "template")}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def from_running(deployment: Object, config_maps: Iterable[Object]) -> Revision | None:
    """The revision that a Deployment runs, for when its ControllerRevision was deleted; None if parts are missing."""
    template = dig(deployment, "spec", "template")
    volumes = {text(volume, "name"): volume for volume in items(template, "spec", "volumes")}
    mounted = text(volumes.get(names.CONFIG_VOLUME), "configMap", "name")
    config_map = next((one for one in config_maps if name_of(one) == mounted), None)
    kept = _parsed_json(text(dig(deployment, "metadata", "annotations"), names.PINNED_ANNOTATION))
    config = _parsed_json(text(config_map, "data", names.CONFIG_KEY))
    if not isinstance(kept, dict):
        return None
    is_named_by_files = mounted != names.config_name(name_of(deployment), config, {})
    files = files_in(config_map) if is_named_by_files else {}
    return _parsed(1, {**kept, "config": config, "files": files, "template": template}, deployment)


def files_in(config_map: Object | None) -> dict[str, Any]:
    """What is in it beside the document."""
    return {key: content for key, content in (dig(config_map, "data") or {}).items() if key != names.CONFIG_KEY}


def _parsed(number: int, data: object, annotated: Object) -> Revision | None:
    try:
        pinned = msgspec.convert(data, Pinned)
    except msgspec.ValidationError:
        return None
    shared = text(dig(annotated, "metadata", "annotations"), names.SHARED_ANNOTATION)
    names_of_jobs = tuple(filter(None, shared.split(",")))
    return Revision(number=number, pinned=pinned, shared=names_of_jobs) if pinned.format == FORMAT else None


def _parsed_json(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
