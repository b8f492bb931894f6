"""Section 5.3: the learning rate."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_aiayn")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Equation 3: `scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)`.

    The first update is step 1. Steps are updates: Keras calls a schedule with micro-steps where
    gradients are accumulated, so `accumulation` says how many make one update.

    Args:
        hidden_dim: d_model.
        warmup_steps: updates over which the rate rises, 4000 in the paper.
        scale: a factor on the whole (1 in the paper).
        accumulation: `gradient_accumulation_steps` of the optimizer.
    """

    def __init__(self, hidden_dim, warmup_steps=4000, scale=1.0, accumulation=1):
        if hidden_dim < 1 or warmup_steps < 1 or accumulation < 1:
            raise ValueError(
                "`hidden_dim`, `warmup_steps` and `accumulation` must be positive. Received: "
                f"{hidden_dim}, {warmup_steps} and {accumulation}"
            )
        self.hidden_dim = hidden_dim
        self.warmup_steps = warmup_steps
        self.scale = scale
        self.accumulation = accumulation

    def __call__(self, step):
        """The rate of the update that follows `step` micro-steps."""
        update = ops.cast(ops.floor_divide(step, self.accumulation), "float32") + 1.0
        warmup = ops.cast(self.warmup_steps, "float32")
        rate = ops.minimum(ops.rsqrt(update), update * warmup**-1.5)
        return self.scale * self.hidden_dim**-0.5 * rate

    def get_config(self):
        """The constructor's arguments."""
        return {
            "hidden_dim": self.hidden_dim,
            "warmup_steps": self.warmup_steps,
            "scale": self.scale,
            "accumulation": self.accumulation,
        }
