"""Pod templates of replicas and of steps' Jobs, both Pod Security `restricted`.

Called by `revision.pin` and `render.jobs`. Only this module merges a manifest's podTemplate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from neuron_operator.api import names
from neuron_operator.api.engines.engine import Engine, HostBytes, Launch, Probe, Served
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.fields import as_json
from neuron_operator.api.model import ApiKeySecret, NeuronModel, Toleration
from neuron_operator.place.catalog import INSTANCE_TYPES, label_values
from neuron_operator.place.planner import Choice
from neuron_operator.place.sizes import size_rule
from neuron_operator.read.placement import TOLERATES_NEURON, Placement
from neuron_operator.read.world import Granting, Object, Place, Settings
from neuron_operator.render import claims
from neuron_operator.render.objects import Mount, without_empty
from neuron_operator.render.resources import FETCH_REQUESTS, Requests, overlaid, within
from neuron_operator.render.storage import (
    Access,
    adapters_of,
    fetch_command,
    fetching,
    folder_of,
    is_fetched_before,
    loading,
    loading_artifact,
)

RELEASE_SECONDS = 30
"""Part of the grace period for releasing the devices after the last stream."""

POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
READABLE = 0o444
"""Mode of mounted Secrets. The kubelet writes them as root, the container runs as another user, and not every cluster
allows an fsGroup. The container has only one user."""
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
"""OpenSSL and httpx, requests, and the AWS SDK each read their own."""


SOON_OFF_A_LOST_NODE = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
)
"""Instead of Kubernetes' five minutes: what a Job did is resumed elsewhere, and a replica has only to load again."""
NOT_NEURON: tuple[Object, ...] = (
    {"key": names.NEURON_PRESENT_LABEL, "operator": "DoesNotExist"},
    {"key": names.INSTANCE_TYPE_LABEL, "operator": "NotIn", "values": label_values(INSTANCE_TYPES)},
)
NOT_NEURON_IF_POSSIBLE: tuple[Object, ...] = tuple(
    {"weight": 100, "preference": {"matchExpressions": [expression]}} for expression in NOT_NEURON
)
TMP = Mount("tmp", names.TMP_DIR, {"emptyDir": {}})
SHM = Mount(names.SHM_VOLUME, names.SHM_DIR, {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}})
"""Where the ranks of a node exchange data; it counts as memory of the pod."""
HUGE_PAGES = "5120Mi"
"""What EKS' images for EFA reserve on each node, and its guide requests."""


def serving_pod_template(
    model: NeuronModel,
    placement: Placement,
    settings: Settings,
    *,
    requests: Requests,
    weights: Place,
    artifacts: Place | None,
    choice: Choice | None,
    revision: str,
    launch: Launch,
    digest: str,
) -> Object:
    """The pod template of one revision.

    Args:
        requests: the default.
        launch: what `launch_of` says.
        artifacts: where Jobs put the compiled model; None: it is not compiled, or the manifest names it.
        choice: the devices that it is computed on; None: it is computed on the host.
        digest: of the weights.
    """
    access = loading(model, weights) + loading_artifact(model, artifacts) + adapters_of(model, weights)
    engine, overlay = model.spec.runs, model.spec.pod_template
    rollout = model.spec.rollout
    api_key = model.spec.serving.api_key_secret_ref
    own_labels = {
        **names.labels(model.name),
        names.ROLE_LABEL: names.ROLE_LEADER,
        names.REVISION_LABEL: revision,
    }
    if placement.on_devices:
        own_labels[names.ALLOCATION_LABEL] = names.ALLOCATION_CORES if placement.cores else names.ALLOCATION_DEVICES
    wired_to = choice.chosen.site if choice and placement.nodes > 1 else None
    has_network = bool(wired_to and wired_to.efa)
    extended = {**placement.resources, **(_network(wired_to.efa, placement) if wired_to and has_network else {})}
    # Of extended resources requests and limits must be equal.
    whole = {"limits": extended, "requests": extended}
    resources = overlaid(requests, as_json(overlay.spec.resources), whole)
    claim = claims.claim_spec(choice)
    document = {"configMap": {"name": names.config_name(model.name, launch.document, engine.files)}}
    mounts = (
        Mount(names.CONFIG_VOLUME, names.CONFIG_DIR, document, read_only=True),
        *(
            TMP,
            *access.mounts,
            *_api_key(api_key, engine),
            *_ca_bundle(access, settings),
            *((SHM,) if wired_to or not engine.is_ours else ()),
        ),
    )
    served = engine.serve(launch)
    container = _container(
        model,
        settings,
        image=serving_image(model, settings),
        command=list(served.command),
        env=merged_env(
            _download_env(model, access, settings),
            as_json(model.spec.engine.env),
            _credentials(model, access, "hf"),
            (
                {"name": "HOME", "value": names.TMP_DIR},
                *target_env(choice.chosen.site.family.name if choice else ""),
                *_own_env(served, model),
                *_api_key_variable(api_key, engine),
            ),
        ),
        resources={**resources, "claims": [{"name": names.CLAIM}]} if claim else resources,
        mounts=mounts,
    )
    ports = {names.PORT_NAME: names.PORT}
    if model.spec.serving.cache_events == "Enabled":
        ports[names.CACHE_EVENTS_PORT_NAME] = names.CACHE_EVENTS_PORT
    container["ports"] = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]
    for name in ("startup", "readiness", "liveness"):
        if probe := getattr(engine.probes, name):
            container[f"{name}Probe"] = _probe(probe, launch.start_seconds)
    container.update(without_empty({"workingDir": served.working_dir}), **before_stopping(served))
    fetcher, its_mounts = (
        _fetcher(model, weights, digest, settings, resources) if is_fetched_before(model, weights) else ({}, ())
    )
    return {
        "metadata": without_empty(
            {"labels": {**overlay.metadata.labels, **own_labels}, "annotations": overlay.metadata.annotations}
        ),
        "spec": without_empty(
            {
                **_pod_frame(model, settings, container, (*mounts, *its_mounts)),
                **claims.in_pod(model, claim),
                "initContainers": [fetcher] if fetcher else [],
                "serviceAccountName": overlay.spec.service_account_name or names.service_account_name(model.name),
                "securityContext": {**POD_SECURITY, **_as_user(engine.user), **as_json(overlay.spec.security_context)},
                "terminationGracePeriodSeconds": rollout.drain_delay_seconds + rollout.drain_seconds + RELEASE_SECONDS,
                "nodeSelector": {
                    **_architecture(model, placement),
                    **overlay.spec.node_selector,
                    **({names.ALLOCATION_LABEL: names.ALLOCATION_CORES} if placement.cores else {}),
                },
                "tolerations": [
                    *([TOLERATES_NEURON] if placement.on_devices else []),
                    *as_json(overlay.spec.tolerations),
                    *_soon_off_a_lost_node(overlay.spec.tolerations),
                ],
                "affinity": _affinity(_spread(model), placement, _node_rules(placement, choice, settings.by_plugin)),
                "topologySpreadConstraints": as_json(overlay.spec.topology_spread_constraints),
                "priorityClassName": overlay.spec.priority_class_name,
                "schedulerName": overlay.spec.scheduler_name
                or (settings.device_scheduler_name if placement.on_devices else None),
                "runtimeClassName": overlay.spec.runtime_class_name,
            }
        ),
    }


def _own_env(served: Served, model: NeuronModel) -> Iterator[Object]:
    """The variables of the engine, but for those that the manifest sets and may set."""
    left = served.free & model.spec.engine.variables.keys()
    yield from ({"name": name, "value": value} for name, value in served.env.items() if name not in left)


def _soon_off_a_lost_node(tolerations: Iterable[Toleration]) -> Iterator[Object]:
    """Without the taints for which the manifest has a time of its own: of several, Kubernetes takes the shortest."""
    keys = {one.key for one in tolerations if one.effect in (None, "NoExecute")}
    if None not in keys:
        yield from (one for one in SOON_OFF_A_LOST_NODE if one["key"] not in keys)


def _fetcher(
    model: NeuronModel, place: Place, digest: str, settings: Settings, of_replica: Mapping[str, Any]
) -> tuple[Object, tuple[Mount, ...]]:
    """The init container, with its volumes, that does in each pod what the Job does for a shared place.

    The chart's resources of Jobs are for the largest of them, which compiles. A pod takes what its largest container
    requests, so they count up to those of the replica.
    """
    access = fetching(model, place)
    mounts = (TMP, *access.mounts, *_ca_bundle(access, settings))
    container = _container(
        model,
        settings,
        name=names.FETCH_CONTAINER,
        image=runtime_image(model, settings),
        command=fetch_command(model, access, digest),
        env=_step_env(model, access, settings),
        resources=overlaid(
            FETCH_REQUESTS, within(settings.jobs.resources, of_replica), as_json(model.spec.jobs.resources)
        ),
        mounts=mounts,
    )
    return container, mounts


def _step_env(model: NeuronModel, access: Access, settings: Settings, env: Iterable[Object] = ()) -> list[Object]:
    return merged_env(
        _download_env(model, access, settings),
        _credentials(model, access, "hf"),
        ({"name": "HOME", "value": names.TMP_DIR}, *env),
    )


UNMOVED = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Annotations of Jobs that take long: an autoscaler that moves their pods to save a node repeats an hour of work."""


def step_pod_template(
    model: NeuronModel,
    settings: Settings,
    *,
    role: str,
    image: str,
    command: list[str],
    access: Access,
    mounts: Iterable[Mount] = (),
    env: Iterable[Object] = (),
    annotations: Mapping[str, str] | None = None,
    user: int = 0,
    resources: Mapping[str, Any],
    nodes: Object,
) -> Object:
    """The pod template of a step's Job, with the chart's `jobs.*`. It names no model.

    nodes: the fields that choose its node.
    """
    mounts = (TMP, *mounts, *access.mounts, *_ca_bundle(access, settings))
    container = _container(
        model,
        settings,
        image=image,
        command=command,
        env=_step_env(model, access, settings, env),
        resources=overlaid({}, resources, settings.jobs.resources, as_json(model.spec.jobs.resources)),
        mounts=mounts,
    )
    own = {names.REFRESH_ANNOTATION: model.refresh} if model.refresh else {}
    stays = UNMOVED if role in (names.ROLE_FETCH, names.ROLE_CONVERT, names.ROLE_COMPILE) else {}
    annotations = {**stays, **settings.jobs.annotations, **model.spec.jobs.annotations, **own, **(annotations or {})}
    labels = {**settings.jobs.labels, **model.spec.jobs.labels, **names.shared_labels(role), names.ROLE_LABEL: role}
    overlay = model.spec.pod_template.spec
    has_claim = any("persistentVolumeClaim" in mount.source for mount in mounts)
    return {
        "metadata": without_empty({"labels": labels, "annotations": annotations}),
        "spec": without_empty(
            {
                **_pod_frame(model, settings, container, mounts),
                "serviceAccountName": overlay.service_account_name,
                "restartPolicy": "Never",
                "securityContext": {
                    **POD_SECURITY,
                    **_as_user(user),
                    **(as_json(overlay.security_context) if has_claim else {}),
                },
                "tolerations": [*settings.jobs.tolerations, *SOON_OFF_A_LOST_NODE],
                **nodes,
            }
        ),
    }


def _as_user(user: int) -> Object:
    return {"runAsUser": user} if user else {}


def _pod_frame(model: NeuronModel, settings: Settings, container: Object, mounts: Iterable[Mount]) -> Object:
    overlay = model.spec.pod_template.spec
    pull_secrets = dict.fromkeys(
        (*settings.image_pull_secrets, *(secret.name for secret in overlay.image_pull_secrets))
    )
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in pull_secrets],
        "containers": [container],
        "volumes": list({mount.name: mount.volume for mount in mounts}.values()),
    }


def _container(
    model: NeuronModel,
    settings: Settings,
    *,
    image: str,
    command: list[str],
    env: list[Object],
    resources: Mapping[str, Any],
    mounts: Iterable[Mount],
    name: str = names.RUNTIME_CONTAINER,
) -> Object:
    return without_empty(
        {
            "name": name,
            "image": image,
            "imagePullPolicy": model.spec.engine.image_pull_policy or settings.image_pull_policy,
            "command": command,
            "env": env,
            "resources": dict(resources),
            "volumeMounts": [mount.in_container for mount in mounts],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "terminationMessagePath": names.TERMINATION_LOG,
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def launch_of(
    model: NeuronModel,
    config: Mapping[str, Any],
    settings: Settings,
    *,
    digest: str,
    host: HostBytes,
    weights: Place,
    artifacts: Place | None,
    choice: Choice | None,
    nodes: int = 1,
) -> Launch:
    """How a replica with this RuntimeConfig document is started. Raises InvalidSpec if its engine cannot be."""
    engine, setting = model.spec.runs, model.spec.engine_setting
    if not serving_image(model, settings):
        raise InvalidSpec("spec.engine.image", f"set it, or the chart value engines.{setting}.image")
    return Launch(
        config,
        (loading(model, weights) + loading_artifact(model, artifacts) + adapters_of(model, weights)).arguments,
        has_api_keys=model.spec.serving.api_key_secret_ref is not None,
        host=host,
        model_dir="" if engine.is_ours else folder_of(model, weights, digest),
        version=settings.engine(setting).version_of(engine.versions),
        family=choice.chosen.site.family.name if choice else "",
        nodes=nodes,
        args=model.spec.engine.args,
    )


def serving_image(model: NeuronModel, settings: Settings) -> str:
    """The image of replicas; empty: nobody has set one for the engine."""
    return _own_image(model, settings) or (settings.runtime_image if model.spec.runs.is_ours else "")


def runtime_image(model: NeuronModel, settings: Settings) -> str:
    """The image of Jobs, which run our runtime whatever serves."""
    return serving_image(model, settings) if model.spec.runs.is_ours else settings.runtime_image


def compile_image(model: NeuronModel, settings: Settings) -> str:
    return _own_image(model, settings) or settings.compile_image or settings.runtime_image


def _own_image(model: NeuronModel, settings: Settings) -> str:
    return model.spec.engine.image or settings.engine(model.spec.engine_setting).image


def target_env(family: str) -> tuple[Object, ...]:
    """Tells the runtime and its compiler the family of devices, which a container may be unable to see."""
    return ({"name": names.PLATFORM_VARIABLE, "value": family},) if family else ()


def before_stopping(served: Served) -> Object:
    """The fields of a container that say what happens before it is told to stop."""
    if served.stop_command:
        return {"lifecycle": {"preStop": {"exec": {"command": list(served.stop_command)}}}}
    if served.stop_delay_seconds:
        return {"lifecycle": {"preStop": {"sleep": {"seconds": served.stop_delay_seconds}}}}
    return {}


def _probe(probe: Probe, start_seconds: int) -> Object:
    return {
        "httpGet": {"path": probe.path, "port": names.PORT_NAME},
        "periodSeconds": probe.period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": probe.failures or -(-start_seconds // probe.period_seconds),
    }


def merged_env(*layers: Iterable[Object]) -> list[Object]:
    """One list with unique names; a later layer replaces a variable in place."""
    merged = {variable["name"]: variable for layer in layers for variable in layer}
    return list(merged.values())


def _credentials(model: NeuronModel, access: Access, scheme: str) -> Iterator[Object]:
    """Keys of the credentials Secret for URIs of this scheme, if the pod reads some. Optional, so that a public model
    starts without the Secret, and a key may be missing, unless the manifest names it."""
    secret = model.spec.model.credentials_secret_ref
    if secret is not None and scheme in access.remotes:
        for key in names.CREDENTIALS[scheme]:
            ref = {"name": secret.name, "key": key, "optional": True}
            if secret.key and key == names.HUB_TOKEN_KEY:
                ref = {"name": secret.name, "key": secret.key}
            yield {"name": key, "valueFrom": {"secretKeyRef": ref}}


def _api_key_variable(secret: ApiKeySecret | None, engine: Engine) -> Iterator[Object]:
    if secret is not None and engine.api_key_variable:
        ref = {"name": secret.name, "key": secret.key}
        yield {"name": engine.api_key_variable, "valueFrom": {"secretKeyRef": ref}}


def _api_key(secret: ApiKeySecret | None, engine: Engine) -> Iterator[Mount]:
    """The Secret with the keys, which the kubelet keeps up to date. The operator does not read it."""
    if secret is not None and not engine.api_key_variable:
        items = [{"key": secret.key, "path": names.API_KEY_FILE}]
        source = {"secretName": secret.name, "items": items, "defaultMode": READABLE}
        yield Mount(names.API_KEY_VOLUME, names.API_KEY_DIR, {"secret": source}, read_only=True)


def _ca_bundle(access: Access, settings: Settings) -> Iterator[Mount]:
    """The certificate authorities of the installation, in pods that download. Not optional: a pod without them would
    fail later, with an error about certificates."""
    bundle = settings.ca_bundle
    for kind, name_field, ref in (("configMap", "name", bundle.config_map), ("secret", "secretName", bundle.secret)):
        if ref is not None and access.remotes:
            items = [{"key": ref.key, "path": names.CA_FILE}]
            source = {name_field: ref.name, "items": items, "defaultMode": READABLE}
            yield Mount(names.CA_VOLUME, names.CA_DIR, {kind: source}, read_only=True)


def _download_env(model: NeuronModel, access: Access, settings: Settings) -> Iterator[Object]:
    """Variables of a pod that downloads. Those of the chart win, because a key that the Secret lacks would hide them:
    a region, the address of a store."""
    for mount in _ca_bundle(access, settings):
        yield from ({"name": name, "value": f"{mount.path}/{names.CA_FILE}"} for name in CA_VARIABLES)
    yield from _credentials(model, access, "s3")
    yield from settings.jobs.env if access.remotes else ()


def _network(efa: int, placement: Placement) -> Object:
    """The interfaces of a whole node, unless a claim has them, and the pinned memory that they need."""
    interfaces = {} if placement.by_claim else {names.EFA_RESOURCE: str(efa)}
    return {**interfaces, names.HUGE_PAGES_RESOURCE: HUGE_PAGES}


def _spread(model: NeuronModel) -> Mapping[str, Any]:
    """The user's affinity, or else replicas on different nodes and in different zones where possible.

    Not topologySpreadConstraints: with one for zones, the scheduler ignores the other on nodes without a zone, and any
    replaces the scheduler's default, which yields to the pull towards nodes that already have the image.
    """
    overlay = model.spec.pod_template.spec
    if overlay.topology_spread_constraints or overlay.affinity.get("podAntiAffinity") is not None:
        return overlay.affinity
    selector = {"matchLabels": names.serving_selector(model.name)}
    preferred = [
        {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": key}}
        for key, weight in ((names.HOSTNAME_LABEL, 100), (names.ZONE_LABEL, 50))
    ]
    return {**overlay.affinity, "podAntiAffinity": {names.PREFERRED_AFFINITY: preferred}}


def _architecture(model: NeuronModel, placement: Placement) -> Mapping[str, str]:
    """That of the images, unless the manifest speaks of it. All nodes with devices have it."""
    is_told = names.ARCHITECTURE_LABEL in str(model.spec.pod_template.spec.affinity)
    return {} if placement.on_devices or is_told else names.AMD64


def _node_rules(placement: Placement, choice: Choice | None, granting: Granting) -> list[Object]:
    """Devices stay off the nodes for cores, both off the nodes that would refuse the pod's size, and compiled models on
    the devices that they are compiled for."""
    apart = {"key": names.ALLOCATION_LABEL, "operator": "NotIn", "values": [names.ALLOCATION_CORES]}
    by_plugin = placement.devices and not placement.by_claim
    rules = (apart if by_plugin else None, size_rule(placement, granting), choice and choice.node_rule)
    return [rule for rule in rules if rule]


def _affinity(affinity: Mapping[str, Any], placement: Placement, rules: list[Object]) -> Mapping[str, Any]:
    """The affinity, plus the rules for nodes, plus devices and cores on different nodes: the plugin could
    allocate the same core twice. What holds no device leaves nodes with devices to others if it can."""
    if placement.cores:
        devices = {"matchLabels": {names.ALLOCATION_LABEL: names.ALLOCATION_DEVICES}}
        term = {"labelSelector": devices, "namespaceSelector": {}, "topologyKey": names.HOSTNAME_LABEL}
        affinity = with_terms(affinity, "podAntiAffinity", (term,))
    if not placement.on_devices:
        return with_terms(affinity, "nodeAffinity", NOT_NEURON_IF_POSSIBLE, kind=names.PREFERRED_AFFINITY)
    if not rules:
        return affinity
    node = affinity.get("nodeAffinity") or {}
    selector = node.get(names.REQUIRED_AFFINITY) or {}
    terms = [
        # An empty term matches no node.
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *rules]} if any(term.values()) else term
        for term in selector.get("nodeSelectorTerms") or ()
    ]
    required = {**selector, "nodeSelectorTerms": terms or [{"matchExpressions": rules}]}
    return {**affinity, "nodeAffinity": {**node, names.REQUIRED_AFFINITY: required}}


def with_terms(
    affinity: Mapping[str, Any], part: str, terms: Iterable[Object], kind: str = names.REQUIRED_AFFINITY
) -> Object:
    """The affinity with these terms besides those in it."""
    before = affinity.get(part) or {}
    return {**affinity, part: {**before, kind: [*(before.get(kind) or ()), *terms]}}
