"""Section 3.5."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers.position import LearnedPositionEmbedding, SinusoidalPositionEncoding

D = 16


def by_the_paper(length, d=D):
    encoding = np.zeros((length, d))
    for pos in range(length):
        for i in range(d // 2):
            encoding[pos, 2 * i] = np.sin(pos / 10000 ** (2 * i / d))
            encoding[pos, 2 * i + 1] = np.cos(pos / 10000 ** (2 * i / d))
    return encoding


def encode(positions, d=D):
    return ops.convert_to_numpy(
        SinusoidalPositionEncoding.encode(ops.convert_to_tensor(positions), d)
    )


def test_sinusoids_are_the_papers():
    np.testing.assert_allclose(encode(np.arange(100)), by_the_paper(100), rtol=0, atol=1e-5)


def test_sinusoids_reach_far_beyond_any_length_of_training():
    # At 5,000 radians float32 itself is 2e-4 apart.
    np.testing.assert_allclose(encode(np.arange(5000)), by_the_paper(5000), rtol=0, atol=1e-3)


def test_layer_adds_the_sinusoids_to_its_inputs():
    x = np.random.default_rng(0).normal(size=(2, 7, D)).astype("float32")
    output = ops.convert_to_numpy(SinusoidalPositionEncoding()(x))
    np.testing.assert_allclose(output, x + by_the_paper(7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("k", [1, 7])
def test_a_shift_is_a_linear_map(k):
    # Rotations of each pair of columns by k times its frequency, the same at every position.
    shift = np.zeros((D, D))
    for i in range(D // 2):
        angle = k / 10000 ** (2 * i / D)
        pair = slice(2 * i, 2 * i + 2)
        shift[pair, pair] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    positions = np.arange(50)
    expected = encode(positions) @ shift.T
    np.testing.assert_allclose(encode(positions + k), expected, rtol=0, atol=1e-5)


def test_wavelengths_run_from_2_pi_to_10000_times_2_pi():
    d = 512
    angles = np.arctan2(*np.moveaxis(encode(np.array([1]), d).reshape(d // 2, 2), -1, 0))
    wavelengths = 2 * np.pi / angles
    assert wavelengths[0] == pytest.approx(2 * np.pi, rel=1e-5)
    assert (np.diff(wavelengths) > 0).all()
    # The last exponent is (d - 2) / d: just short of 10000 x 2 pi, and there in the limit.
    assert wavelengths[-1] == pytest.approx(10000 ** ((d - 2) / d) * 2 * np.pi, rel=1e-3)
    assert 0.95 < wavelengths[-1] / (10000 * 2 * np.pi) < 1


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_positions_do_not_collide_in_bfloat16(policy):
    length = 1024
    layer = SinusoidalPositionEncoding(dtype=policy)
    output = layer(ops.zeros((1, length, 64), "bfloat16"))
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    rows = ops.convert_to_numpy(ops.cast(output[0], "float32"))
    assert len(np.unique(rows, axis=0)) == length
    # Made in float32 and rounded once, at the end: half a unit in the last of 8 binary places.
    np.testing.assert_allclose(rows, by_the_paper(length, 64), rtol=2**-8, atol=1e-3)


def layers():
    learned = LearnedPositionEmbedding(max_length=9)
    learned.build((None, None, D))
    return [SinusoidalPositionEncoding(), learned]


@pytest.mark.parametrize("layer", layers(), ids=["sinusoidal", "learned"])
def test_given_positions_are_read_where_they_stand(layer):
    x = np.random.default_rng(0).normal(size=(2, 9, D)).astype("float32")
    whole = ops.convert_to_numpy(layer(x))
    later = layer(x[:, 5:7], positions=ops.convert_to_tensor([5, 6]))
    np.testing.assert_allclose(ops.convert_to_numpy(later), whole[:, 5:7], rtol=0, atol=1e-6)
    # One position for all, as of beams side by side; and others in each row.
    one = layer(x[:, 5:6], positions=ops.convert_to_tensor(5))
    np.testing.assert_allclose(ops.convert_to_numpy(one), whole[:, 5:6], rtol=0, atol=1e-6)
    each = layer(x[:, 3:4] * 0, positions=ops.convert_to_tensor([[3], [8]]))
    expected = np.stack([(whole - x)[0, 3], (whole - x)[1, 8]])
    np.testing.assert_allclose(ops.convert_to_numpy(each)[:, 0], expected, rtol=0, atol=1e-6)


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="must be even.*Received: inputs_shape=\\(2, 3, 5\\)"):
        SinusoidalPositionEncoding()(np.zeros((2, 3, 5), "float32"))


def test_learned_positions_are_added_row_by_row():
    _, layer = layers()
    (table,) = layer.get_weights()
    assert table.shape == (9, D)
    x = np.random.default_rng(0).normal(size=(2, 7, D)).astype("float32")
    output = ops.convert_to_numpy(layer(x))
    np.testing.assert_allclose(output, x + table[:7], rtol=0, atol=1e-6)


def test_learned_positions_refuse_a_longer_sequence():
    _, layer = layers()
    with pytest.raises(ValueError, match="beyond `max_length`.*max_length=9, a sequence of 10"):
        layer(np.zeros((1, 10, D), "float32"))


def test_adam_trains_learned_positions_by_their_whole_gradient():
    # Adam's first step moves whatever has a gradient by the learning rate, whatever the gradient.
    # The table is read twice, as by encoder and decoder.
    _, layer = layers()
    inputs = [keras.Input((None, D)), keras.Input((None, D))]
    model = keras.Model(inputs, layer(inputs[0]) * 2 - layer(inputs[1]) * 5)
    model.compile(keras.optimizers.Adam(0.1, epsilon=1e-9), "mse")
    (before,) = layer.get_weights()
    x, y, target = np.random.default_rng(0).normal(size=(3, 2, 7, D))
    model.train_on_batch([x, y], target)
    (after,) = layer.get_weights()
    np.testing.assert_allclose(np.abs(after - before)[:7], 0.1, rtol=0.01)
    np.testing.assert_array_equal(after[7:], before[7:])
