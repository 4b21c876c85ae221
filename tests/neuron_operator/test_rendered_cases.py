"""Golden cases: a spec and what is known of the model, then the objects that stand in the cluster, or the refusal.

`NEURON_SERVING_UPDATE_CASES=1` writes what is rendered now into the files, for a reader to check in the diff.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.manifests import CASES
from helpers.operator_worlds import (
    NOW,
    body,
    find,
    resolved_pod,
    settings,
    settle,
    stored,
)
from neuron_operator import names
from neuron_operator.world import Object, World

FILES = sorted((CASES / "rendered").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_case_is_rendered_as_written_down(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    found = render(case["given"])
    if os.environ.get("NEURON_SERVING_UPDATE_CASES") == "1":
        case["expect"] = found
        path.write_text(yaml.dump(case, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True))
    assert found == case.get("expect")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_child_is_labelled_and_collected_with_its_model(path: Path) -> None:
    for child in yaml.safe_load(path.read_text())["expect"]["objects"]:
        metadata = child["metadata"]
        assert metadata["namespace"] == "team"
        assert len(metadata["name"]) <= 63
        assert names.labels("chat", "x").keys() <= metadata["labels"].keys()
        assert [owner["uid"] for owner in metadata["ownerReferences"]] == ["uid-chat"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_pod_is_restricted_and_has_no_identity(path: Path) -> None:
    for pod in pods_of(yaml.safe_load(path.read_text())["expect"]["objects"]):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all({"configMap", "emptyDir", "secret"} & volume.keys() for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            variables = [variable["name"] for variable in container["env"]]
            assert len(variables) == len(set(variables))


def test_the_longest_name_leaves_room_in_every_derived_name() -> None:
    name = "a" * names.MAX_MODEL_NAME
    given = {"spec": {"model": {"uri": "hf://a/b"}, "accelerator": {"type": "CPU"}}, "metadata": {"name": name}}
    objects = [*render({**given, "resolved": False})["objects"], *render({**given, "resolved": True})["objects"]]
    assert {child["kind"] for child in objects} >= {"Job", "Deployment", "ConfigMap", "ControllerRevision"}
    for child in objects:
        room = {"Deployment": 17, "Job": 0}.get(child["kind"], 0)  # ReplicaSet and pod suffixes of a Deployment's pods
        assert len(child["metadata"]["name"]) + room <= 63


def render(given: dict[str, Any]) -> dict[str, Any]:
    """The objects that stand when the line comes to rest, and the refusal where there is one."""
    using = settings(given.get("settings", {}))
    world = World(body=body(given["spec"], **given.get("metadata", {})), children=(), pods=(), now=NOW)
    world, decision = settle(world, using)
    if given["resolved"] and any(child["kind"] == "Job" for child in decision.desired):
        world = replace(world, pods=(resolved_pod(find(decision.desired, "Job")),))
        done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        children = tuple({**child, **done} if child["kind"] == "Job" else child for child in world.children)
        world, decision = settle(replace(world, children=children), using)
    assert decision.status is not None
    refused = [
        c for c in decision.status["conditions"] if c["type"] in ("Accepted", "Placed") and c["status"] == "False"
    ]
    refusal = {key: refused[0][key] for key in ("type", "reason", "message")} if refused else None
    objects = sorted(stored(decision.desired), key=lambda child: (child["kind"], child["metadata"]["name"]))
    return {**({"refusal": refusal} if refusal else {}), "objects": objects}


def pods_of(objects: list[Object]) -> Iterator[Object]:
    yield from (child["spec"]["template"] for child in objects if child["kind"] in ("Deployment", "Job"))


class _Plain(yaml.SafeDumper):
    """Without anchors: a reader sees every object whole."""

    def ignore_aliases(self, data: object) -> bool:
        return True
