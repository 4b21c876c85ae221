"""`LLM` and `SamplingParams`: a model in the caller's own process, with the arguments and outputs of vLLM's classes.

For scripts, notebooks and benchmarks; `from neuron_runtime import LLM, SamplingParams`. Scheduler and backend run on
the caller's thread, and what may be asked is decided by the same admission as in the server. It starts no process,
opens no port, and imports torch only when an `LLM` is made.

Contract: https://docs.vllm.ai/en/latest/api/vllm/entrypoints/llm.html
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from neuron_runtime.arguments import LLM_NAMES, default_weights_dir, llm_config, naming
from neuron_runtime.console import StageLines, say
from neuron_runtime.core import BackendLimits, FinishReason, Request, TokenEvent, TokenLogprobs
from neuron_runtime.engine.backends import backend_package, check_backend
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import BackendFailed, InvalidConfig, InvalidRequest
from neuron_runtime.not_built import Surface, refuse
from neuron_runtime.requests.admission import Admission, Ask
from neuron_runtime.requests.bodies import ChatBody, CompletionBody, typed
from neuron_runtime.requests.generation_defaults import load_generation_defaults
from neuron_runtime.requests.parameters import check_parameter_served, parameters_of
from neuron_runtime.requests.sampling_fields import DEFAULT_COMPLETION_TOKENS, SamplingFields
from neuron_runtime.text.choice_text import ChoiceText
from neuron_runtime.text.tokenizer import Tokenizer, load_tokenizer

MAX_SEED_BITS = 63

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, either with a `cache_salt`."""

Conversation = Sequence[Mapping[str, Any]]

Given = TypeVar("Given")


class SamplingParams(SamplingFields, kw_only=True):
    """How to continue a prompt; names and defaults are those of vLLM's class.

    Values out of range and parameters that are not built yet are refused when the object is made; values that depend on
    the model (lengths, the vocabulary) when a prompt is there. None means vLLM's default, not the model's.

    Raises:
        InvalidRequest: naming the parameter.
    """

    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    """None: as many as fit. More than fit are cut to what fits, as in vLLM."""
    logprobs: int | None = None
    """How many alternatives to report per token, the chosen one always; 0: only that one."""
    best_of: int | None = None
    detokenize: bool = True
    early_stopping: bool = False
    extra_args: dict[str, Any] | None = None
    guided_decoding: Any = None
    length_penalty: float = 1.0
    logits_processors: list[Any] | None = None
    spaces_between_special_tokens: bool = True
    structured_outputs: Any = None
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        for name, row in parameters_of(SamplingFields).items():
            if getattr(self, name) is None and row.default is not None:
                setattr(self, name, row.default)
        self.body({"prompt": [0]}, 1)

    def clone(self) -> SamplingParams:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def body(self, prompt: Mapping[str, Any], max_model_length: int) -> CompletionBody:
        """What the server would be asked. Raises InvalidRequest.

        prompt: the fields that say what is continued, which win over these parameters.
        """
        given = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not refuse(Surface.SAMPLING_PARAMS, name, value):
                given[name] = value
        if given["max_tokens"] is None:
            given["max_tokens"] = max_model_length
        return typed({**given, **prompt}, CompletionBody)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position; `rank` is its place among all tokens of the vocabulary, from 1."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """The token included that ended the answer, although its text is not."""
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """Per token, the chosen one first."""
    finish_reason: str | None
    """`stop` or `length`."""
    stop_reason: int | str | None
    """The stop string or stop token that ended the answer; None for the tokenizer's end token and for `length`."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """None where token ids alone were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    """Tokens of the prompt that were not computed because a prefix of them was cached."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per token of the prompt, the prompt's own one first; None for the first token, behind which nothing was known."""


class LLM:
    """A model, loaded and ready.

    Args:
        model: `org/name`, `hf://org/name[@revision]`, `file:///path`, or the path of a folder.
        device: "cpu" or "neuron"; left out: what this runtime was built for.
        seed: makes answers whose parameters have no seed of their own the same in every run; refused where a seed of
            `SamplingParams` is.
        revision: of a model on a hub.
        download_dir: where weights from a hub go.
        additional_config: `{"override_neuron_config": {...}}`, as vLLM's newer versions take it.
        arguments: `max_model_len`, `max_num_seqs`, `block_size` and whatever else vLLM's class has. They are honoured,
            or refused by name; see `arguments.LLM_ARGUMENTS` and `not_built.ROWS`.

    Raises:
        TypeError: an unknown argument.
        InvalidConfig: naming the argument that cannot be honoured, with the cure.
        FatalError: the model cannot be found, read or held.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        seed: int | None = None,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        additional_config: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        config = llm_config(model, arguments, device=device, revision=revision, additional_config=additional_config)
        with naming(LLM_NAMES):
            check_backend(config)
            from neuron_runtime.sources import materialize  # noqa: PLC0415  (brings a hub client)

            progress = StageLines()
            weights_dir = default_weights_dir() if download_dir is None else Path(download_dir)
            package = backend_package(config)
            self._model_dir = materialize(config.model, weights_dir, progress, with_weights=package.NEEDS_WEIGHTS)
            tokenizer = load_tokenizer(self._model_dir)
            source = config.text.generation_config
            defaults = load_generation_defaults(self._model_dir, tokenizer.eos_token_id, source)
            backend = package.load_backend(self._model_dir, config, progress)
            self._close = weakref.finalize(self, backend.close)
            if seed is not None:
                _check_seed(backend.limits)
            defaults = defaults.served(backend.limits)
            for setting in defaults.not_applied:
                say(f"generation_config.json: {setting} is not supported and not applied")
        backend.warm_up(progress)
        # Whoever asks waits for all answers anyway: nothing is gained by refusing what can run later.
        self._engine = Engine(backend, max_queued_requests=sys.maxsize)
        self._admission = Admission(
            tokenizer,
            backend.limits,
            config.served_names,
            defaults,
            max_queued_requests=sys.maxsize,
            cuts_max_tokens=True,
        )
        self._random = random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311
        self._ids = itertools.count()
        self._one_at_a_time = threading.Lock()
        self._ended = ""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; the outputs come in their order.

        Args:
            prompts: one or many, see `Prompt`.
            sampling_params: one for all, one for each, or None for the model's own defaults.
            use_tqdm: whether a progress bar is shown on stderr, or what makes one.
            priority: one number for each prompt, lower ones run first.
            prompt_token_ids: an older way to give token ids instead of `prompts`.

        Raises:
            InvalidRequest: naming the parameter, and the prompt where there are several. Nothing was computed.
            BackendFailed: this object cannot be used any more.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequest("exactly one of `prompts` and `prompt_token_ids` is needed", field="prompts")
        given = _listed(prompts if prompts is not None else prompt_token_ids)
        return self._run(
            given, _prompt_fields, sampling_params, priority=priority, lora_request=lora_request, use_tqdm=use_tqdm
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written with the model's chat template.

        Args:
            messages: each with `role` and `content`.
            options: `tools`, `chat_template` and others of vLLM's method; refused by name where they ask for anything.

        Raises: as `generate`.
        """
        options.pop("chat_template_content_format", None)  # how a template is told of images, and there are none
        common = {
            **options,
            "add_generation_prompt": add_generation_prompt,
            "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
        }
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages

        def prompt(conversation: Conversation) -> dict[str, Any]:
            body = typed({**common, "messages": conversation}, ChatBody, ignores_unknown=False)
            text = self._admission.chat_text(body.messages, body)
            # The template writes its own BOS.
            return {"prompt": text, "add_special_tokens": False}

        return self._run(
            conversations, prompt, sampling_params, priority=None, lora_request=lora_request, use_tqdm=use_tqdm
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when no parameters are given: the model's `generation_config.json`, else vLLM's defaults."""
        defaults = self._admission.defaults.sampling
        given = {name: value for name in defaults.__struct_fields__ if (value := getattr(defaults, name)) is not None}
        return SamplingParams(**given)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers loads it."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

        return AutoTokenizer.from_pretrained(str(self._model_dir), local_files_only=True)

    def close(self) -> None:
        """Release the device and the memory; also done when nothing refers to this object any more."""
        self._ended = self._ended or "it was closed"
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Given],
        fields_of: Callable[[Given], dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: Sequence[int] | None,
        lora_request: object,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        refuse(Surface.CALL, "lora_request", lora_request)
        params = _one_each(sampling_params, len(prompts), self.get_default_sampling_params, "sampling_params")
        priorities = _one_each(priority, len(prompts), lambda: 0, "priority")
        with self._one_at_a_time:
            if self._ended:
                raise BackendFailed(f"this LLM cannot be used any more ({self._ended}): make a new one")
            asked = []
            for number, (prompt, one, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
                with _naming_prompt(number, len(prompts)):
                    asked.append(self._admit(fields_of(prompt), one, rank))
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            with make_bar(
                total=len(asked), desc="Processed prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm
            ) as bar:
                self._finish(asked, bar)
            return [one.output() for one in asked]

    def _admit(self, prompt: dict[str, Any], params: SamplingParams, priority: int) -> _Asked:
        """Everything that can be wrong with a prompt and its parameters is said here. Raises InvalidRequest."""
        admission = self._admission
        given = {**prompt, "priority": priority}
        text = given.pop("text", None)
        ask = admission.completion(params.body(given, admission.limits.max_model_length))
        if params.seed is None:
            seed = self._random.getrandbits(MAX_SEED_BITS)
            ask = replace(ask, sampling=tuple(replace(sampling, seed=seed) for sampling in ask.sampling))
        number = str(next(self._ids))
        choices = [_Choice(index, number, ask, params, admission.tokenizer) for index in range(ask.num_choices)]
        text = given["prompt"] if isinstance(given["prompt"], str) else text
        return _Asked(number, text, choices, admission.tokenizer)

    def _finish(self, asked: Iterable[_Asked], bar: Any) -> None:
        live: dict[str, tuple[_Asked, _Choice]] = {}
        began, num_tokens = time.monotonic(), 0
        try:
            for one in asked:
                for choice in one.choices:
                    self._engine.add(choice.request)
                    live[choice.request.request_id] = one, choice
            while live:
                for event in self._step():
                    # What was aborted may still be heard of.
                    if event.request_id not in live:
                        continue
                    one, choice = live[event.request_id]
                    choice.feed(event)
                    if choice.answer.finish_reason is None:
                        continue
                    del live[event.request_id]
                    if event.finish_reason is None:
                        self._engine.abort(event.request_id)
                    num_tokens += choice.answer.num_tokens
                    if one.finished:
                        bar.set_postfix_str(f"{num_tokens / (time.monotonic() - began):.1f} tokens/s", refresh=False)
                        bar.update(1)
        finally:
            for request_id in live:
                self._engine.abort(request_id)

    def _step(self) -> list[TokenEvent]:
        try:
            return self._engine.step()
        except BaseException as error:
            # Also Ctrl-C: a step that was left in the middle is neither done nor undone.
            self._ended = f"{type(error).__name__} within a step"
            raise


class _Choice:
    """One answer on its way."""

    def __init__(self, index: int, number: str, ask: Ask, params: SamplingParams, tokenizer: Tokenizer) -> None:
        (prompt,), (sampling,) = ask.prompts, ask.sampling
        self.index = index
        self.num_cached_tokens = 0
        self.answer = ChoiceText(
            tokenizer,
            prompt,
            stop=ask.stop,
            include_stop=ask.include_stop,
            skip_special_tokens=ask.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
        # The prompt is the same for all choices: the first one tells about it.
        chosen = replace(sampling, choice=index, prompt_logprobs=None if index else sampling.prompt_logprobs)
        self.request = Request(f"{number}-{index}", prompt, chosen, ask.priority, ask.cache_salt)
        self._end_token_id = None if params.ignore_eos else tokenizer.eos_token_id
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def feed(self, event: TokenEvent) -> None:
        self._pieces.append(self.answer.feed(event.token_ids, event.finish_reason))
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        self._prompt_logprobs += event.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)

    def output(self, tokenizer: Tokenizer) -> CompletionOutput:
        # A step may bring more tokens than the one in which a stop string completed.
        token_ids = self._token_ids[: self.answer.num_tokens]
        logprobs = self._logprobs[: self.answer.num_tokens]
        reported = self.request.sampling.logprobs is not None
        reason = self.answer.finish_reason
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=token_ids,
            cumulative_logprob=sum(one.logprob for one in logprobs) if reported else None,
            logprobs=[_candidates(one, tokenizer) for one in logprobs] if reported else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=self._stop_reason(token_ids[-1]) if reason is FinishReason.STOP else None,
        )

    def prompt_logprobs(self, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return [None, *(_candidates(one, tokenizer) for one in self._prompt_logprobs)]

    def _stop_reason(self, last: int) -> int | str | None:
        if self.answer.stop_string is not None:
            return self.answer.stop_string
        return None if last == self._end_token_id else last


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt on its way."""

    request_id: str
    text: str | None
    choices: list[_Choice]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def finished(self) -> bool:
        return all(choice.answer.finish_reason is not None for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.choices[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=list(first.request.prompt_token_ids),
            outputs=[choice.output(self.tokenizer) for choice in self.choices],
            finished=self.finished,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs(self.tokenizer),
        )


def _check_seed(limits: BackendLimits) -> None:
    """What holds for a seed of a request holds for that of the class. Raises InvalidConfig."""
    try:
        check_parameter_served("seed", parameters_of(SamplingFields)["seed"], limits)
    except InvalidRequest as error:
        raise InvalidConfig("seed", str(error)) from error


def _candidates(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    found = {position.token_id: (position.logprob, position.rank)}
    found |= {token_id: (value, rank) for rank, (token_id, value) in enumerate(position.top, start=1)}
    return {
        token_id: Logprob(value, rank, tokenizer.decode((token_id,), skip_special_tokens=False))
        for token_id, (value, rank) in found.items()
    }


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    given = list(prompts)
    return [given] if given and hasattr(given[0], "__index__") else given


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Fields of a completion's body that say what is continued; `text` where both text and ids are there."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt": _token_ids(prompt)}
    given = {name: value for name, value in prompt.items() if value is not None}
    text, token_ids, salt = (given.pop(name, None) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    for name in given:
        raise InvalidRequest(f"`{name}` of a prompt is not supported yet: leave it out", field=name)
    if text is None and token_ids is None:
        raise InvalidRequest("a prompt needs `prompt` or `prompt_token_ids`", field="prompt")
    return {"prompt": text if token_ids is None else _token_ids(token_ids), "text": text, "cache_salt": salt}


def _token_ids(given: Any) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in given]
    except TypeError as error:
        message = "a prompt is a text, token ids, or a dict with `prompt` or `prompt_token_ids`"
        raise InvalidRequest(message, field="prompt") from error


def _one_each(given: Any, count: int, default: Callable[[], Any], name: str) -> list[Any]:
    """One value for each prompt, from one for all, one for each, or none."""
    if given is None or isinstance(given, SamplingParams):
        return [default() if given is None else given] * count
    values = list(given)
    if len(values) != count:
        raise InvalidRequest(f"`{name}` has {len(values)} values for {count} prompts", field=name)
    return values


@contextmanager
def _naming_prompt(number: int, count: int) -> Iterator[None]:
    """Errors about one of several prompts say which."""
    try:
        yield
    except InvalidRequest as error:
        if count == 1:
            raise
        raise InvalidRequest(f"prompt {number}: {error}", error.field, error.status, error.code) from error
