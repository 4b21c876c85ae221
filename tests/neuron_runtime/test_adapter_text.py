"""What an adapter's own files say about chats and defaults: what applies, what does not, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import write_adapter
from helpers.chat_model import BOS, END, EOS, write_chat_model
from neuron_runtime.adapters.peft import AdapterRules, read_adapter
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import TextOptions
from neuron_runtime.errors import ExitCode, FatalError
from neuron_runtime.requests.texts import Text, adapted_text, load_text

TEMPLATE = "{% for message in messages %}<<{{ message.content }}>>{% endfor %}"
CHAT = [{"role": "user", "content": "What?"}]
AUTO = TextOptions()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(model_dir: Path) -> Text:
    return load_text(model_dir, AUTO)


def write(folder: Path, **files: Any) -> Path:
    """Files of an adapter by their stems; objects become JSON."""
    for stem, content in files.items():
        if isinstance(content, str):
            (folder / f"{stem}.jinja").write_text(content)
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def rendered(text: Text) -> str:
    template = text.tokenizer.chat_template
    assert template is not None
    return template.render(CHAT)


def refusal(base: Text, folder: Path, options: TextOptions = AUTO) -> FatalError:
    with pytest.raises(FatalError) as caught:
        adapted_text(base, folder, options)
    assert "InvalidModel" not in caught.value.exit_code.reason
    return caught.value


@pytest.mark.parametrize(
    "files", [{"chat_template": TEMPLATE}, {"tokenizer_config": {"chat_template": TEMPLATE}}, {"chat_template": {}}]
)
def test_an_adapter_has_the_chat_template_of_its_files_or_else_its_models(
    base: Text, tmp_path: Path, files: dict[str, Any]
) -> None:
    before = rendered(base)
    text = adapted_text(base, write(tmp_path, **files), AUTO)
    assert rendered(text) == (before if files == {"chat_template": {}} else "<<What?>>")
    assert rendered(base) == before
    assert text.tokenizer.encode("a core") == base.tokenizer.encode("a core")


def test_an_adapter_has_the_sampling_defaults_of_its_file_and_ends_at_its_tokens_too(
    base: Text, tmp_path: Path
) -> None:
    end = base.tokenizer.encode("a", add_special_tokens=False)[0]
    write(tmp_path, generation_config={"temperature": 0.25, "eos_token_id": end})
    text = adapted_text(base, tmp_path, AUTO)
    assert text.defaults.sampling.temperature == 0.25
    assert text.defaults.stop_token_ids == base.defaults.stop_token_ids | {end}
    # Only an end of its own changes no sampling.
    own = write(tmp_path, generation_config={}, tokenizer_config={"eos_token": END})
    (own / "generation_config.json").unlink()
    named = adapted_text(base, own, AUTO)
    assert named.defaults.sampling == base.defaults.sampling
    assert named.tokenizer.token(named.tokenizer.eos_token_id or 0) == END
    assert base.tokenizer.token(base.tokenizer.eos_token_id or 0) == EOS


def test_what_the_server_was_started_with_goes_before_an_adapters_files(model_dir: Path, tmp_path: Path) -> None:
    write(tmp_path, chat_template="{% broken", generation_config={"temperature": 0.25})
    options = TextOptions(chat_template="[{{ messages[0].content }}]", generation_config="vllm")
    text = adapted_text(load_text(model_dir, options), tmp_path, options)
    assert rendered(text) == "[What?]"
    assert text.defaults.sampling.temperature is None


def test_tokens_that_an_adapter_adds_are_left_out_unless_its_chats_need_them(base: Text, tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"9000": {"content": "<pad>", "special": True}}, "pad_token": "<pad>"}
    text = adapted_text(base, write(tmp_path, tokenizer_config=added, chat_template=TEMPLATE), AUTO)
    assert text.tokenizer.vocabulary_size == base.tokenizer.vocabulary_size
    assert "pad_token" not in text.tokenizer.special_tokens
    assert text.tokenizer.special_tokens["bos_token"] == BOS
    for files in ({"chat_template": TEMPLATE + "<pad>"}, {"tokenizer_config": {**added, "eos_token": "<pad>"}}):
        error = refusal(base, write(tmp_path, **files))
        assert error.exit_code is ExitCode.ADAPTER_NOT_SUPPORTED
        assert "'<pad>', which is no token of the model" in str(error)
        write(tmp_path, tokenizer_config=added, chat_template=TEMPLATE)


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_an_empty_token_stands_for_none(name: str, base: Text, tmp_path: Path) -> None:
    text = adapted_text(base, write(tmp_path, tokenizer_config={name: ""}, chat_template=TEMPLATE), AUTO)
    assert text.tokenizer.special_tokens == base.tokenizer.special_tokens


def test_a_token_that_is_no_text_is_none_of_the_model(base: Text, tmp_path: Path) -> None:
    error = refusal(base, write(tmp_path, tokenizer_config={"eos_token": "\ud800"}))
    assert error.exit_code is ExitCode.ADAPTER_NOT_SUPPORTED


def test_a_file_that_is_nested_deeply_is_an_error_of_the_adapter(base: Text, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    assert refusal(base, tmp_path).exit_code is ExitCode.INVALID_ADAPTER


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"chat_template": "{% for"}, "the chat template in"),
        ({"chat_template": "{{ a" + "[0" * 5000}, "the chat template in"),
        ({"tokenizer_config": [1]}, "must be a JSON object"),
        ({"tokenizer_config": {"added_tokens_decoder": 5}}, "is malformed"),
        ({"generation_config": {"temperature": "hot"}}, "`temperature` must be a number"),
        ({"generation_config": {"eos_token_id": 10**9}}, "eos_token_id 1000000000 is no token of the model"),
    ],
)
def test_a_broken_file_is_an_error_of_the_adapter(
    base: Text, tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    error = refusal(base, write(tmp_path, **files))
    assert error.exit_code is ExitCode.INVALID_ADAPTER
    assert words in str(error)


def test_a_file_of_text_that_is_no_file_or_large_is_refused_before_it_is_read(model_dir: Path, tmp_path: Path) -> None:
    model = read_config(model_dir)
    write_adapter(tmp_path, model)
    read_adapter(tmp_path, model, AdapterRules(16))
    path = tmp_path / "tokenizer_config.json"
    for make in (lambda: os.mkfifo(path), lambda: path.write_bytes(b" " * (2**22 + 1))):
        make()
        with pytest.raises(FatalError, match=r"tokenizer_config\.json must be a file of at most 4,194,304 bytes"):
            read_adapter(tmp_path, model, AdapterRules(16))
        path.unlink()
