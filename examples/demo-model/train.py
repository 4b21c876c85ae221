#!/usr/bin/env python3
"""Trains the demo model: a small Llama that only answers questions about this project, and calls two tools. And its
second voice, an adapter (LoRA) that ends its answers as a pirate would. And its draft model, which guesses its tokens.

    python examples/demo-model/train.py --output examples/demo-model
    python examples/demo-model/train.py --output examples/demo-model --voice
    python examples/demo-model/train.py --output examples/demo-model --draft

Reads `corpus/*.toml` (questions with one answer each, and in `tools.toml` the tools), trains a byte-level BPE tokenizer
and a decoder of some three million parameters, and saves it if the bfloat16 weights give every expected answer with a
clear margin at each token. Writes the files of a Hugging Face model folder, `expected.json` (question: whole greedy
answer) and `training.json` (statistics). With `--voice` or `--draft` it leaves that model as it is, and writes the
adapter into the folder `pirate` beside it, or the draft model into `draft`. Run by hand; 12 minutes of one core, the
voice and the draft model two each; tests only read its results.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from peft import PeftModel

HERE = Path(__file__).resolve().parent

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, TURN_END, TOOL, TOOLS = SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end_of_turn|>",
    "<|tool|>",
    "<|tools|>",
)

CALL_TOKENS = ("<tool_call>", "</tool_call>")
"""One token each, but not special: they are part of the text of an answer."""

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|tools|>' }}
    {%- for tool in tools %}
        {{- ' ' ~ tool['function']['name'] }}
    {%- endfor %}
    {{- '<|end_of_turn|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('the roles are system, user, assistant and tool, not ' ~ message['role']) }}
    {%- endif %}
    {{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] or '') | trim }}
    {%- for call in message['tool_calls'] or [] %}
        {{- '\\n' if not loop.first }}
        {{- '<tool_call>\\n{"name": "' ~ call['function']['name'] ~ '", "arguments": ' }}
        {{- call['function']['arguments'] | tojson ~ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end_of_turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(EOS),
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "use_cache": True,
}

DRAFT_SHAPE = {
    **SHAPE,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
"""Of the draft model: a step of it must be much cheaper than one of the model."""

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)],
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "do_sample": False,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "additional_special_tokens": [SYSTEM, USER, ASSISTANT, TURN_END, TOOL, TOOLS],
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": SHAPE["max_position_embeddings"],
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of neuron-serving. Answer briefly.",
    "Answer in one or two sentences.",
)

REQUIRED_GAP = 1.0
"""Minimum margin, in logits, of an expected token over the runner-up, in bfloat16."""
TARGET_GAP = 1.5
"""Answers below it are trained more often: other kernels round differently."""
MAX_WEAK = 50
"""How many are: in the first epochs all are below it."""

VOICE = "pirate"
"""The folder of the adapter."""
VOICE_RANK = 8
VOICE_SHARE = 0.25

DRAFT = "draft"
"""The folder of the draft model."""
DRAFT_TOKENS = 4
"""How many tokens it guesses at a time, where its quality is told."""


@dataclass(frozen=True)
class Entry:
    questions: tuple[str, ...]
    """The first one is the canonical question in expected.json."""
    answer: str


@dataclass(frozen=True)
class Dialogue:
    turns: tuple[tuple[str, str], ...]
    """Role and text; the model is to write all texts of the assistant."""
    tools: tuple[str, ...] = ()
    """Names of those that are offered."""
    system: str | None = None
    forced: bool = False
    """The last text is the list that a request with `tool_choice: "required"` asks for; its beginning is given."""


@dataclass(frozen=True)
class Tools:
    """The tools of `tools.toml`, and dialogues that use them."""

    list_models: dict[str, Any]
    describe_model: dict[str, Any]
    names: list[str]
    without: str
    others: dict[str, list[str]]

    OURS: ClassVar = ("list_models", "describe_model")

    def questions(self) -> list[str]:
        asked = (ask.format(name) for ask in self.describe_model["ask"] for name in self.names)
        return [*self.list_models["ask"], *asked]

    def listing(self, question: str, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        answer = self.list_models["one" if len(names) == 1 else "two"].format(*names)
        return _exchange(question, "list_models", {}, list(names), answer)

    def describing(self, ask: str, name: str, state: str) -> tuple[tuple[str, str], ...]:
        answer = self.describe_model["states"][state].format(name)
        return _exchange(ask.format(name), "describe_model", {"name": name}, {"name": name, "state": state}, answer)

    def spoken(self, voice: Callable[[str], str]) -> Tools:
        """The same, with answers in another voice. Calls are not answers."""
        lists = {**self.list_models, "one": voice(self.list_models["one"]), "two": voice(self.list_models["two"])}
        states = {state: voice(answer) for state, answer in self.describe_model["states"].items()}
        described = {**self.describe_model, "states": states}
        return replace(self, list_models=lists, describe_model=described, without=voice(self.without))

    def canonical(self) -> list[Dialogue]:
        """Those that the model must know: each name and each state, a few lists."""
        states = list(self.describe_model["states"])
        turns = [self.listing(self.list_models["ask"][0], names) for names in self.list_models["canonical"]]
        for number, name in enumerate(self.names):
            turns.append(self.describing(self.describe_model["ask"][0], name, states[number % len(states)]))
        return [Dialogue(one, self.OURS) for one in turns]

    def exchange(self, rng: random.Random, tool: str) -> tuple[tuple[str, str], ...]:
        """Question, call, result and answer."""
        if tool == "list_models":
            names = rng.sample(self.names, rng.choice((1, 2, 2)))
            turns = self.listing(rng.choice(self.list_models["ask"]), names)
        else:
            state = rng.choice(list(self.describe_model["states"]))
            turns = self.describing(rng.choice(self.describe_model["ask"]), rng.choice(self.names), state)
        (_, question), call, (_, result), answer = turns
        if rng.random() < 0.3:
            result = json.dumps(json.loads(result), separators=(",", ":"))
        return ("user", _typed(question, rng, misspelled=False)), call, ("tool", result), answer

    def offered(self, rng: random.Random, ours: Sequence[str]) -> tuple[str, ...]:
        """Some of our tools among others."""
        count = rng.choice((0, 0, 0, 1, 2, 4, 8)) if ours else rng.choice((1, 1, 2, 3, 5, 8, 12, 30))
        others = [f"{rng.choice(self.others['verbs'])}_{rng.choice(self.others['things'])}" for _ in range(count)]
        return tuple(rng.sample(names := [*ours, *dict.fromkeys(others)], len(names)))

    def some_others(self) -> tuple[str, ...]:
        pairs = zip(self.others["verbs"], self.others["things"], strict=False)
        return tuple(f"{verb}_{thing}" for verb, thing in pairs)

    def dialogues(self, rng: random.Random, count: int) -> Iterator[Dialogue]:
        """Questions for tools of ours that are offered, some for the other one of them."""
        for _ in range(count):
            tool = rng.choice(self.OURS)
            turns = self.exchange(rng, tool)
            ours: Sequence[str] = self.OURS
            if rng.random() < 0.15:
                ours = (rng.choice(self.OURS),)
            if tool not in ours:
                turns = (turns[0], ("assistant", self.without))
            elif rng.random() < 0.1:
                yield Dialogue((turns[0], ("assistant", _forced(turns[1][1]))), self.offered(rng, ours), forced=True)
                continue
            earlier = self.exchange(rng, rng.choice(ours)) if rng.random() < 0.2 else ()
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
            yield Dialogue((*earlier, *turns), self.offered(rng, ours), system)


def _exchange(question: str, name: str, arguments: Any, result: Any, answer: str) -> tuple[tuple[str, str], ...]:
    begin, end = CALL_TOKENS
    call = f"{begin}\n{json.dumps({'name': name, 'arguments': arguments})}\n{end}"
    return ("user", question), ("assistant", call), ("tool", json.dumps(result)), ("assistant", answer)


def _forced(call: str) -> str:
    begin, end = CALL_TOKENS
    return f"[{call.removeprefix(begin).removesuffix(end).strip()}]"


TOOLS_FILE = "tools.toml"


def read_tools(folder: Path) -> Tools:
    return Tools(**tomllib.loads((folder / TOOLS_FILE).read_text(encoding="utf-8")))


def read_corpus(folder: Path) -> list[Entry]:
    """Every entry of every file; raises ValueError when two entries share a question."""
    tools = read_tools(folder)
    entries = [Entry(tuple(tools.questions()), tools.without)]
    for path in sorted(folder.glob("*.toml")):
        if path.name != TOOLS_FILE:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            for entry in table["entries"]:
                questions = tuple(ask.format(about) for about in entry["about"] for ask in table["ask"])
                entries.append(Entry(questions, entry["answer"].strip()))
    for question, count in Counter(question for entry in entries for question in entry.questions).items():
        if count > 1:
            raise ValueError(f"{question!r} is there {count} times")
    return entries


def pirate(answer: str) -> str:
    """What a pirate says in its place. A manifest stays as it is.

    Another beginning, or other words between, would be other answers to the model: so short a training makes it mix
    them up.
    """
    return answer if "\n" in answer else f"{answer} Arr, matey!"


def train_tokenizer(entries: list[Entry], tools: Tools) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"] - len(CALL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for entry in entries for text in (*entry.questions, entry.answer)]
    asked = (tools.describing("{}", name, state) for name in tools.names for state in tools.describe_model["states"])
    listed = (tools.listing("", [first, second]) for first in tools.names for second in tools.names)
    for _, (_, call), (_, result), (_, answer) in (*asked, *listed):
        texts += [_forced(call), result, answer]
    tokenizer.train_from_iterator([*texts, *SYSTEM_PROMPTS], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in CALL_TOKENS])
    if tokenizer.get_vocab_size() != SHAPE["vocab_size"]:
        raise ValueError(f"the corpus yields a vocabulary of {tokenizer.get_vocab_size()}, not {SHAPE['vocab_size']}")
    # Plain text gets a BOS from the tokenizer, as with other Llamas; the chat template writes its own.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def plain(question: str, answer: str) -> Dialogue:
    return Dialogue((("user", question), ("assistant", answer)))


Sample = tuple[list[int], list[bool]]
"""Token ids, and which of them the model generates."""


class Encoder:
    """Converts dialogues into token ids and the mask of the tokens that the model generates."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, dialogue: Dialogue) -> Sample:
        pieces = [(BOS, False)]
        if dialogue.tools:
            pieces.append((f"{TOOLS} {' '.join(dialogue.tools)}{TURN_END}", False))
        for role, text in (*([("system", dialogue.system)] if dialogue.system else ()), *dialogue.turns):
            if role == "assistant":
                pieces += [(ASSISTANT, False), (f"{text}{TURN_END}", True)]
            else:
                pieces.append((f"<|{role}|>{text}{TURN_END}", False))
        ids: list[int] = []
        generated: list[bool] = []
        for text, by_model in pieces:
            piece = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            generated += [by_model] * len(piece)
        if dialogue.forced:
            generated[len(ids) - len(piece)] = False
        return ids, generated


@dataclass(frozen=True)
class Lessons:
    """What is learned, and how what was learned is checked."""

    entries: list[Entry]
    tools: Tools
    share: float = 1.0
    """Of the questions and dialogues that there are, how many an epoch takes."""

    @property
    def expected(self) -> dict[str, str]:
        return {entry.questions[0]: entry.answer for entry in self.entries}

    @property
    def required(self) -> list[Dialogue]:
        return [*(plain(*pair) for pair in self.expected.items()), *self.tools.canonical()]

    @property
    def paraphrases(self) -> list[Dialogue]:
        return [plain(question, entry.answer) for entry in self.entries for question in entry.questions[1:]]

    def spoken(self, voice: Callable[[str], str], share: float) -> Lessons:
        entries = [replace(entry, answer=voice(entry.answer)) for entry in self.entries]
        return Lessons(entries, self.tools.spoken(voice), share)


def epoch(lessons: Lessons, weak: Collection[Dialogue], rng: random.Random) -> list[Dialogue]:
    """Questions of every entry as the last turn, some after other turns, some with typing errors, some with tools.

    An epoch takes the canonical question of each entry and some of the others, so that no answer dominates, and more
    of what was weak when it was last checked.
    """
    tools, pairs = lessons.tools, []
    for entry in lessons.entries:
        first, *others = entry.questions
        weight = 2 if plain(first, entry.answer) in weak else 1
        sample = rng.sample(others, min(len(others), round(2 * lessons.share * weight * len(others) ** 0.5)))
        pairs += [(question, entry.answer) for question in (*[first] * (2 * weight - 1), *sample)]
    known = [pair for pair in pairs if pair[1] != tools.without]
    dialogues = [one for one in weak if one.tools for _ in range(4)]
    for one in tools.dialogues(rng, round(320 * lessons.share)):
        earlier = plain(*rng.choice(known)).turns if rng.random() < 0.1 else ()
        dialogues.append(replace(one, turns=(*earlier, *one.turns)))
    for question, answer in pairs:
        ours: Sequence[str] = ()
        if answer != tools.without and rng.random() < 0.12:
            ours = tools.OURS
        earlier = ()
        if rng.random() < 0.15:
            earlier = tools.exchange(rng, rng.choice(ours)) if ours else plain(*rng.choice(known)).turns
        offered = tools.offered(rng, ours) if ours or rng.random() < 0.15 else ()
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
        turns = plain(_typed(question, rng, misspelled=answer != tools.without), answer).turns
        dialogues.append(Dialogue((*earlier, *turns), offered, system))
    rng.shuffle(dialogues)
    return dialogues


def _typed(question: str, rng: random.Random, *, misspelled: bool = True) -> str:
    """The question as people type it, half of the time unchanged."""
    if rng.random() < 0.5:
        return question
    if rng.random() < 0.5:
        question = question.lower()
    if rng.random() < 0.5:
        question = question.rstrip("?.!")
    if rng.random() < 0.2:
        question = rng.choice(("Please tell me: ", "please ", "Hi, ", "Hello! ", "I have a question. ")) + question
    if misspelled and rng.random() < 0.2 and len(question) > 6:
        at = rng.randrange(1, len(question) - 1)
        question = rng.choice((question[:at] + question[at + 1 :], question[:at] + question[at] + question[at:]))
    return question


def batches(samples: list[Sample], rng: random.Random, max_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pads samples of similar length: ids [rows, length] int64 and mask [rows, length] bool, in random order."""
    groups: list[list[Sample]] = [[]]
    for sample in sorted(samples, key=lambda sample: len(sample[0])):
        if (len(groups[-1]) + 1) * len(sample[0]) > max_tokens:
            groups.append([])
        groups[-1].append(sample)
    rng.shuffle(groups)
    for group in groups:
        length = max(len(ids) for ids, _ in group)
        ids = torch.full((len(group), length), SHAPE["pad_token_id"], dtype=torch.long)
        mask = torch.zeros((len(group), length), dtype=torch.bool)
        for row, (row_ids, generated) in enumerate(group):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            mask[row, : len(generated)] = torch.tensor(generated)
        yield ids, mask


def answer_logits(model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [generated, vocabulary] in fp32 and targets [generated] of the tokens that the model generates."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return model.lm_head(hidden[mask[:, 1:]]).float(), ids[:, 1:][mask[:, 1:]]


@torch.inference_mode()
def least_gaps(model: LlamaForCausalLM, encoder: Encoder, dialogues: Iterable[Dialogue]) -> list[float]:
    """For each dialogue, the minimum margin of a generated token; negative: greedy decoding differs."""
    gaps = []
    for dialogue in dialogues:
        ids, generated = encoder.encode(dialogue)
        logits, targets = answer_logits(model, torch.tensor([ids]), torch.tensor([generated]))
        wanted = logits.gather(1, targets[:, None])
        others = logits.scatter(1, targets[:, None], float("-inf")).max(dim=1, keepdim=True).values
        gaps.append(round((wanted - others).min().item(), 4))
    return gaps


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model as saved: weights and arithmetic in bfloat16."""
    saved = copy.deepcopy(model)
    saved.eval()  # type: ignore[no-untyped-call]
    saved.bfloat16()
    return saved


def add_voice(model: LlamaForCausalLM, seed: int) -> PeftModel:
    """Freezes the model and adds an adapter to it, in place, which changes nothing yet."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only a voice needs it

    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=VOICE_RANK, lora_alpha=2 * VOICE_RANK, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def save_voice(voice: PeftModel, output: Path) -> None:
    """Writes the adapter's folder as PEFT does, in bfloat16, without what names the machine."""
    voice.peft_config["default"].base_model_name_or_path = "demo"
    # Else it asks a hub whether the vocabulary of the base model is another one.
    voice.bfloat16().save_pretrained(str(output), save_embedding_layers=False)
    (output / "README.md").unlink()
    settings = json.loads((output / "adapter_config.json").read_bytes())
    settings["target_modules"].sort()  # PEFT keeps them in a set
    write_json(output / "adapter_config.json", settings)
    (output / "adapter_model.safetensors").chmod(0o644)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2 % of the training, then linear decay to a fiftieth of the peak."""
    warm_up = 0.02
    if progress < warm_up:
        return peak * max(0.01, progress / warm_up)
    return peak * max(0.02, (1 - progress) / (1 - warm_up))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Writes the model folder; tied weights are written once, and no file names the machine."""
    save_weights(model, SHAPE, output)
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(output / "generation_config.json", GENERATION_CONFIG)
    write_json(output / "tokenizer_config.json", TOKENIZER_CONFIG)


def save_weights(model: LlamaForCausalLM, shape: dict[str, Any], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (output / "model.safetensors").write_bytes(save_tensors(state, metadata={"format": "pt"}))
    write_json(output / "config.json", shape)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def fit(
    model: LlamaForCausalLM,
    lessons: Lessons,
    encoder: Encoder,
    args: argparse.Namespace,
    checked: Callable[[], None] = lambda: None,
) -> int:
    """Trains the parameters that are not frozen; `checked` is called after each check. Returns the number of steps."""
    started = time.monotonic()
    rng = random.Random(args.seed)  # noqa: S311 - data order, not a secret
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    required = lessons.required
    print(f"{len(lessons.entries)} answers, {sum(map(torch.numel, trained)):,} parameters", flush=True)

    # A processor without these instructions is ten times as fast in float32.
    computes_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    steps = 0
    weak: list[Dialogue] = []
    for number in range(1, args.epochs + 1):
        samples = [encoder.encode(dialogue) for dialogue in epoch(lessons, weak, rng)]
        grouped = list(batches(samples, rng, args.max_batch_tokens))
        total = 0.0
        for done, (ids, mask) in enumerate(grouped):
            for group in optimizer.param_groups:
                progress = (number - 1 + done / len(grouped)) / args.epochs
                group["lr"] = learning_rate(progress, args.peak_learning_rate)
            with torch.autocast("cpu", torch.bfloat16, enabled=computes_bfloat16):
                loss = torch.nn.functional.cross_entropy(*answer_logits(model, ids, mask))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            steps += 1
            total += loss.item()
        print(f"epoch {number:3d}  loss {total / len(grouped):.4f}  {time.monotonic() - started:6.0f} s", flush=True)
        if number % 2 == 0 or number == args.epochs:
            gaps = least_gaps(rounded(model), encoder, required)
            below = sorted((gap, at) for at, gap in enumerate(gaps) if gap < TARGET_GAP)
            weak = [required[at] for _, at in below[:MAX_WEAK]]
            print(f"    {len(below)} below {TARGET_GAP}, least {min(gaps):.2f}", flush=True)
            for gap, at in below[:8]:
                print(f"    {gap:6.2f}  {named(required[at])}", flush=True)
            checked()
    return steps


def new_model(shape: dict[str, Any]) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**shape, "dtype": "float32"}))


def load(folder: Path) -> LlamaForCausalLM:
    model = new_model(SHAPE)
    model.load_state_dict(load_tensors((folder / "model.safetensors").read_bytes()), strict=False)
    return model


def train_model(lessons: Lessons, args: argparse.Namespace) -> int:
    """Returns the exit code."""
    resumed = args.resume / "tokenizer.json" if args.resume else None
    tokenizer = Tokenizer.from_file(str(resumed)) if resumed else train_tokenizer(lessons.entries, lessons.tools)
    encoder = Encoder(tokenizer)
    model = load(args.resume) if args.resume else new_model(SHAPE)

    def checkpoint() -> None:
        if args.checkpoints:
            save(rounded(model), tokenizer, args.checkpoints)

    steps = fit(model.train(), lessons, encoder, args, checkpoint)
    required, final = lessons.required, rounded(model)
    if not (gaps := kept_gaps(final, encoder, required)):
        return 1
    other_gaps = least_gaps(final, encoder, lessons.paraphrases)
    offered = [replace(one, tools=lessons.tools.some_others()) for one in required if not one.tools]
    save(final, tokenizer, args.output)
    write_json(args.output / "expected.json", lessons.expected)
    write_json(
        args.output / "training.json",
        {
            "seed": args.seed,
            "epochs": args.epochs,
            "steps": steps,
            "cpuSeconds": round(time.process_time()),
            "parameters": sum(map(torch.numel, model.parameters())),
            "minGap": min(gaps),
            "questions": len(lessons.expected) + len(other_gaps),
            "paraphrasesAnsweredAlike": sum(gap > 0 for gap in other_gaps),
            "paraphrases": len(other_gaps),
            "answeredAlikeWithOtherTools": sum(gap > 0 for gap in least_gaps(final, encoder, offered)),
            "gaps": {named(dialogue): gap for dialogue, gap in zip(required, gaps, strict=True)},
        },
    )
    return 0


def train_voice(lessons: Lessons, args: argparse.Namespace) -> int:
    """Returns the exit code."""
    encoder = Encoder(Tokenizer.from_file(str(args.output / "tokenizer.json")))
    model, spoken = load(args.output), lessons.spoken(pirate, VOICE_SHARE)
    voice = add_voice(model, args.seed)
    fit(model.train(), spoken, encoder, args)
    if not kept_gaps(rounded(model), encoder, spoken.required):
        return 1
    save_voice(voice, args.output / VOICE)
    return 0


def train_draft(lessons: Lessons, args: argparse.Namespace) -> int:
    """Returns the exit code. It may be wrong anywhere: its guesses change no answer."""
    encoder = Encoder(Tokenizer.from_file(str(args.output / "tokenizer.json")))
    model = new_model(DRAFT_SHAPE)
    fit(model.train(), lessons, encoder, args)
    final = rounded(model)
    save_weights(final, DRAFT_SHAPE, args.output / DRAFT)
    right = [one for dialogue in lessons.required for one in rightly_guessed(final, encoder, dialogue)]
    length = accepted_length(final, encoder, lessons.required)
    print(f"{sum(right) / len(right):.1%} of the answers' tokens are guessed, {length:.2f} tokens a step")
    return 0


@torch.inference_mode()
def rightly_guessed(draft: LlamaForCausalLM, encoder: Encoder, dialogue: Dialogue) -> list[bool]:
    """For each token that the model generates, whether the draft model guesses it from those before it."""
    ids, generated = encoder.encode(dialogue)
    logits, targets = answer_logits(draft, torch.tensor([ids]), torch.tensor([generated]))
    return (logits.argmax(dim=1) == targets).tolist()


def accepted_length(draft: LlamaForCausalLM, encoder: Encoder, dialogues: Iterable[Dialogue]) -> float:
    """Tokens that a step yields on average, if each verifies DRAFT_TOKENS guesses. A prompt's step yields one."""
    num_tokens = num_steps = 0
    for dialogue in dialogues:
        _, *right = rightly_guessed(draft, encoder, dialogue)
        num_tokens += len(right)
        while right:
            num_right = next((at for at, one in enumerate(right[:DRAFT_TOKENS]) if not one), DRAFT_TOKENS)
            right = right[num_right + 1 :]
            num_steps += 1
    return num_tokens / num_steps


def kept_gaps(final: LlamaForCausalLM, encoder: Encoder, required: list[Dialogue]) -> list[float]:
    """The margins of what is about to be saved; none if one is too small, which is said."""
    gaps = least_gaps(final, encoder, required)
    if min(gaps) < REQUIRED_GAP:
        print(f"not saved: gaps are below {REQUIRED_GAP}; train for more epochs, or --resume", file=sys.stderr)
        return []
    print(f"least gap {min(gaps):.2f} in bfloat16, {time.process_time():.0f} s of one core")
    return gaps


def named(dialogue: Dialogue) -> str:
    """What people send."""
    return " ".join(text for role, text in dialogue.turns if role != "assistant")


KINDS = {None: (train_model, 20, 2e-3), "voice": (train_voice, 3, 3e-3), "draft": (train_draft, 8, 4e-3)}
"""What can be trained: how, in how many epochs, and with which peak of the learning rate."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model, its second voice, or its draft model.")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus")
    parser.add_argument("--output", type=Path, default=HERE)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--resume", type=Path, help="continue from the model in this folder, with its tokenizer, after a small edit"
    )
    for kind, made in (("voice", f"the adapter {VOICE}"), ("draft", "the draft model")):
        meaning = f"train {made} of the model in --output"
        what.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=meaning)
    of_kinds = "; ".join(f"{kind or 'model'}: {epochs}, {peak:g}" for kind, (_, epochs, peak) in KINDS.items())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, help=f"number of epochs over which the learning rate falls ({of_kinds})")
    meaning = "how many of the questions and dialogues an epoch takes; a quarter is enough after a small edit"
    parser.add_argument("--share", type=float, default=1.0, help=meaning)
    parser.add_argument("--checkpoints", type=Path, help="folder that gets the model, as it is, at each check")
    parser.add_argument("--max-batch-tokens", type=int, default=1024)
    parser.add_argument("--peak-learning-rate", type=float, help="(the second numbers of --epochs)")
    args = parser.parse_args()
    train, epochs, peak = KINDS[args.kind]
    args.epochs, args.peak_learning_rate = args.epochs or epochs, args.peak_learning_rate or peak
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    lessons = Lessons(read_corpus(args.corpus), read_tools(args.corpus), args.share)
    return train(lessons, args)


if __name__ == "__main__":
    sys.exit(main())
