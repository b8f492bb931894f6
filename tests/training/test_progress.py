"""What a run says of itself where there is no terminal."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from keras_aiayn.training import progress
from keras_aiayn.training.progress import StepProgress

pytestmark = pytest.mark.backend_free


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    return clock


def started(said, **options):
    shown = StepProgress(Console(file=said, width=200), 60, 20, lambda step: step / 1000, **options)
    shown.set_model(SimpleNamespace(stop_training=False))
    return shown


def test_a_line_tells_the_rate_and_the_time_left(clock):
    said = io.StringIO()
    shown = started(said)
    shown.begin_segment([500] * 10)
    for batch in range(10):
        clock.now += 6.0
        shown.on_train_batch_end(batch, {"token_loss": 2.5, "token_accuracy": 0.25})
    *_, last = said.getvalue().splitlines()
    # Six of forty steps in 36 seconds: the 34 that are left take 3.4 minutes. A line each half.
    assert last == (
        "step 26/60  loss 2.500  accuracy 25.0 %  rate 2.60e-02  83 tokens/s  3.4 min left"
    )
    assert len(said.getvalue().splitlines()) == 2


def test_micro_batches_are_no_steps(clock):
    shown = started(io.StringIO(), accumulation=2)
    shown.begin_segment([500] * 2)
    for batch in range(3):
        clock.now += 1
        shown.on_train_batch_end(batch, {})
    assert shown.step == 21


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_lost_loss_and_a_due_checkpoint_end_the_segment(clock, loss):
    shown = started(io.StringIO(), checkpoint_seconds=60.0)
    shown.begin_segment([500] * 4)
    clock.now += 1
    shown.on_train_batch_end(0, {"token_loss": 1.0})
    assert not shown.model.stop_training
    clock.now += 61
    shown.on_train_batch_end(1, {"token_loss": 1.0})
    assert shown.model.stop_training
    shown.model.stop_training = False
    shown.checkpoint_was_saved()
    shown.on_train_batch_end(2, {"token_loss": loss})
    assert shown.model.stop_training
