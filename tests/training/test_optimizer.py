"""Adam as a configuration asks for it: the norm of the whole gradient, and clipping by it."""

import keras
import numpy as np
import pytest

from keras_aiayn.config import TrainingConfig
from keras_aiayn.data.tasks import copy_task
from keras_aiayn.special_ids import PAD
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.optimizer import adam
from keras_aiayn.training.schedule import NoamSchedule
from keras_aiayn.transformer import Transformer

BETA_1 = 0.9


def make_model():
    keras.utils.set_random_seed(1)
    return Transformer(
        vocabulary_size=14, num_layers=1, hidden_dim=8, intermediate_dim=16, num_heads=2,
        dropout=0.0, seed=1,
    )  # fmt: skip


def rows_and_weights():
    """Rows of very uneven lengths, each real token with the weight 1 / (real tokens)."""
    inputs, targets = copy_task(8, num_symbols=10, min_length=1, max_length=12, seed=3)
    return inputs, targets, (targets != PAD).astype("float32") / (targets != PAD).sum()


def true_gradient():
    """By another route: with SGD at rate 1, what a step takes from the weights."""
    model = make_model()
    model.compile(keras.optimizers.SGD(1.0), LabelSmoothedCrossentropy(0.1))
    before = model.get_weights()
    model.train_on_batch(*rows_and_weights())
    return [old - new for old, new in zip(before, model.get_weights(), strict=True)]


def after_one_update(**settings):
    """The norm that was seen, and Adam's first moment: (1 - beta_1) times the clipped gradient."""
    model = make_model()
    config = TrainingConfig(**settings)
    optimizer, norm = adam(NoamSchedule(8, 10, 1e-6, config.accumulation), config)
    model.compile(optimizer, LabelSmoothedCrossentropy(0.1))
    inputs, targets, weights = rows_and_weights()
    for part in range(config.accumulation):
        rows = slice(part, None, config.accumulation)
        model.train_on_batch(
            {name: ids[rows] for name, ids in inputs.items()},
            targets[rows],
            weights[rows] * config.accumulation,
        )
    moments = model.optimizer._momentums
    clipped = [keras.ops.convert_to_numpy(moment) / (1 - BETA_1) for moment in moments]
    return float(keras.ops.convert_to_numpy(norm)), clipped


def norm_of(arrays):
    return float(np.sqrt(sum(np.square(array, dtype="float64").sum() for array in arrays)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_norm_is_that_of_the_whole_gradient_however_it_was_split(accumulation):
    gradient = true_gradient()
    norm, moments = after_one_update(accumulation=accumulation)
    assert norm == pytest.approx(norm_of(gradient), rel=1e-5)
    difference = norm_of([ours - theirs for ours, theirs in zip(moments, gradient, strict=True)])
    assert difference < 1e-5 * norm_of(gradient)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_shortens_the_whole_gradient_and_turns_it_nowhere(accumulation):
    gradient = true_gradient()
    limit = norm_of(gradient) / 3
    norm, clipped = after_one_update(accumulation=accumulation, global_clipnorm=limit)
    assert norm == pytest.approx(norm_of(gradient), rel=1e-5)  # as it was before
    for ours, theirs in zip(clipped, gradient, strict=True):
        np.testing.assert_allclose(ours, theirs / 3, atol=1e-5 * limit)
