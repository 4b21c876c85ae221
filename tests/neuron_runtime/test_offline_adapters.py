"""Adapters of the offline class: which prompt is answered by which, and how each is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import neuron_runtime
from helpers.adapters import write_adapter
from helpers.chat_model import write_chat_model
from neuron_runtime import LLM, LoRARequest, SamplingParams
from neuron_runtime.backend.simulated.device import SimulatedBackend
from neuron_runtime.checkpoint import read_config
from neuron_runtime.errors import InvalidConfig, InvalidRequest
from neuron_runtime.lora.request import LoRARequest as WhereScriptsImportIt

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "a core"


class LoRAModulePath:
    """As vLLM's dataclass."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters `a`, `b`, `c` and one that does not fit."""
    folder = tmp_path_factory.mktemp("offline")
    write_chat_model(folder / "model", max_length=128)
    model = read_config(folder / "model")
    for seed, name in enumerate("abc"):
        write_adapter(folder / name, model, seed=seed)
    write_adapter(folder / "high", model, rank=32)
    return folder


def made(folder: Path, **more: Any) -> LLM:
    return LLM(str(folder / "model"), backend="simulated", max_num_seqs=2, **{"enable_lora": True, **more})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with made(folder, max_loras=2, lora_modules=[LoRAModulePath("a", str(folder / "a"))]) as one:
        yield one


def ids(llm: LLM, adapters: Any, num_prompts: int = 1) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * num_prompts, GREEDY, lora_request=adapters, use_tqdm=False)
    return [one.outputs[0].token_ids for one in outputs]


def test_each_prompt_is_answered_by_its_adapter(llm: LLM, folder: Path) -> None:
    requests = [LoRARequest(name, number, str(folder / name)) for number, name in enumerate("abc", 1)]
    base = ids(llm, None)[0]
    alone = [ids(llm, request)[0] for request in requests]
    assert len({tuple(one) for one in (base, *alone)}) == 4
    # More than can be active at a time, and none.
    together = ids(llm, [*requests, None, *reversed(requests)], 7)
    assert together == [*alone, base, *reversed(alone)]
    assert ids(llm, requests[0], 3) == [alone[0]] * 3


def test_an_output_has_its_adapter_and_chats_take_one(llm: LLM, folder: Path) -> None:
    request = LoRARequest("a", 1, str(folder / "a"))
    chat: Any = [{"role": "user", "content": "What?"}]
    adapted = llm.chat(chat, GREEDY, lora_request=request, use_tqdm=False)[0]
    base = llm.chat(chat, GREEDY, use_tqdm=False)[0]
    assert adapted.lora_request == request
    assert base.lora_request is None
    assert adapted.outputs[0].token_ids != base.outputs[0].token_ids


def test_chats_with_an_adapter_have_its_template_and_defaults(llm: LLM, folder: Path) -> None:
    own = write_adapter(folder / "own", read_config(folder / "model"))
    (own / "chat_template.jinja").write_text("<<{{ messages[0].content }}>>")
    (own / "generation_config.json").write_text('{"max_new_tokens": 3}')
    request = LoRARequest("own", 9, str(own))
    chat: Any = [{"role": "user", "content": "What?"}]
    (output,) = llm.chat(chat, lora_request=request, use_tqdm=False)
    assert output.prompt == "<<What?>>"
    assert len(output.outputs[0].token_ids) <= 3
    assert llm.chat(chat, GREEDY, use_tqdm=False)[0].prompt != output.prompt
    (own / "chat_template.jinja").write_text("{% for")
    with pytest.raises(InvalidRequest, match="the chat template in"):
        llm.chat(chat, lora_request=LoRARequest("own", 10, str(own)), use_tqdm=False)


def test_a_request_without_a_path_has_the_module_of_its_name(llm: LLM, folder: Path) -> None:
    # As the guide for Neuron has it.
    assert ids(llm, LoRARequest("a", 0, " ")) == ids(llm, LoRARequest("a", 1, str(folder / "a")))
    with pytest.raises(InvalidRequest, match="`lora_modules` has no 'b'"):
        ids(llm, LoRARequest("b", 0, " "))


@pytest.mark.parametrize(
    "modules",
    [lambda path: {"x": path}, lambda path: [{"name": "x", "path": path}], lambda path: [LoRAModulePath("x", path)]],
)
def test_modules_may_be_settings_of_the_backend(folder: Path, modules: Any) -> None:
    settings = {"lora_modules": modules(str(folder / "b"))}
    with made(folder, override_neuron_config=settings) as one:
        assert ids(one, LoRARequest("x", 0)) == ids(one, LoRARequest("b", 1, str(folder / "b")))


@pytest.mark.parametrize("modules", ["a=b", 5, [5], {"a": 5}, [{"name": "a"}], {"": "x"}])
def test_wrong_modules_are_refused_by_name(folder: Path, modules: Any) -> None:
    with pytest.raises(InvalidConfig, match="lora_modules: must be"):
        made(folder, lora_modules=modules)


def test_another_number_reads_the_path_again(llm: LLM, folder: Path, tmp_path: Path) -> None:
    model = read_config(folder / "model")
    path = write_adapter(tmp_path / "x", model, seed=10)
    first = ids(llm, LoRARequest("x", 1, str(path)))
    write_adapter(path, model, seed=11)
    assert ids(llm, LoRARequest("x", 1, str(path))) == first
    assert ids(llm, LoRARequest("x", 2, str(path))) != first


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        (lambda folder: LoRARequest("x", 1, "/nowhere"), "`lora_request` of 'x' cannot be served: "),
        (lambda folder: LoRARequest("x", 1, str(folder / "high")), "rank 32"),
        (lambda folder: LoRARequest("x", 1), "has no lora_path"),
        (lambda folder: [None], "has 1 values for 2 prompts"),
        (lambda folder: [None, "x"], "prompt 1: `lora_request` must be a LoRARequest, got str"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(llm: LLM, folder: Path, request_of: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(llm, request_of(folder), 2)
    assert says in str(caught.value)
    assert len(ids(llm, None)) == 1


@pytest.mark.parametrize("arguments", [{"enable_lora": False, "max_loras": 2}, {"enable_lora": None}])
def test_adapters_must_be_enabled(folder: Path, arguments: dict[str, Any]) -> None:
    with made(folder, **arguments) as one, pytest.raises(InvalidRequest, match="enable_lora=True"):
        ids(one, LoRARequest("a", 1, str(folder / "a")))


def test_the_class_is_where_scripts_import_it() -> None:
    assert WhereScriptsImportIt is LoRARequest is neuron_runtime.LoRARequest


def test_an_adapter_that_could_not_be_read_is_read_again_with_another_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(backend: SimulatedBackend, path: Path) -> None:
        raise OSError("stale file handle")

    with made(folder) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedBackend, "read_adapter", fail)
            with pytest.raises(InvalidRequest, match="stale file handle"):
                ids(llm, LoRARequest("a", 1, str(folder / "a")))
        assert ids(llm, LoRARequest("a", 2, str(folder / "a"))) != ids(llm, None)
