"""The cache of one resource converges to the state of the server, whatever happens to its watch."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import virtual_time
from helpers.fake_cluster import FakeCluster
from helpers.operator_worlds import NOW, SETTINGS
from neuron_operator.api.names import API_VERSION, FIELD_MANAGER, GROUP_LABEL, KIND, MODEL_LABEL, STATUS_FIELD_MANAGER
from neuron_operator.cluster.client import (
    CHILDREN,
    JOBS,
    LEADER_WORKER_SETS,
    NEURON_MODELS,
    PODS,
    REPLICA_SETS,
    Forbidden,
    NotFound,
    Page,
    Resource,
)
from neuron_operator.cluster.holding import Holdings
from neuron_operator.cluster.reflector import (
    FIRST_LOOK_SECONDS,
    LOOK_SECONDS,
    SETTLE_SECONDS,
    Caches,
    Key,
    Models,
    Reflector,
    key_of_child,
    key_of_model,
    trimmed,
    version_of,
)
from neuron_operator.read.objects import name_of
from neuron_operator.read.world import Decision
from neuron_operator.run.pace import Pace
from neuron_operator.run.reconcile import Reconciler
from neuron_operator.run.upgrades import Turns

BY_KIND = {resource.kind: resource for resource in (*CHILDREN, LEADER_WORKER_SETS, REPLICA_SETS, PODS)}
CONFIG_MAPS = BY_KIND["ConfigMap"]


def config_map(name: str, model: str = "chat", value: int = 0) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "labels": {MODEL_LABEL: model}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"value": str(value)}}


def reflector_of(cluster: FakeCluster, woken: list[Key]) -> Reflector:
    return Reflector(
        cluster, CONFIG_MAPS, None, key_of=key_of_child, wake=lambda obj, _: woken.append(key_of_child(obj))
    )


Step = tuple[str, str, int]
steps = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "cut", "restore", "wait"]), st.sampled_from("abc"), st.integers(0, 3)),
    max_size=25,
)


@given(steps=steps, remembered=st.integers(1, 5))
def test_the_cache_matches_the_server_and_wakes_models_after_any_history(steps: list[Step], remembered: int) -> None:
    """With a server that keeps only the last few events: watches end with 410, and deletions are not reported."""

    async def main() -> None:
        cluster = FakeCluster(remembered)
        there: dict[str, dict[str, Any]] = {}
        woken: list[Key] = []
        reflector = reflector_of(cluster, woken)
        task = asyncio.create_task(reflector.run())
        before: dict[str, dict[str, Any]] = {}
        for kind, name, value in [*steps, ("restore", "", 0)]:
            match kind:
                case "put" if not cluster.is_down or name in there:
                    await change(cluster, there, name, value)
                case "delete" if name in there:
                    await quietly(cluster, cluster.delete(CONFIG_MAPS, there.pop(name)))
                case "cut" | "restore":
                    await cluster.cut(kind == "cut")
                case "wait":
                    await asyncio.sleep(300.0)
                    if not cluster.is_down:
                        changed = {n for n in before.keys() | there.keys() if before.get(n) != there.get(n)}
                        assert {("ns", f"model-{n}") for n in changed} <= set(woken)
                        before = dict(there)
                        woken.clear()
        await asyncio.sleep(300.0)
        assert {obj["metadata"]["name"]: obj["data"] for obj in reflector.objects()} == {
            name: obj["data"] for name, obj in there.items()
        }
        for name in "abc":
            assert [o["metadata"]["name"] for o in reflector.of_model(("ns", f"model-{name}"))] == [name] * (
                name in there
            )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


async def change(cluster: FakeCluster, there: dict[str, dict[str, Any]], name: str, value: int) -> None:
    wanted = config_map(name, f"model-{name}", value)
    if name in there:
        metadata = there[name]["metadata"]
        there[name] = await quietly(cluster, cluster.replace(CONFIG_MAPS, {**wanted, "metadata": metadata}))
    else:
        there[name] = await quietly(cluster, cluster.create(CONFIG_MAPS, wanted))


async def quietly(cluster: FakeCluster, write: Any) -> Any:
    """Another client writes, independent of the operator's network."""
    down, cluster.is_down = cluster.is_down, False
    try:
        return await write
    finally:
        cluster.is_down = down


def test_an_object_deleted_after_history_expired_leaves_the_cache_and_wakes_its_model() -> None:
    async def main() -> None:
        cluster = FakeCluster(remembered=1)
        woken: list[Key] = []
        reflector = reflector_of(cluster, woken)
        task = asyncio.create_task(reflector.run())
        created = [await cluster.create(CONFIG_MAPS, config_map(name, f"model-{name}")) for name in "abc"]
        await asyncio.sleep(100.0)
        assert len(list(reflector.objects())) == len(created)
        await cluster.cut(True)
        await asyncio.sleep(1.0)
        woken.clear()
        for obj in created[:2]:
            await quietly(cluster, cluster.delete(CONFIG_MAPS, obj))
        await cluster.cut(False)
        await asyncio.sleep(100.0)
        assert [obj["metadata"]["name"] for obj in reflector.objects()] == ["c"]
        assert list(reflector.of_model(("ns", "model-a"))) == []
        assert sorted(woken) == [("ns", "model-a"), ("ns", "model-b")]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


async def owned(cluster: FakeCluster, kind: str, name: str, *owners: str, **labels: str) -> str:
    """The UID of a new object of the model `chat`, with owners of these UIDs."""
    resource = BY_KIND[kind]
    metadata = {
        "namespace": "ns",
        "name": name,
        "labels": {MODEL_LABEL: "chat", **labels},
        "ownerReferences": [{"kind": "Owner", "name": "owner", "uid": uid} for uid in owners],
    }
    made = await cluster.create(resource, {"apiVersion": resource.api_version, "kind": kind, "metadata": metadata})
    return str(made["metadata"]["uid"])


def test_pods_of_an_earlier_model_of_the_same_name_are_not_pods_of_the_model() -> None:
    async def main() -> None:
        cluster, woken = FakeCluster(), list[Key]()
        caches = Caches(
            cluster, (None,), wake=lambda key, _: woken.append(key), children=(*CHILDREN, LEADER_WORKER_SETS)
        )
        task = asyncio.create_task(caches.run())
        await caches.wait_synced()
        earlier = await owned(cluster, "ReplicaSet", "chat-1", "a Deployment that is gone")
        await owned(cluster, "Pod", "of an earlier Deployment", earlier)
        await owned(cluster, "Pod", "of a ReplicaSet that is gone", "uid")
        await owned(cluster, "StatefulSet", "g-0", "an earlier model")
        await owned(cluster, "Pod", "of an earlier group", "g-0")
        following = await owned(cluster, "ReplicaSet", "chat-2", "0")
        circle = await owned(cluster, "ReplicaSet", "chat-3", str(int(following) + 1))
        assert int(circle) == int(following) + 1, "it owns itself"
        await owned(cluster, "Pod", "of owners in a circle", circle)
        await asyncio.sleep(1.0)
        assert caches.pods(("ns", "chat"), "me", caches.children(("ns", "chat"))) == ()
        deployment = await owned(cluster, "Deployment", "chat", "me")
        mine = await owned(cluster, "ReplicaSet", "chat-4", deployment)
        await owned(cluster, "Pod", "of its Deployment", mine)
        leader = await owned(cluster, "StatefulSet", "g-1", "me")
        await owned(cluster, "Pod", "of its group", leader)
        followers = await owned(cluster, "StatefulSet", "g-1-f", leader)
        await owned(cluster, "Pod", "of its followers", followers)
        await owned(cluster, "LeaderWorkerSet", "g-2", "me")
        await owned(cluster, "Pod", "of its LeaderWorkerSet", "unknown StatefulSet", **{GROUP_LABEL: "g-2"})
        await owned(cluster, "Pod", "of nobody")
        await asyncio.sleep(1.0)
        assert {
            pod["metadata"]["name"] for pod in caches.pods(("ns", "chat"), "me", caches.children(("ns", "chat")))
        } == {
            "of its Deployment",
            "of its group",
            "of its followers",
            "of its LeaderWorkerSet",
            "of nobody",
        }
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_a_shared_object_and_its_pods_wake_all_models_that_need_it_although_few_own_it() -> None:
    async def main() -> None:
        cluster, woken = FakeCluster(), list[Key]()
        caches = Caches(cluster, (None,), wake=lambda key, _: woken.append(key))
        task = asyncio.create_task(caches.run())
        await caches.wait_synced()
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "owner", "uid": "1"}
        about = {"namespace": "ns", "name": "shared", "labels": {}, "ownerReferences": [owner]}
        caches.use(("ns", "user"), frozenset({"shared", "another"}))
        caches.use(("elsewhere", "user"), frozenset({"shared"}))
        job = await cluster.create(JOBS, {"apiVersion": JOBS.api_version, "kind": "Job", "metadata": about})
        await asyncio.sleep(1.0)
        assert sorted(woken) == [("ns", "owner"), ("ns", "user")]
        woken.clear()
        of_job = {"kind": "Job", "name": "shared", "uid": job["metadata"]["uid"]}
        about = {"namespace": "ns", "name": "pod", "labels": {}, "ownerReferences": [of_job]}
        await cluster.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": about})
        await asyncio.sleep(1.0)
        assert sorted(woken) == [("ns", "owner"), ("ns", "user")]
        assert caches.used_by_others(("ns", "owner")) == {"shared", "another"}
        assert caches.used_by_others(("ns", "user")) == frozenset()
        caches.use(("ns", "user"), frozenset({"another"}))
        woken.clear()
        await cluster.delete(JOBS, job)
        await asyncio.sleep(1.0)
        assert sorted(woken) == [("ns", "owner")]
        assert caches.used_by_others(("ns", "owner")) == {"another"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_a_replica_set_wakes_its_model_when_it_comes_and_goes_not_when_its_controller_reports() -> None:
    async def main() -> None:
        cluster, woken = FakeCluster(), list[Key]()
        caches = Caches(cluster, (None,), wake=lambda key, _: woken.append(key))
        task = asyncio.create_task(caches.run())
        await caches.wait_synced()
        await asyncio.sleep(1.0)
        await owned(cluster, "ReplicaSet", "chat-1", "uid")
        await asyncio.sleep(1.0)
        assert woken == [("ns", "chat")]
        live = await cluster.get(REPLICA_SETS, "ns", "chat-1")
        live = await cluster.replace(REPLICA_SETS, {**live, "status": {"readyReplicas": 1}})
        await asyncio.sleep(1.0)
        assert woken == [("ns", "chat")]
        await cluster.delete(REPLICA_SETS, live)
        await asyncio.sleep(1.0)
        assert woken == [("ns", "chat")] * 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_an_idle_reflector_sends_only_its_watch() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        task = asyncio.create_task(reflector_of(cluster, []).run())
        await asyncio.sleep(3600.0)
        assert cluster.calls == ["list", "watch"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_a_written_object_is_cached_at_once_and_not_undone_by_an_older_event() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        seen: list[dict[str, Any] | None] = []
        reflector = Reflector(
            cluster, CONFIG_MAPS, None, key_of=key_of_child, wake=lambda obj, _: seen.append(reflector.find("ns", "a"))
        )
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        await asyncio.sleep(1.0)
        await cluster.cut(True)  # the watch lags
        await asyncio.sleep(0.1)
        created = await quietly(cluster, cluster.create(CONFIG_MAPS, config_map("a")))
        newer = await quietly(cluster, cluster.replace(CONFIG_MAPS, {**created, "data": {"value": "2"}}))
        reflector.observe_written(newer)
        assert reflector.find("ns", "a") == newer
        await cluster.cut(False)
        await asyncio.sleep(100.0)
        assert seen == [newer], "the watch delivers the write once more, and older events: neither wakes the model"
        await cluster.delete(CONFIG_MAPS, newer)
        await asyncio.sleep(1.0)
        reflector.observe_written(newer)  # a late response
        assert reflector.find("ns", "a") is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_an_object_that_was_written_again_stays_when_its_deletion_arrives_late() -> None:
    async def main() -> None:
        cluster, woken = FakeCluster(), list[Key]()
        reflector = reflector_of(cluster, woken)
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        first = await cluster.create(CONFIG_MAPS, config_map("a"))
        await asyncio.sleep(1.0)
        await cluster.cut(True)  # the watch lags
        await asyncio.sleep(0.1)
        await quietly(cluster, cluster.delete(CONFIG_MAPS, first))
        second = await quietly(cluster, cluster.create(CONFIG_MAPS, config_map("a")))
        reflector.observe_written(second)
        woken.clear()
        await cluster.cut(False)
        await asyncio.sleep(100.0)
        assert reflector.find("ns", "a") == second
        assert woken == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_a_refused_first_list_ends_the_start_and_a_later_one_is_retried() -> None:
    class Refusing(FakeCluster):
        refuses = True

        async def list(self, resource: Resource, namespace: str | None, **selectors: str) -> Page:
            if self.refuses:
                raise Forbidden("list configmaps: no", retriable=False, status=403)
            return await super().list(resource, namespace, **selectors)

    async def main() -> None:
        cluster = Refusing(remembered=1)
        with pytest.raises(Forbidden):
            await reflector_of(cluster, []).run()
        cluster.refuses = False
        reflector = reflector_of(cluster, [])
        task = asyncio.create_task(reflector.run())
        await reflector.synced.wait()
        cluster.refuses = True
        await cluster.cut(True)
        created = [await quietly(cluster, cluster.create(CONFIG_MAPS, config_map(name))) for name in "ab"]
        await cluster.cut(False)
        await asyncio.sleep(100.0)
        assert not task.done()
        cluster.refuses = False
        await asyncio.sleep(100.0)
        assert len(list(reflector.objects())) == len(created)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_only_the_managed_fields_of_the_operator_are_kept() -> None:
    ours = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:data": {}}}
    of_status = {**ours, "manager": STATUS_FIELD_MANAGER, "subresource": "status"}
    obj = config_map("a")
    others = [{"manager": "kubectl"}, {**ours, "subresource": "status"}, {**of_status, "subresource": "scale"}]
    obj["metadata"]["managedFields"] = [*others, ours, of_status]
    assert trimmed(obj)["metadata"]["managedFields"] == [ours, of_status]
    assert "managedFields" not in trimmed(config_map("a"))["metadata"]


def test_a_cached_object_takes_little_more_memory_than_its_json() -> None:
    """Decoded, one takes five to eight times as much."""

    async def main() -> None:
        cluster = FakeCluster()
        reflector = reflector_of(cluster, [])
        container = {"name": "c", "env": [{"name": f"V{n}", "value": f"v{n}"} for n in range(50)]}
        texts = [json.dumps({**config_map(f"m{n}"), "spec": {"containers": [container]}}) for n in range(100)]
        for version, text in enumerate(texts, 1):  # fill what is made once, then count
            obj = json.loads(text)
            obj["metadata"] |= {"uid": f"u{version}", "resourceVersion": str(version)}
            if version == 2:
                tracemalloc.start()
            reflector.observe_written(obj)
        del obj
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < 2 * sum(map(len, texts))

    virtual_time.run(main())


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "delete", "list"]), st.sampled_from("abc"), st.booleans()), max_size=25
    )
)
def test_the_models_match_the_server_whatever_kopf_misses(steps: list[tuple[str, str, bool]]) -> None:
    """Kopf delivers some events only, and now and then lists the models that exist."""

    async def main() -> None:
        cluster, woken = FakeCluster(), list[Key]()
        models = Models(cluster, None, wake=lambda obj, _: woken.append(key_of_model(obj)))
        there: dict[str, dict[str, Any]] = {}
        task = asyncio.create_task(models.run())
        for kind, name, is_delivered in [*steps, ("list", "", True)]:
            match kind:
                case "put":
                    there[name] = await put_model(cluster, there.get(name), name)
                    if is_delivered:
                        models.deliver("MODIFIED", there[name])
                case "delete" if name in there:
                    gone = there.pop(name)
                    await cluster.delete(NEURON_MODELS, gone)
                    if is_delivered:
                        models.deliver("DELETED", {**gone, "metadata": {**gone["metadata"], "resourceVersion": "999"}})
                case "list":
                    for one in there.values():
                        models.deliver(None, one)
                    await asyncio.sleep(SETTLE_SECONDS * 2 if is_delivered else 0.0)
        await asyncio.sleep(LOOK_SECONDS * 2)
        assert models.synced.is_set()
        assert {name_of(one): version_of(one) for one in models.objects()} == {
            name: version_of(one) for name, one in there.items()
        }
        assert {key_of_model(one) for one in there.values()} <= set(woken)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


async def put_model(cluster: FakeCluster, live: dict[str, Any] | None, name: str) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name} if live is None else live["metadata"]
    model = {"apiVersion": NEURON_MODELS.api_version, "kind": KIND, "metadata": metadata}
    return await (cluster.create if live is None else cluster.replace)(NEURON_MODELS, model)


def test_the_models_are_complete_once_kopf_has_delivered_all_that_exist() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        models = Models(cluster, None, wake=lambda obj, _: None)
        made = [await put_model(cluster, None, name) for name in "abc"]
        models.deliver(None, made[0])
        task = asyncio.create_task(models.run())
        await asyncio.sleep(1.0)
        models.deliver(None, made[1])
        assert not models.synced.is_set()
        await cluster.delete(NEURON_MODELS, made[2])  # before kopf lists it
        await asyncio.sleep(FIRST_LOOK_SECONDS + SETTLE_SECONDS)
        assert models.synced.is_set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


def test_names_are_listed_rarely_while_nothing_is_lost() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        models = Models(cluster, None, wake=lambda obj, _: None)
        live = await put_model(cluster, None, "a")
        task = asyncio.create_task(models.run())
        models.deliver(None, live)
        for _ in range(36):
            await asyncio.sleep(100.0)
            live = await put_model(cluster, live, "a")
            models.deliver("MODIFIED", live)
        assert cluster.calls.count("list") <= 3600 / LOOK_SECONDS + 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time.run(main())


class WithoutModels(FakeCluster):
    """Every model has been deleted."""

    async def apply_status(self, resource: Resource, live: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
        raise NotFound("neuronmodels not found", retriable=False, status=404)


def test_a_pass_forgets_a_model_whose_status_cannot_be_written_because_it_was_deleted() -> None:
    async def main() -> None:
        cluster, woken = WithoutModels(), list[Key]()
        caches = Caches(cluster, (None,), wake=lambda key, _: woken.append(key))
        reconciler = Reconciler(
            cluster,
            caches,
            SETTINGS,
            lambda world, _: Decision(status={"replicas": 1}),
            decide_adapter=lambda world, _: Decision(),
            post=lambda model, announcement: None,
            now=lambda: NOW,
            check_term=lambda: None,
            turns=Turns(lambda key: None),
            pace=Pace(lambda key: None),
            holdings=Holdings(cluster, caches, "ns/operator", check_term=lambda: None),
        )
        caches.deliver("ADDED", await put_model(cluster, None, "chat"))
        woken.clear()
        await reconciler.reconcile(("ns", "chat"))
        assert caches.model(("ns", "chat")) is None
        assert woken == [("ns", "chat")]

    virtual_time.run(main())
