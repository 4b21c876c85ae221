"""Weights are fetched once for all models of a namespace, by a Job, before a pod holds a device: counted in the API
server's audit log and in what a hub sent, through kills and faults. The claims are on storage that all nodes share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.faults import frozen, kill_containers, power_off
from cluster.rig.images import COMPILE_TARGET, build_image
from cluster.rig.rig import WAITING, Rig
from cluster.rig.shared_storage import STORAGE_CLASS, Volume, shared_volume, storage_full
from cluster.servers import MODEL_FILE, Hub, hub_in_pod, object_store_in_pod
from cluster.stories import (
    ANSWERS,
    ARTIFACTS_CLAIM,
    ASK,
    CLAIMS_OF_THE_CHART,
    COMPILE,
    FETCH,
    OURS,
    ROOT,
    TORCH,
    WEIGHTS_CLAIM,
    Images,
    Story,
    check_order,
    entries,
    install,
    load_images,
    model_of,
    uninstall,
    upgrade,
)
from helpers.failures import check_says
from helpers.s3_server import ACCESS_KEY, SECRET_KEY
from neuron_operator.api.names import ARTIFACT_VARIABLE, ARTIFACTS_DIR
from neuron_runtime.weights.store import MANIFEST
from neuron_runtime.weights.transfer import TransferLimits

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

HUB_NODE, OPERATOR_NODE, JOBS_NODE = "n1", "n2", "n3"
LARGE_BYTES = 384 * 2**20
"""Added to a model of 6 MB: three times what a killed download may read again."""
AGAIN_BYTES = TransferLimits().num_readers * TransferLimits().chunk_bytes
NEURON = {"accelerator": {"type": "Neuron", "devices": 1}}
SMALL = {"podTemplate": {"spec": {"resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}}}}
TOKEN, WRONG_TOKEN = "hf_Aright0000000000000000000000000000", "hf_Wrong0000000000000000000000000000"

QUESTION = "What is a NeuronModel?"
DEMO_MODEL = [path for path in (ROOT / "examples" / "demo-model").glob("*.*") if path.name != "train.py"]

UPLOAD = """
import sys, boto3
from pathlib import Path
endpoint, key, secret = sys.argv[1:]
keys = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "us-east-1"}
client = boto3.client("s3", endpoint_url=endpoint, **keys)
for path in Path("/models/demo").glob("*.*"):
    client.upload_file(str(path), "models", f"chat/{path.name}")
"""


@dataclass(frozen=True)
class Installation:
    rig: Rig
    images: Images
    hub: Hub


@pytest.fixture(scope="module")
def installation(rig: Rig) -> Iterator[Installation]:
    """The operator, told to keep weights on a claim per namespace, and a hub. The node of the Jobs has neither."""
    images = load_images(rig)
    models = {"demo/large": LARGE_BYTES, "demo/small": 0, "demo/gated": 0}
    gated = {"demo/gated": TOKEN}
    with contextlib.ExitStack() as undo:
        name = f"hub-{uuid.uuid4().hex[:8]}"
        hub = undo.enter_context(hub_in_pod(rig, name, images.runtime, node=HUB_NODE, models=models, gated=gated))
        values = {
            "nodeSelector": {"kubernetes.io/hostname": OPERATOR_NODE},
            "jobs": {
                "env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}],
                "resources": {"requests": {"cpu": "100m"}},  # so that two compilers fit on their node
            },
            "storage": {**CLAIMS_OF_THE_CHART, "imageVolumes": True},
        }
        undo.callback(uninstall, rig)
        install(rig, images, values=values)
        yield Installation(rig, images, hub)


@pytest.fixture
def story(installation: Installation, namespace: str) -> Iterator[Story]:
    story = Story(installation.rig, namespace)
    yield story
    print(json.dumps({name: round(seconds, 1) for name, seconds in story.seconds.items()}))


def test_five_models_of_one_checkpoint_and_two_keys_are_fetched_once_and_compiled_twice(
    installation: Installation, story: Story
) -> None:
    hub, lengths = installation.hub, {f"chat-{number}": 256 + 256 * (number % 2) for number in range(5)}
    models = [_compiled(name, length, compileSeconds=1, **NEURON) for name, length in lengths.items()]
    sent, audit = hub.sent_bytes(), len(story.rig.audit_events())
    with (
        shared_volume(story.rig, story.namespace, WEIGHTS_CLAIM) as weights,
        shared_volume(story.rig, story.namespace, ARTIFACTS_CLAIM) as artifacts,
        story.watching("pods") as pods,
        story.watching("nm") as statuses,
    ):
        with story.stage("cold: five ready"):
            story.apply_all(models)
            for name in lengths:
                story.until_ready(1, name)
        jobs = story.created_jobs(audit)
        assert sorted(job.partition("-")[0] for job in jobs) == ["artifact", "artifact", "facts", "weights"], jobs
        once = _weights_bytes(weights)
        assert once <= hub.sent_bytes() - sent <= once * 1.05, "the headers are read twice"
        assert entries(weights) == [hub.commit("demo/small")]
        assert len(entries(artifacts)) == 2
        check_order(pods(), statuses())
        _check_nothing_is_downloaded(story)
        audit, sent, kept = len(story.rig.audit_events()), hub.sent_bytes(), _contents(artifacts)
        with story.stage("a second replica fetches and compiles nothing"):
            story.kubectl("scale", "nm", "chat-0", "--replicas=2")
            story.until_ready(2, "chat-0")
            assert story.created_jobs(audit) == []
        with story.stage("another length: the old pod serves until its artifact is there"):
            (before,) = story.ready_pods("chat-1")
            story.apply(_compiled("chat-1", 768, compileSeconds=3, **NEURON))
            story.until_reason("chat-1", "Compiling", "UpToDate")
            assert [pod["metadata"]["uid"] for pod in story.ready_pods("chat-1")] == [before["metadata"]["uid"]]
            story.until("up to date", lambda: story.condition("chat-1", "UpToDate")["status"] == "True")
            story.until_ready(1, "chat-1")
            assert len(entries(artifacts)) == 3
        story.kubectl("delete", "nm", "--all")
        story.until("all objects are gone", lambda: not story.items("jobs,configmaps,pods", OURS))
        with story.stage("warm: five ready"):
            story.apply_all(models)
            for name in lengths:
                story.until_ready(1, name)
        assert hub.sent_bytes() - sent <= once * 0.05, "the headers, to resolve the model"
        assert kept.items() <= _contents(artifacts).items()
        assert len(entries(artifacts)) == 3
        story.kubectl("delete", "nm", "--all")


def test_what_is_killed_is_continued(installation: Installation, story: Story) -> None:
    """The fetch, the compilers and the operator, each in the middle."""
    hub, lengths = installation.hub, {"chat-0": 256, "chat-1": 512}
    sent, audit = hub.sent_bytes(), len(story.rig.audit_events())
    hub.order(bytes_per_second=3e6)
    with story.watching("pods") as pods, story.watching("nm") as statuses:
        with story.stage("claim: not bound"):
            large = {"uri": "hf://demo/large"}
            story.apply_all(
                [_compiled(name, length, compileSeconds=10, **NEURON, **large) for name, length in lengths.items()]
            )
            for name in lengths:
                check_says("claim-not-bound", story.until_reason(name, "VolumeNotBound", "WeightsReady"))
        with (
            shared_volume(story.rig, story.namespace, ARTIFACTS_CLAIM) as artifacts,
            shared_volume(story.rig, story.namespace, WEIGHTS_CLAIM) as weights,
        ):
            for name in lengths:
                story.until_gone(name, "VolumeNotBound", "WeightsReady")
            with story.stage("fetch: killed after two thirds"):
                _check_progress(story, list(lengths))
                story.until("two thirds", lambda: hub.sent_bytes() - sent > LARGE_BYTES * 2 / 3)
                kill_containers(story.rig, story.namespace, FETCH)
                story.kill_operator()
                hub.order(bytes_per_second=0)
            with story.stage("compile: killed in the middle"):
                story.until("two compilers", lambda: len(_running(story, COMPILE)) == 2)
                kill_containers(story.rig, story.namespace, COMPILE)
                story.kill_operator()
            with story.stage("two ready"):
                for name in lengths:
                    story.until_ready(1, name)
            jobs = set(story.created_jobs(audit))  # a killed pod's Job is created again, under its name
            assert sorted(job.partition("-")[0] for job in jobs) == ["artifact", "artifact", "facts", "weights"], jobs
            assert hub.sent_bytes() - sent <= LARGE_BYTES * 1.02 + AGAIN_BYTES
            assert entries(weights) == [hub.commit("demo/large")]
            assert len(entries(artifacts)) == 2
            check_order(pods(), statuses())
            with story.stage("clean-up: what no model needs any more"):
                _check_clean_up(story, weights, kept=hub.commit("demo/large"))
            story.kubectl("delete", "nm", "--all")


def test_an_edit_before_a_model_is_compiled_makes_no_pod_of_what_it_replaces(
    installation: Installation, story: Story
) -> None:
    """Edited while its weights are fetched and while it is compiled, refreshed, refused, and held at what never
    served."""
    hub = installation.hub
    with (
        shared_volume(story.rig, story.namespace, WEIGHTS_CLAIM),
        shared_volume(story.rig, story.namespace, ARTIFACTS_CLAIM),
        story.watching("pods") as pods,
        story.watching("nm") as statuses,
    ):
        hub.order(bytes_per_second=1e6)
        with story.stage("edited while its weights are fetched"):
            story.apply(_compiled("fetching", 256, compileSeconds=1, **NEURON))
            story.until_reason("fetching", "Fetching", "WeightsReady")
            story.apply(_compiled("fetching", 512, compileSeconds=1, **NEURON))
        hub.order(bytes_per_second=0)
        with story.stage("edited, refreshed, refused and held while it is compiled"):
            story.apply(_compiled("edited", 256, compileSeconds=20, **NEURON))
            story.until_reason("edited", "Compiling", "Compiled")
            first = story.kubectl("get", "nm", "edited", "-o", "jsonpath={.status.updateRevision}")
            story.apply(_compiled("edited", 768, compileSeconds=3, **NEURON))
            story.kubectl("annotate", "nm", "edited", "neuron-serving.dev/refresh=1")
            story.apply(_compiled("edited", 768, compileSeconds=3, accelerator={"type": "Neuron", "devices": 7}))
            story.until_reason("edited", "TopologyImpossible")
            story.apply(_compiled("edited", 768, compileSeconds=3, **NEURON))
            story.kubectl("annotate", "nm", "edited", f"neuron-serving.dev/rollback-to={first}")
            assert "none has served yet" in story.until_reason("edited", "InvalidSpec")["message"]
            story.kubectl("annotate", "nm", "edited", "neuron-serving.dev/rollback-to-")
        with story.stage("both ready"):
            for name in ("fetching", "edited"):
                story.until_ready(1, name)
        check_order(pods(), statuses())
        story.kubectl("delete", "nm", "--all")


def test_a_fault_of_a_fetch_has_a_reason_that_vanishes_with_it(installation: Installation, story: Story) -> None:
    hub, rig = installation.hub, story.rig
    with shared_volume(rig, story.namespace, WEIGHTS_CLAIM) as volume:
        with story.stage("secret: wrong"):
            story.apply(_token(WRONG_TOKEN))
            gated = {"model": {"credentialsSecretRef": {"name": "hub-token"}}, "replicas": 0}
            story.apply(model_of("gated", "hf://demo/gated", **gated))
            story.until_reason("gated", "WeightsUnauthorized")
        with story.stage("secret: right"):
            story.apply(_token(TOKEN))
            story.until_gone("gated", "WeightsUnauthorized")
            story.until_reason("gated", "ScaledToZero")
        _remove_models(story, volume)
        with story.stage("disk: full"), storage_full(rig, 2**20):
            story.apply(model_of("small", "hf://demo/small", replicas=0))
            check_says("disk-full", story.until_reason("small", "StorageFull", "WeightsReady"))
        with story.stage("disk: emptied"):
            story.until_gone("small", "StorageFull", "WeightsReady")
            story.until_reason("small", "ScaledToZero")
        _remove_models(story, volume)
        with story.stage("checkpoint: corrupt"):
            hub.order(flipped=f"{MODEL_FILE}:4000000")
            story.apply(model_of("corrupt", "hf://demo/small", replicas=0))
            check_says("changed-weights", story.until_reason("corrupt", "ChecksumMismatch", "WeightsReady"))
            assert entries(volume) == []
        with story.stage("checkpoint: mended"):
            hub.order(flipped="")
            story.until_gone("corrupt", "ChecksumMismatch", "WeightsReady")
            story.until_reason("corrupt", "ScaledToZero")
            assert entries(volume) == [hub.commit("demo/small")]


def test_two_formats_of_one_model_have_one_download_and_one_conversion(
    installation: Installation, story: Story
) -> None:
    hub, formats = installation.hub, {"plain": {}, "int8": {"quantization": "Int8"}}
    sent, audit = hub.sent_bytes(), len(story.rig.audit_events())
    with shared_volume(story.rig, story.namespace, WEIGHTS_CLAIM) as volume:
        with story.stage("both ready"):
            for name, chosen in formats.items():
                serving = {"maxModelLength": 256, **chosen}
                story.apply(model_of(name, "hf://demo/small", engine=TORCH, serving=serving))
            for name in formats:
                story.until_ready(1, name)
        jobs = story.created_jobs(audit)
        assert sorted(job.partition("-")[0] for job in jobs) == ["converted", "facts", "facts", "weights"], jobs
        made = story.rig.get("nm", "int8", "-n", story.namespace)["status"]["conversion"]
        assert 0 < float(made["layerError"]) < 0.02
        assert sorted(entries(volume)) == sorted((hub.commit("demo/small"), made["digest"]))
        assert hub.sent_bytes() - sent <= 8 * 2**20, "the model has 6 MB"
        for name in formats:
            url = f"http://{name}.{story.namespace}.svc.cluster.local:8000"
            assert story.run_client(installation.images.runtime, "asks", ASK, url, name, QUESTION) == ANSWERS[QUESTION]
        story.kubectl("delete", "nm", "--all")


def test_a_fetch_goes_on_after_its_node_lost_power(installation: Installation, story: Story) -> None:
    hub, rig = installation.hub, story.rig
    with shared_volume(rig, story.namespace, WEIGHTS_CLAIM) as volume:
        sent = hub.sent_bytes()
        hub.order(bytes_per_second=3e6)
        with story.stage("fetch: one third"):
            story.apply(model_of("chat", "hf://demo/large", replicas=0))
            story.until("one third", lambda: hub.sent_bytes() - sent > LARGE_BYTES / 3)
            (lost,) = story.items("pods", FETCH)
        with story.stage("node: off, and another pod beside the lost one"), power_off(rig, JOBS_NODE):
            story.until("another pod", lambda: {_name(pod) for pod in story.items("pods", FETCH)} - {_name(lost)})
        hub.order(bytes_per_second=0)
        with story.stage("node: on, all fetched"):
            story.until_reason("chat", "ScaledToZero")
        assert hub.sent_bytes() - sent <= LARGE_BYTES * 1.02 + AGAIN_BYTES
        assert entries(volume) == [hub.commit("demo/large")]


def test_models_come_from_an_object_store_a_claim_and_an_image(installation: Installation, story: Story) -> None:
    rig, claim = story.rig, "models"
    story.apply(_claim(claim))
    with (
        shared_volume(rig, story.namespace, WEIGHTS_CLAIM),
        shared_volume(rig, story.namespace, claim) as volume,
        object_store_in_pod(rig, f"s3-{uuid.uuid4().hex[:8]}", node=HUB_NODE, buckets=["models"]) as store,
    ):
        (volume.folder / "chat").mkdir()
        for file in DEMO_MODEL:
            shutil.copy(file, volume.folder / "chat")
        story.run_client(installation.images.runtime, "upload", UPLOAD, store.endpoint, ACCESS_KEY, SECRET_KEY)
        with story.stage("secret: wrong"):
            story.apply(store.secret("keys", secret_key="wrong"))
            keys = {"credentialsSecretRef": {"name": "keys"}}
            story.apply(model_of("stored", "s3://models/chat", engine=TORCH, model=keys))
            story.apply(model_of("claimed", f"pvc://{claim}/chat", engine=TORCH))
            uri = f"oci://{installation.images.runtime}#/models/demo"
            story.apply(model_of("mounted", uri, engine=TORCH))
            story.until_reason("stored", "WeightsUnauthorized")
        with story.stage("secret: right"):
            story.apply(store.secret("keys"))
            for name in ("stored", "claimed", "mounted"):
                story.until_ready(1, name)
        for name in ("stored", "claimed", "mounted"):
            url = f"http://{name}.{story.namespace}.svc.cluster.local:8000"
            assert story.run_client(installation.images.runtime, "asks", ASK, url, name, QUESTION) == ANSWERS[QUESTION]


def test_an_object_store_keeps_weights_for_all_pods(installation: Installation, story: Story) -> None:
    """The chart says a claim, the manifest an object store. It is unreachable at first."""
    hub, rig = installation.hub, story.rig
    kept = {
        "engine": TORCH,
        "model": {"credentialsSecretRef": {"name": "keys"}},
        "storage": {"weights": {"objectStore": {"uri": "s3://weights/kept"}}},
    }
    with object_store_in_pod(rig, f"s3-{uuid.uuid4().hex[:8]}", node=HUB_NODE, buckets=["weights"]) as store:
        story.apply(store.secret("keys"))
        with story.stage("store: unreachable"), frozen(rig, store.pod(), "posix"):
            story.apply(model_of("chat", "hf://demo/small", **kept))
            story.until_reason("chat", "Fetching", "WeightsReady")
            story.until("its address is named", lambda: store.endpoint in story.condition("chat", "Ready")["message"])
        sent = hub.sent_bytes()
        with story.stage("store: back"):
            story.until_gone("chat", "Fetching", "WeightsReady")
            story.until_ready(1)
        with story.stage("store: a second model finds it"):
            story.apply(model_of("again", "hf://demo/small", **kept))
            story.until_ready(1, "again")
            assert hub.sent_bytes() - sent <= 2**23
            assert len([*store.folder.rglob(MODEL_FILE)]) == 1
        with story.stage("store: the fetch is killed after two thirds, and a new one ends"):
            sent = hub.sent_bytes()
            hub.order(bytes_per_second=3e6)
            story.apply(model_of("large", "hf://demo/large", replicas=0, **kept))
            story.until("two thirds", lambda: hub.sent_bytes() - sent > LARGE_BYTES * 2 / 3)
            kill_containers(rig, story.namespace, FETCH)
            hub.order(bytes_per_second=0)
            story.until_reason("large", "ScaledToZero")
            assert len([*store.folder.rglob(MANIFEST)]) == 2
        story.kubectl("delete", "nm", "--all")


def test_a_fault_of_a_compiler_has_a_reason_that_vanishes_with_it(installation: Installation, story: Story) -> None:
    with (
        shared_volume(story.rig, story.namespace, WEIGHTS_CLAIM),
        shared_volume(story.rig, story.namespace, ARTIFACTS_CLAIM) as volume,
    ):
        with story.stage("memory: killed by the kernel, then twice as much"):
            audit = len(story.rig.audit_events())
            story.apply(_compiled("larger", 256, compileSeconds=1, compileBytes=500 * 2**20))
            story.until_ready(1, "larger")
            assert len([job for job in story.created_jobs(audit) if job.startswith("artifact-")]) > 1
        with story.stage("memory: not even four times as much"):
            story.apply(_compiled("huge", 512, compileSeconds=1, compileBytes=2**31))
            check_says("compiler-memory", story.until_reason("huge", "CompileOutOfMemory", "Compiled"))
        with story.stage("memory: more of it"):
            model = _compiled("huge", 512, compileSeconds=1, compileBytes=2**31)
            model["spec"]["jobs"] = {"resources": {"limits": {"memory": "3Gi"}, "requests": {"memory": "1Gi"}}}
            story.apply(model)
            story.until_ready(1, "huge")
        with story.stage("artifact: corrupt, and compiled again"):
            entry = volume.folder / story.artifact("larger")
            graph = next(
                path for path in sorted(entry.glob("*.json")) if path.name[0] != "." and path.stem != "artifact"
            )
            intact, audit = graph.read_bytes(), len(story.rig.audit_events())
            graph.write_bytes(intact[:-1] + b"x")
            with story.watching("nm") as statuses:
                for pod in story.serving_pods("larger"):
                    story.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
                story.until("a Job", lambda: [job for job in story.created_jobs(audit) if job.startswith("artifact-")])
                story.until("compiled again", lambda: graph.is_file() and graph.read_bytes() == intact)
                story.until_ready(1, "larger")
                shown = [c for event in statuses() for c in event.object.get("status", {}).get("conditions", ())]
            message = next(c["message"] for c in shown if c["reason"] == "ArtifactMissing")
            assert graph.name in message, message
            print(f"    {message}")


def test_a_model_is_compiled_with_gpp_in_a_job_and_served_without_a_compiler(
    installation: Installation, story: Story
) -> None:
    rig, images = story.rig, installation.images
    compiler = build_image(COMPILE_TARGET)
    rig.load_image(compiler.archive, [JOBS_NODE])
    upgrade(rig, "--set", f"image.compile={compiler.name}")
    with (
        shared_volume(rig, story.namespace, WEIGHTS_CLAIM),
        shared_volume(rig, story.namespace, ARTIFACTS_CLAIM) as volume,
    ):
        with story.stage("compile with g++"):
            story.apply(model_of("chat", "hf://demo/small", engine={**TORCH, "compile": "Enabled"}))
            story.until_reason("chat", "Compiling", "Compiled")
            story.until("the Job's pod", lambda: story.items("pods", COMPILE))
            story.until("compiled", lambda: story.condition("chat", "Compiled")["status"] == "True")
            print(f"    {story.condition('chat', 'Compiled')['message']}")
        with story.stage("serve without a compiler"):
            story.until_ready(1)
        (key,) = entries(volume)
        assert sorted(path.name for path in (volume.folder / key).glob("*.so")) == [
            "decode-one.so",
            "decode-several.so",
        ]
        (job,) = story.items("jobs", COMPILE)
        (pod,) = story.ready_pods()
        run_in = [owner["spec"]["containers"][0]["image"] for owner in (job["spec"]["template"], pod)]
        assert run_in == [compiler.name, images.runtime]
        in_pod = ("exec", _name(pod), "--")
        assert story.kubectl(*in_pod, "sh", "-c", "command -v g++ gcc cc c++ ld as || echo none").strip() == "none"
        mapped = story.kubectl(*in_pod, "sh", "-c", "cat /proc/[0-9]*/maps")
        assert f"{key}/decode-one.so" in mapped, "the engine has loaded it"
        url = f"http://chat.{story.namespace}.svc.cluster.local:8000"
        for question in list(ANSWERS)[:3]:
            assert story.run_client(images.runtime, "asks", ASK, url, "chat", question) == ANSWERS[question]
    upgrade(rig, "--set", "image.compile=")


def test_a_namespace_has_no_way_to_what_another_fetched(installation: Installation, story: Story) -> None:
    """Tried with another namespace's user, claims, volumes and URIs."""
    hub, rig = installation.hub, story.rig
    theirs = Story(rig, f"test-{uuid.uuid4().hex[:8]}")
    rig.create_namespace(theirs.namespace)
    rig.kubectl("-n", theirs.namespace, "create", "rolebinding", "mallory", "--clusterrole=edit", "--user=mallory")
    as_mallory = ("--as=mallory", "--as-group=system:authenticated")
    digest = hub.commit("demo/small")
    with (
        shared_volume(rig, story.namespace, WEIGHTS_CLAIM) as volume,
        shared_volume(rig, theirs.namespace, WEIGHTS_CLAIM) as other,
    ):
        story.apply(model_of("chat", "hf://demo/small", replicas=0))
        story.until_reason("chat", "ScaledToZero")
        before = _contents(volume)
        assert len(before) > 3
        story.apply(_token(TOKEN))
        (kept,) = [_name(found) for found in story.items("configmaps", FETCH)]
        for command in (
            *("get nm", "get configmaps", "get jobs", "get pvc", "get secrets", "get pods", "get events"),
            *(f"get configmap {kept}", f"get job {kept}", "get secret hub-token", f"get pvc {WEIGHTS_CLAIM}"),
            *(f"delete configmap {kept}", "delete nm chat", f"delete job {kept}", f"delete pvc {WEIGHTS_CLAIM}"),
            *(f"create configmap {kept}", f"annotate configmap {kept} a=b", f"label pvc {WEIGHTS_CLAIM} a=b"),
        ):
            with pytest.raises(CommandFailed, match="forbidden"):
                story.kubectl(*command.split(), *as_mallory)
        theirs.kubectl("get", "nm", *as_mallory)

        # What only the other namespace has is not found under its name.
        elsewhere = {"persistentVolumeClaim": {"claimName": "only-theirs"}}
        story.apply(_claim("only-theirs"))
        for name, uri, spec in (
            ("claim", "hf://demo/small", {"storage": {"weights": elsewhere}}),
            ("source", "pvc://only-theirs/x", {}),
            ("token", "hf://demo/gated", {"model": {"credentialsSecretRef": {"name": "hub-token"}}}),
        ):
            model = json.dumps(model_of(name, uri, replicas=0, **spec))
            theirs.kubectl("apply", *as_mallory, "-f", "-", stdin=model)
        for name in ("claim", "source"):
            message = theirs.until_reason(name, "VolumeNotBound")["message"]
            assert 'persistentvolumeclaim "only-theirs" not found' in message, message
        theirs.until_reason("token", "WeightsUnauthorized")
        # A record under the name of theirs, made up in one's own namespace, stays there.
        theirs.kubectl("create", "configmap", kept, "--from-literal=record.json={}", *as_mallory)
        theirs.kubectl("delete", "configmap", kept, *as_mallory)

        for uri in ("pvc://../x", f"pvc://{WEIGHTS_CLAIM}/../{digest}", "file:///models/../etc", "hf://demo/..%2f"):
            with pytest.raises(CommandFailed, match="Invalid value"):
                theirs.kubectl("apply", *as_mallory, "-f", "-", stdin=json.dumps(model_of("hostile", uri)))
        stolen = json.dumps(_claim("stolen", volumeName=volume.name))
        theirs.kubectl("apply", *as_mallory, "-f", "-", stdin=stolen)
        # The same model is fetched anew, by a pod that follows neither a link in its claim nor a name of the hub.
        hub.order(listed="../../../escaped.json")
        precious = other.folder / "precious"
        precious.mkdir()
        precious.chmod(0o777)
        (other.folder / ".partial").symlink_to("precious")
        theirs.apply(model_of("own", "hf://demo/small", replicas=0))
        message = theirs.until_reason("own", "Fetching", "WeightsReady")["message"]
        message = theirs.until(
            "the link is named",
            lambda: re.search(".*symbolic link.*", theirs.condition("own", "WeightsReady")["message"]),
        )[0]
        print(f"    {message}")
        assert list(precious.iterdir()) == []
        (other.folder / ".partial").unlink()
        theirs.until_reason("own", "ScaledToZero")
        assert (other.folder / digest / MODEL_FILE).is_file()
        assert not [path for path in rig.folders.shared.rglob("*") if "escaped" in path.name]
        assert not [path for _, path, _, _ in hub.order(listed="")["asked"] if "escaped" in path]
        hostile = other.folder / "hostile"
        hostile.symlink_to(volume.folder / digest)
        (other.folder / "upwards").symlink_to(f"../../{story.namespace}/{WEIGHTS_CLAIM}/{digest}")
        for name, uri in {
            "absolute": f"pvc://{WEIGHTS_CLAIM}/hostile",
            "relative": f"pvc://{WEIGHTS_CLAIM}/upwards",
        }.items():
            theirs.apply(model_of(name, uri, replicas=0))
            theirs.until_reason(name, "InvalidModel")
        theirs.apply(model_of("waits", "pvc://stolen/", replicas=0))
        theirs.until_reason("waits", "VolumeNotBound")
        assert theirs.kubectl("get", "pvc", "stolen", "-o", "jsonpath={.status.phase}") == "Pending"

        assert _contents(volume) == before
    rig.kubectl("delete", "namespace", theirs.namespace, "--wait=false")


def test_a_namespace_has_no_way_to_what_another_compiled(installation: Installation, story: Story) -> None:
    """The key of an artifact is no secret: who knows it compiles anew, and loads nothing that a link leads to."""
    rig = story.rig
    theirs = Story(rig, f"test-{uuid.uuid4().hex[:8]}")
    rig.create_namespace(theirs.namespace)
    with (
        shared_volume(rig, story.namespace, WEIGHTS_CLAIM),
        shared_volume(rig, story.namespace, ARTIFACTS_CLAIM) as volume,
        shared_volume(rig, theirs.namespace, WEIGHTS_CLAIM),
        shared_volume(rig, theirs.namespace, ARTIFACTS_CLAIM) as other,
    ):
        story.apply(_compiled("chat", 256, compileSeconds=1))
        story.until_ready(1)
        key, before = story.artifact("chat"), _contents(volume)
        assert any(key in path for path in before)
        (compiled,) = story.items("jobs", COMPILE)

        # A link to theirs, under the name of what is to be compiled.
        (other.folder / key).symlink_to(volume.folder / key)
        theirs.apply(_compiled("chat", 256, compileSeconds=1))
        theirs.until_ready(1)
        assert theirs.artifact("chat") == key
        assert [_name(job) for job in theirs.items("jobs", COMPILE)] == [_name(compiled)], "it compiled for itself"
        assert not (other.folder / key).is_symlink()
        assert (other.folder / key).is_dir()

        # A folder of the manifest's own, which leads out of the claim.
        (other.folder / "upwards").symlink_to(f"../../{story.namespace}/{ARTIFACTS_CLAIM}/{key}")
        for name, folder in (("absolute", str(volume.folder / key)), ("upwards", f"{ARTIFACTS_DIR}/upwards")):
            model = _compiled(name, 256, compileSeconds=1)
            model["spec"]["engine"]["env"] = [{"name": ARTIFACT_VARIABLE, "value": folder}]
            theirs.apply(model)
            message = theirs.until_reason(name, "ArtifactMissing")["message"]
            print(f"    {name}: {message}")
        assert _contents(volume) == before
        theirs.kubectl("delete", "nm", "--all")
    rig.kubectl("delete", "namespace", theirs.namespace, "--wait=false")


def _name(pod: Any) -> str:
    return str(pod["metadata"]["name"])


def _claim(name: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": STORAGE_CLASS,
            "resources": {"requests": {"storage": "1Gi"}},
            **spec,
        },
    }


def _container(workload: Any) -> Any:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def _contents(volume: Volume) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each file."""
    files = (path for path in volume.folder.rglob("*") if path.is_file() and ".locks" not in path.parts)
    return {str(path): (path.stat().st_ino, path.stat().st_ctime_ns) for path in files}


def _remove_models(story: Story, volume: Volume) -> None:
    """Also what they fetched, so that the next model has to fetch again."""
    story.kubectl("delete", "nm", "--all")
    story.until("the Jobs and records are gone", lambda: not story.items("jobs,configmaps", OURS))
    for path in volume.folder.iterdir():
        shutil.rmtree(path)


def _token(token: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "stringData": {"HF_TOKEN": token}}


def _compiled(
    name: str, length: int, *, accelerator: Any = None, uri: str = "hf://demo/small", **options: object
) -> dict[str, Any]:
    """A model that a simulated compiler compiles."""
    engine = {"backend": "simulated", "compile": "Enabled", "overrideNeuronConfig": options}
    more = {"accelerator": accelerator} if accelerator else {}
    return model_of(name, uri, engine=engine, serving={"maxModelLength": length}, **more, **SMALL)


def _weights_bytes(volume: Volume) -> int:
    return sum(path.stat().st_size for path in volume.folder.rglob("*.safetensors"))


def _running(story: Story, selector: str) -> list[Any]:
    return [pod for pod in story.items("pods", selector) if pod["status"]["phase"] == "Running"]


def _check_progress(story: Story, models: list[str]) -> None:
    """Every model shows how far the Job is that they share."""
    for name in models:
        shown = story.until(
            "progress",
            lambda n=name: re.search(r": .* of \S+ MiB \(\d+%\)", story.condition(n, "WeightsReady")["message"]),
        )
        print(f"    {name}{shown[0]}")


def _check_clean_up(story: Story, volume: Volume, kept: str) -> None:
    """The CronJob deletes what was not used for long, except what a model needs, although replicas leave no trace."""
    unused = volume.folder / ("f" * 40)
    unused.mkdir()
    unused.chmod(0o777)  # it is root's, the Job is not
    for entry in (unused, volume.folder / kept):
        os.utime(entry, (0, 0))
    cron_jobs = {
        _container(job["spec"]["jobTemplate"])["command"][1]: _name(job) for job in story.items("cronjobs", OURS)
    }
    assert cron_jobs.keys() == {"weights", "artifacts"}
    story.kubectl("create", "job", "now", f"--from=cronjob/{cron_jobs['weights']}")
    story.kubectl("wait", "--for=condition=Complete", "job/now", WAITING)
    print(story.kubectl("logs", "job/now"))
    assert entries(volume) == [kept]
    assert (volume.folder / kept).stat().st_mtime > 0, "it is marked as used"


def _check_nothing_is_downloaded(story: Story) -> None:
    """Serving pods read the claim and have nothing that a download needs."""
    for pod in story.items("pods", "neuron-serving.dev/role=leader"):
        (container,) = pod["spec"]["containers"]
        names = {variable["name"] for variable in container["env"]}
        assert not names & {"HF_TOKEN", "HF_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
        claims = {v["name"]: v["persistentVolumeClaim"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v}
        assert {claim["claimName"] for claim in claims.values()} == {WEIGHTS_CLAIM, ARTIFACTS_CLAIM}
        assert [m["readOnly"] for m in container["volumeMounts"] if m["name"] in claims] == [True, True]
