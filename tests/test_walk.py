"""The walk of the annotated edition (part 11), and the blocks in a user's own model (part 13)."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn import (
    LabelSmoothedCrossentropy,
    SharedEmbedding,
    SinusoidalPositionEncoding,
    TokenMetrics,
    Transformer,
    TransformerDecoderBlock,
    TransformerEncoderBlock,
    masking,
)

V, D = 17, 16
SOURCE = np.array([[4, 5, 6, 7, 3], [9, 10, 3, 0, 0]], "int32")
TARGET_IN = np.array([[2, 11, 12, 13], [2, 15, 0, 0]], "int32")
TARGET = np.array([[11, 12, 13, 3], [15, 3, 0, 0]], "int32")
SIZES = {"num_heads": 2, "intermediate_dim": 32}


def as_numpy(tensor):
    return ops.convert_to_numpy(tensor)


def test_the_walk_from_masks_to_loss():
    transformer = Transformer(V, num_layers=2, hidden_dim=D, **SIZES)
    src_mask, tgt_mask, memory_mask = transformer.build_masks(SOURCE, TARGET_IN)
    assert (src_mask.shape, tgt_mask.shape, memory_mask.shape) == ((2, 1, 5), (2, 4, 4), (2, 1, 5))
    memory = transformer.encode(SOURCE, src_mask)
    assert memory.shape == (2, 5, D)
    decoder_out = transformer.decode(TARGET_IN, memory, tgt_mask, memory_mask)
    assert decoder_out.shape == (2, 4, D)
    logits = transformer.output_projection(decoder_out)
    assert logits.shape == (2, 4, V)
    loss = LabelSmoothedCrossentropy(label_smoothing=0.1)(TARGET, logits)
    # The scaled embeddings of an untrained model give logits of variance 1: log V + 1/2, about.
    assert 0.5 * np.log(V) < float(as_numpy(loss)) < 2 * np.log(V)
    # The graph of the model is made of these calls.
    whole = transformer({"encoder_token_ids": SOURCE, "decoder_token_ids": TARGET_IN})
    np.testing.assert_allclose(as_numpy(logits), as_numpy(whole), rtol=0, atol=1e-6)


def classifier():
    """Encoder-only: whether a sentence is of one kind or another."""
    token_ids = keras.Input((None,), dtype="int32")
    x = SinusoidalPositionEncoding()(SharedEmbedding(V, D)(token_ids))
    mask = masking.padding_mask(token_ids)
    for _ in range(2):
        x = TransformerEncoderBlock(**SIZES)(x, attention_mask=mask)
    return keras.Model(token_ids, keras.layers.Dense(2)(x[:, 0]))


def language_model(of_decoder_blocks):
    """Decoder-only, of either block."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = SharedEmbedding(V, D)
    x = SinusoidalPositionEncoding()(embedding(token_ids))
    mask = masking.decoder_mask(token_ids)
    if of_decoder_blocks:
        x = TransformerDecoderBlock(**SIZES, cross_attention=False)(x, self_attention_mask=mask)
    else:
        x = TransformerEncoderBlock(**SIZES)(x, attention_mask=mask)
    return keras.Model(token_ids, embedding(x, reverse=True))


def assert_survives_saving(model, inputs, path):
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.get_compile_config() == model.get_compile_config()
    np.testing.assert_allclose(as_numpy(loaded(inputs)), as_numpy(model(inputs)), rtol=0, atol=1e-6)


def test_an_encoder_only_model_of_a_users_own_trains(tmp_path):
    model = classifier()
    before = as_numpy(model(SOURCE))
    wide = np.pad(SOURCE, ((0, 0), (0, 9)))
    np.testing.assert_allclose(as_numpy(model(wide)), before, rtol=0, atol=1e-5)
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    history = model.fit(SOURCE, np.array([0, 1]), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert np.abs(as_numpy(model(SOURCE)) - before).max() > 1e-4
    assert_survives_saving(model, SOURCE, tmp_path / "model.keras")


@pytest.mark.parametrize("of_decoder_blocks", [True, False])
def test_a_decoder_only_model_of_a_users_own_trains(of_decoder_blocks, tmp_path):
    model = language_model(of_decoder_blocks)
    before = as_numpy(model(TARGET_IN))
    later = TARGET_IN.copy()
    later[:, 2:] = 16
    np.testing.assert_allclose(as_numpy(model(later))[:, :2], before[:, :2], rtol=0, atol=1e-5)
    model.compile(keras.optimizers.SGD(0.1), LabelSmoothedCrossentropy(), metrics=[TokenMetrics()])
    history = model.fit(TARGET_IN, TARGET, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert np.abs(as_numpy(model(TARGET_IN)) - before).max() > 1e-4
    assert_survives_saving(model, TARGET_IN, tmp_path / "model.keras")
