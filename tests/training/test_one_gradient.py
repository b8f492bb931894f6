"""One global batch has one gradient, in whatever parts: SGD at rate 1, no dropout."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_aiayn.data import batching
from keras_aiayn.special_ids import EOS
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.optimizer import watched
from keras_aiayn.transformer import Transformer

ROWS, VOCABULARY = 64, 40


class Corpus:
    """64 pairs, most of them short and a few long, so that no two parts have equal tokens."""

    def __init__(self):
        generator = np.random.default_rng(1)
        lengths = np.sort(generator.geometric(0.2, ROWS).clip(1, 30))
        for side in ("source", "target"):
            ids = generator.integers(EOS + 1, VOCABULARY, lengths.sum()).astype("uint16")
            setattr(self, f"{side}_tokens", ids)
            setattr(self, f"{side}_offsets", np.concatenate([[0], np.cumsum(lengths)]))
        self.lengths = lengths + 1


def gradient(accumulation=1, global_clipnorm=None):
    """What one update takes from the weights."""
    keras.utils.set_random_seed(1)
    model = Transformer(
        VOCABULARY, num_layers=1, hidden_dim=16, intermediate_dim=32, num_heads=2, dropout=0.0,
        seed=1,
    )  # fmt: skip
    optimizer = keras.optimizers.SGD(
        1.0,
        global_clipnorm=global_clipnorm,
        gradient_accumulation_steps=accumulation if accumulation > 1 else None,
    )
    norm = watched(optimizer)
    model.compile(optimizer, LabelSmoothedCrossentropy(0.1))
    corpus = Corpus()
    longest = int(corpus.lengths.max())
    plan = batching.plan(
        corpus.lengths, corpus.lengths, tokens_per_batch=ROWS * longest, seed=1, epoch=0,
        max_shapes=1, multiple=4,
    )  # fmt: skip
    assert plan.shapes == [(ROWS, longest, longest)]
    before = model.get_weights()
    data = batching.dataset(corpus, plan, accumulation=accumulation)
    model.fit(data, shuffle=False, verbose=0)
    after = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    taken = np.concatenate([(b - a).ravel() for b, a in zip(before, after, strict=True)])
    whole = float(keras.ops.convert_to_numpy(norm))
    expected = min(whole, global_clipnorm) if global_clipnorm else whole
    assert np.linalg.norm(taken) == pytest.approx(expected, rel=1e-5)
    return taken


def assert_same_direction_and_length(ours, theirs):
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_two_accumulated_batches_have_the_gradient_of_one(clip):
    assert_same_direction_and_length(gradient(2, clip), gradient(1, clip))


def gradients():
    """Whole and clipped, and on JAX in two accumulated parts.

    On TensorFlow replicas cannot accumulate: Keras sums over them within a condition, where
    `MirroredStrategy` cannot.
    """
    kinds = [(1, None), (1, 0.05)] + [(2, 0.05)] * (keras.backend.backend() == "jax")
    return [gradient(*kind) for kind in kinds]


def replicated():
    """In a process of its own, whose CPU counts as two devices."""
    if keras.backend.backend() == "jax":
        assert len(keras.distribution.list_devices()) == 2
        whole = gradients()
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=keras.distribution.list_devices())
        )
        parts = gradients()
    else:
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        whole = gradients()
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        assert strategy.num_replicas_in_sync == 2
        with strategy.scope():
            parts = gradients()
    for ours, theirs in zip(parts, whole, strict=True):
        assert_same_direction_and_length(ours, theirs)
    print("the same")


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="replicas of torch are processes")
def test_two_replicas_have_the_gradient_of_one_device():
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['replicated']()"
    done = subprocess.run(
        [sys.executable, "-c", code, __file__],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("the same"), done.stderr[-2000:]
