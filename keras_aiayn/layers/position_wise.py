"""A layer applied "to each position separately and identically" (section 3.3)."""

from keras import ops


def position_wise(layer, inputs):
    """Gives all positions of a batch to a layer as the rows of one matrix.

    `keras.layers.Dense` takes (B, T, d) as well, but TensorFlow makes some twenty operations of
    the product of that and a matrix, which cost time to trace and at every step of a search.

    Args:
        layer: a function from (N, d) to (N, width).
        inputs: (B, T, d).

    Returns:
        (B, T, width).
    """
    *batch, width = ops.shape(inputs)
    rows = layer(ops.reshape(inputs, (-1, width)))
    return ops.reshape(rows, (*batch, rows.shape[-1]))
