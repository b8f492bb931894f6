"""Draws follow the model's probabilities, and are the same everywhere."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.decoding import loop
from keras_aiayn.decoding.compiled import compiled
from keras_aiayn.decoding.sampling import Sampler, _gumbel, _mix
from keras_aiayn.special_ids import BOS, EOS, PAD, UNK

LOGITS = np.array([3.0, 0.5, 3.0, 0.0, 1.0, 2.0], "float32")  # of every step; ids 0 to 5


def sample_one_table(seeds, max_lengths, logits, *, max_length, **settings):
    """Samples where every history has the same logits."""
    batch = ops.shape(seeds)[0]

    def step(token_ids, ages, slot, ancestors, state):
        shape = (batch, token_ids.shape[1], logits.shape[0])
        return ops.broadcast_to(logits, shape), state

    lengths = {"max_lengths": max_lengths, "max_length": max_length}
    return loop.run(Sampler(**settings), step, (), seeds=seeds, **lengths)


compiled_sample = compiled(keras.layers.Layer(), sample_one_table)


def draw(seeds, max_length=1, logits=LOGITS, **settings):
    seeds = np.asarray(seeds, "int32")
    limits = np.full(len(seeds), max_length, "int32")
    return compiled_sample(seeds, limits, logits, max_length=max_length, **settings)


def shares(result):
    tokens = result.token_ids[:, :, 0].ravel()
    return np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


def probabilities(logits, kept=(UNK, EOS, 4, 5)):
    weights = np.where(np.isin(np.arange(len(logits)), kept), np.exp(logits), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("settings", "logits", "kept"),
    [
        ({}, LOGITS, (UNK, EOS, 4, 5)),
        ({"temperature": 0.5}, LOGITS / 0.5, (UNK, EOS, 4, 5)),
        ({"top_k": 2}, LOGITS, (4, 5)),
        ({"top_p": 0.7}, LOGITS, (4, 5)),  # 0.58 and 0.21 of what may be drawn
        ({"top_p": 0.1}, LOGITS, (5,)),
    ],
)
def test_shares_are_the_models_probabilities(settings, logits, kept):
    result = draw(range(64), num_samples=128, **settings)
    np.testing.assert_allclose(shares(result), probabilities(logits, kept), atol=0.02)


def test_scores_are_the_models_whatever_is_cut():
    result = draw(range(8), max_length=4, num_samples=3, temperature=0.3, top_k=2)
    own = LOGITS - np.log(np.exp(LOGITS).sum())
    for ids, length, raw, score in zip(
        result.token_ids.reshape(-1, 4), result.lengths.ravel(), result.raw_scores.ravel(),
        result.scores.ravel(), strict=True,
    ):  # fmt: skip
        assert raw == pytest.approx(own[ids[:length]].sum(), abs=1e-4)
        assert score == pytest.approx(raw / ((5 + length) / 6) ** 0.6, abs=1e-4)
    assert (np.diff(result.scores, axis=1) <= 0).all()


def test_outputs_end_at_eos_or_at_their_limit():
    result = draw(range(64), max_length=5, num_samples=4)
    for ids, length, cut in zip(
        result.token_ids.reshape(-1, 5), result.lengths.ravel(), result.hit_limit.ravel(),
        strict=True,
    ):  # fmt: skip
        assert (ids[length:] == PAD).all() and not {PAD, BOS, EOS} & set(ids[: length - 1])
        assert (ids[length - 1] == EOS) != cut and (not cut or length == 5)
    assert result.hit_limit.any() and not result.hit_limit.all()


def test_a_sentence_is_drawn_as_if_it_were_alone():
    together = draw(range(10), max_length=5, num_samples=2)
    for row in (0, 7):
        alone = draw([row], max_length=5, num_samples=2)
        np.testing.assert_array_equal(alone.token_ids[0], together.token_ids[row])
    more = draw(range(10), max_length=9, num_samples=2)
    ended = ~together.hit_limit
    np.testing.assert_array_equal(
        np.sort(more.lengths, axis=1)[ended.all(1)], np.sort(together.lengths, axis=1)[ended.all(1)]
    )


def test_another_seed_draws_otherwise():
    one, other = draw(range(32), max_length=5), draw(range(100, 132), max_length=5)
    assert (one.token_ids != other.token_ids).any()


def test_bits_are_those_of_plain_integers():
    """The hash on this backend against Python's unbounded integers: so on every backend."""

    def mixed(x):
        x &= 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
        return x

    numbers = [0, 1, 2, 12345, 2**31 - 1, -1, -(2**31), -777]
    found = ops.convert_to_numpy(_mix(ops.convert_to_tensor(numbers, "int32")))
    assert [int(x) & 0xFFFFFFFF for x in found] == [mixed(x) for x in numbers]
    noise = ops.convert_to_numpy(_gumbel(ops.convert_to_tensor(numbers, "int32")))
    uniform = np.array([((x & 0x7FFFFF) + 0.5) / 2**23 for x in numbers])
    np.testing.assert_allclose(noise, -np.log(-np.log(uniform)), rtol=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0}, "`temperature` must be above 0"),
        ({"top_k": -1}, "`top_k` must be at least 0"),
        ({"top_p": 0.0}, "`top_p` must be above 0"),
        ({"num_samples": 0}, "`num_samples` must be at least 1"),
    ],
)
def test_setting_out_of_range_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        draw([1], **wrong)
