"""What waits together is translated together; each gets its own answer, or is told why not."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_aiayn.serve.batcher import Batcher, NoOneWorks, Overloaded, TimeIsOver
from keras_aiayn.serve.grid import Grid

pytestmark = pytest.mark.backend_free

TWO = Grid(tokens=512, tokens_per_batch=64)  # texts of at most 32 tokens at a time; one of others


class Upper:
    """Stands in for a translator: upper case, and a gate that holds it.

    `turns` is what is under way in each turn; so many of it are done then, the newest first, so
    that what is old stays.
    """

    def __init__(self, done=100):
        self.turns, self.gate, self.done, self.running = [], threading.Event(), done, {}
        self.gate.set()

    def __call__(self, new, settings):
        self.gate.wait()
        self.running |= new
        self.turns.append((list(self.running.values()), settings))
        if "bad" in new.values():
            self.running = {}
            raise ValueError("bad")
        numbers = list(self.running)[-self.done :]
        return {number: f"{settings}:{self.running.pop(number).upper()}" for number in numbers}


def submit(batcher, text, tokens, settings, seconds):
    (answer,) = batcher.submit([text], [tokens], settings, seconds)
    return answer


@pytest.fixture
def upper():
    return Upper()


@pytest.fixture
def batcher(upper):
    made = Batcher([upper], grid=TWO, tokens_waiting=90, wait_seconds=0.01)
    yield made
    upper.gate.set()
    made.close()


def held(upper, batcher):
    """Holds the worker at a first text, so that what comes then waits."""
    upper.gate.clear()
    first = submit(batcher, "first", 10, 0, 60)
    while batcher.waiting:
        time.sleep(0.001)
    return first


def test_what_waits_is_translated_together_as_many_as_there_is_room_for(upper, batcher):
    first = held(upper, batcher)
    answers = [submit(batcher, text, 4, 0, 60) for text in "abcde"]
    upper.gate.set()
    assert [one.result(5) for one in answers] == [f"0:{text.upper()}" for text in "abcde"]
    assert first.result() == "0:FIRST"
    assert [texts for texts, _ in upper.turns] == [["first"], ["a", "b"], ["c", "d"], ["e"]]


def test_what_comes_joins_those_under_way(upper, batcher):
    upper.done = 1
    first = held(upper, batcher)
    answers = [submit(batcher, text, 4, 0, 60) for text in "abc"]
    upper.gate.set()
    assert [one.result(5) for one in (first, *answers)] == ["0:FIRST", "0:A", "0:B", "0:C"]
    turns = [["first"], ["a", "b"], ["a", "c"], ["a"]]
    assert [texts for texts, _ in upper.turns] == turns


def test_only_equal_settings_go_together_and_the_first_come_first(upper, batcher):
    held(upper, batcher)
    answers = [
        submit(batcher, text, 2, kind, 60) for text, kind in zip("abcd", (1, 2, 1, 2), strict=True)
    ]
    upper.gate.set()
    assert [one.result(5) for one in answers] == ["1:A", "2:B", "1:C", "2:D"]
    assert [texts for texts, _ in upper.turns[1:]] == [["a", "c"], ["b", "d"]]


def test_the_longest_decides_how_many_go_together(upper):
    batcher = Batcher([upper], grid=Grid(tokens=512, tokens_per_batch=256), wait_seconds=0.0)
    held(upper, batcher)
    lengths = {"a": 2, "b": 128, "c": 32, "d": 129, "e": 7, "f": 5, "g": 32}
    answers = [submit(batcher, text, tokens, 0, 60) for text, tokens in lengths.items()]
    upper.gate.set()
    assert [one.result(5) for one in answers] == [f"0:{text.upper()}" for text in lengths]
    # With "a" go those nearest in length, and "c" has no room beside "b".
    turns = [["a", "f", "e", "c", "g"], ["b"], ["d"]]
    assert [texts for texts, _ in upper.turns[1:]] == turns
    batcher.close()


def test_nothing_joins_where_shapes_are_exact():
    upper = Upper(done=1)
    batcher = Batcher([upper], grid=Grid(64, 64, exact=True), wait_seconds=0.0)
    first = held(upper, batcher)
    answers = [submit(batcher, text, 20, 0, 60) for text in "abcd"]
    upper.gate.set()
    assert [one.result(5) for one in (first, *answers)] == ["0:FIRST", "0:A", "0:B", "0:C", "0:D"]
    # Three of 20 tokens are within 64.
    turns = [["first"], ["a", "b", "c"], ["a", "b"], ["a"], ["d"]]
    assert [texts for texts, _ in upper.turns] == turns
    batcher.close()


def test_the_first_of_the_line_is_not_passed_by_for_long():
    upper = Upper(done=1)  # something is always under way that others can join
    batcher = Batcher([upper], grid=TWO, tokens_waiting=10**6, wait_seconds=0.0)
    held(upper, batcher)
    before = [submit(batcher, f"short {i}", 16, 0, 60) for i in range(15)]
    rare = submit(batcher, "rare", 100, 0, 60)
    behind = [submit(batcher, f"short {i}", 16, 0, 60) for i in range(15, 200)]
    upper.gate.set()
    assert {one.result(5)[:7] for one in (*before, *behind)} == {"0:SHORT"}
    assert rare.result(5) == "0:RARE"
    place = [texts for texts, _ in upper.turns].index(["rare"])
    # After those before it, and after a batch of 64 tokens, which are 4 texts.
    assert place == 1 + 15 + 4
    batcher.close()


def test_a_long_text_goes_alone_and_a_full_line_refuses(upper, batcher):
    held(upper, batcher)
    long = submit(batcher, "long", 90, 0, 60)
    with pytest.raises(Overloaded):
        submit(batcher, "late", 1, 0, 60)
    upper.gate.set()
    assert long.result(5) == "0:LONG"
    assert submit(batcher, "again", 1, 0, 60).result(5) == "0:AGAIN"


def test_the_texts_of_a_request_come_in_together_or_not_at_all(upper, batcher):
    held(upper, batcher)
    answers = batcher.submit(["a", "b"], [24, 24], 0, 60)
    with pytest.raises(Overloaded):
        batcher.submit(["c", "d"], [24, 24], 0, 60)
    assert batcher.waiting == 48
    upper.gate.set()
    assert [one.result(5) for one in answers] == ["0:A", "0:B"]


def test_what_is_cancelled_makes_room_at_once(upper, batcher):
    held(upper, batcher)
    answers = batcher.submit(["a", "b", "c"], [30, 30, 30], 0, 60)
    answers[1].cancel()
    assert batcher.waiting == 60
    late = submit(batcher, "d", 30, 0, 60)
    upper.gate.set()
    assert [one.result(5) for one in (answers[0], answers[2], late)] == ["0:A", "0:C", "0:D"]
    assert batcher.waiting == 0


def test_what_is_cancelled_as_it_is_translated_is_no_error(upper, batcher):
    first = held(upper, batcher)
    assert first.cancel()
    upper.gate.set()
    assert submit(batcher, "next", 1, 0, 60).result(5) == "0:NEXT"


def test_what_no_one_waits_for_is_not_translated(upper, batcher):
    held(upper, batcher)
    times = zip("abc", (60, 0.0, 60), strict=True)
    cancelled, late, wanted = (submit(batcher, text, 1, 0, seconds) for text, seconds in times)
    assert cancelled.cancel()
    upper.gate.set()
    assert wanted.result(5) == "0:C"
    with pytest.raises(TimeIsOver):
        late.result(5)
    with pytest.raises(CancelledError):
        cancelled.result(5)
    assert upper.turns[1:] == [(["c"], 0)]


def test_an_error_reaches_those_it_concerns_and_the_worker_goes_on(upper, batcher):
    held(upper, batcher)
    answers = [submit(batcher, text, 5, 0, 60) for text in ("bad", "beside", "after")]
    upper.gate.set()
    for one in answers[:2]:
        with pytest.raises(ValueError, match="bad"):
            one.result(5)
    assert answers[2].result(5) == "0:AFTER"


class Slow(Upper):
    """A turn takes a sixteenth of a second, by a clock that nothing else moves."""

    now = 0.0

    def monotonic(self):
        return self.now

    def __call__(self, new, settings):
        found = super().__call__(new, settings)
        self.now += 1 / 16
        return found


@pytest.fixture
def slow(monkeypatch):
    made = Slow()
    monkeypatch.setattr("keras_aiayn.serve.batcher.time", made)
    return made


def test_no_more_is_let_in_than_is_translated_in_time(slow):
    batcher = Batcher([slow], grid=TWO, tokens_waiting=10**6, wait_seconds=0.0)
    submit(batcher, "the pace is known", 128, 0, 60).result(5)  # 2,048 tokens a second
    held(slow, batcher)
    answers = [submit(batcher, f"t{i}", 128, 0, 2.0) for i in range(24)]  # 3/4 of two seconds
    with pytest.raises(Overloaded):
        submit(batcher, "one more", 128, 0, 2.0)
    slow.gate.set()
    assert [one.result(5) for one in answers] == [f"0:T{i}" for i in range(24)]
    batcher.close()
    assert slow.now == 26 / 16


def test_who_finds_the_line_empty_is_let_in(slow):
    batcher = Batcher([slow], grid=TWO, tokens_waiting=10**6, wait_seconds=0.0)
    for _ in range(2):
        assert submit(batcher, "alone", 10**5, 0, 1 / 32).result(5) == "0:ALONE"
    batcher.close()


def test_small_batches_say_nothing_of_the_pace(slow):
    batcher = Batcher([slow], tokens_waiting=10**6, wait_seconds=0.0)
    for _ in range(3):
        submit(batcher, "alone", 10, 0, 60).result(5)  # 160 tokens a second
    held(slow, batcher)
    answers = [submit(batcher, "many", 10, 0, 2.0) for _ in range(500)]  # in 8 turns
    slow.gate.set()
    assert {one.result(5) for one in answers} == {"0:MANY"}
    batcher.close()


@pytest.mark.parametrize("outcome", [{-1: "no one's"}, SystemExit("no"), None])
def test_nothing_that_a_worker_does_ends_it(outcome):
    outcomes = [outcome]

    def translate(new, settings):
        now = outcomes.pop() if outcomes else dict.fromkeys(new, "fine")
        if isinstance(now, BaseException):
            raise now
        return now

    def count(*numbers):
        raise OSError("the numbers went wrong, which is no client's concern")

    batcher = Batcher([translate], wait_seconds=0.0, on_turn=count)
    for answer in batcher.submit(["a", "b"], [1, 1], 0, 60):
        assert answer.exception(5) is not None
    assert submit(batcher, "c", 1, 0, 60).result(5) == "fine"
    batcher.close()


class Dying(Upper):
    """Its process is gone, as of a text if one is named."""

    def __init__(self, text=None):
        super().__init__()
        self.text = text

    def __call__(self, new, settings):
        found = super().__call__(new, settings)
        if self.text in (None, *new.values()):
            raise ChildProcessError("it has died")
        return found


def test_a_dead_worker_is_asked_no_more_and_loses_nothing():
    dead, upper, ended = Dying(), Upper(), []
    batcher = Batcher([dead, upper], wait_seconds=0.0, on_end=lambda: ended.append(1))
    for number in range(50):
        assert submit(batcher, f"t{number}", 1, 0, 60).result(5) == f"0:T{number}"
    while batcher.working > 1:  # it gets a text some time
        submit(batcher, "more", 1, 0, 60).result(5)
    assert len(dead.turns) == 1 and not ended
    batcher.close()


def test_the_last_worker_that_dies_ends_the_line():
    ended = threading.Event()
    dying = Dying("killer")
    batcher = Batcher([dying], grid=Grid(32, 1), on_end=ended.set)
    held(dying, batcher)
    waiting = batcher.submit(["killer", "after"], [1, 1], 0, 60)
    dying.gate.set()
    assert ended.wait(5) and batcher.working == batcher.waiting == 0
    for answer in waiting:
        assert isinstance(answer.exception(5), NoOneWorks)
    with pytest.raises(NoOneWorks):
        submit(batcher, "late", 1, 0, 60)
    batcher.close()


def test_a_text_that_workers_die_of_does_not_take_all_of_them():
    batcher = Batcher([Dying("killer") for _ in range(3)], wait_seconds=0.0)
    with pytest.raises(RuntimeError, match="2 processes have died"):
        submit(batcher, "killer", 1, 0, 60).result(5)
    while batcher.working > 1:
        time.sleep(0.001)
    assert submit(batcher, "good", 1, 0, 60).result(5) == "0:GOOD"
    batcher.close()


def test_closing_finishes_what_was_taken_and_takes_nothing_more(upper):
    batcher = Batcher([upper], wait_seconds=0.01)
    held(upper, batcher)
    answers = [submit(batcher, text, 4, 0, 60) for text in "abc"]
    threading.Timer(0.05, upper.gate.set).start()
    batcher.close()
    assert all(one.done() for one in answers)
    with pytest.raises(NoOneWorks):
        submit(batcher, "late", 1, 0, 60)


def test_what_is_under_way_when_a_worker_dies_is_another_s():
    dying, upper = Dying("killer"), Upper()
    dying.done = 1
    batcher = Batcher([dying], grid=TWO, wait_seconds=0.0)
    batcher._working += 1  # the second one comes later
    held(dying, batcher)
    answers = [submit(batcher, text, 1, 0, 60) for text in ("old", "new", "killer")]
    dying.gate.set()
    while batcher.working > 1:
        time.sleep(0.001)
    threading.Thread(target=batcher._work, args=(upper,), daemon=True).start()
    assert [one.result(5) for one in answers] == ["0:OLD", "0:NEW", "0:KILLER"]
    assert [texts for texts, _ in dying.turns[1:]] == [["old", "new"], ["old", "killer"]]
    assert upper.turns == [(["old", "killer"], 0)]  # in the order in which they came
    batcher.close()


@given(st.lists(st.tuples(st.integers(1, 140), st.integers(0, 2)), max_size=60), st.integers(1, 4))
def test_each_gets_its_own_answer_on_several_workers(texts, done):
    uppers = [Upper(done) for _ in range(3)]
    grid = Grid(tokens=512, tokens_per_batch=160)
    batcher = Batcher(uppers, grid=grid, tokens_waiting=10**6, wait_seconds=0.0)
    answers = [submit(batcher, f"t{i}", n, kind, 60) for i, (n, kind) in enumerate(texts)]
    assert [one.result(10) for one in answers] == [
        f"{kind}:T{i}" for i, (_, kind) in enumerate(texts)
    ]
    batcher.close()
    assert batcher.waiting == 0
    widths = {f"t{i}": grid.width(n) for i, (n, _) in enumerate(texts)}
    for running, _ in sum((upper.turns for upper in uppers), []):
        assert len(running) <= grid.rows(max(widths[text] for text in running))
