"""The service: `POST /translate`, `GET /health`, `GET /metrics`, and a page for its interface."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keras_aiayn.serve.batcher import Batcher, Overloaded, TimeIsOver, Translate
from keras_aiayn.translator import Translation

log = logging.getLogger("keras_aiayn.serve")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        bytes: of its body.
        texts: in it.
        tokens: of one text.
        n_best: hypotheses of a text.
        seconds: until it is answered; also between two parts of its body.
    """

    bytes: int = 1_000_000
    texts: int = 256
    tokens: int = 1_024
    n_best: int = 16
    seconds: float = 30.0


@dataclasses.dataclass(frozen=True)
class Asked:
    """The settings of a text; equal ones are translated together."""

    n_best: int = 1
    alignments: bool = False


class Body(BaseModel):
    """What `POST /translate` takes."""

    model_config = ConfigDict(extra="forbid")

    texts: str | list[str] = Field(description="One text, or several.")
    n_best: int = Field(1, ge=1, description="Translations of each text.")
    alignments: bool = Field(False, description="Whether to say which word became which.")


class Hypothesis(BaseModel):
    """A translation."""

    text: str
    score: float = Field(description="Log-probability over the length penalty.")
    hit_limit: bool = Field(description="Whether it was cut at its maximum length.")
    alignment: list[tuple[int, int]] | None = Field(
        None, description="(source word, target word) pairs from 0."
    )


class Answer(BaseModel):
    """What `POST /translate` gives: for each text its hypotheses, best first."""

    translations: list[list[Hypothesis]]


class Error(BaseModel):
    """What is told where something cannot be."""

    error: str


class Numbers:
    """What `GET /metrics` tells."""

    def __init__(self, batcher: Callable[[], Batcher]):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "aiayn_requests_total", "Requests by path and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "aiayn_request_seconds", "Seconds to answer a translation.", registry=registry
        )
        self.batch_texts = Histogram(
            "aiayn_batch_texts", "Texts translated together.", registry=registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )  # fmt: skip
        self.tokens = Counter("aiayn_source_tokens_total", "Tokens read.", registry=registry)
        self.busy = Counter(
            "aiayn_busy_seconds_total", "Seconds of translating.", registry=registry
        )
        waiting = Gauge("aiayn_waiting_tokens", "Source tokens in the line.", registry=registry)
        waiting.set_function(lambda: batcher().waiting)

    def batch(self, texts: int, tokens: int, seconds: float) -> None:
        """Counts what was translated together."""
        self.batch_texts.observe(texts)
        self.tokens.inc(tokens)
        self.busy.inc(seconds)


def make_app(
    workers: Sequence[Translate],
    count_tokens: Callable[[list[str]], list[int]],
    *,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    api_key: str | None = None,
    **batcher_options: Any,
) -> FastAPI:
    """The application.

    Args:
        workers: what translates texts under an `Asked`, a function for each device.
        count_tokens: of texts.
        limits: of a request.
        api_key: that a request must carry as `Authorization: Bearer KEY`; none by default.
        **batcher_options: of `Batcher`.
    """
    batcher: Batcher

    numbers = Numbers(lambda: batcher)
    batcher = Batcher(workers, on_batch=numbers.batch, **batcher_options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)  # what was taken is finished

    app = FastAPI(title="keras-aiayn", lifespan=lifespan, responses={"4XX": {"model": Error}})
    app.add_middleware(_Guard, limits=limits)
    _tell_errors_as_json(app)

    @app.middleware("http")
    async def count(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        began = time.perf_counter()
        response = await call_next(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        numbers.requests.labels(path, response.status_code).inc()
        if path == "/translate":
            numbers.seconds.observe(time.perf_counter() - began)
        return response

    def check_key(authorization: str | None) -> None:
        if api_key is None:
            return
        given = (authorization or "").encode()
        if not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    @app.post(
        "/translate", responses={code: {"model": Error} for code in (401, 413, 422, 429, 504)}
    )
    async def translate(
        body: Body, authorization: Annotated[str | None, Header()] = None
    ) -> Answer:
        """Translate one text or several."""
        check_key(authorization)
        texts = [body.texts] if isinstance(body.texts, str) else body.texts
        _check(texts, body, limits)
        tokens = count_tokens(texts)
        longest = max(tokens, default=0)
        if longest > limits.tokens:
            raise HTTPException(413, f"a text has {longest} tokens; at most {limits.tokens}")
        asked = Asked(body.n_best, body.alignments)
        found = await _all(
            [
                functools.partial(batcher.submit, text, count, asked, limits.seconds)
                for text, count in zip(texts, tokens, strict=True)
            ],
            limits.seconds,
        )
        return Answer(translations=[_hypotheses(one, body.alignments) for one in found])

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the service answers."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(generate_latest(numbers.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _check(texts: list[str], body: Body, limits: Limits) -> None:
    if len(texts) > limits.texts:
        raise HTTPException(413, f"{len(texts)} texts; at most {limits.texts} a request")
    if body.n_best > limits.n_best:
        raise HTTPException(422, f"n_best is {body.n_best}; at most {limits.n_best}")
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise HTTPException(422, "a text holds half of a surrogate pair, which is no character")


async def _all(submits: list[Callable[[], Future]], seconds: float) -> list[Translation]:
    """The answers to all texts of a request, or none: what waits of a refused one is taken back."""
    answers: list[Future] = []
    try:
        for submit in submits:
            answers.append(submit())
        waiting = [asyncio.wrap_future(answer) for answer in answers]
        return list(await asyncio.wait_for(asyncio.gather(*waiting), seconds))
    except Overloaded:
        raise HTTPException(
            429, "too many requests wait: try again", {"Retry-After": "1"}
        ) from None
    except (TimeIsOver, TimeoutError):
        raise HTTPException(504, f"no translation within {seconds:g} seconds") from None
    except Exception:
        log.exception("a translation failed")
        raise HTTPException(500, "the translation failed; the log says why") from None
    finally:
        for answer in answers:
            answer.cancel()


def _hypotheses(translation: Translation, alignments: bool) -> list[Hypothesis]:
    return [
        Hypothesis(
            text=one.text,
            score=one.score,
            hit_limit=one.hit_limit,
            alignment=one.alignment if alignments else None,
        )
        for one in (translation, *translation.alternatives)
    ]


def _tell_errors_as_json(app: FastAPI) -> None:
    """Every error is `{"error": ...}`, in one line."""

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": f"{place}: {first['msg']}"}, 422)


class _Guard:
    """Ends requests whose body is too long, or takes too long to come."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.bytes:
            await self._refuse(413, f"a body of at most {self._limits.bytes:,} bytes")(
                scope, receive, send
            )
            return
        seen = 0
        whole = False

        async def guarded() -> Message:
            nonlocal seen, whole
            if whole:  # only the end of the connection can come: there is no hurry
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._limits.seconds)
            except TimeoutError:
                raise HTTPException(408, "the body did not come in time") from None
            seen += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if seen > self._limits.bytes:
                raise HTTPException(413, f"a body of at most {self._limits.bytes:,} bytes")
            return message

        await self._app(scope, guarded, send)

    def _refuse(self, status: int, what: str) -> JSONResponse:
        return JSONResponse({"error": what}, status, {"Connection": "close"})
