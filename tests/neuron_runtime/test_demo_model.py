"""The demo model in transformers: its answers are those of expected.json, with the recorded margins."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from neuron_runtime.inspection import inspect_model
from neuron_runtime.text.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "demo-model"
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


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy answer, until an end token of generation_config.json."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=200)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_model_has_many_answers_in_few_bytes() -> None:
    assert len(EXPECTED) >= 60
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 8_000_000


def test_the_model_can_be_served() -> None:
    facts = inspect_model(f"file://{FOLDER}")
    assert (facts.architecture, facts.dtype, facts.num_layers) == ("LlamaForCausalLM", "bfloat16", 4)
    assert facts.parameters == TRAINING["parameters"]


def test_every_answer_matches_the_corpus_with_the_required_margin() -> None:
    assert EXPECTED.keys() == TRAINING["gaps"].keys()
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
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a slot?"},
        {"role": "assistant", "content": "A slot is νεῦρον."},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    ids, generated = train.Dialogues(tokenizer.backend_tokenizer).encode(
        [("What is a slot?", "A slot is νεῦρον.")], system="Be brief."
    )
    assert tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.decode([i for i, by_model in zip(ids, generated, strict=True) if by_model]) == (
        "A slot is νεῦρον.<|end_of_turn|>"
    )
    template = load_tokenizer(FOLDER).chat_template
    assert template is not None
    assert template.render(chat, add_generation_prompt=False) == text


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


def test_the_recorded_margins_hold_for_a_sample(train: ModuleType, tokenizer: Any) -> None:
    questions = list(EXPECTED)[::10]
    gaps = train.least_gaps(
        load("bfloat16"), train.Dialogues(tokenizer.backend_tokenizer), [(q, EXPECTED[q]) for q in questions]
    )
    for question, gap in zip(questions, gaps, strict=True):
        assert gap >= REQUIRED_GAP
        assert gap == pytest.approx(TRAINING["gaps"][question], abs=0.5), question


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_greedy_answer_matches(tokenizer: Any, dtype: str) -> None:
    model = load(dtype)
    assert {question: answer(model, tokenizer, question) for question in EXPECTED} == EXPECTED
