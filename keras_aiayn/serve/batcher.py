"""Requests that arrive together are translated together.

Texts wait in a line. A worker takes the first one and whatever else waits that wants the same
settings, up to a budget of tokens; where there is room left, it waits a moment for more. A text
whose time is over, or that no one waits for any more, is not translated.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from keras_aiayn.translator import Translation

# Translates texts under settings.
Translate = Callable[[list[str], Any], Sequence[Translation]]


class Overloaded(Exception):
    """There is no room in the line."""


class TimeIsOver(Exception):
    """A text waited longer than it may."""


@dataclasses.dataclass
class _Waiting:
    text: str
    tokens: int
    settings: Hashable
    deadline: float
    answer: Future


class Batcher:
    """A line of texts, and workers that translate what waits in it.

    Args:
        workers: what translates, a function for each device; each runs in a thread of its own.
        tokens_per_batch: most source tokens translated at a time. A longer text goes alone.
        tokens_waiting: most source tokens in the line; a text that comes to an empty line is taken
            however long it is.
        wait_seconds: how long a worker with room left waits for more.
        on_batch: called with the number of texts and tokens of each batch, and its seconds.
    """

    def __init__(
        self,
        workers: Sequence[Translate],
        *,
        tokens_per_batch: int = 2_048,
        tokens_waiting: int = 65_536,
        wait_seconds: float = 0.005,
        on_batch: Callable[[int, int, float], None] = lambda texts, tokens, seconds: None,
    ):
        self.tokens_per_batch, self.tokens_waiting = tokens_per_batch, tokens_waiting
        self._wait_seconds, self._on_batch = wait_seconds, on_batch
        self._line: deque[_Waiting] = deque()
        self._tokens = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(translate,), daemon=True)
            for translate in workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Source tokens in the line."""
        return self._tokens

    def submit(self, text: str, tokens: int, settings: Hashable, seconds: float) -> Future:
        """Puts a text in the line.

        Args:
            text: to be translated.
            tokens: of it.
            settings: what the workers' functions get; equal ones are translated together.
            seconds: after which it need not be translated any more.

        Returns:
            The future `Translation`. It fails with `TimeIsOver`, or with what translating raised.

        Raises:
            Overloaded: where there is no room, or no one works any more.
        """
        with self._changed:
            if self._closed or (self._line and self._tokens + tokens > self.tokens_waiting):
                raise Overloaded
            answer: Future = Future()
            deadline = time.monotonic() + seconds
            self._line.append(_Waiting(text, tokens, settings, deadline, answer))
            self._tokens += tokens
            self._changed.notify()
        return answer

    def close(self) -> None:
        """Takes nothing more, and returns when all that was taken is translated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, translate: Translate) -> None:
        while batch := self._next_batch():
            began = time.monotonic()
            try:
                texts = [one.text for one in batch]
                found = translate(texts, batch[0].settings)
            except BaseException as error:
                for one in batch:
                    one.answer.set_exception(error)
                continue
            for one, translation in zip(batch, found, strict=True):
                one.answer.set_result(translation)
            tokens = sum(one.tokens for one in batch)
            self._on_batch(len(batch), tokens, time.monotonic() - began)

    def _next_batch(self) -> list[_Waiting]:
        """What to translate next; nothing when the line is closed and empty."""
        while True:
            with self._changed:
                while not self._line and not self._closed:
                    self._changed.wait()
                until = time.monotonic() + self._wait_seconds
                while (
                    self._line
                    and not self._closed
                    and self._tokens < self.tokens_per_batch
                    and (left := until - time.monotonic()) > 0
                ):
                    self._changed.wait(left)
                if not self._line and self._closed:
                    return []
                taken = self._take()
            batch = [one for one in taken if _is_wanted(one)]
            if batch:
                return batch

    def _take(self) -> list[_Waiting]:
        """The first of the line, and all behind it that go with it; the others stay in order."""
        taken: list[_Waiting] = []
        rest: deque[_Waiting] = deque()
        tokens = 0
        for one in self._line:
            fits = not taken or (
                one.settings == taken[0].settings and tokens + one.tokens <= self.tokens_per_batch
            )
            if fits:
                taken.append(one)
                tokens += one.tokens
            else:
                rest.append(one)
        self._line = rest
        self._tokens -= tokens
        return taken


def _is_wanted(one: _Waiting) -> bool:
    """Whether someone still waits for it, who is told otherwise where its time is over."""
    if not one.answer.set_running_or_notify_cancel():
        return False
    if time.monotonic() > one.deadline:
        one.answer.set_exception(TimeIsOver())
        return False
    return True
