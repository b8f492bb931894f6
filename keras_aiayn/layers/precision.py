"""Which layers a quantised model keeps in integers: those that hold a matrix.

Keras quantises `Dense` and `ReversibleEmbedding`, the inputs of each on the fly. What stands around
them, from the softmax to the normalisation, computes as before. Keras lets a layer with a quantised
policy call what only these two have, so a layer that holds others has to tell both policies apart.
"""

import keras

MODES = ("int8",)


def check_mode(mode):
    """Refuses what a model is not quantised to."""
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(MODES)}. Received: {mode!r}")


def policies(dtype):
    """The policies of a layer and of the matrices in it, which differ where it is quantised.

    Args:
        dtype: a dtype policy, its name (`"float32"`, `"mixed_bfloat16"`,
            `"int8_from_float32"` ...) or its configuration; Keras's own by default.

    Returns:
        Two `keras.dtype_policies.DTypePolicy`, the first of them never quantised.
    """
    policy = keras.dtype_policies.get(dtype)
    if policy.quantization_mode is None:
        return policy, policy
    return keras.dtype_policies.get(policy.get_config()["source_name"]), policy


def is_matrix(layer):
    """Whether a layer is one of those that are quantised."""
    return isinstance(layer, (keras.layers.Dense, keras.layers.ReversibleEmbedding))
