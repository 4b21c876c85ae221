"""The operator's way to the API server: raw JSON objects, typed faults. Called by reflectors, passes and the lease.

The kubernetes package loads the configuration (in a cluster or from a kubeconfig, with tokens that are renewed);
requests go over one aiohttp session, because a typed model of each object costs more CPU and memory than all else the
operator does. Nothing here retries or caches: who calls knows what a fault means.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import msgspec
import yaml
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration

from neuron_operator.containment import own_entries
from neuron_operator.errors import ClusterFault
from neuron_operator.names import API_VERSION, FIELD_MANAGER, KIND, PLURAL, STATUS_FIELD_MANAGER
from neuron_operator.world import Object

REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 5.0
WATCH_SECONDS = 570
"""The API server ends a watch after this time; then it is opened again where it ended."""
WATCH_SILENCE_SECONDS = 75.0
"""A watch with bookmarks brings one each minute; one that is silent for longer is a connection that died unseen."""
PAGE_SIZE = 500
DEFAULT_KUBECONFIG = os.path.expanduser("~/.kube/config")


@dataclass(frozen=True)
class Resource:
    """A resource of the API server. `kind` is what objects say, `plural` what URLs and RBAC rules say."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL's path; `namespace` None means all namespaces (or none, for resources of the cluster)."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = ("namespaces", namespace) if namespace is not None and self.namespaced else ()
        return "/".join((root, *scope, self.plural, *(part for part in (name, subresource) if part is not None)))


NEURON_MODELS = Resource(API_VERSION, KIND, PLURAL)
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
CHILDREN = (
    Resource("apps/v1", "ControllerRevision", "controllerrevisions"),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("v1", "ConfigMap", "configmaps"),
    Resource("v1", "Service", "services"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("apps/v1", "Deployment", "deployments"),
    Resource("batch/v1", "Job", "jobs"),
)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in (*CHILDREN, NEURON_MODELS, PODS, EVENTS)}


def resource_of(obj: Object) -> Resource:
    """The resource of an object that says its own `apiVersion` and `kind`."""
    return _BY_KIND[(obj["apiVersion"], obj["kind"])]


class NotFound(ClusterFault):
    """404: the object (or the whole resource) does not exist."""


class AlreadyExists(ClusterFault):
    """409 on a create: the name is taken."""


class Conflict(ClusterFault):
    """409: the object is not the one, or not the version, that the write was meant for."""


class Gone(ClusterFault):
    """410: the version to watch or page on from is no longer known; list again."""


class Invalid(ClusterFault):
    """422 (or 400): the API server does not accept the object; nothing but another object helps."""


class Forbidden(ClusterFault):
    """403: the operator lacks a right, or a quota or policy refused."""


class Throttled(ClusterFault):
    """429, or another answer with Retry-After: the API server asks to come back later."""

    def __init__(self, message: str, *, status: int, retry_after_seconds: float) -> None:
        super().__init__(message, retriable=True, status=status)
        self.retry_after_seconds = retry_after_seconds


class Unreachable(ClusterFault):
    """No answer: the network, or an API server that is gone."""


@dataclass(frozen=True)
class Page:
    """A whole list, read page by page, and the version it is of."""

    items: tuple[Object, ...]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """`type` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: Object


class Cluster(Protocol):
    """What the rest of the operator asks of an API server. Every method raises ClusterFault or a class of it."""

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object: ...

    async def list(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> Page: ...

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]: ...

    async def create(self, resource: Resource, obj: Object) -> Object: ...

    async def replace(self, resource: Resource, obj: Object) -> Object: ...

    async def apply(self, resource: Resource, desired: Object, live: Object) -> Object: ...

    async def apply_status(self, resource: Resource, live: Object, status: Object) -> Object: ...

    async def delete(self, resource: Resource, live: Object) -> None: ...


# What the kubernetes package raises where a kubeconfig is not what it expects, beside its own.
_BROKEN_CONFIGURATION = (
    kubernetes_config.ConfigException,
    yaml.YAMLError,
    OSError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
)


async def load_configuration(kubeconfig: str = "") -> Configuration:
    """Connection and credentials: `kubeconfig` where given, else the pod's ServiceAccount, else the usual kubeconfig.

    Raises ClusterFault, with the cure, where none of them is there or is not usable.
    """
    configuration = Configuration()
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        if kubeconfig or not in_cluster:
            path = kubeconfig or os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
            if not any(map(os.path.isfile, path.split(os.pathsep))):
                raise ClusterFault(
                    f"no cluster: there is no kubeconfig at {path}; set KUBECONFIG or pass --kubeconfig",
                    retriable=False,
                )
            await kubernetes_config.load_kube_config(path, client_configuration=configuration, persist_config=False)
        else:
            kubernetes_config.load_incluster_config(configuration)
    except _BROKEN_CONFIGURATION as error:
        raise ClusterFault(
            f"no cluster: {error}; check the kubeconfig or the ServiceAccount token", retriable=False
        ) from error
    if configuration.tls_server_name:
        raise ClusterFault("the kubeconfig sets tls-server-name, which is not supported; remove it", retriable=False)
    return configuration


def open_session(configuration: Configuration) -> aiohttp.ClientSession:
    """A session that authenticates each request with the token of the moment. The caller closes it."""

    async def authenticate(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        token = await configuration.get_api_key_with_prefix("BearerToken")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context, limit=0),
        middlewares=(authenticate,),
        headers={"User-Agent": "neuron-operator", "Accept": "application/json"},
        proxy=configuration.proxy,
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS),
    )


def _ignore_request(verb: str, resource: str, code: str) -> None:
    """The observer of a client whose requests nobody counts."""


class Client:
    """`Cluster` over HTTP. `observe(verb, resource, code)` is called once for each answered request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: str,
        *,
        observe: Callable[[str, str, str], None] = _ignore_request,
        watch_silence_seconds: float = WATCH_SILENCE_SECONDS,
    ) -> None:
        self._session = session
        self._server = server.rstrip("/")
        self._observe = observe
        self._watch_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=watch_silence_seconds
        )

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return await self._request("get", resource, resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None, *, label_selector: str = "", field_selector: str = ""
    ) -> Page:
        items: list[Object] = []
        query = {
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
            "limit": str(PAGE_SIZE),
            "continue": "",
        }
        while True:
            page = await self._request("list", resource, resource.path(namespace), query=query)
            # Lists leave these two out of their items.
            items += ({"apiVersion": resource.api_version, "kind": resource.kind, **item} for item in page["items"])
            query["continue"] = page["metadata"].get("continue") or ""
            if not query["continue"]:
                return Page(tuple(items), page["metadata"]["resourceVersion"])

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]:
        """Yields until the API server ends the watch; raises Gone where `resource_version` is too old."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": resource_version,
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
        }
        url = self._url(resource.path(namespace), query)
        try:
            async with self._session.get(url, timeout=self._watch_timeout) as response:
                self._observe("watch", resource.plural, str(response.status))
                if response.status != 200:
                    raise _fault(response, await response.read(), "watch", resource)
                pending = bytearray()
                async for chunk in response.content.iter_any():  # lines may be longer than any buffer's limit
                    pending += chunk
                    *lines, rest = pending.split(b"\n")
                    pending = bytearray(rest)
                    for line in lines:
                        event = msgspec.json.decode(line)
                        if event["type"] == "ERROR":
                            raise _status_fault(event["object"], {}, f"watch {resource.plural}")
                        yield WatchEvent(event["type"], event["object"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"watch {resource.plural}: {_in_words(error)}", retriable=True) from error

    async def create(self, resource: Resource, obj: Object) -> Object:
        """Raises AlreadyExists where the name is taken, whoever has it."""
        path = resource.path(obj["metadata"].get("namespace"))
        return await self._request("create", resource, path, query={"fieldManager": FIELD_MANAGER}, body=obj)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        """Raises Conflict where `obj` is not the newest version."""
        metadata = obj["metadata"]
        return await self._request(
            "update", resource, resource.path(metadata.get("namespace"), metadata["name"]), body=obj
        )

    async def apply(self, resource: Resource, desired: Object, live: Object) -> Object:
        """Server-side apply onto exactly `live`: Conflict where its name belongs to another object by now.

        Fields that a create has set belong to an entry "Update", and no later apply would remove them: the first apply
        after a create makes that entry its own (as client-go's csaupgrade does). Where the merged object is not valid,
        as when a hand edit put an item of another key but the same name beside ours, a merge patch puts our whole lists
        in their place.
        """
        if any(entry.get("operation") == "Update" for entry in own_entries(live)):
            await self._make_applied(resource, live)
        metadata = desired["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        body = {**desired, "metadata": {**metadata, "uid": live["metadata"]["uid"]}}
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            return await self._request("patch", resource, path, query, body, "application/apply-patch+yaml")
        except Invalid:
            query = {"fieldManager": FIELD_MANAGER}
            return await self._request("patch", resource, path, query, body, "application/merge-patch+json")

    async def _make_applied(self, resource: Resource, live: Object) -> None:
        metadata = live["metadata"]
        newest = await self.get(resource, metadata.get("namespace"), metadata["name"])
        if newest["metadata"]["uid"] != metadata["uid"]:
            raise Conflict(f"{resource.kind} {metadata['name']} was replaced by another", retriable=True, status=409)
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
        path = resource.path(metadata.get("namespace"), metadata["name"])
        await self._request(
            "patch", resource, path, {"fieldManager": FIELD_MANAGER}, patch, "application/json-patch+json"
        )

    async def apply_status(self, resource: Resource, live: Object, status: Object) -> Object:
        """Server-side apply of the whole status of exactly `live`."""
        metadata = live["metadata"]
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "status": status,
        }
        path = resource.path(metadata["namespace"], metadata["name"], "status")
        query = {"fieldManager": STATUS_FIELD_MANAGER, "force": "true"}
        return await self._request("patch", resource, path, query, body, "application/apply-patch+yaml")

    async def delete(self, resource: Resource, live: Object) -> None:
        """Deletes exactly `live`, its dependents in the background; Conflict where another has its name by now."""
        metadata = live["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"]},
        }
        await self._request("delete", resource, resource.path(metadata.get("namespace"), metadata["name"]), body=body)

    async def _request(  # noqa: PLR0917 - private, and each is a part of one request
        self,
        verb: str,
        resource: Resource,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        data = None if body is None else _encode(body)
        headers = {"Content-Type": content_type} if data else {}
        try:
            async with self._session.request(
                _METHODS[verb], self._url(path, query or {}), data=data, headers=headers
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{verb} {resource.plural}: {_in_words(error)}", retriable=True) from error
        self._observe(verb, resource.plural, str(response.status))
        if response.status >= 300:
            raise _fault(response, content, verb, resource)
        result: Object = msgspec.json.decode(content)
        return result

    def _url(self, path: str, query: Mapping[str, str]) -> str:
        text = urlencode({key: value for key, value in query.items() if value})
        return f"{self._server}{path}?{text}" if text else f"{self._server}{path}"


_METHODS = {"get": "GET", "list": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}


def _fault(response: aiohttp.ClientResponse, content: bytes, verb: str, resource: Resource) -> ClusterFault:
    try:
        status = msgspec.json.decode(content)
    except msgspec.DecodeError:  # something in front of the API server answered
        status = {"message": content.decode(errors="replace")[:200]}
    if not isinstance(status, dict):
        status = {}
    return _status_fault({**status, "code": response.status}, response.headers, f"{verb} {resource.plural}")


def _status_fault(status: Object, headers: Mapping[str, str], what: str) -> ClusterFault:
    """A `Status` of the API server as the fault that says who must act."""
    code = int(status.get("code") or 500)
    details = status.get("details") or {}
    message = f"{what}: {status.get('message') or f'HTTP {code}'}"
    retry_after = headers.get("Retry-After") or details.get("retryAfterSeconds")
    causes = {cause.get("reason") for cause in details.get("causes") or ()}
    if code == 429 or (retry_after and code >= 500):
        seconds = float(str(retry_after)) if str(retry_after).isdigit() else 1.0
        return Throttled(message, status=code, retry_after_seconds=seconds)
    if code == 403 and "NamespaceTerminating" in causes:
        return Conflict(message, retriable=True, status=code)
    if code == 409:
        kind = AlreadyExists if status.get("reason") == "AlreadyExists" else Conflict
        return kind(message, retriable=True, status=code)
    known: dict[int, type[ClusterFault]] = {400: Invalid, 403: Forbidden, 404: NotFound, 410: Gone, 422: Invalid}
    if code in known:
        return known[code](message, retriable=code in (404, 410), status=code)
    return ClusterFault(message, retriable=True, status=code)


def _encode(body: Any) -> bytes:
    """JSON as the API server itself writes it: sorted, with the characters escaped that Go escapes.

    The data of a ControllerRevision may never change, and is compared as bytes: those of our create with those that the
    server makes of a later apply.
    """
    encoded = msgspec.json.encode(body, order="sorted")
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return encoded


def _in_words(error: BaseException) -> str:
    """aiohttp and asyncio raise time-outs without a message."""
    return str(error) or type(error).__name__
