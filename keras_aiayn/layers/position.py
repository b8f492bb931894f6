"""Section 3.5: positions, as fixed sinusoids or learned.

Both layers add the encoding of each position to the embeddings. `positions` defaults to
0, 1, ..., T - 1; a decoder that goes on from a cache says where it is.
"""

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable(package="keras_aiayn")
class SinusoidalPositionEncoding(keras.layers.Layer):
    """`PE(pos, 2i) = sin(pos / 10000^(2i/d))`, `PE(pos, 2i+1) = cos(pos / 10000^(2i/d))`.

    Wavelengths run from 2 pi to 10000 * 2 pi. There is no longest position.

    Call arguments:
        inputs: embeddings (B, T, d), d even.
        positions: integers that broadcast to (B, T); counted from 0 by default.

    Returns:
        `inputs` plus the encodings, (B, T, d).
    """

    def build(self, inputs_shape):
        """Checks the width."""
        if inputs_shape[-1] % 2:
            raise ValueError(
                "Sinusoids come in pairs of sine and cosine, so the width must be even. "
                f"Received: inputs_shape={inputs_shape}"
            )

    def call(self, inputs, positions=None):
        """Adds the encodings."""
        if positions is None:
            # From 0 in words, which is all that jax2onnx reads.
            positions = ops.arange(0, ops.shape(inputs)[1], dtype="int32")
        width = int(inputs.shape[-1])  # a tensor where PyTorch is traced for an export
        return inputs + ops.cast(self.encode(positions, width), inputs.dtype)

    def compute_output_shape(self, inputs_shape, positions_shape=None):
        """The shape of the inputs."""
        return inputs_shape

    @staticmethod
    def encode(positions, hidden_dim):
        """Encodings of any positions: (...) integers to (..., hidden_dim) float32.

        Float32 under every dtype policy: in bfloat16 positions above 256 would collide.
        """
        frequencies = 10000.0 ** (-np.arange(0, hidden_dim, 2) / hidden_dim)
        angles = ops.cast(ops.expand_dims(positions, -1), "float32") * ops.convert_to_tensor(
            frequencies.astype("float32")
        )  # (..., d / 2)
        pairs = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)  # (..., d / 2, 2)
        return ops.reshape(pairs, (*ops.shape(angles)[:-1], hidden_dim))


@keras.saving.register_keras_serializable(package="keras_aiayn")
class LearnedPositionEmbedding(keras.layers.Layer):
    """A learned vector for each position (Table 3, row E).

    Args:
        max_length: number of positions.

    Call arguments:
        inputs: embeddings (B, T, d), T at most `max_length`.
        positions: integers below `max_length` that broadcast to (B, T); counted from 0 by default.

    Returns:
        `inputs` plus the vectors of their positions, (B, T, d).
    """

    def __init__(self, max_length, **kwargs):
        super().__init__(**kwargs)
        self.max_length = max_length

    def build(self, inputs_shape):
        """Makes the table, (max_length, d)."""
        width = inputs_shape[-1]
        self.table = self.add_weight(
            shape=(self.max_length, width),
            initializer=keras.initializers.RandomNormal(stddev=width**-0.5),
            name="table",
        )

    def call(self, inputs, positions=None):
        """Adds the vectors."""
        length = inputs.shape[1]
        if length is not None and length > self.max_length:
            raise ValueError(
                "Learned positions cannot go beyond `max_length`. "
                f"Received: max_length={self.max_length}, a sequence of {length} tokens"
            )
        table = ops.convert_to_tensor(self.table)
        if positions is None:
            # A slice and not a lookup: its gradient is dense (see SharedEmbedding.call).
            return inputs + ops.cast(table[: ops.shape(inputs)[1]], inputs.dtype)
        return inputs + ops.cast(ops.take(table, positions, axis=0), inputs.dtype)

    def compute_output_shape(self, inputs_shape, positions_shape=None):
        """The shape of the inputs."""
        return inputs_shape

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "max_length": self.max_length}
