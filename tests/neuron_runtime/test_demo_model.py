"""The demo model in transformers: its answers are those of expected.json, with the recorded margins; and its calls of
tools, also over HTTP."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from helpers.serve_command import serve
from helpers.tool_templates import WEATHER, tool
from neuron_runtime import LLM, SamplingParams
from neuron_runtime.engine.drafts import Drafts
from neuron_runtime.inspection import inspect_model
from neuron_runtime.text.tokenizer import load_tokenizer
from neuron_runtime.text.tool_calls import TOOL_PARSERS, ToolCallSplitter, recognized, whole_calls

FOLDER = Path(__file__).parents[2] / "examples" / "demo-model"
DRAFT = FOLDER / "draft"
EXPECTED: dict[str, str] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
TRAINING: dict[str, Any] = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
SAMPLE = ("What is neuron-serving?", "Show me the shortest manifest.", "Where does the word neuron come from?")
REQUIRED_GAP = 1.0


@pytest.fixture(scope="module")
def train() -> Iterator[ModuleType]:
    """The module examples/demo-model/train.py, a program outside any package."""
    spec = importlib.util.spec_from_file_location("demo_model_train", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        patch.setattr(sys, "dont_write_bytecode", True)  # the folder is copied into an image
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def load(dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, dtype))
    return model.eval()


def answer(model: Any, tokenizer: Any, chat: str | list[dict[str, Any]], tools: Sequence[str] = ()) -> str:
    """The greedy answer to a question or a chat, until an end token of generation_config.json."""
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=[tool(name) for name in tools] or None,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=200)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def message(role: str, text: str) -> dict[str, Any]:
    """As a client sends it back."""
    if "<tool_call>" not in text:
        return {"role": role, "content": text}
    splitter = ToolCallSplitter(TOOL_PARSERS["hermes"], [])
    (said, begun), (rest, ended) = splitter.feed(text), splitter.flush()
    assert said + rest == ""
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in whole_calls([*begun, *ended])
    ]
    return {"role": role, "content": None, "tool_calls": calls}


def check_dialogues(model: Any, tokenizer: Any, dialogues: Iterable[Any]) -> None:
    """The model gives the answers of a dialogue, after those that it gave before."""
    for dialogue in dialogues:
        messages = [message(*turn) for turn in dialogue.turns]
        for at, (role, text) in enumerate(dialogue.turns):
            if role == "assistant":
                assert answer(model, tokenizer, messages[:at], dialogue.tools) == text


def test_the_model_has_many_answers_in_few_bytes() -> None:
    assert len(EXPECTED) >= 60
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 8_000_000


def test_the_model_can_be_served() -> None:
    facts = inspect_model(f"file://{FOLDER}")
    assert (facts.architecture, facts.dtype, facts.num_layers) == ("LlamaForCausalLM", "bfloat16", 4)
    assert facts.parameters == TRAINING["parameters"]


def test_every_answer_and_call_has_the_required_margin(train: ModuleType) -> None:
    called = [train.named(dialogue) for dialogue in train.read_tools(FOLDER / "corpus").canonical()]
    assert [*EXPECTED, *called] == [*TRAINING["gaps"]]
    assert min(TRAINING["gaps"].values()) == TRAINING["minGap"] >= REQUIRED_GAP
    assert TRAINING["cpuSeconds"] <= 20 * 60


def test_the_corpus_matches_the_trained_one(train: ModuleType) -> None:
    entries = train.read_corpus(FOLDER / "corpus")
    assert {entry.questions[0]: entry.answer for entry in entries} == EXPECTED
    assert sum(len(entry.questions) for entry in entries) == TRAINING["questions"]
    assert all(len(entry.questions) >= 4 for entry in entries)


def test_no_answer_is_true_for_its_own_question_only() -> None:
    # The model may misread a question; an answer that stands alone stays true.
    assert not [answer for answer in EXPECTED.values() if re.match(r"(Yes|No|It|They|This is possible)\b", answer)]


def test_the_small_files_match_the_training_script(train: ModuleType) -> None:
    files = {"config": train.SHAPE, "generation_config": train.GENERATION_CONFIG}
    for name, value in {**files, "tokenizer_config": train.TOKENIZER_CONFIG}.items():
        assert json.loads((FOLDER / f"{name}.json").read_bytes()) == value
    assert (FOLDER / "chat_template.jinja").read_text(encoding="utf-8") == train.CHAT_TEMPLATE


def test_the_chat_template_produces_the_training_prompts(train: ModuleType, tokenizer: Any) -> None:
    dialogue = train.Dialogue((("user", "What is a slot?"), ("assistant", "A slot is νεῦρον.")), system="Be brief.")
    chat = [message(*turn) for turn in (("system", "Be brief."), *dialogue.turns)]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    ids, generated = train.Encoder(tokenizer.backend_tokenizer).encode(dialogue)
    assert tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.decode([i for i, by_model in zip(ids, generated, strict=True) if by_model]) == (
        "A slot is νεῦρον.<|end_of_turn|>"
    )
    template = load_tokenizer(FOLDER).chat_template
    assert template is not None
    assert template.render(chat, add_generation_prompt=False) == text


def test_calls_and_results_in_a_chat_are_the_tokens_that_were_generated_and_read(
    train: ModuleType, tokenizer: Any
) -> None:
    for dialogue in train.read_tools(FOLDER / "corpus").canonical():
        chat = [message(*turn) for turn in dialogue.turns]
        text = tokenizer.apply_chat_template(chat, tools=[tool(name) for name in dialogue.tools], tokenize=False)
        ids, _ = train.Encoder(tokenizer.backend_tokenizer).encode(dialogue)
        assert tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids == ids


def test_the_template_shows_tools_by_name_and_tells_how_calls_are_read(train: ModuleType) -> None:
    template = load_tokenizer(FOLDER).chat_template
    assert template is not None
    assert template.shapes.tools
    assert recognized(template.source) is TOOL_PARSERS["hermes"]
    chat = [{"role": "user", "content": "Hello!"}]
    assert template.render(chat, variables={"tools": [WEATHER, tool("search")]}) == (
        "<|begin_of_text|><|tools|> weather search<|end_of_turn|><|user|>Hello!<|end_of_turn|><|assistant|>"
    )


def test_any_text_gets_one_bos_and_round_trips(tokenizer: Any) -> None:
    text = "Naïve 日本語 🙂 \n\t code: {x}"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sample_of_greedy_answers_matches(tokenizer: Any, dtype: str) -> None:
    model = load(dtype)
    for question in SAMPLE:
        assert answer(model, tokenizer, question) == EXPECTED[question]


def test_a_sample_of_calls_and_answers_to_their_results_matches(train: ModuleType, tokenizer: Any) -> None:
    check_dialogues(load("bfloat16"), tokenizer, train.read_tools(FOLDER / "corpus").canonical()[::5])


@pytest.mark.parametrize("tools", [("list_models", "describe_model"), ("get_weather", "search_web", "add_memory")])
def test_tools_do_not_change_answers_to_other_questions(tokenizer: Any, tools: Sequence[str]) -> None:
    model = load("bfloat16")
    for question in SAMPLE:
        assert answer(model, tokenizer, question, tools) == EXPECTED[question]


@pytest.mark.parametrize("tools", [(), ("get_weather", "search_web")])
def test_without_its_tools_the_model_says_that_it_cannot_look(
    train: ModuleType, tokenizer: Any, tools: Sequence[str]
) -> None:
    model, known = load("bfloat16"), train.read_tools(FOLDER / "corpus")
    for dialogue in known.canonical()[::6]:
        assert answer(model, tokenizer, dialogue.turns[0][1], tools) == known.without


def test_the_recorded_margins_hold_for_a_sample(train: ModuleType, tokenizer: Any) -> None:
    dialogues = [train.plain(question, EXPECTED[question]) for question in EXPECTED]
    dialogues = [*dialogues, *train.read_tools(FOLDER / "corpus").canonical()][::10]
    gaps = train.least_gaps(load("bfloat16"), train.Encoder(tokenizer.backend_tokenizer), dialogues)
    for dialogue, gap in zip(dialogues, gaps, strict=True):
        assert gap >= REQUIRED_GAP
        assert gap == pytest.approx(TRAINING["gaps"][train.named(dialogue)], abs=0.5), train.named(dialogue)


@pytest.mark.long  # `test_server_processes.py` asks a server all questions, and two tests above a sample of them
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_greedy_answer_matches(train: ModuleType, tokenizer: Any, dtype: str) -> None:
    model = load(dtype)
    assert {question: answer(model, tokenizer, question) for question in EXPECTED} == EXPECTED
    check_dialogues(model, tokenizer, train.read_tools(FOLDER / "corpus").canonical())


# The draft model


def test_the_draft_model_is_small_and_has_the_tokens_of_the_model(train: ModuleType) -> None:
    assert json.loads((DRAFT / "config.json").read_bytes()) == train.DRAFT_SHAPE
    assert train.DRAFT_SHAPE["vocab_size"] == train.SHAPE["vocab_size"]
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= 500 * 1024


def test_the_draft_model_guesses_most_tokens_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps are said to be equally long: drafts pay, however busy the machine is.
    measure = Drafts.measure
    monkeypatch.setattr(Drafts, "measure", lambda drafts, rows, tokens, *_: measure(drafts, rows, tokens, 0.01))
    questions = sorted(EXPECTED, key=lambda question: len(EXPECTED[question]))[-40::4]
    drafting = {"method": "draft_model", "model": str(DRAFT)}
    with LLM(str(FOLDER), speculative_config=drafting) as model:
        chats: Any = [[{"role": "user", "content": question}] for question in questions]
        found = model.chat(chats, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
        stats = model._engine.stats
    assert [one.outputs[0].text for one in found] == [EXPECTED[question] for question in questions]
    assert stats.num_accepted_drafts_total > 300
    assert stats.num_accepted_drafts_total / stats.num_drafts_total > 0.8


# Over HTTP

BLOCK_SIZE = 8
LIST, DESCRIBE = tool("list_models"), tool("describe_model", name={"type": "string"})


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    flags = ("--port", "0", "--served-model-name", "demo", "--enable-prefix-caching", "--block-size", str(BLOCK_SIZE))
    with (
        serve(str(FOLDER), *flags) as command,
        openai.OpenAI(base_url=f"{command.until_ready()}/v1", api_key="any", max_retries=0) as one,
    ):
        yield one


def called(client: openai.OpenAI, question: str, *, streamed: bool, **fields: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call of an answer that has no text."""
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": question}], "tools": [LIST, DESCRIBE]}
    if streamed:
        with client.chat.completions.stream(**asked | fields) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked | fields).choices[0]
    assert not choice.message.content
    assert choice.finish_reason == "tool_calls"
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_over_http_by_every_choice(client: openai.OpenAI, streamed: bool) -> None:
    strict = {"type": "function", "function": {**DESCRIBE["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "describe_model"}}
    for question, fields, expected in (
        ("Which models are there?", {}, ("list_models", {})),
        ("Is coder ready?", {}, ("describe_model", {"name": "coder"})),
        ("Is coder ready?", {"tools": [LIST, strict]}, ("describe_model", {"name": "coder"})),
        ("Which models are there?", {"tool_choice": "required"}, ("list_models", {})),
        ("Is chat ready?", {"tool_choice": "required"}, ("describe_model", {"name": "chat"})),
        ("Is chat ready?", {"tool_choice": named}, ("describe_model", {"name": "chat"})),
    ):
        assert called(client, question, streamed=streamed, **fields) == [expected], (question, fields)


def test_the_default_chat_of_open_webui_gets_its_answer(client: openai.OpenAI) -> None:
    """As its backend forwards what its page sends: a stream with tools that the model does not know."""
    builtin = ("get_current_timestamp", "calculate_timestamp", "search_web", "fetch_url", "search_chats", "view_note")
    body: Any = {
        "stream": True,
        "model": "demo",
        "messages": [{"role": "user", "content": SAMPLE[0]}],
        "tools": [tool(name) for name in builtin],
        "stream_options": {"include_usage": True},
    }
    stream = client.chat.completions.create(**body)
    pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == EXPECTED[SAMPLE[0]]


def test_a_chat_with_a_call_and_its_result_continues_the_tokens_that_were_computed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Is llama ready?"}]
    ask: Any = partial(client.chat.completions.create, model="demo", tools=[LIST, DESCRIBE])
    first = ask(messages=messages)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"name": "llama", "state": "Paused"}'}
    second = ask(messages=[*messages, first.choices[0].message, result])
    assert second.choices[0].message.content == "The model llama is paused."
    # The end of the turn was generated, but nothing was computed from it.
    computed = first.usage.total_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE
