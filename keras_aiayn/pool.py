"""Translation on several devices: a process for each, which loads the model and takes its turns."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any, Self

from keras_aiayn.decoding.compiled import has_accelerator
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.memory import keep_freed_memory
from keras_aiayn.translator import Translation, Translator

# Calls that a device has at a time: one that it works on, and one that waits.
AHEAD = 2

# In a process of the pool: what translates there, and together with what; or why nothing does.
_own: list[Translator] = []
_refused: list[Exception] = []


class Pool:
    """Processes that translate as one translator would, the same texts at a time.

    Where the machine has GPUs, each process sees one of them; else they share the CPU's cores.

    Args:
        models: a `.keras` file, or several that translate together.
        devices: processes.
        dtype: as of `Translator.as_dtype`; the models' own by default.

    Raises:
        ValueError: where fewer GPUs are visible; when it is entered, where a model cannot be
            loaded or not each process has an accelerator.
        FileNotFoundError: when it is entered, where there is no such file.
    """

    def __init__(self, models: Sequence[Path], devices: int, dtype: str | None = None):
        threads = str(max(1, (os.cpu_count() or 1) // devices))
        shared = {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads,
                  "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}  # fmt: skip
        spawn = multiprocessing.get_context("spawn")
        arguments = (list(models), dtype)
        self._executors, self._first = [], []
        # What a backend writes as it starts; shown where a process dies.
        self._said = tempfile.TemporaryFile()
        for gpu in _visible_gpus(devices):
            executor = ProcessPoolExecutor(1, spawn, initializer=_load, initargs=arguments)
            self._executors.append(executor)
            # Backends read it as they are imported, which is before the initializer runs.
            settings = shared | {"CUDA_VISIBLE_DEVICES": gpu}
            with _environment(settings), _standard_error_to(self._said):
                self._first.append(executor.submit(_accelerators))  # starts the process

    def __enter__(self) -> Self:
        try:
            with _one_error():
                accelerated = {first.result() for first in self._first}
            if len(accelerated) > 1:
                raise ValueError(
                    "there is no accelerator for each of them. "
                    f"Received: devices={len(self._first)}"
                )
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, error: object, *more: object) -> None:
        for executor in self._executors:
            # What they are at is of no use any more, or one is alive that the executor gave up.
            if error is not None or executor._broken:
                for process in list((executor._processes or {}).values()):
                    process.kill()
            executor.shutdown(cancel_futures=True)
        if isinstance(error, type) and issubclass(error, ChildProcessError):
            self._said.seek(0)
            sys.stderr.write(self._said.read().decode(errors="replace")[-2000:])
        self._said.close()

    def search_settings(self, **settings: Any) -> SearchSettings:
        """As of `Translator`."""
        with _one_error():
            return self._executors[0].submit(_search_settings, settings).result()

    def call_on(self, device: int, function: Callable[[Translator], Any]) -> Any:
        """What a function gives for the (first) translator in the process of a device, from 0.

        Raises:
            ChildProcessError: where the process has died, or dies at it.
        """
        with _one_error():
            return self._executors[device].submit(_call, function).result()

    def map(self, calls: Iterable[dict[str, Any]]) -> Iterator[list[Translation]]:
        """What `Translator.translate` gives for each call, in order, a bounded number ahead.

        Args:
            calls: keyword arguments.
        """
        waiting: deque[Future] = deque()
        for number, call in enumerate(calls):
            with _one_error():
                executor = self._executors[number % len(self._executors)]
                waiting.append(executor.submit(_translate, call))
                ready = len(waiting) == AHEAD * len(self._executors)
                translations = waiting.popleft().result() if ready else None
            if translations is not None:
                yield translations
        while waiting:
            with _one_error():
                translations = waiting.popleft().result()
            yield translations


def _visible_gpus(devices: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is to be in each process; nothing where they are hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(gpu) for gpu in range(devices)]
    gpus = [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    if not gpus:
        return [visible] * devices
    if len(gpus) < devices:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES names {len(gpus)} devices. Received: devices={devices}"
        )
    return gpus[:devices]


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Other environment variables for a while, which a process started then keeps."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _standard_error_to(stream: IO[bytes]) -> Iterator[None]:
    """Another standard error for a while, which a process started then keeps."""
    sys.stderr.flush()
    own = os.dup(2)
    os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """An error that can be read where a process is gone."""
    try:
        yield
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that translates has died: what it was at is lost, go on with --resume"
        ) from None


def _load(models: list[Path], dtype: str | None) -> None:
    """Makes a process of the pool ready."""
    # Both may go to all processes of a group. They are for the one that started this one, which
    # may have something to finish; this one ends with it.
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=_end_with, args=(parent.join,), daemon=True).start()  # type: ignore
    from keras_aiayn.loading import load

    keep_freed_memory()
    try:
        for path in models:
            translator = load(path)
            _own.append(translator if dtype is None else translator.as_dtype(dtype))
    except Exception as error:  # raised here it would only be reported as a process that died
        _refused.append(error)


def _end_with(wait: Callable[[], Any]) -> None:
    """Ends this process when the other one is gone, however it went."""
    wait()
    os._exit(1)


def _accelerators() -> bool:
    """Whether this process has something else than a CPU; raises what loading raised."""
    for error in _refused:
        raise error
    return has_accelerator()


def _call(function: Callable[[Translator], Any]) -> Any:
    return function(_own[0])


def _search_settings(settings: dict[str, Any]) -> SearchSettings:
    return _own[0].search_settings(**settings)


def _translate(call: dict[str, Any]) -> list[Translation]:
    return _own[0].translate(together_with=_own[1:], **call)
