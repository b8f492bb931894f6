"""Made data is what it says, the same for the same seed, with one right answer a source."""

import re

import numpy as np
import pytest

from keras_aiayn.data import tasks
from keras_aiayn.special_ids import BOS, EOS, PAD

pytestmark = pytest.mark.backend_free


def test_copies_are_framed_as_every_batch_is():
    inputs, targets = tasks.copy_task(200, num_symbols=5, min_length=2, max_length=6, seed=1)
    sources, decoder = inputs["encoder_token_ids"], inputs["decoder_token_ids"]
    assert sources.shape == decoder.shape == targets.shape == (200, 7)
    assert {array.dtype for array in (sources, decoder, targets)} == {np.dtype("int32")}
    np.testing.assert_array_equal(sources, targets)
    lengths = set()
    for source, read in zip(sources.tolist(), decoder.tolist(), strict=True):
        symbols = source[: source.index(EOS)]
        lengths.add(len(symbols))
        assert set(symbols) <= set(range(4, 9))
        assert source == [*symbols, EOS] + [PAD] * (6 - len(symbols))
        assert read == [BOS, *symbols] + [PAD] * (6 - len(symbols))
    assert lengths == {2, 3, 4, 5, 6}


def test_copies_depend_on_the_seed_alone():
    first, again, other = (tasks.copy_task(20, seed=seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("lengths", [(0, 4), (5, 4)])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match=f"Received: min_length={lengths[0]}"):
        tasks.copy_task(1, min_length=lengths[0], max_length=lengths[1], seed=0)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    pytest.importorskip("babel")
    pytest.importorskip("num2words")
    return tasks.written_dates_and_numbers(6000, seed=1)


def test_sources_are_distinct_and_repeat_with_the_seed(pairs):
    assert len(dict(pairs)) == len(pairs) == 6000
    assert tasks.written_dates_and_numbers(300, seed=1) == pairs[:300]


def test_a_source_has_one_answer_whatever_the_seed(pairs):
    known = dict(pairs)
    others = dict(tasks.written_dates_and_numbers(6000, seed=2))
    shared = known.keys() & others.keys()
    assert len(shared) > 100
    assert all(known[source] == others[source] for source in shared)


def test_pairs_are_ready_for_a_file_of_lines(pairs):
    for pair in pairs:
        for side in pair:
            assert side == " ".join(side.split()) != ""


DIGITS = re.compile(r"\d")


def test_digits_and_words_meet_on_either_side(pairs):
    seen = {tuple(bool(DIGITS.search(side)) for side in pair) for pair in pairs}
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("english", "german"),
    [
        (r"Tuesday, \d+ March \d+", r"Dienstag, \d+\. März \d+"),
        (r"Tuesday, March \d+, \d+", r"Dienstag, \d+\. März \d+"),
        (r"\d+/\d+/\d+", r"\d\d\.\d\d\.\d{4}"),
        (r"the \S+ of March, .*", r"der \S+ März \S+"),
        (r"\d+", r"[a-zäöüß]+( [a-zäöüßM]+)*"),
        (r"€[\d,]+\.\d\d", r"[\d.]+,\d\d €"),
        (r"half past \S+", r"halb \S+"),
    ],
)
def test_each_kind_of_source_has_its_kind_of_answer(pairs, english, german):
    found = [pair for pair in pairs if re.fullmatch(english, pair[0])]
    assert found
    for _, target in found:
        assert re.fullmatch(german, target)


def test_more_pairs_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="`num_pairs` can be at most 500000. Received: 500001"):
        tasks.written_dates_and_numbers(500_001, seed=0)
