"""What the service translates is what `translate` gives, in shapes that were compiled before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.decoding.loop import SearchResult
from keras_aiayn.serve import shapes
from keras_aiayn.special_ids import EOS

COMPILES = not takes_any_shape()
TOKENS, TOKENS_PER_BATCH = 30, 64


def translator(**sizes):
    tokenizer = ByteTokenizer()
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 2} | sizes
    return Translator(Transformer(tokenizer.vocabulary_size, **sizes), tokenizer,
                      max_extra_length=3)  # fmt: skip


class Recorder:
    """Searches for nothing, and keeps the shapes in which it would."""

    def __init__(self):
        self.seen = []

    def warm_up(self, shape, shapes):
        self.seen.append((*shape, shapes.capacity(shape.width)))

    def stream(self, sentences, shapes):
        if sentences:
            first = shapes.first(max(len(one.source) for one in sentences), len(sentences))
            assert first.chunk == first.rows or not COMPILES  # they come and go together
            self.seen.append((*first, shapes.capacity(first.width)))
        zeros = np.zeros(1, "float32")
        for place in range(len(sentences)):
            ids = np.array([[EOS]], "int32")
            yield place, SearchResult(ids, np.array([1]), zeros, zeros, zeros > 0, 1)


def recorded(translator):
    """Lets it search for nothing, and gives the list of the shapes in which it does."""
    recorder = Recorder()
    translator._search = lambda models, settings: recorder
    return recorder.seen


@pytest.mark.skipif(not COMPILES, reason="a new shape costs nothing")
@pytest.mark.parametrize("sizes", [{}, {"positions": "learned", "max_length": 20}])
def test_what_is_translated_has_been_compiled(sizes):
    ours = translator(**sizes)
    seen = recorded(ours)
    for shape in shapes.shapes(ours, TOKENS, TOKENS_PER_BATCH):
        shapes.compile_shape(ours, shape)
    compiled = set(seen)
    assert len(compiled) == len(seen) <= 15

    @given(st.lists(st.integers(0, TOKENS - 1), max_size=40))
    def check(lengths):
        seen.clear()
        texts = ["x" * length for length in lengths]
        found = shapes.translate(ours, texts, 1, False, TOKENS_PER_BATCH)
        assert len(found) == len(texts) and set(seen) <= compiled

    check()


@pytest.mark.skipif(COMPILES, reason="the others compile")
def test_nothing_is_prepared_where_a_new_shape_costs_nothing():
    ours = translator()
    seen = recorded(ours)
    assert shapes.shapes(ours, TOKENS, TOKENS_PER_BATCH) == []
    shapes.translate(ours, ["a"] * 5 + [""], 1, False, TOKENS_PER_BATCH)
    assert [(rows, width) for rows, width, *_ in seen] == [(5, 2)]


@pytest.mark.parametrize("n_best", [1, 5])
def test_each_text_gets_its_own_translations_however_many(n_best):
    ours = translator()
    texts = ["a dog", "", "cats and dogs", " ", "ou\u0300?", "b"]
    found = shapes.translate(ours, texts, n_best, n_best > 1, TOKENS_PER_BATCH)
    expected = ours.translate(texts, n_best=n_best, beam_size=max(4, n_best), details=True,
                              alignments=n_best > 1)  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert len(one.alternatives) == len(other.alternatives)
        for ours_, theirs in zip((one, *one.alternatives), (other, *other.alternatives),
                                 strict=True):  # fmt: skip
            assert (ours_.text, ours_.alignment) == (theirs.text, theirs.alignment)
            assert ours_.score == pytest.approx(theirs.score, abs=1e-4)


@pytest.mark.skipif(not COMPILES, reason="a new shape costs nothing")
def test_compiling_a_shape_is_all_that_translating_in_it_needs():
    ours = translator()
    for shape in ((1, 16), (4, 16)):
        shapes.compile_shape(ours, shape)
    before = list(ours._searches)
    found = shapes.translate(ours, ["a", "bb", "ccc"], 1, False, TOKENS_PER_BATCH)
    assert list(ours._searches) == before
    assert [one.text for one in found] == ours.translate(["a", "bb", "ccc"])
