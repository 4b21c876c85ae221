"""The pinned decision of one spec revision: facts, plan, configuration and pod template, kept in a ControllerRevision.

Called by `decide`. It contains only what pods or their placement depend on: the drain times, but not
replicas, pause, the pace of rollouts, Jobs or the Service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from neuron_operator.api import names
from neuron_operator.api.engines import DEFAULTS, Engine
from neuron_operator.api.engines.engine import Launch, unknown
from neuron_operator.api.errors import InvalidSpec, Refusals, Unplaceable
from neuron_operator.api.fields import NotPinned, SpecPart, as_json, fields_of
from neuron_operator.api.manifest import check_engine, default_note
from neuron_operator.api.model import EmptyDir, NeuronModel, WantedWeights, WeightsStorage, remembered
from neuron_operator.api.model_status import MAX_GROUPS, MemoryPlan, Plan
from neuron_operator.api.reasons import Need, Reason
from neuron_operator.place.catalog import family_of
from neuron_operator.place.planner import Choice, Held, choose, families_for
from neuron_operator.place.sizes import place
from neuron_operator.place.sizing import Memory, compile_minutes, is_quantized, start_seconds
from neuron_operator.read.objects import dig
from neuron_operator.read.placement import Placement, counted
from neuron_operator.read.records import Facts
from neuron_operator.read.revision import FORMAT, Compiling, Pinned, Revision, revision_hash, shared_annotation
from neuron_operator.read.world import FreeDevices, Object, Place, Settings
from neuron_operator.render.claims import claim_spec
from neuron_operator.render.config_document import compiled_part, config_document, ranks_of, sampling_mode
from neuron_operator.render.jobs import leaves_open
from neuron_operator.render.objects import child
from neuron_operator.render.pods import compile_image, launch_of, runtime_image, serving_image, serving_pod_template
from neuron_operator.render.resources import in_host_memory, serving_memory, serving_requests
from neuron_operator.render.storage import (
    artifacts_place,
    is_fetched_before,
    is_filled_by_job,
    source,
    sources,
    weights_place,
)

DEFAULT = DEFAULTS["Neuron"]
"""The engine on families for which the installation names none."""
IN_EACH_POD = WeightsStorage(empty_dir=EmptyDir())
"""What a manifest may say where no place is shared, too."""
KEY_LENGTH = 64
MAX_MINUTES = 2**31 - 1
MAX_BYTES = 2**53
"""Numbers in the status end here; an estimate may be larger where the manifest insists."""


@remembered
def spec_hash(model: NeuronModel) -> str:
    """Hash of the part of the spec that pods or placement depend on. Explicit defaults do not change it."""
    by_default = [model.default_for] if model.default_for else []
    # As a field it is left out, because most engines do the same with both of the values that they accept.
    forgone = ["compile=Disabled"] if _forgoes_job(model) else []
    return names.digest([FORMAT, _non_defaults(model.spec, "spec", model.spec.runs), *by_default, *forgone])


def _forgoes_job(model: NeuronModel) -> bool:
    """Whether replicas are to compile what a Job of their image could."""
    return model.spec.runs.compiles == "on device" and model.spec.engine.compile == "Disabled"


def _non_defaults(part: SpecPart, path: str, engine: Engine) -> dict[str, Any]:
    """The fields that differ from their defaults, without those that nothing acts on and those that pods do not
    depend on."""
    changed: dict[str, Any] = {}
    for one in fields_of(type(part)):
        value, here = getattr(part, one.name), f"{path}.{one.key}"
        if value == one.default or one.is_idle(here, engine.honours) or one.annotations(NotPinned):
            continue
        kept = _non_defaults(value, here, engine) if isinstance(value, SpecPart) else as_json(value)
        # A part that may be left out says something by being there, as `emptyDir: {}` does.
        if kept != {} or one.default is None:
            changed[one.key] = kept
    return changed


def resolve_key(model: NeuronModel, settings: Settings) -> str:
    """Hash of what facts depend on: URI, credentials, refresh annotation, what weights are converted to; also the image
    for a model inside it."""
    source = model.spec.model
    secret = source.credentials_secret_ref
    image = runtime_image(model, settings) if model.uri.scheme == "file" else ""
    reference = f"{secret.name}/{secret.key}" if secret and secret.key else secret.name if secret else ""
    source_key: list[object] = [source.uri, reference, model.refresh, image]
    wanted = model.spec.serving.quantization
    return names.digest([*source_key, wanted] if wanted != "Auto" else source_key)


def _resolve_keys(model: NeuronModel, settings: Settings) -> frozenset[str]:
    """Those of the source, whatever its weights are converted to."""
    change, serving = msgspec.structs.replace, model.spec.serving
    models = (
        replace(model, spec=change(model.spec, serving=change(serving, quantization=wanted)))
        for wanted in get_args(WantedWeights)
    )
    return frozenset(resolve_key(one, settings) for one in models)


@remembered
def defaults_key(model: NeuronModel, settings: Settings) -> str:
    """Hash of what a revision pins besides the spec: settings of the installation, and the resources of Jobs where a
    container of its pods has them. What never served is decided anew when they change: a wrong image, a missing pull
    Secret or too little memory may be why it does not."""
    storage = settings.storage
    pinned: tuple[object, ...] = (
        _images(model, settings),
        (settings.image_pull_policy, settings.image_pull_secrets, settings.ca_bundle, settings.jobs.env),
        (storage.weights, storage.artifacts, storage.image_volumes),
        (settings.provisionable, settings.device_mode, settings.device_scheduler_name),
    )
    if is_fetched_before(model, weights_place(model, settings)):
        pinned = (*pinned, settings.jobs.resources, model.spec.jobs.resources)
    return names.digest(as_json(pinned))


def _images(model: NeuronModel, settings: Settings) -> tuple[object, ...]:
    images: tuple[object, ...] = (runtime_image(model, settings), compile_image(model, settings))
    if settings.engine_defaults and (model.default_for or model.spec.leaves_engine_open):
        images = (*images, settings.engine_defaults)
    if model.spec.runs.is_ours:
        return images
    return (*images, serving_image(model, settings), settings.engines)


def as_pinned(model: NeuronModel, revision: Revision | None) -> NeuronModel:
    """The manifest with the engine of the revision, where that is a default which the manifest leaves open, and with
    the weights that it reads."""
    if revision is None:
        return model
    if revision.default_for and model.spec.leaves_engine_open:
        model = model.with_default(revision.backend, revision.default_for)
    reads_converted = revision.pinned.conversion is not None
    return model if reads_converted == model.reads_converted else replace(model, reads_converted=reads_converted)


def is_of(model: NeuronModel, revision: Revision) -> bool:
    """Whether it was pinned for this spec, whatever engine is the default now."""
    kept = as_pinned(model, revision)
    return revision.pinned.spec_hash in (spec_hash(kept), spec_hash(_as_decided(kept, revision)))


def _as_decided(model: NeuronModel, revision: Revision) -> NeuronModel:
    """The manifest without what it asks for that the revision has anyway: earlier versions did not read
    `emptyDir: {}`, nor two fields for engines that are not our runtime."""
    spec = model.spec
    if spec.storage.weights == IN_EACH_POD and revision.pinned.weights is None:
        spec = msgspec.structs.replace(spec, storage=msgspec.structs.replace(spec.storage, weights=None))
    if spec.runs.is_ours:
        return model if spec is model.spec else replace(model, spec=spec)
    if spec.parallelism.nodes == revision.placement.nodes == 1:
        spec = msgspec.structs.replace(spec, parallelism=msgspec.structs.replace(spec.parallelism, nodes=None))
    if _forgoes_job(model) and revision.pinned.compiling is None:
        spec = msgspec.structs.replace(spec, engine=msgspec.structs.replace(spec.engine, compile="Auto"))
    return model if spec is model.spec else replace(model, spec=spec)


def upgraded(
    model: NeuronModel, revision: Revision | None, settings: Settings, free: FreeDevices | None
) -> tuple[NeuronModel, str]:
    """The manifest as it moves with `runtimeUpgrade`: with the engine that is the default now for the devices that the
    revision has. A model keeps its own if the other one would refuse it, and why is said: nobody has edited anything.
    So does one whose quantized weights may have to be converted for it, for which there may be no place, one with
    settings that only its engine is known to read, and one that was pinned before there were defaults,
    if it moves to another image: it is not planned with all of them.
    """
    kept = as_pinned(model, revision)
    family = _family(revision, settings) if revision else ""
    backend = settings.engine_defaults.get(family, DEFAULT)
    is_fixed = settings.runtime_upgrade != "Rolling" or not model.spec.leaves_engine_open
    if revision is None or not family or is_fixed:
        return kept, ""
    if settings.engine_defaults and not kept.default_for:
        kept = model.with_default(kept.spec.backend, family)
    if backend == kept.spec.backend or model.spec.engine.override_neuron_config:
        return kept, ""
    other = model.with_default(backend, family)
    if other.spec.may_convert and is_quantized(revision.pinned.facts):
        return kept, f"{other.backend_words}, may have to convert its weights: name spec.engine.backend to have that"
    try:
        pin(other, revision.pinned.facts, settings, 1, free=free, before=held((revision,), settings))
    except InvalidSpec as refusal:
        return kept, f"{other.backend_words}, would refuse it: {refusal}"
    except Unplaceable as refusal:
        if free is not None:  # the nodes are read when its turn comes
            return kept, f"{other.backend_words}, would refuse it: {refusal}"
    return other, ""


def refusal_by_newer(model: NeuronModel, revision: Revision, settings: Settings, free: FreeDevices | None) -> str:
    """Why the image that its engine has now would refuse the manifest of a running model, such as another version that
    lacks its architecture or its devices; empty: it would not, or that depends on nodes, which are read when its turn
    comes."""
    try:
        pin(model, revision.pinned.facts, settings, 1, free=free, before=held((revision,), settings))
    except InvalidSpec as refusal:
        return str(refusal)
    except Unplaceable as refusal:
        return str(refusal) if free else ""
    return ""


def _family(revision: Revision, settings: Settings) -> str:
    """Of the devices that it is computed on; empty: unknown, or none."""
    pinned = revision.pinned
    if pinned.compiling is not None:
        return pinned.compiling.family
    family = family_of(pinned.plan.instance_type or "", settings.device_families)
    return family.name if family and revision.engine.on_device else ""


def images(model: NeuronModel, settings: Settings) -> tuple[str, str]:
    """Of pods that are made now: of the engine, and of what fetches the weights for it."""
    return serving_image(model, settings), runtime_image(model, settings)


def words_of_images(model: NeuronModel, settings: Settings) -> str:
    """`Pinned.upgrade` of a revision that moves to them. Of another engine than our runtime it has both images, also
    if its pods will not fetch: they may have fetched until now, in a revision that has the name of the first image."""
    image, fetch_image = images(model, settings)
    return image if model.spec.runs.is_ours else f"{image} {fetch_image}"


def wanted(
    model: NeuronModel,
    revisions: Iterable[Revision],
    images: tuple[str, str] | None = None,
    settings: Settings | None = None,
) -> Revision | None:
    """The revision pinned for this spec (and these images, or with these settings), if any; of several (after a
    refresh) the last.

    An earlier revision that is wanted again gets the next number.
    """
    all_revisions = tuple(revisions)
    matching = (
        revision
        for revision in all_revisions
        if is_of(model, revision)
        and model.refresh in ("", revision.pinned.refresh)
        and (images is None or revision.has_images(*images))
        and (settings is None or revision.pinned.defaults == defaults_key(as_pinned(model, revision), settings))
    )
    newest = max(matching, key=lambda revision: revision.number, default=None)
    highest = next_number(all_revisions) - 1
    if newest is None or newest.number == highest:
        return newest
    return msgspec.structs.replace(newest, number=highest + 1)


def next_number(revisions: Iterable[Revision]) -> int:
    return max((revision.number for revision in revisions), default=0) + 1


def known_facts(
    model: NeuronModel, settings: Settings, revisions: Collection[Revision]
) -> tuple[Facts | None, Facts | None]:
    """Facts of the model, and of its draft model, that an earlier revision pinned for the same resolve key."""
    of_model, draft_key = _with_facts(model, settings, revisions), _draft_key(model, settings)
    of_draft = _latest(one for one in revisions if draft_key and one.pinned.draft_key == draft_key)
    facts = msgspec.structs.replace(of_model.pinned.facts, draft=None) if of_model else None
    return facts, of_draft.pinned.facts.draft if of_draft else None


def known_digest(model: NeuronModel, settings: Settings, revisions: Iterable[Revision]) -> str:
    """That of the source which is pinned, for facts that are read again: an edit does not move a model. Empty: none is,
    or it is read in place, where nothing else is."""
    if not source(model).remotes:
        return ""
    keys = _resolve_keys(model, settings)
    latest = _latest(one for one in revisions if one.pinned.resolve_key in keys)
    return latest.pinned.facts.digest if latest else ""


def are_open(model: NeuronModel, settings: Settings, revisions: Collection[Revision]) -> bool:
    """Whether the known facts of the model do not tell what an engine converts that the devices may choose now."""
    known = _with_facts(model, settings, revisions)
    return known is not None and leaves_open(model, settings) and not as_pinned(model, known).spec.may_convert


def _with_facts(model: NeuronModel, settings: Settings, revisions: Collection[Revision]) -> Revision | None:
    key = resolve_key(model, settings)
    return _latest(one for one in revisions if one.pinned.resolve_key == key and _is_read_for(model, one))


def _is_read_for(model: NeuronModel, revision: Revision) -> bool:
    """Whether the facts hold for the engine of the manifest: what is to be converted depends on it. Earlier versions
    did not ask for that."""
    facts, spec = revision.pinned.facts, as_pinned(model, revision).spec
    if not is_quantized(facts):
        return True
    is_told = bool(facts.quantization or facts.conversion)
    return spec.backend == revision.backend and (is_told or not spec.may_convert)


def _draft_key(model: NeuronModel, settings: Settings) -> str:
    """With the method: a head is read otherwise than a second model."""
    method = model.spec.serving.speculation.method
    return names.digest([resolve_key(model.draft, settings), method]) if model.draft else ""


def _latest(revisions: Iterable[Revision]) -> Revision | None:
    return max(revisions, key=lambda revision: revision.number, default=None)


def held(revisions: Iterable[Revision], settings: Settings) -> Held | None:
    """The place of the latest revision, if it is on devices."""
    latest = _latest(revisions)
    family = _family(latest, settings) if latest else ""
    if latest is None or not family:
        return None
    pinned = latest.pinned
    return Held(
        pinned.plan.instance_type or "", family, pinned.cores or pinned.devices, pinned.nodes, bool(pinned.claim)
    )


def pin(
    model: NeuronModel,
    facts: Facts,
    settings: Settings,
    number: int,
    *,
    upgrade: str = "",
    free: FreeDevices | None = None,
    before: Held | None = None,
) -> Revision:
    """Decide a new revision. `upgrade`: see `Pinned`; `free`: the nodes of the cluster, if they were read in this pass;
    `before`: where the revision before runs.

    Raises Unplaceable if no node could hold a replica, InvalidSpec for a limit that exceeds the model's, for a field
    that the engine lacks, or if there is no place for the artifact that a Job is to compile.
    """
    length = model.spec.serving.max_model_length
    if length and 0 < facts.max_position_embeddings < length:
        raise InvalidSpec(
            "spec.serving.maxModelLength",
            f"{length} exceeds the model's maximum length of {facts.max_position_embeddings} tokens",
        )
    _check_parallelism(model)
    model, choice = chosen(model, facts, settings, free, before)
    check_engine(model)
    facts, weights = _known_to(model, facts), weights_place(model, settings)
    model = replace(model, reads_converted=_reads_converted(model, facts, weights))
    placement = choice.placement if choice else place(model, settings)
    if placement.nodes > 1 and model.spec.replicas > MAX_GROUPS // 2:
        raise InvalidSpec(
            "spec.replicas", f"{model.spec.replicas} exceeds {MAX_GROUPS // 2}, the limit for models on several nodes"
        )
    compiling = _compiling(model, settings, choice)
    config = config_document(model, facts, choice.chosen if choice else None)
    launch = launch_of(
        model,
        config,
        settings,
        digest=facts.digest,
        host=in_host_memory(model, facts, placement.nodes),
        weights=weights,
        artifacts=compiling.artifacts if compiling else None,
        choice=choice,
        nodes=placement.nodes,
    )
    _refuse(model, launch, facts)
    if compiling is None and (compiling := _compiled_by_engine(model, settings, launch)):
        launch = replace(launch, artifact=compiling.folder)
    minutes = _compile_minutes(model, facts, choice) if compiling is None else None
    launch = replace(launch, start_seconds=start_seconds(facts, minutes or 0))
    template = serving_pod_template(
        model,
        placement,
        settings,
        requests=serving_requests(model, facts, placement.nodes),
        weights=weights,
        artifacts=compiling.artifacts if compiling else None,
        choice=choice,
        revision=revision_hash(spec_hash(model), model.refresh, upgrade),
        launch=launch,
        digest=facts.digest,
    )
    pinned = Pinned(
        format=FORMAT,
        spec_hash=spec_hash(model),
        refresh=model.refresh,
        upgrade=upgrade,
        defaults=defaults_key(model, settings),
        resolve_key=resolve_key(model, settings),
        draft_key=_draft_key(model, settings),
        facts=facts,
        devices=placement.devices,
        cores=placement.cores,
        instance_type=placement.instance_type,
        nodes=placement.nodes,
        plan=_plan(model, facts, placement, choice, minutes),
        claim=claim_spec(choice),
        weights=weights if any(is_filled_by_job(one, weights) for one in sources(model)) else None,
        compiling=compiling,
        config=config,
        files=dict(model.spec.runs.files),
        template=template,
    )
    return Revision(number=number, pinned=pinned)


def chosen(
    model: NeuronModel, facts: Facts, settings: Settings, free: FreeDevices | None, before: Held | None = None
) -> tuple[NeuronModel, Choice | None]:
    """The place, and the manifest with its engine. Where the engine is left open, each family of devices is tried with
    the engine that is the default there, and the best place decides.

    Raises as `planner.choose`.
    """
    if not model.spec.runs.on_device:
        return model, None
    if not settings.engine_defaults or not model.spec.leaves_engine_open:
        return model, choose(model, _known_to(model, facts), settings, free, before)
    found: list[tuple[NeuronModel, Choice]] = []
    refusals: list[InvalidSpec | Unplaceable] = []
    for family in families_for(model, settings, free):
        one = model.with_default(settings.engine_defaults.get(family, DEFAULT), family)
        try:
            found.append((one, choose(one, _known_to(one, facts), settings, free, before)))
        except (InvalidSpec, Unplaceable) as refusal:
            refusals.append(refusal)
    if not found:
        raise _of_all(refusals)
    return min(found, key=lambda one: one[1].order)


def _known_to(model: NeuronModel, facts: Facts) -> Facts:
    """The facts, without a conversion where the engine knows of none: it may have been chosen after they were read."""
    return facts if model.spec.quantizes else msgspec.structs.replace(facts, conversion=None)


def _reads_converted(model: NeuronModel, facts: Facts, weights: Place) -> bool:
    """Whether a Job converts the weights. Raises InvalidSpec if one has to, and there is no place for the result."""
    if facts.conversion is None:
        return False
    if not weights.is_shared and not model.spec.runs.quantizes_itself:
        text = (
            f"the weights are to be converted ({facts.conversion.words}), which needs a place that pods share; set "
            "it, or the chart value storage.weights, for example storage.weights.pvcTemplate.size=1Ti"
        )
        raise InvalidSpec("spec.storage.weights", text, Reason.STORAGE_NOT_CONFIGURED)
    return weights.is_shared


def _of_all(refusals: Sequence[InvalidSpec | Unplaceable]) -> InvalidSpec | Unplaceable:
    """What is said if each family of devices is refused: an edit, or other nodes, may cure any of them."""
    unplaceable = [refusal for refusal in refusals if isinstance(refusal, Unplaceable)]
    if len(refusals) == 1 or not unplaceable:
        return refusals[0]
    needs = frozenset[Need]().union(*(refusal.needs for refusal in unplaceable))
    return Unplaceable(unplaceable[0].reason, ". ".join(dict.fromkeys(map(str, refusals))), needs)


def _check_parallelism(model: NeuronModel) -> None:
    """Raises InvalidSpec for what no group can be."""
    parallelism, nodes = model.spec.parallelism, model.spec.parallelism.nodes or 1
    if nodes == 1:
        return
    if parallelism.tensor and parallelism.tensor % nodes:
        raise InvalidSpec(
            "spec.parallelism.tensor", f"{parallelism.tensor} is not a multiple of parallelism.nodes, which is {nodes}"
        )
    if model.spec.accelerator.cores:
        raise InvalidSpec("spec.accelerator.cores", "a replica on several nodes has whole devices: set devices")


def _refuse(model: NeuronModel, launch: Launch, facts: Facts) -> None:
    """Raises InvalidSpec for what the engine itself would refuse or ignore."""
    runs, engine = model.spec.runs, model.spec.engine
    known = frozenset[str]() if engine.application_class else runs.architectures
    found = (*unknown(facts.architecture, known), *runs.refusals(launch, facts.architecture, engine.variables))
    note = default_note(model)
    refused = [InvalidSpec(f"spec.{path}", cure + note, Reason.FIELD_NOT_SUPPORTED) for path, cure in found]
    if refused:
        raise refused[0] if len(refused) == 1 else Refusals(refused)


def _compiling(model: NeuronModel, settings: Settings, choice: Choice | None) -> Compiling | None:
    if not model.spec.is_compiled:
        return None
    artifacts = artifacts_place(model, settings)
    if artifacts is None and model.spec.names_artifact:
        return None
    if artifacts is None:
        text = (
            "a compiled model needs a place for its artifact; set it, or the chart value storage.artifacts, for "
            "example storage.artifacts.pvcTemplate.size=10Gi"
        )
        raise InvalidSpec("spec.storage.artifacts", text, Reason.STORAGE_NOT_CONFIGURED)
    family = choice.chosen.site.family.name if choice else ""
    return Compiling(image=compile_image(model, settings), artifacts=artifacts, family=family)


def _compiled_by_engine(model: NeuronModel, settings: Settings, launch: Launch) -> Compiling | None:
    """How a Job of the engine's image compiles the graphs into a folder of their own on a claim. None: it cannot, it
    shall not, or there is no claim for them, or none that has the weights."""
    spec, artifacts = model.spec, artifacts_place(model, settings)
    part = replace(launch, document=compiled_part(launch.document))
    made = spec.runs.compile(part, spec.engine.variables)
    claim = artifacts and artifacts.persistent_volume_claim
    has_weights = not is_fetched_before(model, weights_place(model, settings))
    is_wanted = spec.engine.compile != "Disabled" and not spec.names_artifact
    if made is None or artifacts is None or not (claim and has_weights and is_wanted):
        return None
    image = serving_image(model, settings)
    digest = dig(launch.document, "model", "digest")
    key = names.digest([image, digest, list(made.command), dict(made.env)], KEY_LENGTH)
    return Compiling(
        image=image,
        artifacts=artifacts,
        family=launch.family,
        folder=f"{names.ARTIFACTS_DIR}/{spec.backend}/{key}",
        command=made.command,
        env=dict(made.env),
    )


def to_object(model: NeuronModel, revision: Revision) -> Object:
    return child(
        model,
        "apps/v1",
        "ControllerRevision",
        names.revision_name(model.name, revision.name),
        labels={names.REVISION_LABEL: revision.name},
        annotations=shared_annotation(revision),
        revision=revision.number,
        data=as_json(revision.pinned),
    )


def _compile_minutes(model: NeuronModel, facts: Facts, choice: Choice | None) -> int | None:
    """For how long each replica compiles, where no Job does; None: it does not."""
    if choice is None or model.spec.runs.compiles != "on device":
        return None
    return min(compile_minutes(facts, choice.chosen.load), MAX_MINUTES)


def _plan(model: NeuronModel, facts: Facts, placement: Placement, choice: Choice | None, minutes: int | None) -> Plan:
    """minutes: that each replica compiles as it starts."""
    serving = model.spec.serving
    option = choice.chosen if choice else None
    load = option.load if option else None
    instance_type = option.site.name if option else placement.instance_type
    how = f"with backend {model.backend_words}{f', {option.shares}' if option else ''}"
    where = f" on {placement.instance_type}" if placement.instance_type else ""
    return Plan(
        instance_type=instance_type or None,
        devices=placement.devices,
        cores=placement.cores or None,
        tensor=option.tensor if option else ranks_of(model),
        nodes=placement.nodes,
        max_model_length=load.length if load else serving.max_model_length,
        max_sequences=load.sequences if load else serving.max_sequences,
        block_size=(load and load.block_size) or serving.block_size,
        num_blocks=(load and load.num_blocks) or serving.num_blocks,
        task=None if model.spec.generates else serving.task,
        backend=model.spec.backend,
        default_for=model.default_for or None,
        dtype=(serving.dtype or facts.dtype)[:64],
        sampling=(sampling_mode(model)[:64] or None) if model.spec.generates else None,
        memory=_memory_plan(option.memory) if option else None,
        host_bytes=min(serving_memory(model, facts, placement.nodes), MAX_BYTES),
        compile_minutes=minutes,
        summary=f"each replica holds {placement.words}{where} and {model.spec.runs.does} "
        f"{how}; weights {facts.weights_bytes} bytes ({facts.parameters} parameters, {facts.dtype[:64]})"
        + (f", {facts.conversion.words} {facts.conversion.bytes} bytes" if facts.conversion else "")
        + ("" if model.spec.generates else f"; task {serving.task}")
        + (f"; {_words_of_draft(facts.draft)}" if facts.draft else "")
        + (f"; {choice.arithmetic}" if choice else "")
        + (f"; {compiling_words(minutes)}" if minutes else ""),
    )


def _words_of_draft(draft: Facts) -> str:
    return f"draft model of {draft.weights_bytes} bytes ({draft.parameters} parameters)"


def compiling_words(minutes: int | None) -> str:
    """What is said before a replica compiles. None: a revision of an earlier version, which did not estimate it."""
    about = f", about {counted(minutes, 'minute')}" if minutes else ""
    return f"each replica compiles on the device as it starts{about}"


def _memory_plan(memory: Memory) -> MemoryPlan:
    """What a status can hold of it: integers of 64 bits."""
    of_parts = {f"{name}_bytes": min(part, MAX_BYTES) for name, part in memory.parts.items()}
    return MemoryPlan(**of_parts, available_bytes=memory.limit)
