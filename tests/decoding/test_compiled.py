"""What is compiled once, what is seen at every call, and what comes out."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.decoding.compiled import compiled, takes_any_shape
from keras_aiayn.decoding.loop import SearchResult
from keras_aiayn.decoding.search import BeamSearch
from keras_aiayn.decoding.steps import translate_ids
from keras_aiayn.decoding.stream import CompiledSearch
from keras_aiayn.special_ids import EOS, PAD
from keras_aiayn.transformer import Transformer

BACKEND = keras.backend.backend()
VOCABULARY_SIZE = 20

SOURCE = np.array([[5, 6, 7, EOS], [8, 9, EOS, PAD], [EOS, PAD, PAD, PAD]])
LIMITS = np.array([6, 5, 4])


def make_model(dropout=0.1):
    return Transformer(
        VOCABULARY_SIZE,
        num_layers=1,
        hidden_dim=8,
        intermediate_dim=16,
        num_heads=2,
        dropout=dropout,
        seed=1,
    )


def set_weights(model, seed):
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(size=w.shape, scale=0.5) for w in model.get_weights()])


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def search(model):
    return CompiledSearch(model, BeamSearch(beam_size=2, num_return=2))


def assert_same(result, expected):
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    np.testing.assert_allclose(result.scores, expected.scores, rtol=1e-5)


def test_result_is_numpy(search):
    result = search(SOURCE, LIMITS)
    assert isinstance(result, SearchResult)
    assert all(isinstance(field, np.ndarray) for field in result)
    assert result.token_ids.shape == (3, 2, 6) and result.token_ids.dtype == "int32"
    assert result.scores.shape == result.hit_limit.shape == (3, 2)
    assert result.steps.shape == (3,)


def test_compiled_search_is_the_plain_one(model, search):
    plain = translate_ids(
        model,
        ops.convert_to_tensor(SOURCE, "int32"),
        ops.convert_to_tensor(LIMITS, "int32"),
        max_length=6,
        beam_size=2,
        num_return=2,
    )
    plain = SearchResult(*(ops.convert_to_numpy(field) for field in plain))
    assert_same(search(SOURCE, LIMITS), plain)


def test_new_weights_are_seen(model, search):
    set_weights(model, 1)
    before = search(SOURCE, LIMITS)
    set_weights(model, 2)
    after = search(SOURCE, LIMITS)
    assert not np.array_equal(before.scores, after.scores)
    fresh = CompiledSearch(model, BeamSearch(beam_size=2, num_return=2))
    assert_same(after, fresh(SOURCE, LIMITS))


@pytest.mark.skipif(BACKEND == "torch", reason="torch compiles nothing")
@pytest.mark.parametrize("any_shape", [False, True])
def test_each_shape_and_setting_is_traced_once(any_shape):
    traced = []

    def scaled(x, *, factor):
        traced.append((tuple(x.shape), factor))
        return {"scaled": x * factor}

    run = compiled(keras.layers.Layer(), scaled, any_shape=any_shape)
    any_shape = any_shape and takes_any_shape()
    for _ in range(2):
        assert run(np.ones((2, 3), "float32"), factor=2)["scaled"].tolist() == [[2.0] * 3] * 2
    assert traced == [((None, None) if any_shape else (2, 3), 2)]
    run(np.zeros((2, 3), "float32"), factor=2)  # other values
    assert len(traced) == 1
    assert run(np.ones((2, 4), "float32"), factor=2)["scaled"].shape == (2, 4)
    shapes = len(traced)
    assert shapes == (1 if any_shape else 2)
    run(np.ones((2, 3), "float32"), factor=3)
    assert len(traced) == shapes + 1
    assert run(np.ones((0, 3), "float32"), factor=3)["scaled"].shape == (0, 3)
    assert len(traced) == shapes + 2  # a function may look whether it is given anything


@pytest.mark.skipif(BACKEND == "torch", reason="torch compiles nothing")
def test_training_between_two_searches_compiles_nothing(model, monkeypatch):
    traces = []
    encode = Transformer.encode
    monkeypatch.setattr(
        Transformer, "encode", lambda *args, **kw: traces.append(1) or encode(*args, **kw)
    )
    search = CompiledSearch(model, BeamSearch(beam_size=1))
    search(SOURCE, LIMITS)
    set_weights(model, 3)
    search(SOURCE[::-1], LIMITS[::-1])
    assert len(traces) == 1
    search(SOURCE[:, :3], LIMITS)
    assert len(traces) == (1 if takes_any_shape() else 2)


def test_many_shapes_are_no_cause_for_a_warning(caplog, capfd):
    run = compiled(keras.layers.Layer(), lambda x: x + 1)
    for size in range(1, 9):
        run(np.zeros(size, "int32"))
    assert not caplog.records and "retracing" not in capfd.readouterr().err


def test_dropout_is_off():
    model = make_model(dropout=0.5)
    search = CompiledSearch(model, BeamSearch(beam_size=2))
    first, second = (search(SOURCE, LIMITS) for _ in range(2))
    np.testing.assert_array_equal(first.scores, second.scores)


def test_scores_are_float32_in_a_model_of_low_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    result = CompiledSearch(make_model(), BeamSearch(beam_size=2))(SOURCE, LIMITS)
    assert result.scores.dtype == result.raw_scores.dtype == "float32"
    assert np.isfinite(result.scores).all()


class SearchAtEpochEnd(keras.callbacks.Callback):
    def __init__(self, search):
        super().__init__()
        self.search = search
        self.results = []

    def on_epoch_end(self, epoch, logs=None):
        self.results.append(self.search(SOURCE, LIMITS))


def test_search_within_fit_sees_the_weights_of_the_moment():
    model = make_model(dropout=0.0)
    search = CompiledSearch(model, BeamSearch(beam_size=2))
    before = search(SOURCE, LIMITS)  # and `fit` still runs after a search
    callback = SearchAtEpochEnd(search)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    inputs = {"encoder_token_ids": SOURCE, "decoder_token_ids": SOURCE}
    logits = np.random.default_rng(0).normal(size=(3, 4, VOCABULARY_SIZE))
    model.fit(inputs, logits, epochs=2, verbose=0, callbacks=[callback])
    first, second = callback.results
    assert not np.array_equal(before.scores, first.scores)
    assert not np.array_equal(first.scores, second.scores)
    assert_same(second, search(SOURCE, LIMITS))


@pytest.mark.parametrize("limits", [[6, 5], [[6], [5], [4]]])
def test_limits_that_do_not_fit_are_refused(search, limits):
    with pytest.raises(ValueError, match="`max_lengths` must be one length") as error:
        search(SOURCE, np.array(limits))
    assert "\n" not in str(error.value)


def test_refused_setting_is_one_line():
    with pytest.raises(ValueError, match="`num_return`.*Received: ") as error:
        BeamSearch(beam_size=2, num_return=3)
    assert "\n" not in str(error.value)
