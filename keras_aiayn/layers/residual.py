"""Section 3.1: the residual connection, dropout and normalisation around every sub-layer."""

import keras


@keras.saving.register_keras_serializable(package="keras_aiayn")
class Residual(keras.layers.Layer):
    """`LayerNorm(x + Dropout(Sublayer(x)))` (sections 3.1 and 5.4).

    Args:
        dropout: P_drop.
        normalize_first: `x + Dropout(Sublayer(LayerNorm(x)))` instead, as later models do.
        layer_norm_epsilon: added to the variance.
        seed: of dropout. Without one, dropout on torch cannot be resumed exactly.

    Call arguments:
        inputs: (B, T, d).
        sublayer: a function from (B, T, d) to (B, T, d).

    Returns:
        (B, T, d).
    """

    def __init__(
        self,
        dropout=0.1,
        normalize_first=False,
        layer_norm_epsilon=1e-6,
        seed=None,
        dtype=None,
        **kwargs,
    ):
        super().__init__(dtype=dtype, **kwargs)
        self.dropout = dropout
        self.normalize_first = normalize_first
        self.layer_norm_epsilon = layer_norm_epsilon
        self.seed = seed
        self.norm = keras.layers.LayerNormalization(
            epsilon=layer_norm_epsilon, dtype=dtype, name="norm"
        )
        self.dropout_layer = keras.layers.Dropout(dropout, seed=seed, dtype=dtype, name="dropout")

    def build(self, inputs_shape):
        """Makes gain and bias of the normalisation."""
        self.norm.build(inputs_shape)

    def call(self, inputs, sublayer, training=None):
        """Adds what the sub-layer makes of the inputs to the inputs."""
        if self.normalize_first:
            return inputs + self.dropout_layer(sublayer(self.norm(inputs)), training=training)
        return self.norm(inputs + self.dropout_layer(sublayer(inputs), training=training))

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "dropout": self.dropout,
            "normalize_first": self.normalize_first,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "seed": self.seed,
        }


def spread_seed(seed, index):
    """The seed of the dropout number `index` of a layer.

    Keras seeds torch's generator with seed + counter, so seeds one apart would give two layers
    the same masks one step apart: they are set far from each other.
    """
    return None if seed is None else seed + 1_000_003 * index
