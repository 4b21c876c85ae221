"""Prefix caching for users: the switch, and cached tokens in outputs and metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from helpers.serve_command import metric, serve
from neuron_runtime import LLM, SamplingParams
from neuron_runtime.errors import InvalidConfig

MODEL = str(Path(__file__).parents[2] / "examples" / "demo-model")
PROMPT = "A user applies a six-line manifest, and the operator finds out what the model is. " * 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_outputs_report_cached_tokens_and_equal_uncached_outputs() -> None:
    shares = LLM(MODEL, enable_prefix_caching=True, block_size=8, dtype="float32", max_model_len=256)
    plain = LLM(MODEL, enable_prefix_caching=False, block_size=8, dtype="float32", max_model_len=256)
    found = []
    for llm in (shares, plain):
        first, again = (llm.generate(PROMPT, GREEDY, use_tqdm=False)[0] for _ in range(2))
        (choices,) = llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8), use_tqdm=False)
        (longer,) = llm.generate(PROMPT + "Then it starts pods.", GREEDY, use_tqdm=False)
        answers = [first, again, choices, longer]
        found.append([one.num_cached_tokens for one in answers])
        if llm is shares:
            texts = [choice.text for one in answers for choice in one.outputs]
            length = len(first.prompt_token_ids)
        else:
            assert texts == [choice.text for one in answers for choice in one.outputs]
    whole = (length - 1) // 8 * 8
    assert found[0][:3] == [0, whole, whole]
    assert whole <= found[0][3] < length + 8
    assert found[1] == [0, 0, 0, 0]


def test_prompt_logprobs_of_a_cached_prompt_cover_all_tokens() -> None:
    llm = LLM(MODEL, enable_prefix_caching=True, block_size=8, dtype="float32", max_num_batched_tokens=16)
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    answers = [llm.generate(PROMPT, params, use_tqdm=False)[0] for params in (with_logprobs, GREEDY, with_logprobs)]
    assert [one.num_cached_tokens > 0 for one in answers] == [False, True, False]
    first, _, again = (one.prompt_logprobs for one in answers)
    assert first == again
    assert len(first or ()) == len(answers[0].prompt_token_ids)


def test_enabling_prefix_caching_where_unsupported_is_refused_with_argument_and_remedy() -> None:
    with pytest.raises(InvalidConfig, match="leave out the layout, or use blocks") as caught:
        LLM(MODEL, enable_prefix_caching=True, layout="slots")
    assert caught.value.field == "enable_prefix_caching ($.prefixCaching)"


@pytest.mark.slow
def test_a_served_chat_computes_only_new_tokens_and_reports_it_in_usage_and_metrics() -> None:
    flags = ("--backend", "simulated", "--enable-prefix-caching", "--block-size", "8")
    with serve(MODEL, "--port", "0", *flags) as command:
        url = command.until_ready()
        body = {"model": "demo-model", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        usages = []
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            usages.append(answer["usage"])
            body["prompt"] += answer["choices"][0]["text"]
        salted = httpx.post(f"{url}/v1/completions", json={**body, "cache_salt": "tenant"}, timeout=60).json()["usage"]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (*usages, salted)]
        lengths = [usage["prompt_tokens"] for usage in (*usages, salted)]
        assert cached[0] == cached[2] == 0
        assert lengths[0] // 8 * 8 <= cached[1] < lengths[1]
        assert metric(url, "vllm:prefix_cache_queries_total") == sum(lengths)
        assert metric(url, "vllm:prefix_cache_hits_total") == sum(cached)
