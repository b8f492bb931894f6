"""Section 3.1: what stands in a block and in which order, and the cache of the decoder's."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn import masking
from keras_aiayn.layers.decoder import TransformerDecoderBlock
from keras_aiayn.layers.encoder import TransformerEncoderBlock

B, T, S, D = 2, 5, 4, 8
TARGET = np.array([[2, 4, 5, 6, 7], [2, 8, 9, 0, 0]], "int32")
SOURCE = np.array([[4, 5, 6, 3], [7, 3, 0, 0]], "int32")


def as_numpy(tensor):
    return ops.convert_to_numpy(tensor)


def assert_close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(as_numpy(actual), as_numpy(expected), rtol=0, atol=atol)


def block_of(kind, **options):
    """A block with weights as after training, where no gain is 1 and no bias 0."""
    rng = np.random.default_rng(0)
    block = kind(num_heads=2, intermediate_dim=16, **options)
    block.build((None, None, D))
    for weight in block.trainable_variables:
        weight.assign(weight + rng.normal(scale=0.2, size=weight.shape))
    return block


def vectors(seed, length):
    x = np.random.default_rng(seed).normal(size=(B, length, D))
    return ops.convert_to_tensor(x, "float32")


def norm_of(residual):
    """LayerNorm with a residual's gain and bias, in numpy."""
    gain, bias = residual.norm.get_weights()

    def layer_norm(x):
        x = as_numpy(x)
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
        return gain * centred / deviation + bias

    return layer_norm


def test_encoder_block_normalises_the_sum_of_inputs_and_sublayer():
    block = block_of(TransformerEncoderBlock)
    x, mask = vectors(1, S), masking.padding_mask(SOURCE)
    attended = block.self_attention(x, x, attention_mask=mask)
    hidden = norm_of(block.self_attention_residual)(x + attended)
    expected = norm_of(block.feed_forward_residual)(hidden + as_numpy(block.feed_forward(hidden)))
    assert_close(block(x, attention_mask=mask), expected)


def test_encoder_block_can_normalise_first():
    block = block_of(TransformerEncoderBlock, normalize_first=True)
    x, mask = vectors(1, S), masking.padding_mask(SOURCE)
    normed = norm_of(block.self_attention_residual)(x)
    hidden = as_numpy(x) + as_numpy(block.self_attention(normed, normed, attention_mask=mask))
    normed = norm_of(block.feed_forward_residual)(hidden)
    assert_close(block(x, attention_mask=mask), hidden + as_numpy(block.feed_forward(normed)))


def test_decoder_block_attends_to_itself_then_to_memory_then_transforms():
    block = block_of(TransformerDecoderBlock)
    x, memory = vectors(1, T), vectors(2, S)
    own, source = masking.decoder_mask(TARGET), masking.padding_mask(SOURCE)
    attended = block.self_attention(x, x, attention_mask=own)
    hidden = norm_of(block.self_attention_residual)(x + attended)
    attended = block.cross_attention(hidden, memory, attention_mask=source)
    hidden = norm_of(block.cross_attention_residual)(hidden + as_numpy(attended))
    expected = norm_of(block.feed_forward_residual)(hidden + as_numpy(block.feed_forward(hidden)))
    assert_close(block(x, memory, self_attention_mask=own, memory_mask=source), expected)


def test_encoder_without_positions_knows_no_order():
    block = block_of(TransformerEncoderBlock)
    x, order = as_numpy(vectors(1, S)), [2, 0, 3, 1]
    assert_close(block(x[:, order]), as_numpy(block(x))[:, order])


@pytest.mark.parametrize("normalize_first", [False, True])
def test_decoder_block_without_memory_is_the_encoder_block_under_a_causal_mask(normalize_first):
    decoder = block_of(
        TransformerDecoderBlock, cross_attention=False, normalize_first=normalize_first
    )
    encoder = block_of(TransformerEncoderBlock, normalize_first=normalize_first)
    encoder.set_weights(decoder.get_weights())
    x, mask = vectors(1, T), masking.decoder_mask(TARGET)
    output = decoder(x, self_attention_mask=mask)
    assert_close(output, encoder(x, attention_mask=mask))
    changed = as_numpy(x).copy()
    changed[:, 3:] += 1.0
    assert_close(decoder(changed, self_attention_mask=mask)[:, :3], output[:, :3])


def test_returned_weights_are_of_the_keys_that_the_masks_keep():
    block = block_of(TransformerDecoderBlock)
    x, memory = vectors(1, T), vectors(2, S)
    own, source = masking.decoder_mask(TARGET), masking.padding_mask(SOURCE)
    masks = {"self_attention_mask": own, "memory_mask": source}
    output, weights = block(x, memory, **masks, return_attention_scores=True)
    assert_close(output, block(x, memory, **masks))
    for name, mask, keys in (("self", own, T), ("cross", source, S)):
        assert weights[name].shape == (B, 2, T, keys)
        hidden = np.broadcast_to(~as_numpy(mask)[:, np.newaxis], weights[name].shape)
        assert not as_numpy(weights[name])[hidden].any()
        assert_close(ops.sum(weights[name], axis=-1), np.ones((B, 2, T)))


@pytest.mark.parametrize("kind", [TransformerEncoderBlock, TransformerDecoderBlock])
def test_additive_mask_is_refused_by_a_block(kind):
    x = vectors(1, T)
    inputs = [x] if kind is TransformerEncoderBlock else [x, x]
    name = "attention_mask" if kind is TransformerEncoderBlock else "memory_mask"
    with pytest.raises(ValueError, match="must be boolean"):
        block_of(kind)(*inputs, **{name: ops.zeros((B, 1, T))})


def test_dropout_is_on_the_output_of_every_sublayer_and_nowhere_else():
    block = TransformerDecoderBlock(2, 16, dropout=0.25, seed=3)
    block.build((None, None, D))
    drops = [layer for layer in block._flatten_layers() if isinstance(layer, keras.layers.Dropout)]
    rates = sorted(drop.rate for drop in drops)
    assert rates == [0.0, 0.0, 0.25, 0.25, 0.25]  # the weights of both attentions: none
    assert block.cross_attention_residual.dropout_layer in drops


def test_a_cache_gives_what_the_whole_sequence_gives():
    block = block_of(TransformerDecoderBlock, key_dim=4, value_dim=3)
    x, memory, capacity = vectors(1, T), vectors(2, S), 7
    own, source = as_numpy(masking.decoder_mask(TARGET)), masking.padding_mask(SOURCE)
    whole = block(x, memory, self_attention_mask=own, memory_mask=source)
    own = np.pad(own, ((0, 0), (0, 0), (0, capacity - T)))
    cache = block.init_cache(memory, capacity)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):  # a prefill of two, then one, then two
        output, cache = block(
            x[:, rows],
            memory * np.nan,  # not read
            self_attention_mask=ops.convert_to_tensor(own[:, rows]),
            memory_mask=source,
            cache=cache,
            cache_index=rows.start,
        )
        assert_close(output, whole[:, rows])


def test_beams_side_by_side_in_one_cache_are_sequences_of_their_own():
    # Two beams over three steps. Ancestors[t][k]: the rows of beam k's history, written 0 ... t.
    ancestors = [[[0], [1]], [[1, 0], [0, 1]], [[0, 1, 0], [1, 0, 1]]]
    block = block_of(TransformerDecoderBlock, cross_attention=False)
    written = np.random.default_rng(1).normal(size=(3, 2, D)).astype("float32")
    cache = block.init_cache(None, 3 * 2, batch_size=1)
    for t, histories in enumerate(ancestors):
        padded = np.array([[history + [-1] * (2 - t) for history in histories]], "int32")
        outputs, cache = block(
            written[np.newaxis, t],
            self_attention_mask=masking.ancestor_mask(ops.convert_to_tensor(padded)),
            cache=cache,
            cache_index=t * 2,
        )
        for k, history in enumerate(histories):
            alone = np.stack([written[u, row] for u, row in enumerate(history)])[np.newaxis]
            causal = masking.causal_mask(ops.ones((1, t + 1), "int32"))
            expected = block(alone, self_attention_mask=causal)
            assert_close(outputs[0, k], expected[0, t])
