"""The Transformer decoded step by step, from its cache, against full passes."""

import numpy as np
import pytest
from keras import ops

from keras_aiayn import masking
from keras_aiayn.decoding.compiled import compiled
from keras_aiayn.decoding.search import BeamSearch
from keras_aiayn.decoding.stream import CompiledSearch
from keras_aiayn.special_ids import BOS, EOS, PAD, UNK
from keras_aiayn.transformer import Transformer

VOCABULARY_SIZE = 30
END_BIAS = 3.0  # some outputs end before their limit, and some do not


def make_model(**arguments):
    model = Transformer(
        VOCABULARY_SIZE,
        num_layers=2,
        hidden_dim=16,
        intermediate_dim=32,
        num_heads=2,
        use_logits_bias=True,
        **arguments,
    )
    # The same weights on every backend, and sharper than fresh ones: near ties are rare then.
    rng = np.random.default_rng(5)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            scale = 2.0 / np.sqrt(variable.shape[-1])
            variable.assign(rng.normal(size=variable.shape, scale=scale))
        elif variable.name == "logits_bias":
            variable.assign(np.where(np.arange(VOCABULARY_SIZE) == EOS, END_BIAS, 0.0))
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def full(model):
    return full_pass(model)


def make_sources(lengths, width, seed=0):
    """Random sentences, EOS counted in their lengths, padded to a width."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(EOS + 1, VOCABULARY_SIZE, (len(lengths), width))
    places = np.arange(width)
    ends = np.array(lengths)[:, None] - 1
    return np.where(places < ends, sources, np.where(places == ends, EOS, PAD)).astype("int32")


def full_pass(model):
    """Logits (B, T, V) without a cache; T counts the BOS."""

    def logits(source, target):
        inputs = {"encoder_token_ids": source, "decoder_token_ids": target}
        return model(inputs, training=False)

    return compiled(model, logits)


def cached_pass(model):
    """The same from a cache, `chunks` tokens at a time."""

    def logits(source, target, *, chunks):
        encoder_mask, decoder_mask, memory_mask = model.build_masks(source, target)
        memory = model.encode(source, encoder_mask, training=False)
        cache = model.init_cache(memory, target.shape[1])
        parts, start = [], 0
        for chunk in chunks:
            now = slice(start, start + chunk)
            hidden, cache = model.decode(
                target[:, now],
                memory,
                decoder_mask[:, now],
                memory_mask,
                cache=cache,
                cache_index=start,
                positions=ops.arange(start, start + chunk),
                training=False,
            )
            parts.append(model.output_projection(hidden))
            start += chunk
        return ops.concatenate(parts, axis=1)

    return compiled(model, logits)


def check_chunks(model, full, chunks):
    source = make_sources([6, 1, 4, 2], width=6)
    target = make_sources([5, 4, 3, 2], width=5, seed=1)  # pads in the target, too
    target[:, 0] = BOS
    expected = full(source, target)
    logits = cached_pass(model)(source, target, chunks=chunks)
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("chunks", [(1,) * 5, (3, 1, 1)], ids=["one by one", "prefill of 3"])
def test_cached_decode_is_full_decode_at_every_position(model, full, chunks):
    check_chunks(model, full, chunks)


def test_cached_decode_of_a_model_that_differs_from_the_paper():
    model = make_model(
        normalize_first=True,
        use_bias=True,
        share_embeddings=False,
        positions="learned",
        max_length=9,
        value_dim=4,
    )
    check_chunks(model, full_pass(model), (2, 1, 2))


def test_beams_in_one_cache_are_as_in_caches_of_their_own(model, full):
    """K rows of a sentence, whose histories cross, against a full pass of each history."""
    batch, beams, length = 2, 3, 4
    source = make_sources([5, 3], width=5)
    rng = np.random.default_rng(3)
    tokens = rng.integers(EOS + 1, VOCABULARY_SIZE, (length, batch, beams)).astype("int32")
    tokens[0] = BOS
    ancestors = np.full((length, batch, beams, length), -1, "int32")  # at each step
    for step in range(length):
        if step:  # every beam goes on from any beam
            parents = rng.integers(0, beams, (batch, beams, 1))
            ancestors[step] = np.take_along_axis(ancestors[step - 1], parents, axis=1)
        ancestors[step, :, :, step] = np.arange(beams)

    def logits(source, tokens, ancestors):
        memory_mask = masking.padding_mask(source)
        memory = model.encode(source, memory_mask, training=False)
        cache = model.init_cache(memory, length * beams)
        parts = []
        for step in range(length):
            hidden, cache = model.decode(
                tokens[step],
                memory,
                masking.ancestor_mask(ancestors[step]),
                memory_mask,
                cache=cache,
                cache_index=step * beams,
                positions=step,
                training=False,
            )
            parts.append(model.output_projection(hidden))
        return ops.stack(parts)

    for step, result in enumerate(compiled(model, logits)(source, tokens, ancestors)):
        # What is written behind the step, here row 0, moves nothing before it.
        rows = np.maximum(ancestors[step], 0)
        histories = tokens[np.arange(length), np.arange(batch)[:, None, None], rows]
        expected = full(np.repeat(source, beams, axis=0), histories.reshape(-1, length))
        expected = expected[:, step].reshape(result.shape)
        np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def found(model):
    """Sentences of unequal lengths, their limits, and what the search found for them."""
    source = make_sources([7, 1, 4, 2, 6, 3] + 10 * [5], width=7)
    limits = np.array([9, 4, 10, 5, 8, 7] + 10 * [8])
    search = CompiledSearch(model, BeamSearch(beam_size=3, num_return=3))
    return search, source, limits, search(source, limits)


def test_search_is_the_slow_search_with_full_passes(full, slow_search, found):
    _, source, limits, result = found

    def follow(sentence):
        """Log-probabilities (P, V) of what may follow P prefixes, by one full pass."""

        def log_probs(prefixes):
            # Of one shape, to be compiled once: what comes later moves nothing.
            target = np.full((3, 10), UNK, "int32")
            for row, prefix in enumerate(prefixes):
                target[row, : len(prefix) + 1] = (BOS, *prefix)
            logits = full(np.repeat(source[sentence, None], 3, axis=0), target)
            logits = logits[: len(prefixes), len(prefixes[0])].astype("float64")
            return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

        return log_probs

    for sentence, limit in enumerate(limits[:6]):
        expected = slow_search(
            follow(sentence), beam_size=3, max_length=limit, length_penalty=0.6, num_return=3
        )
        ids = [
            tuple(token_ids[:length].tolist())
            for token_ids, length in zip(
                result.token_ids[sentence], result.lengths[sentence], strict=True
            )
        ]
        assert ids == [hypothesis.token_ids for hypothesis in expected]
        for field, name in [("scores", "score"), ("raw_scores", "raw_score")]:
            values = [getattr(hypothesis, name) for hypothesis in expected]
            np.testing.assert_allclose(getattr(result, field)[sentence], values, atol=1e-4)
        assert result.hit_limit[sentence].tolist() == [h.hit_limit for h in expected]
    # The test would show little if all outputs ended alike.
    assert 0 < np.mean(result.hit_limit) < 1


def assert_same(result, expected):
    width = expected.lengths.max()  # there may be more room
    np.testing.assert_array_equal(result.lengths, expected.lengths)
    np.testing.assert_array_equal(result.token_ids[..., :width], expected.token_ids[..., :width])
    np.testing.assert_array_equal(result.hit_limit, expected.hit_limit)
    np.testing.assert_allclose(result.scores, expected.scores, atol=1e-4)


def part(result, rows):
    return type(result)(*(field[rows] for field in result))


def test_sentence_alone_is_found_as_among_others(found):
    search, source, limits, result = found
    for sentence in range(6):
        alone = slice(sentence, sentence + 1)
        assert_same(search(source[alone], limits[alone]), part(result, alone))


def test_order_and_company_change_nothing(found):
    search, source, limits, result = found
    order = np.repeat(np.random.default_rng(2).permutation(len(source))[:8], 2)
    assert_same(search(source[order], limits[order]), part(result, order))


def test_a_hundred_more_pads_change_nothing(found):
    search, source, limits, result = found
    padded = np.pad(source, ((0, 0), (0, 100)), constant_values=PAD)
    assert_same(search(padded, limits), result)
