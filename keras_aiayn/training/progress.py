"""What a run shows while it goes on: a bar with loss, accuracy, learning rate, rate, time left."""

import math
import time
from collections.abc import Callable
from typing import Self

import keras
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.5
# Where there is no terminal to draw on, a line now and then says the same.
LINE_SECONDS = 30.0
# Where there are several processes, they agree on whether to stop once in so many updates.
AGREE_EVERY = 10


class StepProgress(keras.callbacks.Callback):
    """A progress bar over the updates of a whole run, fed by `model.fit` of its segments.

    Args:
        console: where to draw.
        total: updates of the run.
        done: updates done before.
        learning_rate: the rate of an update, counted from 1.
        accumulation: micro-batches of an update.
        checkpoint_seconds: time after which a segment is ended for a checkpoint; 0 for never.
        agree: with several processes, tells of a flag whether any of them has raised it.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        done: int,
        learning_rate: Callable[[int], float],
        accumulation: int = 1,
        checkpoint_seconds: float = 0.0,
        agree: Callable[[bool], list[bool]] | None = None,
    ):
        super().__init__()
        self.step = self._first = done
        self.stop_requested = False
        self._console, self._total, self._learning_rate = console, total, learning_rate
        self._accumulation, self._checkpoint_seconds = accumulation, checkpoint_seconds
        self._agree = agree
        self._saved = self._started = time.perf_counter()
        self._micro_batches = 0
        self._tokens: list[int] = []
        self._tokens_done, self._began, self._shown = 0, time.perf_counter(), 0.0
        self._bar = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("compiling", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin_segment(self, target_tokens: list[int]) -> None:
        """Says how many real target tokens each of the next updates learns from."""
        self._tokens, self._tokens_done, self._micro_batches = target_tokens, 0, 0
        self._began = time.perf_counter()

    def checkpoint_is_due(self) -> bool:
        """Whether the time since the last checkpoint is over."""
        return 0 < self._checkpoint_seconds <= time.perf_counter() - self._saved

    def checkpoint_was_saved(self) -> None:
        """Starts that time anew."""
        self._saved = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Counts a micro-batch; draws at most twice a second."""
        self._micro_batches += 1
        if self._micro_batches % self._accumulation:
            return
        self._tokens_done += self._tokens[self._micro_batches // self._accumulation - 1]
        self.step += 1
        # A loss that is no number stays none: what follows would be lost.
        lost = not math.isfinite((logs or {}).get("token_loss", 0.0))
        stop = self.stop_requested or lost or self.checkpoint_is_due()
        if self._agree is not None:
            (stop,) = self._agree(stop) if self.step % AGREE_EVERY == 0 else (False,)
        if stop:
            self.model.stop_training = True
        now = time.perf_counter()
        due = REFRESH_SECONDS if self._console.is_terminal else LINE_SECONDS
        if now - self._shown >= due:
            self._shown = now
            self._show(logs or {}, now)

    def _show(self, logs: dict, now: float) -> None:
        loss, accuracy = (float(logs.get(name, 0.0)) for name in ("token_loss", "token_accuracy"))
        rate = self._tokens_done / (now - self._began)
        text = (
            f"loss {loss:.3f}  accuracy {100 * accuracy:.1f} %  "
            f"rate {self._learning_rate(self.step):.2e}  {rate:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=self.step, description=text)
        if not self._console.is_terminal:
            # Rich forgets samples that are as far apart as these lines.
            left = (now - self._started) / (self.step - self._first) * (self._total - self.step)
            text = f"{text}  {left / 60:.1f} min left"
            self._console.print(f"step {self.step:,}/{self._total:,}  {text}")
