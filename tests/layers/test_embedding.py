"""Section 3.4: one matrix, and what an update does to it."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers.embedding import SharedEmbedding

V, D = 11, 4
IDS = np.array([[1, 5, 5], [5, 2, 10]], "int32")


def built(**options):
    layer = SharedEmbedding(V, D, **options)
    layer.build(IDS.shape)
    return layer


def as_numpy(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))


def test_embeddings_are_rows_of_the_matrix_times_the_root_of_its_width():
    layer = built()
    (table,) = layer.get_weights()
    np.testing.assert_allclose(as_numpy(layer(IDS)), table[IDS] * np.sqrt(D), rtol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_training_looks_up_what_inference_does_to_the_bit(policy):
    layer = built(dtype=policy)
    inference = as_numpy(layer(IDS, training=False))
    np.testing.assert_array_equal(as_numpy(layer(IDS, training=True)), inference)


def test_projection_is_the_transpose_of_the_same_matrix():
    layer = built()
    hidden = np.random.default_rng(0).normal(size=(2, 3, D)).astype("float32")
    for _ in range(2):
        (table,) = layer.get_weights()
        logits = as_numpy(layer(hidden, reverse=True))
        np.testing.assert_allclose(logits, hidden @ table.T, rtol=0, atol=1e-6)
        layer.set_weights([table[::-1].copy()])


def test_untied_projection_has_a_matrix_and_a_bias_of_its_own():
    layer = built(tie_projection=False, use_logits_bias=True)
    rng = np.random.default_rng(0)
    weights = {
        "embeddings": rng.normal(size=(V, D)),
        "reverse_embeddings": rng.normal(size=(D, V)),
        "logits_bias": rng.normal(size=V),
    }
    for weight in layer.weights:
        weight.assign(weights[weight.name])
    assert len(layer.weights) == len(weights)
    hidden = rng.normal(size=(2, 3, D)).astype("float32")
    expected = hidden @ weights["reverse_embeddings"] + weights["logits_bias"]
    np.testing.assert_allclose(as_numpy(layer(hidden, reverse=True)), expected, rtol=0, atol=1e-5)
    expected = weights["embeddings"][IDS] * np.sqrt(D)
    np.testing.assert_allclose(as_numpy(layer(IDS)), expected, rtol=1e-5)


def test_embeddings_start_with_deviation_of_one_over_the_root_of_the_width():
    layer = SharedEmbedding(4000, 64)
    layer.build((None, None))
    (table,) = layer.get_weights()
    assert table.std() == pytest.approx(64**-0.5, rel=0.02)
    assert table.mean() == pytest.approx(0, abs=0.002)
    # So an embedding, scaled, has variance 1 like the position that is added to it.
    assert as_numpy(layer(np.arange(4000))).std() == pytest.approx(1, rel=0.02)


def test_logits_are_float32_and_the_product_is_not_in_mixed_precision():
    layer = built(dtype="mixed_bfloat16")
    hidden = np.random.default_rng(0).normal(size=(2, 3, D)).astype("float32")
    logits = layer(ops.cast(hidden, "bfloat16"), reverse=True)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    rounded = as_numpy(ops.cast(logits, "bfloat16"))
    np.testing.assert_array_equal(as_numpy(logits), rounded)


def test_adam_adds_up_the_rows_of_a_repeated_token_before_it_squares_them():
    # Adam's first step moves whatever has a gradient by the learning rate, whatever the gradient.
    layer = SharedEmbedding(V, D)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layer])
    model.compile(keras.optimizers.Adam(0.1, epsilon=1e-9), "mse")
    (before,) = layer.get_weights()
    targets = np.random.default_rng(0).normal(size=(*IDS.shape, D))
    model.train_on_batch(IDS, targets)
    (after,) = layer.get_weights()
    seen = np.isin(np.arange(V), IDS)
    np.testing.assert_allclose(np.abs(after - before)[seen], 0.1, rtol=1e-4)
    np.testing.assert_array_equal(after[~seen], before[~seen])
