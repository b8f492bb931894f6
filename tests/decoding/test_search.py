"""The search against exhaustive and slow searches over random tables.

The table of a sentence has a row of logits for every possible history, not only for the last
token, and the step function finds the history through the ancestors alone. A wrong parent, a
wrong row or a history of another beam gives other numbers.
"""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_aiayn.decoding import loop
from keras_aiayn.decoding.compiled import compiled
from keras_aiayn.decoding.loop import SearchResult
from keras_aiayn.decoding.search import BeamSearch
from keras_aiayn.special_ids import BOS, EOS, PAD, UNK

SENTENCES = 8  # in a batch


def search_in_tables(
    tables, max_lengths, *, max_length, dtype="float32", constraints=None, **settings
):
    """Searches in the tables (B, rows, V) of some sentences; see `row_of`."""
    batch, rows, vocabulary_size = tables.shape
    flat = ops.reshape(tables, (batch * rows, vocabulary_size))
    first_row = ops.reshape(ops.arange(batch) * rows, (batch, 1))
    place = ops.convert_to_tensor(vocabulary_size ** np.arange(max_length), "int32")
    beam_size = settings["beam_size"]
    beams = ops.reshape(ops.arange(beam_size), (beam_size, 1))
    steps = ops.arange(max_length)

    def as_promised(ancestors, index):
        earlier = (ancestors >= 0) & (ancestors < beam_size)
        expected = ops.where(steps == index, ancestors == beams, ancestors == -1)
        return ops.all(ops.where(steps < index, earlier, expected))

    def step(token_ids, ages, index, ancestors, written):
        now = ops.reshape(steps == index, (max_length, 1))
        written = ops.where(now, ops.expand_dims(token_ids, 1), written)  # (B, L, K)
        own = ops.one_hot(ancestors, beam_size, dtype="int32")  # (B, K, L, K), nothing for -1
        history = ops.sum(own * ops.expand_dims(written, 1), axis=-1)  # (B, K, L)
        row = first_row + ops.sum(history * place, axis=-1)  # (B, K)
        logits = ops.where(as_promised(ancestors, index), ops.take(flat, row, axis=0), np.nan)
        return ops.cast(logits, dtype), written

    nothing = ops.zeros((batch, max_length, beam_size), "int32")
    return loop.run(
        BeamSearch(**settings),
        step,
        nothing,
        max_lengths=max_lengths,
        max_length=max_length,
        constraints=constraints,
    )


# Compiled once for each combination of shapes and settings, so tests share those where they can.
compiled_search = compiled(keras.layers.Layer(), search_in_tables)


def calls(result):
    """How often the step function was called."""
    return max(result.steps)


def run(tables, max_lengths, *, beam_size=3, num_return=None, max_length=5, **settings):
    settings = {"length_penalty": 0.6, "early_stopping": True, "dtype": "float32"} | settings
    num_return = num_return or beam_size
    return compiled_search(
        tables,
        np.array(max_lengths, "int32"),
        max_length=max_length,
        beam_size=beam_size,
        num_return=num_return,
        **settings,
    )


def row_of(prefix, vocabulary_size):
    """The row of a table: BOS and the prefix, read as digits, the first of them the lowest."""
    return sum(token * vocabulary_size**place for place, token in enumerate((BOS, *prefix)))


def make_tables(seed, vocabulary_size=6, max_length=5, scale=2.0):
    shape = (SENTENCES, vocabulary_size**max_length, vocabulary_size)
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype("float32")


def log_softmax(table):
    table = table.astype("float64")
    return table - np.logaddexp.reduce(table, axis=-1, keepdims=True)


def follow(table):
    """What `slow_search` wants to know of a sentence."""
    log_probs = log_softmax(table)
    return lambda prefixes: log_probs[[row_of(prefix, table.shape[-1]) for prefix in prefixes]]


def raw_score(log_probs, token_ids):
    vocabulary_size = log_probs.shape[-1]
    return sum(
        log_probs[row_of(token_ids[:place], vocabulary_size), token]
        for place, token in enumerate(token_ids)
    )


def penalty(length, length_penalty):
    return ((5 + length) / 6) ** length_penalty


def search_exhaustively(table, max_length, length_penalty):
    """The scores of all finished outputs, best first, without a beam."""
    log_probs = log_softmax(table)
    words = [token for token in range(table.shape[-1]) if token not in (PAD, BOS, EOS)]
    outputs = (
        (*stem, EOS)
        for length in range(max_length)
        for stem in itertools.product(words, repeat=length)
    )
    scores = [raw_score(log_probs, y) / penalty(len(y), length_penalty) for y in outputs]
    return sorted(scores, reverse=True)


def exhaustive_beam(vocabulary_size, max_length):
    """A beam that loses nothing: as many rows as there are outputs without EOS."""
    return max(4, (vocabulary_size - 3) ** max_length)


def hypotheses(result: SearchResult, sentence):
    """The hypotheses of a sentence that exist, checked one by one, as tuples of token ids."""
    found = []
    for token_ids, length, score, raw, cut in zip(
        *(field[sentence].tolist() for field in result[:5]), strict=True
    ):
        output, pads = token_ids[:length], token_ids[length:]
        assert set(pads) <= {PAD}
        if length == 0:  # no such hypothesis
            assert score == raw == -np.inf and not cut
            continue
        found.append(tuple(output))
        assert not {PAD, BOS, EOS} & set(output[:-1])
        assert output[-1] not in (PAD, BOS)
        assert (output[-1] == EOS) != cut
    assert len(set(found)) == len(found)
    return found


def check(result: SearchResult, tables, max_lengths, length_penalty):
    """What holds of every result, whatever the beam."""
    assert result.token_ids.dtype == result.lengths.dtype == result.steps.dtype == "int32"
    assert result.scores.dtype == result.raw_scores.dtype == "float32"
    assert result.token_ids.min() >= 0 and result.token_ids.max() < tables.shape[-1]
    for sentence, table in enumerate(tables):
        found = hypotheses(result, sentence)
        log_probs = log_softmax(table)
        raw = np.array([raw_score(log_probs, output) for output in found])
        lengths = np.array([len(output) for output in found])
        scores = result.scores[sentence, : len(found)]
        cut = result.hit_limit[sentence, : len(found)]
        np.testing.assert_allclose(result.raw_scores[sentence, : len(found)], raw, atol=1e-4)
        np.testing.assert_allclose(scores, raw / penalty(lengths, length_penalty), atol=1e-4)
        assert (lengths <= max_lengths[sentence]).all()
        assert (lengths[cut] == max_lengths[sentence]).all()
        # Finished ones first, each kind from best to worst.
        assert (np.diff(cut.astype(int)) >= 0).all()
        assert (np.diff(scores[~cut]) <= 0).all() and (np.diff(scores[cut]) <= 0).all()


def assert_same(result, expected):
    """The same hypotheses. Scores may differ in the last bit where shapes do."""
    for name in ("token_ids", "lengths", "hit_limit"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    for name in ("scores", "raw_scores"):
        np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=1e-5)


def each(length):
    return np.full(SENTENCES, length)


seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([0.3, 2.0, 6.0])  # from nearly even to nearly sure
lengths = st.lists(st.integers(1, 5), min_size=SENTENCES, max_size=SENTENCES)


@pytest.mark.works("beam search, compared with exhaustive search")
@pytest.mark.parametrize(
    ("length_penalty", "vocabulary_size", "max_length"),
    [(0.0, 6, 5), (0.6, 6, 5), (1.0, 6, 5), (2.0, 6, 5), (0.6, 4, 5)],
)
@settings(max_examples=4)
@given(seed=seeds, scale=scales)
def test_large_beam_is_exhaustive_search(length_penalty, vocabulary_size, max_length, seed, scale):
    tables = make_tables(seed, vocabulary_size, max_length, scale)
    result = run(
        tables,
        each(max_length),
        max_length=max_length,
        beam_size=exhaustive_beam(vocabulary_size, max_length),
        num_return=4,
        length_penalty=length_penalty,
    )
    check(result, tables, each(max_length), length_penalty)
    assert not result.hit_limit.any()
    for sentence, table in enumerate(tables):
        # The outputs are distinct and their scores their own (`check`): where these are the best
        # four, so are the outputs.
        best = search_exhaustively(table, max_length, length_penalty)[:4]
        np.testing.assert_allclose(result.scores[sentence], best, atol=1e-4)


@pytest.mark.parametrize("beam_size", [1, 2, 3])
@settings(max_examples=8)
@given(seed=seeds, scale=scales, max_lengths=lengths)
def test_pruned_search_is_the_slow_search(slow_search, beam_size, seed, scale, max_lengths):
    tables = make_tables(seed, scale=scale)
    result = run(tables, max_lengths, beam_size=beam_size)
    check(result, tables, max_lengths, 0.6)
    for sentence, table in enumerate(tables):
        slow = slow_search(
            follow(table),
            beam_size=beam_size,
            max_length=max_lengths[sentence],
            length_penalty=0.6,
            num_return=beam_size,
        )
        exist = result.lengths[sentence] > 0
        expected = [found.score for found in slow]
        np.testing.assert_allclose(result.scores[sentence, exist], expected, atol=1e-4)
        assert result.hit_limit[sentence, exist].tolist() == [found.hit_limit for found in slow]


@settings(max_examples=8)
@given(seed=seeds, scale=scales, max_lengths=lengths)
def test_beam_of_one_is_greedy_search(seed, scale, max_lengths):
    tables = make_tables(seed, scale=scale)
    result = run(tables, max_lengths, beam_size=1)
    for sentence, table in enumerate(tables):
        output = []
        while len(output) < max_lengths[sentence] and EOS not in output:
            logits = table[row_of(output, 6)].copy()
            logits[[PAD, BOS]] = -np.inf
            output.append(int(np.argmax(logits)))
        assert hypotheses(result, sentence) == [tuple(output)]


def test_larger_beam_finds_no_worse():
    def best(tables, beam_size, num_return):
        result = run(tables, each(5), beam_size=beam_size, num_return=num_return)
        # A cut output is none of those that an exhaustive search looks at.
        return np.where(result.hit_limit[:, 0], -np.inf, result.scores[:, 0])

    beams = [(1, 1), (2, 2), (3, 3), (exhaustive_beam(6, 5), 4)]
    batches = [make_tables(seed, scale=4.0) for seed in range(16)]
    for tables in batches:
        tables[:, :, EOS] -= 4.0  # outputs end late, so that a narrow beam misses more
    greedy, two, three, exhaustive = (
        np.concatenate([best(tables, *beam) for tables in batches]) for beam in beams
    )
    for scores in (greedy, two, three):
        assert (scores <= exhaustive + 1e-4).all()
    # A single sentence may lose by a wider beam that still prunes; far more win.
    for narrow, wide in ((greedy, two), (two, three), (three, exhaustive)):
        assert np.sum(wide > narrow + 1e-4) > 2 * np.sum(wide < narrow - 1e-4)


@settings(max_examples=8)
@given(seed=seeds, scale=scales, max_lengths=lengths)
def test_early_stop_never_changes_the_result(seed, scale, max_lengths):
    tables = make_tables(seed, scale=scale)
    early = run(tables, max_lengths)
    late = run(tables, max_lengths, early_stopping=False)
    assert_same(early, late)
    assert (early.steps <= late.steps).all() and late.steps.tolist() == max_lengths


def test_early_stop_saves_steps():
    tables = make_tables(11, scale=1.0)
    tables[:, :, EOS] += 5.0  # outputs end early
    early = run(tables, each(5))
    late = run(tables, each(5), early_stopping=False)
    assert_same(early, late)
    assert calls(early) < calls(late) == 5
    # The best one alone is proven sooner than the best three.
    assert calls(run(tables, each(5), beam_size=1)) == 1


def test_sentence_is_searched_as_if_it_were_alone():
    tables = make_tables(3)
    tables[0, :, EOS] += 9.0  # done at once, and frozen while the others go on
    max_lengths = np.array([5, 1, 2, 3, 4, 5, 0, 5])
    together = run(tables, max_lengths)
    backwards = run(tables[::-1].copy(), max_lengths[::-1])
    for sentence in range(SENTENCES):
        alone = run(tables[sentence, None], max_lengths[sentence, None])

        def row(result, index):
            return SearchResult(*(field[None, index] for field in result))

        assert_same(row(together, sentence), alone)
        assert_same(row(backwards, -1 - sentence), alone)


def test_more_capacity_changes_nothing():
    tables = make_tables(4)
    max_lengths = np.array([3, 1, 2, 3, 0, 2, 3, 3])
    tight = run(tables, max_lengths, max_length=3)
    loose = run(tables, max_lengths, max_length=5)
    assert (loose.token_ids[:, :, 3:] == PAD).all()
    assert_same(loose._replace(token_ids=loose.token_ids[:, :, :3]), tight)
    np.testing.assert_array_equal(loose.steps, tight.steps)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_where_nothing_ends_the_best_alive_is_returned_and_flagged(beam_size):
    tables = make_tables(5)
    tables[:, :, EOS] = -np.inf
    max_lengths = [5, 4, 3, 2, 1, 5, 4, 3]
    result = run(tables, max_lengths, beam_size=beam_size)
    check(result, tables, max_lengths, 0.6)  # the score of a cut output is normalised like others
    assert result.hit_limit.all()
    assert result.lengths[:, 0].tolist() == max_lengths


def test_alive_hypotheses_fill_up_where_too_few_finish():
    tables = make_tables(6)
    tables[:, :, EOS] = -np.inf
    # Only one output can end: UNK, EOS. In the second sentence it is the only one at all.
    tables[:, row_of((UNK,), 6), EOS] = 5.0
    tables[1] = np.where(np.arange(6) == EOS, 0.0, -np.inf)
    tables[1, row_of((), 6)] = np.where(np.arange(6) == UNK, 0.0, -np.inf)
    result = run(tables, each(5))
    for sentence in range(SENTENCES):
        assert hypotheses(result, sentence)[0] == (UNK, EOS)
    assert result.hit_limit[0].tolist() == [False, True, True]
    assert result.lengths[0].tolist() == [2, 5, 5]
    # What does not exist is empty: no score, no length, no flag.
    assert result.lengths[1].tolist() == [2, 0, 0]
    assert result.scores[1].tolist() == [0.0, -np.inf, -np.inf]
    assert not result.hit_limit[1].any()


def test_filler_rows_take_no_step():
    result = run(make_tables(8), each(0))
    assert calls(result) == 0
    assert (result.lengths[:, 1:] == 0).all() and (result.token_ids == PAD).all()


def test_vocabulary_of_the_special_ids_alone():
    """Only UNK and EOS can come: fewer tokens than a beam has candidates."""
    tables = make_tables(9, vocabulary_size=4)
    result = run(tables, each(5), beam_size=8)
    check(result, tables, each(5), 0.6)
    for sentence in range(SENTENCES):
        # Each of five lengths can end; one output, all of UNK, is alive at the limit.
        found = hypotheses(result, sentence)
        assert len(found) == 6 and found[-1] == 5 * (UNK,)


def test_large_vocabulary_is_searched_whole(slow_search):
    """A vocabulary so large that the search looks through it in blocks; the last one is short."""
    size = 1_003
    table = np.random.default_rng(13).normal(scale=3.0, size=(size, size)).astype("float32")
    table[:, EOS] += 4.0
    table[:, -3:] += 8.0  # some of the best are in the short block
    table[1::2, 9:] = -np.inf  # fewer tokens possible than a beam has candidates

    def search(table, max_lengths):
        def step(token_ids, ages, slot, ancestors, nothing):
            return ops.take(table, token_ids, axis=0), nothing

        method = BeamSearch(beam_size=10, num_return=10, length_penalty=0.6)
        return loop.run(method, step, (), max_lengths=max_lengths, max_length=5)

    result = compiled(keras.layers.Layer(), search)(table, np.array([5], "int32"))
    log_probs = log_softmax(table)
    expected = slow_search(
        lambda prefixes: log_probs[[(BOS, *prefix)[-1] for prefix in prefixes]],
        beam_size=10,
        max_length=5,
        length_penalty=0.6,
        num_return=10,
    )
    assert hypotheses(result, 0) == [found.token_ids for found in expected]
    np.testing.assert_allclose(result.scores[0], [found.score for found in expected], atol=1e-4)
    assert any(token >= 992 for found in expected for token in found.token_ids)


def test_scores_are_float32_whatever_the_logits():
    tables = make_tables(10)
    rounded = ops.convert_to_numpy(ops.cast(ops.cast(tables, "bfloat16"), "float32"))
    low = run(tables, each(5), dtype="bfloat16")
    high = run(rounded, each(5))
    assert_same(low, high)
    assert low.scores.dtype == low.raw_scores.dtype == "float32"


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_size": 0},
        {"num_return": 0},
        {"beam_size": 2, "num_return": 3},
        {"length_penalty": -0.1},
        {"length_penalty": float("nan")},
        {"max_length": 0},
    ],
)
def test_setting_out_of_range_is_refused(wrong):
    settings = {"beam_size": 4, "max_length": 3} | wrong
    with pytest.raises(ValueError, match="Received: ") as error:
        search_in_tables(make_tables(0, 4, 3), each(3), **settings)
    assert "\n" not in str(error.value)
