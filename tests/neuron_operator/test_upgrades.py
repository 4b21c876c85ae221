"""Models move to a newer runtime image one after another, and only with `runtimeUpgrade: Rolling`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.operator_worlds import (
    FACTS,
    SETTINGS,
    SPEC,
    condition,
    find,
    finished,
    fresh,
    resolved_pod,
    resolved_world,
    serving_pod,
)
from helpers.operator_worlds import settle as at_rest
from helpers.operator_worlds import stepped as after_jobs
from neuron_operator.api.model import Claim
from neuron_operator.decide import pin
from neuron_operator.decide.course import decide
from neuron_operator.read.world import (
    Decision,
    EngineSettings,
    FreeDevices,
    Object,
    Place,
    Settings,
    StorageSettings,
    Upgrade,
    World,
)
from neuron_operator.run.upgrades import Key, Turns

CLAIM = Place(persistent_volume_claim=Claim(claim_name="kept"))
A, B, C = ("ns", "a"), ("ns", "b"), ("ns", "c")

OLD = SETTINGS.runtime_image
ON_EDIT = replace(SETTINGS, runtime_image="registry.example/runtime:2")
ROLLING = replace(ON_EDIT, runtime_upgrade="Rolling")


def image_of(deployment: Object) -> str:
    found: str = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    return found


def settle(world: World, using: Settings) -> tuple[World, Decision]:
    return after_jobs(*at_rest(world, using), using)


def served(world: World, using: Settings) -> World:
    """All replicas run the newest Deployment, and answer."""
    deployment = find(world.children, "Deployment")
    pods = (serving_pod(deployment, f"chat-{n}", ready=True) for n in range(deployment["spec"]["replicas"]))
    return settle(replace(world, pods=tuple(pods)), using)[0]


def serving_world(**spec: Any) -> World:
    return served(resolved_world(spec={**SPEC, **spec})[0], SETTINGS)


def test_a_running_model_keeps_its_image_until_it_is_edited() -> None:
    world, decision = settle(replace(serving_world(), has_turn=True), ON_EDIT)
    assert image_of(find(world.children, "Deployment")) == OLD
    assert decision.upgrade is None


def test_a_model_waits_for_its_turn_then_moves_and_is_done_when_all_its_replicas_answer() -> None:
    world, decision = settle(serving_world(), ROLLING)
    assert (decision.upgrade, image_of(find(world.children, "Deployment"))) == ("Waiting", OLD)
    assert condition(decision.status, "UpToDate")["message"].endswith("; a newer runtime image waits for its turn")

    world, decision = settle(replace(world, has_turn=True), ROLLING)
    assert (decision.upgrade, image_of(find(world.children, "Deployment"))) == ("Running", ROLLING.runtime_image)
    # The turn is asked for only to begin.
    world, decision = settle(replace(world, has_turn=False), ROLLING)
    assert (decision.upgrade, image_of(find(world.children, "Deployment"))) == ("Running", ROLLING.runtime_image)
    assert condition(decision.status, "UpToDate")["status"] == "False"

    world, decision = settle(served(world, ROLLING), ROLLING)
    assert (decision.upgrade, condition(decision.status, "UpToDate")["status"]) == (None, "True")
    assert len({child["metadata"]["name"] for child in world.children if child["kind"] == "ControllerRevision"}) == 2


def test_a_model_moves_back_to_an_image_that_it_had_before() -> None:
    world = served(settle(replace(serving_world(), has_turn=True), ROLLING)[0], ROLLING)
    back = replace(ROLLING, runtime_image=OLD)
    world, decision = settle(replace(world, has_turn=False), back)
    assert (decision.upgrade, image_of(find(world.children, "Deployment"))) == ("Waiting", ROLLING.runtime_image)
    world, decision = settle(replace(world, has_turn=True), back)
    assert (decision.upgrade, image_of(find(world.children, "Deployment"))) == ("Running", OLD)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"annotations": {"neuron-serving.dev/paused": "true"}}, id="paused"),
        pytest.param({"image": "registry.example/own:1"}, id="own image"),
        pytest.param({"pods": 1}, id="a replica does not answer"),
    ],
)
def test_a_model_that_should_not_move_takes_no_turn(change: dict[str, Any]) -> None:
    engine = {**SPEC.get("engine", {}), **({"image": change["image"]} if "image" in change else {})}
    world = serving_world(engine=engine)
    if "annotations" in change:
        metadata = {**world.body["metadata"], "annotations": change["annotations"]}
        world = replace(world, body={**world.body, "metadata": metadata})
    if "pods" in change:
        world = replace(world, pods=world.pods[: change["pods"]])
    decision = decide(replace(world, has_turn=True), ROLLING)
    assert decision.upgrade is None
    assert all(image_of(made) != ROLLING.runtime_image for made in decision.desired if made["kind"] == "Deployment")


def test_a_model_whose_engine_has_lost_its_image_keeps_its_pods_and_takes_no_turn() -> None:
    spec = {**SPEC, "accelerator": {"type": "CPU"}, "engine": {"backend": "vllm"}}
    storage = StorageSettings(weights=Place(persistent_volume_claim=Claim(claim_name="kept")))
    using = replace(ROLLING, engines={"vllm-cpu": EngineSettings("registry.example/vllm:1")}, storage=storage)
    world = replace(served(resolved_world(using, spec=spec)[0], using), has_turn=True)
    moved = {"vllm-cpu": EngineSettings("registry.example/vllm:2")}
    assert decide(world, replace(using, engines=moved)).upgrade == "Running"
    world, decision = settle(world, replace(using, engines={}))
    assert (decision.upgrade, condition(decision.status, "UpToDate")["status"]) == (None, "True")
    assert image_of(find(world.children, "Deployment")) == "registry.example/vllm:1"


def test_a_model_that_moves_to_a_claim_with_a_newer_runtime_image_gets_a_revision_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {**SPEC, "accelerator": {"type": "CPU"}, "engine": {"backend": "vllm"}}
    first, second = ({"vllm-cpu": EngineSettings(f"registry.example/vllm:{n}")} for n in (1, 2))
    before = replace(SETTINGS, engines=first, runtime_upgrade="Rolling")
    world = replace(served(resolved_world(before, spec=spec)[0], before), has_turn=True)
    with monkeypatch.context() as earlier:  # revisions had only the engine's image in their names
        earlier.setattr(pin, "words_of_images", lambda model, settings: pin.images(model, settings)[0])
        moved = served(settle(world, replace(before, engines=second))[0], replace(before, engines=second))
    storage = StorageSettings(weights=CLAIM)
    newer = replace(before, engines=second, runtime_image=ON_EDIT.runtime_image, storage=storage)
    kept = [child for child in moved.children if child["kind"] == "ControllerRevision"]
    decision = decide(replace(moved, has_turn=True), newer)
    assert decision.upgrade == "Running"
    assert find(decision.desired, "ControllerRevision")["metadata"]["name"] not in [
        one["metadata"]["name"] for one in kept
    ]


@pytest.mark.parametrize("fetches_in_pods", [True, False])
def test_a_newer_runtime_image_moves_models_of_another_engine_if_their_pods_fetch_with_it(
    fetches_in_pods: bool,
) -> None:
    claim = Place() if fetches_in_pods else CLAIM
    spec = {**SPEC, "accelerator": {"type": "CPU"}, "engine": {"backend": "vllm"}}
    engines = {"vllm-cpu": EngineSettings("registry.example/vllm:1")}
    before = replace(SETTINGS, engines=engines, storage=StorageSettings(weights=claim))
    world = served(resolved_world(before, spec=spec)[0], before)
    template = find(world.children, "Deployment")["spec"]["template"]

    def fetches_with(world: World) -> list[str]:
        pod = find(world.children, "Deployment")["spec"]["template"]["spec"]
        return [one["image"] for one in pod.get("initContainers", ())]

    newer = replace(before, runtime_image=ON_EDIT.runtime_image)
    same, decision = settle(replace(world, has_turn=True), newer)
    assert (decision.upgrade, find(same.children, "Deployment")["spec"]["template"]) == (None, template)
    rolling = replace(newer, runtime_upgrade="Rolling")
    moved, decision = settle(replace(world, has_turn=True), rolling)
    assert decision.upgrade == ("Running" if fetches_in_pods else None)
    assert fetches_with(moved) == ([newer.runtime_image] if fetches_in_pods else [])
    assert image_of(find(moved.children, "Deployment")) == "registry.example/vllm:1"
    done, decision = settle(replace(served(moved, rolling), has_turn=True), rolling)
    assert (decision.upgrade, condition(decision.status, "UpToDate")["status"]) == (None, "True")
    back, _ = settle(replace(done, has_turn=True), replace(before, runtime_upgrade="Rolling"))
    assert find(back.children, "Deployment")["spec"]["template"] == template
    # A claim that the installation has by now is no reason to move.
    claimed = replace(before, runtime_upgrade="Rolling", storage=StorageSettings(weights=CLAIM))
    stays, decision = settle(replace(world, has_turn=True), claimed)
    assert (decision.upgrade, find(stays.children, "Deployment")["spec"]["template"]) == (None, template)


@pytest.mark.parametrize(
    ("instance_type", "architecture", "says"),
    [
        ("trn2.48xlarge", "Qwen2ForCausalLM", "spec.model.uri: Qwen2ForCausalLM has no implementation"),
        ("trn1.32xlarge", "LlamaForCausalLM", "vllm runs on trn2, trn3, not on trn1"),
    ],
)
def test_a_model_that_the_newer_image_would_refuse_keeps_its_pods_and_takes_no_turn(
    instance_type: str, architecture: str, says: str
) -> None:
    storage = StorageSettings(weights=Place(persistent_volume_claim=Claim(claim_name="kept")))
    earlier, newer = (
        replace(ROLLING, storage=storage, engines={"vllm": EngineSettings(f"registry.example/vllm:{line}", line)})
        for line in ("0.16", "0.29")
    )
    nodes = {"spec": {"nodeSelector": {"node.kubernetes.io/instance-type": instance_type}}}
    spec = {**SPEC, "accelerator": {}, "engine": {"backend": "vllm"}, "podTemplate": nodes}
    world, decision = at_rest(fresh(spec=spec), earlier)
    answer = resolved_pod(find(decision.desired, "Job"), {**FACTS, "architecture": architecture})
    world, _ = at_rest(replace(world, pods=(answer,)), earlier)
    world = served(settle(finished(world), earlier)[0], earlier)
    for has_turn in (False, True, False):
        world = replace(world, has_turn=has_turn, free=FreeDevices(()))
        world, decision = settle(world, newer)
        assert decision.upgrade is None
        assert image_of(find(world.children, "Deployment")) == "registry.example/vllm:0.16"
        assert condition(decision.status, "Ready")["status"] == "True"
        assert f"would refuse it: {says}" in condition(decision.status, "UpToDate")["message"]


def turns_of(*models: Key) -> tuple[Turns, list[Key]]:
    woken: list[Key] = []
    turns = Turns(woken.append)
    turns.begin(models)
    return turns, woken


def test_no_turn_comes_before_all_models_have_told_how_far_they_are() -> None:
    turns, woken = turns_of(A, B, C)
    turns.tell(A, "Waiting")
    assert not turns.take(A)
    turns.tell(B, "Running")
    turns.tell(C, None)
    assert not woken
    assert [turns.take(key) for key in (A, B, C)] == [False, True, False]
    turns.tell(B, None)
    assert woken == [A]
    assert turns.take(A)


def test_a_failed_model_stops_the_others_until_it_is_mended_or_gone() -> None:
    turns, woken = turns_of(A, B)
    turns.tell(A, "Failed")
    turns.tell(B, "Waiting")
    assert not turns.take(B)
    assert turns.count() == {"Failed": 1, "Waiting": 1}
    turns.tell(A, None)
    assert (woken, turns.take(B)) == ([B], True)


def test_a_failed_model_moves_on_to_another_image() -> None:
    turns, _ = turns_of(A, B)
    turns.tell(B, "Waiting")
    turns.tell(A, "Failed")
    assert turns.take(A)
    assert turns.count() == {"Running": 1, "Waiting": 1}


def test_of_two_passes_that_overlap_one_gets_the_turn() -> None:
    turns, _ = turns_of(A, B)
    turns.tell(A, "Waiting")
    turns.tell(B, "Waiting")
    assert [turns.take(key) for key in (A, B, A)] == [True, False, True]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_at_most_one_model_moves_and_all_have_moved_in_the_end(seed: int, num_models: int) -> None:
    """Passes begin and end in any order. A new leader forgets everything, now and then."""
    rng = Random(seed)
    keys = [("ns", str(number)) for number in range(num_models)]
    left = dict.fromkeys(keys, 2)
    """Passes that each model still needs; 2: it has not begun."""
    turns, woken = turns_of(*keys)
    queue, running = list(keys), dict[Key, bool]()
    for _ in range(10_000):
        if not queue and not running:
            break
        if rng.random() < 0.02:
            turns.begin(keys)
            queue, running = list(keys), {}
        startable = [key for key in queue if key not in running]
        if startable and rng.random() < 0.5:
            key = rng.choice(startable)
            queue = [one for one in queue if one != key]
            running[key] = turns.take(key)
        elif running:
            key = rng.choice(list(running))
            has_turn = running.pop(key)
            found: Upgrade | None = None
            if left[key] == 2:
                found, left[key] = ("Running", 1) if has_turn else ("Waiting", 2)
            elif left[key] == 1:
                left[key] = 0
            assert sum(one == 1 for one in left.values()) <= 1
            turns.tell(key, found)
            queue += [key] if found == "Running" else []
        queue += woken
        woken.clear()
    assert set(left.values()) == {0}
