"""Requests that arrive together are translated together.

Texts wait in a line. Whenever a worker has a turn, the first one joins those under way with it, and
of those behind it the nearest in length, as many as there are rows for: fewer the longer any of
them is. Where the first one finds no room, or wants other settings, some of those behind it may go
before. A text that no one waits for any more, or whose time is over, leaves the line untranslated.
The line is no longer than what is translated in the time that a text has, as full batches went of
late.
"""

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from keras_aiayn.serve.grid import Grid

log = logging.getLogger("keras_aiayn.serve")

# Lets texts, by their numbers, join those under way, and gives what is done after a while. The
# second argument is what is asked of them all.
Turn = Callable[[dict[int, str], Any], dict[int, Any]]

# So many workers may die at a text. It may be what they die of, and must not take all of them.
DEATHS = 2

# Of the time that a text has, so much may be spent by what waits before it: the rest is for what
# is translated already, and for texts that take longer than others.
WAITED = 0.75

# How far behind the first one texts of like length are looked for, in budgets of a batch. Further,
# and those that are like no other would be passed by too often.
LOOKED_THROUGH = 4

# So many tokens, in budgets, may go before the first one where it finds no room.
OVERTAKEN = 1

# Of the seconds and tokens of earlier turns, so much counts in the pace.
REMEMBERED = 0.95


class Overloaded(Exception):
    """There is no room in the line."""


class NoOneWorks(Exception):
    """The line is closed, or no worker is left."""


class TimeIsOver(Exception):
    """A text waited longer than it may."""


@dataclasses.dataclass
class _Waiting:
    text: str
    tokens: int
    settings: Hashable
    deadline: float
    answer: Future = dataclasses.field(default_factory=Future)
    deaths: int = 0


@dataclasses.dataclass
class _Batch:
    """What a worker is at: texts by their numbers."""

    settings: Hashable
    running: dict[int, _Waiting] = dataclasses.field(default_factory=dict)
    overtaken: int | None = None  # tokens that went before the first one, where it has no room


class Batcher:
    """A line of texts, and workers that translate what waits in it.

    Args:
        workers: what translates, a function for each device; each runs in a thread of its own. One
            that raises `ChildProcessError` is not asked again, and what it was at is another's.
            Whatever else it raises, nothing is under way with it afterwards.
        grid: what texts are padded to, and how many are translated at a time.
        tokens_waiting: most source tokens in the line.
        wait_seconds: how long a worker that has nothing to do waits for more than one.
        on_turn: called with the number of texts under way in a turn, the tokens of those that are
            done, and its seconds.
        on_end: called when the last worker is gone, and the line was not closed.
    """

    def __init__(
        self,
        workers: Sequence[Turn],
        *,
        grid: Grid = Grid(),  # noqa: B008 (frozen)
        tokens_waiting: int = 65_536,
        wait_seconds: float = 0.005,
        on_turn: Callable[[int, int, float], None] = lambda texts, tokens, seconds: None,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.tokens_waiting, self._grid = tokens_waiting, grid
        self._wait_seconds, self._on_turn, self._on_end = wait_seconds, on_turn, on_end
        self._line: OrderedDict[Future, _Waiting] = OrderedDict()
        self._tokens = 0
        self._done_seconds = self._done_tokens = 0.0  # in full batches of late
        self._numbers = itertools.count()
        self._working = len(workers)
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(turn,), daemon=True) for turn in workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Source tokens in the line."""
        return self._tokens

    @property
    def working(self) -> int:
        """Workers that are left."""
        return self._working

    def submit(
        self, texts: Sequence[str], tokens: Sequence[int], settings: Hashable, seconds: float
    ) -> list[Future]:
        """Puts texts in the line, all of them or none.

        Args:
            texts: to be translated.
            tokens: of each.
            settings: what the workers' functions get; equal ones are translated together.
            seconds: after which they need not be translated any more.

        Returns:
            The future answer to each. It fails with `TimeIsOver`, `NoOneWorks`, or with
            what translating raised. One that is cancelled leaves the line at once.

        Raises:
            Overloaded: where there is no room.
            NoOneWorks: where no one will translate them.
        """
        deadline = time.monotonic() + seconds
        new = [_Waiting(*one, settings, deadline) for one in zip(texts, tokens, strict=True)]
        for one in new:
            one.answer.add_done_callback(self._forget)
        with self._changed:
            if self._closed or not self._working:
                raise NoOneWorks
            if self._tokens + sum(tokens) > self._room(seconds):
                raise Overloaded
            self._enter(new)
        return [one.answer for one in new]

    def close(self) -> None:
        """Takes nothing more, and returns when all that was taken is translated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _room(self, seconds: float) -> float:
        """Tokens that may be in the line. One who finds it empty is taken whatever the pace."""
        if not self._tokens or not self._done_tokens:
            return self.tokens_waiting
        token_seconds = self._done_seconds / self._done_tokens
        in_time = WAITED * seconds * self._working / max(token_seconds, 1e-9)
        return min(self.tokens_waiting, in_time)

    def _enter(self, new: list[_Waiting], first: bool = False) -> None:
        """Lets texts into the line, at its end or in front of the others."""
        for one in reversed(new) if first else new:
            self._line[one.answer] = one
            self._line.move_to_end(one.answer, last=not first)
        self._tokens += sum(one.tokens for one in new)
        self._changed.notify_all()

    def _forget(self, answer: Future) -> None:
        """What is answered or cancelled waits no more."""
        with self._changed:
            one = self._line.pop(answer, None)
            self._tokens -= one.tokens if one else 0

    def _work(self, turn: Turn) -> None:
        """Translates until the line is closed and empty, or what translates is gone."""
        while (batch := self._begin()) is not None:
            try:
                self._translate(batch, turn)
            except ChildProcessError:
                self._put_back(batch)
                break
            except BaseException as error:  # the next batch may go well: this thread goes on
                log.exception("a batch of %d texts failed", len(batch.running))
                failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                for one in batch.running.values():
                    _settle(one.answer, failure)
        self._leave()

    def _translate(self, batch: _Batch, turn: Turn) -> None:
        """Takes turns until nothing is under way and nothing joins."""
        new = batch.running
        while batch.running:
            began = time.monotonic()
            found = turn({number: one.text for number, one in new.items()}, batch.settings)
            seconds = time.monotonic() - began
            count, tokens = len(batch.running), 0
            full = 2 * count >= self._grid.rows(self._width(batch))
            for number, outcome in found.items():
                one = batch.running.pop(number)
                _settle(one.answer, outcome)
                tokens += one.tokens
            if full:  # else each token takes longer, and none is when many wait
                self._learn_pace(tokens, seconds)
            self._on_turn(count, tokens, seconds)
            with self._changed:
                new = self._join(batch)

    def _learn_pace(self, tokens: int, seconds: float) -> None:
        self._done_seconds = REMEMBERED * self._done_seconds + seconds
        self._done_tokens = REMEMBERED * self._done_tokens + tokens

    def _width(self, batch: _Batch) -> int:
        """Of the widest text under way."""
        return max((self._grid.width(one.tokens) for one in batch.running.values()), default=1)

    def _begin(self) -> _Batch | None:
        """A batch of the first of the line, and of what goes with it; none when all is done."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._line or self._closed)
                until = time.monotonic() + self._wait_seconds
                while (
                    (first := self._first()) is not None
                    and not self._closed
                    and len(self._line) < self._grid.rows(self._grid.width(first.tokens))
                    and (left := until - time.monotonic()) > 0
                ):
                    self._changed.wait(left)
                if first is not None:
                    batch = _Batch(first.settings)
                    self._join(batch)
                    return batch
                if self._closed and not self._line:
                    return None

    def _first(self) -> _Waiting | None:
        """The first of the line whose time is not over."""
        return next(self._in_time(), None)

    def _in_time(self) -> Iterator[_Waiting]:
        """The line, without those whose time is over: they are told, and gone."""
        now = time.monotonic()
        for one in list(self._line.values()):
            if now > one.deadline:
                _settle(one.answer, TimeIsOver())  # and it is forgotten
            else:
                yield one

    def _join(self, batch: _Batch) -> dict[int, _Waiting]:
        """Takes what goes with a batch from the line; the others stay in order."""
        joining: dict[int, _Waiting] = {}
        count, width = len(batch.running), self._width(batch)
        for one in self._in_turn(batch):
            wider = max(width, self._grid.width(one.tokens))
            if count and count >= self._grid.rows(wider):
                continue
            if batch.overtaken is not None:
                batch.overtaken += one.tokens
                if batch.overtaken > OVERTAKEN * self._grid.tokens_per_batch:
                    break
            joining[next(self._numbers)] = one
            count, width = count + 1, wider
        for one in joining.values():
            self._forget(one.answer)
        batch.running |= joining
        return joining

    def _in_turn(self, batch: _Batch) -> list[_Waiting]:
        """What a batch may take from the line, best first; where the first may not go, as it is."""
        first = self._first()
        if first is None or (self._grid.exact and batch.running):
            return []
        near: list[_Waiting] = []
        tokens = 0
        for one in self._in_time():
            tokens += one.tokens
            if tokens > LOOKED_THROUGH * self._grid.tokens_per_batch and near:
                break
            if one.settings == batch.settings:
                near.append(one)
        wider = max(self._width(batch), self._grid.width(first.tokens))
        fits = not batch.running or len(batch.running) < self._grid.rows(wider)
        if first.settings == batch.settings and fits:
            batch.overtaken = None
            return sorted(near, key=lambda one: abs(one.tokens - first.tokens))
        batch.overtaken = batch.overtaken or 0
        return near

    def _put_back(self, batch: _Batch) -> None:
        """Gives what a worker was at when it died to the next one."""
        running = list(batch.running.values())
        for one in running:
            one.deaths += 1
            if one.deaths == DEATHS:
                _settle(one.answer, RuntimeError(f"{DEATHS} processes have died at it"))
        with self._changed:
            self._enter([one for one in running if not one.answer.done()], first=True)

    def _leave(self) -> None:
        """The end of a worker; with the last one, all that waits."""
        with self._changed:
            self._working -= 1
            closed, left = self._closed, self._working
            if not left:
                for answer in list(self._line):
                    _settle(answer, NoOneWorks())
        if not closed:
            log.error("a process that translates has died: %d left", left)
            if not left:
                self._on_end()


def _settle(answer: Future, outcome: Any) -> None:
    """Gives a text its translation, or the exception in the place of one."""
    with contextlib.suppress(InvalidStateError):  # no one waits for it any more
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
