"""Text settings of a model folder: tokenizer, added tokens, end tokens, sampling defaults, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from helpers.chat_model import BOS, END, EOS, byte_level_tokenizer, metaspace_tokenizer, write_chat_model
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.requests.generation_defaults import load_generation_defaults
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

MADE: dict[str, FastTokenizer] = {}


def rewrite(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))


def test_token_ids_match_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(write_chat_model(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("", "a device holds cores", "naïve ☃ 東京 😀\n\n", f"x{END}y"):
        assert list(ours.encode(text)) == theirs(text)["input_ids"]
        assert list(ours.encode(text, add_special_tokens=False)) == theirs(text, add_special_tokens=False)["input_ids"]


def test_tokens_defined_only_in_the_tokenizer_config_are_added(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    before = load_tokenizer(tmp_path)
    entry = {"content": "<|tool|>", "special": True}
    rewrite(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(before.vocabulary_size): entry})
    after = load_tokenizer(tmp_path)
    assert after.encode("<|tool|>", add_special_tokens=False) == (before.vocabulary_size,)


def test_special_and_added_tokens_of_older_files_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_chat_model(tmp_path)
    num_tokens = load_tokenizer(tmp_path).vocabulary_size
    settings = tmp_path / "tokenizer_config.json"
    rewrite(settings, bos_token=None, eos_token="not this")
    eos = {"content": EOS, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": BOS, "eos_token": eos}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<b>": num_tokens + 1, "<a>": num_tokens}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.special_tokens["bos_token"] == theirs.bos_token == BOS
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.encode("<a><b>", add_special_tokens=False) == (num_tokens, num_tokens + 1)
    assert theirs.encode("<a><b>", add_special_tokens=False) == [num_tokens, num_tokens + 1]
    rewrite(settings, added_tokens_decoder={})
    assert "bos_token" not in load_tokenizer(tmp_path).special_tokens
    rewrite(settings, added_tokens_decoder=None)
    (tmp_path / "added_tokens.json").write_text('{"<a>": []}')
    with pytest.raises(FatalError, match=r"added_tokens\.json, is malformed"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("declared", "before", "after"),
    [
        ({"add_bos_token": True}, 1, 0),
        ({"add_bos_token": False, "add_eos_token": True}, 0, 1),
        ({"add_bos_token": True, "bos_token": "not in the vocabulary"}, 1, 0),
        ({"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}, 1, 0),
        ({}, 1, 0),
    ],
)
@pytest.mark.parametrize("adds", [True, False])
def test_llamas_class_of_tokenizers_declares_bos_and_eos(
    tmp_path: Path, declared: dict[str, Any], before: int, after: int, adds: bool
) -> None:
    write_chat_model(tmp_path)
    plain = load_tokenizer(tmp_path)
    bare = plain.encode("a core", add_special_tokens=False)
    bos, eos = plain.encode("")[0], plain.eos_token_id
    rewrite(tmp_path / "tokenizer_config.json", **{"tokenizer_class": "LlamaTokenizerFast", **declared})
    if not adds:
        rewrite(tmp_path / "tokenizer.json", post_processor=None)
        before = before if declared == {"add_bos_token": True} else 0
    ours = load_tokenizer(tmp_path)
    assert ours.encode("a core") == (*[bos] * before, *bare, *[eos] * after)
    assert ours.encode("a core", add_special_tokens=False) == bare


def test_a_truncation_stored_with_the_tokenizer_is_ignored(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    rewrite(
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(load_tokenizer(tmp_path).encode("a device holds cores, a core runs")) > 4


def test_loading_text_imports_no_torch(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    code = (
        "import sys; from pathlib import Path; from neuron_runtime.config import TextOptions; "
        "from neuron_runtime.requests.texts import load_text; "
        f"load_text(Path({str(tmp_path)!r}), TextOptions()); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "\ufeff[]"])
def test_a_broken_tokenizer_is_an_invalid_model_naming_the_file(tmp_path: Path, content: str) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(FatalError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code is ExitCode.INVALID_MODEL


def test_a_model_without_a_tokenizer_is_an_invalid_model(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FatalError, match=r"no tokenizer\.json: write it .*`AutoTokenizer\.from_pretrained") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code is ExitCode.INVALID_MODEL
    # The whole reason of transformers, which depends on its version, in one line.
    assert str(caught.value).rpartition("here transformers cannot: ")[2]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"added_tokens_decoder": {"1": 3}},
            "tokenizer_config.json: an entry of chat_template or added_tokens_decoder",
        ),
        ({"added_tokens_decoder": [1]}, "tokenizer_config.json: an entry of chat_template or added_tokens_decoder"),
        ({"added_tokens_decoder": {"1": {"special": True}}}, "KeyError('content')"),
        ({"chat_template": [{"name": "default"}]}, "KeyError('template')"),
    ],
)
def test_malformed_settings_of_a_tokenizer_are_an_invalid_model(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    rewrite(tmp_path / "tokenizer_config.json", **settings)
    with pytest.raises(FatalError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code is ExitCode.INVALID_MODEL
    assert says in str(caught.value)


def test_a_chat_template_that_is_not_text_is_an_invalid_model(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(FatalError, match=r"chat_template\.jinja cannot be read: 'utf-8' codec"):
        load_tokenizer(tmp_path)


def test_end_tokens_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_model(tmp_path))
    ends = {tokenizer.encode(one, add_special_tokens=False)[0] for one in (EOS, END)}
    assert load_generation_defaults(tmp_path, tokenizer.eos_token_id).stop_token_ids == ends
    (tmp_path / "generation_config.json").unlink()
    rewrite(tmp_path / "config.json", eos_token_id=[7, 8])
    assert load_generation_defaults(tmp_path, None).stop_token_ids == {7, 8}


def test_sampling_defaults_come_from_the_model(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    rewrite(tmp_path / "generation_config.json", temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=99)
    sampling = load_generation_defaults(tmp_path, None).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.9, 20, 99)
    rewrite(tmp_path / "generation_config.json", repetition_penalty=1.1, min_p=0.05)
    defaults = load_generation_defaults(tmp_path, None)
    sampling = defaults.sampling
    assert (sampling.repetition_penalty, sampling.min_p, defaults.not_applied) == (1.1, 0.05, ())
    rewrite(tmp_path / "generation_config.json", do_sample=False)
    assert load_generation_defaults(tmp_path, None).sampling.temperature == 0.0


def test_an_unsupported_default_is_reported(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    rewrite(tmp_path / "generation_config.json", typical_p=0.9, num_beams=1)
    assert load_generation_defaults(tmp_path, None).not_applied == ("typical_p=0.9",)


@pytest.mark.parametrize(
    "neutral",
    [{"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}, {"max_new_tokens": 0}, {"max_new_tokens": -1}],
)
def test_a_value_without_effect_is_not_applied(tmp_path: Path, neutral: dict[str, Any]) -> None:
    write_chat_model(tmp_path)
    before = load_generation_defaults(tmp_path, None)
    rewrite(tmp_path / "generation_config.json", **neutral)
    assert load_generation_defaults(tmp_path, None) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"eos_token_id": "x"},
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": -1},
        {"top_k": True},
        {"top_k": -2},
        {"max_new_tokens": float("inf")},
        {"repetition_penalty": 0},
    ],
)
def test_an_invalid_value_names_file_and_field(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_chat_model(tmp_path)
    rewrite(tmp_path / "generation_config.json", **wrong)
    with pytest.raises(FatalError, match=rf"generation_config\.json: `?{next(iter(wrong))}"):
        load_generation_defaults(tmp_path, None)


@pytest.mark.parametrize("make", [byte_level_tokenizer, metaspace_tokenizer])
@given(text=st.text(max_size=40))
def test_token_bytes_join_to_the_bytes_of_the_text(make: Callable[[], FastTokenizer], text: str) -> None:
    tokenizer = Tokenizer(MADE.setdefault(make.__name__, make()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert spelled.removeprefix(" ") == text.replace("\u2581", " ").removeprefix(" ") or spelled == text


def test_special_tokens_have_the_bytes_of_their_name_and_unknown_ids_have_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_model(tmp_path))
    (end,) = tokenizer.encode(END, add_special_tokens=False)
    assert tokenizer.token_bytes(end) == END.encode()
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.hidden_tokens >= {EOS, END}


def test_a_text_is_truncated_at_its_start_and_keeps_its_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_model(tmp_path))
    whole = tokenizer.encode("a device holds cores, a core runs")
    assert tokenizer.encode("a device holds cores, a core runs", max_tokens=4) == (whole[0], *whole[-3:])
    bare = tokenizer.encode("a device holds cores, a core runs", add_special_tokens=False, max_tokens=4)
    assert bare == whole[-4:]
    assert tokenizer.encode("a device", max_tokens=100) == tokenizer.encode("a device")
    assert tokenizer.encode("a device", max_tokens=1) == whole[:1]


def test_token_offsets_start_where_the_previous_text_ends(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_model(tmp_path))
    text = "naïve 😀 a core"
    ids, starts = tokenizer.encode(text), tokenizer.starts(text)
    assert len(ids) == len(starts)
    for at, start in enumerate(starts):
        before = b"".join(map(tokenizer.token_bytes, ids[1:at]))
        assert start == len(before.decode(errors="ignore"))


def test_defaults_can_come_from_another_folder_or_be_disabled(tmp_path: Path) -> None:
    model, other = write_chat_model(tmp_path / "model"), tmp_path / "other"
    rewrite(model / "generation_config.json", temperature=0.6)
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 9}')
    own = load_generation_defaults(model, None)
    neutral = load_generation_defaults(model, None, "vllm")
    assert (neutral.value("temperature"), neutral.stop_token_ids) == (1.0, own.stop_token_ids)
    others = load_generation_defaults(model, None, str(other))
    assert (others.value("temperature"), others.value("top_p"), others.stop_token_ids) == (
        1.0,
        0.5,
        own.stop_token_ids | {9},
    )
    with pytest.raises(FatalError, match=r"text\.generationConfig.*no generation_config\.json") as caught:
        load_generation_defaults(model, None, str(tmp_path))
    assert caught.value.exit_code is ExitCode.INVALID_ENGINE_CONFIG
