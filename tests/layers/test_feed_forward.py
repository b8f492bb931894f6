"""Section 3.3, against equation 2 in numpy."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers.feed_forward import PositionwiseFeedForward


@pytest.fixture
def layer_and_inputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 6)).astype("float32")
    layer = PositionwiseFeedForward(9)
    layer.build(x.shape)
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))
    return layer, x


def test_is_equation_2(layer_and_inputs):
    layer, x = layer_and_inputs
    w_1, b_1, w_2, b_2 = layer.get_weights()
    expected = np.maximum(0, x @ w_1 + b_1) @ w_2 + b_2
    np.testing.assert_allclose(ops.convert_to_numpy(layer(x)), expected, rtol=0, atol=1e-5)


def test_equals_two_convolutions_of_width_one(layer_and_inputs):
    layer, x = layer_and_inputs
    w_1, b_1, w_2, b_2 = layer.get_weights()
    inner = keras.layers.Conv1D(9, 1, activation="relu")
    outer = keras.layers.Conv1D(6, 1)
    convolutions = keras.Sequential([inner, outer])
    convolutions.build(x.shape)
    inner.set_weights([w_1[np.newaxis], b_1])
    outer.set_weights([w_2[np.newaxis], b_2])
    expected = ops.convert_to_numpy(convolutions(x))
    np.testing.assert_allclose(ops.convert_to_numpy(layer(x)), expected, rtol=0, atol=1e-5)


def test_another_activation_survives_the_config():
    layer = PositionwiseFeedForward(9, activation="swish")
    clone = PositionwiseFeedForward.from_config(layer.get_config())
    assert clone.activation is keras.activations.silu
