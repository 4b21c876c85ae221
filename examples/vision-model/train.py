#!/usr/bin/env python3
"""Trains the vision model: a small Pixtral that says which shapes a drawn picture has, of which colours and how many.

    python examples/vision-model/train.py --output examples/vision-model --checkpoint /tmp/vision.pt

Draws pictures of a few circles, squares and triangles, asks questions about them, trains a byte-level BPE tokenizer, a
vision tower and a decoder of some million parameters together, and saves them if the bfloat16 weights answer questions
about pictures that it has not seen. Writes the files of a Hugging Face model folder, the picture `shapes.png` and
`training.json` (statistics). Run by hand; half an hour of one core. Tests only read its results.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlavaConfig, LlavaForConditionalGeneration

HERE = Path(__file__).resolve().parent

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, TURN_END, IMAGE, BREAK, END = SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end_of_turn|>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('the roles are system, user and assistant, not ' ~ message['role']) }}
    {%- endif %}
    {{- '<|' ~ message['role'] ~ '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] if part['type'] == 'image' %}
            {{- '[IMG]' }}
        {%- endfor %}
        {%- for part in message['content'] if part['type'] == 'text' %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end_of_turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

PATCH, LONGEST = 8, 48
"""Pixels of a patch's side, and of the longer side of what the tower sees: larger pictures are made smaller."""

SHAPE: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "dtype": "bfloat16",
    "image_token_index": SPECIAL_TOKENS.index(IMAGE),
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 425,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 24,
        "image_size": LONGEST,
        "patch_size": PATCH,
        "num_channels": 3,
        "hidden_act": "silu",
        "rope_theta": 100.0,
        "initializer_range": 0.02,
    },
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "additional_special_tokens": [SYSTEM, USER, ASSISTANT, TURN_END, IMAGE, BREAK, END],
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": SHAPE["text_config"]["max_position_embeddings"],
}
FILES: dict[str, Any] = {
    "config.json": SHAPE,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "generation_config.json": {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)],
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "do_sample": False,
    },
    "preprocessor_config.json": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": LONGEST},
        "patch_size": {"height": PATCH, "width": PATCH},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    },
    "processor_config.json": {"processor_class": "PixtralProcessor", "patch_size": PATCH},
}
"""Beside the tokenizer, the template and the weights."""

# Pictures

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 70),
    "blue": (50, 80, 215),
    "yellow": (245, 210, 50),
    "black": (25, 25, 25),
}
KINDS = ("circle", "square", "triangle")
NUMBERS = ("no", "one", "two", "three")
MOST = len(NUMBERS) - 1
"""Shapes of a picture."""
NO_PICTURE = "I see no picture."

REQUIRED = 0.95
"""The share of questions about unseen pictures whose answers must be right."""
SORTS_WEIGHT = 3.0
"""Of what the tower alone learns, beside the answers."""
UNSEEN = 100_003
"""The seed of the pictures for that; those of the training come from others."""


@dataclass(frozen=True)
class Thing:
    """A shape of a picture. x, y, radius: in pixels of what the tower sees."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    paint: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    width: float
    height: float
    things: tuple[Thing, ...]
    paper: tuple[int, int, int] = (255, 255, 255)

    def groups(self, kind: str = "", colour: str = "") -> list[tuple[str, str, int]]:
        """Kind, colour and number of what is there, of one kind or colour or of all, always in the same order."""
        found = []
        for one in KINDS:
            for other in COLOURS:
                count = sum((thing.kind, thing.colour) == (one, other) for thing in self.things)
                if count and kind in ("", one) and colour in ("", other):
                    found.append((one, other, count))
        return found


PICTURE = Scene(
    48,
    36,
    (
        Thing("circle", "red", 36, 25, 8, COLOURS["red"]),
        Thing("square", "blue", 11, 12, 8, COLOURS["blue"]),
        Thing("square", "blue", 28, 8, 6.5, COLOURS["blue"]),
    ),
)
"""In `shapes.png`."""


def random_scene(rng: random.Random, width: float, height: float) -> Scene:
    """One side may be up to six pixels shorter, which makes no patch less."""
    if rng.random() < 0.5:
        shorter = rng.uniform(0.0, 6.0)
        width, height = (width - shorter, height) if width < height else (width, height - shorter)
    return filled(rng, width, height)


def filled(rng: random.Random, width: float, height: float) -> Scene:
    """Few shapes that do not touch each other."""
    largest = 8.5
    things: list[Thing] = []
    count = rng.randint(1, MOST)
    # Few kinds and colours, so that there often are several of a sort.
    sorts = [(rng.choice(KINDS), rng.choice([*COLOURS])) for _ in range(rng.randint(1, MOST))]
    while len(things) < count:
        radius = rng.uniform(6.0, largest)
        for _ in range(60):
            x, y = rng.uniform(radius + 1, width - radius - 1), rng.uniform(radius + 1, height - radius - 1)
            if all(math.hypot(x - one.x, y - one.y) > radius + one.radius + 1 for one in things):
                kind, colour = rng.choice(sorts)
                paint = tuple(min(255, max(0, value + rng.randint(-20, 20))) for value in COLOURS[colour])
                things.append(Thing(kind, colour, x, y, radius, paint))  # type: ignore[arg-type]
                break
        else:
            things, largest = [], max(6.0, largest - 0.5)
    return Scene(width, height, tuple(things), (rng.randint(238, 255),) * 3)


def draw(scene: Scene, scale: float) -> Image.Image:
    """scale: pixels of the picture for one that the tower sees."""
    image = Image.new("RGB", (round(scene.width * scale), round(scene.height * scale)), scene.paper)
    canvas = ImageDraw.Draw(image)
    for thing in scene.things:
        x, y, r = (value * scale for value in (thing.x, thing.y, thing.radius))
        if thing.kind == "circle":
            canvas.ellipse((x - r, y - r, x + r, y + r), fill=thing.paint)
        elif thing.kind == "square":
            side = 0.84 * r
            canvas.rectangle((x - side, y - side, x + side, y + side), fill=thing.paint)
        else:
            half, foot = r * math.sqrt(3) / 2, y + r / 2
            canvas.polygon([(x, y - r), (x - half, foot), (x + half, foot)], fill=thing.paint)
    return image


def seen(image: Image.Image) -> torch.Tensor:
    """The pixels that the model's processor makes of a picture: [3, height, width]."""
    ratio = max(image.width / LONGEST, image.height / LONGEST, 1.0)
    width, height = (-(-math.floor(side / ratio) // PATCH) * PATCH for side in image.size)
    small = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    return torch.from_numpy(small / 127.5 - 1.0).permute(2, 0, 1)


def sorts(scene: Scene) -> torch.Tensor:
    """For each patch the sort of shape whose middle it has, counted from one; 0: none."""
    columns, rows = (math.ceil(side / PATCH) for side in (scene.width, scene.height))
    found = torch.zeros(columns * rows, dtype=torch.long)
    for thing in scene.things:
        sort = KINDS.index(thing.kind) * len(COLOURS) + [*COLOURS].index(thing.colour)
        row, column = int(thing.y / scene.height * rows), int(thing.x / scene.width * columns)
        found[row * columns + column] = 1 + sort
    return found


# Questions


def listed(groups: Sequence[tuple[str, str, int]]) -> str:
    """Such as: a red circle and two blue squares."""
    named = [f"a {colour} {kind}" if n == 1 else f"{NUMBERS[n]} {colour} {kind}s" for kind, colour, n in groups]
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))


def there(groups: Sequence[tuple[str, str, int]]) -> str:
    return f"there {'is' if groups[0][2] == 1 else 'are'} {listed(groups)}"


def counted(count: int, what: str) -> str:
    return f"There is {NUMBERS[count]} {what}." if count < 2 else f"There are {NUMBERS[count]} {what}s."


def upper(text: str) -> str:
    return text[0].upper() + text[1:]


def what_is_there(scene: Scene, rng: random.Random) -> tuple[str, str]:
    asked = (
        "What is in the picture?",
        "What is in this picture?",
        "What do you see?",
        "What can you see in the picture?",
        "Describe the picture.",
        "Describe this image.",
        "What is in this image?",
        "What shapes are there?",
        "What does the picture show?",
    )
    return rng.choice(asked), upper(listed(scene.groups())) + "."


def which_colour(scene: Scene, rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(KINDS) if rng.random() < 0.2 else rng.choice(scene.things).kind
    groups = scene.groups(kind)
    word = rng.choice(("colour", "color"))
    asked = (f"What {word} is the {kind}?", f"Which {word} does the {kind} have?", f"What is the {word} of the {kind}?")
    if not groups:
        answer = f"There is no {kind}."
    elif sum(count for *_, count in groups) == 1:
        answer = f"The {kind} is {groups[0][1]}."
    else:
        asked = (*asked, f"What {word} are the {kind}s?")
        answer = upper(there(groups)) + "."
    return rng.choice(asked), answer


def which_kind(scene: Scene, rng: random.Random) -> tuple[str, str]:
    colour = rng.choice([*COLOURS]) if rng.random() < 0.2 else rng.choice(scene.things).colour
    groups = scene.groups(colour=colour)
    answer = upper(there(groups)) + "." if groups else f"Nothing is {colour}."
    return rng.choice((f"What is {colour}?", f"Which shape is {colour}?", f"Which shapes are {colour}?")), answer


def how_many(scene: Scene, rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(KINDS)
    asked = (f"How many {kind}s are there?", f"How many {kind}s do you see?", f"How many {kind}s are in the picture?")
    return rng.choice(asked), counted(sum(count for *_, count in scene.groups(kind)), kind)


def how_many_in_all(scene: Scene, rng: random.Random) -> tuple[str, str]:
    asked = ("How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?")
    return rng.choice(asked), counted(len(scene.things), "shape")


def is_there(scene: Scene, rng: random.Random) -> tuple[str, str]:
    thing = rng.choice(scene.things)
    kind = thing.kind if rng.random() < 0.7 else rng.choice(KINDS)
    colour = thing.colour if rng.random() < 0.7 else rng.choice([*COLOURS])
    groups = scene.groups(kind, colour)
    asked = (f"Is there a {colour} {kind}?", f"Do you see a {colour} {kind}?")
    return rng.choice(asked), f"Yes, {there(groups)}." if groups else f"No, there is no {colour} {kind}."


ASK: dict[Callable[[Scene, random.Random], tuple[str, str]], int] = {
    what_is_there: 3,
    which_colour: 4,
    which_kind: 3,
    how_many: 4,
    how_many_in_all: 1,
    is_there: 5,
}
"""Kinds of questions, and how often each is asked."""
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "Answer in one sentence.")


def ask(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A question about a picture, with its answer."""
    (kind,) = rng.choices([*ASK], [*ASK.values()])
    return kind(scene, rng)


def typed(question: str, rng: random.Random) -> str:
    """The question as people type it, most of the time unchanged."""
    if rng.random() < 0.15:
        question = question.lower()
    return question.rstrip("?.") if rng.random() < 0.15 else question


# Tokens


def train_tokenizer(rng: random.Random) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["text_config"]["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [NO_PICTURE, *SYSTEM_PROMPTS]
    for _ in range(5000):
        question, answer = ask(random_scene(rng, LONGEST, LONGEST), rng)
        texts += [typed(question, rng), answer]
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) != SHAPE["text_config"]["vocab_size"]:
        raise ValueError(f"the questions yield a vocabulary of {size}, not {SHAPE['text_config']['vocab_size']}")
    # Plain text gets a BOS from the tokenizer; the chat template writes its own.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


@dataclass(frozen=True)
class Sample:
    """A chat, or several about one picture."""

    ids: list[int]
    generated: list[bool]
    """Which of them the model generates."""
    chats: list[int]
    """The chat of each token, counted from one; 0: it is in all of them."""


class Encoder:
    """Token ids of questions about a picture, which stands before the first one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(
        self, turns: Sequence[tuple[str, str]], picture: str, *, system: str = "", apart: bool = False
    ) -> Sample:
        """picture: the tokens in its place; empty: there is none. apart: each question begins a chat."""
        pieces = [
            (f"{BOS}{SYSTEM}{system}{TURN_END}{USER}" if system else f"{BOS}{USER}", False, 0),
            (picture, False, 0),
        ]
        for number, (question, answer) in enumerate(turns):
            chat = number + 1 if apart else 0
            pieces += [(USER, False, 0)] if number and not apart else []
            pieces += [(question, False, chat), (f"{TURN_END}{ASSISTANT}", False, chat), (answer, True, chat)]
            pieces += [(TURN_END, True, chat)]
        sample = Sample([], [], [])
        for text, by_model, chat in pieces:
            if text not in self._known:
                self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids = self._known[text]
            sample.ids.extend(ids)
            sample.generated.extend([by_model] * len(ids))
            sample.chats.extend([chat] * len(ids))
        return sample


def in_place(width: int, height: int) -> str:
    """The tokens of a picture with so many pixels."""
    row = IMAGE * (width // PATCH)
    return f"{(row + BREAK) * (height // PATCH - 1)}{row}{END}"


@dataclass(frozen=True)
class Batch:
    """Pictures of one size, with questions about each.

    ids, generated, chats: [rows, length], as those of a sample. sorts: [rows, patches], see the function.
    """

    ids: torch.Tensor
    generated: torch.Tensor
    chats: torch.Tensor
    pixels: torch.Tensor | None = None
    sorts: torch.Tensor | None = None


def batch_of(samples: Sequence[Sample], **others: torch.Tensor) -> Batch:
    length = max(len(sample.ids) for sample in samples)

    def filled_up(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])

    return Batch(
        filled_up([sample.ids for sample in samples], SPECIAL_TOKENS.index(PAD)),
        filled_up([sample.generated for sample in samples], False),
        filled_up([sample.chats for sample in samples], -1),
        **others,
    )


def random_size(rng: random.Random) -> tuple[int, int]:
    """A square, or one side shorter."""
    sides = [LONGEST, rng.choice((LONGEST, LONGEST, LONGEST - PATCH, LONGEST - 2 * PATCH))]
    rng.shuffle(sides)
    return sides[0], sides[1]


def random_batch(encoder: Encoder, rng: random.Random, rows: int, questions: int) -> Batch:
    """questions: about each picture."""
    if rng.random() < 0.01:
        asked = [typed(ask(random_scene(rng, LONGEST, LONGEST), rng)[0], rng) for _ in range(rows)]
        return batch_of([encoder([(question, NO_PICTURE)], "") for question in asked])
    width, height = random_size(rng)
    apart = rng.random() < 0.8
    samples, pixels, patches = [], [], []
    for _ in range(rows):
        scene = random_scene(rng, width, height)
        turns = [ask(scene, rng) for _ in range(questions if apart else questions // 2)]
        turns = [(typed(question, rng), answer) for question, answer in turns]
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else ""
        samples.append(encoder(turns, in_place(width, height), system=system, apart=apart))
        pixels.append(seen(draw(scene, rng.uniform(1.0, 4.0))))
        patches.append(sorts(scene))
    return batch_of(samples, pixels=torch.stack(pixels), sorts=torch.stack(patches))


# Training


def new_model() -> LlavaForConditionalGeneration:
    return LlavaForConditionalGeneration(LlavaConfig(**{**SHAPE, "dtype": "float32"}))


def features(model: LlavaForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Of pictures of one size, as the tower has them: [pictures, patches, hidden size].

    The tower of transformers takes all pictures as one sequence with a mask, which costs the square of their number.
    """
    tower = model.model.vision_tower
    patches = tower.patch_conv(pixels)
    rows, columns = patches.shape[-2:]
    states = tower.ln_pre(patches.flatten(2).transpose(1, 2))
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    turned = tower.patch_positional_embedding(states, places.flatten(0, 1))
    return tower.transformer(states, attention_mask=None, position_embeddings=turned).last_hidden_state


def answer_logits(
    model: LlavaForConditionalGeneration, batch: Batch, made: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [generated, vocabulary] in float32 and targets [generated] of the tokens that the model generates.

    made: the features of the batch.
    """
    inputs = model.get_input_embeddings()(batch.ids)
    if made is not None:
        places = batch.ids == SHAPE["image_token_index"]
        inputs = inputs.masked_scatter(places[..., None], model.model.multi_modal_projector(made))
    chats, length = batch.chats, batch.ids.shape[1]
    before = torch.ones(length, length, dtype=torch.bool).tril()
    seen_by = before & ((chats[:, None, :] == chats[:, :, None]) | (chats[:, None, :] == 0))
    states = model.model.language_model(
        inputs_embeds=inputs,
        attention_mask=torch.zeros(seen_by.shape, dtype=inputs.dtype).masked_fill(~seen_by, -1e9)[:, None],
        position_ids=seen_by.sum(-1) - 1,
        use_cache=False,
    )
    hidden = states.last_hidden_state[:, :-1]
    generated = batch.generated[:, 1:]
    return model.lm_head(hidden[generated]).float(), batch.ids[:, 1:][generated]


def rounded(model: LlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """The model as saved: weights and arithmetic in bfloat16."""
    return copy.deepcopy(model).eval().bfloat16()


@torch.inference_mode()
def answered(model: LlavaForConditionalGeneration, encoder: Encoder, seed: int, batches: int) -> dict[str, list[bool]]:
    """For each kind of question, whether the greedy answer to each question is right, to its last token."""
    rng, found = random.Random(seed), {}  # noqa: S311 - data order, not a secret
    for kind in ASK:
        right: list[bool] = []
        for _ in range(batches):
            width, height = random_size(rng)
            scenes = [random_scene(rng, width, height) for _ in range(20)]
            batch = batch_of([encoder([kind(scene, rng)], in_place(width, height)) for scene in scenes])
            pixels = torch.stack([seen(draw(scene, rng.uniform(1.0, 4.0))) for scene in scenes])
            logits, targets = answer_logits(model, batch, features(model, pixels.to(model.dtype)))
            lengths = batch.generated.sum(1).tolist()
            right += [bool(one.all()) for one in (logits.argmax(-1) == targets).split(lengths)]
        found[kind.__name__] = right
    return found


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2 % of the training, then half a cosine down to a hundredth of the peak."""
    warm_up = 0.02
    if progress < warm_up:
        return peak * max(0.01, progress / warm_up)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))))


def fit(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, kept: dict[str, Any], args: argparse.Namespace
) -> float:
    """kept: a checkpoint, or nothing. Returns the CPU seconds that it took, with those of a run that it continues.

    A layer that is not kept tells the tower where shapes are and of which sort: answers alone teach it that slowly.
    """
    marks = torch.nn.Linear(SHAPE["vision_config"]["hidden_size"], 1 + len(KINDS) * len(COLOURS))
    trained = [*model.parameters(), *marks.parameters()]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    encoder, first, spent = Encoder(tokenizer), 0, 0.0
    if kept:
        model.load_state_dict(kept["model"])
        marks.load_state_dict(kept["marks"])
        optimizer.load_state_dict(kept["optimizer"])
        first, spent = kept["step"], kept["spent"]
    print(f"{sum(map(torch.numel, trained)):,} parameters, from step {first} on", flush=True)
    started, total, whole = time.process_time(), 0.0, 0.0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / args.steps, args.peak_learning_rate)
        rng = random.Random(f"{args.seed} {step}")  # noqa: S311 - data order, not a secret
        batch = random_batch(encoder, rng, args.rows, args.questions)
        alone = step < args.tower_steps and batch.pixels is not None
        loss, made = torch.zeros(()), None
        if batch.pixels is not None:
            made = features(model, batch.pixels)
            loss = loss + SORTS_WEIGHT * functional.cross_entropy(marks(made).flatten(0, 1), batch.sorts.flatten())
        if not alone:
            answers = functional.cross_entropy(*answer_logits(model, batch, made))
            loss, total = loss + answers, total + answers.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        whole += loss.item()
        if (step + 1) % 50 == 0:
            losses = f"answers {total / 50:.4f}  sorts {(whole - total) / 50 / SORTS_WEIGHT:.4f}"
            print(f"step {step + 1}  {losses}  {spent + time.process_time() - started:.0f} s", flush=True)
            total = whole = 0.0
        if (step + 1) % 250 == 0:
            shares = {kind: sum(right) / len(right) for kind, right in answered(model, encoder, 2, 3).items()}
            print("    " + ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()), flush=True)
            if args.checkpoint:
                now = {"model": model.state_dict(), "marks": marks.state_dict(), "optimizer": optimizer.state_dict()}
                now |= {"step": step + 1, "spent": spent + time.process_time() - started}
                torch.save({**now, "tokenizer": tokenizer.to_str()}, args.checkpoint)
    return spent + time.process_time() - started


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, output: Path) -> None:
    """Writes the model folder; no file names the machine."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    (output / "model.safetensors").write_bytes(save_tensors(tensors, metadata={"format": "pt"}))
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, content in FILES.items():
        write_json(output / name, content)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the vision model.")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--checkpoint", type=Path, help="a file that keeps a training, which another run continues")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4300)
    parser.add_argument("--tower-steps", type=int, default=400, help="so many first ones are of the tower alone")
    parser.add_argument("--rows", type=int, default=20, help="pictures of a step")
    parser.add_argument("--questions", type=int, default=8, help="about each picture")
    parser.add_argument("--peak-learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    kept = torch.load(args.checkpoint) if args.checkpoint and args.checkpoint.exists() else {}
    rng = random.Random(args.seed)  # noqa: S311 - data order, not a secret
    tokenizer = Tokenizer.from_str(kept["tokenizer"]) if kept else train_tokenizer(rng)
    model = new_model()
    seconds = fit(model, tokenizer, kept, args)
    final = rounded(model)
    found = answered(final, Encoder(tokenizer), UNSEEN, 20)
    shares = {kind: round(sum(right) / len(right), 4) for kind, right in found.items()}
    asked = sum(map(len, found.values()))
    share = sum(map(sum, found.values())) / asked
    print(f"{share:.1%} of {asked} answers about pictures that it has not seen are right: {shares}")
    if share < REQUIRED:
        print(f"less than {REQUIRED:.0%}: nothing is saved", file=sys.stderr)
        return 1
    save(final, tokenizer, args.output)
    draw(PICTURE, 10).save(args.output / "shapes.png")
    statistics = {
        "parameters": sum(map(torch.numel, final.parameters())),
        "steps": args.steps,
        "cpuSeconds": round(seconds),
        "asked": asked,
        "right": round(share, 4),
        "rightByKind": shares,
    }
    write_json(args.output / "training.json", statistics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
