"""One place for training on several devices."""

from typing import Any

import keras


def sum_over_replicas(gradients: list[Any]) -> list[Any]:
    """The gradients of the whole global batch, where each replica has those of its part.

    On JAX a gradient is that of the whole already. On TensorFlow, Keras's optimizer sums only when
    it updates, after clipping; `summed_before_clipping` is the other half of doing it here.

    Args:
        gradients: of this replica.

    Returns:
        As many arrays.
    """
    if keras.backend.backend() != "tensorflow":
        return gradients
    import tensorflow as tf

    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return gradients
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)


def summed_before_clipping(optimizer: keras.Optimizer) -> None:
    """Keeps the optimizer from summing over replicas what is summed already."""
    if hasattr(optimizer, "_all_reduce_sum_gradients"):  # TensorFlow's
        optimizer._all_reduce_sum_gradients = list
