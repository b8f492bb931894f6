"""What a run reports, every number per real token."""

import keras
from keras import ops

from keras_aiayn.training.loss import real_tokens, smoothed_crossentropy, token_statistics


@keras.saving.register_keras_serializable(package="keras_aiayn")
class TokenMetrics(keras.metrics.Metric):
    """Means over real target tokens, pads left out, however the tokens were batched.

    `result()` is a dict: `token_loss` (smoothed), `nll` (unsmoothed negative log-likelihood, in
    nats), `perplexity` (of a subword, `exp(nll)`) and `token_accuracy`.

    Args:
        label_smoothing: that of the loss.
    """

    def __init__(self, label_smoothing=0.1, name="token_metrics", dtype=None):
        super().__init__(name=name, dtype="float32")
        self.label_smoothing = label_smoothing
        self.tokens = self.add_variable((), "zeros", name="tokens")
        self.totals = self.add_variable((3,), "zeros", name="totals")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch: ids (B, T), logits (B, T, V). Weights are ignored: pads are known."""
        statistics = token_statistics(y_true, y_pred)
        real = real_tokens(y_true)
        loss = smoothed_crossentropy(statistics, y_pred.shape[-1], self.label_smoothing)
        nll = statistics.log_normalizer - statistics.target_logit
        sums = [ops.sum(real * value) for value in (loss, nll, statistics.is_best)]
        self.tokens.assign_add(ops.sum(real))
        self.totals.assign_add(ops.stack(sums))

    def result(self):
        """The means so far."""
        loss, nll, accuracy = ops.unstack(ops.divide_no_nan(self.totals, self.tokens))
        return {
            "token_loss": loss,
            "nll": nll,
            "perplexity": ops.exp(nll),
            "token_accuracy": accuracy,
        }

    def get_config(self):
        """The constructor's arguments."""
        return {"name": self.name, "label_smoothing": self.label_smoothing}
