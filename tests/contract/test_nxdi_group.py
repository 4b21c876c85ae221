"""A compiled model on several nodes, between operator and runtime: what the operator has compiled for a group is what
the leader and every follower of that group look for, and each of them finds its share of the cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from helpers.group_commands import DEMO
from helpers.nxdi import fake_nxdi, installed
from helpers.operator_worlds import FACTS, SETTINGS, body
from neuron_operator.api import names
from neuron_operator.api.manifest import parse
from neuron_operator.api.model import ObjectStore
from neuron_operator.decide.pin import pin
from neuron_operator.read.objects import dig, items
from neuron_operator.read.records import Facts
from neuron_operator.read.world import (
    FreeDevices,
    GroupSettings,
    Object,
    Place,
    Provisionable,
    StorageSettings,
)
from neuron_operator.render.config_document import to_json
from neuron_operator.render.groups import Attempt, group_owner, rest_of
from neuron_operator.render.jobs import compile_jobs
from neuron_runtime.artifacts.compiling import wanted_artifact
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target, check_cores
from neuron_runtime.commands.command_line import build_parser
from neuron_runtime.config import parse_config
from neuron_runtime.distributed import layout

SPEC: dict[str, Any] = {
    "model": {"uri": "hf://acme/tiny"},
    "engine": {"backend": "nxdi"},
    "parallelism": {"nodes": 2, "tensor": 2},
    "serving": {"maxModelLength": 256, "maxSequences": 2},
}
USING = replace(
    SETTINGS,
    storage=StorageSettings(artifacts=Place(object_store=ObjectStore(uri="s3://models/artifacts"))),
    provisionable=Provisionable(("trn1.32xlarge",)),
)


def group() -> tuple[Object, Object, Object]:
    """The Job that compiles for a group, and the sets of its leader and its followers."""
    model, facts = parse(body(SPEC)), msgspec.convert(FACTS, Facts)
    revision = pin(model, facts, USING, 1, free=FreeDevices(()))
    leader = group_owner(model, revision, Attempt(0, 1, {}), GroupSettings(), is_room_known=True)
    live = {**leader, "metadata": {**leader["metadata"], "uid": "u"}}
    followers = next(one for one in rest_of(model, live, revision.engine) if one["kind"] == "StatefulSet")
    return compile_jobs(model, USING, revision)[0], leader, followers


def container(workload: Object) -> Object:
    return items(workload, "spec", "template", "spec", "containers")[0]


def environment(workload: Object) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(workload)["env"] if "value" in one}


@pytest.mark.skipif(installed(), reason="the fake runs without devices")
def test_leader_and_followers_look_for_what_the_job_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    job, leader, followers = group()
    model, facts = parse(body(SPEC)), msgspec.convert(FACTS, Facts)
    pinned = pin(model, facts, USING, 1, free=FreeDevices(())).pinned
    compiled = dig(job, "spec", "template", "metadata", "annotations", names.CONFIG_ANNOTATION)
    keys = []
    for document, workload in ((compiled, job), (to_json(pinned.config), leader), (to_json(pinned.config), followers)):
        with fake_nxdi(), monkeypatch.context() as patch:
            for name, value in environment(workload).items():
                patch.setenv(name, value)
            config = msgspec.structs.replace(parse_config(document.encode()))
            keys.append(wanted_artifact(config, DEMO, digest=facts.digest).key)
    assert len(set(keys)) == 1, keys


def test_every_pod_has_its_share_of_the_cores_and_the_commands_are_known(tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    _, *pods = group()
    for node, workload in enumerate(pods):
        variables = {**environment(workload), layout.NODE_VARIABLE: str(node), layout.SECRET_VARIABLE: str(secret)}
        found = layout.layout_of(variables, 2, process_per_rank=False)
        assert (found.num_nodes, found.node, found.size) == (2, node, 2)
        target = Target(PLATFORMS["trn1"], 1, 32, found.num_nodes)
        check_cores(target, 2)
        program, *arguments = container(workload)["command"]
        assert program == "neuron-runtime"
        assert build_parser().parse_args(arguments).command == ("follow" if node else "serve")
