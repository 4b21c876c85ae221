"""`LLM`: loads a model and answers prompts.

All prompts of a call are admitted before the first one runs, by one of `engines`. `running` creates text and outputs.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from neuron_runtime.apis.openai.body import ChatBody, admitted_completion, chat_of
from neuron_runtime.apis.vectors.writer import scores_of
from neuron_runtime.arguments import LLM_NAMES, default_artifacts_dir, default_weights_dir, llm_config, naming
from neuron_runtime.artifacts.loading import find_adapter
from neuron_runtime.config import ServerOptions
from neuron_runtime.console import say
from neuron_runtime.core import BackendLimits, TokenEvent
from neuron_runtime.engine.backends import check_backend
from neuron_runtime.errors import BackendFailed, InvalidConfig, InvalidRequest
from neuron_runtime.local_settings import LocalSettings
from neuron_runtime.offline.adapters import LoRARequest, OfflineAdapters, modules_of
from neuron_runtime.offline.engines import engine_of
from neuron_runtime.offline.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from neuron_runtime.offline.pooling_params import PoolingParams
from neuron_runtime.offline.prompts import Prompt, listed, naming_prompt, one_each, prompt_fields
from neuron_runtime.offline.running import RunningPrompt
from neuron_runtime.offline.sampling_params import SamplingParams
from neuron_runtime.pictures.reader import load_reader
from neuron_runtime.record import AdapterFacts
from neuron_runtime.requests.admission import Admission, Admissions, Ask
from neuron_runtime.requests.conversion import typed
from neuron_runtime.requests.parameters import check_parameter_served, parameters_of
from neuron_runtime.requests.sampling_fields import SamplingFields
from neuron_runtime.requests.targets import Targets
from neuron_runtime.requests.texts import Text, adapted_text, load_text
from neuron_runtime.requests.tools import is_forced
from neuron_runtime.requests.vectors import (
    Kind,
    VectorOptions,
    check_dimensions,
    check_task,
    compared_ask,
    cut_to,
    recipe_of,
    texts_ask,
)

MAX_SEED_BITS = 63
MODULES = "lora_modules"

Conversation = Sequence[Mapping[str, Any]]

Given = TypeVar("Given")


class LLM:
    """A loaded model.

    Args:
        model: `org/name`, `hf://org/name[@revision]`, `file:///path`, or the path of a folder.
        device: "cpu" or "neuron"; default: the device that this runtime was built for.
        seed: makes answers reproducible if their `SamplingParams` have no seed; refused if those cannot have one.
        revision: revision of a hub model.
        download_dir: store of models: found there, or fetched into it.
        weights_store: store of models in S3 (`s3://bucket/prefix`): what the folder lacks is copied from there.
        on_weights_miss: whether to fetch a model that no store has from its source, or to fail.
        artifacts_dir: store of compiled models, with `compile=True`.
        artifacts_store: another one in S3 (`s3://bucket/prefix`), from which or to which artifacts are copied.
        lora_modules: paths of adapters by name, for each `LoRARequest` without a path: `{name: path}`, or a list of
            objects with `name` and `path`; also in `override_neuron_config`.
        additional_config: `{"override_neuron_config": {...}}`, as in newer versions of vLLM.
        arguments: `max_model_len`, `max_num_seqs`, `block_size` and other arguments of vLLM's class. They are supported
            or refused by name; see `arguments.LLM_ARGUMENTS` and `not_built.ROWS`.

    Raises:
        TypeError: an unknown argument.
        InvalidConfig: names the argument that is not supported, and what to do.
        FatalError: the model cannot be found, read or loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        seed: int | None = None,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        artifacts_dir: str | Path | None = None,
        artifacts_store: str = "",
        weights_store: str = "",
        on_weights_miss: Literal["fetch", "fail"] = "fetch",
        lora_modules: Any = None,
        additional_config: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        override = arguments.get("override_neuron_config")
        if isinstance(override, Mapping) and MODULES in override:
            lora_modules = override[MODULES] if lora_modules is None else lora_modules
            arguments["override_neuron_config"] = {key: one for key, one in override.items() if key != MODULES}
        modules = modules_of(lora_modules)
        config = llm_config(model, arguments, device=device, revision=revision, additional_config=additional_config)
        settings = LocalSettings(
            weights_dir=default_weights_dir() if download_dir is None else Path(download_dir),
            artifacts_dir=default_artifacts_dir() if artifacts_dir is None else Path(artifacts_dir),
            weights_store=weights_store,
            artifacts_store=artifacts_store,
            on_weights_miss=on_weights_miss,
        )
        with naming(LLM_NAMES | {"--weights-store": "weights_store", "--artifacts-store": "artifacts_store"}):
            check_backend(config)
            self._engine = engine_of(config, settings)
            self._close = weakref.finalize(self, self._engine.close)
            try:
                self._model_dir = self._engine.find_model()
                text = load_text(self._model_dir, config.text, config.task)
                limits = self._engine.load()
                sees = limits.max_pictures and config.media.max_images
                pictures = (
                    load_reader(self._model_dir, text.tokenizer, config.media, limits.max_pictures) if sees else None
                )
                if seed is not None:
                    _check_seed(limits)
            except BaseException:
                # Also Ctrl-C: what is loaded so far must not wait for the garbage collector.
                self._close()
                raise
        for notice in text.defaults.served(limits).notices:
            say(notice)
        self._admissions = Admissions(
            text,
            limits,
            Targets(config.served_names),
            max_queued_requests=sys.maxsize,
            cuts_max_tokens=True,
            options=ServerOptions(max_inputs=sys.maxsize),
            task=config.task,
            pictures=pictures,
        )
        model_dir = self._model_dir  # whoever drops this LLM ends its engine at once, so nothing may refer to it

        def find(uri: str) -> tuple[Path, AdapterFacts, Text]:
            folder, facts = find_adapter(uri, model_dir, config, settings)
            return folder, facts, adapted_text(text, folder, config.text)

        self._adapters = OfflineAdapters(config, modules, find, self._engine.load_adapter)
        self._seeds = None if seed is None else random.Random(seed)  # noqa: S311
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; returns the outputs in the same order.

        Args:
            prompts: one or several, see `Prompt`.
            sampling_params: one for all prompts, one per prompt, or None for the model's defaults.
            use_tqdm: whether to show a progress bar on stderr, or a function that creates one.
            priority: one number per prompt; lower ones run first.
            lora_request: the adapter of all prompts, or one or None per prompt.
            prompt_token_ids: older alternative to `prompts`.

        Raises:
            InvalidRequest: names the parameter and, with several prompts, the prompt. No prompt was computed.
            BackendFailed: this object can no longer be used.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequest("exactly one of `prompts` and `prompt_token_ids` is required", field="prompts")
        requests = listed(prompts if prompts is not None else prompt_token_ids)
        return self._run(
            requests,
            lambda given, _: prompt_fields(given),
            sampling_params,
            priority=priority,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered with the model's chat template.

        Args:
            messages: messages with `role` and `content`.
            options: `tools`, which the template gets, and other options of vLLM's method; refused unless neutral.

        Raises: as `generate`.
        """
        options.pop("chat_template_content_format", None)  # concerns images only
        common = {
            **options,
            "add_generation_prompt": add_generation_prompt,
            "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
        }
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages

        def prompt(conversation: Conversation, admission: Admission) -> dict[str, Any]:
            body = typed({**common, "messages": conversation}, ChatBody, ignores_unknown=False)
            if is_forced(body.tool_choice):
                message = "`tool_choice`: a chat of `LLM` forces no call; describe it in `structured_outputs` instead"
                raise InvalidRequest(message, field="tool_choice")
            chat = chat_of(body)
            # The template writes its own BOS.
            return {
                "prompt": admission.chat_text(chat),
                "add_special_tokens": False,
                "pictures": admission.pictures(chat),
            }

        return self._run(
            conversations, prompt, sampling_params, priority=None, lora_request=lora_request, use_tqdm=use_tqdm
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[EmbeddingRequestOutput]:
        """Turn texts into vectors, in their order, with `task="embed"`.

        Raises: as `generate`.
        """
        admission, params = self._admissions.of(None), pooling_params or PoolingParams()
        check_task(admission.all.task, ("embed",))
        if truncate_prompt_tokens is not None:
            params = replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        check_dimensions(admission, params.dimensions)
        fields = [prompt_fields(one) for one in listed(prompts)]
        for one in fields:
            if one.get("pictures"):
                raise InvalidRequest.at("multi_modal_data", "has no vector: leave it out")
        given = [one["prompt"] for one in fields]

        def asks() -> Iterator[Ask]:
            for number, text in enumerate(given):
                with naming_prompt(number, len(given)):
                    yield texts_ask(admission, text, params.options, Kind(), "prompts")

        done = self._computed(asks, use_tqdm)
        if not done:
            return []
        vectors = cut_to([one.answers[0].vector for one in done], params.dimensions, recipe_of(admission)).tolist()
        return [
            EmbeddingRequestOutput(one.request_id, EmbeddingOutput(vector), list(one.ask.prompts[0]))
            for one, vector in zip(done, vectors, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text with each of the others, or two lists of the same length. With
        `task="rerank"`, or with `task="embed"` by how alike their vectors are.

        Raises: as `generate`.
        """
        admission = self._admissions.of(None)
        check_task(admission.all.task, ("rerank", "embed"))
        queries, documents = ([one] if isinstance(one, str) else list(one) for one in (data_1, data_2))
        options = VectorOptions(truncate_prompt_tokens=truncate_prompt_tokens)
        [done] = self._computed(
            lambda: iter([compared_ask(admission, queries, documents, options, ("data_1", "data_2"))]), use_tqdm
        )
        scores, tokens = scores_of(done.answers, len(documents), recipe_of(admission)), done.ask.prompts
        return [
            ScoringRequestOutput(f"{done.request_id}-{at}", ScoringOutput(score), list(ids))
            for at, (score, ids) in enumerate(zip(scores, tokens[-len(documents) :], strict=True))
        ]

    def _computed(self, asks: Callable[[], Iterator[Ask]], use_tqdm: bool | Callable[..., Any]) -> list[RunningPrompt]:
        with self._one_at_a_time:
            if self._ended:
                raise BackendFailed(f"this LLM can no longer be used ({self._ended}): create a new one")
            tokenizer = self._admissions.text.tokenizer
            asked = [
                RunningPrompt(str(next(self._ids)), None, ask, tokenizer, end_token_id=None, adapter=None)
                for ask in asks()
            ]
            self._finish(asked, use_tqdm)
            return asked

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters: from the model's `generation_config.json`, else vLLM's."""
        return _default_params(self._admissions.of(None))

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, loaded by transformers."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

        return AutoTokenizer.from_pretrained(str(self._model_dir), local_files_only=True)

    def close(self) -> None:
        """Release device and memory; also happens when the object is garbage-collected."""
        self._ended = self._ended or "it was closed"
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Given],
        fields_of: Callable[[Given, Admission], dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        params = one_each(sampling_params, len(prompts), lambda: None, "sampling_params")
        priorities = one_each(priority, len(prompts), lambda: 0, "priority")
        adapters = one_each(lora_request, len(prompts), lambda: None, "lora_request")
        with self._one_at_a_time:
            if self._ended:
                raise BackendFailed(f"this LLM can no longer be used ({self._ended}): create a new one")
            asked = []
            for number, given in enumerate(zip(prompts, params, priorities, adapters, strict=True)):
                prompt, one, rank, adapter = given
                with naming_prompt(number, len(prompts)):
                    admission = self._admission(adapter)
                    params_of = one or _default_params(admission)
                    asked.append(self._admit(fields_of(prompt, admission), params_of, rank, adapter))
            self._finish(asked, use_tqdm)
            return [one.output() for one in asked]

    def _admission(self, adapter: LoRARequest | None) -> Admission:
        """Raises InvalidRequest."""
        return self._admissions.of(None) if adapter is None else self._admissions.at(self._adapters.target(adapter))

    def _admit(
        self, prompt: dict[str, Any], params: SamplingParams, priority: int, adapter: LoRARequest | None = None
    ) -> RunningPrompt:
        """Check a prompt and its parameters completely. Raises InvalidRequest."""
        admission = self._admission(adapter)
        fields = {**prompt, "priority": priority, "return_token_ids": True}
        text, pictures = fields.pop("text", None), fields.pop("pictures", ())
        body = params.body(fields, admission.limits.max_model_length)
        ask = admitted_completion(admission, body, pictures)
        if params.seed is None and self._seeds:
            seed = self._seeds.getrandbits(MAX_SEED_BITS)
            ask = replace(ask, sampling=tuple(replace(one, seed=seed, seeded=True) for one in ask.sampling))
        text = fields["prompt"] if isinstance(fields["prompt"], str) else text
        end = None if params.ignore_eos else admission.tokenizer.eos_token_id
        tokenizer = admission.tokenizer
        return RunningPrompt(str(next(self._ids)), text, ask, tokenizer, end_token_id=end, adapter=adapter)

    def _finish(self, asked: Sequence[RunningPrompt], use_tqdm: bool | Callable[..., Any]) -> None:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(
            total=len(asked), desc="Processed prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm
        ) as bar:
            self._compute(asked, bar)

    def _compute(self, asked: Iterable[RunningPrompt], bar: Any) -> None:
        live: dict[str, tuple[RunningPrompt, int]] = {}
        began, num_tokens = time.monotonic(), 0
        try:
            for one in asked:
                for index, make in enumerate(one.requests()):
                    request = make(f"{one.request_id}-{index}")
                    self._engine.add(request)
                    live[request.request_id] = one, index
            # The last step may outlive the requests, if stop strings end them.
            while self._engine.has_work:
                for event in self._step():
                    # Aborted requests may still have events.
                    if event.request_id not in live:
                        continue
                    one, index = live[event.request_id]
                    choice = one.feed(index, event)
                    if choice.finish_reason is None:
                        continue
                    del live[event.request_id]
                    if event.finish_reason is None:
                        self._engine.abort(event.request_id)
                    num_tokens += choice.num_tokens
                    if one.finished:
                        bar.set_postfix_str(f"{num_tokens / (time.monotonic() - began):.1f} tokens/s", refresh=False)
                        bar.update(1)
        finally:
            for request_id in live:
                self._engine.abort(request_id)

    def _step(self) -> list[TokenEvent]:
        try:
            return self._engine.step()
        except InvalidRequest:
            # A form that cannot be compiled; the engine is as it was.
            raise
        except BaseException as error:
            # Also Ctrl-C: an interrupted step leaves an undefined state.
            self._ended = f"{type(error).__name__} within a step"
            raise


def _default_params(admission: Admission) -> SamplingParams:
    sampling = admission.defaults.sampling
    values = {name: value for name in sampling.__struct_fields__ if (value := getattr(sampling, name)) is not None}
    return SamplingParams(**values)


def _check_seed(limits: BackendLimits) -> None:
    """Apply the rules for a request's seed to the seed of the class. Raises InvalidConfig."""
    try:
        check_parameter_served("seed", parameters_of(SamplingFields)["seed"], limits)
    except InvalidRequest as error:
        raise InvalidConfig("seed", str(error)) from error
