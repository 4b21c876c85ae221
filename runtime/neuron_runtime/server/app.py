"""The HTTP routes: generation, tokens, models, health and metrics.

Stop 1 of a request. Created by the front end process, which passes everything that has state. An invalid request never
gets a 5xx, but an OpenAI error object that names the field.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from neuron_runtime.apis.anthropic.body import CountTokensBody, MessagesBody, num_input_tokens
from neuron_runtime.apis.anthropic.body import admitted as admitted_messages
from neuron_runtime.apis.anthropic.objects import MessageAnswer, MessagesEvent, TokenCount
from neuron_runtime.apis.anthropic.writer import MessagesWriter
from neuron_runtime.apis.failures import Failure
from neuron_runtime.apis.generation import Generation, Writer
from neuron_runtime.apis.openai.body import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    admitted_chat,
    admitted_completion,
    tokens_of,
)
from neuron_runtime.apis.openai.errors import ErrorObject
from neuron_runtime.apis.openai.objects import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from neuron_runtime.apis.openai.writer import CHAT, COMPLETION, OpenAIWriter
from neuron_runtime.apis.responses.body import ResponsesBody
from neuron_runtime.apis.responses.body import admitted as admitted_response
from neuron_runtime.apis.responses.objects import ResponseObject, ResponsesEvent
from neuron_runtime.apis.responses.writer import ResponsesWriter
from neuron_runtime.apis.vectors.body import (
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    admitted_embeddings,
    admitted_rerank,
    admitted_score,
)
from neuron_runtime.apis.vectors.objects import EmbeddingList, Ranking, ScoreList
from neuron_runtime.apis.vectors.writer import EmbeddingsWriter, RerankWriter, ScoreWriter
from neuron_runtime.config import RuntimeConfig
from neuron_runtime.core import Task
from neuron_runtime.engine.backends import backend_package
from neuron_runtime.engine.pixel_files import PixelFiles, bare
from neuron_runtime.errors import InvalidRequest, ServingError
from neuron_runtime.recipes import Recipe
from neuron_runtime.requests.admission import Admission, Admissions, Ask
from neuron_runtime.requests.conversion import Body
from neuron_runtime.requests.targets import Target, Targets
from neuron_runtime.requests.vectors import check_task, recipe_of
from neuron_runtime.server.adapters import Adapters
from neuron_runtime.server.bodies import Bodies
from neuron_runtime.server.engine_client import EngineClient
from neuron_runtime.server.exchange import CLIENT_LEFT, exchange_of
from neuron_runtime.server.gate import Gate
from neuron_runtime.server.generation import LiveGeneration
from neuron_runtime.server.metrics import Metrics
from neuron_runtime.server.objects import (
    AdapterStates,
    Detokenized,
    Health,
    Load,
    LoadAdapterBody,
    Model,
    ModelList,
    ModelSampling,
    Rendered,
    ServerInfo,
    Tokens,
    UnloadAdapterBody,
    Version,
)
from neuron_runtime.server.openapi import Operation, application
from neuron_runtime.server.responding import GenerationResponse
from neuron_runtime.server.wire import error_response, failure_response, parse_body

Made = TypeVar("Made")

EXAMPLE_MESSAGE = {"role": "user", "content": "What is a token?"}


@dataclass(frozen=True)
class Api:
    """How a body is parsed and admitted, and how its answer is written."""

    body: type[msgspec.Struct]
    admit: Callable[[Admission, Any], Ask]
    writer: Callable[[str, Generation, Any, Admission], Writer]
    """From the model's name, the generation, the body and who admitted it."""
    tasks: tuple[Task, ...] = ("generate",)
    """Those of servers that answer it."""


COMPLETIONS = Api(
    CompletionBody, admitted_completion, lambda model, generation, *_: OpenAIWriter(COMPLETION, model, generation)
)
RESPONSES = Api(ResponsesBody, admitted_response, lambda *made: ResponsesWriter(*made[:3]))
MESSAGES = Api(MessagesBody, admitted_messages, lambda *made: MessagesWriter(*made[:3]))
CHATS = Api(ChatBody, admitted_chat, lambda model, generation, *_: OpenAIWriter(CHAT, model, generation))


def _of_vectors(writer: Callable[[str, Generation, Recipe, Any], Writer]) -> Callable[..., Writer]:
    return lambda model, generation, body, admission: writer(model, generation, recipe_of(admission), body)


EMBEDDINGS = Api(EmbeddingsBody, admitted_embeddings, _of_vectors(EmbeddingsWriter), ("embed",))
RERANK = Api(RerankBody, admitted_rerank, _of_vectors(RerankWriter), ("rerank", "embed"))
SCORE = Api(ScoreBody, admitted_score, _of_vectors(ScoreWriter), ("rerank", "embed"))


class State(Protocol):
    """The state that the routes share, held by the front end."""

    client: EngineClient
    metrics: Metrics
    targets: Targets
    adapters: Adapters
    gate: Gate
    bodies: Bodies
    pixel_files: PixelFiles
    config: RuntimeConfig
    has_keys: bool
    """Whether clients must send an API key."""

    def admissions(self) -> Admissions:
        """Raises BackendFailed until the model is ready."""


def build_app(state: State) -> FastAPI:
    routes = Routes(state)
    operations = (
        Operation(
            "openai",
            "/v1/completions",
            routes.completions,
            "Continue a prompt",
            Completion,
            body=CompletionBody,
            example={"prompt": "The capital of France is", "max_tokens": 16},
            event=CompletionChunk,
        ),
        Operation(
            "openai",
            "/v1/chat/completions",
            routes.chat_completions,
            "Answer a chat",
            ChatCompletion,
            body=ChatBody,
            example={"messages": [EXAMPLE_MESSAGE], "max_tokens": 64},
            event=ChatCompletionChunk,
        ),
        Operation(
            "openai",
            "/v1/responses",
            routes.responses,
            "Answer a conversation",
            ResponseObject,
            body=ResponsesBody,
            example={"input": "What is a token?", "max_output_tokens": 64},
            event=ResponsesEvent,
        ),
        Operation(
            "anthropic",
            "/v1/messages",
            routes.messages,
            "Answer a chat, as Anthropic's API",
            MessageAnswer,
            body=MessagesBody,
            example={"messages": [EXAMPLE_MESSAGE], "max_tokens": 64},
            event=MessagesEvent,
        ),
        Operation(
            "anthropic",
            "/v1/messages/count_tokens",
            routes.count_tokens,
            "Count the tokens of a chat, as Anthropic's API",
            TokenCount,
            body=CountTokensBody,
            example={"messages": [EXAMPLE_MESSAGE]},
        ),
        Operation(
            "server",
            "/invocations",
            routes.invocations,
            "Answer what a server of its task answers, as SageMaker calls it",
            ChatCompletion | Completion | EmbeddingList | Ranking,
            body=ChatBody | CompletionBody | EmbeddingsBody | RerankBody,
            example={"messages": [EXAMPLE_MESSAGE], "max_tokens": 64},
            event=ChatCompletionChunk | CompletionChunk,
        ),
        Operation(
            "vectors",
            "/v1/embeddings",
            routes.embeddings,
            "Turn texts into vectors",
            EmbeddingList,
            body=EmbeddingsBody,
            example={"input": ["What is a token?"]},
        ),
        *(
            Operation(
                "vectors",
                path,
                routes.rerank,
                "Put documents in the order of their relevance, as Cohere's and Jina's APIs",
                Ranking,
                body=RerankBody,
                example={"query": "What is a token?", "documents": ["A part of a text.", "A fruit."]},
                name=name,
            )
            for path, name in (("/rerank", ""), ("/v1/rerank", "rerank_v1"), ("/v2/rerank", "rerank_v2"))
        ),
        *(
            Operation(
                "vectors",
                path,
                routes.score,
                "Score pairs of texts, as in vLLM",
                ScoreList,
                body=ScoreBody,
                example={"text_1": "What is a token?", "text_2": ["A part of a text.", "A fruit."]},
                name=name,
            )
            for path, name in (("/score", ""), ("/v1/score", "score_v1"))
        ),
        Operation("openai", "/v1/models", routes.models, "List the served names", ModelList),
        Operation(
            "openai",
            "/v1/models/{model:path}",
            routes.model,
            "Describe one served name",
            Model,
            failures={404: ErrorObject},
            parameters={"model": "A served name."},
        ),
        Operation(
            "tokens",
            "/tokenize",
            routes.tokenize,
            "Turn a text or a chat into tokens",
            Tokens,
            body=TokenizeBody,
            example={"messages": [EXAMPLE_MESSAGE]},
        ),
        Operation(
            "tokens",
            "/v1/completions/render",
            routes.rendered_completion,
            "The tokens of each prompt of a completion",
            Rendered,
            body=CompletionBody,
            example={"prompt": "The capital of France is"},
            lists=True,
        ),
        Operation(
            "tokens",
            "/v1/chat/completions/render",
            routes.rendered_chat,
            "The tokens of a chat",
            Rendered,
            body=ChatBody,
            example={"messages": [EXAMPLE_MESSAGE]},
        ),
        Operation(
            "tokens",
            "/detokenize",
            routes.detokenize,
            "Turn tokens into text",
            Detokenized,
            body=DetokenizeBody,
            example={"tokens": [1, 2, 3]},
        ),
        Operation("server", "/version", routes.version, "Versions of the server and of its backend", Version),
        Operation("server", "/health", routes.health, "Whether the server can serve", Health, failures={503: Health}),
        Operation("server", "/ping", routes.ping, "The same, as SageMaker calls it", Health, failures={503: Health}),
        Operation("server", "/adapters", routes.adapters, "The adapters and their states", AdapterStates),
        Operation(
            "server",
            "/v1/load_lora_adapter",
            routes.load_adapter,
            "Load an adapter, as in vLLM",
            "text/plain",
            body=LoadAdapterBody,
            example={"lora_name": "sql", "lora_path": "/adapters/sql"},
            failures={403: ErrorObject},
        ),
        Operation(
            "server",
            "/v1/unload_lora_adapter",
            routes.unload_adapter,
            "Unload an adapter, as in vLLM",
            "text/plain",
            body=UnloadAdapterBody,
            example={"lora_name": "sql"},
            failures={403: ErrorObject},
        ),
        Operation("server", "/load", routes.load, "How many requests run", Load),
        Operation("server", "/server_info", routes.server_info, "The configuration", ServerInfo),
        Operation("server", "/live", routes.live, "Whether the process is alive", Health),
        Operation("server", "/metrics", routes.metrics, "Metrics for Prometheus", "text/plain"),
    )
    handlers = {
        ServingError: _serving_error,
        HTTPException: _http_error,
        ClientDisconnect: _client_left,
        Exception: _bug,
    }
    return application(operations, handlers, state.has_keys)


class Routes:
    def __init__(self, state: State) -> None:
        self._state = state
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: COMPLETIONS)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: CHATS)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: RESPONSES)

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: MESSAGES)

    async def embeddings(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: EMBEDDINGS)

    async def rerank(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: RERANK)

    async def score(self, request: Request) -> Response:
        return await self._generate(request, lambda raw: SCORE)

    async def count_tokens(self, request: Request) -> Response:
        admissions = self._admissions()

        def answer(body: CountTokensBody) -> Response:
            return _json(TokenCount(num_input_tokens(admissions.of(body.model), body)))

        return await self._parsed(request, CountTokensBody, answer)

    async def invocations(self, request: Request) -> Response:
        return await self._generate(request, _invoked)

    async def tokenize(self, request: Request) -> Response:
        admissions = self._admissions()

        def answer(body: TokenizeBody) -> Response:
            admission = admissions.of(body.model)
            ids = tokens_of(admission, body)
            spelled = [admission.tokenizer.token(one) for one in ids] if body.return_token_strs else None
            length = admission.limits.max_model_length
            return _json(Tokens(count=len(ids), max_model_len=length, tokens=list(ids), token_strs=spelled))

        return await self._parsed(request, TokenizeBody, answer)

    async def rendered_completion(self, request: Request) -> Response:
        return await self._rendered(request, CompletionBody, admitted_completion, _json)

    async def rendered_chat(self, request: Request) -> Response:
        return await self._rendered(request, ChatBody, admitted_chat, lambda found: _json(found[0]))

    async def _rendered(
        self,
        request: Request,
        body_type: type[Body],
        admit: Callable[[Admission, Any], Ask],
        answer: Callable[[list[Rendered]], Response],
    ) -> Response:
        """What a request of this body would feed, for gateways that route by prefix."""
        admissions = self._admissions()

        def render(body: Any) -> Response:
            ask = admit(admissions.of(body.model), body)
            return answer([Rendered(list(tokens), cache_salt=ask.cache_salt or None) for tokens in ask.prompts])

        return await self._parsed(request, body_type, render)

    async def detokenize(self, request: Request) -> Response:
        admissions = self._admissions()

        def answer(body: DetokenizeBody) -> Response:
            admission = admissions.of(body.model)
            admission.check_token_ids(body.tokens, "tokens")
            return _json(Detokenized(admission.tokenizer.decode(body.tokens, skip_special_tokens=False)))

        return await self._parsed(request, DetokenizeBody, answer)

    async def models(self, request: Request) -> Response:
        return _json(ModelList(data=[self._model(name, target) for name, target in self._state.targets]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if not name:
            return await self.models(request)
        return _json(self._model(name, self._state.targets.of(name)))

    @cached_property
    def _versions(self) -> Version:
        config = self._state.config
        return Version(version("neuron-serving"), config.backend, dict(backend_package(config).versions()))

    async def version(self, request: Request) -> Response:
        return _json(self._versions)

    async def health(self, request: Request) -> Response:
        """200 only if the server can serve; for readiness and startup probes."""
        gate = self._state.gate
        if gate.draining:
            return _json(Health("draining"), 503)
        try:
            self._state.client.check_ready()
            self._state.admissions()
            self._state.adapters.check_start()
        except ServingError as error:
            return _json(Health("not ready", str(error)), 503)
        return _json(Health("ok"))

    async def ping(self, request: Request) -> Response:
        return await self.health(request)

    async def load(self, request: Request) -> Response:
        return _json(Load(self._state.gate.num_running))

    async def server_info(self, request: Request) -> Response:
        return _json(ServerInfo(msgspec.to_builtins(self._state.config)))

    async def adapters(self, request: Request) -> Response:
        return _json(self._state.adapters.states)

    async def load_adapter(self, request: Request) -> Response:
        body = await self._parsed(request, LoadAdapterBody, lambda body: body)
        await self._state.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace is True)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        body = await self._parsed(request, UnloadAdapterBody, lambda body: body)
        self._state.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def live(self, request: Request) -> Response:
        """Always 200, for liveness probes: the supervisor restarts a hung engine."""
        return _json(Health("ok"))

    async def metrics(self, request: Request) -> Response:
        return Response(self._state.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _generate(self, request: Request, api_of: Callable[[bytes], Api]) -> Response:
        state, admissions = self._state, self._admissions()
        state.client.check_ready()

        def answer(raw: bytes) -> tuple[LiveGeneration, Writer]:
            api = api_of(raw)
            check_task(admissions.task, api.tasks)
            body: Any = parse_body(raw, api.body)
            admission = admissions.of(body.model)
            ask = api.admit(admission, body)
            seen = [picture for of_prompt in ask.pictures for picture in of_prompt]
            # Here, because writing takes long.
            pixels = state.pixel_files.write(seen) if seen else None
            if seen:
                ask = replace(ask, pictures=tuple(map(bare, ask.pictures)))
            generation = LiveGeneration(
                ask, state.client, state.metrics, admission.tokenizer, state.targets, pixels=pixels
            )
            return generation, api.writer(ask.target.name, generation, body, admission)

        with state.gate.running():
            generation, writer = await self._read(request, answer)
        exchange = exchange_of(request.scope)
        exchange.generation, exchange.model = generation, generation.ask.target.name
        return GenerationResponse(writer, generation, state.gate.running())

    def _admissions(self) -> Admissions:
        """Raises Draining, BackendFailed."""
        self._state.gate.check_admits()
        return self._state.admissions()

    def _model(self, name: str, target: Target) -> Model:
        created = self._started if target.created is None else target.created
        model = Model(id=name, created=created, root=target.root, parent=target.parent)
        try:
            limits = self._state.admissions().limits
        except ServingError:
            return model
        sampling = ModelSampling(
            mode=limits.sampling, max_top_k=limits.max_top_k, top_p_keeps_crossing=limits.top_p_keeps_crossing
        )
        return msgspec.structs.replace(model, max_model_len=limits.max_model_length, sampling=sampling)

    async def _parsed(self, request: Request, body_type: type[Body], use: Callable[[Body], Made]) -> Made:
        """Read, parse and use a body. Raises the errors of `_read`."""
        return await self._read(request, lambda raw: use(parse_body(raw, body_type)))

    async def _read(self, request: Request, use: Callable[[bytes], Made]) -> Made:
        """Read and use a body. Raises InvalidRequest, and Overloaded if too many bodies are in memory."""
        async with self._state.bodies.read(request) as raw:
            return await self._state.bodies.use(raw.removeprefix(codecs.BOM_UTF8), use)


def _invoked(raw: bytes) -> Api:
    """Which generation a body asks for. Raises InvalidRequest."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Its parser raises the error for this.
        return COMPLETIONS
    if "messages" in fields:
        return CHATS
    for name, api in (("prompt", COMPLETIONS), ("input", EMBEDDINGS), ("query", RERANK)):
        if name in fields:
            return api
    raise InvalidRequest("`messages`, `prompt`, `input` or `query` is required", field="messages")


def _json(value: msgspec.Struct | Sequence[msgspec.Struct], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    response = error_response(error, exchange_of(request.scope))
    if response.status_code in (408, 413):
        # The rest of the body will not be read.
        response.headers["connection"] = "close"
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        # The `allow` header answers the request.
        return Response(status_code=204, headers=error.headers)
    message = f"{request.method} {request.url.path}: {error.detail}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    failure = Failure.of(error.status_code, kind, message, headers=error.headers)
    return failure_response(failure, exchange_of(request.scope))


async def _client_left(request: Request, error: Exception) -> Response:
    """The client disconnected within the body; the status appears only in log and traces."""
    return Response(status_code=CLIENT_LEFT)


async def _bug(request: Request, error: Exception) -> Response:
    failure = Failure.of(500, "internal_error", "internal error; see the log of this process")
    return failure_response(failure, exchange_of(request.scope))
