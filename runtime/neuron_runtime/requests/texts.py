"""How requests for a model, or for one of its adapters, become tokens: its tokenizer, chat templates and defaults.

Read from the files in its folder, and from the options of whoever serves it, by the front end and by `LLM`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from neuron_runtime.adapters.peft import reading
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import TextOptions
from neuron_runtime.core import Task
from neuron_runtime.errors import InvalidConfig
from neuron_runtime.recipes import Recipe, read_recipe
from neuron_runtime.requests.generation_defaults import GenerationDefaults, adapted_defaults, load_generation_defaults
from neuron_runtime.text.reasoning import REASONING_PARSERS, Marks
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer
from neuron_runtime.text.tool_calls import TOOL_PARSERS, ToolFormat, recognized


@dataclass(frozen=True, eq=False)
class Text:
    """Text settings of a model or an adapter."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    reasoning: Marks | None = None
    """How the model marks its reasoning; None: reasoning stays in the text."""
    tool_format: ToolFormat | None = None
    """How the model writes calls of tools; None: not known."""
    recipe: Recipe | None = None
    """How texts become vectors; None: they do not."""


def load_text(model_dir: Path, options: TextOptions, task: Task = "generate") -> Text:
    """Of a model. Raises FatalError."""
    tokenizer = load_tokenizer(model_dir, options.chat_template)
    defaults = load_generation_defaults(
        model_dir, tokenizer.eos_token_id, options.generation_config, tokenizer.answer_end_id
    )
    reasoning = REASONING_PARSERS[options.reasoning_parser] if options.reasoning_parser else None
    if reasoning is not None and tokenizer.hidden_tokens & {reasoning.start, reasoning.end}:
        message = f"{reasoning.start} is a special token of this model, which its text omits: leave the parser out"
        raise InvalidConfig("$.text.reasoningParser", message)
    recipe = None if task == "generate" else read_recipe(model_dir, read_config(model_dir))
    return Text(tokenizer, defaults, reasoning, _tool_format(tokenizer, options), recipe)


def adapted_text(base: Text, folder: Path, options: TextOptions) -> Text:
    """Of an adapter in a folder: its model's, but for what its own files say and the options do not.

    Raises FatalError: INVALID_ADAPTER, or ADAPTER_NOT_SUPPORTED if its chats need tokens that the model lacks.
    """
    with reading():
        tokenizer = base.tokenizer.adapted(folder, reads_template=not options.chat_template)
        defaults = adapted_defaults(base.defaults, folder, tokenizer, options.generation_config)
        return Text(tokenizer, defaults, base.reasoning, _tool_format(tokenizer, options))


def _tool_format(tokenizer: Tokenizer, options: TextOptions) -> ToolFormat | None:
    if options.tool_call_parser:
        return TOOL_PARSERS[options.tool_call_parser]
    template = tokenizer.tool_template
    return None if template is None else recognized(template.source)
