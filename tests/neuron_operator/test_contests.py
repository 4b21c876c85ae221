"""Writes that somebody else undoes become rare and are named; edits, repairs and other attempts do not."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_operator.cluster.contests import (
    DELETED,
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    NUM_AT_ONCE,
    Contests,
    Difference,
    difference,
    status_of,
)

KEY = ("Deployment", "team", "chat")
HOUR = 3600


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def deployment(image: str = "ours", replicas: int = 1, **metadata: Any) -> dict[str, Any]:
    container = {"name": "runtime", "image": image}
    template = {"spec": {"containers": [container]}}
    return {
        "kind": "Deployment",
        "metadata": {"name": "chat", **metadata},
        "spec": {"replicas": replicas, "template": template},
    }


def write(contests: Contests, wants: Difference) -> bool:
    """Whether the write may be made; it is, then."""
    may = contests.check(KEY, wants) == ""
    if may:
        contests.wrote(KEY, wants)
    return may


def num_writes(contests: Contests, clock: Clock, wants: Difference, seconds: int) -> int:
    """Writes of somebody who tries each second."""
    made = 0
    for _ in range(seconds):
        made += write(contests, wants)
        clock.now += 1
    return made


@pytest.mark.parametrize(
    "wants", [difference(deployment(), deployment("mirror/ours")), DELETED, status_of({})], ids=str
)
def test_a_write_that_is_undone_again_and_again_is_made_minutes_apart(wants: Difference) -> None:
    clock = Clock()
    contests = Contests(clock)
    assert num_writes(contests, clock, wants, 20) == NUM_AT_ONCE
    assert num_writes(contests, clock, wants, HOUR) <= 5 + HOUR / MAX_WAIT_SECONDS
    assert contests.still(KEY) == wants.words


def test_a_write_that_is_undone_for_weeks_stays_minutes_apart() -> None:
    clock = Clock()
    contests = Contests(clock)
    wants = difference(deployment(), deployment("mirror/ours"))
    for _ in range(5000):
        if not write(contests, wants):
            clock.now += MAX_WAIT_SECONDS
    assert num_writes(contests, clock, wants, HOUR) <= 1 + HOUR / MAX_WAIT_SECONDS


@pytest.mark.parametrize(("lasted", "wait"), [(0, 30), (29, 30), (30, 60), (210, 240), (10**9, 600), (-5, 30)])
def test_another_process_goes_on_with_the_wait_for_what_was_undone_for_so_long(lasted: float, wait: float) -> None:
    clock = Clock()
    contests = Contests(clock)
    wants = difference(deployment(), deployment("mirror/ours"))
    contests.resume(KEY, wants, lasted)
    assert num_writes(contests, clock, wants, int(wait)) == 0
    assert write(contests, wants)
    assert contests.still(KEY) == wants.words
    contests.resume(KEY, wants, 0.0)
    assert num_writes(contests, clock, wants, int(min(2 * wait, MAX_WAIT_SECONDS)) - 1) == 0, "its own are remembered"


def test_the_field_and_both_values_are_named() -> None:
    mirrored = difference(deployment(), deployment("mirror/ours"))
    path = "spec.template.spec.containers.runtime.image"
    assert mirrored.words == f'{path}: wanted "ours", but somebody else makes it "mirror/ours"'
    scaled = difference(deployment(), deployment(replicas=3))
    assert scaled.words == "spec.replicas: wanted 1, but somebody else makes it 3; scale the NeuronModel instead"


def test_what_the_owner_changes_is_written_at_once_however_often() -> None:
    clock = Clock()
    contests = Contests(clock)
    for number in range(50):
        assert write(contests, difference(deployment(replicas=number + 1), deployment(replicas=number)))


def test_a_contest_is_over_when_nothing_was_undone_for_the_time_of_its_wait() -> None:
    clock = Clock()
    contests = Contests(clock)
    num_writes(contests, clock, DELETED, 10)
    clock.now += MIN_WAIT_SECONDS
    assert contests.still(KEY) == ""


def test_the_next_attempt_after_an_end_is_no_contest() -> None:
    contests = Contests(Clock())
    for number in range(50):
        assert contests.check(KEY, DELETED) == ""
        contests.wrote(KEY, DELETED, str(number))
        contests.forget(KEY, str(number))


def test_a_job_of_somebody_else_that_takes_the_place_of_ours_counts() -> None:
    contests = Contests(Clock())
    for number in range(NUM_AT_ONCE):
        assert contests.check(KEY, DELETED) == ""
        contests.wrote(KEY, DELETED, f"ours {number}")
        contests.forget(KEY, f"theirs {number}")
    assert contests.check(KEY, DELETED) == DELETED.words


def test_asking_for_a_job_that_others_make_at_the_same_time_is_no_contest() -> None:
    contests = Contests(Clock())
    assert [contests.check(KEY, DELETED) for _ in range(50)] == [""] * 50


def test_defaults_of_the_api_server_are_no_difference() -> None:
    live = deployment(uid="1")
    live["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = "Always"
    live["spec"]["template"]["spec"]["volumes"] = [{"name": "added"}]
    assert difference(deployment(), live).said
