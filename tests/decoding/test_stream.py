"""Sentences that come and go in a batch are found as if each were alone in one."""

import numpy as np
import pytest

from keras_aiayn.decoding.batches import Arrays, Rules, Sentence, Shapes
from keras_aiayn.decoding.sampling import Sampler
from keras_aiayn.decoding.search import BeamSearch
from keras_aiayn.decoding.stream import CompiledSearch
from keras_aiayn.special_ids import EOS, UNK
from keras_aiayn.transformer import Transformer

VOCABULARY_SIZE = 20
BEAM = BeamSearch(beam_size=3, num_return=3)


def make_model(seed, **options):
    model = Transformer(VOCABULARY_SIZE, num_layers=2, hidden_dim=8, intermediate_dim=16,
                        num_heads=2, seed=seed, **options)  # fmt: skip
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape, scale=0.5) for w in model.get_weights()])
    return model


@pytest.fixture(scope="module")
def models():
    return make_model(1), make_model(2)


def make_sentences(count, rules=False):
    """Of many lengths, with outputs from one token to far more than the first room holds."""
    rng = np.random.default_rng(count)
    made = []
    for number in range(count):
        source = [*rng.integers(EOS + 1, VOCABULARY_SIZE, rng.integers(0, 40)).tolist(), EOS]
        longest = int(rng.choice([1, 5, 20, 70]))
        made.append(Sentence(source, longest, seed=number))
        if rules:
            made[-1] = made[-1]._replace(
                max_length=longest + 3,
                min_length=int(rng.integers(0, 5)) if longest > 1 else 0,
                prefix=rng.integers(EOS + 1, VOCABULARY_SIZE, rng.integers(0, 3)).tolist(),
                suppressed=[UNK, int(rng.integers(EOS + 1, VOCABULARY_SIZE))],
            )
    return made


def check_alike(one, other):
    ids, expected = (result.token_ids[:, : max(result.lengths)] for result in (one, other))
    np.testing.assert_array_equal(one.lengths, other.lengths)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(one.hit_limit, other.hit_limit)
    np.testing.assert_allclose(one.scores, other.scores, atol=1e-4)


def check(search, sentences, tokens_per_batch):
    """Streamed as in one batch; gives the shapes that the stream went through."""
    longest = max(sentence.max_length for sentence in sentences)
    shapes, seen = Shapes(tokens_per_batch, lambda width: longest), []
    most_live = shapes.most_live
    shapes.most_live = lambda shape, *counts: seen.append(shape) or most_live(shape, *counts)
    found = list(search.stream(sentences, shapes))
    assert sorted(place for place, _ in found) == list(range(len(sentences)))
    width = max(len(sentence.source) for sentence in sentences)
    together = search.one_batch(Arrays.of(sentences, len(sentences), width, Rules.of(sentences)))
    for place, one in found:
        check_alike(one, type(one)(*(field[place] for field in together)))
    return seen


@pytest.mark.parametrize(
    ("method", "rules"),
    [
        (BEAM, True),
        (BeamSearch(beam_size=1), False),
        (BeamSearch(beam_size=2, no_repeat_ngram_size=2), True),
        (Sampler(2, temperature=1.5), False),
    ],
    ids=["beam", "greedy", "no repeats", "sampled"],
)
def test_each_is_found_as_in_one_batch(models, method, rules):
    seen = check(CompiledSearch(models[0], method), make_sentences(40, rules), 8 * 32)
    assert len({shape.rows for shape in seen}) > 1 and len({shape.width for shape in seen}) > 1
    assert len({shape.room for shape in seen}) > 1
    assert all(shape.rows * shape.width <= 8 * 32 for shape in seen)


@pytest.mark.parametrize("count", [1, 5])
def test_fewer_than_a_batch(models, count):
    check(CompiledSearch(models[0], BEAM), make_sentences(count), 1 << 20)


def test_one_at_a_time(models):
    seen = check(CompiledSearch(models[0], BEAM), make_sentences(5), 1)
    assert {shape.rows for shape in seen} == {1}


def test_nothing_to_search_for(models):
    search = CompiledSearch(models[0], BEAM)
    assert list(search.stream([], Shapes(64, lambda width: 5))) == []


def test_several_models_and_learned_positions():
    # As many as the longest outputs have: such a one is done while others go on.
    models = [make_model(seed, positions="learned", max_length=70) for seed in (3, 4)]
    check(CompiledSearch(models, BEAM), make_sentences(12), 4 * 32)
