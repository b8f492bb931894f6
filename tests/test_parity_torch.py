"""Our weights in the models of others: PyTorch's `nn.Transformer` and transformers' Marian."""

import numpy as np
import pytest
import torch
from keras import ops

from keras_aiayn.special_ids import PAD
from keras_aiayn.transformer import Transformer

V, D, HEADS, FF, N = 19, 16, 4, 32, 2
SOURCE = np.array([[4, 5, 6, 7, 8, 3], [9, 10, 3, 0, 0, 0]], "int32")
TARGET = np.array([[2, 11, 12, 13, 14], [2, 15, 16, 0, 0]], "int32")
REAL = TARGET != PAD


def make(**options):
    """A model with weights as after training, where no gain is 1 and no bias 0."""
    model = Transformer(V, N, D, FF, HEADS, **options)
    rng = np.random.default_rng(0)
    for weight in model.trainable_variables:
        weight.assign(weight + rng.normal(scale=0.2, size=weight.shape))
    return model


def logits_of(model):
    logits = model({"encoder_token_ids": SOURCE, "decoder_token_ids": TARGET})
    return ops.convert_to_numpy(logits)[REAL]


def array(variable):
    return torch.tensor(ops.convert_to_numpy(variable))


def sinusoids(length):
    angles = np.arange(length)[:, np.newaxis] / 10000.0 ** (np.arange(0, D, 2) / D)
    return torch.tensor(np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, D)).float()


# What each of ours is called there. A kernel of ours is (in, out), theirs (out, in).


def linear(dense, name):
    weights = {f"{name}.weight": array(dense.kernel).T}
    return weights | ({f"{name}.bias": array(dense.bias)} if dense.use_bias else {})


def norm(residual, name):
    layer = getattr(residual, "norm", residual)
    return {f"{name}.weight": array(layer.gamma), f"{name}.bias": array(layer.beta)}


def torch_attention(attention, name):
    joined = (attention.query_projection, attention.key_projection, attention.value_projection)
    weights = {f"{name}.in_proj_weight": torch.cat([array(part.kernel).T for part in joined])}
    weights |= linear(attention.output_projection, f"{name}.out_proj")
    if attention.use_bias:
        bias = torch.cat([array(part.bias) for part in joined])
        return weights | {f"{name}.in_proj_bias": bias}
    # Theirs always has them.
    return weights | {
        f"{name}.in_proj_bias": torch.zeros(3 * D),
        f"{name}.out_proj.bias": torch.zeros(D),
    }


def torch_block(block, name):
    weights = torch_attention(block.self_attention, f"{name}.self_attn")
    residuals = [block.self_attention_residual, block.feed_forward_residual]
    if hasattr(block, "cross_attention"):
        weights |= torch_attention(block.cross_attention, f"{name}.multihead_attn")
        residuals.insert(1, block.cross_attention_residual)
    for i, residual in enumerate(residuals, start=1):
        weights |= norm(residual, f"{name}.norm{i}")
    weights |= linear(block.feed_forward.inner, f"{name}.linear1")
    return weights | linear(block.feed_forward.outer, f"{name}.linear2")


def torch_transformer(model, norm_first):
    sizes = {"d_model": D, "nhead": HEADS, "dim_feedforward": FF, "dropout": 0.0}
    options = {"norm_first": norm_first, "layer_norm_eps": 1e-6, "batch_first": True}
    encoder_layer = torch.nn.TransformerEncoderLayer(**sizes, **options)
    decoder_layer = torch.nn.TransformerDecoderLayer(**sizes, **options)
    # A norm after each stack, which theirs adds by default, is right for pre-norm only.
    norms = [torch.nn.LayerNorm(D, eps=1e-6) if norm_first else None for _ in range(2)]
    encoder = torch.nn.TransformerEncoder(encoder_layer, N, norms[0], enable_nested_tensor=False)
    decoder = torch.nn.TransformerDecoder(decoder_layer, N, norms[1])
    theirs = torch.nn.Transformer(
        D, HEADS, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
    )
    weights = {}
    for side, blocks in (("encoder", model.encoder_blocks), ("decoder", model.decoder_blocks)):
        for i, block in enumerate(blocks):
            weights |= torch_block(block, f"{side}.layers.{i}")
    if norm_first:
        weights |= norm(model.encoder_norm, "encoder.norm")
        weights |= norm(model.decoder_norm, "decoder.norm")
    # A weight that is missing, or one too many, is an error.
    theirs.load_state_dict(weights, strict=True)
    return theirs.eval()


@pytest.mark.parametrize("normalize_first", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_logits_are_those_of_torchs_transformer(use_bias, normalize_first):
    model = make(use_bias=use_bias, normalize_first=normalize_first)
    theirs = torch_transformer(model, normalize_first)
    table = array(model.target_embedding.table.embeddings)
    source, target = (
        table[torch.tensor(ids).long()] * D**0.5 + sinusoids(ids.shape[1])
        for ids in (SOURCE, TARGET)
    )
    source_pads, target_pads = (torch.tensor(ids == PAD) for ids in (SOURCE, TARGET))
    later = torch.ones(TARGET.shape[1], TARGET.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        hidden = theirs(
            source,
            target,
            tgt_mask=later,
            src_key_padding_mask=source_pads,
            tgt_key_padding_mask=target_pads,
            memory_key_padding_mask=source_pads,
        )
        expected = (hidden @ table.T).numpy()[REAL]
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=1e-5)


def marian_attention(attention, name):
    parts = {
        "q_proj": attention.query_projection,
        "k_proj": attention.key_projection,
        "v_proj": attention.value_projection,
        "out_proj": attention.output_projection,
    }
    weights = {}
    for part, projection in parts.items():
        weights |= linear(projection, f"{name}.{part}")
    return weights


def marian_block(block, name):
    weights = marian_attention(block.self_attention, f"{name}.self_attn")
    weights |= norm(block.self_attention_residual, f"{name}.self_attn_layer_norm")
    if hasattr(block, "cross_attention"):
        weights |= marian_attention(block.cross_attention, f"{name}.encoder_attn")
        weights |= norm(block.cross_attention_residual, f"{name}.encoder_attn_layer_norm")
    weights |= linear(block.feed_forward.inner, f"{name}.fc1")
    weights |= linear(block.feed_forward.outer, f"{name}.fc2")
    return weights | norm(block.feed_forward_residual, f"{name}.final_layer_norm")


def marian(model, activation):
    import transformers

    config = transformers.MarianConfig(
        vocab_size=V,
        d_model=D,
        encoder_layers=N,
        decoder_layers=N,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FF,
        decoder_ffn_dim=FF,
        max_position_embeddings=8,
        activation_function=activation,
        scale_embedding=True,
        pad_token_id=PAD,
        decoder_start_token_id=2,
        eos_token_id=3,
        forced_eos_token_id=None,
        attn_implementation="eager",
    )
    theirs = transformers.MarianMTModel(config).eval()
    table = array(model.target_embedding.table.embeddings)
    weights = {
        "final_logits_bias": array(model.target_embedding.logits_bias)[None],
        "lm_head.weight": table,
        "model.shared.weight": table,
    }
    for side, blocks in (("encoder", model.encoder_blocks), ("decoder", model.decoder_blocks)):
        weights[f"model.{side}.embed_tokens.weight"] = table
        # Theirs lies as [sin | cos] halves.
        weights[f"model.{side}.embed_positions.weight"] = sinusoids(8)
        for i, block in enumerate(blocks):
            weights |= marian_block(block, f"model.{side}.layers.{i}")
    # A weight that is missing, or one too many, is an error.
    theirs.load_state_dict(weights, strict=True)
    return theirs


@pytest.mark.parametrize("activation", ["relu", "swish"])
def test_logits_are_those_of_marian(activation):
    model = make(
        use_bias=True, use_logits_bias=True, layer_norm_epsilon=1e-5, activation=activation
    )
    source, target = (torch.tensor(ids).long() for ids in (SOURCE, TARGET))
    with torch.no_grad():
        expected = marian(model, activation)(
            input_ids=source,
            attention_mask=(source != PAD).long(),
            decoder_input_ids=target,
            decoder_attention_mask=(target != PAD).long(),
        ).logits.numpy()
    np.testing.assert_allclose(logits_of(model), expected[REAL], rtol=0, atol=1e-5)
