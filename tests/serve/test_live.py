"""Texts that join a search get what `translate` gives, in shapes that were compiled before."""

import random

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.serve import grid as grids
from keras_aiayn.serve.grid import Grid
from keras_aiayn.serve.live import Asked, Live, live

COMPILES = not takes_any_shape()
GRID = Grid(tokens=140, tokens_per_batch=512, exact=not COMPILES)
TEXTS = ["a dog", "", "cats and dogs", " ", "ou\u0300?", "b", "x" * 20, "dog dog dog",
         "y" * 50, "z" * 135]  # fmt: skip


def translator(**sizes):
    tokenizer = ByteTokenizer()
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 2} | sizes
    return Translator(Transformer(tokenizer.vocabulary_size, **sizes), tokenizer,
                      max_extra_length=3)  # fmt: skip


def check(found, expected):
    assert len(found.alternatives) == len(expected.alternatives)
    for ours, theirs in zip((found, *found.alternatives), (expected, *expected.alternatives),
                            strict=True):  # fmt: skip
        assert (ours.text, ours.alignment) == (theirs.text, theirs.alignment)
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)


def trickled(search, texts, asked, seed=0):
    """Lets texts join a few at a time, as many as there is room for: what is found of each."""
    draw = random.Random(seed)
    waiting, found, under_way = list(range(len(texts))), {}, {}
    while waiting or under_way:
        new = {}
        for number in waiting[: draw.randrange(9)]:
            wanted = under_way | new | {number: texts[number]}
            longest = max(len(text) + 1 for text in wanted.values())
            if len(wanted) > GRID.rows(GRID.width(longest)):
                break
            new[number] = texts[number]
        waiting = waiting[len(new) :]
        done = search.turn(new, asked)
        found |= done
        under_way = {n: t for n, t in (under_way | new).items() if n not in done}
    return [found[number] for number in range(len(texts))]


@pytest.mark.parametrize("asked", [Asked(), Asked(n_best=5, alignments=True)])
@pytest.mark.parametrize("sizes", [{}, {"positions": "learned", "max_length": 12}])
def test_each_text_gets_its_own_translations_whenever_it_joins(asked, sizes):
    ours = translator(**sizes)
    search = Live(ours, GRID)
    texts = TEXTS * 2
    random.Random(1).shuffle(texts)
    expected = ours.translate(texts, n_best=asked.n_best, beam_size=max(4, asked.n_best),
                              details=True, alignments=asked.alignments)  # fmt: skip
    for found, other in zip(trickled(search, texts, asked), expected, strict=True):
        check(found, other)


def test_what_is_short_does_not_wait_for_what_is_long():
    ours = translator()
    search = Live(ours, GRID)
    done = list(search.turn({0: "x" * 30, 1: "a", 2: "b", 3: "c"}, Asked()))
    assert done and 0 not in done
    while 0 not in done:
        done += search.turn({}, Asked())
    assert sorted(done) == [0, 1, 2, 3]


def test_after_an_error_nothing_is_under_way(monkeypatch):
    ours = translator()
    search = Live(ours, GRID)
    search.turn({0: "x" * 30, 1: "a"}, Asked())
    with monkeypatch.context() as broken:
        broken.setattr(search._batch, "advance", None)
        with pytest.raises(TypeError):
            search.turn({2: "b"}, Asked())
    assert search.turn({}, Asked()) == {}
    (expected,) = ours.translate(["a"], details=True)
    found = {}
    while not found:
        found |= search.turn({0: "a"} if search._batch is None else {}, Asked())
    check(found[0], expected)


@pytest.fixture
def compilations():
    """A list that grows by one with each program that JAX compiles."""
    import jax

    seen = []

    def heard(event, seconds, **more):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield seen
    jax.monitoring.unregister_event_duration_listener(heard)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="counts what JAX compiles")
@pytest.mark.parametrize("sizes", [{}, {"positions": "learned", "max_length": 40}])
def test_what_is_translated_has_been_compiled(sizes, compilations):
    ours = translator(**sizes)
    search = Live(ours, GRID)
    assert search.widths == ([32, 64] if sizes else [32, 64, 128, 140])
    for width in search.widths:
        search.compile_width(width)
    assert compilations
    compilations.clear()
    for seed in range(12):
        draw = random.Random(seed)
        lengths = [draw.choice([0, 9, 31, 32, 90, 139])] * 20 + [5, 139, 31, 60] * (seed % 3)
        trickled(search, ["x" * length for length in lengths], Asked(), seed)
    assert not compilations


@pytest.mark.skipif(COMPILES, reason="the others compile")
def test_nothing_is_prepared_where_a_new_shape_costs_nothing():
    search = live(translator(), GRID)
    assert search.widths == []
    search.turn({0: "abc", 1: "abcdef" * 4, 2: ""}, Asked())
    assert search._batch.shape[:2] == (2, 25)  # as high and wide as they are
    search.turn({3: "a" * 30}, Asked())
    assert search._batch.shape.width == 31


@given(st.integers(1, 5_000), st.integers(1, 5_000), st.integers(1, 9_000))
def test_every_text_has_a_place_in_the_grid(tokens, longest, tokens_per_batch):
    grid = Grid(longest, tokens_per_batch)
    assert Grid(longest, tokens_per_batch, exact=True).width(tokens) == tokens
    width = grid.width(min(tokens, longest))
    assert min(tokens, longest) <= width <= max(longest, 1) and width in grid.widths
    sizes = grid.sizes(width)
    assert sizes[0] == 1 and sizes[-1] == grid.rows(width) == max(1, tokens_per_batch // width)
    few = grids.FEW
    assert all(
        a < b <= max(few, (a + 1) * grids.STEP) for a, b in zip(sizes, sizes[1:], strict=False)
    )
