"""Section 5.4, and what a pad, a weight and an accumulated batch do to an update."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers.embedding import SharedEmbedding
from keras_aiayn.special_ids import PAD
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.transformer import Transformer

V = 13
# Rows of very uneven length.
TARGETS = np.array([[4, 5, 6, 7, 8, 9, 3], [10, 3, 0, 0, 0, 0, 0]], "int32")
REAL = TARGETS != PAD


def some_logits(scale=3.0):
    rng = np.random.default_rng(0)
    return (scale * rng.normal(size=(*TARGETS.shape, V))).astype("float32")


def explicit_crossentropy(targets, logits, eps):
    """`- sum_v q_v log p_v` of every token, the distribution q written out."""
    logits = logits.astype("float64")
    largest = logits.max(axis=-1, keepdims=True)
    normaliser = np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True)) + largest
    vocabulary_size = logits.shape[-1]
    q = np.full(logits.shape, eps / (vocabulary_size - 1))
    np.put_along_axis(q, targets[..., np.newaxis], 1 - eps, axis=-1)
    np.testing.assert_allclose(q.sum(axis=-1), 1)
    return -(q * (logits - normaliser)).sum(axis=-1)


def value(tensor):
    return float(ops.convert_to_numpy(tensor))


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.2])
def test_smoothing_leaves_eps_to_all_other_tokens_alike(eps):
    logits = some_logits()
    statistics = LabelSmoothedCrossentropy(eps).statistics(TARGETS, ops.convert_to_tensor(logits))
    expected = explicit_crossentropy(TARGETS, logits, eps)
    np.testing.assert_allclose(ops.convert_to_numpy(statistics.loss), expected, rtol=1e-5)


def test_without_smoothing_is_kerass_own_crossentropy():
    logits = ops.convert_to_tensor(some_logits())
    tokens = keras.losses.sparse_categorical_crossentropy(TARGETS, logits, from_logits=True)
    expected = ops.convert_to_numpy(tokens)[REAL].mean()
    assert value(LabelSmoothedCrossentropy(0.0)(TARGETS, logits)) == pytest.approx(expected, 1e-5)


def test_without_weights_is_the_mean_over_real_tokens():
    logits = some_logits()
    expected = explicit_crossentropy(TARGETS, logits, 0.1)[REAL].mean()
    found = LabelSmoothedCrossentropy(0.1)(TARGETS, ops.convert_to_tensor(logits))
    assert value(found) == pytest.approx(expected, 1e-5)


def test_with_weights_is_the_weighted_sum():
    logits, weights = some_logits(), np.random.default_rng(1).uniform(size=TARGETS.shape)
    expected = (weights * explicit_crossentropy(TARGETS, logits, 0.1)).sum()
    found = LabelSmoothedCrossentropy(0.1)(TARGETS, ops.convert_to_tensor(logits), weights)
    assert value(found) == pytest.approx(expected, 1e-5)


def test_a_batch_of_nothing_but_pads_costs_nothing():
    found = LabelSmoothedCrossentropy()(TARGETS * 0, ops.convert_to_tensor(some_logits()))
    assert value(found) == 0.0


def test_large_logits_stay_finite_and_exact():
    logits = some_logits(scale=1e4)
    expected = explicit_crossentropy(TARGETS, logits, 0.1)[REAL].mean()
    found = LabelSmoothedCrossentropy(0.1)(TARGETS, ops.convert_to_tensor(logits))
    assert value(found) == pytest.approx(expected, 1e-5)


def test_large_ids_are_exact_under_mixed_precision():
    # Keras hands targets to a loss as numbers of its dtype, and bfloat16 has no 257.
    keras.config.set_dtype_policy("mixed_bfloat16")
    targets = np.array([[257, 999]])
    logits = np.zeros((1, 2, 1000), "float32")
    logits[0, 0, 257] = logits[0, 1, 999] = 5.0
    found = LabelSmoothedCrossentropy(0.0)(targets, ops.convert_to_tensor(logits))
    expected = explicit_crossentropy(targets, logits, 0.0).mean()
    assert value(found) == pytest.approx(expected, 1e-5)


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="always \"sum\".*Received: reduction='mean'"):
        LabelSmoothedCrossentropy(reduction="mean")


def test_config_makes_the_same_loss_again():
    loss = LabelSmoothedCrossentropy(0.2, name="mine")
    written = keras.saving.serialize_keras_object(loss)
    again = keras.saving.deserialize_keras_object(written)
    assert written["registered_name"] == "keras_aiayn>LabelSmoothedCrossentropy"
    assert again.get_config() == loss.get_config() and again.label_smoothing == 0.2


# What an update does. SGD at rate 1 moves every weight by its gradient: under the small rate of
# a warm-up any wrong update would look right.


def bigram_model():
    """Logits of the next token from the present one alone: a loss sees no more of a model."""
    ids = keras.Input((None,), dtype="int32")
    embedding = SharedEmbedding(V, 8, tie_projection=False)
    model = keras.Model(ids, embedding(embedding(ids), reverse=True))
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=weight.shape) for weight in model.weights])
    return model


def compiled(model, accumulation=None):
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulation)
    model.compile(optimizer, LabelSmoothedCrossentropy(0.1))
    return model


def flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def update(model, *batches):
    """What training on the batches adds to the weights."""
    before = flat(model)
    for batch in batches:
        model.train_on_batch(*batch)
    return flat(model) - before


def assert_same_update(found, expected):
    assert np.linalg.norm(expected) > 0.1
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


INPUTS = np.array([[2, 4, 5, 6, 7, 8, 9], [2, 10, 0, 0, 0, 0, 0]], "int32")


@pytest.fixture(scope="module")
def expected_update():
    """Each row by itself, cut to its real tokens, and the two weighted by these."""
    lengths = REAL.sum(axis=1)
    alone = [
        update(compiled(bigram_model()), (INPUTS[i : i + 1, :n], TARGETS[i : i + 1, :n]))
        for i, n in enumerate(lengths)
    ]
    return np.average(alone, axis=0, weights=lengths)


def test_a_users_arrays_without_weights_train_on_real_tokens_only(expected_update):
    model = compiled(bigram_model())
    before = flat(model)
    model.fit(INPUTS, TARGETS, batch_size=len(INPUTS), verbose=0)
    assert_same_update(flat(model) - before, expected_update)


def test_a_users_tf_data_without_weights_trains_on_real_tokens_only(expected_update):
    import tensorflow as tf

    model = compiled(bigram_model())
    before = flat(model)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(len(INPUTS))
    model.fit(dataset, shuffle=False, verbose=0)
    assert_same_update(flat(model) - before, expected_update)


def test_weights_of_one_over_the_real_tokens_give_the_same_update(expected_update):
    weights = (REAL / REAL.sum()).astype("float32")
    found = update(compiled(bigram_model()), (INPUTS, TARGETS, weights))
    assert_same_update(found, expected_update)


def test_accumulation_with_weights_k_over_n_gives_the_update_of_one_batch(expected_update):
    k = 2
    weights = (k * REAL / REAL.sum()).astype("float32")
    micro_batches = [(INPUTS[i : i + 1], TARGETS[i : i + 1], weights[i : i + 1]) for i in range(k)]
    found = update(compiled(bigram_model(), accumulation=k), *micro_batches)
    assert_same_update(found, expected_update)


def test_history_holds_the_mean_over_real_tokens():
    model = compiled(bigram_model())
    logits = ops.convert_to_numpy(model(INPUTS))
    expected = explicit_crossentropy(TARGETS, logits, 0.1)[REAL].mean()
    assert model.evaluate(INPUTS, TARGETS, verbose=0) == pytest.approx(expected, 1e-5)


def test_fifty_columns_of_pads_and_weights_over_real_tokens_do_not_change_the_transformers_update():
    model = Transformer(V, 1, hidden_dim=8, intermediate_dim=16, num_heads=2, dropout=0.0)
    start = compiled(model).get_weights()
    source = np.array([[4, 5, 6, 3], [7, 3, 0, 0]], "int32")

    def loss_and_update(pads=0, weighted=False):
        wide = [np.pad(ids, ((0, 0), (0, pads))) for ids in (source, INPUTS, TARGETS)]
        inputs = {"encoder_token_ids": wide[0], "decoder_token_ids": wide[1]}
        weights = [(wide[2] != PAD) / REAL.sum()] if weighted else []
        model.set_weights(start)
        before = flat(model)
        loss = model.train_on_batch(inputs, wide[2], *weights, return_dict=True)["loss"]
        return float(loss), flat(model) - before

    expected_loss, expected = loss_and_update()
    for changed in ({"pads": 50}, {"weighted": True}):
        loss, found = loss_and_update(**changed)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert_same_update(found, expected)
