"""Section 3.2: scaled dot-product attention, and several heads of it.

Axes: B batch, T queries, S keys, H heads, D head size. Heads come before positions, so that both
products are plain matrix products and a cache is read where it lies.
"""

import functools
from typing import Any

import keras
from keras import ops

from keras_aiayn.layers.position_wise import position_wise
from keras_aiayn.layers.precision import policies

# What a masked score becomes. Finite in float32, so that a row without a single key gives the
# mean of the values and not NaN.
MASKED_SCORE = -1e9


def scaled_dot_product_attention(query, key, value, mask=None, dropout=None):
    """Equation 1: `softmax(Q K^T / sqrt(d_k)) V`.

    The scale keeps the variance of the scores at 1: a dot product of d_k independent numbers of
    variance 1 has variance d_k, and a softmax over large scores has almost no gradient.

    Args:
        query: (B, H, T, d_k).
        key: (B, H, S, d_k).
        value: (B, H, S, d_v).
        mask: booleans (B, T, S) or (B, 1, S), True = keep.
        dropout: a function applied to the weights (the paper uses none).

    Returns:
        The output (B, H, T, d_v) and the weights (B, H, T, S), the latter before dropout.
    """
    scale = float(query.shape[-1]) ** -0.5
    scores = ops.matmul(query * scale, ops.swapaxes(key, -1, -2))  # (B, H, T, S)
    scores = ops.cast(scores, "float32")
    if mask is not None:
        check_mask(mask)
        scores = ops.where(ops.expand_dims(mask, axis=1), scores, MASKED_SCORE)
    weights = ops.cast(_softmax(scores), value.dtype)
    kept = weights if dropout is None else dropout(weights)
    return ops.matmul(kept, value), weights


def _softmax(scores):
    if scores.shape[-1] == 1:  # a sequence of one token, which `ops.softmax` warns of
        return ops.exp(ops.log_softmax(scores, axis=-1))
    return ops.softmax(scores, axis=-1)


def fused_attention(query, key, value, mask=None):
    """The same output by the backend's own kernel, which keeps no weights.

    Arguments and output as in `scaled_dot_product_attention`.
    """
    if mask is not None:
        check_mask(mask)
        mask = ops.expand_dims(mask, axis=1)  # (B, 1, T, S)
        # One row for all queries is nothing that JAX's kernel for GPUs takes.
        batch, _, length, _ = ops.shape(query)
        mask = ops.broadcast_to(mask, (batch, 1, length, ops.shape(key)[2]))
    query, key, value = (ops.swapaxes(x, 1, 2) for x in (query, key, value))
    return ops.swapaxes(ops.dot_product_attention(query, key, value, mask=mask), 1, 2)


def prefers_fused_attention(query, value):
    """Whether the backend's kernel is there for these heads and faster than the equation.

    On a CPU it is the slower of the two on every backend. TensorFlow has none of its own, and
    JAX's takes heads of one size only.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        return query.shape[-1] == value.shape[-1] and jax_has_accelerator()
    return backend == "torch" and query.device.type == "cuda"


@functools.cache
def jax_has_accelerator():
    """Whether JAX computes on something else than a CPU."""
    return not keras.distribution.list_devices()[0].startswith("cpu")


def check_mask(mask):
    """Refuses masks of numbers: an additive mask read as booleans is the wrong way round."""
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if dtype != "bool":
        raise ValueError(
            f"`attention_mask` must be boolean, True where a key is kept. Received: dtype={dtype}"
        )


@keras.saving.register_keras_serializable(package="keras_aiayn")
class MultiHeadAttention(keras.layers.Layer):
    """`Concat(head_1, ..., head_h) W_O`, `head_i = Attention(Q W_Q_i, K W_K_i, V W_V_i)` (3.2.2).

    Unlike `keras.layers.MultiHeadAttention`, whose second argument is `value`, this layer takes
    `query, key, value`; pass them by keyword.

    Args:
        num_heads: h.
        key_dim: d_k, size of a head's queries and keys.
        value_dim: d_v, size of a head's values; `key_dim` by default.
        output_dim: width of the output; that of `query` by default.
        dropout: rate on the attention weights (0 in the paper).
        use_bias: whether the four projections have a bias (not in the paper).
        seed: of dropout. Without one, dropout on torch cannot be resumed exactly.

    Call arguments:
        query: (B, T, d).
        key: (B, S, d).
        value: (B, S, d), `key` by default.
        attention_mask: booleans (B, T, S) or (B, 1, S), True = keep.
        return_attention_scores: whether to return the weights (B, H, T, S) as well.

    Returns:
        (B, T, output_dim), or that and the weights.
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        value_dim=None,
        output_dim=None,
        dropout=0.0,
        use_bias=False,
        seed=None,
        dtype=None,
        **kwargs,
    ):
        own, of_matrices = policies(dtype)
        super().__init__(dtype=own, **kwargs)
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.value_dim = value_dim or key_dim
        self.output_dim = output_dim
        self.dropout = dropout
        self.use_bias = use_bias
        self.seed = seed

        def projection(width, name):
            return keras.layers.Dense(width, use_bias=use_bias, dtype=of_matrices, name=name)

        self.query_projection = projection(num_heads * key_dim, "query")
        self.key_projection = projection(num_heads * key_dim, "key")
        self.value_projection = projection(num_heads * self.value_dim, "value")
        self.dropout_layer = keras.layers.Dropout(dropout, seed=seed, dtype=own, name="dropout")
        self.output_projection: Any = (
            None if output_dim is None else projection(output_dim, "output")
        )

    def build(self, query_shape, key_shape=None, value_shape=None):
        """Makes the four matrices."""
        key_shape = key_shape or query_shape
        value_shape = value_shape or key_shape
        if self.output_projection is None:
            self.output_projection = keras.layers.Dense(
                query_shape[-1],
                use_bias=self.use_bias,
                dtype=self.query_projection.dtype_policy,
                name="output",
            )
        self.query_projection.build(query_shape)
        self.key_projection.build(key_shape)
        self.value_projection.build(value_shape)
        self.output_projection.build((*query_shape[:-1], self.num_heads * self.value_dim))

    def call(
        self,
        query,
        key,
        value=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
    ):
        """Attends from each query to the keys that the mask keeps."""
        keys, values = self.project_keys(key, value)
        output, weights = self.attend(
            self.project_query(query),
            keys,
            values,
            attention_mask=attention_mask,
            need_weights=return_attention_scores,
            training=training,
        )
        return (output, weights) if return_attention_scores else output

    def project_query(self, query):
        """Queries of all heads: (B, T, d) to (B, H, T, d_k)."""
        return self._project_heads(self.query_projection, query, self.key_dim)

    def project_keys(self, key, value=None):
        """Keys and values of all heads: (B, S, d) to (B, H, S, d_k) and (B, H, S, d_v)."""
        value = key if value is None else value
        keys = self._project_heads(self.key_projection, key, self.key_dim)
        return keys, self._project_heads(self.value_projection, value, self.value_dim)

    def _project_heads(self, projection, x, head_dim):
        heads = position_wise(projection, x, split=(self.num_heads, head_dim))
        return ops.swapaxes(heads, 1, 2)

    def attend(self, query, key, value, attention_mask=None, need_weights=False, training=None):
        """Attention over projected heads, and the output projection.

        Returns:
            The output (B, T, output_dim), and the weights (B, H, T, S) or None.
        """
        weights = None
        if training and self.dropout > 0:
            heads, weights = scaled_dot_product_attention(
                query, key, value, attention_mask, self._drop
            )
        elif need_weights or not prefers_fused_attention(query, value):
            heads, weights = scaled_dot_product_attention(query, key, value, attention_mask)
        else:
            heads = fused_attention(query, key, value, attention_mask)
        joined = ops.swapaxes(heads, 1, 2)  # (B, T, H, d_v)
        width = self.num_heads * self.value_dim
        return position_wise(self.output_projection, joined, width), weights

    def _drop(self, weights):
        return self.dropout_layer(weights, training=True)

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "output_dim": self.output_dim,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "seed": self.seed,
        }
