"""Rows of one matrix give what a layer makes of (B, T, d), whatever is known of the sizes."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.decoding.compiled import compiled
from keras_aiayn.layers.position_wise import position_wise


@pytest.fixture
def dense():
    layer = keras.layers.Dense(12)
    layer.build((None, 8))
    return layer


@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 1, 8), (0, 5, 8)])
@pytest.mark.parametrize("any_shape", [True, False])
def test_positions_are_given_to_the_layer_one_by_one(dense, shape, any_shape):
    inputs = np.random.default_rng(1).normal(size=shape).astype("float32")
    run = compiled(dense, lambda x: position_wise(dense, x, width=8), any_shape=any_shape)
    kernel, bias = (ops.convert_to_numpy(weight) for weight in dense.weights)
    np.testing.assert_allclose(run(inputs), inputs @ kernel + bias, atol=1e-6)


def test_what_is_split_is_joined_again(dense):
    inputs = np.random.default_rng(1).normal(size=(2, 3, 8)).astype("float32")
    whole = ops.convert_to_numpy(position_wise(dense, inputs))
    split = position_wise(dense, ops.convert_to_tensor(inputs), split=(3, 4))
    np.testing.assert_array_equal(ops.convert_to_numpy(split), whole.reshape(2, 3, 3, 4))
    joined = position_wise(lambda rows: rows, split, width=12)
    np.testing.assert_array_equal(ops.convert_to_numpy(joined), whole)
