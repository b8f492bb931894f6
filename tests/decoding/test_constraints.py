"""Every rule against the slow search, which bars tokens history by history."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import SENTENCES, each, follow, hypotheses, make_tables, search_in_tables

from keras_aiayn.decoding.compiled import compiled
from keras_aiayn.decoding.constraints import Constraints
from keras_aiayn.special_ids import EOS, PAD

MAX_LENGTH, VOCABULARY = 5, 6
WORDS = (1, 4, 5)  # without pad, BOS and EOS


def search_under_rules(
    tables, max_lengths, prefixes, min_lengths, suppressed, *, no_repeat_ngram_size, **settings
):
    rules = Constraints(prefixes, min_lengths, suppressed)
    settings |= {"no_repeat_ngram_size": no_repeat_ngram_size}
    return search_in_tables(tables, max_lengths, constraints=rules, **settings)


compiled_search = compiled(keras.layers.Layer(), search_under_rules)


def run(tables, prefixes=None, min_lengths=None, suppressed=(), ngram=0, beam_size=3, **settings):
    prefixes = np.zeros((SENTENCES, 0), "int32") if prefixes is None else prefixes
    least = np.zeros((SENTENCES, 0)) if min_lengths is None else np.reshape(min_lengths, (-1, 1))
    return compiled_search(
        tables,
        each(MAX_LENGTH).astype("int32"),
        np.asarray(prefixes, "int32"),
        least.astype("int32"),
        np.tile(np.asarray(suppressed, "int32"), (SENTENCES, 1)),
        no_repeat_ngram_size=ngram,
        max_length=MAX_LENGTH,
        beam_size=beam_size,
        num_return=min(beam_size, 2),
        **{"length_penalty": 0.6, "early_stopping": True} | settings,
    )


def under_rules(log_probs, prefix, min_length, suppressed, ngram):
    """`log_probs` of histories with the rules applied, one history at a time."""

    def follow_rules(histories):
        rows = np.array(log_probs(histories))
        for row, history in zip(rows, histories, strict=True):
            if len(history) < len(prefix):
                row[:] = -np.inf
                row[prefix[len(history)]] = 0
                continue
            if len(history) + 1 < min_length:
                row[EOS] = -np.inf
            row[list(suppressed)] = -np.inf
            grams = [tuple(history[i : i + ngram]) for i in range(len(history) - ngram + 1)]
            for gram in grams if ngram else []:
                if gram[:-1] == tuple(history[len(history) - ngram + 1 :])[: ngram - 1]:
                    row[gram[-1]] = -np.inf
        return rows

    return follow_rules


@st.composite
def rules(draw):
    prefix_lengths = draw(st.lists(st.integers(0, 2), min_size=SENTENCES, max_size=SENTENCES))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    prefixes = np.full((SENTENCES, 2), PAD)
    for row, length in enumerate(prefix_lengths):
        prefixes[row, :length] = generator.choice(WORDS, length)
    return {
        "prefixes": prefixes,
        "min_lengths": draw(st.lists(st.integers(0, 5), min_size=SENTENCES, max_size=SENTENCES)),
        "suppressed": draw(st.sampled_from([[4], [5]])),
        "ngram": draw(st.sampled_from([0, 1, 2, 3])),
    }


@pytest.mark.parametrize("beam_size", [1, 3])
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), asked=rules())
def test_rules_hold_as_in_the_slow_search(slow_search, beam_size, seed, asked):
    tables = make_tables(seed, VOCABULARY, MAX_LENGTH)
    result = run(tables, **asked, beam_size=beam_size)
    for sentence, table in enumerate(tables):
        prefix = [int(token) for token in asked["prefixes"][sentence] if token != PAD]
        least = asked["min_lengths"][sentence]
        expected = slow_search(
            under_rules(follow(table), prefix, least, asked["suppressed"], asked["ngram"]),
            beam_size=beam_size,
            max_length=MAX_LENGTH,
            length_penalty=0.6,
            num_return=min(beam_size, 2),
            free=len(prefix),
        )
        found = hypotheses(result, sentence)
        assert found == [one.token_ids for one in expected]
        scores = result.scores[sentence, : len(found)]
        np.testing.assert_allclose(scores, [one.score for one in expected], atol=1e-4)


def test_outputs_begin_with_their_prefix_and_it_costs_nothing():
    tables = make_tables(1)
    prefixes = np.tile([4, 5], (SENTENCES, 1))
    prefixes[::2, 1] = PAD
    result = run(tables, prefixes)
    for sentence in range(SENTENCES):
        wanted = tuple(token for token in prefixes[sentence] if token != PAD)
        for output in hypotheses(result, sentence):
            assert output[: len(wanted)] == wanted


def test_what_nothing_satisfies_is_empty():
    result = run(make_tables(2), suppressed=[*WORDS, EOS])
    assert (result.lengths == 0).all() and (result.scores == -np.inf).all()
    assert (result.token_ids == PAD).all() and not result.hit_limit.any()


def test_no_rule_changes_nothing():
    tables = make_tables(3)
    free = run(tables, np.full((SENTENCES, 2), PAD), np.zeros(SENTENCES))
    plain = compiled(keras.layers.Layer(), search_in_tables)(
        tables, each(MAX_LENGTH).astype("int32"), max_length=MAX_LENGTH, beam_size=3, num_return=2,
        length_penalty=0.6, early_stopping=True,
    )  # fmt: skip
    for ours, theirs in zip(free, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)
