"""A plan covers every pair once in few static shapes; the pipeline gives what the plan says."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_aiayn.data import batching, prepared
from keras_aiayn.special_ids import BOS, EOS, PAD

pytestmark = pytest.mark.backend_free


@st.composite
def corpora_and_options(draw):
    """Lengths of pairs, and a budget and a number of shapes that suit them."""
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    pairs, longest = draw(st.integers(1, 200)), draw(st.integers(1, 60))
    source, target = generator.integers(1, longest, (2, pairs), endpoint=True)
    options = {
        "tokens_per_batch": longest + draw(st.integers(0, 500)),
        "max_shapes": draw(st.integers(1, 10)),
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
    }
    return source, target, options


@given(corpora_and_options())
def test_a_plan_keeps_its_promises(case):
    source, target, options = case
    plan = batching.plan(source, target, **options)
    indices = [plan.indices(batch) for batch in range(len(plan))]
    assert sorted(np.concatenate(indices)) == list(range(len(source)))
    assert len(set(plan.shapes)) == len(plan.shapes) <= options["max_shapes"]
    filled, padded = 0, np.zeros(4, int)
    parts = np.arange(1, 5)
    for batch, own in enumerate(indices):
        rows, source_width, target_width = plan.shape(batch)
        assert 1 <= len(own) <= rows
        assert rows * max(source_width, target_width) <= options["tokens_per_batch"]
        assert source[own].max() <= source_width
        assert target[own].max() <= target_width
        assert plan.source_tokens(batch) == source[own].sum()
        assert plan.target_tokens(batch) == target[own].sum()
        filled += len(own) < rows
        padded += [(rows + -rows % n) * (source_width + target_width) for n in parts]
    assert filled <= 1  # filler rows stand in one batch of the epoch
    shares = [plan.real_share(n) for n in parts]
    assert shares == pytest.approx((source.sum() + target.sum()) / padded)
    assert {plan.shape(batch) for batch in range(len(plan))} == set(plan.shapes)


@given(corpora_and_options())
def test_shapes_do_not_depend_on_the_epoch(case):
    source, target, options = case
    first = batching.plan(source, target, **options | {"epoch": 0, "seed": 0})
    other = batching.plan(source, target, **options | {"epoch": 5, "seed": 9})
    assert first.shapes == other.shapes
    assert first.shape(0) == other.shape(0)
    assert len(first) == len(other)


def lengths(pairs: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a made corpus: source and target alike, some much longer than most."""
    generator = np.random.default_rng(seed)
    source = np.clip(generator.gamma(4, 4, pairs), 2, 100).astype("int32")
    return source, np.clip(source * generator.normal(1, 0.2, pairs), 2, 100).astype("int32")


OPTIONS = {"tokens_per_batch": 2048, "seed": 3, "epoch": 1}


def test_a_plan_is_a_function_of_its_arguments():
    first, again = (batching.plan(*lengths(), **OPTIONS) for _ in range(2))
    for batch in range(len(first)):
        assert first.shape(batch) == again.shape(batch)
        np.testing.assert_array_equal(first.indices(batch), again.indices(batch))


@pytest.mark.parametrize("changed", [{"epoch": 2}, {"seed": 4}])
def test_another_epoch_or_seed_mixes_anew(changed):
    one = batching.plan(*lengths(), **OPTIONS)
    other = batching.plan(*lengths(), **OPTIONS | changed)
    assert any(
        one.shape(batch) != other.shape(batch)
        or set(one.indices(batch)) != set(other.indices(batch))
        for batch in range(1, len(one))
    )
    members = [{frozenset(plan.indices(b)) for b in range(len(plan))} for plan in (one, other)]
    assert not members[0] & members[1]  # the batches hold other pairs, not the same in a new order


def taken(plan: batching.BatchPlan, pairs: int) -> np.ndarray:
    """How many times an epoch takes each pair."""
    return np.bincount(
        np.concatenate([plan.indices(batch) for batch in range(len(plan))]), minlength=pairs
    )


def test_weights_say_how_often_an_epoch_takes_the_pairs_of_a_corpus():
    corpora = [(1000, 1.0), (1500, 0.3), (500, 2.5)]
    plans = [
        batching.plan(*lengths(), **OPTIONS | {"epoch": epoch}, corpora=corpora)
        for epoch in range(2)
    ]
    times = [taken(plan, 3000) for plan in plans]
    for one in times:
        assert set(one[:1000]) == {1}
        assert set(one[1000:2500]) == {0, 1} and one[1000:2500].sum() == 450
        assert set(one[2500:]) == {2, 3} and one[2500:].sum() == 1250
    assert (times[0] != times[1]).any()  # the parts are others in each epoch
    source, target = lengths()
    for plan, one in zip(plans, times, strict=True):
        assert sum(map(plan.target_tokens, range(len(plan)))) == target @ one
        padded = sum(plan.shape(b)[0] * sum(plan.shape(b)[1:]) for b in range(len(plan)))
        assert plan.real_share() == pytest.approx((source @ one + target @ one) / padded)


def test_a_corpus_of_weight_1_is_no_weight():
    one = batching.plan(*lengths(), **OPTIONS)
    other = batching.plan(*lengths(), **OPTIONS, corpora=[(1000, 1.0), (2000, 1.0)])
    assert one.shapes == other.shapes and len(one) == len(other)
    for batch in range(len(one)):
        np.testing.assert_array_equal(one.indices(batch), other.indices(batch))


def test_shapes_suit_the_corpus_that_weighs_most():
    source = np.repeat([10, 20, 21], [500, 500, 5])
    short, long = (
        batching.plan(
            source, source, **OPTIONS, max_shapes=2, corpora=[(500, weight), (505, 1 / weight)]
        )
        for weight in (50.0, 0.02)
    )
    assert [width for _, width, _ in short.shapes] == [21, 10]
    assert [width for _, width, _ in long.shapes] == [21, 20]


def test_the_largest_shape_comes_first():
    source, _ = lengths()
    plan = batching.plan(source, source, **OPTIONS)
    assert plan.shape(0) == plan.shapes[0] == max(plan.shapes, key=lambda shape: shape[1])
    later = [plan.shape(batch) for batch in range(1, len(plan))]
    assert later != sorted(later) and later != sorted(later, reverse=True)


def test_the_largest_shape_is_not_the_widest_when_that_holds_half_the_tokens():
    source = np.array([21] * 3 + [10] * 40)
    plan = batching.plan(source, source, tokens_per_batch=40, seed=0, epoch=0)
    assert plan.shapes == [(1, 21, 21), (4, 10, 10)]
    assert plan.shape(0) == (4, 10, 10)


def brute_force(counts: np.ndarray, costs: np.ndarray, parts: int) -> int:
    """The least cost of cutting a row into at most so many parts, by trying all."""
    if parts == 1 or len(counts) == 1:
        return counts.sum() * costs[-1]
    return min(
        [counts.sum() * costs[-1]]
        + [
            brute_force(counts[:i], costs[:i], parts - 1) + counts[i:].sum() * costs[-1]
            for i in range(1, len(counts))
        ]
    )


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4))
def test_no_other_cuts_are_cheaper(seed, items, parts):
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 50, items)
    costs = np.sort(generator.choice(100, items, replace=False))
    chosen = batching._cheapest_cuts(counts, costs, parts)
    assert chosen[0] == items - 1
    assert chosen == sorted(set(chosen), reverse=True)
    starts = [*(last + 1 for last in chosen[1:]), 0]
    spent = sum(
        counts[start : last + 1].sum() * costs[last]
        for start, last in zip(starts, chosen, strict=True)
    )
    assert spent == brute_force(counts, costs, parts)


def test_more_shapes_mean_less_padding():
    shares = [
        batching.plan(*lengths(), **OPTIONS, max_shapes=shapes).real_share()
        for shapes in (1, 2, 4, 8)
    ]
    assert shares == sorted(shares)
    assert shares[-1] > 1.5 * shares[0]


def test_a_small_corpus_is_one_batch_without_filler():
    plan = batching.plan([3, 4], [5, 2], tokens_per_batch=25_000, seed=0, epoch=0, max_shapes=1)
    assert plan.shapes == [(2, 4, 5)]
    assert len(plan) == 1


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ([], [], {}, "there are no pairs"),
        ([3], [3, 4], {}, r"vectors of one length. Received: shapes \(1,\) and \(2,\)"),
        ([0], [3], {}, "the least is 1. Received: 0"),
        ([3], [33], {}, "`tokens_per_batch` must be at least 33.* Received: 32"),
        ([3], [3], {"max_shapes": 0}, "`max_shapes` must be at least 1. Received: 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(source, target, options, message):
    with pytest.raises(ValueError, match=message):
        batching.plan(
            np.array(source, "int32"),
            np.array(target, "int32"),
            **{"tokens_per_batch": 32, "seed": 0, "epoch": 0} | options,
        )


def made_split(source: np.ndarray, target: np.ndarray, dtype: str = "uint16") -> SimpleNamespace:
    """Pairs of these lengths (EOS included) with random pieces, as `prepared.Split` holds them."""
    generator = np.random.default_rng(7)
    flat = {}
    for side, counts in (("source", source), ("target", target)):
        flat[f"{side}_offsets"] = np.concatenate([[0], np.cumsum(counts - 1)]).astype("int64")
        flat[f"{side}_tokens"] = generator.integers(4, 900, int((counts - 1).sum())).astype(dtype)
    return SimpleNamespace(**flat)


def pieces(split: SimpleNamespace, side: str, pair: int) -> list[int]:
    tokens, offsets = getattr(split, f"{side}_tokens"), getattr(split, f"{side}_offsets")
    return tokens[offsets[pair] : offsets[pair + 1]].tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_gather_frames_every_pair(dtype):
    source, target = lengths(50)
    source[3] = target[7] = 1  # a blank line of validation: EOS alone
    split = made_split(source, target, dtype)
    chosen = np.array([49, 3, 7, 0, 12], "uint32")
    width = int(max(source.max(), target.max())) + 2
    inputs, targets = batching.gather(split, chosen, 7, width, width)
    assert {array.dtype for array in (*inputs.values(), targets)} == {np.dtype("int32")}
    for row, pair in enumerate(chosen):
        for array, framed in [
            (inputs["encoder_token_ids"], [*pieces(split, "source", pair), EOS]),
            (inputs["decoder_token_ids"], [BOS, *pieces(split, "target", pair)]),
            (targets, [*pieces(split, "target", pair), EOS]),
        ]:
            assert array[row].tolist() == framed + [PAD] * (width - len(framed))
    for array in (*inputs.values(), targets):
        assert array.shape == (7, width)
        assert (array[5:] == PAD).all()


def elements(*arguments, **options) -> list:
    given = batching.dataset(*arguments, **options)
    found = [(inputs, y.numpy(), w.numpy()) for inputs, y, w in given]
    assert int(given.cardinality()) == len(found)
    return found


def test_the_dataset_gives_the_batches_of_the_plan():
    source, target = lengths(400)
    split = made_split(source, target)
    plan = batching.plan(source, target, **OPTIONS)
    for batch, (inputs, targets, weights) in enumerate(elements(split, plan)):
        rows, source_width, target_width = plan.shape(batch)
        expected = batching.gather(split, plan.indices(batch), rows, source_width, target_width)
        for name, array in expected[0].items():
            np.testing.assert_array_equal(inputs[name], array)
        np.testing.assert_array_equal(targets, expected[1])
        real = targets != PAD
        assert real.sum() == plan.target_tokens(batch)
        np.testing.assert_allclose(weights, real / plan.target_tokens(batch), rtol=1e-6)
        assert weights.dtype == np.float32


def test_nobody_waits_for_a_thread_that_tunes_the_dataset():
    source, target = lengths(40)
    given = batching.dataset(made_split(source, target), batching.plan(source, target, **OPTIONS))
    assert given.options().autotune.enabled is False


def test_any_place_of_an_epoch_is_reached_at_once():
    source, target = lengths(400)
    split = made_split(source, target)
    plan = batching.plan(source, target, **OPTIONS)
    whole = elements(split, plan, accumulation=2)
    some = elements(split, plan, accumulation=2, start=3, stop=5)
    assert len(some) == 4
    for one, other in zip(whole[6:10], some, strict=True):
        np.testing.assert_array_equal(one[1], other[1])
    assert not elements(split, plan, accumulation=2, start=len(plan))


@settings(max_examples=25)
@given(
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 3),
    pairs=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_the_parts_of_a_batch_are_the_batch(accumulation, replicas, pairs, seed):
    source, target = lengths(pairs, seed)
    split = made_split(source, target)
    plan = batching.plan(source, target, tokens_per_batch=100, seed=seed, epoch=0)
    shares = {"accumulation": accumulation, "replicas": replicas}
    parts = [elements(split, plan, **shares, parts=[part]) for part in range(replicas)]
    for one, *each in zip(elements(split, plan, **shares), *parts, strict=True):
        np.testing.assert_array_equal(one[1], np.concatenate([targets for _, targets, _ in each]))
    for batch in range(len(plan)):
        micro_batches = range(batch * accumulation, (batch + 1) * accumulation)
        own = [part[micro] for part in parts for micro in micro_batches]
        rows, source_width, target_width = plan.shape(batch)
        rows_of_part = -(-rows // len(own))
        assert {targets.shape for _, targets, _ in own} == {(rows_of_part, target_width)}
        filled = rows_of_part * len(own)
        whole = batching.gather(split, plan.indices(batch), filled, source_width, target_width)
        together = np.concatenate([targets for _, targets, _ in own])
        assert sorted(together.tolist()) == sorted(whole[1].tolist())
        # A loss of reduction "sum" over the parts, averaged over the accumulated ones, is the
        # mean over the real tokens of the whole batch.
        assert sum(weights.sum() for *_, weights in own) == pytest.approx(accumulation, rel=1e-5)
        real_rows = [(targets[:, 0] != PAD).sum() for _, targets, _ in own]
        assert max(real_rows) - min(real_rows) <= 1  # filler is dealt out evenly


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation": 0}, "`accumulation` must be at least 1"),
        ({"replicas": 0}, "`parts` some of the replicas"),
        ({"replicas": 2, "parts": [2]}, r"Received: .*replicas=2, parts=\[2\]"),
        ({"replicas": 2, "parts": []}, "`parts` some of the replicas"),
        ({"start": -1}, "`start` and `stop`"),
        ({"start": 2, "stop": 1}, "`start` and `stop`"),
        ({"stop": 99}, "`start` and `stop`"),
    ],
)
def test_what_cannot_be_dealt_is_refused(options, message):
    source, target = lengths(20)
    plan = batching.plan(source, target, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        batching.dataset(made_split(source, target), plan, **options)


def test_a_model_can_fit_the_dataset():
    source, target = lengths(60)
    split = made_split(source, target)
    plan = batching.plan(source, target, **OPTIONS | {"tokens_per_batch": 512})
    given = batching.dataset(split, plan)
    tensors = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("encoder_token_ids", "decoder_token_ids")
    }
    embed = keras.layers.Embedding(900, 4)
    mean = keras.ops.mean(embed(tensors["encoder_token_ids"]), axis=1, keepdims=True)
    logits = keras.layers.Dense(900)(embed(tensors["decoder_token_ids"]) + mean)
    model = keras.Model(tensors, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile("sgd", loss)
    history = model.fit(given, epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.iterations == 2 * len(plan)
    assert history.history["loss"][0] == pytest.approx(np.log(900), rel=0.01)


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_batch", [2048, 4096])
def test_multi30k_is_little_padding(tmp_path, corpora, tokens_per_batch):
    folder = corpora / "multi30k"
    made = prepared.write(folder / "train.en", folder / "train.de", None, None, tmp_path / "data")
    plan = batching.plan(
        made.train.source_lengths(),
        made.train.target_lengths(),
        tokens_per_batch=tokens_per_batch,
        seed=0,
        epoch=0,
    )
    assert len(plan.shapes) <= 8
    assert plan.real_share() >= 0.85
