"""The CRD on a real API server: each rule names the field that it refuses, and rendered objects are valid."""

from __future__ import annotations

import copy
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.apiserver import ApiServer
from helpers.manifests import ADAPTERS, KINDS, MODELS, REFUSED, Manifests, spec_with
from helpers.operator_rights import ensure_namespace
from helpers.operator_worlds import body, condition, resolved_world
from helpers.operators import CRDS
from helpers.rendered_cases import FILES, render
from neuron_operator.api.fields import Rule, SpecPart, broken_rules, fields_of, unwrapped
from neuron_operator.api.names import MAX_MODEL_NAME
from neuron_operator.cluster.client import INFERENCE_POOLS, NEURON_MODELS, resource_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAMESPACE = "team"


@pytest.fixture(scope="module")
def server(server: ApiServer) -> ApiServer:
    ensure_namespace(server, NAMESPACE)
    restricted = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    server.call("PATCH", f"/api/v1/namespaces/{NAMESPACE}", restricted, "application/merge-patch+json")
    return server


def create(
    server: ApiServer, spec: dict[str, Any], name: str = "chat", query: str = "?dryRun=All", of: Manifests = MODELS
) -> Any:
    body = {
        "apiVersion": of.resource.api_version,
        "kind": of.resource.kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
    return server.call("POST", of.resource.path(NAMESPACE) + query, body)


def refusal(
    server: ApiServer, spec: dict[str, Any], name: str = "chat", of: Manifests = MODELS
) -> list[tuple[str, str]]:
    """Field and message of each cause in the response (the server adds one without a field if it skipped CEL rules)."""
    with pytest.raises(urllib.error.HTTPError) as error:
        create(server, spec, name, of=of)
    assert error.value.code == 422, error.value.__notes__
    causes = json.loads(error.value.__notes__[0])["details"]["causes"]
    return [(cause["field"].lstrip("."), cause["message"]) for cause in causes if cause["field"] != "<nil>"]


@pytest.mark.parametrize(("of", "case"), [one for of in KINDS for one in of.cases(by="schema")])
def test_an_invalid_manifest_is_refused_naming_the_field(server: ApiServer, of: Manifests, case: Any) -> None:
    causes = refusal(server, of.spec_with(case["spec"]), of=of)
    assert all(field.startswith(case["field"]) for field, _ in causes), causes
    assert any(case.get("says", "") in f"{field} {message}" for field, message in causes), causes


@pytest.mark.parametrize(("of", "case"), MODELS.cases(by="operator"))
def test_the_crd_accepts_values_that_only_the_operator_refuses(server: ApiServer, of: Manifests, case: Any) -> None:
    create(server, of.spec_with(case["spec"]), of=of)


def declared_rules(kind: Any) -> Iterator[Rule]:
    """The rules of a declared type and of all types within it."""
    core, annotations = unwrapped(kind)
    yield from (one for one in annotations if isinstance(one, Rule))
    inner = fields_of(core) if isinstance(core, type) and issubclass(core, SpecPart) else ()
    for below in (*(one.kind for one in inner), *(get_args(core)[:1] if get_origin(core) is tuple else ())):
        yield from declared_rules(below)


def kind_at(path: str, of: Manifests) -> Any:
    kind: Any = of.spec
    for key in path.split("."):
        kind = next(one.kind for one in fields_of(unwrapped(kind)[0]) if one.key == key)
    return kind


def some_of(**values: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={key: st.just(value) for key, value in values.items()})


def lists_of(*values: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), max_size=3)


def keys_of(*keys: str) -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(keys), st.just("1"))


KEY = {"name": "n", "key": "k"}
FIELD = {"fieldPath": "status.hostIP"}
STORES = {"persistentVolumeClaim": {"claimName": "c"}, "objectStore": {"uri": "s3://bucket/p"}}
NAMES = ("A", "B", "HOME", "HF_TOKEN", "NEURON_SERVING_RANK", "NEURON_SERVING")
SCHEMES = ("hf://", "s3://", "pvc://", "oci://", "file:///", "file://", "file:./", "hf:", "")
PIECES = ("a", "B9", "/", "/", "/../", "..", ".", "-", "--", "_", "@", "#", " ", "a/b", "bucket/p")
URIS = st.builds(
    lambda scheme, pieces: scheme + "".join(pieces),
    st.sampled_from(SCHEMES),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.uri": URIS,
    "model.servedNames": lists_of("a", "b", "c"),
    "accelerator": st.builds(
        lambda kind, sizes: {**kind, **sizes},
        st.sampled_from([{}, {"type": "CPU"}, {"type": "Neuron"}]),
        some_of(devices=1, cores=2),
    ),
    "serving.contextBuckets": lists_of(1, 2, 3),
    "serving.tokenGenerationBuckets": lists_of(1, 2, 3),
    "serving.adapters": some_of(maxActive=2, maxRank=8, maxLoaded=1, targets=["q_proj"])
    | st.builds(lambda targets: {"maxActive": 2, "targets": targets}, lists_of("q_proj", "v_proj")),
    "serving.speculation": some_of(method="NGram", numTokens=2, minMatch=3, maxMatch=2)
    | st.builds(
        lambda method, drafts, uri: {**method, **drafts, "model": {"uri": uri}},
        st.sampled_from([{"method": "Draft"}, {"method": "NGram"}]),
        some_of(numTokens=2, minMatch=3),
        st.sampled_from(["hf://a/b", "file:./a", "hf:a", "s3://bucket/../a", "hf://a/b--c"]),
    ),
    "engine.env": st.lists(
        st.builds(
            lambda name, value, source: {"name": name, **value, **source},
            st.sampled_from(NAMES),
            some_of(value="x"),
            st.fixed_dictionaries(
                {}, optional={"valueFrom": some_of(secretKeyRef=KEY, configMapKeyRef=KEY, fieldRef=FIELD)}
            ),
        ),
        max_size=2,
    ),
    "storage.weights": some_of(**STORES, emptyDir={}),
    "storage.artifacts": some_of(**STORES),
    "podTemplate.metadata.labels": keys_of("a", "neuron-serving.dev/a", "neuron-serving.development/a"),
    "podTemplate.metadata.annotations": keys_of("a", "neuron-serving.dev/a", "neuron-serving.development/a"),
    "serving.media.allowedHosts": lists_of("a.example", "b.example:8443", "c.svc", "d.local:443", "e.internal.example"),
    "podTemplate.spec.imagePullSecrets": lists_of({"name": "a"}, {"name": "b"}),
    "podTemplate.spec.resources.limits": keys_of("cpu", "aws.amazon.com/neuron", "aws.amazon.company/a"),
    "jobs.resources.limits": keys_of("cpu", "aws.amazon.com/neuron", "aws.amazon.company/a"),
    "jobs.resources.requests": keys_of("cpu", "aws.amazon.com/neuron", "aws.amazon.company/a"),
    "jobs.labels": keys_of("a", "neuron-serving.dev/a", "neuron-serving.development/a"),
    "jobs.annotations": keys_of("a", "neuron-serving.dev/a", "neuron-serving.development/a"),
    "serviceTemplate.spec": st.builds(
        lambda kind, more: {**kind, **more},
        st.sampled_from([{}, {"type": "NodePort"}, {"type": "LoadBalancer"}]),
        some_of(loadBalancerClass="eks.amazonaws.com/nlb", externalTrafficPolicy="Local"),
    ),
    "serviceTemplate.metadata.annotations": keys_of("a", "neuron-serving.dev/a", "neuron-serving.development/a"),
    "podTemplate.spec.resources.requests": keys_of("cpu", "aws.amazon.com/neuron", "aws.amazon.company/a"),
}


VALUES_OF = {MODELS: VALUES, ADAPTERS: {"uri": URIS}}


@pytest.mark.parametrize(("of", "path"), [(of, path) for of, values in VALUES_OF.items() for path in values], ids=str)
def test_api_server_and_parser_report_the_same_broken_rules(server: ApiServer, of: Manifests, path: str) -> None:
    broken_once: set[str] = set()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(VALUES_OF[of][path])
    def compare(value: Any) -> None:
        for key in reversed(path.split(".")):
            value = {key: value}
        spec = of.spec_with(value)
        broken = list(broken_rules(of.spec, msgspec.convert(spec, of.spec), "spec"))
        broken_once.update(message for _, message in broken)
        if not broken:
            create(server, spec, of=of)
            return
        causes = refusal(server, spec, of=of)
        # Duplicates are found, at the second item, before CEL runs on the list; on what holds it, it may run too.
        twice = [(place, "Duplicate value") for place, message in broken if message == "must be unique"]
        for place, message in twice or broken:
            assert any(field.startswith(place) and message in annotations for field, annotations in causes), (
                place,
                causes,
            )
        places = {place for place, _ in broken}
        assert all(any(field.startswith(place) for place in places) for field, _ in causes), causes

    compare()
    assert broken_once == {rule.message for rule in declared_rules(kind_at(path, of))}


@pytest.mark.parametrize("of", KINDS, ids=str)
def test_every_cel_rule_is_compared(of: Manifests) -> None:
    compared = [rule for path in VALUES_OF[of] for rule in declared_rules(kind_at(path, of))]
    assert set(map(id, declared_rules(of.spec))) == set(map(id, compared))


OF_ANOTHER_TYPE = {"string": 7, "integer": "x", "boolean": "x", "object": "x", "array": "x"}


def bad_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Values just outside of what one node of the schema allows."""
    yield OF_ANOTHER_TYPE[schema["type"]] if "type" in schema else True
    if "enum" in schema:
        yield "Nonsense"
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "minLength" in schema:
        yield ""
    if "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1)
    if "maxProperties" in schema:
        yield {f"key-{number}": "x" for number in range(schema["maxProperties"] + 1)}
    if "maxItems" in schema and schema["items"].get("type") == "string":
        yield [f"item-{number}" for number in range(schema["maxItems"] + 1)]


def bad_manifests(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of each, for each node of a schema; `[0]` is a step into a list."""
    if path:
        yield from ((path, value) for value in bad_values(schema))
    for key, below in schema.get("properties", {}).items():
        yield from bad_manifests(below, (*path, key))
    if "items" in schema:
        yield from bad_manifests(schema["items"], (*path, "[0]"))


@pytest.mark.parametrize(("of", "least"), [(MODELS, 150), (ADAPTERS, 13)], ids=str)
def test_the_api_server_names_each_field_that_is_beyond_its_bounds(
    server: ApiServer, of: Manifests, least: int
) -> None:
    """Manifests made from the schema, without an operator. Some break rules of other fields, too."""
    (version,) = yaml.safe_load((CRDS / f"{of.crd}.yaml").read_text())["spec"]["versions"]
    found = list(bad_manifests(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))
    for path, bad in found:
        changes = bad
        for step in reversed(path):
            changes = [changes] if step == "[0]" else {step: changes}
        place = "spec." + ".".join(path).replace(".[0]", "[0]")
        named = [field for field, _ in refusal(server, {**of.spec_with({}), **changes}, of=of)]
        assert any(field.startswith((place, place.removesuffix("[0]"))) for field in named), (place, bad, named)
    assert len(found) >= least


@pytest.mark.parametrize(("of", "changes"), [one for of in KINDS for one in of.cases("accepted")])
def test_the_api_server_accepts_what_the_operator_accepts(server: ApiServer, of: Manifests, changes: Any) -> None:
    create(server, of.spec_with(changes), of=of)


@pytest.mark.parametrize("of", KINDS, ids=str)
@pytest.mark.parametrize("case", REFUSED["names"], ids=lambda case: str(case["name"]))
def test_a_name_that_is_no_dns_label_is_refused(server: ApiServer, of: Manifests, case: dict[str, Any]) -> None:
    assert {field for field, _ in refusal(server, of.spec_with({}), case["name"], of)} == {"metadata.name"}


def test_an_unknown_field_is_refused_for_strict_clients_and_pruned_for_others(
    server: ApiServer,
) -> None:
    spec = spec_with({"serving": {"maxLength": 1}})
    with pytest.raises(urllib.error.HTTPError) as error:
        create(server, spec, query="?dryRun=All&fieldValidation=Strict")
    assert 'unknown field \\"spec.serving.maxLength\\"' in error.value.__notes__[0]
    assert "maxLength" not in create(server, spec)["spec"]["serving"]


def test_the_api_server_writes_the_defaults(server: ApiServer) -> None:
    spec = create(server, {"model": {"uri": "hf://acme/tiny"}, "accelerator": {}, "rollout": {}})["spec"]
    assert spec["replicas"] == 1
    assert spec["accelerator"] == {"type": "Neuron"}
    assert spec["rollout"]["drainSeconds"] == 300


def test_the_api_server_accepts_every_object_of_a_model_with_the_longest_name(server: ApiServer) -> None:
    name = "m" * MAX_MODEL_NAME
    create(server, spec_with({}), name)
    given = {"spec": spec_with({"accelerator": {"type": "CPU"}}), "metadata": {"name": name}}
    for is_resolved in (False, True):
        check_objects(server, given | {"resolved": is_resolved})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_api_server_accepts_every_rendered_object(server: ApiServer, path: Path) -> None:
    check_objects(server, yaml.safe_load(path.read_text())["given"])


def check_objects(server: ApiServer, given: dict[str, Any]) -> None:
    for child in render(given)["objects"]:
        if resource_of(child) is INFERENCE_POOLS:
            continue  # of a CRD that this server does not have
        url = resource_of(child).path(NAMESPACE, child["metadata"]["name"])
        query = "?dryRun=All&fieldManager=test&force=true&fieldValidation=Strict"
        # That of a live object is none that this server knows.
        applied = {**child, "metadata": {key: value for key, value in child["metadata"].items() if key != "uid"}}
        made = server.call("PATCH", url + query, applied, "application/apply-patch+yaml")
        assert made["metadata"]["name"] == child["metadata"]["name"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_restricted_namespace_admits_every_rendered_pod(server: ApiServer, path: Path) -> None:
    for child in render(yaml.safe_load(path.read_text())["given"])["objects"]:
        if child["kind"] in ("Deployment", "Job", "StatefulSet"):
            pod = copy.deepcopy(child["spec"]["template"])
            pod["metadata"]["name"] = "a-pod"
            pod["spec"].pop("runtimeClassName", None)  # admission requires the RuntimeClass to exist
            server.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)


def test_a_restricted_namespace_rejects_an_unrestricted_pod(server: ApiServer) -> None:
    pod = {"metadata": {"name": "a-pod"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)
    assert error.value.code == 403


def test_the_status_is_stored_whole_and_scale_shows_replicas_and_selector(server: ApiServer) -> None:
    create(server, {**body()["spec"], "serving": {"maxModelLength": 512}}, query="")
    _, decision = resolved_world(spec={**body()["spec"], "serving": {"maxModelLength": 512}})
    assert decision.status is not None
    path = NEURON_MODELS.path(NAMESPACE, "chat")
    written = server.call("PATCH", f"{path}/status", {"status": decision.status}, "application/merge-patch+json")
    assert written["status"] == decision.status
    assert condition(written["status"], "Ready")["reason"] == "Loading"
    scale = server.call("GET", f"{path}/scale")
    assert scale["spec"]["replicas"] == 2
    assert scale["status"]["selector"] == "neuron-serving.dev/model=chat,neuron-serving.dev/role=leader"
    server.call("PATCH", f"{path}/scale", {"spec": {"replicas": 5}}, "application/merge-patch+json")
    assert server.call("GET", path)["spec"]["replicas"] == 5
