"""What is known of each token's prediction, and its means over real tokens.

Axes: B batch, T target positions, V vocabulary.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_aiayn.special_ids import PAD


class TokenStatistics(NamedTuple):
    """What loss and metrics need of the logits, each (B, T) float32."""

    loss: Any  # label-smoothed cross-entropy
    nll: Any  # negative log-likelihood, in nats
    is_best: Any  # 1 where no token has a larger logit than the target
    is_real: Any  # 1 where the target is not a pad


def token_statistics(targets: Any, logits: Any, label_smoothing: float) -> TokenStatistics:
    """Everything about the targets (B, T) that the logits (B, T, V) tell, in one pass.

    The smoothed loss is the cross-entropy against `1 - eps` on the target and `eps / (V - 1)` on
    each other token (section 5.4). With `log p_v = logit_v - log_normalizer`, its sum over the
    vocabulary needs the sum of the logits only.
    """
    logits = ops.cast(logits, "float32")
    targets = ops.cast(targets, "int32")
    largest = ops.stop_gradient(ops.max(logits, axis=-1, keepdims=True))  # (B, T, 1)
    normalizer = ops.sum(ops.exp(logits - largest), axis=-1)
    largest = ops.squeeze(largest, axis=-1)
    log_normalizer = ops.log(normalizer) + largest  # (B, T)
    target_logit = ops.squeeze(
        ops.take_along_axis(logits, ops.expand_dims(targets, -1), axis=-1), axis=-1
    )
    nll = log_normalizer - target_logit
    others = logits.shape[-1] - 1
    other_nll = others * log_normalizer - (ops.sum(logits, axis=-1) - target_logit)
    return TokenStatistics(
        loss=(1.0 - label_smoothing) * nll + label_smoothing / others * other_nll,
        nll=nll,
        is_best=ops.cast(target_logit >= largest, "float32"),
        is_real=ops.cast(ops.not_equal(targets, PAD), "float32"),
    )


@keras.saving.register_keras_serializable(package="keras_aiayn")
class TokenMetrics(keras.metrics.Metric):
    """Means over real target tokens, pads left out, however the tokens were batched.

    `result()` is a dict: `token_loss` (smoothed), `nll` (unsmoothed negative log-likelihood, in
    nats), `perplexity` (of a subword, `exp(nll)`) and `token_accuracy`.

    A `Transformer` compiled with `LabelSmoothedCrossentropy` has them without being asked, and
    without a second pass over the logits. To another model give them by `metrics=`.

    Args:
        label_smoothing: that of the loss.
    """

    def __init__(
        self, label_smoothing: float = 0.1, name: str = "token_metrics", dtype: Any = None
    ):
        super().__init__(name=name, dtype="float32")  # under every policy
        self.label_smoothing = label_smoothing
        self.tokens = self.add_variable((), "zeros", name="tokens")
        self.totals = self.add_variable((3,), "zeros", name="totals")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch: ids (B, T), logits (B, T, V). Weights are ignored: pads are known."""
        self.update_from(token_statistics(y_true, y_pred, self.label_smoothing))

    def update_from(self, statistics: TokenStatistics) -> None:
        """Adds a batch whose statistics are known already."""
        real = statistics.is_real
        values = (statistics.loss, statistics.nll, statistics.is_best)
        self.tokens.assign_add(ops.sum(real))
        self.totals.assign_add(ops.stack([ops.sum(real * value) for value in values]))

    def result(self) -> dict[str, Any]:
        """The means so far."""
        means = ops.divide_no_nan(self.totals, self.tokens)
        return {
            "token_loss": means[0],
            "nll": means[1],
            "perplexity": ops.exp(means[1]),
            "token_accuracy": means[2],
        }

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"name": self.name, "label_smoothing": self.label_smoothing}
