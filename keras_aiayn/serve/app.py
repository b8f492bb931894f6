"""The service: `POST /translate` and `/attention`, `GET /health` and `/metrics`, and its pages."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keras_aiayn.serve.batcher import Batcher, NoOneWorks, Overloaded, TimeIsOver, Turn
from keras_aiayn.serve.live import Asked
from keras_aiayn.serve.page import add_page
from keras_aiayn.translator import Translation


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        bytes: of its body.
        texts: in it.
        tokens: of one text.
        characters: of one text; more could hardly be so few tokens, which takes long to count.
        n_best: hypotheses of a text.
        pairs: tokens read times tokens written, of which attention is told.
        seconds: until its body is whole, and from then on until it is answered.
    """

    bytes: int = 1_000_000
    texts: int = 256
    tokens: int = 1_024
    characters: int = 16_384
    n_best: int = 16
    pairs: int = 16_384
    seconds: float = 30.0


@dataclasses.dataclass(frozen=True)
class Look:
    """Asks where the decoder looks in a text as it writes a translation of it."""

    translation: str


def _whole(value: Any) -> Any:
    """1.0 is an integer in JSON; a string or a truth value is none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BaseModel):
    """What `POST /translate` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: str | list[str] = Field(description="One text, or several.")
    n_best: Annotated[int, BeforeValidator(_whole)] = Field(
        1, ge=1, description="Translations of each text."
    )
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


class LookBody(BaseModel):
    """What `POST /attention` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(description="The source.")
    translation: str | None = Field(
        None, description="Of it; the best that is found, if none is given."
    )


class Attention(BaseModel):
    """What `POST /attention` gives: where the decoder looks in the source."""

    translation: str
    source: list[str] = Field(description="The tokens read, the end of the text included.")
    target: list[str] = Field(description="The tokens written, likewise.")
    weights: list[list[list[list[float]]]] = Field(
        description="By layer, head, token written and token read; each row sums to 1."
    )


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

    def turn(self, texts: int, tokens: int, seconds: float) -> None:
        """Counts what was translated together, and what was done with it."""
        self.batch_texts.observe(texts)
        self.tokens.inc(tokens)
        self.busy.inc(seconds)


def make_app(
    workers: Sequence[Turn],
    count_tokens: Callable[[str], int],
    count_target_tokens: Callable[[str], int],
    *,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    api_key: str | None = None,
    **batcher_options: Any,
) -> FastAPI:
    """The application.

    Args:
        workers: what translates texts under an `Asked`, or looks at them under a `Look`, a function
            for each device as of `Batcher`.
        count_tokens: of a text.
        count_target_tokens: of a translation.
        limits: of a request.
        api_key: that `POST` must carry as `Authorization: Bearer KEY`; none by
            default. The other paths ask for none.
        **batcher_options: of `Batcher`.
    """
    batcher: Batcher

    numbers = Numbers(lambda: batcher)
    batcher = Batcher(workers, on_turn=numbers.turn, **batcher_options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)  # what was taken is finished

    app = FastAPI(title="keras-aiayn", lifespan=lifespan, responses={"4XX": {"model": Error}})
    app.add_middleware(_Guard, limits=limits, api_key=api_key)
    app.add_middleware(_Count, numbers=numbers)  # around the other: what is refused counts
    _tell_errors_as_json(app)
    _tell_limits(app, limits)
    add_page(app)
    refusals = [400, *([401] if api_key else []), 408, 413, 422, 429, 500, 503, 504]
    post: dict[str, Any] = {
        "responses": {code: {"model": Error} for code in refusals},
        # The key has been checked; this tells of it in the interface.
        "dependencies": [Depends(HTTPBearer(auto_error=False))] if api_key else [],
    }

    async def answers(
        request: Request, texts: list[str], tokens: list[int], asked: Asked | Look, seconds: float
    ) -> list[Any]:
        """What the workers find, while the client waits for it."""
        with _refusals(limits.seconds):
            found = batcher.submit(texts, tokens, asked, seconds)
            return await _all(found, request, seconds)

    @app.post("/translate", **post)
    async def translate(request: Request, body: Body) -> Answer:
        """Translate one text or several."""
        texts = [body.texts] if isinstance(body.texts, str) else body.texts
        if body.n_best > limits.n_best:
            raise HTTPException(422, f"n_best is {body.n_best}; at most {limits.n_best}")
        _check(texts, limits)
        tokens = await _count_all(texts, count_tokens, limits)
        if sum(tokens) > batcher.tokens_waiting:
            raise HTTPException(
                413, f"{sum(tokens)} tokens in all; at most {batcher.tokens_waiting} a request"
            )
        asked = Asked(body.n_best, body.alignments)
        found = await answers(request, texts, tokens, asked, limits.seconds)
        return Answer(translations=[_hypotheses(one, body.alignments) for one in found])

    @app.post("/attention", response_model=Attention, **post)
    async def attention(request: Request, body: LookBody) -> Response:
        """Tell where each head of each layer looks in a text as its translation is written."""
        until = time.monotonic() + limits.seconds
        given = [body.text] if body.translation is None else [body.text, body.translation]
        _check(given, limits)
        (read,) = await _count_all([body.text], count_tokens, limits)
        translation = body.translation
        if translation is None:
            (best,) = await answers(request, [body.text], [read], Asked(), limits.seconds)
            translation = best.text
        (written,) = await _count_all([translation], count_target_tokens, limits)
        if read * written > limits.pairs:
            raise HTTPException(
                413, f"{read} tokens read and {written} written; at most {limits.pairs} pairs"
            )
        asked = Look(translation)
        left = until - time.monotonic()
        (found,) = await answers(request, [body.text], [read + written], asked, left)
        content = await asyncio.to_thread(_attention_json, translation, *found)
        return Response(content, media_type="application/json")

    @app.get("/health", responses={503: {"model": Error}})
    async def health() -> dict[str, str]:
        """Whether the service translates."""
        if not batcher.working:
            raise HTTPException(503, "no process that translates is left")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(generate_latest(numbers.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _check(texts: list[str], limits: Limits) -> None:
    """Refuses what can be without reading the texts."""
    if len(texts) > limits.texts:
        raise HTTPException(413, f"{len(texts)} texts; at most {limits.texts} a request")
    longest = max(map(len, texts), default=0)
    if longest > limits.characters:
        raise HTTPException(413, f"a text has {longest} characters; at most {limits.characters}")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise HTTPException(
            422, "a text holds half of a surrogate pair, which is no character"
        ) from None


async def _count_all(
    texts: list[str], count_tokens: Callable[[str], int], limits: Limits
) -> list[int]:
    """The tokens of each text; whoever else asks something has a turn after each."""
    tokens = []
    for text in texts:
        tokens.append(count_tokens(text))
        if tokens[-1] > limits.tokens:
            raise HTTPException(413, f"a text has {tokens[-1]} tokens; at most {limits.tokens}")
        await asyncio.sleep(0)
    return tokens


async def _all(answers: list[Future], request: Request, seconds: float) -> list[Any]:
    """The answers to all texts of a request, while the client waits for them.

    Where it hangs up, where its time is over or a text fails, what is in the line is taken back.
    """
    everything = asyncio.gather(*map(asyncio.wrap_future, answers))
    hung_up = asyncio.ensure_future(_hung_up(request))
    either: set[asyncio.Future[Any]] = {everything, hung_up}
    try:
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if everything.done():
            return everything.result()
        if hung_up.done():  # 499 is for the metrics: no one reads it
            raise HTTPException(499, "the client hung up")
        raise TimeIsOver
    finally:
        hung_up.cancel()
        everything.cancel()
        for answer in answers:
            answer.cancel()


async def _hung_up(request: Request) -> None:
    """Returns when the client is gone. Its body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def _refusals(seconds: float) -> Iterator[None]:
    """Says in HTTP why there is no translation."""
    try:
        yield
    except HTTPException:
        raise
    except Overloaded:
        raise HTTPException(
            429, "too many requests wait: try again", {"Retry-After": "1"}
        ) from None
    except NoOneWorks:
        raise HTTPException(503, "the service is about to end") from None
    except TimeIsOver:
        raise HTTPException(504, f"no translation within {seconds:g} seconds") from None
    except Exception:
        raise HTTPException(500, "the translation failed; the log says why") from None


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


def _attention_json(
    translation: str, source: list[str], target: list[str], weights: np.ndarray
) -> str:
    """An `Attention` as text, made head by head: others have a turn after each."""
    rounded = weights.astype("float64").round(5)
    layers = (",".join(json.dumps(head.tolist()) for head in layer) for layer in rounded)
    told = json.dumps({"translation": translation, "source": source, "target": target})
    return f'{told[:-1]}, "weights": [{",".join(f"[{layer}]" for layer in layers)}]}}'


def _tell_errors_as_json(app: FastAPI) -> None:
    """Every error is `{"error": ...}`, in one line."""

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        line = " ".join(f"{place}: {first['msg']}".split())  # a client's name may be of several
        return JSONResponse({"error": line}, 422)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the service failed; the log says why"}, 500)


def _tell_limits(app: FastAPI, limits: Limits) -> None:
    """Has the interface say what a request may hold at most, which is refused by hand."""
    untold = app.openapi

    def openapi() -> dict[str, Any]:
        told = untold()
        for name in ("Body", "LookBody"):
            properties = told["components"]["schemas"][name]["properties"]
            for schema in properties.values():
                _limit(schema, limits)
        properties = told["components"]["schemas"]["Body"]["properties"]
        properties["n_best"]["maximum"] = limits.n_best
        return told

    app.openapi = openapi  # type: ignore[method-assign]


def _limit(schema: dict[str, Any], limits: Limits) -> None:
    """Writes into the schema of a text, or of several, how much it may be."""
    kind = schema.get("type")
    if kind == "string":
        schema["maxLength"] = limits.characters
    if kind == "array":
        schema["maxItems"] = limits.texts
        _limit(schema["items"], limits)
    for choice in schema.get("anyOf", []):
        _limit(choice, limits)


class _Count:
    """Counts requests and the seconds of translations."""

    PATHS = ("/", "/translate", "/attention", "/health", "/metrics")

    def __init__(self, app: ASGIApp, numbers: Numbers):
        self._app, self._numbers = app, numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self.PATHS else "other"
            self._numbers.requests.labels(path, status).inc()
            if path == "/translate":
                self._numbers.seconds.observe(time.perf_counter() - began)


class _Guard:
    """Ends requests without the key, and those whose body is too long or too long in coming.

    The connection ends with them: what is still to come of the body is not waited for.
    """

    _CLOSE = {"Connection": "close"}

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None):
        self._app, self._limits, self._key = app, limits, api_key
        self._too_long = f"a body of at most {limits.bytes:,} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif refusal := self._refusal(scope["path"], dict(scope["headers"])):
            await refusal(scope, receive, send)
        else:
            await self._app(scope, self._guarded(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        """Of a request whose headers suffice to refuse it."""
        if path in ("/translate", "/attention") and self._key is not None:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
                return JSONResponse(
                    {"error": "the API key is missing or wrong"},
                    401,
                    self._CLOSE | {"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.bytes:
            return JSONResponse({"error": self._too_long}, 413, self._CLOSE)
        return None

    def _guarded(self, receive: Receive) -> Receive:
        """Gives a body that is neither too long nor too slow."""
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        seen = 0
        whole = False

        async def guarded() -> Message:
            nonlocal seen, whole
            if whole:  # only the end of the connection can come: there is no hurry
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not come in time", self._CLOSE) from None
            seen += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if seen > self._limits.bytes:
                raise HTTPException(413, self._too_long, self._CLOSE)
            return message

        return guarded
