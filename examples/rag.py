#!/usr/bin/env python3
"""A tour of retrieval: finds the paragraphs of some pages that a question is about, and lets a chat model answer with
them.

    neuron-operator local -f examples/neuronmodel-local.yaml               # in another terminal
    neuron-operator local -f examples/embedding-local.yaml --port 8001     # in a third one
    python examples/rag.py --count 1
    python examples/rag.py --pages README.md notes -- "What do the notes say?"

It needs the package `openai`. One model makes a vector of each paragraph and of the question; the paragraphs whose
vectors are nearest go to the chat model, before the question. The demo model answers what it has learned, reads none of
them, and long ones confuse it: name a larger one to have answers from your pages.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul
from pathlib import Path

import openai

PAGES = [Path(__file__).resolve().parents[1] / "docs"]
QUESTIONS = (
    "How do I require API keys?",
    "What happens when the queue is full?",
    "How do I scale a model?",
)
SHORTEST = 80
"""Characters of a paragraph: what is shorter says little without the lines around it."""
AT_ONCE = 64
"""Paragraphs in one request."""
CUT = {"truncate_prompt_tokens": -1}
"""A paragraph that is longer than the model reads is found by its beginning."""
INSTRUCTION = "Answer with what these paragraphs say. If they do not say it, say so."


@dataclass(frozen=True)
class Paragraph:
    page: str
    text: str
    """With its heading."""


def paragraphs(pages: list[Path]) -> Iterator[Paragraph]:
    """Those of Markdown files and of folders with such files, without code and tables."""
    files = [file for page in pages for file in (sorted(page.rglob("*.md")) if page.is_dir() else [page])]
    for file in files:
        heading = ""
        for block in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)):
            if found := re.match(r"#+ (.*)", block):
                heading = found[1]
            elif len(block) >= SHORTEST and not block.lstrip().startswith("|"):
                text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", f"{heading}: {block}")
                yield Paragraph(file.name, " ".join(text.split()))


def vectors(client: openai.OpenAI, model: str, texts: list[str]) -> list[list[float]]:
    """One of length one for each text."""
    found: list[list[float]] = []
    for start in range(0, len(texts), AT_ONCE):
        some = texts[start : start + AT_ONCE]
        answer = client.embeddings.create(model=model, input=some, extra_body=CUT)
        found += [one.embedding for one in answer.data]
    return [[number / math.hypot(*vector) for number in vector] for vector in found]


def nearest(vector: list[float], index: list[list[float]], count: int) -> list[tuple[float, int]]:
    """The cosines and places of the vectors that are most alike, the best first."""
    scored = ((sum(map(mul, vector, other)), at) for at, other in enumerate(index))
    return sorted(scored, reverse=True)[:count]


def answer(client: openai.OpenAI, model: str, question: str, found: list[Paragraph]) -> str:
    """What the chat model says, which reads the paragraphs before the question."""
    read = "\n\n".join((INSTRUCTION, *(one.text for one in found)))
    messages = [{"role": "system", "content": read}, {"role": "user", "content": question}]
    said = client.chat.completions.create(model=model, messages=messages, temperature=0)  # type: ignore[arg-type]
    return said.choices[0].message.content or ""


def shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a chat model about pages, with what an embedding model finds.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="Markdown files, or folders of them")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="of the chat model (%(default)s)")
    parser.add_argument("--embed-url", default="http://127.0.0.1:8001/v1", help="of the embedding model (%(default)s)")
    parser.add_argument("--model", help="the name of the chat model (by default the first that its server lists)")
    parser.add_argument("--embed-model", help="the same of the embedding model")
    parser.add_argument("--count", type=int, default=3, help="paragraphs for a question (%(default)s)")
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    url = args.embed_url
    try:
        embedder = openai.OpenAI(base_url=url, api_key=key)
        embeds = args.embed_model or embedder.models.list().data[0].id
        read = list(paragraphs(args.pages))
        index = vectors(embedder, embeds, [one.text for one in read])
        print(f"{len(read)} paragraphs of {len({one.page for one in read})} pages, {len(index[0])} numbers each\n")
        chats = openai.OpenAI(base_url=args.base_url, api_key=key)
        for question in args.questions:
            print(f"> {question}")
            url = args.embed_url
            found = nearest(vectors(embedder, embeds, [question])[0], index, args.count)
            for score, at in found:
                print(f"  {score:.2f}  {read[at].page}  {shortened(read[at].text)}")
            url = args.base_url
            model = args.model or chats.models.list().data[0].id
            print(f"{answer(chats, model, question, [read[at] for _, at in found])}\n")
    except openai.APIError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
