"""Adapters of a server: by what name each answers, how it gets there, and what clients are told meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from helpers import hub
from helpers.adapters import write_adapter
from helpers.front_end import LIMITS, MODEL, Serving, make_model, serving, until_healthy
from neuron_runtime.apis.openai.body import CompletionBody
from neuron_runtime.checkpoint import read_config
from neuron_runtime.errors import InvalidConfig, InvalidRequest
from neuron_runtime.local_settings import AdapterSettings, LocalSettings
from neuron_runtime.processes.control import EngineStarted
from neuron_runtime.processes.front_end import FrontEnd
from neuron_runtime.server import adapters, fetched_adapters
from neuron_runtime.server.adapter_list import ListFile, Wanted, keep, kept, modules
from neuron_runtime.server.fetched_adapters import FetchedAdapters
from neuron_runtime.server.generation import LiveGeneration
from neuron_runtime.weights.fetching import ADAPTER, fetch
from neuron_runtime.weights.store import Store

ADAPTED = replace(LIMITS, max_adapters=2, max_loaded_adapters=3, max_adapter_rank=8)
ALLOWED = AdapterSettings(runtime_adapters="allow")
PROMPT = "a core"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters `a`, `b` and `c`, and some that do not fit."""
    folder, model = tmp_path_factory.mktemp("adapters"), read_config(model_dir)
    for seed, name in enumerate("abc"):
        write_adapter(folder / name, model, seed=seed)
    write_adapter(folder / "high", model, rank=9)
    write_adapter(folder / "other", {**model, "hidden_size": 64})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: Path) -> AsyncIterator[Serving]:
    async with serving(model_dir, limits=ADAPTED, adapters=ALLOWED) as one:
        yield one


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "LOOK_SECONDS", 0.02)


async def load(served: Serving, name: str, path: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await served.http.post("/v1/load_lora_adapter", json=body)


async def unload(served: Serving, name: str) -> httpx.Response:
    return await served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def ask(served: Serving, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **more}
    return await served.http.post("/v1/completions", json=body)


async def text(served: Serving, model: str, **more: Any) -> str:
    answer = await ask(served, model, **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (MODEL if model in (MODEL, "alias") else model)
    return str(answer.json()["choices"][0]["text"])


async def states(served: Serving) -> dict[str, Mapping[str, Any]]:
    return {one["name"]: one for one in (await served.http.get("/adapters")).json()["adapters"]}


async def until_state(served: Serving, name: str, state: str) -> Mapping[str, Any]:
    found: list[Mapping[str, Any]] = []

    async def has_it() -> bool:
        found[:] = [one for one in (await states(served)).values() if one["name"] == name and one["state"] == state]
        return bool(found)

    await served.until(has_it)
    return found[0]


def written(path: Path, **uris: Path | str) -> Path:
    """A list file, replaced in one piece as a kubelet does."""
    entries = [{"name": name, "uri": one.as_uri() if isinstance(one, Path) else one} for name, one in uris.items()]
    path.with_suffix(".new").write_text(json.dumps({"adapters": entries}))
    os.replace(path.with_suffix(".new"), path)
    return path


async def test_each_name_answers_with_its_own_weights(served: Serving, folders: Path) -> None:
    base = await text(served, MODEL)
    first = await load(served, "a", folders / "a")
    assert (first.status_code, first.text) == (200, "Success: LoRA adapter 'a' added successfully.")
    await load(served, "team/b", folders / "b")
    texts = await asyncio.gather(*(text(served, name) for name in (MODEL, "a", "team/b", "a", "alias")))
    assert texts[0] == texts[4] == base
    assert texts[1] == texts[3]
    assert len(set(texts)) == 3
    assert (await unload(served, "a")).text == "Success: LoRA adapter 'a' removed successfully."
    gone = await ask(served, "a")
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "model_not_found"
    assert f"served models: {MODEL}, alias, team/b" in gone.json()["error"]["message"]
    assert (await unload(served, "team/b")).status_code == 200


async def test_clients_of_openai_list_adapters_and_chat_with_them(served: Serving, folders: Path) -> None:
    await load(served, "a", folders / "a")
    async with openai.AsyncOpenAI(base_url=f"{served.http.base_url}/v1", api_key="x", max_retries=0) as client:
        models = {model.id: model.model_dump() for model in (await client.models.list()).data}
        chat: Any = [{"role": "user", "content": "What?"}]
        answer = await client.chat.completions.create(model="a", messages=chat, max_tokens=3)
        stream = await client.chat.completions.create(model="a", messages=chat, max_tokens=3, stream=True)
        parts = [part.model async for part in stream]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="b", messages=chat)
    assert list(models) == [MODEL, "alias", "a"]
    assert (models["a"]["root"], models["a"]["parent"]) == (str(folders / "a"), MODEL)
    assert (models[MODEL]["root"], models[MODEL]["parent"]) == (MODEL, None)
    assert models["a"]["max_model_len"] == ADAPTED.max_model_length
    assert answer.model == "a"
    assert set(parts) == {"a"}
    assert (await served.http.get("/v1/models/a")).json()["parent"] == MODEL
    await unload(served, "a")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "", "lora_path": "/x"}, 400, "must be provided"),
        ({"lora_name": MODEL, "lora_path": "a"}, 400, "is a name of the base model"),
        ({"lora_name": "a,b", "lora_path": "a"}, 400, "`lora_name` must be 1 to 253 letters"),
        ({"lora_name": "x" * 254, "lora_path": "a"}, 400, "`lora_name` must be"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 404, "ModelNotFound"),
        ({"lora_name": "x", "lora_path": "high"}, 400, "RankTooHigh"),
        ({"lora_name": "x", "lora_path": "other"}, 400, "AdapterMismatch"),
        ({"lora_name": "x", "lora_path": "nix://x"}, 400, "InvalidEngineConfig"),
        ({"lora_name": 5, "lora_path": "a"}, 400, "lora_name"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_is_refused_and_forgotten(
    served: Serving, folders: Path, body: dict[str, Any], status: int, words: str
) -> None:
    if (folders / str(body.get("lora_path"))).is_dir():
        body = {**body, "lora_path": str(folders / body["lora_path"])}
    answer = await served.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert await states(served) == {}
    assert (await ask(served, "x")).status_code == 404


async def test_an_adapter_is_replaced_only_in_place_and_requests_in_flight_keep_theirs(
    model_dir: Path, folders: Path
) -> None:
    async with serving(model_dir, limits=ADAPTED, adapters=ALLOWED) as served:
        await load(served, "a", folders / "a")
        old = await text(served, "a")
        again = await load(served, "a", folders / "b")
        assert again.status_code == 400
        assert "has already been loaded" in again.json()["error"]["message"]
        served.backend.paced = True
        running = asyncio.create_task(text(served, "a", max_tokens=100))
        await served.until(lambda: served.backend.waiting)
        first = (await states(served))["a"]["digest"]
        replaced = await served.answer(asyncio.create_task(load(served, "a", folders / "b", load_inplace=True)))
        assert replaced.status_code == 200
        assert not running.done()
        assert (await states(served))["a"]["digest"] != first
        assert served.front_end.client.uses_adapter(first)
        new = asyncio.create_task(text(served, "a"))
        await served.until(lambda: running.done() and new.done())
        assert running.result().startswith(old)
        assert not running.result().startswith(new.result())
        await served.until(lambda: first not in served.backend._adapters)
        served.unpace()
        failed = await load(served, "a", folders / "high", load_inplace=True)
        assert failed.status_code == 400
        assert await text(served, "a") == new.result()


async def test_what_the_engine_cannot_read_replaces_nothing(
    served: Serving, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(served, "a", folders / "a")
    before, read = await text(served, "a"), served.backend.read_adapter

    def broken(folder: Path) -> str:
        if folder.name == "b":
            raise OSError("Stale file handle")
        return read(folder)

    monkeypatch.setattr(served.backend, "read_adapter", broken)
    go_on = slowed(served.front_end, monkeypatch, "/a")
    failed = await load(served, "a", folders / "b", load_inplace=True)
    assert failed.status_code == 400
    assert "LoadFailed: Stale file handle" in failed.json()["error"]["message"]
    # The earlier one is served also while it is looked at again.
    assert await text(served, "a") == before
    assert (await states(served))["a"]["state"] == "Fetching"
    go_on()
    await until_state(served, "a", "Ready")
    await unload(served, "a")


async def test_nothing_is_kept_of_requests_that_have_ended(served: Serving, folders: Path) -> None:
    await load(served, "a", folders / "a")
    for _ in range(3):
        await text(served, "a")
    kept_of_requests = {name: one for name, one in vars(served.front_end.client).items() if isinstance(one, dict)}
    assert kept_of_requests
    assert not any(kept_of_requests.values())
    await unload(served, "a")


async def test_one_request_at_a_time_loads_an_adapter_and_hears_if_it_was_unloaded(
    served: Serving, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = slowed(served.front_end, monkeypatch)
    first = asyncio.create_task(load(served, "a", folders / "a"))
    await until_state(served, "a", "Fetching")
    second = await load(served, "a", folders / "b", load_inplace=True)
    assert (second.status_code, "is being loaded" in second.text) == (400, True)
    assert (await unload(served, "a")).status_code == 200
    assert ((await first).status_code, "was unloaded while" in first.result().text) == (400, True)
    go_on()
    assert await states(served) == {}


@pytest.mark.parametrize("path", ["~no-such-user/a", "a" * 300, "/" + "a" * 300, "a\0b", "/a\0b"])
async def test_a_path_that_none_can_have_leaves_the_adapter_of_that_name(
    served: Serving, folders: Path, path: str
) -> None:
    await load(served, "a", folders / "a")
    answer = await load(served, "a", Path(path), load_inplace=True)
    assert answer.status_code in (400, 404)
    assert (await ask(served, "a")).status_code == 200
    assert list(await states(served)) == ["a"]
    assert (await unload(served, "a")).status_code == 200
    assert (await ask(served, "a")).status_code == 404


async def test_a_request_whose_adapter_left_before_the_engine_had_it_is_told_as_any_other(
    served: Serving, folders: Path
) -> None:
    # The engine learns first, as it does of an adapter that left while a long request was read.
    await load(served, "a", folders / "a")
    served.front_end.client.drop_adapter((await states(served))["a"]["digest"])
    lost = await ask(served, "a")
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "5")
    assert lost.json()["error"]["message"] == "the adapter `a` is not ready (the adapter was unloaded)"
    front_end = served.front_end
    admissions, target = front_end.admissions(), front_end.targets.of("a")
    front_end.targets.remove("a")
    asked = admissions.at(target).completion(PROMPT, CompletionBody(prompt=PROMPT))
    generation = LiveGeneration(
        asked, front_end.client, front_end.metrics, admissions.text.tokenizer, front_end.targets
    )
    with pytest.raises(InvalidRequest) as caught:
        await generation.begin()
    generation.end()
    unknown = await ask(served, "never")
    assert (caught.value.status, caught.value.code) == (unknown.status_code, unknown.json()["error"]["code"])
    assert str(caught.value) == unknown.json()["error"]["message"].replace("never", "a")
    await unload(served, "a")


async def test_unloading_what_was_not_loaded_is_an_error(served: Serving) -> None:
    assert (await unload(served, "x")).status_code == 404
    assert (await unload(served, MODEL)).status_code == 404
    assert (await unload(served, "")).status_code == 400


async def test_requests_change_no_adapters_unless_they_may(model_dir: Path, folders: Path) -> None:
    async with serving(model_dir, limits=ADAPTED) as served:
        answer = await load(served, "a", folders / "a")
        assert answer.status_code == 403
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in answer.json()["error"]["message"]
        assert (await unload(served, "a")).status_code == 403
    async with serving(model_dir, adapters=ALLOWED) as served:
        answer = await load(served, "a", folders / "a")
        assert answer.status_code == 400
        assert "--enable-lora" in answer.json()["error"]["message"]
        assert (await ask(served, "a")).status_code == 404
        assert (await served.http.get("/adapters")).json() == {"maxActive": 0, "maxRank": 16, "adapters": []}


async def test_a_list_file_is_followed(model_dir: Path, folders: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "list.json", a=folders / "a", bad=folders / "high", alias=folders / "a", **{"x,y": "a"})
    settings = AdapterSettings(adapters_file=path, runtime_adapters="allow")
    async with serving(model_dir, limits=ADAPTED, adapters=settings) as served:
        # The server is healthy, so the adapters that it starts with are ready or have failed.
        found = await states(served)
        assert {name: (one["state"], one["reason"]) for name, one in found.items()} == {
            "a": ("Ready", ""),
            "bad": ("Failed", "RankTooHigh"),
            "alias": ("Failed", "NameTaken"),
            "x,y": ("Failed", "InvalidName"),
        }
        assert (found["a"]["rank"], len(found["a"]["digest"])) == (4, 64)
        assert found["a"]["bytes"] > 0
        assert "rank 9" in found["bad"]["message"]
        # Anybody may read it.
        assert str(folders) not in found["bad"]["message"]
        one = await text(served, "a")
        failed = await ask(served, "bad")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "adapter_not_ready")
        assert "RankTooHigh" in failed.json()["error"]["message"]
        assert str(folders) not in failed.json()["error"]["message"]
        for change in (load(served, "a", folders / "b"), unload(served, "a")):
            assert "of this server's list" in (await change).json()["error"]["message"]
        # What is no list changes nothing.
        path.write_text("{")
        await asyncio.sleep(0.1)
        assert await text(served, "a") == one
        written(path, a=folders / "b", c=folders / "c")
        await until_state(served, "c", "Ready")
        await served.until(lambda: served.front_end.adapters.states.adapters[0].state == "Ready")
        assert await text(served, "a") != one
        assert list(await states(served)) == ["a", "c"]
        written(path)
        await served.until(lambda: not served.front_end.adapters.states.adapters)
        assert (await ask(served, "c")).status_code == 404
        await served.until(lambda: not served.backend._adapters)


async def test_an_adapter_has_its_own_chat_template_and_defaults(
    model_dir: Path, folders: Path, tmp_path: Path
) -> None:
    for name, template in {"own": "<<{{ messages[0].content }}>>", "broken": "{% if"}.items():
        shutil.copytree(folders / "a", tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(template)
        (tmp_path / name / "generation_config.json").write_text('{"max_new_tokens": 3, "typical_p": 0.5}')
    path = written(tmp_path / "list.json", a=folders / "a", own=tmp_path / "own", broken=tmp_path / "broken")
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        found = await states(served)
        assert [(one["state"], one["reason"]) for one in found.values()] == [
            *[("Ready", "")] * 2,
            ("Failed", "InvalidAdapter"),
        ]
        # The same weights.
        assert found["a"]["digest"] == found["own"]["digest"]
        chat: Any = [{"role": "user", "content": "What?"}]

        async def prompt(model: str) -> str:
            tokens = (await served.http.post("/tokenize", json={"model": model, "messages": chat})).json()["tokens"]
            return str(
                (await served.http.post("/detokenize", json={"model": model, "tokens": tokens})).json()["prompt"]
            )

        assert await prompt("own") == "<<What?>>"
        assert await prompt("a") == await prompt(MODEL) != "<<What?>>"
        asked = await ask(served, "own", max_tokens=None)
        assert asked.json()["usage"]["completion_tokens"] == 3
        answer = await served.http.post("/v1/chat/completions", json={"model": "own", "messages": chat})
        rendered = {"prompt": "<<What?>>", "add_special_tokens": False}
        tokens = await served.http.post("/tokenize", json=rendered)
        assert answer.json()["usage"]["prompt_tokens"] == tokens.json()["count"]
        # A new template is a new version, although the weights stay.
        shutil.copytree(tmp_path / "own", tmp_path / "new")
        (tmp_path / "new" / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
        written(path, own=tmp_path / "new")
        await served.until(lambda: "a" not in dict(served.front_end.targets))

        async def has_new_template() -> bool:
            return await prompt("own") == "[What?]"

        await served.until(has_new_template)  # the version before answers until this one is ready


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/models/ab-adapter/adapter_config.json: r is 9, got 50/100", "adapter_config.json: r is 9, got 50/100"),
        ("No such file: '/mnt/claims/team/x'", "No such file: 'x'"),
        ("file:///srv/a/b.json is missing (--max-lora-rank)", "b.json is missing (--max-lora-rank)"),
        ("hf://acme/x/adapter_config.json: a and/or b", "hf://acme/x/adapter_config.json: a and/or b"),
        ("s3://AKIA:secret@bucket/key?X-Amz-Signature=abc: no", "s3://bucket/key: no"),
        ("https://u:p@host/x?sig=1&t=2 (timeout)", "https://host/x (timeout)"),
    ],
)
async def test_errors_that_anybody_may_read_have_no_paths_of_the_server_and_no_credentials(
    message: str, shown: str
) -> None:
    assert adapters._public(message) == shown


@pytest.mark.parametrize(
    "word", ["a://" * 50_000, "a://x?" + ")" * 200_000, "https://user:" + "secret" * 50_000 + "@host"]
)
async def test_an_error_of_any_length_is_shown_at_once_and_without_the_word_that_does_not_fit(word: str) -> None:
    began = time.monotonic()
    assert adapters._public(f"no adapter: {word}") == "no adapter: ..."
    assert time.monotonic() - began < 1


async def test_a_pinned_adapter_must_be_the_one_that_was_seen(model_dir: Path, folders: Path, tmp_path: Path) -> None:
    entry = {"name": "a", "uri": (folders / "a").as_uri(), "digest": "0" * 64, "generation": 3}
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"adapters": [entry]}))
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        assert (await states(served))["a"]["reason"] == "ChecksumMismatch"


async def test_clients_are_told_that_an_adapter_is_on_its_way(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "list.json")
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        go_on = slowed(served.front_end, monkeypatch)
        written(path, a=folders / "a")
        await until_state(served, "a", "Fetching")
        answer = await ask(served, "a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"] == "the adapter `a` is not ready (Fetching)"
        assert (await served.http.get("/v1/models/a")).status_code == 503
        # The model serves meanwhile.
        assert (await served.http.get("/health")).status_code == 200
        await text(served, MODEL)
        go_on()
        await until_state(served, "a", "Ready")
        await text(served, "a")


def slowed(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch, end: str = "") -> Callable[[], None]:
    """Holds back fetches of URIs with this end; returns what lets them go on."""
    gate, bring = threading.Event(), front_end.adapters._bring

    def later(wanted: Wanted, model_dir: Path) -> Any:
        if wanted.uri.endswith(end):
            gate.wait(20)
        return bring(wanted, model_dir)

    monkeypatch.setattr(front_end.adapters, "_bring", later)
    return gate.set


async def test_edits_of_an_adapter_that_is_being_fetched_take_few_threads(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate, begun = written(tmp_path / "list.json"), threading.Event(), list[str]()
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        bring = served.front_end.adapters._bring

        def wait_and_bring(wanted: Wanted, model_dir: Path) -> Any:
            begun.append(wanted.uri)
            gate.wait()
            return bring(wanted, model_dir)

        monkeypatch.setattr(served.front_end.adapters, "_bring", wait_and_bring)
        for number in range(3 * adapters.NUM_AT_ONCE):
            written(path, a=tmp_path / str(number))
            await asyncio.sleep(0.04)
        assert len(begun) == adapters.NUM_AT_ONCE
        written(path, a=folders / "a")
        gate.set()
        await until_state(served, "a", "Ready")
        assert begun[-1] == (folders / "a").as_uri()


async def test_a_server_is_healthy_when_the_adapters_that_it_starts_with_are(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "list.json", a=folders / "a")
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path), ready=False) as served:
        go_on = slowed(served.front_end, monkeypatch)
        served.engine.become_ready()
        await served.until(lambda: served.front_end._admissions is not None)
        health = await served.http.get("/health")
        assert (health.status_code, health.json()["detail"]) == (503, "not ready: loading the adapters a")
        await text(served, MODEL)
        # It does not wait for ever.
        with monkeypatch.context() as later:
            later.setattr(served.front_end.adapters, "_first_until", 0.0)
            assert (await served.http.get("/health")).status_code == 200
        go_on()
        await until_healthy(served)


async def test_a_failed_adapter_is_tried_again(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "RETRY_SECONDS", 0.02)
    path = written(tmp_path / "list.json", a=tmp_path / "later")
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        assert (await states(served))["a"]["reason"] == "ModelNotFound"
        (tmp_path / "later").symlink_to(folders / "a")
        await until_state(served, "a", "Ready")
        await text(served, "a")


async def test_an_adapter_of_a_hub_is_fetched_once(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folders / "a", tmp_path / "hub" / "acme" / "sql" / "main")
    settings = LocalSettings(tmp_path / "weights", tmp_path / "artifacts")
    with hub.serving(hub.Shelf(tmp_path / "hub")) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        async with serving(model_dir, limits=ADAPTED, settings=settings, adapters=ALLOWED) as served:
            assert (await load(served, "sql", Path("acme/sql"))).status_code == 200
            assert (await load(served, "a", folders / "a")).status_code == 200
            assert await text(served, "sql") == await text(served, "a")
            assert (await served.http.get("/v1/models/sql")).json()["root"] == "hf://acme/sql"
            found = await states(served)
            assert found["sql"]["digest"] == found["a"]["digest"]
            missing = await load(served, "x", Path("acme/other"))
            assert missing.status_code == 404
    assert len(list((tmp_path / "weights").glob("*-adapter"))) == 1


async def test_what_was_fetched_is_deleted_when_nothing_needs_it_and_only_that(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        shutil.copytree(folders / name, tmp_path / "hub" / "acme" / name / "main")
    store = Store(tmp_path / "weights")
    settings = LocalSettings(store.folder, tmp_path / "artifacts")
    with hub.serving(hub.Shelf(tmp_path / "hub")) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        theirs = fetch("hf://acme/c", store, lambda amount: None, parts=ADAPTER).folder
        async with serving(model_dir, limits=ADAPTED, settings=settings, adapters=ALLOWED) as served:
            for name in "abc":
                assert (await load(served, name, Path("acme") / name)).status_code == 200
            assert len(store.all_keys()) == 3
            # Not before: what has just been fetched counts as used for an hour, even if nothing has noted it yet.
            monkeypatch.setattr(fetched_adapters, "UNUSED_SECONDS", 0.0)
            monkeypatch.setattr(adapters, "PRUNE_SECONDS", 0.0)
            served.backend.paced = True
            running = asyncio.create_task(text(served, "a", max_tokens=20))
            await served.until(lambda: served.backend.waiting)
            for name in "ac":
                await unload(served, name)
            await asyncio.sleep(0.2)
            # A running request may have its adapter read again.
            assert len(store.all_keys()) == 3
            served.unpace()
            await running
            await served.until(lambda: len(store.all_keys()) == 2)
            assert theirs.is_dir()
            await text(served, "b")
            monkeypatch.undo()
            monkeypatch.setenv("HF_ENDPOINT", address)
            assert (await load(served, "a", Path("acme/a"))).status_code == 200


async def test_what_was_fetched_and_refused_is_deleted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_adapters, "UNUSED_SECONDS", 0.0)
    fetched, key = FetchedAdapters(tmp_path), f"{'0' * 40}-adapter"
    with contextlib.suppress(ValueError), fetched.noting():
        (tmp_path / key).mkdir()
        raise ValueError("another digest")
    fetched.prune([tmp_path / key])
    assert (tmp_path / key).exists()
    fetched.prune([])
    assert not (tmp_path / key).exists()


async def test_weights_that_the_engine_cannot_read_are_tried_again_and_the_old_ones_served_meanwhile(
    model_dir: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "list.json", a=folders / "a")
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        old = await text(served, "a")
        monkeypatch.setattr(adapters, "RETRY_SECONDS", 0.02)
        with unreadable(served, monkeypatch):
            written(path, a=folders / "b")
            assert (await until_state(served, "a", "Failed"))["reason"] == "LoadFailed"
            assert await text(served, "a") == old
        await until_state(served, "a", "Ready")
        assert await text(served, "a") != old


async def test_an_adapter_that_left_memory_and_cannot_be_read_again_is_told_and_tried(
    model_dir: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(ADAPTED, max_adapters=1, max_loaded_adapters=1)
    async with serving(model_dir, limits=limits, adapters=ALLOWED) as served:
        await load(served, "a", folders / "a")
        before = await text(served, "a")
        await load(served, "b", folders / "b")
        await text(served, "b")
        monkeypatch.setattr(adapters, "RETRY_SECONDS", 0.02)
        with unreadable(served, monkeypatch):
            refused = await ask(served, "a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_not_ready")
            assert (await until_state(served, "a", "Failed"))["message"] == "stale file handle"
            assert (await ask(served, "a")).json()["error"]["code"] == "adapter_not_ready"
        await until_state(served, "a", "Ready")
        assert await text(served, "a") == before


async def test_files_that_change_behind_the_server_never_pass_for_what_was_checked(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = read_config(model_dir), written(tmp_path / "list.json", a=tmp_path / "a")
    write_adapter(tmp_path / "a", model, seed=1)
    async with serving(model_dir, limits=ADAPTED, adapters=AdapterSettings(adapters_file=path)) as served:
        monkeypatch.setattr(adapters, "RETRY_SECONDS", 0.02)
        before, old = (await states(served))["a"]["digest"], await text(served, "a")
        write_adapter(tmp_path / "a", model, seed=2)
        assert await text(served, "a") == old
        await served.replace_engine("the engine process was killed")
        await until_state(served, "a", "Ready")
        await served.until(lambda: served.front_end.adapters.states.adapters[0].digest not in ("", before))
        await until_state(served, "a", "Ready")
        assert await text(served, "a") != old


@contextlib.contextmanager
def unreadable(served: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine reads no adapters meanwhile."""

    def fail(folder: Path) -> str:
        raise OSError("stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(served.backend, "read_adapter", fail)
        yield


async def test_a_new_engine_gets_all_adapters(served: Serving, folders: Path) -> None:
    await load(served, "a", folders / "a")
    await load(served, "b", folders / "b")
    before = [await text(served, name) for name in "ab"]
    await served.replace_engine("the engine process was killed")
    await until_healthy(served)
    assert [await text(served, name) for name in "ab"] == before
    assert {one["state"] for one in (await states(served)).values()} == {"Ready"}
    for name in "ab":
        await unload(served, name)


async def test_a_new_front_end_knows_what_requests_have_loaded(served: Serving, folders: Path) -> None:
    await load(served, "a", folders / "a")
    await load(served, "b", folders / "b")
    await unload(served, "b")
    before = await text(served, "a")
    assert kept(served.run_dir) == {"a": Wanted("a", (folders / "a").as_uri())}
    # Its engine knows the adapters of the front end before.
    served.tell(EngineStarted(served.incarnations[-1], 1))

    async def answers_as_before() -> bool:
        answer = await ask(served, "a")  # 503 while it is told to the engine
        return answer.is_success and answer.json()["choices"][0]["text"] == before

    await served.until(answers_as_before)
    await unload(served, "a")


async def test_gateways_see_which_adapters_are_in_use(model_dir: Path, folders: Path) -> None:
    async with serving(model_dir, limits=ADAPTED, adapters=ALLOWED) as served:
        for name in "abc":
            await load(served, name, folders / name)
        served.backend.paced = True
        asked = []
        for name in "abc":
            asked.append(asyncio.create_task(text(served, name, max_tokens=200)))
            await served.until_metric("vllm:num_requests_running", min(len(asked), 2))
        await served.until_metric("vllm:num_requests_waiting", 1)
        in_use = {"max_lora": "2", "waiting_lora_adapters": "c", "running_lora_adapters": "a,b"}
        assert await served.metric("vllm:lora_requests_info", **in_use) > 0
        served.unpace()
        await asyncio.gather(*asked)
        await served.until_metric("vllm:num_requests_running", 0)
        assert await served.metric("vllm:lora_requests_info", running_lora_adapters="") > 0
        # One series: what was in use is no longer shown.
        assert (await served.http.get("/metrics")).text.count("vllm:lora_requests_info{") == 1


async def test_a_list_beyond_its_limits_changes_nothing_and_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "list.json", a="hf://org/a")
    file = ListFile(path)
    assert list(file.changed() or ()) == ["a"]
    written(path, **{f"a{number}": "hf://org/a" for number in range(257)})
    assert [file.changed(), file.changed()] == [None, None]
    assert capsys.readouterr().err.count("257 adapters, at most 256 are read") == 1
    path.write_text(path.read_text() + " " * 2**20)
    assert [file.changed(), file.changed()] == [None, None]
    assert capsys.readouterr().err.count("more than 1,048,576 bytes") == 1
    path.unlink()
    os.mkfifo(path)
    assert file.changed() is None
    path.unlink()
    written(path, **{f"a{number}": "hf://org/a" for number in range(256)})
    assert len(file.changed() or ()) == 256


async def test_modules_of_the_command_line_are_as_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()
    given = ["a=/x/a", "sql=sql", "hub=org/name", '{"name": "j", "path": "/x/j", "base_model_name": "m"}']
    found = modules(given, ("m",))
    assert [(one.name, one.uri, one.parent) for one in found.values()] == [
        ("a", "file:///x/a", ""),
        ("sql", (tmp_path / "sql").as_uri(), ""),
        ("hub", "hf://org/name", ""),
        ("j", "file:///x/j", "m"),
    ]
    keep(found, tmp_path)
    assert kept(tmp_path) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"], "'a' must be name=path"),
        (["{}"], "must be name=path"),
        (["m=/x"], "the name 'm' is taken"),
        (["a=/x", "a=/y"], "the name 'a' is taken"),
        (["a b=/x"], "is no name of an adapter"),
        (['{"name": "a", "path": "/x", "base_model_name": "other"}'], "'other' is none of the served names"),
    ],
)
async def test_wrong_modules_are_refused_by_the_flag(given: list[str], words: str) -> None:
    with pytest.raises(InvalidConfig, match="--lora-modules: ") as caught:
        modules(given, ("m",))
    assert words in str(caught.value)
