"""Section 5.4: cross-entropy with label smoothing, over real tokens only.

Axes: B batch, T target positions, V vocabulary.
"""

from typing import NamedTuple

import keras
from keras import ops

from keras_aiayn.special_ids import PAD


class TokenStatistics(NamedTuple):
    """What loss and metrics need of the logits, each (B, T) float32."""

    log_normalizer: object  # log sum_v exp(logit_v)
    target_logit: object
    logit_sum: object
    is_best: object  # 1 where no token has a larger logit than the target


def token_statistics(targets, logits):
    """One pass over the logits (B, T, V) for targets (B, T)."""
    logits = ops.cast(logits, "float32")
    targets = ops.expand_dims(ops.cast(targets, "int32"), -1)
    largest = ops.max(logits, axis=-1, keepdims=True)  # (B, T, 1)
    exponentials = ops.exp(logits - ops.stop_gradient(largest))
    log_normalizer = ops.log(ops.sum(exponentials, axis=-1)) + ops.stop_gradient(largest[..., 0])
    target_logit = ops.take_along_axis(logits, targets, axis=-1)[..., 0]
    return TokenStatistics(
        log_normalizer,
        target_logit,
        ops.sum(logits, axis=-1),
        ops.cast(target_logit >= largest[..., 0], "float32"),
    )


def smoothed_crossentropy(statistics, vocabulary_size, label_smoothing):
    """Cross-entropy against `1 - eps` on the target and `eps / (V - 1)` on each other token.

    With `log p_v = logit_v - log_normalizer` the sum over the vocabulary needs no second pass.
    """
    z, target, total = statistics.log_normalizer, statistics.target_logit, statistics.logit_sum
    others = label_smoothing / (vocabulary_size - 1)
    return (1.0 - label_smoothing) * (z - target) + others * (
        (vocabulary_size - 1) * z - (total - target)
    )


def real_tokens(targets):
    """1.0 at real targets, 0.0 at pads: (B, T) float32."""
    return ops.cast(ops.not_equal(ops.cast(targets, "int32"), PAD), "float32")


@keras.saving.register_keras_serializable(package="keras_aiayn")
class LabelSmoothedCrossentropy(keras.losses.Loss):
    """Label smoothing of rate eps: `1 - eps` on the true token, `eps / (V - 1)` on each other.

    The loss of a batch is a weighted sum over its tokens. The package's pipeline gives weights
    that divide by the number of real target tokens in the whole global batch, which is exact
    under accumulation and on replicas. Without `sample_weight` pads count nothing, and the loss
    is the mean over the real tokens of the batch.

    Args:
        label_smoothing: eps, 0.1 in the paper.

    Call arguments:
        y_true: ids (B, T).
        y_pred: logits (B, T, V).
        sample_weight: (B, T), 0 at pads.
    """

    def __init__(self, label_smoothing=0.1, name="label_smoothed_crossentropy", reduction="sum"):
        if reduction != "sum":
            raise ValueError(
                "The reduction is always \"sum\", of tokens weighted by `sample_weight`. "
                f"Received: reduction={reduction!r}"
            )
        super().__init__(name=name, reduction=reduction, dtype="float32")
        self.label_smoothing = label_smoothing

    def __call__(self, y_true, y_pred, sample_weight=None):
        """The weighted sum, or without weights the mean over real tokens."""
        if sample_weight is None:
            real = real_tokens(y_true)
            sample_weight = real / ops.maximum(ops.sum(real), 1.0)
        return super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true, y_pred):
        """The loss of every token, (B, T)."""
        statistics = token_statistics(y_true, y_pred)
        return smoothed_crossentropy(statistics, y_pred.shape[-1], self.label_smoothing)

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}
