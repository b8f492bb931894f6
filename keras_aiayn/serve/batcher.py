"""Requests that arrive together are translated together.

Texts wait in a line. A worker takes the first one and those behind it that want the same settings
and are nearest to it in length, up to a budget of tokens, pads counted; where there is room left,
it waits a moment for more. A text whose time is over, or that no one waits for any more, leaves the
line untranslated. The line is no longer than what is translated in the time that a text has, as
full batches went of late.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

log = logging.getLogger("keras_aiayn.serve")

# Gives for each text what settings ask of it: a translation, for most.
Translate = Callable[[list[str], Any], Sequence[Any]]

# So many workers may die at a text. It may be what they die of, and must not take all of them.
DEATHS = 2

# Of the time that a text has, so much may be spent by what waits before it: the rest is for what
# is translated already, and for texts that take longer than others.
WAITED = 0.75

# How far behind the first one texts of like length are looked for, in budgets. Further, and those
# that are like no other would be passed by too often.
LOOKED_THROUGH = 4


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


class Batcher:
    """A line of texts, and workers that translate what waits in it.

    Args:
        workers: what translates, a function for each device; each runs in a thread of its own. One
            that raises `ChildProcessError` is not asked again, and what it was at is another's.
        tokens_per_batch: most source tokens translated at a time, with the pads that make texts
            as long as the longest. A longer text goes alone.
        tokens_waiting: most source tokens in the line.
        wait_seconds: how long a worker with room left waits for more.
        on_batch: called with the number of texts and tokens of each batch, and its seconds.
        on_end: called when the last worker is gone, and the line was not closed.
    """

    def __init__(
        self,
        workers: Sequence[Translate],
        *,
        tokens_per_batch: int = 2_048,
        tokens_waiting: int = 65_536,
        wait_seconds: float = 0.005,
        on_batch: Callable[[int, int, float], None] = lambda texts, tokens, seconds: None,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.tokens_per_batch, self.tokens_waiting = tokens_per_batch, tokens_waiting
        self._wait_seconds, self._on_batch, self._on_end = wait_seconds, on_batch, on_end
        self._line: OrderedDict[Future, _Waiting] = OrderedDict()
        self._tokens = 0
        self._token_seconds = 0.0  # of a full batch, of late; 0 until there was one
        self._working = len(workers)
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
        if not self._tokens or not self._token_seconds:
            return self.tokens_waiting
        in_time = WAITED * seconds * self._working / self._token_seconds
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

    def _work(self, translate: Translate) -> None:
        """Translates until the line is closed and empty, or what translates is gone."""
        while True:
            batch: list[_Waiting] = []
            try:
                batch = self._next_batch()
                if not batch:
                    break
                self._translate(batch, translate)
            except ChildProcessError:
                self._put_back(batch)
                break
            except BaseException as error:  # the next batch may go well: this thread goes on
                log.exception("a batch of %d texts failed", len(batch))
                failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                for one in batch:
                    _settle(one.answer, failure)
        self._leave()

    def _translate(self, batch: list[_Waiting], translate: Translate) -> None:
        began = time.monotonic()
        found = translate([one.text for one in batch], batch[0].settings)
        seconds = time.monotonic() - began
        tokens = sum(one.tokens for one in batch)
        self._learn_pace(tokens, seconds)
        for one, translation in list(zip(batch, found, strict=True)):
            _settle(one.answer, translation)
        self._on_batch(len(batch), tokens, seconds)

    def _learn_pace(self, tokens: int, seconds: float) -> None:
        """Of full batches: in a small one each token takes longer, and none is when many wait."""
        if 2 * tokens >= self.tokens_per_batch:
            new = seconds / tokens
            old = self._token_seconds or new
            self._token_seconds = 0.8 * old + 0.2 * new

    def _next_batch(self) -> list[_Waiting]:
        """What to translate next; nothing when the line is closed and empty."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._line or self._closed)
                until = time.monotonic() + self._wait_seconds
                while (
                    self._line
                    and not self._closed
                    and self._tokens < self.tokens_per_batch
                    and (left := until - time.monotonic()) > 0
                ):
                    self._changed.wait(left)
                batch = self._take()
                if batch or (self._closed and not self._line):
                    return batch

    def _take(self) -> list[_Waiting]:
        """The first of the line, and what goes with it; the others stay in order."""
        now = time.monotonic()
        near: list[_Waiting] = []
        tokens = 0
        for one in list(self._line.values()):
            if now > one.deadline:
                _settle(one.answer, TimeIsOver())  # and it is forgotten
            elif tokens < LOOKED_THROUGH * self.tokens_per_batch and (
                not near or one.settings == near[0].settings
            ):
                near.append(one)
                tokens += one.tokens
        taken = self._of_like_length(near)
        for one in taken:
            self._forget(one.answer)
        return taken

    def _of_like_length(self, near: list[_Waiting]) -> list[_Waiting]:
        """The first, and those nearest to it in length: few pads, and about as many steps."""
        taken: list[_Waiting] = []
        longest = 0
        for one in sorted(near, key=lambda one: abs(one.tokens - near[0].tokens)):
            longest_then = max(longest, one.tokens)
            if not taken or longest_then * (len(taken) + 1) <= self.tokens_per_batch:
                taken.append(one)
                longest = longest_then
        return taken

    def _put_back(self, batch: list[_Waiting]) -> None:
        """Gives what a worker was at when it died to the next one."""
        for one in batch:
            one.deaths += 1
            if one.deaths == DEATHS:
                _settle(one.answer, RuntimeError(f"{DEATHS} processes have died at it"))
        with self._changed:
            self._enter([one for one in batch if not one.answer.done()], first=True)

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
