"""A layer applied "to each position separately and identically" (section 3.3)."""

from keras import ops


def position_wise(layer, inputs, width=None, split=()):
    """Gives all positions of a batch to a layer as the rows of one matrix.

    `keras.layers.Dense` takes (B, T, d) as well, but TensorFlow makes some twenty operations of
    the product of that and a matrix, which cost time to trace and at every step of a search.

    Args:
        layer: a function from (N, d) to (N, any).
        inputs: (B, T, d), or (B, T, ...) of d numbers in all.
        width: d, where `inputs` has more axes or a graph does not know their size.
        split: sizes of the axes that the last one of the output is split into, as heads.

    Returns:
        (B, T, any), or (B, T, *split).
    """
    batch, length = inputs.shape[0], inputs.shape[1]
    if length is None:  # asking a graph of TensorFlow for a size is some operations more
        batch, length = ops.shape(inputs)[:2]
    rows = layer(ops.reshape(inputs, (-1, width or inputs.shape[-1])))
    return ops.reshape(rows, (-1 if batch is None else batch, length, *(split or rows.shape[1:])))
