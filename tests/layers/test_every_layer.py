"""One battery for every layer of section 3, each alone in a functional model."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn import masking
from keras_aiayn.layers.attention import MultiHeadAttention
from keras_aiayn.layers.decoder import TransformerDecoderBlock
from keras_aiayn.layers.embedding import SharedEmbedding
from keras_aiayn.layers.encoder import TransformerEncoderBlock
from keras_aiayn.layers.feed_forward import PositionwiseFeedForward
from keras_aiayn.layers.position import LearnedPositionEmbedding, SinusoidalPositionEncoding
from keras_aiayn.layers.residual import Residual

B, T, D, V = 2, 5, 8, 11
BLOCK = {"num_heads": 2, "intermediate_dim": 16, "key_dim": 4, "value_dim": 3, "seed": 5}

# The layer's class, its arguments, and a call on x (B, T, D) and token ids (B, T).
CASES = {
    "attention": (
        MultiHeadAttention,
        {"num_heads": 2, "key_dim": 4, "value_dim": 3, "output_dim": D, "dropout": 0.1, "seed": 5},
        lambda layer, x, ids: layer(x, x, attention_mask=masking.padding_mask(ids)),
    ),
    "attention_with_bias": (
        MultiHeadAttention,
        {"num_heads": 2, "key_dim": 4, "use_bias": True},
        lambda layer, x, ids: layer(x, x, attention_mask=masking.decoder_mask(ids)),
    ),
    "feed_forward": (
        PositionwiseFeedForward,
        {"intermediate_dim": 16, "activation": "gelu"},
        lambda layer, x, ids: layer(x),
    ),
    "embedding": (
        SharedEmbedding,
        {"vocabulary_size": V, "hidden_dim": D},
        lambda layer, x, ids: layer(layer(ids) + x, reverse=True),
    ),
    "untied_embedding": (
        SharedEmbedding,
        {
            "vocabulary_size": V,
            "hidden_dim": D,
            "tie_projection": False,
            "use_logits_bias": True,
        },
        lambda layer, x, ids: layer(layer(ids) + x, reverse=True),
    ),
    "sinusoids": (SinusoidalPositionEncoding, {}, lambda layer, x, ids: layer(x)),
    "learned_positions": (
        LearnedPositionEmbedding,
        {"max_length": T},
        lambda layer, x, ids: layer(x),
    ),
    "encoder_block": (
        TransformerEncoderBlock,
        BLOCK | {"dropout": 0.2, "attention_dropout": 0.1},
        lambda layer, x, ids: layer(x, attention_mask=masking.padding_mask(ids)),
    ),
    "pre_norm_encoder_block": (
        TransformerEncoderBlock,
        BLOCK
        | {
            "normalize_first": True,
            "use_bias": True,
            "activation": "silu",
            "layer_norm_epsilon": 1e-5,
        },
        lambda layer, x, ids: layer(x, attention_mask=masking.decoder_mask(ids)),
    ),
    "decoder_block": (
        TransformerDecoderBlock,
        BLOCK,
        lambda layer, x, ids: layer(
            x,
            x,
            self_attention_mask=masking.decoder_mask(ids),
            memory_mask=masking.padding_mask(ids),
        ),
    ),
    "decoder_block_without_memory": (
        TransformerDecoderBlock,
        BLOCK | {"cross_attention": False},
        lambda layer, x, ids: layer(x, self_attention_mask=masking.decoder_mask(ids)),
    ),
}
TRAINABLE = {name: case for name, case in CASES.items() if name != "sinusoids"}
every_layer = pytest.mark.parametrize(("kind", "arguments", "call"), CASES.values(), ids=CASES)
every_trainable_layer = pytest.mark.parametrize(
    ("kind", "arguments", "call"), TRAINABLE.values(), ids=TRAINABLE
)

INPUTS = {
    "x": np.random.default_rng(0).normal(size=(B, T, D)).astype("float32"),
    "ids": np.array([[4, 5, 6, 7, 3], [8, 9, 3, 0, 0]], "int32"),
}


def model_of(layer, call):
    inputs = {
        "x": keras.Input((None, D), name="x"),
        "ids": keras.Input((None,), dtype="int32", name="ids"),
    }
    return keras.Model(inputs, call(layer, **inputs))


def outputs(model):
    return ops.convert_to_numpy(ops.cast(model(INPUTS), "float32"))


@every_layer
def test_config_makes_the_same_layer_again(kind, arguments, call):
    layer = kind(**arguments, name="mine", dtype="mixed_bfloat16")
    written = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
    assert written["registered_name"] == f"keras_aiayn>{kind.__name__}"
    again = keras.saving.deserialize_keras_object(written)
    assert type(again) is kind
    assert again.get_config() == layer.get_config()
    # Every argument is in the config, whatever its value.
    for name, value in arguments.items():
        assert again.get_config()[name] == value


def test_residual_is_made_again_by_its_config():
    # Its sub-layer is a call argument, so it stands in no functional model by itself.
    layer = Residual(0.3, normalize_first=True, layer_norm_epsilon=1e-5, seed=5, name="mine")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config() == layer.get_config()


@every_layer
def test_symbolic_call_gives_shape_and_dtype_of_the_eager_one(kind, arguments, call):
    layer = kind(**arguments)
    model = model_of(layer, call)
    eager = model(INPUTS)
    assert model.output.shape == (None, None, eager.shape[-1])
    assert model.output.dtype == keras.backend.standardize_dtype(eager.dtype)
    x = keras.Input(batch_shape=(B, T, D))
    ids = keras.Input(batch_shape=(B, T), dtype="int32")
    assert call(layer, x, ids).shape == tuple(eager.shape)


@every_layer
def test_two_layers_of_one_config_have_weights_of_the_same_names_and_shapes(kind, arguments, call):
    one, other = kind(**arguments), kind(**arguments)
    model_of(one, call), model_of(other, call)

    def described(layer):
        return [(weight.path.split("/", 1)[1], weight.shape) for weight in layer.weights]

    assert one.built and described(one) == described(other)
    assert len(set(described(one))) == len(one.weights)


@every_trainable_layer
def test_one_step_of_fit_moves_every_weight(kind, arguments, call):
    layer = kind(**arguments)
    model = model_of(layer, call)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = layer.get_weights()
    targets = np.random.default_rng(1).normal(size=(B, T, V if kind is SharedEmbedding else D))
    history = model.fit(INPUTS, targets, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    for weight, old, new in zip(layer.weights, before, layer.get_weights(), strict=True):
        # A bias of the keys adds the same to every score of a query: its gradient is rounding.
        if not weight.path.endswith("key/bias"):
            assert np.abs(new - old).max() > 1e-7, weight.path


@every_layer
def test_a_saved_layer_computes_the_same_when_loaded(kind, arguments, call, tmp_path):
    model = model_of(kind(**arguments), call)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(outputs(loaded), outputs(model), rtol=0, atol=1e-6)


@every_layer
def test_mixed_precision_keeps_weights_in_float32_and_computes_the_same(kind, arguments, call):
    exact, mixed = kind(**arguments), kind(**arguments, dtype="mixed_bfloat16")
    expected, model = model_of(exact, call), model_of(mixed, call)
    mixed.set_weights(exact.get_weights())
    assert all(weight.dtype == "float32" for weight in mixed.weights)
    dtype = keras.backend.standardize_dtype(model(INPUTS).dtype)
    assert dtype == ("float32" if kind is SharedEmbedding else "bfloat16")  # logits are float32
    np.testing.assert_allclose(outputs(model), outputs(expected), rtol=0.05, atol=0.05)


@every_layer
def test_the_policy_of_the_process_governs_every_part_of_a_layer(kind, arguments, call):
    keras.config.set_dtype_policy("mixed_bfloat16")
    layer = kind(**arguments)
    model_of(layer, call)
    assert {part.dtype_policy.name for part in layer._flatten_layers()} == {"mixed_bfloat16"}
