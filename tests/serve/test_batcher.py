"""What waits together is translated together; each gets its own answer, or is told why not."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_aiayn.serve.batcher import Batcher, Overloaded, TimeIsOver

pytestmark = pytest.mark.backend_free


class Upper:
    """Stands in for a translator: upper case, and a gate that holds it."""

    def __init__(self):
        self.batches, self.gate = [], threading.Event()
        self.gate.set()

    def __call__(self, texts, settings):
        self.gate.wait()
        self.batches.append((texts, settings))
        if "bad" in texts:
            raise ValueError("bad")
        return [f"{settings}:{text.upper()}" for text in texts]


@pytest.fixture
def upper():
    return Upper()


@pytest.fixture
def batcher(upper):
    made = Batcher([upper], tokens_per_batch=10, tokens_waiting=30, wait_seconds=0.01)
    yield made
    upper.gate.set()
    made.close()


def held(upper, batcher):
    """Holds the worker at a first text, so that what comes then waits."""
    upper.gate.clear()
    first = batcher.submit("first", 10, 0, 60)
    while batcher.waiting:
        time.sleep(0.001)
    return first


def test_what_waits_is_translated_together_up_to_the_budget(upper, batcher):
    first = held(upper, batcher)
    answers = [batcher.submit(text, 4, 0, 60) for text in "abcde"]
    upper.gate.set()
    assert [one.result(5) for one in answers] == [f"0:{text.upper()}" for text in "abcde"]
    assert first.result() == "0:FIRST"
    assert [texts for texts, _ in upper.batches] == [["first"], ["a", "b"], ["c", "d"], ["e"]]


def test_only_equal_settings_go_together_and_the_first_come_first(upper, batcher):
    held(upper, batcher)
    answers = [
        batcher.submit(text, 2, kind, 60) for text, kind in zip("abcd", (1, 2, 1, 2), strict=True)
    ]
    upper.gate.set()
    assert [one.result(5) for one in answers] == ["1:A", "2:B", "1:C", "2:D"]
    assert [texts for texts, _ in upper.batches[1:]] == [["a", "c"], ["b", "d"]]


def test_a_long_text_goes_alone_and_a_full_line_refuses(upper, batcher):
    held(upper, batcher)
    long = batcher.submit("long", 99, 0, 60)  # the line was empty
    with pytest.raises(Overloaded):
        batcher.submit("late", 1, 0, 60)
    upper.gate.set()
    assert long.result(5) == "0:LONG"
    assert batcher.submit("again", 1, 0, 60).result(5) == "0:AGAIN"


def test_what_no_one_waits_for_is_not_translated(upper, batcher):
    held(upper, batcher)
    times = zip("abc", (60, 0.0, 60), strict=True)
    cancelled, late, wanted = (batcher.submit(text, 1, 0, seconds) for text, seconds in times)
    assert cancelled.cancel()
    upper.gate.set()
    assert wanted.result(5) == "0:C"
    with pytest.raises(TimeIsOver):
        late.result(5)
    with pytest.raises(CancelledError):
        cancelled.result(5)
    assert upper.batches[1:] == [(["c"], 0)]


def test_an_error_reaches_those_it_concerns_and_the_worker_goes_on(upper, batcher):
    held(upper, batcher)
    answers = [batcher.submit(text, 5, 0, 60) for text in ("bad", "beside", "after")]
    upper.gate.set()
    for one in answers[:2]:
        with pytest.raises(ValueError, match="bad"):
            one.result(5)
    assert answers[2].result(5) == "0:AFTER"


def test_closing_finishes_what_was_taken_and_takes_nothing_more(upper):
    batcher = Batcher([upper], wait_seconds=0.01)
    held(upper, batcher)
    answers = [batcher.submit(text, 4, 0, 60) for text in "abc"]
    threading.Timer(0.05, upper.gate.set).start()
    batcher.close()
    assert all(one.done() for one in answers)
    with pytest.raises(Overloaded):
        batcher.submit("late", 1, 0, 60)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=60))
def test_each_gets_its_own_answer_on_several_workers(texts):
    uppers = [Upper() for _ in range(3)]
    batcher = Batcher(uppers, tokens_per_batch=32, tokens_waiting=10**6, wait_seconds=0.0)
    answers = [batcher.submit(f"t{i}", n, kind, 60) for i, (n, kind) in enumerate(texts)]
    assert [one.result(10) for one in answers] == [
        f"{kind}:T{i}" for i, (_, kind) in enumerate(texts)
    ]
    batcher.close()
    assert batcher.waiting == 0
    sizes = {f"t{i}": n for i, (n, _) in enumerate(texts)}
    for batch, _ in sum((upper.batches for upper in uppers), []):
        assert len(batch) == 1 or sum(sizes[text] for text in batch) <= 32
