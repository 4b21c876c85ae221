"""Golden cases: a spec and the facts of the model, then the resulting objects in the cluster, or the refusal.

`cases/rendered/cpu-demo.yaml` contains all objects, every other case its differences from it, as paths. Used by tests
of the renderer and by tests that validate the objects with a real API server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml

from helpers.manifests import CASES
from helpers.operator_worlds import FACTS, NOW, body, finished, resolved_pod, settings, settle, stepped, stored
from neuron_operator.read.world import FreeDevices, NodeDevices, World

FULL = CASES / "rendered" / "cpu-demo.yaml"
FILES = sorted((CASES / "rendered").glob("*.yaml"))
ABSENT = "absent"


def render(given: dict[str, Any]) -> dict[str, Any]:
    """The objects after convergence, and the refusal, if any."""
    using = settings(given.get("settings", {}))
    free = FreeDevices(tuple(NodeDevices(**node) for node in given["nodes"])) if "nodes" in given else None
    world = World(body=body(given["spec"], **given.get("metadata", {})), children=(), pods=(), now=NOW, free=free)
    world, decision = settle(world, using)
    if "facts" in given:
        (job,) = (made for made in decision.desired if made["kind"] == "Job")
        world, _ = settle(replace(world, pods=(resolved_pod(job, FACTS | given["facts"]),)), using)
        world, decision = settle(finished(world), using)
    if given["resolved"]:
        world, decision = stepped(world, decision, using)
    assert decision.status is not None
    refused = [
        c for c in decision.status["conditions"] if c["type"] in ("Accepted", "Placed") and c["status"] == "False"
    ]
    refusal = {key: refused[0][key] for key in ("type", "reason", "message")} if refused else None
    claims = (found for found in world.shared if found["kind"] == "PersistentVolumeClaim")
    made_once = (found for found in world.children if found["kind"] in ("StatefulSet", "Secret"))
    objects = sorted(
        (*stored(decision.desired), *claims, *made_once), key=lambda child: (child["kind"], child["metadata"]["name"])
    )
    return {**({"refusal": refusal} if refusal else {}), "objects": objects}


def differences(full: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Differences of `found` from `full`: path to value, ABSENT for entries only in `full`."""
    before, after = dict(_leaves(_by_kind(full))), dict(_leaves(_by_kind(found)))
    kinds = {path.partition(".")[0] for path in before} - {path.partition(".")[0] for path in after}
    removed = {path: ABSENT for path in before.keys() - after.keys() if path.partition(".")[0] not in kinds}
    changed = {path: value for path, value in after.items() if path not in before or before[path] != value}
    return dict(sorted({**dict.fromkeys(kinds, ABSENT), **removed, **changed}.items()))


def _by_kind(rendered: dict[str, Any]) -> dict[str, Any]:
    """One key per object: its kind, with a number if there are several. Parts of a revision that repeat the Deployment
    and the ConfigMap are omitted."""
    named: dict[str, Any] = {key: value for key, value in rendered.items() if key != "objects"}
    for child in rendered["objects"]:
        kind, number = child["kind"], 1
        while (key := kind if number == 1 else f"{kind}-{number}") in named:
            number += 1
        named[key] = child
    if "Deployment" in named or "StatefulSet" in named:
        revision = named["ControllerRevision"]
        # The templates of a group are made from that of its revision.
        template = named["Deployment"]["spec"]["template"] if "Deployment" in named else revision["data"]["template"]
        files = dict(named["ConfigMap"]["data"])
        same = {"template": template, "config": json.loads(files.pop("config.json")), "files": files}
        data = {key: "the same" if value == same.get(key) else value for key, value in revision["data"].items()}
        named["ControllerRevision"] = {**revision, "data": data}
    return named


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar with its path; list members are identified by their `name` if present."""
    if path.endswith(".json"):
        value = json.loads(value)  # a document in a ConfigMap
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from _leaves(member, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value:
        for index, member in enumerate(value):
            name = member.get("name", index) if isinstance(member, dict) else index
            yield from _leaves(member, f"{path}[{name}]")
    else:
        yield path, value


class Plain(yaml.SafeDumper):
    """A dumper without anchors, so that every object is shown completely."""

    def ignore_aliases(self, data: object) -> bool:
        return True
