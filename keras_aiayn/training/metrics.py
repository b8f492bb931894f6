"""What is known of each token's prediction, and its means over real tokens.

Axes: B batch, T target positions, V vocabulary.
"""

from collections.abc import Callable
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
    each other token (section 5.4). With `b = eps / (V - 1)` and
    `log p_v = logit_v - log_normalizer` it is

        log_normalizer - b * sum of all logits - (1 - eps - b) * target's logit
    """
    targets = ops.cast(targets, "int32")
    statistics = _with_gradient(targets, label_smoothing)(ops.cast(logits, "float32"))
    return TokenStatistics(
        loss=statistics[0],
        nll=statistics[1],
        is_best=statistics[2],
        is_real=ops.cast(ops.not_equal(targets, PAD), "float32"),
    )


def _with_gradient(targets: Any, label_smoothing: float) -> Any:
    """A function of the logits that gives loss, nll and is_best as (3, B, T), and its gradient.

    Logits are the largest array of a training step. Differentiated by a backend, each operation
    on them would leave one more of their size; this leaves none, and the gradient is one.
    """

    @ops.custom_gradient
    def statistics(logits: Any) -> tuple[Any, Callable]:
        share = label_smoothing / (logits.shape[-1] - 1)
        largest = ops.max(logits, axis=-1)  # (B, T)
        total = ops.sum(_powers(logits, largest), axis=-1)
        log_normalizer = ops.log(total) + largest
        target_logit = ops.squeeze(
            ops.take_along_axis(logits, ops.expand_dims(targets, -1), axis=-1), axis=-1
        )
        nll = log_normalizer - target_logit
        rest = 1.0 - label_smoothing - share
        loss = log_normalizer - share * ops.sum(logits, axis=-1) - rest * target_logit
        is_best = ops.cast(target_logit >= largest, "float32")

        def gradient(*given: Any, upstream: Any = None) -> Any:
            upstream = given[0] if upstream is None else upstream  # torch names it
            of_loss, of_nll = upstream[0], upstream[1]  # (B, T)
            factor = of_loss + of_nll  # of the softmax
            if keras.backend.backend() == "torch":  # makes it in one pass
                made = ops.softmax(logits, axis=-1)
            else:  # the same powers again, which TensorFlow and XLA do not make twice
                made, factor = _powers(logits, largest), factor / total
            return _scaled_less(made, factor, of_loss * share, targets, of_loss * rest + of_nll)

        return ops.stack([loss, nll, is_best]), gradient

    return statistics


def _powers(logits: Any, largest: Any) -> Any:
    """`exp(logits - largest)`, (B, T, V)."""
    shifted = logits - ops.expand_dims(largest, -1)
    # Torch would make a second array for the powers; TensorFlow and XLA write over the first.
    return shifted.exp_() if keras.backend.backend() == "torch" else ops.exp(shifted)


def _scaled_less(made: Any, factor: Any, less: Any, targets: Any, of_target: Any) -> Any:
    """`made * factor - less`, and `of_target` less at each target, without another array.

    Args:
        made: (B, T, V), of no more use after.
        factor: (B, T).
        less: (B, T).
        targets: ids (B, T).
        of_target: (B, T).
    """
    factor, less = ops.expand_dims(factor, -1), ops.expand_dims(less, -1)
    places, at_target = ops.expand_dims(targets, -1), ops.expand_dims(of_target, -1)
    if keras.backend.backend() == "torch":
        return made.mul_(factor).sub_(less).scatter_add_(-1, places.long(), -at_target)
    if keras.backend.backend() == "jax":  # XLA makes one loop of it
        # Not by a scatter: where devices share a batch, XLA would gather all of it first.
        is_target = ops.equal(ops.arange(made.shape[-1], dtype="int32"), places)
        return made * factor - ops.where(is_target, less + at_target, less)
    # Not by a choice: it needs no logits, so TensorFlow would make it before them and keep it.
    rows = ops.reshape(made * factor - less, (-1, made.shape[-1]))
    places = ops.reshape(places, (-1,))
    places = ops.stack([ops.arange(ops.shape(places)[0], dtype="int32"), places], axis=-1)
    rows = ops.scatter_update(rows, places, -ops.reshape(at_target, (-1,)), reduction="add")
    return ops.reshape(rows, ops.shape(made))


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
