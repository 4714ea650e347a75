"""The HTTP endpoints: each checks, asks and answers; `generation` and `stream` are in between."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ftruntime.metrics import CONTENT_TYPE
from ftruntime.progress import StartProgress
from ftruntime.server.bridge import EngineDeadError
from ftruntime.server.client import EngineClient
from ftruntime.server.errors import ApiError, bad_field
from ftruntime.server.front import Front, ParserSpec, ServerSettings
from ftruntime.server.generation import Generation
from ftruntime.server.middleware import RequestIdMiddleware, read_body, request_id_of
from ftruntime.server.openai import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
)
from ftruntime.server.params import ModelLimits, build_params
from ftruntime.server.prompts import ChatPrompt, chat_prompt, text_prompts
from ftruntime.server.shapes import ChatShape, CompletionShape, Shape
from ftruntime.server.stream import answer_stream, answer_whole
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer

_STOP_ENGINE_S = 10.0
_STOP_LOADING_S = 0.5
_PROGRESS_S = 0.2
_MAX_SEQUENCES = 1024
_READ = ["GET", "HEAD"]

_logger = logging.getLogger(__name__)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    settings: ServerSettings,
    *,
    on_failure: Callable[[str], None] | None = None,
) -> FastAPI:
    """The application of one engine; its lifespan starts and stops ``client``.

    Args:
        client: not started.
        tokenizer, chat: of the checkpoint the engine loads.
        settings: of the front.
        on_failure: gets the one sentence when the engine could not be started, or is gone.

    ``app.state.front`` is the `Front`.
    """
    front = Front(client, tokenizer, chat, settings)
    app = FastAPI(title="ftruntime", openapi_url=None, lifespan=_lifespan(front, on_failure))
    app.state.front = front
    app.include_router(_health_routes(front))
    app.include_router(_model_routes(front))
    app.include_router(_generation_routes(front))
    app.include_router(_observation_routes(front))
    app.add_middleware(RequestIdMiddleware)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_error)
    app.add_exception_handler(EngineDeadError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    return app


async def _until_ready(client: EngineClient) -> None:
    """Wait for the engine, showing how far it is."""
    ready = asyncio.ensure_future(client.wait_ready())
    try:
        with StartProgress() as progress:
            while not ready.done():
                health = client.health()
                if not health.ready:
                    progress(health.phase, health.progress)
                await asyncio.wait((ready,), timeout=_PROGRESS_S)
        await ready
    finally:
        ready.cancel()


def _lifespan(
    front: Front, on_failure: Callable[[str], None] | None
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    async def bring_up() -> None:
        """Load beside the running server, so that `/health` can tell how far it is."""
        try:
            await front.client.start()
            await _until_ready(front.client)
            _logger.info("server ready model=%s", front.settings.served_model_name)
            sentence = await front.client.wait_end()
        except (EngineDeadError, OSError) as error:
            sentence = str(error)
        if on_failure is None:
            _logger.error("engine failed: %s", sentence)
        else:
            on_failure(sentence)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(bring_up(), name="engine-start")
        try:
            yield
        finally:
            front.abort_all("the server is shutting down")
            task.cancel()
            # what it has loaded so far is not worth waiting for
            await front.client.stop(_STOP_ENGINE_S if front.client.info else _STOP_LOADING_S)

    return lifespan


def _answer_error(request: Request, error: Exception) -> Response:
    """Every error as an OpenAI error object; what nobody expected is logged with its traceback."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = ApiError(
            f"{request.method} {request.url.path}: {error.detail}",
            status=error.status_code, code=None,
        )  # fmt: skip
    elif isinstance(error, EngineDeadError):
        error = ApiError(f"engine is down: {error}", status=503, code="engine_dead")
    elif not isinstance(error, ApiError):
        _logger.error("request failed request_id=%s", request_id_of(request), exc_info=error)
        error = ApiError("internal error, see the server's log", status=500, code="internal")
    _logger.info(
        "request refused request_id=%s path=%r status=%d message=%r",
        request_id_of(request), request.url.path, error.status, error.message,
    )  # fmt: skip
    headers = error.headers() | {"X-Request-Id": request_id_of(request)}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _key_check(front: Front) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        wanted = front.settings.api_key
        if wanted is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), wanted.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                "Authorization header is missing or wrong, expected 'Bearer' and the API key",
                status=401, code="invalid_api_key",
            )  # fmt: skip

    return check


def _router(front: Front) -> APIRouter:
    return APIRouter(dependencies=[Depends(_key_check(front))])


def _health_routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.api_route("/health", methods=_READ)
    async def health() -> Response:
        state = front.client.health()
        phase = "draining" if front.draining else state.phase
        is_ready = state.ready and not front.draining
        body = {
            "status": "ok" if is_ready else "unavailable",
            "phase": phase,
            "progress": state.progress,
            "detail": state.detail,
        }
        return JSONResponse(body, status_code=200 if is_ready else 503)

    return router


def _model_routes(front: Front) -> APIRouter:
    router = _router(front)
    created = int(time.time())

    def card(limits: ModelLimits) -> dict[str, object]:
        return {
            "id": front.settings.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "ftruntime",
            "max_model_len": limits.max_model_len,
        }

    @router.api_route("/v1/models", methods=_READ)
    async def models() -> Response:
        limits = front.require_ready()
        return JSONResponse({"object": "list", "data": [card(limits)]})

    @router.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(name: str) -> Response:
        limits = front.require_ready()
        front.check_model(name)
        return JSONResponse(card(limits))

    return router


def _generation_routes(front: Front) -> APIRouter:
    router = _router(front)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        async with _counted(front):
            raw = await read_body(request, front.settings.max_body_bytes)
            limits = front.require_ready()
            body = parse_body(raw, ChatBody)
            front.check_model(body.model)
            prompt = await asyncio.to_thread(
                chat_prompt, body.messages, body, front.tokenizer, front.chat
            )
            params = build_params(body, len(prompt.token_ids), limits)
            front.require_ready()
        generation = front.launch(
            request_id_of(request), [prompt.token_ids], [params],
            ParserSpec(prompt.thinking, prompt.tools),
        )  # fmt: skip
        return await _answer(front, request, body, generation, ChatShape, params.n)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        async with _counted(front):
            raw = await read_body(request, front.settings.max_body_bytes)
            limits = front.require_ready()
            body = parse_body(raw, CompletionBody)
            front.check_model(body.model)
            prompts = await asyncio.to_thread(
                text_prompts, body.prompt, front.tokenizer, limits.vocab_size
            )
            if len(prompts) > _MAX_SEQUENCES:
                raise bad_field("prompt", body.prompt, f"at most {_MAX_SEQUENCES} prompts")
            params = [build_params(body, len(prompt), limits) for prompt in prompts]
            num_choices = sum(item.n for item in params)
            if num_choices > _MAX_SEQUENCES:
                raise bad_field("n", body.n, f"at most {_MAX_SEQUENCES} prompts times n")
            front.require_ready()
        generation = front.launch(request_id_of(request), prompts, params, None)
        return await _answer(front, request, body, generation, CompletionShape, num_choices)

    return router


@contextlib.asynccontextmanager
async def _counted(front: Front) -> AsyncIterator[None]:
    """Counts what is refused before it is a generation, which counts itself."""
    try:
        yield
    except ClientDisconnect:
        front.metrics.count("aborted")
        raise
    except ApiError as error:
        front.metrics.count("rejected" if error.status < 500 else "error")
        raise


async def _answer(
    front: Front,
    request: Request,
    body: GenerationBody,
    generation: Generation,
    shape_of: type[ChatShape] | type[CompletionShape],
    num_choices: int,
) -> Response:
    settings = front.settings
    shape: Shape = shape_of(
        settings.served_model_name, front.tokenizer,
        cache_report=settings.enable_cache_report, null_usage=body.include_usage,
    )  # fmt: skip
    if not body.stream:
        return await answer_whole(request, generation, shape, num_choices)
    return await answer_stream(
        request, generation, shape,
        include_usage=body.include_usage, keep_alive_s=settings.keep_alive_s,
    )  # fmt: skip


def _observation_routes(front: Front) -> APIRouter:
    router = _router(front)

    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await read_body(request, front.settings.max_body_bytes)
        limits = front.require_ready()
        body = parse_body(raw, TokenizeBody)
        front.check_model(body.model)
        tokens = await asyncio.to_thread(_tokens, front, body, limits)
        return JSONResponse(
            {"count": len(tokens), "tokens": tokens, "max_model_len": limits.max_model_len}
        )

    @router.get("/v1/stats")
    async def stats() -> Response:
        front.require_loaded()
        return JSONResponse(dict(await front.client.stats()))

    @router.get("/v1/steps")
    async def steps(since: str = "0") -> Response:
        if not (since.isascii() and since.isdigit() and len(since) <= 18):
            raise bad_field("since", since, "an integer >= 0")
        front.require_loaded()
        return JSONResponse(dict(await front.client.steps(int(since))))

    @router.get("/metrics")
    async def metrics() -> Response:
        stats = None
        with contextlib.suppress(EngineDeadError, ApiError):
            front.require_loaded()
            stats = await front.client.stats()
        return Response(front.metrics.render(stats), media_type=CONTENT_TYPE)

    return router


def _tokens(front: Front, body: TokenizeBody, limits: ModelLimits) -> tuple[int, ...]:
    """Exactly the prompt that the same body would generate from."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", body.prompt, "one of prompt and messages")
    if body.prompt is not None:
        return text_prompts(body.prompt, front.tokenizer, limits.vocab_size)[0]
    prompt: ChatPrompt = chat_prompt(body.messages or [], body, front.tokenizer, front.chat)
    return prompt.token_ids
