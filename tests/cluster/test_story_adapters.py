"""Adapters on the real cluster: they come, go and change under traffic, without a restart, and each answers with its
own weights, as the peft library computes them. What cannot be served says why. A hub, an S3 server and claims have
them."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tarfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.rig.commands import CommandFailed
from cluster.rig.faults import kill_processes
from cluster.rig.rig import WAITING, Rig
from cluster.rig.shared_storage import STORAGE_CLASS, Volume, shared_volume
from cluster.servers import Hub, hub_in_pod, object_store_in_pod
from cluster.stories import (
    CLAIMS_OF_THE_CHART,
    ROOT,
    TORCH,
    WEIGHTS_CLAIM,
    Story,
    install,
    load_images,
    model_of,
    uninstall,
)
from helpers.adapters import write_adapter
from helpers.torch_models import reference, reference_logits, use_adapter, with_adapters
from neuron_operator.api import names
from neuron_operator.cluster.client import NEURON_ADAPTERS
from neuron_runtime.adapters.peft import WEIGHTS_FILE
from neuron_runtime.checkpoint import read_config
from neuron_runtime.text.tokenizer import load_tokenizer

# Long, because a kubelet takes a minute to bring a changed list to a pod.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

HUB_NODE = "n3"
DEMO_MODEL = ROOT / "examples" / "demo-model"
MODEL_FILES = [path for path in DEMO_MODEL.glob("*.*") if path.name != "train.py"]
TARGETS = ("q_proj", "down_proj")
SMALL: Any = {"layers": (1,), "dtype": np.float16, "targets": TARGETS, "scale": 0.5}
SERVING = {"maxModelLength": 256, "dtype": "float32", "maxSequences": 128}
PROMPTS = ("What is a pod?", "kubectl")
NUM_TOKENS = 24
NUM_STREAMS = 200
NAMES = ("de", "fr", "it", "es", "pt", "nl", "sql", "code")
"""More than may be active, and more than are kept in memory."""
NO_JOB_SECONDS, JOB_SECONDS = 20, 60
"""What a busy machine may take until a reason is there, without a Job and with one."""
CLAIM = "models"

COMPLETE = """
import concurrent.futures, json, sys, urllib.error, urllib.request
asked = json.loads(sys.argv[1])
def completion(one):
    model, prompt = one
    body = {"model": model, "prompt": prompt, "max_tokens": int(sys.argv[2]), "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=300))
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"
    return answer["choices"][0]["text"] if answer["model"] == model else f"the answer of {answer['model']}"
alone = [completion(one) for one in asked]
with concurrent.futures.ThreadPoolExecutor(len(asked)) as clients:
    together = list(clients.map(completion, asked))
print(json.dumps([alone, together]))
"""
"""Asks the replica that it runs in, first for one answer after the other, then for all at once."""

Answers = dict[str, list[str]]
"""Of each model, those to the prompts."""


@dataclass(frozen=True)
class Told:
    story: Story
    hub: Hub
    client: str
    """The image of clients."""
    folder: Path
    """Has a folder of each adapter."""
    weights: Volume
    """What Jobs have fetched."""

    def add(self, *adapters: str) -> None:
        """Adds adapters of the hub to `chat`, or finds them there, and waits until they are ready."""
        self.story.apply_all([adapter(name) for name in adapters])
        self.wait_ready(*adapters)

    def wait_ready(self, *adapters: str) -> None:
        self.story.kubectl("wait", "--for=condition=Ready", *(f"na/{name}" for name in adapters), WAITING)

    def publish(self, folder: str, name: str) -> None:
        """Puts the adapter of a folder into the hub, in place of the one that has this name there."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path in sorted((self.folder / folder).iterdir()):
                archive.add(path, path.name)
        where = f"/tmp/hub/demo/{name}/main"
        command = f"rm -rf {where}; mkdir -p {where}; base64 -d | tar xz -C {where}"
        text = base64.b64encode(packed.getvalue()).decode()
        self.story.rig.kubectl("-n", self.hub.namespace, "exec", "-i", "hub", "--", "sh", "-c", command, stdin=text)

    def expected(self, base: str = "chat", **folders: str) -> Answers:
        """What the peft library computes with the adapters of these folders, by the name of the model."""
        tokenizer = load_tokenizer(DEMO_MODEL)
        tuned = with_adapters(reference(DEMO_MODEL), {name: self.folder / one for name, one in folders.items()})
        found = {}
        for name in ("", *folders):
            use_adapter(tuned, name)
            found[name or base] = [_greedy(tuned, tokenizer, prompt) for prompt in PROMPTS]
        assert len({tuple(answers) for answers in found.values()}) == len(found), found
        return found

    def answers(self, models: Sequence[str], base: str = "chat") -> list[Answers]:
        """Of each replica, and there of each request alone, then of all together."""
        asked = json.dumps([(model, prompt) for model in models for prompt in PROMPTS])
        found = []
        for pod in self.story.ready_pods(base):
            command = ("python", "-c", COMPLETE, asked, str(NUM_TOKENS))
            for texts in json.loads(self.story.kubectl("exec", pod["metadata"]["name"], "--", *command)):
                rest = iter(texts)
                found.append({model: [next(rest) for _ in PROMPTS] for model in models})
        return found

    def starts(self) -> set[tuple[str, int]]:
        """The replicas and how often they were restarted."""
        return {
            (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
            for pod in self.story.serving_pods()
        }

    def status(self, adapter: str) -> Any:
        return self.story.rig.read(NEURON_ADAPTERS.path(self.story.namespace, adapter)).get("status", {})

    def ready(self, adapter: str) -> Any:
        """Its condition."""
        found = self.status(adapter).get("conditions", ())
        return next((one for one in found if one["type"] == "Ready"), {"reason": ""})

    def until_reason(self, adapter: str, reason: str) -> tuple[str, float]:
        """The message, and the seconds until it was there."""
        began = time.monotonic()
        self.story.until(f"{adapter}: {reason}", lambda: self.ready(adapter)["reason"] == reason)
        seconds, message = time.monotonic() - began, self.ready(adapter)["message"]
        print(f"    {adapter}: {reason} after {seconds:.1f} s: {message}")
        return message, seconds


def _greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    start = token_ids = tokenizer.encode(prompt)
    for _ in range(NUM_TOKENS):
        token_ids = [*token_ids, int(reference_logits(model, token_ids)[-1].argmax())]
    return str(tokenizer.decode(token_ids[len(start) :]))


@pytest.fixture(scope="module")
def told(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The operator, a hub that has the demo model and its adapters, a volume for weights, and a model `chat` with two
    replicas, which serves adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    good = (*NAMES, "de-again", "stored", "claimed")
    for seed, name in enumerate(good):
        write_adapter(folder / name, read_config(DEMO_MODEL), seed=seed, **SMALL)
    bad = _write_bad(folder)
    images, namespace = load_images(rig), f"test-{uuid.uuid4().hex[:8]}"
    with ExitStack() as undo:
        where: Any = {"node": HUB_NODE, "models": {"demo/demo": 0}}
        hub = undo.enter_context(hub_in_pod(rig, f"hub-{uuid.uuid4().hex[:8]}", images.runtime, **where))
        undo.callback(uninstall, rig)
        values = {
            "jobs": {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]},
            "storage": {"weights": CLAIMS_OF_THE_CHART["weights"]},
        }
        install(rig, images, values=values)
        rig.create_namespace(namespace)
        undo.callback(rig.kubectl, "delete", "namespace", namespace, "--wait=false")
        weights = undo.enter_context(shared_volume(rig, namespace, WEIGHTS_CLAIM))
        story = Story(rig, namespace)
        told = Told(story, hub, images.runtime, folder, weights)
        for name in (*NAMES, *bad):
            told.publish(name, name)
        with story.stage("a model that serves adapters"):
            story.apply(chat(maxRank=16))
            story.until_ready(2)
        yield told
        print(json.dumps({name: round(seconds, 1) for name, seconds in story.seconds.items()}))


def _write_bad(folder: Path) -> tuple[str, ...]:
    """Adapters that the model cannot have, each in a folder."""
    config = read_config(DEMO_MODEL)
    write_adapter(folder / "high", config, rank=17, **SMALL)
    write_adapter(folder / "other-targets", config, **SMALL | {"targets": ("v_proj",)})
    write_adapter(folder / "other-model", {**config, "intermediate_size": 512}, **SMALL)
    write_adapter(folder / "dora", config, config={"use_dora": True}, **SMALL)
    damaged = write_adapter(folder / "damaged", config, **SMALL) / WEIGHTS_FILE
    damaged.write_bytes(damaged.read_bytes()[:-100])
    return ("high", "other-targets", "other-model", "dora", "damaged")


def adapter(name: str, **spec: Any) -> dict[str, Any]:
    about = {"apiVersion": names.API_VERSION, "kind": names.ADAPTER_KIND, "metadata": {"name": name}}
    return {**about, "spec": {"model": "chat", "uri": f"hf://demo/{name}", **spec}}


def chat(**adapters: Any) -> dict[str, Any]:
    serving = {**SERVING, "adapters": {"maxActive": 3, "maxLoaded": 6, "targets": list(TARGETS), **adapters}}
    # A busy node takes some seconds to stop sending requests to a replica that drains.
    rollout = {"drainDelaySeconds": 5}
    return model_of("chat", "hf://demo/demo", replicas=2, engine=TORCH, serving=serving, rollout=rollout)


def test_eight_come_while_200_streams_run_and_each_answers_with_its_own_weights(told: Told) -> None:
    story, before = told.story, told.starts()
    expected = told.expected(**{name: name for name in NAMES})
    with story.traffic(told.client, clients=NUM_STREAMS, num_tokens=60, least=3 * NUM_STREAMS):
        with story.stage("eight adapters, under traffic"):
            told.add(*NAMES)
            print(story.kubectl("get", "na", "-o", "wide"))
        with story.stage("their answers, under traffic"):
            assert told.answers(list(expected)) == [expected] * 4
    assert told.answers(list(expected)) == [expected] * 4
    assert told.starts() == before
    columns, *rows = story.kubectl("get", "na").splitlines()
    assert columns.split() == ["NAME", "MODEL", "READY", "REASON", "RANK", "SIZE", "AGE"]
    shown = {row.split()[0]: row.split()[1:4] for row in rows}
    assert [shown[name] for name in NAMES] == [["chat", "2/2", "Ready"]] * len(NAMES)


@dataclass(frozen=True)
class Bad:
    reason: str
    said: Sequence[str]
    """What its message names."""
    spec: Mapping[str, Any]
    has_job: bool = True


BAD = {
    "high": Bad("RankTooHigh", ("17", "16"), {}),
    "other-targets": Bad("TargetsNotServed", ("v_proj",), {}),
    "other-model": Bad("AdapterMismatch", ("512", "640"), {}),
    "dora": Bad("AdapterNotSupported", ("use_dora",), {}),
    "damaged": Bad("InvalidAdapter", (WEIGHTS_FILE,), {}),
    "absent": Bad("ModelNotFound", ("demo/absent",), {}),
    "no-secret": Bad(
        "SecretNotFound",
        ("nobody",),
        {"uri": "hf://demo/de", "credentialsSecretRef": {"name": "nobody", "key": "token"}},
    ),
    "not-served": Bad("AdaptersNotServed", ("plain", "maxActive"), {"model": "plain", "uri": "hf://demo/de"}, False),
    "no-model": Bad("NoSuchModel", ("nothing",), {"model": "nothing", "uri": "hf://demo/de"}, False),
    "chat": Bad("NameTaken", ("chat",), {"uri": "hf://demo/de"}, False),
    "on-a-claim": Bad("FieldNotSupported", ("s3://",), {"uri": f"pvc://{CLAIM}/de"}, False),
}


def test_each_that_cannot_be_served_says_why_and_disturbs_nothing(told: Told) -> None:
    story, good = told.story, NAMES[:2]
    told.add(*good)
    story.apply(model_of("plain", "hf://demo/demo", replicas=0))
    story.until_reason("plain", "ScaledToZero")
    expected, before = told.expected(**{name: name for name in good}), told.starts()
    with (
        story.traffic(told.client, clients=4, num_tokens=60, least=100),
        story.watching("pods") as pods,
        story.stage("one of each kind, under traffic"),
    ):
        for name, bad in BAD.items():
            story.apply(adapter(name, **bad.spec))
            message, seconds = told.until_reason(name, bad.reason)
            seen = time.time()
            assert all(word in message for word in bad.said), message
            assert seconds < (JOB_SECONDS if bad.has_job else NO_JOB_SECONDS)
            ends = [
                end for event in pods() if f"demo/{name}" in str(event.object["spec"]) for end in _ends(event.object)
            ]
            if ends:
                print(f"    {seen - min(ends):.1f} s after its pod had ended")
        # While their Jobs are tried again, too.
        reasons, end = set(), time.monotonic() + 10
        while time.monotonic() < end:
            reasons |= {(name, told.ready(name)["reason"]) for name in BAD}
        assert reasons == {(name, bad.reason) for name, bad in BAD.items()}
    rows = [row.split() for row in story.kubectl("get", "na", "--no-headers").splitlines()]
    shown = {name: rest[1:3] for name, *rest in rows}
    assert [shown[name] for name in good] == [["2/2", "Ready"]] * 2
    replicas = {"not-served": "0/0", "no-model": "0/0"}
    assert {name: shown[name] for name in BAD} == {
        name: [replicas.get(name, "0/2"), bad.reason] for name, bad in BAD.items()
    }
    assert told.answers(list(expected)) == [expected] * 4
    assert told.starts() == before
    story.kubectl("delete", "na", *BAD)


def _ends(pod: Any) -> list[float]:
    """When its containers ended."""
    states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
    return [
        datetime.fromisoformat(one["terminated"]["finishedAt"]).timestamp() for one in states if "terminated" in one
    ]


def test_other_weights_under_a_name_and_replicas_that_are_killed(told: Told) -> None:
    story, before = told.story, told.starts()
    told.add(*NAMES)
    with (
        story.traffic(told.client, clients=4, num_tokens=60, least=100),
        story.stage("other weights under a name"),
    ):
        story.kubectl("delete", "na", "de")
        story.until("de is gone", lambda: all("404" in found["de"][0] for found in told.answers(["de"])))
        told.publish("de-again", "de")
        story.apply(adapter("de"))
        story.kill_operator()
        told.wait_ready("de")
    expected = told.expected(**{name: name for name in NAMES} | {"de": "de-again"})
    assert told.answers(list(expected)) == [expected] * 4
    assert told.starts() == before
    with story.stage("a replica is killed"):
        pod, _ = story.ready_pods()
        kill_processes(story.rig, pod, "serve")
        story.until("not ready", lambda: len(story.ready_pods()) < 2)
        story.until_ready(2)
        assert told.answers(list(expected)) == [expected] * 4
        story.kubectl("delete", "pod", pod["metadata"]["name"])
        story.until_ready(2)
        assert told.answers(list(expected)) == [expected] * 4
        told.wait_ready(*NAMES)
    told.publish("de", "de")
    story.kubectl("delete", "na", "de")


def test_an_adapter_that_is_lost_from_the_claim_is_fetched_again(told: Told) -> None:
    story, good = told.story, NAMES[1:3]
    told.add(*good)
    lost, _ = good
    with story.stage("an adapter is lost"):
        pod, _ = story.ready_pods()
        shutil.rmtree(told.weights.folder / f"{told.status(lost)['served']['sourceDigest']}-adapter")
        story.kubectl("delete", "pod", pod["metadata"]["name"])
        told.until_reason(lost, "WeightsMissing")
        assert told.ready(good[1])["reason"] in ("Ready", "Loading")
        story.kubectl("annotate", "na", lost, "neuron-serving.dev/retry=now")
        told.wait_ready(*good)
        story.until_ready(2)
    expected = told.expected(**{name: name for name in good})
    assert told.answers(list(expected)) == [expected] * 4


def test_who_may_add_adapters_of_one_namespace_has_no_way_to_anything_else(told: Told) -> None:
    story, rig = told.story, told.story.rig
    told.add("fr")
    theirs = Told(Story(rig, f"{story.namespace}-other"), told.hub, told.client, told.folder, told.weights)
    rig.create_namespace(theirs.story.namespace)
    role = ("--clusterrole=neuron-operator-adapters", "--user=trainer")
    theirs.story.kubectl("create", "rolebinding", "trainer", *role)
    as_trainer = ("--as=trainer", "--as-group=system:authenticated")
    body = json.dumps(adapter("stranger", uri="hf://demo/fr"))
    theirs.story.kubectl("apply", *as_trainer, "-f", "-", stdin=body)
    theirs.until_reason("stranger", "NoSuchModel")
    assert "stranger" in theirs.story.kubectl("get", "na", *as_trainer)
    for command in ("get na", "delete na fr", "create configmap x", "get nm"):
        with pytest.raises(CommandFailed, match="forbidden"):
            story.kubectl(*command.split(), *as_trainer)
    for command in ("get nm", "delete nm chat", "scale nm chat --replicas=0", "get secrets", "get pods", "get cm"):
        with pytest.raises(CommandFailed, match="forbidden"):
            theirs.story.kubectl(*command.split(), *as_trainer)
    model = json.dumps(model_of("chat", "hf://demo/demo"))
    with pytest.raises(CommandFailed, match="forbidden"):
        theirs.story.kubectl("create", *as_trainer, "-f", "-", stdin=model)
    for found in told.answers(["stranger"]):
        assert all("404" in answer and "fr" in answer for answer in found["stranger"]), found
    rig.kubectl("delete", "namespace", theirs.story.namespace, "--wait=false")


def test_a_model_that_may_hold_more_is_replaced_once_and_takes_what_it_refused(told: Told) -> None:
    story = told.story
    told.add("fr")
    story.apply(adapter("high"))
    told.until_reason("high", "RankTooHigh")
    before = [pod["metadata"]["name"] for pod in story.ready_pods()]
    with (
        story.traffic(told.client, clients=4, num_tokens=60, least=100),
        story.stage("a higher rank, under traffic"),
    ):
        story.apply(chat(maxRank=32))
        story.until_replaced(before, 2)
        told.wait_ready("fr", "high")
    after = told.starts()
    expected = told.expected(fr="fr", high="high")
    assert told.answers(list(expected)) == [expected] * 4
    assert told.starts() == after
    story.kubectl("delete", "na", "high")
    story.apply(chat(maxRank=16))
    story.until_replaced([pod["metadata"]["name"] for pod in story.ready_pods()], 2)


def test_adapters_come_from_s3_and_from_claims_with_and_without_a_claim_for_weights(told: Told) -> None:
    story, rig = told.story, told.story.rig
    adapters = {"adapters": {"maxActive": 2}}
    in_pods = {"storage": {"weights": {"emptyDir": {}}}, "engine": TORCH, "serving": {**SERVING, **adapters}}
    keys = {"credentialsSecretRef": {"name": "keys"}}
    name = f"s3-{uuid.uuid4().hex[:8]}"
    with (
        shared_volume(rig, story.namespace, CLAIM) as volume,
        object_store_in_pod(rig, name, node=HUB_NODE, buckets=["models", "adapters"]) as store,
    ):
        story.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": CLAIM},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "storageClassName": STORAGE_CLASS,
                    "resources": {"requests": {"storage": "1Gi"}},
                },
            }
        )
        for folder in (volume.folder / "demo", store.folder / "models" / "demo"):
            folder.mkdir()
            for file in MODEL_FILES:
                shutil.copy(file, folder)
        claimed = shutil.copytree(told.folder / "claimed", volume.folder / "claimed")
        shutil.copytree(told.folder / "stored", store.folder / "adapters" / "stored")
        story.apply_all([store.secret("keys"), store.secret("wrong-keys", secret_key="wrong")])
        with story.stage("models in a claim and in a bucket"):
            story.apply(model_of("in-claim", f"pvc://{CLAIM}/demo", **in_pods))
            story.apply(model_of("in-bucket", "s3://models/demo", model=keys, **in_pods))
            story.apply(adapter("claimed", model="in-claim", uri=f"pvc://{CLAIM}/claimed"))
            story.apply(adapter("stored", uri="s3://adapters/stored", **keys))
            story.apply(adapter("by-pods", model="in-bucket", uri="s3://adapters/stored"))
            story.apply(adapter("own-keys", model="in-bucket", uri="s3://adapters/stored", **keys))
            wrong = {"credentialsSecretRef": {"name": "wrong-keys"}}
            story.apply(adapter("wrong-keys", uri="s3://adapters/stored", **wrong))
            told.until_reason("own-keys", "FieldNotSupported")
            told.until_reason("wrong-keys", "WeightsUnauthorized")
            # The safetensors library writes files that only their owner may read.
            message, _ = told.until_reason("claimed", "InvalidAdapter")
            assert "chmod a+r" in message
            (claimed / WEIGHTS_FILE).chmod(0o644)
            for model in ("in-claim", "in-bucket"):
                story.until_ready(1, model)
            told.wait_ready("claimed", "stored", "by-pods")
        for base, served, source in (
            ("chat", "stored", "stored"),
            ("in-claim", "claimed", "claimed"),
            ("in-bucket", "by-pods", "stored"),
        ):
            expected = told.expected(base, **{served: source})
            found = told.answers(list(expected), base)
            assert found == [expected] * len(found), base
            assert found
        story.kubectl("delete", "na", "claimed", "stored", "by-pods", "own-keys", "wrong-keys")
        story.kubectl("delete", "nm", "in-claim", "in-bucket")
