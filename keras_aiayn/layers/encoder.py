"""Section 3.1: one of the N layers of the encoder."""

import keras

from keras_aiayn.layers.attention import MultiHeadAttention
from keras_aiayn.layers.feed_forward import PositionwiseFeedForward
from keras_aiayn.layers.precision import policies
from keras_aiayn.layers.residual import Residual, spread_seed


@keras.saving.register_keras_serializable(package="keras_aiayn")
class TransformerEncoderBlock(keras.layers.Layer):
    """Self-attention and a feed-forward network, each inside a residual connection.

    With a causal mask it is also the block of a decoder-only language model.

    Args:
        num_heads: h.
        intermediate_dim: d_ff.
        key_dim: d_k; the width of the inputs over `num_heads` by default.
        value_dim: d_v; `key_dim` by default.
        dropout: P_drop, on the output of both sub-layers.
        attention_dropout: rate on the attention weights (0 in the paper).
        activation: of the feed-forward network.
        normalize_first: pre-norm instead of the paper's post-norm.
        layer_norm_epsilon: added to the variance.
        use_bias: whether the projections of attention have a bias.
        seed: of dropout.

    Call arguments:
        inputs: (B, S, d).
        attention_mask: booleans (B, S, S) or (B, 1, S), True = keep.
        return_attention_scores: whether to return the weights (B, H, S, S) as well.

    Returns:
        (B, S, d), or that and the weights.
    """

    def __init__(
        self,
        num_heads,
        intermediate_dim,
        key_dim=None,
        value_dim=None,
        dropout=0.1,
        attention_dropout=0.0,
        activation="relu",
        normalize_first=False,
        layer_norm_epsilon=1e-6,
        use_bias=False,
        seed=None,
        dtype=None,
        **kwargs,
    ):
        own, of_matrices = policies(dtype)
        super().__init__(dtype=own, **kwargs)
        self._dtype_of_matrices = of_matrices
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation = activation
        self.normalize_first = normalize_first
        self.layer_norm_epsilon = layer_norm_epsilon
        self.use_bias = use_bias
        self.seed = seed

    def build(self, inputs_shape):
        """Makes both sub-layers."""
        self.self_attention = self._attention("self_attention", inputs_shape[-1], index=0)
        self.self_attention.build(inputs_shape, inputs_shape)
        self.self_attention_residual = self._residual("self_attention_residual", index=1)
        self.self_attention_residual.build(inputs_shape)
        self._build_feed_forward(inputs_shape, index=2)

    def call(self, inputs, attention_mask=None, return_attention_scores=False, training=None):
        """Attends to all positions, then transforms each."""
        scores = None

        def self_attention(x):
            nonlocal scores
            keys, values = self.self_attention.project_keys(x)
            output, scores = self.self_attention.attend(
                self.self_attention.project_query(x),
                keys,
                values,
                attention_mask=attention_mask,
                need_weights=return_attention_scores,
                training=training,
            )
            return output

        x = self.self_attention_residual(inputs, sublayer=self_attention, training=training)
        x = self.feed_forward_residual(x, sublayer=self.feed_forward, training=training)
        return (x, scores) if return_attention_scores else x

    def compute_output_spec(self, inputs, *args, **kwargs):
        """The shape of the inputs: to find it, Keras would run the block on its backend."""
        with_scores = kwargs.get("return_attention_scores") or any(arg is True for arg in args)
        if with_scores or kwargs.get("cache") is not None:
            return super().compute_output_spec(inputs, *args, **kwargs)
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def _attention(self, name, width, index):
        return MultiHeadAttention(
            self.num_heads,
            self.key_dim or width // self.num_heads,
            value_dim=self.value_dim,
            output_dim=width,
            dropout=self.attention_dropout,
            use_bias=self.use_bias,
            seed=spread_seed(self.seed, index),
            dtype=self._dtype_of_matrices,
            name=name,
        )

    def _residual(self, name, index):
        return Residual(
            dropout=self.dropout,
            normalize_first=self.normalize_first,
            layer_norm_epsilon=self.layer_norm_epsilon,
            seed=spread_seed(self.seed, index),
            dtype=self.dtype_policy,
            name=name,
        )

    def _build_feed_forward(self, inputs_shape, index):
        self.feed_forward = PositionwiseFeedForward(
            self.intermediate_dim,
            activation=self.activation,
            dtype=self._dtype_of_matrices,
            name="feed_forward",
        )
        self.feed_forward.build(inputs_shape)
        self.feed_forward_residual = self._residual("feed_forward_residual", index)
        self.feed_forward_residual.build(inputs_shape)

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "activation": self.activation,
            "normalize_first": self.normalize_first,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "use_bias": self.use_bias,
            "seed": self.seed,
        }
