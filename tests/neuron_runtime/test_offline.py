"""The offline class with the demo model: arguments and results of a script written for vLLM."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import write_chat_model
from neuron_runtime import LLM, RequestOutput, SamplingParams
from neuron_runtime.apis.openai.body import CompletionBody
from neuron_runtime.arguments import LLM_ARGUMENTS, llm_config
from neuron_runtime.core import TokenEvent, TokenLogprobs
from neuron_runtime.errors import BackendFailed, FatalError, InvalidConfig, InvalidRequest
from neuron_runtime.not_built import Surface, rows
from neuron_runtime.requests.forms import ResponseFormat, StructuredOutputs

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
EXPECTED: dict[str, str] = json.loads((MODEL / "expected.json").read_text(encoding="utf-8"))
QUESTIONS = list(EXPECTED)[:12]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
HARMLESS = "file:///nowhere"


def user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [one.outputs[0].text for one in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), max_num_seqs=4, max_model_len=256, seed=1) as model:
        yield model


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    """In float32, without bfloat16's ties and batch-dependent rounding."""
    with LLM(str(MODEL), max_num_seqs=4, max_model_len=64, dtype="float32") as model:
        yield model


# Scripts

SCRIPT = """
from neuron_runtime import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

# Create an LLM.
llm = LLM(
    model={model!r},
    max_num_seqs=8,
    max_model_len=128,
    block_size=128,
    {arguments})
# Generate texts from the prompts. The output is a list of RequestOutput objects
# that contain the prompt, generated text, and other information.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
"""
"""The example of Neuron's guides, with another import and a model from a folder."""

CHAT = """
import json, sys
questions = json.load(sys.stdin)
outputs = llm.chat(
    [[{"role": "user", "content": question}] for question in questions], SamplingParams(temperature=0, max_tokens=100)
)
print(json.dumps([output.outputs[0].text for output in outputs]))
"""


def script(source: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a program as a user does: at module level, in its own process."""
    return subprocess.run(
        [sys.executable, "-c", source], input=given, capture_output=True, text=True, check=False, timeout=200
    )


@pytest.mark.slow
def test_a_guide_script_runs_at_module_level_on_the_demo_model() -> None:
    source = SCRIPT.format(model=str(MODEL), arguments="") + CHAT
    ended = script(source, json.dumps(QUESTIONS))
    assert ended.returncode == 0, ended.stderr
    *printed, answers = ended.stdout.splitlines()
    assert [line.partition(", Generated text: ")[0] for line in printed] == [
        "Prompt: 'Hello, my name is'",
        "Prompt: 'The president of the United States is'",
        "Prompt: 'The capital of France is'",
        "Prompt: 'The future of AI is'",
    ]
    assert json.loads(answers) == [EXPECTED[question] for question in QUESTIONS]
    assert "Processed prompts: 100%" in ended.stderr
    assert "loading weights" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('device="neuron"', "leave `device` out to run on the CPU"),
        ("tensor_parallel_size=2", "tensor_parallel_size ($.parallelism.tensor): each of 2 ranks of the"),
    ],
)
@pytest.mark.skipif(any(Path("/dev").glob("neuron[0-9]*")), reason="this machine has a Neuron device")
def test_a_guide_script_without_neuron_devices_gets_a_remedy(arguments: str, says: str) -> None:
    ended = script(SCRIPT.format(model=str(MODEL), arguments=arguments))
    assert ended.returncode == 1
    assert says in ended.stderr.splitlines()[-1]


def test_importing_the_names_loads_no_torch_and_importing_the_package_nothing() -> None:
    ended = script(
        "import sys, neuron_runtime; light = set(sys.modules); from neuron_runtime import LLM, SamplingParams; "
        "print([m for m in ('msgspec', 'tokenizers', 'tqdm') if m in light], "
        "[m for m in ('torch', 'transformers', 'zmq', 'starlette', 'uvicorn') if m in sys.modules])"
    )
    assert ended.stdout.strip() == "[] []", ended.stderr


def test_the_package_exports_only_the_documented_names() -> None:
    import neuron_runtime

    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = neuron_runtime.Llm


# Prompts and outputs


def test_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"The number {number} is" for number in range(11)]
    params = [SamplingParams(temperature=0, max_tokens=40 - 3 * n, ignore_eos=True) for n in range(11)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [one.prompt for one in outputs] == prompts
    assert [len(one.outputs[0].token_ids) for one in outputs] == [40 - 3 * n for n in range(11)]
    assert all(one.finished and one.outputs[0].finished() for one in outputs)
    numbers = [int(one.request_id) for one in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 11))


def test_a_prompt_is_accepted_in_every_form_of_vllm(llm: LLM) -> None:
    (plain,) = llm.generate("What is a core?", GREEDY, use_tqdm=False)
    ids = plain.prompt_token_ids
    assert ids[0] == 0  # the BOS of plain text
    forms: list[Any] = [
        ["What is a core?"],
        {"prompt": "What is a core?"},
        [{"prompt": "What is a core?", "multi_modal_data": None}],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": tuple(ids), "prompt": "shown only", "cache_salt": "mine"}],
        ids,
        [ids],
    ]
    for form in forms:
        (output,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert (output.prompt_token_ids, texts([output])) == (ids, texts([plain]))
    (named,) = llm.generate(forms[4], GREEDY, use_tqdm=False)
    assert named.prompt == "shown only"
    (older,) = llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False)
    assert (older.prompt, texts([older])) == (None, texts([plain]))
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ({"text": "a"}, "`text` of a prompt is not supported"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "`multi_modal_data['image']` is a picture, and this server sees none",
        ),
        ({}, "a prompt needs"),
        ([None], "a prompt is a text, token ids"),
        ([["a", "b"]], "a prompt is a text, token ids"),
        (["a", [1, 99999]], "prompt 1: `prompt[1]`: 99999 is not a token id"),
        (["a", "cut \ud83d"], "prompt 1: `prompt` has half of a surrogate pair, '\\ud83d', at character 4"),
        ([[]], "`prompt` must not be empty"),
        (
            ["a", [7] * 300],
            "prompt 1: This model's maximum context length is 256 tokens. However, `prompt` has 300 tokens",
        ),
    ],
)
def test_an_invalid_prompt_is_refused_before_any_computation(llm: LLM, prompts: Any, says: str) -> None:
    seconds = llm._engine.stats.backend_seconds_total
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert says in str(caught.value)
    assert llm._engine.stats.backend_seconds_total == seconds
    assert not llm._engine.has_work


def test_one_parameter_object_applies_to_all_prompts_and_a_list_to_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="`sampling_params` has 1 values for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="`priority` has 3 values for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3], use_tqdm=False)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(["a", "b"], params, priority=[1, 0], use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [2, 5]


def test_without_parameters_the_model_defaults_apply(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=16)
    question = QUESTIONS[0]
    (output,) = llm.chat(user(question), use_tqdm=False)
    assert EXPECTED[question].startswith(output.outputs[0].text)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (16, "length")


def test_a_chat_uses_the_template_of_the_model_and_ends_at_its_end_token(llm: LLM) -> None:
    question = QUESTIONS[0]
    (output,) = llm.chat(user(question), SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.text == EXPECTED[question]
    assert output.prompt == f"<|begin_of_text|><|user|>{question}<|end_of_turn|><|assistant|>"
    assert output.prompt_token_ids.count(0) == 1
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids[-1]) == ("stop", 6, 6)
    (again,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY.clone(), use_tqdm=False)
    assert answer.token_ids[:12] == again.outputs[0].token_ids


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        ([[{"role": "user", "content": "a"}], [{"role": "user"}]], {}, "prompt 1: `messages[0].content`"),
        ([{"role": "user", "content": "a"}], {"tools": [{"type": "function"}]}, "`tools[0].function` is missing"),
        (
            [{"role": "user", "content": "a"}],
            {"continue_final_message": True, "add_generation_prompt": True},
            "`continue_final_message`",
        ),
        ([{"role": "user", "content": "a"}], {"colour": "red"}, "unknown field `colour`"),
        (
            [{"role": "user", "content": "a"}],
            {"lora_request": object()},
            "`lora_request` must be a LoRARequest, got object",
        ),
    ],
)
def test_an_invalid_chat_is_refused_by_name(llm: LLM, messages: Any, options: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert says in str(caught.value)


def test_the_last_message_of_a_chat_can_be_continued(llm: LLM) -> None:
    begun = [*user("What is a slot?"), {"role": "assistant", "content": "A slot is"}]
    (output,) = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("A slot is")


def test_neutral_options_of_a_chat_are_accepted(llm: LLM) -> None:
    options: dict[str, Any] = {"tools": None, "chat_template": None, "chat_template_content_format": "auto"}
    (output,) = llm.chat(user("What is a slot?"), GREEDY, use_tqdm=False, chat_template_kwargs={"a": 1}, **options)
    assert len(output.outputs[0].token_ids) == 12


# Sampling


def test_n_answers_differ_and_repeat_with_the_same_seed(exact: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=8, ignore_eos=True)
    first, second = (exact.generate("The", params, use_tqdm=False)[0] for _ in range(2))
    assert [one.index for one in first.outputs] == [0, 1, 2]
    assert len({one.text for one in first.outputs}) == 3
    assert first.outputs == second.outputs
    beside = exact.generate(["Another", "The", "Third"], params, use_tqdm=False)[1]
    assert [one.text for one in beside.outputs] == [one.text for one in first.outputs]


def test_the_seed_of_the_class_makes_runs_repeatable_and_prompts_different() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    runs = []
    for seed in (3, 3, 4):
        with LLM(str(MODEL), max_model_len=64, seed=seed) as model:
            assert model._admit({"prompt": "The"}, params, 0).ask.sampling[0].seeded
            runs.append(texts(model.generate(["The", "The"], params, use_tqdm=False)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_a_seed_of_the_class_is_refused_where_a_request_has_one() -> None:
    def simulated(sampling: str, seed: int | None) -> LLM:
        return LLM(str(MODEL), backend="simulated", max_model_len=64, sampling_mode=sampling, seed=seed)

    with pytest.raises(InvalidConfig, match=r"^seed: `seed` is not supported with Device sampling"):
        simulated("Device", 0)
    for sampling, seed in (("Host", 0), ("Device", None)):
        with simulated(sampling, seed) as model:
            model.generate("The", SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_stop_string_ends_text_tokens_and_computation(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    question = QUESTIONS[0]
    (whole,) = llm.chat(user(question), params, use_tqdm=False)
    stop = whole.outputs[0].text[20:26]
    (ended,) = llm.chat(user(question), SamplingParams(temperature=0, max_tokens=60, stop=stop, logprobs=0))
    answer = ended.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == whole.outputs[0].text.partition(stop)[0]
    assert answer.token_ids == whole.outputs[0].token_ids[: len(answer.token_ids)]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) < 60
    assert llm._engine.stats.num_running == 0
    shown = llm.chat(
        user(question), SamplingParams(temperature=0, max_tokens=60, stop=[stop], include_stop_str_in_output=True)
    )
    assert texts(shown) == [answer.text + stop]


def test_no_step_is_in_flight_after_a_call(llm: LLM) -> None:
    (whole,) = llm.generate(["What is"], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    stop = whole.outputs[0].text[5:8]
    params = SamplingParams(temperature=0, max_tokens=20, stop=stop)
    (ended,) = llm.generate(["What is"], params, use_tqdm=False)
    assert ended.outputs[0].stop_reason == stop
    assert not llm._engine.has_work


def test_tokens_after_the_stop_string_in_the_same_step_are_dropped(llm: LLM) -> None:
    one = llm._admit({"prompt": "a"}, SamplingParams(stop="b", logprobs=0), 0)
    ids = llm._admissions.text.tokenizer.encode("abc", add_special_tokens=False)
    logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in ids)
    one.feed(0, TokenEvent("", ids, logprobs=logprobs))
    (answer,) = one.output().outputs
    assert (answer.text, answer.stop_reason) == ("a", "b")
    assert len(answer.token_ids) == len(answer.logprobs or ()) == -(answer.cumulative_logprob or 0) == len(ids) - 1


def test_a_stop_token_is_reported_and_the_end_token_is_not(tmp_path: Path, llm: LLM) -> None:
    (plain,) = llm.generate("What", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    third = plain.outputs[0].token_ids[2]
    (output,) = llm.generate("What", SamplingParams(temperature=0, stop_token_ids=[third]), use_tqdm=False)
    assert output.outputs[0].stop_reason == third
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids[:3]

    question, params = QUESTIONS[0], SamplingParams(temperature=0, max_tokens=100)
    assert llm.chat(user(question), params, use_tqdm=False)[0].outputs[0].stop_reason == 6
    for file in MODEL.glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"eos_token": "<|end_of_turn|>"}
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(tmp_path), max_model_len=256) as model:
        answer = model.chat(user(question), params, use_tqdm=False)[0].outputs[0]
    assert (answer.token_ids[-1], answer.finish_reason, answer.stop_reason) == (6, "stop", None)


def test_logprobs_start_with_the_chosen_token(llm: LLM) -> None:
    (output,) = llm.generate("The", SamplingParams(temperature=0, max_tokens=5, logprobs=3), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    chosen = [at[token_id] for token_id, at in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert answer.text == "".join(one.decoded_token or "" for one in chosen)
    for token_id, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(candidates) == 3
        assert next(iter(candidates)) == token_id
        assert candidates[token_id].rank == 1
        ranked = sorted(candidates.values(), key=lambda one: one.rank)
        assert [one.logprob for one in ranked] == sorted((one.logprob for one in ranked), reverse=True)
    (without,) = llm.generate("The", GREEDY, use_tqdm=False)
    assert (without.outputs[0].logprobs, without.outputs[0].cumulative_logprob) == (None, None)
    with pytest.raises(InvalidRequest, match="at most"):
        llm.generate("The", SamplingParams(logprobs=10_000), use_tqdm=False)


def test_a_token_outside_the_reported_alternatives_has_its_rank_in_the_vocabulary(exact: LLM) -> None:
    (free,) = exact.generate("The", SamplingParams(temperature=0, max_tokens=1, logprobs=20), use_tqdm=False)
    assert free.outputs[0].logprobs is not None
    token_id, expected = list(free.outputs[0].logprobs[0].items())[14]
    forced = SamplingParams(temperature=0, max_tokens=1, logprobs=2, allowed_token_ids=[token_id])
    (output,) = exact.generate("The", forced, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    (candidates,) = output.outputs[0].logprobs
    assert (candidates[token_id].rank, next(iter(candidates)), len(candidates)) == (15, token_id, 3)
    assert candidates[token_id].logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert sorted(one.rank for one in candidates.values()) == [1, 2, 15]


def test_prompt_logprobs_match_those_of_an_answer_with_the_same_tokens(exact: LLM) -> None:
    (answered,) = exact.generate("The", SamplingParams(temperature=0, max_tokens=9, logprobs=2), use_tqdm=False)
    answer = answered.outputs[0]
    whole = [*answered.prompt_token_ids, *answer.token_ids]
    params = SamplingParams(n=2, temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = exact.generate([whole], params, use_tqdm=False)
    reported = output.prompt_logprobs
    assert reported is not None
    assert len(reported) == len(whole)
    assert reported[0] is None
    assert answer.logprobs is not None
    for token_id, prompt, sampled in zip(answer.token_ids, reported[-9:], answer.logprobs, strict=True):
        assert prompt is not None
        assert list(prompt) == list(sampled)
        assert prompt[token_id].decoded_token == sampled[token_id].decoded_token
        assert prompt[token_id].logprob == pytest.approx(sampled[token_id].logprob, abs=1e-4)
    assert answered.prompt_logprobs is None
    (single,) = exact.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert single.prompt_logprobs == [None]


def test_bias_bans_penalties_and_allowed_tokens_change_the_output(exact: LLM) -> None:
    def tokens(**params: Any) -> list[int]:
        given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
        return exact.generate("What is a core", SamplingParams(**given), use_tqdm=False)[0].outputs[0].token_ids

    plain = tokens()
    assert tokens(logit_bias={plain[0]: -100.0})[0] != plain[0]
    assert tokens(logit_bias={9: 100.0}) == [9] * 8
    assert set(tokens(allowed_token_ids=[11, 12])) <= {11, 12}
    # Whatever the model would rather say: at some bias 11 and 12 are less than the penalty apart.
    near = ({11: 100.0, 12: 100.0 + more} for more in range(-12, 13))
    both = next(bias for bias in near if len(set(tokens(logit_bias=bias, presence_penalty=2.0, max_tokens=2))) == 2)
    assert len(set(tokens(logit_bias=both, max_tokens=2))) == 1
    assert tokens(logit_bias={9: 50.0}, repetition_penalty=100.0)[1] != 9
    assert tokens(min_p=1.0, temperature=1.0, seed=3) == plain
    text = exact.get_tokenizer().decode(plain)
    word = max(text.split(), key=len)
    banned = tokens(bad_words=[word], max_tokens=30)
    assert word not in exact.get_tokenizer().decode(banned)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("min_p", 1.5, "from 0 to 1"),
        ("presence_penalty", 3, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("top_p", -1, "from 0 to 1"),
        ("temperature", float("nan"), "from 0 to 100"),
        ("prompt_logprobs", -1, "at least 0"),
        ("max_tokens", 0, "at least 1"),
    ],
)
def test_an_out_of_range_value_is_refused_at_construction(name: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` must be {says}") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_max_tokens_is_capped_by_the_model_length(llm: LLM) -> None:
    (output,) = llm.generate([[7] * 250], SamplingParams(max_tokens=5000, ignore_eos=True), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


ASKS = {
    "detokenize": False, "spaces_between_special_tokens": False, "logits_processors": [print],
    "guided_decoding": {"json": {}}, "use_beam_search": True,
    "length_penalty": 2.0, "early_stopping": True, "extra_args": {"a": 1},
}  # fmt: skip
"""A value with an effect for every known but unsupported parameter."""


def test_every_parameter_is_supported_or_refused_by_name() -> None:
    names = set(inspect.signature(SamplingParams).parameters)
    honoured = set(CompletionBody.__struct_fields__) | {"logprobs"}
    assert set(ASKS) == names - honoured
    assert set(ASKS) == {row.name for row in rows(Surface.SAMPLING_PARAMS)}


@pytest.mark.parametrize(("name", "value"), ASKS.items())
def test_an_unsupported_value_is_refused_at_construction(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` is not supported yet") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "warm"), ("stop_token_ids", 3), ("logprobs", -1), ("n", 1.5)]
)
def test_a_value_of_a_wrong_type_is_refused_at_construction(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


def test_unknown_parameters_are_refused_and_known_ones_can_be_assigned(llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temprature = 1  # type: ignore[attr-defined]
    params.top_p = 2.0
    with pytest.raises(InvalidRequest, match="`top_p` must be from 0 to 1"):
        llm.generate("a", params, use_tqdm=False)


# Forms

PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["node", "device"]}, "cores": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "cores"],
    "additionalProperties": False,
}


def test_answers_have_the_forms_that_parameters_ask_for(llm: LLM) -> None:
    asked = [
        SamplingParams(max_tokens=150, temperature=0, structured_outputs=StructuredOutputs(json=PLACE)),
        SamplingParams(max_tokens=150, temperature=0, response_format=ResponseFormat("json_object")),
        SamplingParams(max_tokens=50, temperature=1, seed=2, structured_outputs=StructuredOutputs(regex="[a-f]{9}")),
        SamplingParams(max_tokens=50, temperature=0, guided_choice=["a core", "a device"]),
        SamplingParams(max_tokens=5, temperature=0),
    ]
    schema, whole, pattern, choice, _ = texts(llm.generate(["A device has"] * len(asked), asked, use_tqdm=False))
    assert json.loads(schema)["place"] in {"node", "device"}
    assert whole.startswith("{")
    assert re.fullmatch("[a-f]{9}", pattern)
    assert choice in {"a core", "a device"}


def test_a_form_that_cannot_be_compiled_is_refused_and_the_model_stays_usable(llm: LLM) -> None:
    wrong = [GREEDY, SamplingParams(guided_regex="(")]
    with pytest.raises(InvalidRequest, match="`guided_regex` cannot be compiled") as caught:
        llm.generate(["a", "b"], wrong, use_tqdm=False)
    assert caught.value.field == "guided_regex"
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


# The class


def test_arguments_from_the_guides_produce_a_configuration(tmp_path: Path) -> None:
    config = llm_config(
        "org/name",
        {"max_model_len": 128, "block_size": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 16, "dtype": "half"},
        revision="main",
        device="cpu",
        additional_config={"override_neuron_config": {}},
    )
    limits = config.limits
    assert (config.model.uri, config.dtype, config.backend) == ("hf://org/name@main", "float16", "torch")
    assert (limits.max_model_length, limits.block_size, limits.max_sequences, limits.num_blocks) == (128, 32, 4, 16)
    (tmp_path / "neuron0").touch()
    assert llm_config("org/name", {}, device="neuron", dev=tmp_path).backend == "nxdi"
    for given, additional in (({"override_neuron_config": {"a": 1}}, None), ({}, {"override-neuron-config": {"a": 1}})):
        assert llm_config("org/name", given, additional_config=additional).override_neuron_config == {"a": 1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"device": "neuron"}, "device: 'neuron', but this machine has no Neuron device"),
        ({"device": "cuda"}, "device: must be 'cpu' or 'neuron', got 'cuda'"),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size ($.parallelism.tensor): each of 2 ranks of the torch backend is a process: use "
            "`neuron-runtime serve`",
        ),
        ({"override_neuron_config": {"a": 1}}, "override_neuron_config ($.overrideNeuronConfig.a): the torch backend"),
        ({"override_neuron_config": {"a": 1}, "additional_config": {"override_neuron_config": {"b": 1}}}, "twice"),
        ({"additional_config": {"a": 1}}, "additional_config['a']: is not supported"),
        ({"backend": "vllm"}, "backend ($.backend): `vllm` is not supported yet"),
        ({"max_model_len": "long"}, "max_model_len ($.limits.maxModelLength): Expected `int`, got `str`"),
        ({"max_model_len": -1}, "max_model_len ($.limits.maxModelLength): Expected `int` >= 0, got -1"),
        (
            {"max_model_len": 9999},
            "max_model_len ($.limits.maxModelLength): must be at most the model's 2048 positions, got 9999",
        ),
        ({"dtype": "int4"}, "dtype ($.dtype): Invalid enum value 'int4'"),
        ({"revision": "main"}, "revision: 'main' requires an hf:// model"),
        ({"override_neuron_config": {"a": object()}}, "only plain values can be configured"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        LLM(str(MODEL), **arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_with_neutral_values_are_accepted_and_others_refused() -> None:
    refused = [row for row in rows(Surface.LLM) if row.has_effect]
    neutral = {row.name: value for row in refused for value in row.neutral}
    without_effect = dict.fromkeys((row.name for row in rows(Surface.LLM) if not row.has_effect), 0.5)
    plain = llm_config(HARMLESS, {})
    assert llm_config(HARMLESS, {**neutral, **without_effect}) == plain
    assert llm_config(HARMLESS, dict.fromkeys([*(row.name for row in refused), *LLM_ARGUMENTS])) == plain
    for name in (row.name for row in refused):
        with pytest.raises(InvalidConfig, match=f"^{name}: 'x' is not supported yet"):
            llm_config(HARMLESS, {name: "x"})
    for name in ("max_modle_len", "max_queued_requests"):
        unknown: dict[str, Any] = {name: 1}
        with pytest.raises(TypeError, match=f"no argument '{name}'"):
            LLM(HARMLESS, **unknown)


def test_a_missing_model_is_reported() -> None:
    with pytest.raises(FatalError, match="/nowhere"):
        LLM(HARMLESS)


def test_results_of_tools_are_refused_by_a_model_whose_template_knows_none(tmp_path: Path) -> None:
    with (
        LLM(str(write_chat_model(tmp_path))) as model,
        pytest.raises(InvalidRequest, match=r"`messages\[0\]`: the model's chat template knows no tools"),
    ):
        model.chat([{"role": "tool", "content": "a"}], GREEDY, use_tqdm=False)


def test_a_model_without_a_chat_template_still_generates(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with LLM(str(folder)) as model:
        with pytest.raises(InvalidRequest, match="no chat template"):
            model.chat(user("a"), use_tqdm=False)
        assert len(model.generate("a", GREEDY, use_tqdm=False)) == 1


@pytest.mark.slow
def test_get_tokenizer_returns_the_transformers_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template(user("What is a slot?"), add_generation_prompt=True, return_dict=False)
    (output,) = llm.chat(user("What is a slot?"), GREEDY, use_tqdm=False)
    assert list(ids) == output.prompt_token_ids


class Bar:
    """Records the calls of a progress bar."""

    def __init__(self, total: int, **options: Any) -> None:
        self.total, self.done, self.options = total, 0, options

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        assert text.endswith(" tokens/s")

    def update(self, count: int) -> None:
        self.done += count


def test_the_progress_bar_counts_prompts_rather_than_answers(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[Bar] = []

    def bar(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    llm.generate(["a", "b", "c"], params, use_tqdm=bar)
    assert [(one.total, one.done) for one in bars] == [(3, 3)]
    llm.generate(["a"], params, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a"], params)
    assert "1/1" in capsys.readouterr().err


def test_an_interrupt_between_steps_leaves_the_model_usable(llm: LLM) -> None:
    class Interrupted(Bar):
        def update(self, count: int) -> None:
            raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 50, 50, 50, 50, 50)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 6, params, use_tqdm=Interrupted)
    assert (llm._engine.stats.num_running, llm._engine.stats.num_waiting) == (0, 0)
    (output,) = llm.chat(user(QUESTIONS[0]), SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    assert output.outputs[0].text == EXPECTED[QUESTIONS[0]]


def test_a_failure_within_a_step_closes_the_object_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(MODEL), max_model_len=64) as model:

        def collect(self: object, step: int) -> None:
            raise RuntimeError("the device failed")

        with monkeypatch.context() as patch:
            patch.setattr("neuron_runtime.backend.torch.backend.TorchBackend.collect", collect)
            with pytest.raises(RuntimeError, match="the device failed"):
                model.generate("a", GREEDY, use_tqdm=False)
        with pytest.raises(BackendFailed, match="RuntimeError within a step"):
            model.generate("a", GREEDY, use_tqdm=False)


def test_a_closed_model_reports_that_it_is_closed() -> None:
    model = LLM(str(MODEL), max_model_len=64)
    model.close()
    model.close()
    with pytest.raises(BackendFailed, match="it was closed"):
        model.generate("a", GREEDY, use_tqdm=False)
