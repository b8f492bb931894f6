import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers.embedding import SharedEmbedding
from keras_aiayn.special_ids import PAD
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.metrics import TokenMetrics, token_statistics
from keras_aiayn.transformer import Transformer

V, EPS = 13, 0.1
# Batches of other widths, and of very different numbers of real tokens.
BATCHES = [
    np.array([[4, 5, 6, 7, 8, 9, 3], [10, 11, 4, 5, 6, 3, 0]], "int32"),
    np.array([[7, 3, 0], [3, 0, 0]], "int32"),
    np.array([[0, 0, 0]], "int32"),
]
# The first two as one array.
TARGETS = np.concatenate([BATCHES[0], np.pad(BATCHES[1], ((0, 0), (0, 4)))])


def some_logits(targets):
    rng = np.random.default_rng(targets.size)
    logits = rng.normal(size=(*targets.shape, V)).astype("float32")
    likely = rng.uniform(size=targets.shape) < 0.5  # so that about half are right
    logits[likely, targets[likely]] += 5.0
    return logits


def by_numpy(pairs):
    """The four numbers over all real tokens at once."""
    real = [(targets[targets != PAD], logits[targets != PAD]) for targets, logits in pairs]
    targets, logits = (np.concatenate(parts) for parts in zip(*real, strict=True))
    logits = logits.astype("float64")
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nll = -np.take_along_axis(log_p, targets[:, np.newaxis], axis=-1)[:, 0]
    others = -log_p.sum(axis=-1) - nll
    return {
        "token_loss": ((1 - EPS) * nll + EPS / (V - 1) * others).mean(),
        "nll": nll.mean(),
        "perplexity": np.exp(nll.mean()),
        "token_accuracy": (logits.argmax(axis=-1) == targets).mean(),
    }


def test_are_means_over_all_real_tokens_however_they_were_batched():
    metrics = TokenMetrics(EPS)
    pairs = [(targets, some_logits(targets)) for targets in BATCHES]
    for targets, logits in pairs:
        metrics.update_state(targets, ops.convert_to_tensor(logits))
    found = {name: float(ops.convert_to_numpy(mean)) for name, mean in metrics.result().items()}
    expected = by_numpy(pairs)
    assert 0 < expected["token_accuracy"] < 1
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_second_fit_traces_the_model_no_more(monkeypatch):
    model = Transformer(V, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=2)
    model.compile(keras.optimizers.SGD(), LabelSmoothedCrossentropy(EPS))
    model.optimizer.build(model.trainable_variables)
    inputs = {"encoder_token_ids": TARGETS, "decoder_token_ids": TARGETS}
    model.fit(inputs, TARGETS, batch_size=len(TARGETS), verbose=0)
    losses = []
    own = Transformer.compute_loss

    def counted(*arguments, **keywords):
        losses.append(1)
        return own(*arguments, **keywords)

    monkeypatch.setattr(Transformer, "compute_loss", counted)
    model.fit(inputs, TARGETS, batch_size=len(TARGETS), verbose=0)
    # The one step itself, and nothing where it is compiled already.
    assert len(losses) == (keras.backend.backend() == "torch")


def test_weights_of_the_loss_do_not_weigh_the_metrics():
    metrics, targets = TokenMetrics(EPS), BATCHES[0]
    logits = some_logits(targets)
    weights = np.random.default_rng(0).uniform(size=targets.shape)
    metrics.update_state(targets, ops.convert_to_tensor(logits), sample_weight=weights)
    found = float(ops.convert_to_numpy(metrics.result()["nll"]))
    assert found == pytest.approx(by_numpy([(targets, logits)])["nll"], rel=1e-5)


def test_forget_when_reset_and_are_zero_without_a_token():
    metrics = TokenMetrics(EPS)
    metrics.update_state(BATCHES[0], ops.convert_to_tensor(some_logits(BATCHES[0])))
    metrics.reset_state()
    metrics.update_state(BATCHES[2], ops.convert_to_tensor(some_logits(BATCHES[2])))
    found = {name: float(ops.convert_to_numpy(mean)) for name, mean in metrics.result().items()}
    assert found == {"token_loss": 0, "nll": 0, "perplexity": 1, "token_accuracy": 0}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_evaluate_reports_them_over_uneven_batches(policy):
    keras.config.set_dtype_policy(policy)
    ids = keras.Input((None,), dtype="int32")
    embedding = SharedEmbedding(V, 8, tie_projection=False)
    model = keras.Model(ids, embedding(embedding(ids), reverse=True))
    model.compile("sgd", LabelSmoothedCrossentropy(EPS), metrics=[TokenMetrics(EPS)])
    inputs = np.roll(TARGETS, 1, axis=1)
    found = model.evaluate(inputs, TARGETS, batch_size=2, verbose=0, return_dict=True)
    expected = by_numpy([(TARGETS, ops.convert_to_numpy(model(inputs)))])
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_transformer_reports_them_unasked():
    model = Transformer(V, 1, hidden_dim=8, intermediate_dim=16, num_heads=2, dropout=0.0)
    model.compile("sgd", LabelSmoothedCrossentropy(EPS))
    inputs = {"encoder_token_ids": TARGETS, "decoder_token_ids": np.roll(TARGETS, 1, axis=1)}
    expected = by_numpy([(TARGETS, ops.convert_to_numpy(model(inputs)))])
    found = model.evaluate(inputs, TARGETS, batch_size=2, verbose=0, return_dict=True)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_compiling_again_leaves_no_metrics_of_the_loss_before():
    model = Transformer(V, 1, hidden_dim=8, intermediate_dim=16, num_heads=2)
    for _ in range(2):
        model.compile("sgd", LabelSmoothedCrossentropy(EPS))
        assert [metric.name for metric in model.metrics] == ["loss", "token_metrics"]
    model.compile("sgd", "mse")
    assert [metric.name for metric in model.metrics] == ["loss"]


def test_config_makes_the_same_metrics_again():
    metrics = TokenMetrics(0.2, name="mine")
    written = keras.saving.serialize_keras_object(metrics)
    again = keras.saving.deserialize_keras_object(written)
    assert written["registered_name"] == "keras_aiayn>TokenMetrics"
    assert again.get_config() == metrics.get_config() == {"name": "mine", "label_smoothing": 0.2}


class Logits(keras.layers.Layer):
    """Gives its weights, whatever it reads: what an update takes from them is their gradient."""

    def __init__(self, logits):
        super().__init__()
        self.logits = self.add_weight(
            shape=logits.shape, initializer=keras.initializers.Constant(logits)
        )

    def call(self, inputs):
        return self.logits + 0.0 * ops.cast(inputs[..., None], "float32")


class Chosen(keras.losses.Loss):
    def __init__(self, name):
        super().__init__(name=name, reduction="sum")

    def call(self, y_true, y_pred):
        return getattr(token_statistics(y_true, y_pred, EPS), self.name)


@pytest.mark.parametrize("name", ["loss", "nll"])
def test_the_gradient_is_probabilities_less_what_they_should_be(name):
    targets = BATCHES[0]
    logits = some_logits(targets)
    wanted = np.full(logits.shape, EPS / (V - 1) if name == "loss" else 0.0)
    right = 1 - EPS if name == "loss" else 1.0
    np.put_along_axis(wanted, targets[..., np.newaxis], right, axis=-1)
    odds = np.exp(logits.astype("float64"))
    weights = np.random.default_rng(2).uniform(0, 2, targets.shape).astype("float32")
    expected = weights[..., np.newaxis] * (odds / odds.sum(axis=-1, keepdims=True) - wanted)

    inputs = keras.Input(batch_shape=targets.shape, dtype="int32")
    model = keras.Model(inputs, Logits(logits)(inputs))
    model.compile(keras.optimizers.SGD(1.0), Chosen(name))
    model.train_on_batch(targets, targets, weights)
    np.testing.assert_allclose(logits - model.get_weights()[0], expected, atol=1e-5)


PEAK = """
from pathlib import Path
import keras, numpy as np
from keras_aiayn import LabelSmoothedCrossentropy

def peak():  # not by `getrusage`, which begins with the parent's
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 2**10

rows, width, vocabulary = 4_096, 8, 16_000
# As ours, without a bias, for which XLA would make the logits anew.
logits = keras.layers.Dense(vocabulary, use_bias=False)
model = keras.Sequential([keras.Input((None, width)), logits])
model.compile(keras.optimizers.SGD(), LabelSmoothedCrossentropy())
hidden = np.ones((16, rows // 16, width), "float32")
targets = np.ones(hidden.shape[:2], "int32")
model.fit(hidden[:1, :8], targets[:1, :8], verbose=0)
before = peak()
for _ in range(3):
    model.fit(hidden, targets, batch_size=len(hidden), verbose=0)
print((peak() - before) / (4 * rows * vocabulary))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_holds_the_logits_and_one_more_array_of_their_size():
    # In a process of its own: memory that tests before freed would be taken again, and not count.
    command = [sys.executable, "-c", PEAK]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 < float(found.stdout) < 2.5
