"""Section 3.2, against equation 1 written with loops."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers import attention
from keras_aiayn.layers.attention import (
    MultiHeadAttention,
    fused_attention,
    scaled_dot_product_attention,
)

B, T, S, H = 2, 4, 5, 2
PADDING = np.array([[[1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1]]], bool)  # (B, 1, S)
NO_KEYS = np.array([[[0, 0, 0, 0, 0]], [[1, 1, 1, 1, 1]]], bool)
# Each query sees other keys, and the second query of the first row none.
PER_QUERY = np.array([np.tri(T, S, 1), np.tri(T, S, 0)], bool)
PER_QUERY[0, 1] = False


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def equation_1(query, key, value, mask=None):
    """Output (B, H, T, d_v) and weights (B, H, T, S); a query without keys averages the values."""
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    weights = np.zeros((*query.shape[:3], key.shape[2]))
    for b, h, t in np.ndindex(query.shape[:3]):
        kept = np.ones(key.shape[2], bool)
        if mask is not None and mask[b, t % mask.shape[1]].any():
            kept = mask[b, t % mask.shape[1]]
        scores = key[b, h, kept] @ query[b, h, t] / np.sqrt(query.shape[-1])
        if mask is not None and not mask[b, t % mask.shape[1]].any():
            scores = np.zeros_like(scores)
        weights[b, h, t, kept] = softmax(scores)
        output[b, h, t] = weights[b, h, t] @ value[b, h]
    return output, weights


def heads(d_k=8, d_v=8):
    rng = np.random.default_rng(0)
    shapes = (B, H, T, d_k), (B, H, S, d_k), (B, H, S, d_v)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def additive(mask):
    return ops.convert_to_tensor(np.where(mask, 0.0, -1e9), "float32")


def as_numpy(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))


def assert_close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(as_numpy(actual), as_numpy(expected), rtol=0, atol=atol)


@pytest.mark.parametrize("d_v", [8, 3])
@pytest.mark.parametrize("mask", [None, PADDING, PER_QUERY, NO_KEYS])
def test_written_out_attention_is_equation_1(mask, d_v):
    query, key, value = heads(d_v=d_v)
    output, weights = scaled_dot_product_attention(query, key, value, mask)
    expected_output, expected_weights = equation_1(query, key, value, mask)
    assert_close(output, expected_output)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("mask", [None, PADDING, PER_QUERY, NO_KEYS])
def test_fused_attention_is_the_written_out_one_without_keys_too(mask):
    query, key, value = map(ops.convert_to_tensor, heads())
    assert_close(
        fused_attention(query, key, value, mask),
        scaled_dot_product_attention(query, key, value, mask)[0],
    )


def test_a_single_key_gets_all_the_weight_and_no_warning():
    query, key, value = heads()
    output, weights = scaled_dot_product_attention(query, key[:, :, :1], value[:, :, :1])
    assert_close(weights, np.ones((B, H, T, 1)))
    assert_close(output, np.broadcast_to(value[:, :, :1], (B, H, T, 8)))


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, fused_attention])
def test_additive_mask_is_refused(attend):
    with pytest.raises(ValueError, match="must be boolean.*Received: dtype=float32"):
        attend(*map(ops.convert_to_tensor, heads()), additive(PADDING))


@pytest.mark.parametrize("d_k", [4, 1024])
def test_scale_keeps_the_variance_of_the_scores_at_one(d_k):
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(1, 1, 200, d_k)).astype("float32") for _ in range(2))
    _, weights = scaled_dot_product_attention(query, key, key)
    # The logarithm of a softmax is the scores, less one number for each query.
    variance = np.log(as_numpy(weights)).var(axis=-1).mean()
    assert variance == pytest.approx(1.0, abs=0.1)
    unscaled = np.einsum("bhtd,bhsd->bhts", query, key)
    assert unscaled.var() == pytest.approx(d_k, rel=0.1)


@pytest.mark.backend_free
def test_unscaled_scores_of_large_heads_leave_the_softmax_little_gradient():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(500, 50))  # of variance 1, as scaled ones are

    def gradient_norm(scores):
        """Mean norm of the softmax's Jacobian, whose entries are p_i (1{i=j} - p_j)."""
        p = softmax(scores)
        jacobian = p[:, :, np.newaxis] * (np.eye(50) - p[:, np.newaxis, :])
        return np.median(np.linalg.norm(jacobian, axis=(1, 2)))

    assert gradient_norm(scores * np.sqrt(4096)) < 0.01 * gradient_norm(scores)


@pytest.mark.parametrize("use_bias", [False, True])
def test_multi_head_attention_is_heads_of_their_own_matrices_joined(use_bias):
    rng = np.random.default_rng(1)
    x, memory = (rng.normal(size=(B, n, 6)).astype("float32") for n in (T, S))
    d_k, d_v = 4, 3
    layer = MultiHeadAttention(H, d_k, value_dim=d_v, output_dim=5, use_bias=use_bias)
    layer.build(x.shape, memory.shape)
    for weight in layer.trainable_variables:
        weight.assign(rng.normal(size=weight.shape))

    def affine(inputs, projection, columns=slice(None)):
        kernel = as_numpy(projection.kernel)[:, columns]
        bias = as_numpy(projection.bias)[columns] if use_bias else 0.0
        return inputs @ kernel + bias

    joined = []
    for h in range(H):
        query = affine(x, layer.query_projection, slice(h * d_k, (h + 1) * d_k))
        key = affine(memory, layer.key_projection, slice(h * d_k, (h + 1) * d_k))
        value = affine(memory, layer.value_projection, slice(h * d_v, (h + 1) * d_v))
        one_head = (part[:, np.newaxis] for part in (query, key, value))
        joined.append(equation_1(*one_head, PADDING)[0][:, 0])
    expected = affine(np.concatenate(joined, axis=-1), layer.output_projection)

    assert_close(layer(x, memory, attention_mask=PADDING), expected, atol=1e-4)
    assert len(layer.weights) == (8 if use_bias else 4)


def layer_and_inputs(**options):
    rng = np.random.default_rng(2)
    layer = MultiHeadAttention(H, 8, output_dim=16, **options)
    x, memory = (ops.convert_to_tensor(rng.normal(size=(B, n, 16)), "float32") for n in (T, S))
    layer.build(x.shape, memory.shape)
    return layer, x, memory


def test_positional_arguments_are_query_key_value():
    layer, x, memory = layer_and_inputs()
    value = memory[:, ::-1] if keras.backend.backend() != "torch" else ops.flip(memory, axis=1)
    assert_close(layer(x, memory, value), layer(query=x, key=memory, value=value))
    assert np.abs(as_numpy(layer(x, memory, value)) - as_numpy(layer(x, memory))).max() > 0.1


def test_asking_for_the_weights_changes_no_output():
    layer, x, memory = layer_and_inputs()
    output, weights = layer(x, memory, attention_mask=PADDING, return_attention_scores=True)
    assert_close(output, layer(x, memory, attention_mask=PADDING))
    assert weights.shape == (B, H, T, S)
    assert_close(ops.sum(weights, axis=-1), np.ones((B, H, T)))
    assert not as_numpy(weights)[np.broadcast_to(~PADDING[:, np.newaxis], weights.shape)].any()


# A rate so small that nothing is dropped, and yet the path is that of dropout.
@pytest.mark.parametrize("dropout", [0.0, 1e-7])
@pytest.mark.parametrize("mask", [PADDING, PER_QUERY, NO_KEYS])
def test_a_query_without_keys_is_finite_and_the_same_in_training(mask, dropout):
    layer, x, memory = layer_and_inputs(dropout=dropout, seed=1)
    inference = layer(x, memory, attention_mask=mask, training=False)
    assert np.isfinite(as_numpy(inference)).all()
    assert_close(layer(x, memory, attention_mask=mask, training=True), inference)
    with_weights = layer(x, memory, attention_mask=mask, return_attention_scores=True)
    assert_close(with_weights[0], inference)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_query_without_keys_is_finite_in_half_precision(policy):
    if policy == "mixed_float16" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float16 product on a CPU")
    layer, x, memory = layer_and_inputs(dtype=policy)
    exact, _, _ = layer_and_inputs()
    for weight, other in zip(exact.weights, layer.weights, strict=True):
        weight.assign(other)
    output = layer(x, memory, attention_mask=NO_KEYS)
    assert keras.backend.standardize_dtype(output.dtype) == policy.removeprefix("mixed_")
    assert_close(output, exact(x, memory, attention_mask=NO_KEYS), atol=0.05)


def test_dropout_of_weights_acts_in_training_only():
    layer, x, memory = layer_and_inputs(dropout=0.5, seed=1)
    still = as_numpy(layer(x, memory))
    assert_close(layer(x, memory, training=False), still, atol=0)
    first, second = (as_numpy(layer(x, memory, training=True)) for _ in range(2))
    assert np.abs(first - still).max() > 0.01
    assert np.abs(first - second).max() > 0.01


def test_additive_mask_is_refused_by_the_layer():
    layer, x, memory = layer_and_inputs()
    with pytest.raises(ValueError, match="must be boolean"):
        layer(x, memory, attention_mask=additive(PADDING))


@pytest.mark.parametrize("mask", [PADDING, PER_QUERY, NO_KEYS])
def test_layer_computes_the_same_by_the_kernel_and_by_the_equation(mask, monkeypatch):
    layer, x, memory = layer_and_inputs()
    outputs = []
    for fused in (True, False):
        monkeypatch.setattr(attention, "prefers_fused_attention", lambda *_, fused=fused: fused)
        outputs.append(layer(x, memory, attention_mask=mask))
    assert_close(*outputs)
