"""Runs the service until it is told to stop; what it has taken is finished first."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import uvicorn

from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.loading import load
from keras_aiayn.pool import Pool
from keras_aiayn.serve.app import Asked, Limits, make_app
from keras_aiayn.translator import Translation


def run(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    devices: int = 1,
    api_key: str | None = None,
    tokens_per_batch: int = 2_048,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    say: Callable[[str], None] = print,
) -> None:
    """Serves a model over HTTP.

    Args:
        model: a `.keras` file.
        host: the address to listen at; only this machine reaches the default one.
        port: to listen at.
        devices: that translate, a process for each where there are several.
        api_key: that every request must carry; none by default.
        tokens_per_batch: most source tokens translated at a time on a device.
        limits: of a request.
        say: told where the service listens.
    """
    translator = load(model)
    tokenizer = translator.source_tokenizer
    pool: AbstractContextManager[Any] = Pool([model], devices) if devices > 1 else nullcontext()
    with pool as processes:

        def translate(device: int, texts: list[str], asked: Asked) -> list[Translation]:
            call: dict[str, Any] = {
                "texts": texts,
                "details": True,
                "n_best": asked.n_best,
                "alignments": asked.alignments,
                "tokens_per_batch": tokens_per_batch,
            }
            if processes is None:
                return translator.translate(**call)
            return processes.translate_on(device, call)

        workers = [functools.partial(translate, device) for device in range(devices)]
        for worker in workers:
            worker(["."], Asked())  # what is compiled first need not keep the first client waiting
        app = make_app(
            workers,
            functools.partial(_count_tokens, tokenizer),
            limits=limits,
            api_key=api_key,
            tokens_per_batch=tokens_per_batch,
        )
        say(f"listening on http://{host}:{port}, its interface on http://{host}:{port}/docs")
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            backlog=4_096,
            timeout_graceful_shutdown=int(limits.seconds) + 1,
        )
        uvicorn.Server(config).run()


def _count_tokens(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[int]:
    return [len(ids) + 1 for ids in tokenizer.encode(list(texts))]
