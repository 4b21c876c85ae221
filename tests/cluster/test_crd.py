"""The resource on a real API server: each rule refuses with its field, and what the operator renders is valid there."""

from __future__ import annotations

import copy
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.apiserver import ApiServer
from helpers.manifests import REFUSED, spec_with
from helpers.operator_rights import ensure_namespace
from helpers.operator_worlds import body, condition, resolved_world
from helpers.operators import served
from helpers.rendered_cases import FILES, render
from neuron_operator.client import NEURON_MODELS, resource_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAMESPACE = "team"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with served(tmp_path_factory.mktemp("crd-server")) as server:
        ensure_namespace(server, NAMESPACE)
        restricted = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
        server.call("PATCH", f"/api/v1/namespaces/{NAMESPACE}", restricted, "application/merge-patch+json")
        yield server


def create(server: ApiServer, spec: dict[str, Any], name: str = "chat", query: str = "?dryRun=All") -> Any:
    model = {
        "apiVersion": NEURON_MODELS.api_version,
        "kind": NEURON_MODELS.kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
    return server.call("POST", NEURON_MODELS.path(NAMESPACE) + query, model)


def refusal(server: ApiServer, spec: dict[str, Any], name: str = "chat") -> list[tuple[str, str]]:
    """Field and message of each cause that the server names (it adds one without a field when it skipped CEL rules)."""
    with pytest.raises(urllib.error.HTTPError) as error:
        create(server, spec, name)
    assert error.value.code == 422, error.value.__notes__
    causes = json.loads(error.value.__notes__[0])["details"]["causes"]
    return [(cause["field"].lstrip("."), cause["message"]) for cause in causes if cause["field"] != "<nil>"]


@pytest.mark.parametrize(
    "case", [c for c in REFUSED["cases"] if c["by"] == "schema"], ids=lambda case: str(case["name"])
)
def test_a_wrong_manifest_is_refused_with_its_field(server: ApiServer, case: dict[str, Any]) -> None:
    causes = refusal(server, spec_with(case["spec"]))
    assert all(field.startswith(case["field"]) for field, _ in causes), causes
    assert any(case.get("says", "") in f"{field} {message}" for field, message in causes), causes


@pytest.mark.parametrize(
    "case", [c for c in REFUSED["cases"] if c["by"] == "operator"], ids=lambda case: str(case["name"])
)
def test_what_only_this_version_of_the_operator_refuses_is_valid(server: ApiServer, case: dict[str, Any]) -> None:
    create(server, spec_with(case["spec"]))


@pytest.mark.parametrize("changes", REFUSED["accepted"], ids=str)
def test_what_the_operator_accepts_the_server_accepts(server: ApiServer, changes: dict[str, Any]) -> None:
    create(server, spec_with(changes))


@pytest.mark.parametrize("case", REFUSED["names"], ids=lambda case: str(case["name"]))
def test_a_name_that_derived_names_cannot_grow_from_is_refused(server: ApiServer, case: dict[str, Any]) -> None:
    assert {field for field, _ in refusal(server, spec_with({}), case["name"])} == {"metadata.name"}


def test_an_unknown_field_is_refused_by_name_where_the_client_is_strict_and_pruned_where_it_is_not(
    server: ApiServer,
) -> None:
    spec = spec_with({"serving": {"maxLength": 1}})
    with pytest.raises(urllib.error.HTTPError) as error:
        create(server, spec, query="?dryRun=All&fieldValidation=Strict")
    assert 'unknown field \\"spec.serving.maxLength\\"' in error.value.__notes__[0]
    assert "maxLength" not in create(server, spec)["spec"]["serving"]


def test_defaults_are_written_by_the_server(server: ApiServer) -> None:
    spec = create(server, {"model": {"uri": "hf://acme/tiny"}, "accelerator": {}, "rollout": {}})["spec"]
    assert spec["replicas"] == 1
    assert spec["accelerator"] == {"type": "Neuron"}
    assert spec["rollout"]["drainSeconds"] == 300


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_everything_rendered_is_valid_on_the_server(server: ApiServer, path: Path) -> None:
    for child in render(yaml.safe_load(path.read_text())["given"])["objects"]:
        url = resource_of(child).path(NAMESPACE, child["metadata"]["name"])
        query = "?dryRun=All&fieldManager=test&force=true&fieldValidation=Strict"
        made = server.call("PATCH", url + query, child, "application/apply-patch+yaml")
        assert made["metadata"]["name"] == child["metadata"]["name"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_pod_is_let_into_a_restricted_namespace(server: ApiServer, path: Path) -> None:
    for child in render(yaml.safe_load(path.read_text())["given"])["objects"]:
        if child["kind"] in ("Deployment", "Job"):
            pod = copy.deepcopy(child["spec"]["template"])
            pod["metadata"]["name"] = "a-pod"
            pod["spec"].pop("runtimeClassName", None)  # admission asks for the RuntimeClass itself
            server.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)


def test_a_pod_that_is_not_restricted_is_kept_out_of_that_namespace(server: ApiServer) -> None:
    pod = {"metadata": {"name": "a-pod"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)
    assert error.value.code == 403


def test_the_whole_status_is_kept_and_scale_shows_replicas_and_selector(server: ApiServer) -> None:
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
