"""What a model's folder says about text: tokenizer, added tokens, end tokens, sampling defaults, and what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_model import END, EOS, write_chat_model
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.text.generation_config import load_generation_defaults
from neuron_runtime.text.tokenizer import load_tokenizer


def rewrite(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(write_chat_model(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("", "a device holds cores", "naïve ☃ 東京 😀\n\n", f"x{END}y"):
        assert list(ours.encode(text)) == theirs(text)["input_ids"]
        assert list(ours.encode(text, add_special_tokens=False)) == theirs(text, add_special_tokens=False)["input_ids"]


def test_tokens_that_only_the_settings_name_are_added(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    before = load_tokenizer(tmp_path)
    entry = {"content": "<|tool|>", "special": True}
    rewrite(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(before.vocabulary_size): entry})
    after = load_tokenizer(tmp_path)
    assert after.encode("<|tool|>", add_special_tokens=False) == (before.vocabulary_size,)


def test_a_truncation_stored_with_the_tokenizer_does_not_shorten_prompts(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    rewrite(
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(load_tokenizer(tmp_path).encode("a device holds cores, a core runs")) > 4


def test_loading_text_imports_no_torch(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    code = (
        "import sys; from pathlib import Path; from neuron_runtime.server.front_end import load_text; "
        f"load_text(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "\ufeff[]"])
def test_a_broken_tokenizer_is_an_invalid_model_that_names_the_file(tmp_path: Path, content: str) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(FatalError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code is ExitCode.INVALID_MODEL


def test_a_model_without_a_tokenizer_is_an_invalid_model(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FatalError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code is ExitCode.INVALID_MODEL


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_model(tmp_path))
    ends = {tokenizer.encode(one, add_special_tokens=False)[0] for one in (EOS, END)}
    assert load_generation_defaults(tmp_path, tokenizer.eos_token_id).stop_token_ids == ends
    (tmp_path / "generation_config.json").unlink()
    rewrite(tmp_path / "config.json", eos_token_id=[7, 8])
    assert load_generation_defaults(tmp_path, None).stop_token_ids == {7, 8}


def test_sampling_defaults_are_the_models_own(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    rewrite(tmp_path / "generation_config.json", temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=99)
    defaults = load_generation_defaults(tmp_path, None)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.max_tokens) == (0.6, 0.9, 20, 99)
    rewrite(tmp_path / "generation_config.json", do_sample=False)
    assert load_generation_defaults(tmp_path, None).temperature == 0.0


def test_a_default_that_cannot_be_honoured_is_reported(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    rewrite(tmp_path / "generation_config.json", repetition_penalty=1.1, min_p=0.0)
    assert load_generation_defaults(tmp_path, None).not_applied == ("repetition_penalty=1.1",)


@pytest.mark.parametrize("wrong", [{"eos_token_id": "x"}, {"temperature": "hot"}, {"top_p": -1}, {"top_k": True}])
def test_a_wrong_value_names_file_and_field(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_chat_model(tmp_path)
    rewrite(tmp_path / "generation_config.json", **wrong)
    with pytest.raises(FatalError, match=rf"generation_config\.json: {next(iter(wrong))}"):
        load_generation_defaults(tmp_path, None)
