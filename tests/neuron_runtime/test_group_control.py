"""How a group meets and ends: whoever is missing, silent, restarted or different is named; nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue

import pytest

from helpers.engine_driver import RecordingBackend
from helpers.groups import FACTS, Group, Member, group_of, leader_of, local_layout, member_of
from neuron_runtime.config import AdapterOptions, ModelSource, Parallelism, RuntimeConfig
from neuron_runtime.core import BackendLimits
from neuron_runtime.distributed.layout import (
    MIN_SECRET_BYTES,
    Layout,
    layout_for,
    layout_of,
)
from neuron_runtime.distributed.wire import Facts
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.processes.run_dir import made_run_dir

LIMITS = BackendLimits(max_rows=2, max_model_length=20, max_step_tokens=8, block_size=4, num_blocks=20)


def backend() -> RecordingBackend:
    return RecordingBackend(LIMITS)


@contextmanager
def meeting(
    *facts: Facts, size: int | None = None, make: Callable[[], RecordingBackend] = backend, **times: float
) -> Iterator[tuple[Group, list[Member]]]:
    """A leader, and one member for each of these facts."""
    with made_run_dir() as run_dir:
        layout = local_layout(run_dir, size or len(facts) + 1, **times)
        group = leader_of(layout, backend())
        group.members += [member_of(layout, rank, make, its) for rank, its in enumerate(facts, 1)]
        try:
            yield group, group.members
        finally:
            for control in (group.control, *(member.control for member in group.members)):
                control.finish(None)
            for member in group.members:
                member.thread.join(60)
            group.channel.close()


def test_a_member_with_another_model_or_library_is_refused_by_name() -> None:
    other = Facts(config="c", weights="x", libraries={"torch": "2.8"})
    with meeting(FACTS, other) as (group, members):
        error = group.ends.wait()
        assert error.exit_code == ExitCode.GROUP_DISAGREES
        assert str(error) == (
            'rank 2 differs from rank 0: libraries.torch: "2.8" instead of "2.9"; weights: "x" instead of "w"'
        )
        with pytest.raises(FatalError, match="rank 2 differs"):
            group.control.wait_joined()
        told = members[1].ends.wait()
        assert (told.exit_code, str(told)) == (error.exit_code, f"rank 0 ended: {error}")


def test_a_member_that_derived_other_limits_is_refused_by_name() -> None:
    def other() -> RecordingBackend:
        return RecordingBackend(BackendLimits(max_rows=3, max_model_length=20, max_step_tokens=8, num_blocks=20))

    with meeting(FACTS, make=other) as (group, _):
        group.control.wait_joined()
        with pytest.raises(FatalError, match="rank 1: other limits of the backend than rank 0"):
            list(group.leader.warm_up(lambda stage, share: None))


def test_who_does_not_join_in_time_is_named() -> None:
    with meeting(FACTS, size=4, join_seconds=0.5) as (group, members):
        error = group.ends.wait()
        assert error.exit_code == ExitCode.GROUP_MEMBER_LOST
        assert str(error).endswith(": did not join within 0 s")
        assert "rank 2; rank 3" in str(error)
        assert members[0].ends.wait().exit_code == ExitCode.GROUP_MEMBER_LOST


def test_a_member_gives_up_when_nobody_leads() -> None:
    with made_run_dir() as run_dir:
        member = member_of(local_layout(run_dir, 2, join_seconds=0.2), 1, backend)
        assert member.ends.wait().exit_code == ExitCode.GROUP_MEMBER_LOST
        member.thread.join(60)


def test_a_member_that_must_leave_before_anybody_leads_ends_at_once() -> None:
    with made_run_dir() as run_dir:
        member = member_of(local_layout(run_dir, 2), 1, backend)
        member.control.leave()
        assert str(member.ends.wait()) == "this node must be given up, and the group is not complete"
        member.thread.join(60)


def test_a_member_that_falls_silent_is_lost_and_the_others_are_told() -> None:
    with group_of(backend, 3, lambda run_dir: local_layout(run_dir, 3, silence_seconds=3.0)) as group:
        silent = group.members[0]
        silent.control._beat = lambda now: None  # type: ignore[method-assign]
        error = group.ends.wait()
        assert error.exit_code == ExitCode.GROUP_MEMBER_LOST
        assert str(error).startswith("rank 1: silent for ")
        with pytest.raises(FatalError, match="rank 1: silent"):
            group.control.check()
        for member in group.members:
            assert member.ends.wait().exit_code == ExitCode.GROUP_MEMBER_LOST


def test_members_end_when_the_leader_falls_silent() -> None:
    with group_of(backend, 3, lambda run_dir: local_layout(run_dir, 3, silence_seconds=3.0)) as group:
        while not all(member.control._serving for member in group.members):
            group.ends.event.wait(0.05)
        group.control._beat = lambda now: None  # type: ignore[method-assign]
        for member in group.members:
            error = member.ends.wait()
            assert error.exit_code == ExitCode.GROUP_MEMBER_LOST
            assert "rank 0: silent for " in str(error)


def test_a_member_whose_connection_closes_is_lost_before_it_counts_as_silent() -> None:
    with group_of(backend, 2, lambda run_dir: local_layout(run_dir, 2, silence_seconds=8.0)) as group:
        (member,) = group.members
        member.control._say_farewell = lambda code, message: None  # type: ignore[method-assign]
        member.control.finish(None)
        assert str(group.ends.wait()) == "rank 1: closed its connection"


def test_members_whose_leader_closes_its_connections_end_before_it_counts_as_silent() -> None:
    with group_of(backend, 3, lambda run_dir: local_layout(run_dir, 3, silence_seconds=8.0)) as group:
        group.control._say_farewell = lambda code, message: None  # type: ignore[method-assign]
        group.control.finish(None)
        for member in group.members:
            error = member.ends.wait()
            assert (error.exit_code, str(error)) == (ExitCode.GROUP_MEMBER_LOST, "rank 0: closed its connection")


def test_the_error_of_one_member_reaches_all_others() -> None:
    with group_of(backend, 3) as group:
        group.members[1].control.finish(FatalError(ExitCode.DEVICE_OUT_OF_MEMORY, "no memory"))
        error = group.ends.wait()
        assert (error.exit_code, str(error)) == (ExitCode.GROUP_MEMBER_LOST, "rank 2: no memory")
        told = group.members[0].ends.wait()
        assert (told.exit_code, str(told)) == (ExitCode.GROUP_MEMBER_LOST, "rank 0 ended: rank 2: no memory")


def test_a_member_that_was_restarted_ends_the_group() -> None:
    with group_of(backend, 2) as group:
        again = member_of(group.control.layout, 1, backend, begin=False)
        error = group.ends.wait()
        assert (error.exit_code, str(error)) == (ExitCode.GROUP_MEMBER_LOST, "rank 1 was restarted")
        assert again.ends.wait().exit_code == ExitCode.GROUP_MEMBER_LOST


def test_a_node_that_must_leave_tells_the_leader_and_works_on() -> None:
    with group_of(backend, 2) as group:
        told: SimpleQueue[str] = SimpleQueue()
        group.control._on_leaving = told.put
        (member,) = group.members
        member.control.leave()
        assert told.get(timeout=30) == "rank 1 must leave"
        assert group.control.failure is None
        group.finish()
        assert member.control.done


def environment(folder: Path, **changes: str | None) -> dict[str, str]:
    secret = folder / "secret"
    secret.write_text("s" * MIN_SECRET_BYTES + "\n")
    given = {
        "NEURON_SERVING_RANK": "1",
        "NEURON_SERVING_GROUP_SIZE": "2",
        "NEURON_SERVING_LEADER": "m-0.m.ns.svc",
        "NEURON_SERVING_GROUP_SECRET_FILE": str(secret),
        **changes,
    }
    return {name: value for name, value in given.items() if value is not None}


def test_ranks_are_numbered_node_by_node(tmp_path: Path) -> None:
    layout = layout_of(environment(tmp_path), 8, process_per_rank=True)
    assert (layout.size, layout.num_nodes, layout.own_ranks) == (8, 2, range(4, 8))
    assert (layout.named(5), layout.wire) == ("rank 5 (node 1)", "tcp://m-0.m.ns.svc:8010")
    whole = layout_of(environment(tmp_path), 64, process_per_rank=False)
    assert (whole.size, whole.own_ranks) == (2, range(1, 2))


def test_one_node_needs_no_variables() -> None:
    assert layout_of({}, 0, process_per_rank=True) == Layout()
    assert layout_of({"NEURON_SERVING_GROUP_SIZE": "1"}, 4, process_per_rank=True) == Layout(size=4)


@pytest.mark.parametrize(
    ("changes", "tensor", "field", "message"),
    [
        ({"NEURON_SERVING_RANK": None}, 2, "NEURON_SERVING_RANK", "must be a number from 0 to 1, got ''"),
        ({"NEURON_SERVING_RANK": "2"}, 2, "NEURON_SERVING_RANK", "must be a number from 0 to 1, got '2'"),
        ({"NEURON_SERVING_GROUP_SIZE": "x"}, 2, "NEURON_SERVING_GROUP_SIZE", "from 1 to 64, got 'x'"),
        ({"NEURON_SERVING_LEADER": None}, 2, "NEURON_SERVING_LEADER", "must be set in a group of 2 nodes"),
        ({"NEURON_SERVING_GROUP_SECRET_FILE": None}, 2, "NEURON_SERVING_GROUP_SECRET_FILE", "must be set"),
        ({"NEURON_SERVING_GROUP_SECRET_FILE": "/no"}, 2, "NEURON_SERVING_GROUP_SECRET_FILE", "cannot read /no"),
        ({"NEURON_SERVING_GROUP_SILENCE_SECONDS": "-1"}, 2, "NEURON_SERVING_GROUP_SILENCE_SECONDS", "above 0"),
        ({}, 3, "$.parallelism.tensor", r"must be a multiple of the number of nodes .*, got 3"),
        ({}, 4096, "$.parallelism.tensor", "must be at most 1024, got 4096"),
    ],
)
def test_a_wrong_variable_is_named(
    tmp_path: Path, changes: dict[str, str | None], tensor: int, field: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message) as error:
        layout_of(environment(tmp_path, **changes), tensor, process_per_rank=True)
    assert error.value.field == field


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    given = environment(tmp_path)
    (tmp_path / "secret").write_text("short")
    with pytest.raises(InvalidConfig, match="must have 32 to 256 bytes, has 5"):
        layout_of(given, 2, process_per_rank=True)


@pytest.mark.parametrize("node", ["0", "1"])
@pytest.mark.parametrize(("backend", "refused"), [("torch", False), ("nxdi", True)])
def test_a_group_of_several_nodes_serves_adapters_with_a_process_for_each_rank(
    node: str, backend: str, *, refused: bool, tmp_path: Path
) -> None:
    config = RuntimeConfig(
        version=1,
        model=ModelSource(uri="file:///m"),
        served_names=("m",),
        backend=backend,  # type: ignore[arg-type]
        parallelism=Parallelism(tensor=2),
        adapters=AdapterOptions(max_active=1),
    )
    given = environment(tmp_path, NEURON_SERVING_RANK=node)
    with pytest.raises(InvalidConfig, match="nxdi serves no adapters over 2 nodes") if refused else nullcontext():
        layout_for(config, leads=node == "0", environment=given)
