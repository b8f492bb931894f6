"""Runs the service until it is told to stop; what it has taken is finished first."""

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import uvicorn

from keras_aiayn.data.tokenizer import Tokenizer
from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.loading import load, load_tokenizers
from keras_aiayn.memory import keep_freed_memory
from keras_aiayn.pool import Pool
from keras_aiayn.serve.app import Limits, Look, make_app
from keras_aiayn.serve.grid import Grid
from keras_aiayn.serve.live import Asked, live
from keras_aiayn.translator import Translator

Tokenizers: TypeAlias = tuple[Tokenizer, Tokenizer]
# Calls a function of the translator of a device.
CallOn: TypeAlias = Callable[[int, Callable[[Translator], Any]], Any]


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
        api_key: that every translation must be asked for with; none by default.
        tokens_per_batch: most source tokens translated at a time on a device.
        limits: of a request.
        say: told how the start goes, and where the service listens.

    Raises:
        OSError: where the address cannot be listened at.
        ValueError: where the model cannot be loaded, or there are too few devices.
        ChildProcessError: when all processes that translate have died.
    """
    with _bound(host, port) as listener, _on_devices(model, devices) as (tokenizers, call_on):
        grid = Grid(limits.tokens, tokens_per_batch, exact=call_on(0, _takes_any_shape))
        _warm_up(call_on, devices, grid, say)
        died = threading.Event()

        def end() -> None:
            died.set()
            server.should_exit = True

        app = make_app(
            [functools.partial(_turn, call_on, device, grid) for device in range(devices)],
            *(functools.partial(_count, tokenizer) for tokenizer in tokenizers),
            limits=limits,
            api_key=api_key,
            grid=grid,
            on_end=end,
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            backlog=4_096,
            timeout_graceful_shutdown=int(limits.seconds) + 1,
        )
        server = uvicorn.Server(config)
        say(f"listening on http://{host}:{port}, its page on /, its interface on /docs")
        server.run([listener])
        if died.is_set():
            raise ChildProcessError("all processes that translate have died: start again")


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address. One that is taken is refused before anything takes time."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise OSError(f"cannot listen at {host}, port {port}: {error}") from None
    return listener


@contextlib.contextmanager
def _on_devices(model: Path, devices: int) -> Iterator[tuple[Tokenizers, CallOn]]:
    """The tokenizers of both sides, and what calls on the devices."""
    if devices == 1:
        keep_freed_memory()
        translator = load(model)
        both = (translator.source_tokenizer, translator.target_tokenizer)
        yield both, lambda device, function: function(translator)
        return
    with Pool([model], devices) as pool:
        # The model is in the processes: here it would take the room of another on a device.
        yield load_tokenizers(model), pool.call_on


def _count(tokenizer: Tokenizer, text: str) -> int:
    """The tokens of a text, its end included."""
    return len(tokenizer.encode([text])[0]) + 1


def _turn(
    call_on: CallOn, device: int, grid: Grid, new: dict[int, str], asked: Asked | Look
) -> dict[int, Any]:
    """What was asked of the texts: `Translation`s, or what `Translator.attention_by_head` gives."""
    if isinstance(asked, Look):
        return call_on(device, functools.partial(_look, new=new, asked=asked))
    return call_on(device, functools.partial(_translate, grid=grid, new=new, asked=asked))


def _translate(
    translator: Translator, grid: Grid, new: dict[int, str], asked: Asked
) -> dict[int, Any]:
    return live(translator, grid).turn(new, asked)


def _look(translator: Translator, new: dict[int, str], asked: Look) -> dict[int, Any]:
    return {
        number: translator.attention_by_head(text, asked.translation)
        for number, text in new.items()
    }


def _takes_any_shape(translator: Translator) -> bool:
    return takes_any_shape()


def _widths(translator: Translator, grid: Grid) -> list[int]:
    return live(translator, grid).widths


def _compile(translator: Translator, grid: Grid, width: int) -> None:
    live(translator, grid).compile_width(width)


def _warm_up(call_on: CallOn, devices: int, grid: Grid, say: Callable[[str], None]) -> None:
    """Compiles on each device what it will be asked for, and translates once."""
    widths = call_on(0, functools.partial(_widths, grid=grid))
    with ThreadPoolExecutor(devices) as threads:

        def on_all(function: Callable[..., Any], *arguments: Any) -> None:
            list(threads.map(lambda device: function(device, *arguments), range(devices)))

        for number, width in enumerate(widths, 1):
            say(f"compiling: texts of up to {width} tokens ({number} of {len(widths)})")
            on_all(call_on, functools.partial(_compile, grid=grid, width=width))
        on_all(functools.partial(_turn, call_on), grid, {0: "."}, Asked())
