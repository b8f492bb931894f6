"""Section 5.3: Adam under the paper's schedule."""

from typing import Any

import keras
from keras import ops

from keras_aiayn.config import TrainingConfig
from keras_aiayn.training.distribution import sum_over_replicas, summed_before_clipping
from keras_aiayn.training.schedule import NoamSchedule


def adam(schedule: NoamSchedule, config: TrainingConfig) -> tuple[keras.Optimizer, keras.Variable]:
    """Adam as a configuration asks for it, `watched`.

    Args:
        schedule: of the learning rate.
        config: of the training.

    Returns:
        The optimizer, not built yet, and the norm (a float32 scalar).
    """
    optimizer = keras.optimizers.Adam(
        schedule,
        beta_1=config.beta_1,
        beta_2=config.beta_2,
        epsilon=config.epsilon,
        global_clipnorm=config.global_clipnorm or None,
        gradient_accumulation_steps=config.accumulation if config.accumulation > 1 else None,
    )
    return optimizer, watched(optimizer)


def watched(optimizer: keras.Optimizer) -> keras.Variable:
    """Makes an optimizer keep the norm of its last gradient, and clip by that of the whole.

    The norm is over all weights and the whole global batch, of an update and not of one of its
    accumulated parts or replicas, before clipping.

    Args:
        optimizer: one that is not built yet.

    Returns:
        The norm, a float32 scalar.
    """
    norm = optimizer.add_variable(
        (), "zeros", dtype="float32", aggregation="only_first_replica", name="gradient_norm"
    )
    clip = optimizer._clip_gradients

    # Every backend hands it the accumulated and unscaled gradients of an update, which no public
    # method sees. A variable of the optimizer's own is what JAX's stateless training carries.
    def watch_and_clip(gradients: list[Any]) -> list[Any]:
        gradients = sum_over_replicas(gradients)
        squares = [ops.sum(ops.square(ops.cast(g, "float32"))) for g in gradients]
        norm.assign(ops.sqrt(sum(squares)))
        return clip(gradients)

    optimizer._clip_gradients = watch_and_clip
    summed_before_clipping(optimizer)
    return norm
