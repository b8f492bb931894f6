"""What `test_devices.py` runs in processes of their own, whose devices are the arguments' number.

    python on_devices.py DEVICES OUTPUT.npz [MODEL_PARALLEL]

It trains in several ways on one corpus of very uneven lengths. The first process writes how far
each way moved the weights.
"""

import sys

import keras
import numpy as np

from keras_aiayn.data import batching
from keras_aiayn.special_ids import EOS
from keras_aiayn.training import distribution
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.optimizer import watched
from keras_aiayn.transformer import Transformer

ROWS, VOCABULARY, FEATURES = 64, 40, 64


class Corpus:
    """Pairs, most of them short and a few long, so that no two parts have equal tokens."""

    def __init__(self, pairs=ROWS):
        generator = np.random.default_rng(1)
        lengths = np.sort(generator.geometric(0.2, pairs).clip(1, 30))
        for side in ("source", "target"):
            ids = generator.integers(EOS + 1, VOCABULARY, lengths.sum()).astype("uint16")
            setattr(self, f"{side}_tokens", ids)
            setattr(self, f"{side}_offsets", np.concatenate([[0], np.cumsum(lengths)]))
        self.lengths = lengths + 1


def batches(own, corpus, accumulation=1, max_shapes=1, tokens_per_batch=None):
    longest = int(corpus.lengths.max())
    plan = batching.plan(
        corpus.lengths, corpus.lengths, tokens_per_batch=tokens_per_batch or ROWS * longest,
        seed=1, epoch=0, max_shapes=max_shapes,
    )  # fmt: skip
    dataset = batching.dataset(
        corpus, plan, accumulation=accumulation, replicas=own.replicas, parts=own.parts
    )
    return own.feed(dataset)


def travelled(own, optimizer, dataset, steps, scaled=False):
    """How far training on some batches moves the weights, and the gradient norm it reports."""
    keras.utils.set_random_seed(1)
    with own.scope():
        model = Transformer(
            VOCABULARY, num_layers=1, hidden_dim=16, intermediate_dim=32, num_heads=2, dropout=0.0,
            seed=1,
        )  # fmt: skip
        optimizer = optimizer()
        norm = watched(optimizer)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer, LabelSmoothedCrossentropy(0.1))
        model.optimizer.build(model.trainable_variables)
    own.share(model)
    before = model.get_weights()
    model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0)
    after = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    moved = np.concatenate([(b - a).ravel() for b, a in zip(before, after, strict=True)])
    loss = own.metrics(model)["token_loss"]
    found = {"moved": moved, "norm": float(keras.ops.convert_to_numpy(norm)), "loss": loss}
    if scaled:
        # A gradient that overflows in one process alone keeps all of them from the update.
        gradient = keras.ops.convert_to_tensor(np.inf if own.is_first else 1.0)
        finite = bool(keras.ops.convert_to_numpy(optimizer.check_finite([gradient])))
        found["finite"] = own.total(np.array([finite], "int32"))
    return found


def sgd(rate=1.0, **settings):
    return lambda: keras.optimizers.SGD(rate, **settings)


def masks(own):
    """The sum over replicas of the dropout masks of one row each, of a first and a second step."""
    # Loss = sum of the kept inputs times a kernel, so the gradient of the kernel is the mask.
    with own.scope():
        inputs = keras.Input((FEATURES,))
        dropped = keras.layers.Dropout(0.5, seed=3)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False)(dropped))
        optimizer = keras.optimizers.SGD(1.0)
        watched(optimizer)
        model.compile(optimizer, Sum())
        model.optimizer.build(model.trainable_variables)
    own.share(model)
    found = []
    for _ in range(2):
        (before,) = model.get_weights()
        rows = len(own.parts)
        data = (np.ones((rows, FEATURES), "float32"), np.zeros((rows, 1), "float32"))
        tf = batching.import_tensorflow()
        dataset, steps = own.feed(tf.data.Dataset.from_tensors(data))
        model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0)
        after = keras.ops.convert_to_numpy(model.weights[0])
        found.append(np.round(before - after, 3).ravel())
    return np.stack(found)


class Sum(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return y_pred


def main(devices, output, model_parallel):
    own = distribution.start(devices, model_parallel=model_parallel)
    corpus = Corpus()
    results = {}

    def add(name, **result):
        results.update({f"{name}/{key}": value for key, value in result.items()})

    add("whole", **travelled(own, sgd(), *batches(own, corpus)))
    # A distance of 1 in all: beside it the rounding of a weight is nothing.
    clipped = {"rate": 20.0, "global_clipnorm": 0.05}
    add("clipped", **travelled(own, sgd(**clipped), *batches(own, corpus)))
    if keras.backend.backend() != "tensorflow" or own.replicas == 1:
        parts = batches(own, corpus, accumulation=2)
        optimizer = sgd(gradient_accumulation_steps=2, **clipped)
        add("accumulated", **travelled(own, optimizer, *parts))
    if keras.backend.backend() == "torch":
        add("scaled", **travelled(own, sgd(**clipped), *batches(own, corpus), scaled=True))
    many = Corpus(25 * ROWS)  # 20 updates or more
    # The last batch has fewer pairs than the others, and some devices may have none of them.
    for name, optimizer in (
        ("sgd", sgd(0.1)),
        ("adam", lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4)),
    ):
        add(name, **travelled(own, optimizer, *batches(own, many, 1, 2, 1_000)))
    if model_parallel == 1:
        add("dropout", masks=masks(own))
    if own.is_first:
        np.savez(output, **results)


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if sys.argv[1] != "all" else None,
        sys.argv[2],
        int(sys.argv[3]) if len(sys.argv) > 3 else 1,
    )
