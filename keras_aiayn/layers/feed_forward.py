"""Section 3.3: the position-wise feed-forward network."""

from typing import Any

import keras

from keras_aiayn.layers.position_wise import position_wise
from keras_aiayn.layers.precision import policies


@keras.saving.register_keras_serializable(package="keras_aiayn")
class PositionwiseFeedForward(keras.layers.Layer):
    """Equation 2: `max(0, x W_1 + b_1) W_2 + b_2`, the same at every position.

    Args:
        intermediate_dim: d_ff.
        activation: `"relu"` in the paper.

    Call arguments:
        inputs: (B, T, d).

    Returns:
        (B, T, d).
    """

    def __init__(self, intermediate_dim, activation="relu", dtype=None, **kwargs):
        own, of_matrices = policies(dtype)
        super().__init__(dtype=own, **kwargs)
        self.intermediate_dim = intermediate_dim
        self.activation = keras.activations.get(activation)
        self.inner = keras.layers.Dense(
            intermediate_dim, activation=self.activation, dtype=of_matrices, name="inner"
        )
        self.outer: Any = None  # made by `build`

    def build(self, inputs_shape):
        """Makes both matrices; the second returns to the width of the inputs."""
        self.outer = keras.layers.Dense(
            inputs_shape[-1], dtype=self.inner.dtype_policy, name="outer"
        )
        self.inner.build(inputs_shape)
        self.outer.build((*inputs_shape[:-1], self.intermediate_dim))

    def call(self, inputs):
        """Widens, applies the activation, and narrows again."""
        return position_wise(lambda rows: self.outer(self.inner(rows)), inputs)

    def compute_output_shape(self, inputs_shape):
        """The shape of the inputs."""
        return inputs_shape

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "activation": keras.activations.serialize(self.activation),
        }
