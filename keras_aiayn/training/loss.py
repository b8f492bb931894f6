"""Section 5.4: cross-entropy with label smoothing, over real tokens only.

Axes: B batch, T target positions, V vocabulary.
"""

from typing import Any

import keras
from keras import ops

from keras_aiayn.training.metrics import TokenMetrics, TokenStatistics, token_statistics


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

    def __init__(
        self,
        label_smoothing: float = 0.1,
        name: str = "label_smoothed_crossentropy",
        reduction: str = "sum",
    ):
        if reduction != "sum":
            raise ValueError(
                'The reduction is always "sum", of tokens weighted by `sample_weight`. '
                f"Received: reduction={reduction!r}"
            )
        super().__init__(name=name, reduction=reduction, dtype="float32")
        self.label_smoothing = label_smoothing

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The weighted sum, or without weights the mean over real tokens."""
        return self.reduce(self.statistics(y_true, y_pred), sample_weight)

    def statistics(self, y_true: Any, y_pred: Any) -> TokenStatistics:
        """The loss of every token, and what else the same pass over the logits tells."""
        return token_statistics(y_true, y_pred, self.label_smoothing)

    def reduce(self, statistics: TokenStatistics, sample_weight: Any = None) -> Any:
        """The loss of a batch from that of its tokens."""
        if sample_weight is None:
            real = statistics.is_real
            sample_weight = real / ops.maximum(ops.sum(real), 1.0)
        return ops.sum(statistics.loss * ops.cast(sample_weight, "float32"))

    def metrics(self) -> TokenMetrics:
        """New metrics for what `statistics` gives."""
        return TokenMetrics(self.label_smoothing)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}
