"""Section 5.3, against equation 3 in numpy."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.training.schedule import NoamSchedule

D, WARMUP = 16, 4


def equation_3(step, d=D, warmup=WARMUP):
    step = np.asarray(step, "float64")
    return d**-0.5 * np.minimum(step**-0.5, step * float(warmup) ** -1.5)


def rates(schedule, first_calls):
    return np.array([ops.convert_to_numpy(schedule(step)) for step in first_calls])


def test_is_equation_3_of_the_update_that_follows():
    done = np.array([0, 1, 2, 3, 4, 5, 100, 3999, 4000, 300_000])
    schedule = NoamSchedule(512)
    # As Keras's optimizers count.
    dtype = "int64" if keras.backend.backend() == "tensorflow" else "int32"
    steps = [ops.convert_to_tensor(step, dtype) for step in done]
    np.testing.assert_allclose(rates(schedule, steps), equation_3(done + 1, 512, 4000), rtol=1e-6)
    np.testing.assert_allclose(rates(schedule, done), rates(schedule, steps), rtol=1e-6)


def test_rises_to_its_peak_at_the_end_of_the_warm_up():
    found = rates(NoamSchedule(D, WARMUP), range(12))
    assert (np.diff(found[:WARMUP]) > 0).all() and (np.diff(found[WARMUP - 1 :]) < 0).all()
    assert found.max() == pytest.approx((D * WARMUP) ** -0.5)


def test_scale_multiplies_the_rate():
    scaled = rates(NoamSchedule(D, WARMUP, scale=0.25), range(12))
    np.testing.assert_allclose(scaled, rates(NoamSchedule(D, WARMUP), range(12)) / 4, rtol=1e-6)


def test_an_optimizer_starts_with_the_first_update():
    # The gradient is 1 throughout, so plain SGD moves the weight by the rate itself.
    optimizer = keras.optimizers.SGD(NoamSchedule(D, WARMUP))
    weight = keras.Variable(0.0)
    values = [0.0]
    for _ in range(8):
        optimizer.apply([ops.ones(())], [weight])
        values.append(float(ops.convert_to_numpy(weight)))
    np.testing.assert_allclose(-np.diff(values), equation_3(np.arange(1, 9)), rtol=1e-5)


def mean_of_outputs(targets, outputs):
    return ops.mean(outputs)


class WeightAfterEachBatch(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seen = [self.model.get_weights()[0].item()]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0].item())


def test_counts_updates_and_not_the_micro_steps_of_accumulation():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.SGD(
        NoamSchedule(D, WARMUP, accumulation=2), gradient_accumulation_steps=2
    )
    model.compile(optimizer, mean_of_outputs)
    ones, weight = np.ones((24, 1)), WeightAfterEachBatch()
    model.fit(ones, ones, batch_size=2, callbacks=[weight], verbose=0)
    moved = -np.diff(weight.seen).reshape(6, 2)  # by update and micro-step
    np.testing.assert_array_equal(moved[:, 0], 0)
    np.testing.assert_allclose(moved[:, 1], equation_3(np.arange(1, 7)), rtol=1e-5)


def test_config_makes_the_same_schedule_again():
    schedule = NoamSchedule(D, WARMUP, scale=0.5, accumulation=3)
    optimizer = keras.optimizers.Adam(schedule)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert isinstance(again._learning_rate, NoamSchedule)
    assert again._learning_rate.get_config() == schedule.get_config()
    written = keras.saving.serialize_keras_object(schedule)
    assert written["registered_name"] == "keras_aiayn>NoamSchedule"


@pytest.mark.parametrize("wrong", [{"hidden_dim": 0}, {"hidden_dim": 8, "warmup_steps": 0}])
def test_a_schedule_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        NoamSchedule(**wrong)
