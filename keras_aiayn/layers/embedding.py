"""Section 3.4: one matrix for embeddings and the projection before the softmax."""

import keras
from keras import ops

from keras_aiayn.layers.position_wise import position_wise
from keras_aiayn.layers.precision import policies


@keras.saving.register_keras_serializable(package="keras_aiayn")
class SharedEmbedding(keras.layers.Layer):
    """Looks tokens up, times sqrt(d_model); with `reverse=True` projects back to logits.

    Args:
        vocabulary_size: V.
        hidden_dim: d_model.
        tie_projection: whether the projection is the transpose of the same matrix, as in the
            paper, or has a matrix of its own.
        use_logits_bias: whether a bias is added to the logits (not in the paper).

    Call arguments:
        inputs: integers (B, T), or with `reverse=True` numbers (B, T, d_model).
        reverse: whether to project.

    Returns:
        (B, T, d_model), or float32 logits (B, T, V).
    """

    def __init__(
        self,
        vocabulary_size,
        hidden_dim,
        tie_projection=True,
        use_logits_bias=False,
        dtype=None,
        **kwargs,
    ):
        own, of_matrices = policies(dtype)
        super().__init__(dtype=own, **kwargs)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.tie_projection = tie_projection
        self.use_logits_bias = use_logits_bias
        self.scale = hidden_dim**0.5
        self.table = keras.layers.ReversibleEmbedding(
            vocabulary_size,
            hidden_dim,
            tie_weights=tie_projection,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
            # Keras would run the product in float32 under a mixed policy.
            reverse_dtype=self.compute_dtype,
            dtype=of_matrices,
            name="table",
        )

    def build(self, inputs_shape):
        """Makes the matrix, or both matrices."""
        self.table.build(inputs_shape)
        if self.use_logits_bias:
            self.logits_bias = self.add_weight(
                shape=(self.vocabulary_size,), initializer="zeros", name="logits_bias"
            )

    def call(self, inputs, reverse=False, training=None):
        """Looks up, or projects."""
        if reverse:
            return self._project(inputs)
        if training and self.table.quantization_mode is None:
            # The whole table is scaled before the lookup, because its gradient is dense then. On
            # TensorFlow a plain lookup has a sparse one, which Adam squares before it adds up
            # the rows of a token that occurs twice. The values are the same to the bit.
            table = ops.cast(ops.convert_to_tensor(self.table.embeddings), self.compute_dtype)
            return ops.take(table * self.scale, inputs, axis=0)
        return self.table(inputs) * self.scale

    def _project(self, hidden):
        logits = position_wise(lambda rows: self.table(rows, reverse=True), hidden)
        logits = ops.cast(logits, "float32")
        return logits + ops.cast(self.logits_bias, "float32") if self.use_logits_bias else logits

    def compute_output_spec(self, inputs, reverse=False, training=None):
        """Shape and dtype, which depend on the direction."""
        if reverse:
            return keras.KerasTensor((*inputs.shape[:-1], self.vocabulary_size), "float32")
        return keras.KerasTensor((*inputs.shape, self.hidden_dim), self.compute_dtype)

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_dim": self.hidden_dim,
            "tie_projection": self.tie_projection,
            "use_logits_bias": self.use_logits_bias,
        }
