"""The client of the API server: raw JSON objects, typed faults. Called by reflectors, passes and the lease.

The kubernetes package says how to reach it: TLS, exec plugins, token rotation, proxies. Its client and typed models are
not used: they cost more CPU and memory than everything else in the operator. Nothing here retries or caches: the caller
knows what a fault means.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
import yaml
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from neuron_operator.api import names
from neuron_operator.api.errors import ClusterFault
from neuron_operator.cluster.containment import own_entries
from neuron_operator.read.objects import only
from neuron_operator.read.world import Object

REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 5.0
WATCH_SECONDS = 570
"""The API server ends a watch after this time; the reflector then resumes it."""
WATCH_SILENCE_SECONDS = 75.0
"""A bookmark arrives every minute; a watch that is silent for longer has lost its connection."""
MAX_THROTTLED_SECONDS = 2.0
"""A request that is to be made again later than that is the caller's affair."""
TOKEN_CHECK_SECONDS = 60.0
"""How often the expiry of an exec plugin's token is checked."""
PAGE_SIZE = 50
"""A page of the heaviest objects that the API server accepts (1.5 MiB each) has to fit into memory."""
MAX_OBJECT_BYTES = 524_288
"""The size of an object that is read, as JSON: those that the operator makes are lighter, but whoever may write in a
namespace can make heavier ones with the operator's labels. Of such an object only the identity is read."""
MAX_OWNERS_READ = 64
BYTES = "bytes"
"""In the identity of such an object: how long it was."""
MAX_LOG_LINES = 20
"""A library may write between two lines of the runtime."""
MAX_LOG_BYTES = 16384
_LOG_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
"""The kubelet of a broken node does not answer, and a pass waits for it."""
_REQUEST_TIMEOUTS = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
MOST_NESTED = 15_000
"""Calls within each other, such as a decoder's for nested lists. The API server takes JSON that is 10 000 deep, where a
schema leaves fields open, and one such manifest must not end the process. A stack of 8 MiB has room for 20 000 calls of
msgspec, and with a limit above that, deeper JSON would end it."""
DEFAULT_KUBECONFIG = os.path.expanduser("~/.kube/config")


@dataclass(frozen=True)
class Resource:
    """A resource of the API server. Objects contain `kind`; URLs and RBAC rules contain `plural`."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True
    is_only_metadata: bool = False
    """Whether lists and watches bring the metadata of its objects alone."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL's path; `namespace` None means all namespaces, and is ignored for cluster-scoped resources."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = ("namespaces", namespace) if namespace is not None and self.namespaced else ()
        return "/".join((root, *scope, self.plural, *(part for part in (name, subresource) if part is not None)))

    def path_of(self, obj: Object, subresource: str | None = None) -> str:
        return self.path(obj["metadata"].get("namespace"), obj["metadata"]["name"], subresource)


NEURON_MODELS = Resource(names.API_VERSION, names.KIND, names.PLURAL)
NEURON_ADAPTERS = Resource(names.API_VERSION, names.ADAPTER_KIND, names.ADAPTER_PLURAL)
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
JOBS = Resource("batch/v1", "Job", "jobs")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
CHILDREN = (
    Resource("apps/v1", "ControllerRevision", "controllerrevisions"),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    CONFIG_MAPS,
    Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Resource("v1", "Service", "services"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("apps/v1", "Deployment", "deployments"),
    Resource("apps/v1", "StatefulSet", "statefulsets"),
    JOBS,
    Resource("batch/v1", "CronJob", "cronjobs"),
)
REPLICA_SETS = Resource("apps/v1", "ReplicaSet", "replicasets", is_only_metadata=True)
"""Between a Deployment and its pods."""
LEADER_WORKER_SETS = Resource(names.LEADER_WORKER_SET_API, names.LEADER_WORKER_SET, "leaderworkersets")
"""A child where groups are made of them: other clusters do not serve it."""
CLAIM_TEMPLATES = Resource(names.CLAIM_API, names.CLAIM_TEMPLATE, "resourceclaimtemplates")
"""A child where nodes give devices by claims: clusters before Kubernetes 1.34 do not serve it."""
RESOURCE_CLAIMS = Resource(names.CLAIM_API, "ResourceClaim", "resourceclaims")
RESOURCE_SLICES = Resource(names.CLAIM_API, "ResourceSlice", "resourceslices", namespaced=False)
"""What drivers offer on each node."""
ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
INFERENCE_POOLS = Resource(names.POOL_API, names.POOL_KIND, "inferencepools")
"""A child where gateways of others are to pick replicas."""
SECRETS = Resource("v1", "Secret", "secrets")
"""Created with a group, and as a trial; never read: the operator has no right to."""
_OPTIONAL = (LEADER_WORKER_SETS, CLAIM_TEMPLATES, INFERENCE_POOLS)
_BY_KIND = {
    (resource.api_version, resource.kind): resource
    for resource in (*CHILDREN, *_OPTIONAL, NEURON_MODELS, NEURON_ADAPTERS, PODS, SECRETS)
}


def resource_of(obj: Object) -> Resource:
    return _BY_KIND[(obj["apiVersion"], obj["kind"])]


class NotFound(ClusterFault):
    """404: the object (or the whole resource) does not exist."""


class AlreadyExists(ClusterFault):
    """409 on a create: the name is taken."""


class Conflict(ClusterFault):
    """409: the write was meant for another object or version."""


class Gone(ClusterFault):
    """410: the resource version to watch or page from has expired; list again."""


class Invalid(ClusterFault):
    """422, 400, or the 500 for an object that does not match its schema: retrying does not help."""


class Forbidden(ClusterFault):
    """403: the operator lacks a right, or a quota or policy refused."""


class Terminating(ClusterFault):
    """403: the namespace is being deleted, nothing can be created in it."""


class Throttled(ClusterFault):
    """429, or another answer with Retry-After: try again after that time."""

    def __init__(self, message: str, *, status: int, retry_after_seconds: float) -> None:
        super().__init__(message, retriable=True, status=status)
        self.retry_after_seconds = retry_after_seconds


class Unreachable(ClusterFault):
    """No response: the network or the API server is down."""


def accept_deep_json() -> None:
    """For a process that reads what others write in a cluster; called before its event loop begins."""
    sys.setrecursionlimit(MOST_NESTED)


@dataclass(frozen=True)
class Page:
    """A complete list, read page by page, and its resource version."""

    items: Iterable[Object]
    """Decoded as they are read, which can be done once: as JSON they take a fifth of the memory."""
    resource_version: str


class _ListAnswer(msgspec.Struct):
    """A page as it arrives; its items are decoded one by one."""

    metadata: dict[str, Any]
    items: list[msgspec.Raw] | None = None
    """None: of a list of metadata without any."""


def bounded(obj: Object, num_bytes: int) -> Object:
    """The object; if it is too heavy, only what and whose it is."""
    if num_bytes <= MAX_OBJECT_BYTES:
        return obj
    metadata = obj["metadata"]
    known = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
    labels = only(metadata.get("labels") or {}, names.OWN_LABELS)
    owners = (metadata.get("ownerReferences") or [])[:MAX_OWNERS_READ]
    kept = {**only(metadata, known), "labels": labels, "ownerReferences": owners}
    return {**only(obj, ("apiVersion", "kind")), "metadata": kept, BYTES: num_bytes}


def _bounded_raw(encoded: msgspec.Raw) -> msgspec.Raw:
    """The same for JSON. A copy, which does not keep the whole answer in memory."""
    num_bytes = memoryview(encoded).nbytes
    if num_bytes <= MAX_OBJECT_BYTES:
        return encoded.copy()
    return msgspec.Raw(msgspec.json.encode(bounded(msgspec.json.decode(encoded), num_bytes)))


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    """Empty if the object has none."""
    resource_version: str = ""


class _Identified(msgspec.Struct):
    metadata: Metadata = Metadata()


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch. Most events are echoes of the operator's own writes, so the object is decoded when it is
    read."""

    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK, and ERROR within the client."""
    encoded: msgspec.Raw = msgspec.field(name="object")

    @property
    def metadata(self) -> Metadata:
        return msgspec.json.decode(self.encoded, type=_Identified).metadata

    @property
    def object(self) -> Object:
        return bounded(msgspec.json.decode(self.encoded), memoryview(self.encoded).nbytes)


# What the kubernetes package raises for a malformed kubeconfig.
_BROKEN_CONFIGURATION = (
    kubernetes_config.ConfigException,
    yaml.YAMLError,
    OSError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
)


@contextlib.asynccontextmanager
async def connect(
    kubeconfig: str = "", context: str = "", *, token_check_seconds: float = TOKEN_CHECK_SECONDS, **options: Any
) -> AsyncIterator[Client]:
    """A `Client` from `kubeconfig` if given, else from the pod's ServiceAccount, else from $KUBECONFIG or the default.
    `context`: one of the kubeconfig; empty: its current one.

    Raises ClusterFault, with the cure, if none of them exists or works. `options` are passed to `Client`.
    """
    configuration = Configuration()
    loader = None
    try:
        if kubeconfig or context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            path = kubeconfig or os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
            if not any(map(os.path.isfile, path.split(os.pathsep))):
                raise ClusterFault(f"no kubeconfig at {path}; set KUBECONFIG or pass --kubeconfig", retriable=False)
            loader = await kubernetes_config.load_kube_config(
                path, context=context or None, client_configuration=configuration, persist_config=False
            )
        else:
            kubernetes_config.load_incluster_config(configuration)
        server = urlsplit(configuration.host)
        if not configuration.proxy and not proxy_bypass(server.netloc):
            configuration.proxy = getproxies().get(server.scheme)
        tls = RESTClientObject(configuration).ssl_context
    except _BROKEN_CONFIGURATION as error:
        raise ClusterFault(
            f"cannot load the cluster configuration: {error}; check the kubeconfig or the ServiceAccount token",
            retriable=False,
        ) from error
    async with contextlib.AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(ssl=tls, limit=0)  # no limit: each watch holds a connection
        session = aiohttp.ClientSession(connector=connector, headers={"User-Agent": names.FIELD_MANAGER})
        await stack.enter_async_context(session)
        if loader is not None:  # the ServiceAccount's token renews itself
            renewal = kubernetes_config.refresh_token(loader, configuration, token_check_seconds)
            stack.callback(asyncio.create_task(renewal, name="token renewal").cancel)
        yield Client(configuration, session, **options)


@dataclass(eq=False)
class Client:
    """Every method raises ClusterFault or a subclass."""

    configuration: Configuration
    session: aiohttp.ClientSession
    _: KW_ONLY
    observe: Callable[[str, str, str], None] = lambda verb, resource, code: None
    """Called once for each answered request."""
    watch_silence_seconds: float = WATCH_SILENCE_SECONDS

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return await self._request("get", resource, resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> Page:
        encoded: list[msgspec.Raw] = []
        query = {"labelSelector": label_selector, "fieldSelector": field_selector, "limit": str(PAGE_SIZE)}
        while True:
            async with self._answer("list", resource, resource.path(namespace), query=query) as response:
                page = msgspec.json.decode(await response.read(), type=_ListAnswer)
            encoded += map(_bounded_raw, page.items or ())
            query["continue"] = page.metadata.get("continue") or ""
            if not query["continue"]:
                # The items of a list lack these two.
                about = {"apiVersion": resource.api_version, "kind": resource.kind}
                items = ({**about, **msgspec.json.decode(one)} for one in encoded)
                return Page(items, page.metadata["resourceVersion"])

    async def schema(self, resource: Resource) -> Object:
        """As the API server publishes it, some time after a CRD was made or changed; empty if it does not."""
        async with self._answer("get", resource, f"/openapi/v3/apis/{resource.api_version}") as response:
            published = msgspec.json.decode(await response.read())
        schemas = published.get("components", {}).get("schemas", {}).values()  # absent while nothing is published
        kinds = "x-kubernetes-group-version-kind"
        return next((one for one in schemas if any(k["kind"] == resource.kind for k in one.get(kinds, ()))), {})

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]:
        """Yields until the API server ends the watch; raises Gone if `resource_version` has expired."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": resource_version,
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
        }
        silence = self.watch_silence_seconds
        timeouts = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
        path = resource.path(namespace)
        async with self._answer("watch", resource, path, query=query, timeouts=timeouts) as response:
            pending = bytearray()
            async for chunk in response.content.iter_any():  # a line may exceed any buffer limit
                pending += chunk
                *lines, rest = pending.split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    event = msgspec.json.decode(line, type=WatchEvent)
                    if event.type == "ERROR":
                        raise _status_fault(event.object, {}, f"watch {resource.plural}")
                    yield event

    async def create(self, resource: Resource, obj: Object, *, dry_run: bool = False) -> Object:
        """Raises AlreadyExists if the name is taken, also by an object of ours. `dry_run`: nothing is stored.

        A ControllerRevision is sent as YAML, because the API server stores its data verbatim if they are JSON. A later
        apply would then look like a change of immutable data, since the API server formats its JSON differently. An
        unknown field is refused: the API server would otherwise drop it silently.
        """
        path = resource.path(obj["metadata"].get("namespace"))
        query = {"fieldManager": names.FIELD_MANAGER, **_STRICT, **({"dryRun": "All"} if dry_run else {})}
        kind = "yaml" if resource.kind == "ControllerRevision" else "json"
        return await self._request("create", resource, path, query=query, body=obj, content_type=f"application/{kind}")

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """Raises Conflict if `obj` is not the newest version."""
        return await self._request("update", resource, resource.path_of(obj), body=obj)

    async def apply(self, resource: Resource, desired: Object, live: Object) -> Object:
        """Server-side apply onto exactly `live`; raises Conflict if it was modified or replaced since, so that the late
        write of an earlier leader has no effect.

        A create leaves its fields in a managedFields entry "Update", from which no apply removes fields. The first
        apply after a create therefore turns that entry into "Apply", as client-go's csaupgrade does. If the merged
        object is invalid, because a manual edit added a field or list item that contradicts ours, everything besides
        `metadata` is replaced, and others' labels and annotations stay.
        """
        if any(entry.get("operation") == "Update" for entry in own_entries(live)):
            live = await self._make_applied(resource, live)
        path = resource.path_of(desired)
        exactly = _exactly(live)
        body = {**desired, "metadata": {**desired["metadata"], **exactly}}
        try:
            return await self._patch(resource, path, _APPLY, body, force="true")
        except Invalid as refused:
            parts = {f"/metadata/{key}": value for key, value in exactly.items()} | _replacements(desired, live)
            patch = [{"op": "add", "path": pointer, "value": value} for pointer, value in parts.items()]
            try:
                return await self._patch(resource, path, "json-patch+json", patch)
            except Invalid:
                raise refused from None

    async def _make_applied(self, resource: Resource, live: Object) -> Object:
        metadata = live["metadata"]
        newest = await self.get(resource, metadata.get("namespace"), metadata["name"])
        if newest["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict(f"{resource.kind} {metadata['name']} was modified", retriable=True, status=409)
        ours = list(own_entries(newest))
        applied = any(entry["operation"] == "Apply" for entry in ours)
        entries = [
            {**entry, "operation": "Apply"} if entry in ours else entry
            for entry in newest["metadata"].get("managedFields", ())
            if not (applied and entry in ours and entry["operation"] == "Update")
        ]
        patch = [
            {"op": "replace", "path": "/metadata/managedFields", "value": entries},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": newest["metadata"]["resourceVersion"]},
        ]
        return await self._patch(resource, resource.path_of(live), "json-patch+json", patch)

    async def apply_status(self, resource: Resource, live: Object, status: Object) -> Object:
        """Server-side apply of the whole status of exactly `live`."""
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": only(live["metadata"], ("name", "namespace", "uid")),
            "status": status,
        }
        path = resource.path_of(live, "status")
        return await self._patch(resource, path, _APPLY, body, force="true", fieldManager=names.STATUS_FIELD_MANAGER)

    async def scale(self, resource: Resource, live: Object, num_replicas: int) -> None:
        """Writes the number of replicas through `/scale`. Raises Conflict (retriable) if they are not those of `live`,
        because somebody else scaled it, or another object has its name."""
        before = live["spec"]["replicas"]
        # A Scale leaves out a zero.
        same = {"/metadata/uid": live["metadata"]["uid"], "/spec": {"replicas": before} if before else {}}
        patch = [
            *({"op": "test", "path": path, "value": value} for path, value in same.items()),
            {"op": "add", "path": "/spec/replicas", "value": num_replicas},
        ]
        try:
            await self._patch(resource, resource.path_of(live, "scale"), "json-patch+json", patch)
        except Invalid as changed:
            raise Conflict(str(changed), retriable=True, status=409) from changed

    async def patch(self, resource: Resource, live: Object, patch: Object, *, unchanged: bool = True) -> Object:
        """Strategic merge patch of exactly `live`; raises Conflict if another object has its name, or, with
        `unchanged`, if it was modified since."""
        body = {**patch, "metadata": {**patch.get("metadata", {}), **_exactly(live, unchanged=unchanged)}}
        return await self._patch(resource, resource.path_of(live), "strategic-merge-patch+json", body)

    async def delete(self, resource: Resource, live: Object, *, unchanged: bool = False) -> None:
        """Deletes exactly `live`, its dependents in the background; raises Conflict if another object has its name, or,
        with `unchanged`, if it was modified since."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": _exactly(live, unchanged=unchanged),
        }
        await self._request("delete", resource, resource.path_of(live), body=body)

    async def log(self, namespace: str, pod: str, container: str) -> str:
        query = {"container": container, "tailLines": str(MAX_LOG_LINES), "limitBytes": str(MAX_LOG_BYTES)}
        path = PODS.path(namespace, pod, "log")
        async with self._answer("get", PODS, path, query=query, timeouts=_LOG_TIMEOUT) as response:
            return (await response.read()).decode(errors="replace")

    async def _patch(self, resource: Resource, path: str, kind: str, body: Any, **query: str) -> Object:
        query = {"fieldManager": names.FIELD_MANAGER, **_STRICT, **query}
        return await self._request("patch", resource, path, query=query, body=body, content_type=f"application/{kind}")

    async def _request(self, verb: str, resource: Resource, path: str, **request: Any) -> Object:
        """Asks once more if the API server had too much to do: a pass makes a dozen requests, and begins again, later
        each time, if one of them fails. Where many are throttled it would never come to its end."""
        try:
            return await self._ask(verb, resource, path, **request)
        except Throttled as fault:
            if fault.status != 429 or fault.retry_after_seconds > MAX_THROTTLED_SECONDS:
                raise
            await asyncio.sleep(fault.retry_after_seconds)
        return await self._ask(verb, resource, path, **request)

    async def _ask(self, verb: str, resource: Resource, path: str, **request: Any) -> Object:
        async with self._answer(verb, resource, path, **request) as response:
            answer = await response.read()
            return bounded(msgspec.json.decode(answer), len(answer))

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeouts: aiohttp.ClientTimeout = _REQUEST_TIMEOUTS,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response with its body unread. Errors up to the end of the block become a ClusterFault."""
        encode = as_yaml if content_type.endswith("yaml") else msgspec.json.encode
        url = self.configuration.host + path
        if query:
            url += "?" + urlencode({key: value for key, value in query.items() if value})
        headers = {"Content-Type": content_type}
        if resource.is_only_metadata:
            headers["Accept"] = f"application/json;as=PartialObjectMetadata{_LISTED.get(verb, '')};g=meta.k8s.io;v=v1"
        try:
            if token := await self.configuration.get_api_key_with_prefix("BearerToken", alias="authorization"):
                headers["Authorization"] = token
            async with self.session.request(
                _METHODS.get(verb, "GET"),
                url,
                data=None if body is None else encode(body),
                headers=headers,
                timeout=timeouts,
                proxy=self.configuration.proxy,
                proxy_headers=self.configuration.proxy_headers,
                server_hostname=self.configuration.tls_server_name,
            ) as response:
                self.observe(verb, resource.plural, str(response.status))
                if response.status >= 300:
                    raise _fault(response, await response.read(), verb, resource)
                yield response
        except (aiohttp.ClientError, kubernetes_config.ConfigException, TimeoutError, OSError) as error:
            # Time-outs of aiohttp and asyncio have no message.
            text = str(error) or type(error).__name__
            raise Unreachable(f"{verb} {resource.plural}: {text}", retriable=True) from error


_APPLY = "apply-patch+yaml"
_LISTED = {"list": "List"}
_STRICT = {"fieldValidation": "Strict"}
_UNTYPED = "failed to create typed"
"""In the 500 with which an apply refuses an unknown field, a wrong type or a duplicate list item: no retry helps."""
_METHODS = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}


def _exactly(live: Object, *, unchanged: bool = True) -> Object:
    """What a write names of its object, so that it has no effect on another one, or on a version that is newer."""
    return {key: live["metadata"][key] for key in (("uid", "resourceVersion") if unchanged else ("uid",))}


def _fault(response: aiohttp.ClientResponse, content: bytes, verb: str, resource: Resource) -> ClusterFault:
    try:
        status = msgspec.json.decode(content)
    except msgspec.DecodeError:  # a proxy in front of the API server answered
        status = {"message": content.decode(errors="replace")[:200]}
    if not isinstance(status, dict):
        status = {}
    return _status_fault({**status, "code": response.status}, response.headers, f"{verb} {resource.plural}")


def _status_fault(status: Object, headers: Mapping[str, str], what: str) -> ClusterFault:
    code = int(status.get("code") or 500)
    details = status.get("details") or {}
    message = f"{what}: {status.get('message') or f'HTTP {code}'}"
    retry_after = headers.get("Retry-After") or details.get("retryAfterSeconds")
    causes = {cause.get("reason") for cause in details.get("causes") or ()}
    if code == 429 or (retry_after and code >= 500):
        seconds = float(str(retry_after)) if str(retry_after).isdigit() else 1.0
        return Throttled(message, status=code, retry_after_seconds=seconds)
    kind = _FAULTS.get(code, ClusterFault)
    if code == 403 and "NamespaceTerminating" in causes:
        kind = Terminating
    elif code == 409 and status.get("reason") == "AlreadyExists":
        kind = AlreadyExists
    elif code == 500 and _UNTYPED in message:
        kind = Invalid
    return kind(message, retriable=kind not in (Invalid, Forbidden, Terminating), status=code)


_FAULTS = {400: Invalid, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone, 422: Invalid}


def _replacements(desired: Object, live: Object) -> Object:
    """JSON pointer to value: each part besides `metadata` as a whole, labels and annotations one by one."""
    paths = {f"/{name}": value for name, value in desired.items() if name not in ("apiVersion", "kind", "metadata")}
    for part in ("labels", "annotations"):
        ours = desired["metadata"].get(part, {})
        if live["metadata"].get(part):
            paths |= {f"/metadata/{part}/{key.replace('~', '~0').replace('/', '~1')}": ours[key] for key in ours}
        else:
            paths[f"/metadata/{part}"] = ours
    return paths


def as_yaml(body: Any) -> bytes:
    """JSON that is also valid YAML, which has no surrogate pairs, and rejects some unescaped characters or treats them
    as line breaks (https://yaml.org/spec/1.1/#id868524)."""
    return _ODD.sub(lambda match: f"\\u{ord(match[0]):04x}", msgspec.json.encode(body).decode()).encode()


_ODD = re.compile("[\x7f-\uffff]")
