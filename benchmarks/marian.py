"""A Transformer's weights in transformers' Marian, for the benchmarks."""

from typing import Any

import numpy as np
import torch
import transformers

from keras_aiayn.interop.ctranslate2 import NEVER
from keras_aiayn.layers.position import SinusoidalPositionEncoding
from keras_aiayn.special_ids import BOS, EOS, PAD
from keras_aiayn.transformer import Transformer


def tensor(value: Any) -> torch.Tensor:
    """A variable of any backend as a tensor."""
    from keras import ops

    return torch.tensor(np.array(ops.convert_to_numpy(value)))


def empty(model: Transformer, max_length: int, dropout: float = 0.0) -> Any:
    """A Marian of the same sizes, with weights of its own."""
    block = model.decoder_blocks[0]
    layers, heads = len(model.decoder_blocks), block.self_attention.num_heads
    config = transformers.MarianConfig(
        vocab_size=model.vocabulary_size,
        d_model=model.target_embedding.hidden_dim,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=block.feed_forward.intermediate_dim,
        decoder_ffn_dim=block.feed_forward.intermediate_dim,
        max_position_embeddings=max_length,
        activation_function="relu",
        scale_embedding=True,
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config)


def from_ours(model: Transformer, max_length: int) -> Any:
    """A Marian that computes what the model computes (post-norm, one vocabulary, no biases)."""
    marian = empty(model, max_length)
    width = model.target_embedding.hidden_dim
    table = tensor(model.target_embedding.table.embeddings)
    bias = torch.zeros(1, model.vocabulary_size)
    bias[0, [PAD, BOS]] = NEVER
    weights = {"final_logits_bias": bias, "lm_head.weight": table, "model.shared.weight": table}
    positions = tensor(SinusoidalPositionEncoding.encode(np.arange(max_length), width))
    for side, blocks in (("encoder", model.encoder_blocks), ("decoder", model.decoder_blocks)):
        weights[f"model.{side}.embed_tokens.weight"] = table
        weights[f"model.{side}.embed_positions.weight"] = positions
        for number, block in enumerate(blocks):
            weights |= _block(block, f"model.{side}.layers.{number}")
    missing, unexpected = marian.load_state_dict(weights, strict=False)
    # Ours has no biases in its attention: theirs become 0.
    state = marian.state_dict()
    for name in missing:
        if not name.endswith("bias"):
            raise ValueError(f"no weight for {name}")
        state[name].zero_()
    if unexpected:
        raise ValueError(f"no place for {unexpected}")
    return marian.eval()


def _block(block: Any, name: str) -> dict[str, torch.Tensor]:
    weights = {}
    attentions = [("self_attn", block.self_attention, block.self_attention_residual)]
    if hasattr(block, "cross_attention"):
        attentions.append(("encoder_attn", block.cross_attention, block.cross_attention_residual))
    for place, attention, residual in attentions:
        for part, projection in (
            ("q_proj", attention.query_projection),
            ("k_proj", attention.key_projection),
            ("v_proj", attention.value_projection),
            ("out_proj", attention.output_projection),
        ):
            weights[f"{name}.{place}.{part}.weight"] = tensor(projection.kernel).T
        weights |= _norm(residual.norm, f"{name}.{place}_layer_norm")
    for place, dense in (("fc1", block.feed_forward.inner), ("fc2", block.feed_forward.outer)):
        weights[f"{name}.{place}.weight"] = tensor(dense.kernel).T
        weights[f"{name}.{place}.bias"] = tensor(dense.bias)
    return weights | _norm(block.feed_forward_residual.norm, f"{name}.final_layer_norm")


def _norm(norm: Any, name: str) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": tensor(norm.gamma), f"{name}.bias": tensor(norm.beta)}
