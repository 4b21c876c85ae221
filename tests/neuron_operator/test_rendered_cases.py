"""The golden cases of `helpers/rendered_cases.py`, and properties of every rendered object.

`NEURON_SERVING_UPDATE_CASES=1` updates the files; check the diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers.rendered_cases import FILES, FULL, Plain, differences, render
from neuron_operator.api import names
from neuron_operator.read.objects import is_shared
from neuron_operator.read.world import Object


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_case_renders_as_recorded(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    found = render(case["given"])
    if path != FULL:
        found = differences(render(yaml.safe_load(FULL.read_text())["given"]), found)
    key = "expect" if path == FULL else "differences"
    if os.environ.get("NEURON_SERVING_UPDATE_CASES") == "1":
        case = {"description": case["description"], "given": case["given"], key: found}
        path.write_text(yaml.dump(case, Dumper=Plain, sort_keys=False, width=120, allow_unicode=True))
    assert found == case.get(key)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_child_has_labels_and_an_owner_reference(path: Path) -> None:
    for child in render(yaml.safe_load(path.read_text())["given"])["objects"]:
        metadata = child["metadata"]
        assert metadata["namespace"] == "team"
        assert len(metadata["name"]) <= 63
        labels = names.shared_labels("x") if is_shared(child) else names.labels("chat")
        assert labels.keys() <= metadata["labels"].keys()
        owners = [owner["uid"] for owner in metadata.get("ownerReferences", [])]
        of_group = owners != ["uid-chat"] and names.GROUP_LABEL in metadata["labels"]
        expected = [] if child["kind"] == "PersistentVolumeClaim" else ["uid-chat"]
        assert owners == ([f"uid-{metadata['labels'][names.GROUP_LABEL]}"] if of_group else expected)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_pod_is_restricted_and_has_no_service_account_token(path: Path) -> None:
    for pod in pods_of(render(yaml.safe_load(path.read_text())["given"])["objects"]):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        kinds = {"configMap", "emptyDir", "image", "persistentVolumeClaim", "secret"}
        assert all(kinds & volume.keys() for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            variables = [variable["name"] for variable in container["env"]]
            assert len(variables) == len(set(variables))


def derived_names(model: str) -> dict[str, str]:
    """Names of the children by kind."""
    given = {"spec": {"model": {"uri": "hf://a/b"}, "accelerator": {"type": "CPU"}}, "metadata": {"name": model}}
    objects = [*render({**given, "resolved": False})["objects"], *render({**given, "resolved": True})["objects"]]
    return {child["kind"]: child["metadata"]["name"] for child in objects}


@pytest.mark.parametrize("model", ["a" * 63, "a-" * 31 + "z", "a" * 33 + "-" * 29 + "z"])
def test_the_longest_model_name_fits_every_derived_name(model: str) -> None:
    assert len(model) == names.MAX_MODEL_NAME
    found = derived_names(model)
    assert found.keys() >= {"Job", "Deployment", "ConfigMap", "ControllerRevision", "ServiceAccount"}
    assert found["Service"] == model
    for kind, name in found.items():
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), kind


def test_shortened_names_of_two_models_differ() -> None:
    one, two = derived_names("a" * 62 + "b"), derived_names("a" * 62 + "c")
    assert [kind for kind in one if one[kind] == two[kind]] == ["Job"], "which is shared"


def test_a_name_with_room_for_its_suffix_is_not_shortened() -> None:
    found = derived_names("a" * 44)
    assert found["ServiceAccount"] == "a" * 44 + "-serving"


def pods_of(objects: list[Object]) -> Iterator[Object]:
    yield from (child["spec"]["template"] for child in objects if child["kind"] in ("Deployment", "StatefulSet", "Job"))
