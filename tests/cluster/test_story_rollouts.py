"""Rollouts under steady traffic, on the real cluster with the real images: no request fails and no stream is cut, in
each strategy, whatever is edited. Half of the clients make a connection for each request, the others share a pool."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

from cluster.rig.images import build_image
from cluster.rig.rig import Rig
from cluster.servers import hub_in_pod
from cluster.stories import Images, Story, install, load_images, model_of, uninstall

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]


@dataclass(frozen=True)
class Installation:
    rig: Rig
    images: Images

    @cached_property
    def other_image(self) -> str:
        """With the same code, under another name; loaded once a test asks for it."""
        other = build_image("runtime-cpu-compile")
        self.rig.load_image(other.archive)
        return other.name


@pytest.fixture(scope="module")
def installation(rig: Rig) -> Iterator[Installation]:
    """The operator, and a hub in the cluster that has the demo model."""
    images = load_images(rig)
    with contextlib.ExitStack() as undo:
        namespace = f"hub-{uuid.uuid4().hex[:8]}"
        hub = undo.enter_context(hub_in_pod(rig, namespace, images.runtime, node="n3", models={"demo/demo": 0}))
        values = {"jobs": {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]}}
        undo.callback(uninstall, rig)
        install(rig, images, *(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()))
        yield Installation(rig, images)


@pytest.fixture
def story(installation: Installation) -> Iterator[Story]:
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    installation.rig.create_namespace(namespace)
    yield Story(installation.rig, namespace)
    installation.rig.kubectl("delete", "namespace", namespace, "--wait=false")


def edited(installation: Installation, *edits: str) -> dict[str, Any]:
    """The spec after these edits."""
    spec: dict[str, Any] = {}
    for edit in edits:
        match edit:
            case "config":
                spec |= {"serving": {"maxModelLength": 512}}
            case "image":
                spec |= {"engine": {"image": installation.other_image}}
            case "model":
                spec |= {"model": {"uri": "hf://demo/demo"}}
    return spec


def rolling(strategy: str, **spec: Any) -> dict[str, Any]:
    """Two replicas with a device each, and a token after every step of 20 ms."""
    rollout = {"strategy": strategy, "drainDelaySeconds": 3, "drainSeconds": 240}
    uri = spec.pop("model", {"uri": "file:///models/demo"})["uri"]
    engine = {"overrideNeuronConfig": {"stepMilliseconds": 20}, **spec.pop("engine", {})}
    return model_of("chat", uri, replicas=2, accelerator={"devices": 1}, rollout=rollout, engine=engine, **spec)


def roll_under_traffic(
    installation: Installation,
    story: Story,
    strategy: str,
    *edits: str,
    least: int,
    clients: int,
    num_tokens: int = 150,
) -> None:
    """Makes the edits one after another while clients stream."""
    story.apply(rolling(strategy))
    story.until_ready(2)
    with story.traffic(installation.images.runtime, clients=clients, num_tokens=num_tokens, least=least):
        for number, edit in enumerate(edits, start=1):
            spec = edited(installation, *edits[:number])
            with story.stage(f"{strategy}: {edit}"), story.watching("pods") as events:
                before = {pod["metadata"]["name"] for pod in story.ready_pods()}
                story.apply(rolling(strategy, **spec))
                story.until_replaced(before, 2)
                surged = max(_num_living(events(), installation))
                print(f"    at most {surged} replicas at a time")
                assert surged == (2 if strategy == "Replace" else 3)


def _num_living(events: Any, installation: Installation) -> Iterator[int]:
    """After each change: the serving pods that nobody has deleted."""
    alive: set[str] = set()
    yield 0
    for event in events:
        serves = event.object["metadata"].get("labels", {}).get("neuron-serving.dev/role") == "leader"
        if serves and event.type != "DELETED" and "deletionTimestamp" not in event.object["metadata"]:
            alive.add(event.name)
        else:
            alive.discard(event.name)
        yield len(alive)


# Auto surges too, because there is room.
@pytest.mark.parametrize(
    ("strategy", "edit"),
    [
        ("Auto", "config"),
        pytest.param("Replace", "image", marks=pytest.mark.long),
        pytest.param("Surge", "model", marks=pytest.mark.long),
    ],
)
def test_no_stream_is_cut_and_no_request_fails_while_replicas_are_replaced(
    installation: Installation, story: Story, strategy: str, edit: str
) -> None:
    roll_under_traffic(installation, story, strategy, edit, least=24, clients=6)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["Auto", "Surge", "Replace"])
def test_a_thousand_streams_end_whole_through_edits_of_configuration_image_and_model(
    installation: Installation, story: Story, strategy: str
) -> None:
    many = {"least": 1000, "clients": 12, "num_tokens": 40}
    roll_under_traffic(installation, story, strategy, "config", "image", "model", **many)
