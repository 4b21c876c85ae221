"""Jobs of steps, and the ConfigMaps that keep their records. Called by `steps`.

A Job is shared: it is named by a hash of what it does, so that the API server creates it once for all models of the
namespace that need the same. Nothing in it names a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import NeuronModel, remembered
from neuron_operator.read.objects import MAX_OWNERS, name_of, owners_of, text
from neuron_operator.read.records import Facts, Record
from neuron_operator.read.revision import Revision
from neuron_operator.read.world import Object, Place, Settings
from neuron_operator.render import storage
from neuron_operator.render.config_document import compiled_part, to_json
from neuron_operator.render.objects import Mount, shared
from neuron_operator.render.pods import (
    NOT_NEURON,
    NOT_NEURON_IF_POSSIBLE,
    SHM,
    compile_image,
    runtime_image,
    step_pod_template,
    target_env,
)
from neuron_operator.render.resources import (
    CHECK_REQUESTS,
    FETCH_REQUESTS,
    JOB_REQUESTS,
    Requests,
    compile_requests,
    convert_requests,
    fetch_requests,
)
from neuron_operator.render.storage import Access, fetch_command, fetching, reading_adapter, source

KEPT_SECONDS = 600
"""A Job whose record is copied is deleted after this time, so that its log can be read."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 600
"""A failed Job is deleted, and created again, after a tenth of the time that its step has been waiting."""

PREFER_NOT_NEURON: Object = {names.PREFERRED_AFFINITY: list(NOT_NEURON_IF_POSSIBLE)}
NEVER_NEURON: Object = {names.REQUIRED_AFFINITY: {"nodeSelectorTerms": [{"matchExpressions": list(NOT_NEURON)}]}}

_DRAINED: Object = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
"""After a drain the Job makes another pod. Any other end fails it: only the operator repeats it, because the Job
controller would pause 10, 20 and 40 s, however short the fault was."""


@dataclass(frozen=True)
class JobKind:
    """What the Jobs of one step have in common."""

    role: str
    prefix: str
    """The names of the Job and of the ConfigMap with its record begin with this."""
    deadline_seconds: int
    """Includes pulling a runtime image of several GB on a new node."""
    node_affinity: Mapping[str, Any]


MEMORY_MULTIPLES = (1, 2, 4)

_CONFIG_ITEM: Object = {
    "path": names.CONFIG_KEY,
    "fieldRef": {"fieldPath": f"metadata.annotations['{names.CONFIG_ANNOTATION}']"},
}
_CONFIG = Mount(names.CONFIG_VOLUME, names.CONFIG_DIR, {"downwardAPI": {"items": [_CONFIG_ITEM]}}, read_only=True)
"""The configuration is an annotation, which the kubelet gives the pod as a file: no other object is to be kept."""

RESOLVE_ADAPTER = JobKind(names.ROLE_RESOLVE, "adapter-facts", 1800, PREFER_NOT_NEURON)
FETCH_ADAPTER = JobKind(names.ROLE_FETCH, "adapter", 3600, NEVER_NEURON)
RESOLVE = JobKind(names.ROLE_RESOLVE, "facts", 1800, PREFER_NOT_NEURON)
FETCH = JobKind(names.ROLE_FETCH, "weights", 6 * 3600, NEVER_NEURON)
CONVERT = JobKind(names.ROLE_CONVERT, "converted", 6 * 3600, NEVER_NEURON)
COMPILE = JobKind(names.ROLE_COMPILE, "artifact", 6 * 3600, NEVER_NEURON)
CHECK = JobKind(names.ROLE_CHECK, "check", 1800, PREFER_NOT_NEURON)


def wanted_format(model: NeuronModel) -> str:
    """As the runtime is told it; empty: it decides."""
    wanted = model.spec.serving.quantization
    return "" if wanted == "Auto" or not model.spec.quantizes else wanted.lower()


def leaves_open(model: NeuronModel, settings: Settings) -> bool:
    """Whether the devices decide which engine has the model."""
    return bool(settings.engine_defaults) and model.spec.leaves_engine_open


@remembered
def resolve_job(model: NeuronModel, settings: Settings, digest: str = "") -> Object:
    """Reads the model's facts with the model's own credentials, before devices are allocated. digest: that it must
    have; empty: any."""
    command = ["neuron-runtime", "inspect", model.spec.model.uri, "--record", names.TERMINATION_LOG]
    command += ["--digest", digest] if digest else []
    engine = model.spec.runs
    wanted, may_convert = wanted_format(model), model.spec.may_convert and not leaves_open(model, settings)
    if engine.asks_cache or engine.is_narrow or not engine.is_ours or may_convert or wanted:
        command += ["--backend", model.spec.backend]
    if wanted:
        command += ["--quantization", wanted]
    if application_class := model.spec.engine.application_class:
        command += ["--application-class", application_class]
    return shared_job(model, settings, RESOLVE, command, source(model), image=runtime_image(model, settings))


def resolve_draft_job(model: NeuronModel, draft: NeuronModel, settings: Settings) -> Object:
    """The same of the draft model. The Job for one of method Draft is that of a model with its source."""
    if model.spec.serving.speculation.method != "Eagle":
        return resolve_job(draft, settings, "")
    command = ["neuron-runtime", "inspect", draft.spec.model.uri, "--eagle-head", "--record", names.TERMINATION_LOG]
    return shared_job(draft, settings, RESOLVE, command, source(draft), image=runtime_image(draft, settings))


def fetch_job(model: NeuronModel, settings: Settings, weights: Place, facts: Facts, image: str) -> Object:
    """Brings the weights of these facts to where all pods read them."""
    access = fetching(model, weights)
    command = fetch_command(model, access, facts.digest)
    return shared_job(model, settings, FETCH, command, access, image=image, requests=fetch_requests(weights, facts))


def convert_job(model: NeuronModel, settings: Settings, revision: Revision) -> tuple[Object, ...]:
    """Makes of the weights, which a Job has fetched to the same place unless they are read where their URI says, what
    replicas read. It fetches them again if they are lost. Empty: replicas read what is there."""
    pinned, conversion = revision.pinned, revision.pinned.conversion
    if conversion is None or pinned.weights is None:
        return ()
    access = fetching(model, pinned.weights)
    command = ["neuron-runtime", "convert", model.spec.model.uri, *access.arguments, "--digest", pinned.facts.digest]
    command += ["--backend", model.spec.backend, "--quantization", conversion.format, "--converted", conversion.digest]
    command += ["--record", names.TERMINATION_LOG]
    requests = convert_requests(pinned.weights, pinned.facts)
    return (shared_job(model, settings, CONVERT, command, access, image=revision.image, requests=requests),)


def resolve_adapter_job(
    adapter: NeuronModel, base: NeuronModel, digest: str, settings: Settings, claim: Place | None
) -> Object:
    """Reads the facts of an adapter, and whether it fits its model, of which the claim has the folder of this digest.

    adapter: the manifest of its model with the adapter's source.
    """
    of = f"file://{storage.WEIGHTS.folder}/{digest}" if claim else base.spec.model.uri
    limits = base.spec.serving.adapters
    command = ["neuron-runtime", "inspect", adapter.spec.model.uri, "--adapter-of", of, "--backend", base.spec.backend]
    command += ["--max-rank", str(limits.max_rank)] if limits.max_rank else []
    command += ["--targets", ",".join(limits.targets)] if limits.targets else []
    command += ["--ignore-chat-template"] if base.spec.serving.chat_template else []
    command += ["--record", names.TERMINATION_LOG]
    access = reading_adapter(adapter, base, claim)
    return shared_job(adapter, settings, RESOLVE_ADAPTER, command, access, image=runtime_image(base, settings))


def fetch_adapter_job(adapter: NeuronModel, settings: Settings, claim: Place, digest: str) -> Object:
    """Brings an adapter, as it was checked, into the claim that all replicas of its model read."""
    access = fetching(adapter, claim)
    command = [*fetch_command(adapter, access, digest), "--adapter"]
    return shared_job(
        adapter,
        settings,
        FETCH_ADAPTER,
        command,
        access,
        image=runtime_image(adapter, settings),
        requests=FETCH_REQUESTS,
    )


def compile_jobs(model: NeuronModel, settings: Settings, revision: Revision) -> tuple[Object, ...]:
    """Compile the model of a revision without devices: with the estimated memory, then with twice and four times as
    much. Memory that chart or manifest set is not multiplied. Empty: the revision is not compiled."""
    pinned, compiling = revision.pinned, revision.pinned.compiling
    if compiling is None:
        return ()
    access = storage.compiling(model, pinned.weights, compiling.artifacts)
    if compiling.folder:
        return _by_memory(
            lambda times: shared_job(
                model,
                settings,
                COMPILE,
                model.spec.runs.job(compiling.folder, compiling.command),
                access,
                image=compiling.image,
                mounts=(SHM,),
                env=[{"name": name, "value": value} for name, value in sorted(compiling.env.items())],
                requests=compile_requests(model, pinned.facts, times),
                limited=("memory",),
                user=model.spec.runs.user,
            )
        )
    config = f"{names.CONFIG_DIR}/{names.CONFIG_KEY}"
    command = ["neuron-runtime", "compile", "--config", config, *access.arguments, "--record", names.TERMINATION_LOG]
    # The compiler of the installation belongs to its runtime image; a revision with an earlier one keeps its own.
    is_current = revision.image == runtime_image(model, settings)
    return _by_memory(
        lambda times: shared_job(
            model,
            settings,
            COMPILE,
            command,
            access,
            image=compile_image(model, settings) if is_current else compiling.image,
            mounts=(_CONFIG,),
            annotations={names.CONFIG_ANNOTATION: to_json(compiled_part(pinned.config))},
            env=target_env(compiling.family),
            requests=compile_requests(model, pinned.facts, times),
            limited=("memory",),
        )
    )


def _by_memory(made: Callable[[int], Object]) -> tuple[Object, ...]:
    """Those that have different limits."""
    jobs = [made(times) for times in MEMORY_MULTIPLES]
    return tuple({memory_of(job): job for job in reversed(jobs)}.values())[::-1]


def check_job(model: NeuronModel, settings: Settings, revision: Revision) -> Object:
    """Asks the runtime of a revision whether it accepts the revision's configuration: without weights and devices."""
    pinned = revision.pinned
    access = storage.loading(model, pinned.weights or Place())
    return shared_job(
        model,
        settings,
        CHECK,
        model.spec.runs.check(access.arguments),
        access,
        image=revision.image,
        mounts=(_CONFIG,),
        annotations={names.CONFIG_ANNOTATION: to_json(pinned.config)},
        env=target_env(pinned.compiling.family if pinned.compiling else ""),
        requests=CHECK_REQUESTS,
    )


def nodes_for_jobs(settings: Settings, node_affinity: Mapping[str, Any]) -> Object:
    """The fields of a Job's pod that choose its node. The chart may name another architecture, that of its images."""
    selector = {**names.AMD64, **settings.jobs.node_selector}
    return {"nodeSelector": selector, "affinity": {"nodeAffinity": node_affinity}}


def memory_of(job: Object) -> str:
    """The limit that a Job runs with, as a quantity."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return str(container["resources"].get("limits", {}).get("memory", ""))


def shared_job(
    model: NeuronModel,
    settings: Settings,
    kind: JobKind,
    command: list[str],
    access: Access,
    *,
    image: str,
    mounts: Sequence[Mount] = (),
    env: Sequence[Object] = (),
    annotations: Mapping[str, str] | None = None,
    requests: Requests = JOB_REQUESTS,
    limited: Iterable[str] = (),
    user: int = 0,
) -> Object:
    """The Job of a step. Models for which it would do the same get the same name. Settings of the installation do not
    change the name, nor where and how often it is tried, so that neither repeats what is done.

    Args:
        access: what it reads and writes; the arguments are the caller's to use.
        image: that of the revision, for a step after Place.
        annotations: of its pod.
        requests: CPU and memory, unless chart or manifest say otherwise.
        limited: of them, those that are limits as well.
        user: 0: that of the image.
    """
    template = partial(
        step_pod_template,
        model,
        role=kind.role,
        image=image,
        command=command,
        access=access,
        mounts=mounts,
        env=env,
        annotations=annotations,
        user=user,
        resources={"requests": dict(requests), "limits": {name: requests[name] for name in limited}},
    )
    rendered = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": kind.deadline_seconds,
        "podFailurePolicy": {"rules": [_DRAINED]},
        "template": template(settings, nodes=nodes_for_jobs(settings, kind.node_affinity)),
    }
    # What a manifest says in the words of the default still wins over the installation.
    own_resources = as_json(model.spec.jobs.resources)
    name = names.shared_name(kind.prefix, [template(Settings(runtime_image=image), nodes={}), own_resources])
    return shared(
        model,
        "batch/v1",
        "Job",
        name,
        component=kind.role,
        labels={names.ROLE_LABEL: kind.role},
        annotations={names.RENDERED_ANNOTATION: names.digest(rendered)},
        spec=rendered,
    )


def with_owners(desired: Object, live: Object) -> Object:
    """The shared object with the owners of `live` as well; if those are enough, with them alone."""
    enough = len(owners_of(live)) >= MAX_OWNERS
    owners = {text(owner, "uid"): dict(owner) for owner in (*owners_of(live), *(() if enough else owners_of(desired)))}
    return {**desired, "metadata": {**desired["metadata"], "ownerReferences": list(owners.values())}}


def keeper(model: NeuronModel, job: Object, record: Record) -> Object:
    """The ConfigMap that keeps a Job's record: the Job and its pods are deleted some time after they ended."""
    role = job["metadata"]["labels"][names.ROLE_LABEL]
    return shared(
        model,
        "v1",
        "ConfigMap",
        name_of(job),
        component=role,
        labels={names.ROLE_LABEL: role},
        immutable=True,
        data={names.RECORD_KEY: to_json(record)},
    )
