"""Adapters on the real cluster: they come, go and change under traffic, without a restart, and each answers with its
own weights. A hub has them; a Job fetches them into the claim of the model."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.rig.faults import kill_processes
from cluster.rig.rig import WAITING, Rig
from cluster.rig.shared_storage import shared_volume
from cluster.servers import Hub, hub_in_pod
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
from neuron_operator.api import names
from neuron_runtime import LLM, LoRARequest, SamplingParams
from neuron_runtime.checkpoint import read_config

# Long, because a kubelet takes a minute to bring a changed list to a pod.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

HUB_NODE = "n3"
SMALL: Any = {"layers": (1,), "dtype": np.float16}
"""All of them are in the command of the hub's pod."""
DEMO_MODEL = ROOT / "examples" / "demo-model"
PROMPTS = ("What is a pod?", "kubectl")
NUM_TOKENS = 24
NAMES = ("de", "fr", "sql")
"""One more than may be active."""

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


@dataclass(frozen=True)
class Told:
    story: Story
    hub: Hub
    client: str
    """The image of clients."""
    folder: Path

    def wait_ready(self, *adapters: str) -> None:
        self.story.kubectl("wait", "--for=condition=Ready", *(f"na/{name}" for name in adapters), WAITING)

    def expected(self, **folders: str) -> dict[str, list[str]]:
        """What the runtime answers on this machine, by the name of the model, with the adapters of these folders."""
        serving: Any = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32"}
        greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        found = {}
        with LLM(str(DEMO_MODEL), backend="torch", enable_lora=True, max_loras=2, **serving) as llm:
            for number, (name, folder) in enumerate({"chat": "", **folders}.items()):
                one = LoRARequest(name, number, str(self.folder / folder)) if folder else None
                outputs = llm.generate(list(PROMPTS), greedy, lora_request=one, use_tqdm=False)
                found[name] = [output.outputs[0].text for output in outputs]
        assert len({tuple(answers) for answers in found.values()}) == len(found), found
        return found

    def answers(self, models: Sequence[str]) -> list[dict[str, list[str]]]:
        """Of each replica, and there of each request alone, then of all together."""
        asked = json.dumps([(model, prompt) for model in models for prompt in PROMPTS])
        found = []
        for pod in self.story.ready_pods():
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

    def ready(self, adapter: str) -> Any:
        """Its condition."""
        found = json.loads(self.story.kubectl("get", "na", adapter, "-o", "json")).get("status", {})
        return next((one for one in found.get("conditions", ()) if one["type"] == "Ready"), {"reason": ""})

    def until_reason(self, adapter: str, reason: str) -> tuple[str, float]:
        """The message, and the seconds until it was there."""
        began = time.monotonic()
        self.story.until(f"{adapter}: {reason}", lambda: self.ready(adapter)["reason"] == reason)
        seconds, message = time.monotonic() - began, self.ready(adapter)["message"]
        print(f"    {adapter}: {reason} after {seconds:.1f} s: {message}")
        return message, seconds


@pytest.fixture
def told(rig: Rig, namespace: str, tmp_path: Path) -> Iterator[Told]:
    """The operator, a hub that has the demo model and its adapters, and a volume for weights."""
    model = read_config(DEMO_MODEL)
    for seed, name in enumerate((*NAMES, "de-again")):
        write_adapter(tmp_path / name, model, seed=seed, scale=0.5, targets=("q_proj", "down_proj"), **SMALL)
    write_adapter(tmp_path / "high", model, rank=17, targets=("v_proj",), **SMALL)
    images = load_images(rig)
    edits = {f"demo/{name}": _unpacked(tmp_path / name) for name in (*NAMES, "high")}
    with ExitStack() as undo:
        where: Any = {"node": HUB_NODE, "models": dict.fromkeys(("demo/demo", *edits), 0), "edits": edits}
        hub = undo.enter_context(hub_in_pod(rig, f"hub-{uuid.uuid4().hex[:8]}", images.runtime, **where))
        undo.callback(uninstall, rig)
        values = {
            "jobs": {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]},
            "storage": {"weights": CLAIMS_OF_THE_CHART["weights"]},
        }
        install(rig, images, values=values)
        undo.enter_context(shared_volume(rig, namespace, WEIGHTS_CLAIM))
        story = Story(rig, namespace)
        yield Told(story, hub, images.runtime, tmp_path)
        print(json.dumps({name: round(seconds, 1) for name, seconds in story.seconds.items()}))


def _unpacked(folder: Path) -> str:
    """A shell command that replaces the files of its folder by those of this one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    return f"rm -f *; echo {base64.b64encode(packed.getvalue()).decode()} | base64 -d | tar xz"


def adapter(name: str, **spec: Any) -> dict[str, Any]:
    about = {"apiVersion": names.API_VERSION, "kind": names.ADAPTER_KIND, "metadata": {"name": name}}
    return {**about, "spec": {"model": "chat", "uri": f"hf://demo/{name}", **spec}}


def test_they_come_and_go_under_traffic_and_each_answers_with_its_own_weights(told: Told) -> None:
    story = told.story
    serving = {"maxModelLength": 256, "maxSequences": 8, "dtype": "float32"}
    with story.stage("a model that serves adapters"):
        adapters = {"maxActive": 2, "maxLoaded": 3}
        story.apply(
            model_of("chat", "hf://demo/demo", replicas=2, engine=TORCH, serving={**serving, "adapters": adapters})
        )
        expected = told.expected(**{name: name for name in NAMES})
        story.until_ready(2)
    before = told.starts()
    with story.traffic(told.client, clients=4, num_tokens=60, least=200):
        with story.stage("three adapters, under traffic"):
            story.apply_all([adapter(name) for name in NAMES])
            told.wait_ready(*NAMES)
            print(story.kubectl("get", "na", "-o", "wide"))
        assert told.answers(list(expected)) == [expected] * 4
        with story.stage("one whose rank is too high, under traffic"):
            story.apply(adapter("high"))
            message, seconds = told.until_reason("high", "RankTooHigh")
            assert "17" in message
            assert "16" in message
            assert seconds < 30
            # While the Job is tried again, too.
            reasons, end = set(), time.monotonic() + 10
            while time.monotonic() < end:
                reasons.add(told.ready("high")["reason"])
            assert reasons == {"RankTooHigh"}
    columns, *rows = story.kubectl("get", "na").splitlines()
    assert columns.split() == ["NAME", "MODEL", "READY", "REASON", "RANK", "SIZE", "AGE"]
    assert {row.split()[0]: row.split()[1:4] for row in rows} == {
        **{name: ["chat", "2/2", "Ready"] for name in NAMES},
        "high": ["chat", "0/2", "RankTooHigh"],
    }
    with story.stage("another namespace names the same model"):
        elsewhere = f"{story.namespace}-other"
        story.rig.create_namespace(elsewhere)
        other = Told(Story(story.rig, elsewhere), told.hub, told.client, told.folder)
        other.story.apply(adapter("stranger", uri="hf://demo/fr"))
        other.until_reason("stranger", "NoSuchModel")
        story.rig.kubectl("delete", "namespace", elsewhere, "--wait=false")
    for found in told.answers(["stranger"]):
        assert all("404" in answer and "sql" in answer for answer in found["stranger"]), found
    with (
        story.traffic(told.client, clients=4, num_tokens=60, least=100),
        story.stage("other weights under a name"),
    ):
        story.kubectl("delete", "na", "de")
        story.until("de is gone", lambda: all("404" in found["de"][0] for found in told.answers(["de"])))
        story.rig.kubectl("-n", told.hub.namespace, "exec", "hub", "--", "sh", "-c", _replaced("de", told.folder))
        story.apply(adapter("de"))
        told.wait_ready("de")
    expected = told.expected(de="de-again", fr="fr", sql="sql")
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


def _replaced(name: str, folder: Path) -> str:
    return f"cd /tmp/hub/demo/{name}/main; {_unpacked(folder / 'de-again')}"
