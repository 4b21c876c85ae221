"""A model's tokenizer, chat template and end tokens, read from its folder; text to ids and back.

Loaded once by the front end (and by the offline class). It uses the `tokenizers` library directly, which starts in a
tenth of a second; transformers, which imports torch, is imported only for a model without `tokenizer.json`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from neuron_runtime.checkpoint import TEMPLATES_FOLDER
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.text.chat_template import ChatTemplate

MAX_SHOWN = 80
"""Characters of a token in an error."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back, for one model. Safe to share between threads."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        vocabulary = fast.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token_characters = max(map(len, vocabulary), default=1)
        self._declare(dict(special_tokens or {}), chat_template, tool_template)
        self._spelling = _Spelling(fast)
        self._bytes: dict[int, bytes] = {}
        self.joins_bytes = self._spelling.joins_bytes
        """The text of ids is the concatenation of their bytes, decoded as UTF-8."""
        self._pieces: dict[bool, dict[int, str | bytes]] = {False: {}, True: {}}

    def _declare(
        self, special_tokens: dict[str, str], chat_template: ChatTemplate | None, tool_template: ChatTemplate | None
    ) -> None:
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        """The template of chats with tools, of which some models have another."""
        eos = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self._fast.token_to_id(eos)

    def adapted(self, folder: Path, *, reads_template: bool) -> Tokenizer:
        """The same tokens, with chat templates and end token of an adapter in a folder, as far as its files have them.

        Tokens that its tokenizer adds do not exist in the model. They are left out, but not where they matter.

        Args:
            reads_template: False: the chat templates stay.

        Raises:
            FatalError: INVALID_MODEL as `load_tokenizer`; ADAPTER_NOT_SUPPORTED if its chat template or the end of its
                answers needs a token that the model lacks.
        """
        files = _Files(folder)
        sources = files.sources if reads_template else {}
        lacking = {one.content for number, one in files.added if str(self._fast.token_to_id(one.content)) != number}
        lacking |= {one for one in files.special_tokens.values() if self._fast.token_to_id(one) is None}
        needed = [files.special_tokens.get("eos_token", ""), *sources.values()]
        # An empty one stands for none.
        if missing := sorted(token for token in lacking if token and any(token in one for one in needed)):
            raise FatalError(
                ExitCode.ADAPTER_NOT_SUPPORTED,
                f"{folder}: an adapter whose chats need {missing[0][:MAX_SHOWN]!r}, which is no token of the model, is "
                "not supported: train it with the tokens of the model",
            )
        special = {name: token for name, token in files.special_tokens.items() if token not in lacking}
        special = {**self.special_tokens, **special}
        templates = files.templates(sources, special)
        other = copy.copy(self)
        if templates:
            other._declare(special, templates.get("default"), templates.get("tool_use"))
        else:
            other._declare(special, self.chat_template, self.tool_template)
        return other

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None, *, keeps_end: bool = True
    ) -> tuple[int, ...]:
        """Ids of a text; `add_special_tokens` adds the model's special tokens (usually a BOS in front).

        max_tokens: truncates the beginning of the text to this many ids, including special ones; without `keeps_end`
            its end.
        """
        if max_tokens is None:
            # A batch of one, because only batch calls release the GIL.
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return tuple(encoding.ids)
        encoding = self._fast.encode(text, add_special_tokens=False)
        around = self._fast.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        encoding.truncate(max(max_tokens - around, 0), direction="left" if keeps_end else "right")
        whole = self._fast.post_process(encoding, add_special_tokens=add_special_tokens)
        return tuple(whole.ids[:max_tokens])

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None = None, newest: dict[str, Any] | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Ids of two texts with the special tokens around them, and the first id of the second text; 0: the model does
        not tell them apart.

        max_tokens: the longer text loses its end until so many ids are left, including special ones.
        newest: the first text of the pair before this one, which is not encoded again if it is the same: it may be
            long, and pairs many.
        """
        known = {} if newest is None else newest
        if first not in known:
            known.clear()
            known[first] = self._fast.encode(first, add_special_tokens=False)
        texts = [known[first], self._fast.encode(second, add_special_tokens=False)]
        if max_tokens is not None:
            texts[0] = Encoding.merge(texts[:1], growing_offsets=False)  # a copy, which may be cut
            room = max(max_tokens - self._fast.num_special_tokens_to_add(is_pair=True), 0)
            shorter, longer = sorted(texts, key=len)
            kept = min(len(shorter), room // 2)
            longer.truncate(room - kept)
            shorter.truncate(kept)
        whole = self._fast.post_process(texts[0], texts[1], add_special_tokens=True)
        return tuple(whole.ids), whole.type_ids.index(1) if 1 in whole.type_ids else 0

    def starts(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """For each id of `encode`, the index of the character at which it begins."""
        starts: list[int] = []
        before = 0
        for start, end in self._fast.encode(text, add_special_tokens=add_special_tokens).offsets:
            # Some tokenizers leave the space before a word out of its span; added tokens have an empty span.
            at = before if start == end else min(start, before)
            starts.append(max(at, starts[-1] if starts else 0))
            before = max(before, end)
        return tuple(starts)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, None for an unknown id."""
        spelling: str | None = self._fast.id_to_token(token_id)
        return spelling

    def id_of(self, token: str) -> int:
        """The id of an entry of the vocabulary. Raises KeyError."""
        token_id: int | None = self._fast.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an id, which may begin or end inside a character; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            spelled = self._fast.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if spelled is None else self._spelling.to_bytes(token_id, spelled)
        return known

    def pieces(self, skip_special_tokens: bool) -> dict[int, str | bytes]:
        """The cache of `piece`."""
        return self._pieces[skip_special_tokens]

    def piece(self, token_id: int, skip_special_tokens: bool) -> str | bytes:
        """The text of an id, or its bytes if they are not whole characters. Only valid if `joins_bytes`."""
        spelled = self._fast.id_to_token(token_id)
        if spelled is None or (skip_special_tokens and self.is_special(token_id)):
            raw = b""
        else:
            raw = self._spelling.joined_bytes(spelled)
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self._pieces[skip_special_tokens][token_id] = piece
        return piece

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` skips the id."""
        return token_id in self._spelling.special

    @property
    def answer_end_id(self) -> int | None:
        """The special token with which the chat template ends an answer."""
        behind = "" if self.chat_template is None else self.chat_template.behind_answers
        ends = [token for token in self.hidden_tokens if behind.startswith(token)]
        return self._fast.token_to_id(max(ends, key=len)) if ends else None

    @property
    def hidden_tokens(self) -> frozenset[str]:
        """Special tokens, which `decode` skips."""
        return frozenset(one.content for one in self._fast.get_added_tokens_decoder().values() if one.special)


class _Spelling:
    """How a vocabulary spells bytes; read from the tokenizer's decoder."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._added = {number: token.content for number, token in fast.get_added_tokens_decoder().items()}
        state = json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {}
        parts = {part["type"]: part for part in _parts(state)}
        self._characters = _BYTE_LEVEL if "ByteLevel" in parts else None
        self.joins_bytes = list(parts) == ["ByteLevel"]
        self.special = {number for number, token in fast.get_added_tokens_decoder().items() if token.special}
        self._has_bytes = "ByteFallback" in parts
        self._space = parts["Metaspace"]["replacement"] if "Metaspace" in parts else ""
        replace = parts.get("Replace", {})
        if replace.get("content") == " ":
            self._space = replace["pattern"].get("String", "")

    def joined_bytes(self, spelled: str) -> bytes:
        """Bytes of an entry by the rules of a byte-level decoder, which treats added tokens like others."""
        known = (_BYTE_LEVEL.get(one) for one in spelled)
        parts = [one for one in known if one is not None]
        return bytes(parts) if len(parts) == len(spelled) else spelled.encode()

    def to_bytes(self, token_id: int, spelled: str) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._characters is not None and all(one in self._characters for one in spelled):
            return bytes(self._characters[one] for one in spelled)
        if self._has_bytes and _BYTE.fullmatch(spelled):
            return bytes((int(spelled[3:5], 16),))
        if self._space:
            return spelled.replace(self._space, " ").encode()
        return str(self._fast.decode([token_id], skip_special_tokens=False)).encode()


_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _parts(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A decoder, or its parts if it is a sequence."""
    if "type" in decoder:
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _byte_level() -> dict[str, int]:
    """The character that byte-level vocabularies use for each byte: itself if printable, else U+0100 and following, in
    order (as published with GPT-2)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


def load_tokenizer(model_dir: Path, chat_template: str = "") -> Tokenizer:
    """Read tokenizer, special tokens and chat templates of a model folder.

    Args:
        chat_template: overrides the model's own, unless empty.

    Raises:
        FatalError: INVALID_MODEL, naming the missing or broken file; INVALID_ENGINE_CONFIG for `chat_template`.
    """
    files = _Files(model_dir, chat_template)
    try:
        templates = files.templates(files.sources, files.special_tokens)
    except FatalError as error:
        if chat_template:
            raise InvalidConfig("$.text.chatTemplate", f"not a valid template: {error.__cause__}") from error
        raise
    fast = _load_fast(model_dir)
    known = fast.get_vocab(with_added_tokens=True)
    fast.add_tokens([token for _, token in files.added if token.content not in known])
    _follow_declaration(fast, files.settings, files.special_tokens)
    return Tokenizer(
        fast,
        special_tokens=files.special_tokens,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
    )


class _Files:
    """What the files beside a vocabulary say. Raises FatalError (INVALID_MODEL).

    chat_template: overrides theirs, unless empty.
    """

    def __init__(self, folder: Path, chat_template: str = "") -> None:
        self._folder = folder
        path = folder / "tokenizer_config.json"
        self.settings = settings = read_json(path)
        legacy = "added_tokens_decoder" not in settings
        if legacy:
            # As in transformers: tokenizers saved before its release 4.34 have special and added tokens in these files.
            settings |= read_json(folder / "special_tokens_map.json")
        self.special_tokens = special_tokens = dict[str, str]()
        for name in SPECIAL_TOKENS:
            value = settings.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special_tokens[name] = value.encode(errors="backslashreplace").decode()
        self.added: list[tuple[str, AddedToken]]
        """With their ids as they are written."""
        try:
            self.sources = {"default": chat_template} if chat_template else _chat_template_sources(folder, settings)
            if legacy:
                numbers = read_json(folder / "added_tokens.json")
                contents = sorted(numbers, key=lambda content: int(numbers[content]))
                special = special_tokens.values()
                added = {str(numbers[one]): {"content": one, "special": one in special} for one in contents}
            else:
                added = settings["added_tokens_decoder"]
            self.added = [(number, _added_token(one)) for number, one in added.items()]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            names = "chat_template or added_tokens_decoder, or of added_tokens.json,"
            message = f"{path}: an entry of {names} is malformed: {error!r}"
            raise FatalError(ExitCode.INVALID_MODEL, message) from error

    def templates(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> dict[str, ChatTemplate]:
        try:
            return {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}
        except ValueError as error:
            message = f"the chat template in {self._folder} is invalid: {error}"
            raise FatalError(ExitCode.INVALID_MODEL, message) from error


def _follow_declaration(fast: FastTokenizer, settings: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add BOS and EOS to texts as `tokenizer_config.json` declares it for Llama's class of tokenizers.

    Some models declare what their `tokenizer.json` does not do. transformers 4 follows the declaration.
    """
    added = [settings.get("add_bos_token"), settings.get("add_eos_token", False)]
    if settings.get("tokenizer_class") not in _DECLARING or not all(isinstance(one, bool) for one in added):
        return
    names = [special_tokens.get(name) for name in SPECIAL_TOKENS[:2]]
    before, after = ([name] if name and is_added else [] for name, is_added in zip(names, added, strict=True))
    ids = [(name, fast.token_to_id(name)) for name in before + after]
    if all(number is not None for _, number in ids):
        fast.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


_DECLARING = ("LlamaTokenizer", "LlamaTokenizerFast")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a model's JSON file; empty if the file is missing. Raises FatalError (INVALID_MODEL)."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise FatalError(ExitCode.INVALID_MODEL, f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FatalError(ExitCode.INVALID_MODEL, f"{path} must be a JSON object")
    return value


def _load_fast(model_dir: Path) -> FastTokenizer:
    path = model_dir / "tokenizer.json"
    if path.is_file():
        try:
            return FastTokenizer.from_file(str(path))
        except Exception as error:
            raise FatalError(ExitCode.INVALID_MODEL, f"{path} cannot be read: {error}") from error
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy: it imports torch

    try:
        fast = AutoTokenizer.from_pretrained(str(model_dir), use_fast=True, local_files_only=True).backend_tokenizer
    except Exception as error:
        # transformers raises whatever its converters do.
        reason = " ".join(str(error).split()) or type(error).__name__
        message = (
            f"{model_dir} has no tokenizer.json: write it where transformers and sentencepiece are installed, with "
            f"`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`; here transformers cannot: {reason}"
        )
        raise FatalError(ExitCode.INVALID_MODEL, message) from error
    assert isinstance(fast, FastTokenizer)
    return fast


def _chat_template_sources(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates `default` and `tool_use`, as far as it has them: files or, in older models, entries of
    `tokenizer_config.json`. The only template of a model is that of all chats, whatever its name."""
    files = {"default": model_dir / "chat_template.jinja"}
    files |= {path.stem: path for path in (model_dir / TEMPLATES_FOLDER).glob("*.jinja")}
    named = {name: _text(path) for name, path in files.items() if path.is_file()}
    if not named:
        value = settings.get("chat_template") or read_json(model_dir / "chat_template.json").get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
        elif isinstance(value, str):
            named = {"default": value}
    if len(named) == 1:
        named = {"default": next(iter(named.values()))}
    return {name: named[name] for name in ("default", "tool_use") if name in named}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FatalError(ExitCode.INVALID_MODEL, f"{path} cannot be read: {error}") from error


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        entry["content"],
        single_word=entry.get("single_word", False),
        lstrip=entry.get("lstrip", False),
        rstrip=entry.get("rstrip", False),
        normalized=entry.get("normalized", True),
        special=entry.get("special", False),
    )
