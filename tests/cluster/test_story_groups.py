"""A replica on two nodes on the real cluster, with the real images: it answers as on one node, and comes back by itself
when a member ends."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.rig.faults import kill_containers
from cluster.rig.rig import Rig
from cluster.stories import ANSWERS, ASK, OPENED, SERVING, Images, Story, install, load_images, model_of, uninstall

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

QUESTION = "What is a NeuronModel?"
FOLLOWING = "neuron-serving.dev/role=follower"


@pytest.fixture(scope="module")
def images(rig: Rig) -> Iterator[Images]:
    images = load_images(rig)
    try:
        install(rig, images, values={"groups": {"restartSeconds": 0}})
        yield images
    finally:
        uninstall(rig)


@pytest.fixture
def story(rig: Rig, images: Images) -> Iterator[Story]:
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    rig.create_namespace(namespace)
    yield Story(rig, namespace)
    rig.kubectl("delete", "namespace", namespace, "--wait=false")


def ask(story: Story, images: Images) -> str:
    name = f"ask-{uuid.uuid4().hex[:8]}"
    url = f"http://chat.{story.namespace}.svc:8000"
    return story.run_client(images.runtime, name, OPENED + ASK, url, "chat", QUESTION)


def uids(pods: list[Any]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def members(story: Story) -> list[Any]:
    return [*story.items("pods", SERVING), *story.items("pods", FOLLOWING)]


@pytest.mark.parametrize(
    ("tensor", "victims"),
    [(2, (FOLLOWING, SERVING)), pytest.param(4, (FOLLOWING,), marks=pytest.mark.long)],
)
def test_a_replica_on_two_nodes_answers_and_comes_back_when_a_member_is_killed(
    rig: Rig, story: Story, images: Images, tensor: int, victims: tuple[str, ...]
) -> None:
    parallelism = {"nodes": 2, "tensor": tensor}
    model = model_of("chat", "file:///models/demo", accelerator={"devices": 6}, parallelism=parallelism)
    with story.stage("from apply to ready"):
        story.apply(model)
        story.until_ready(1)
    pods = members(story)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == len(pods) == 2
    assert all(len(story.devices_held(pod)) == 6 for pod in pods)
    assert ask(story, images) == ANSWERS[QUESTION]
    for victim in victims:
        before = uids(members(story))
        kill_containers(rig, story.namespace, f"neuron-serving.dev/model=chat,{victim}")
        with story.stage(f"from the end of {victim} to ready"):
            story.until("other pods", lambda before=before: not before & uids(members(story)) and members(story))
            story.until_ready(1)
        assert ask(story, images) == ANSWERS[QUESTION]
    story.kubectl("delete", "neuronmodel", "chat")
    story.until(
        "nothing is left", lambda: not members(story) and not story.items("secrets", "neuron-serving.dev/model")
    )
