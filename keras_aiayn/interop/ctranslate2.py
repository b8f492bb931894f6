"""A translator as a folder for CTranslate2, the engine for CPUs and GPUs without Keras.

The folder holds `model.bin`, `config.json`, the vocabulary, and our tokenizers. CTranslate2 works
on pieces: what stands around it is `tokenizer.encode`, `pieces` and `decode`.

    engine = ctranslate2.Translator("folder")
    pieces = tokenizer.pieces(tokenizer.encode(["A dog runs."])[0])
    options = {"beam_size": 4, "length_penalty": 0, "max_input_length": 0}
    engine.translate_batch([pieces], **options)[0].hypotheses[0]

It cuts inputs at 1,024 tokens unless told otherwise, and gives no empty output, as this package
does with `min_length=2` (EOS counts). It scores by the sum over length ** length_penalty, not by
the paper's: with a length penalty of 0, that minimum and the same maximum length greedy outputs are
those of this package, and all but a few of a beam. There a hypothesis may end only where EOS is
among the best K continuations; here it may among the best 2K.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_aiayn.data import corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.layers.attention import MultiHeadAttention
from keras_aiayn.layers.position import SinusoidalPositionEncoding
from keras_aiayn.special_ids import BOS, EOS, PAD, UNK
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32",
                 "int8_float16", "int8_bfloat16")  # fmt: skip
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH", "silu": "SWISH",
               "tanh": "Tanh", "sigmoid": "Sigmoid"}  # fmt: skip
# Sinusoids have no end, a table has.
POSITIONS = 4_096
# Added to the logits of what an output never holds; large, and finite in float16.
NEVER = -1e4


def export(
    translator: Translator, folder: str | os.PathLike[str], quantization: str = "float32"
) -> None:
    """Writes a translator as a folder for CTranslate2, whole or not at all.

    Args:
        translator: to be written.
        folder: a new one.
        quantization: of the weights, one of `QUANTIZATIONS`.

    Raises:
        ImportError: where CTranslate2 is missing.
        ValueError: where CTranslate2 has nothing like a part of the model.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"`quantization` must be one of {', '.join(QUANTIZATIONS)}. Received: {quantization!r}"
        )
    if "bfloat16" in quantization and importlib.util.find_spec("torch") is None:
        raise ImportError(f"CTranslate2 writes {quantization} by way of torch: pip install torch")
    model = translator.model
    _check(model)
    vocabularies = [
        tokenizer.pieces(range(tokenizer.vocabulary_size))
        for tokenizer in (translator.source_tokenizer, translator.target_tokenizer)
    ]
    spec = _specification(model, vocabularies)
    spec.validate()
    spec.optimize(quantization=quantization)
    with corpus.whole_folder(Path(folder)) as part:
        spec.save(str(part))
        tokenizers.save(translator.source_tokenizer, translator.target_tokenizer, part)


def _check(model: Transformer) -> None:
    """Refuses what CTranslate2 cannot express."""
    if model.quantized_to is not None:
        raise ValueError(
            f"the model is quantised, to {model.quantized_to}: export the one that it was made of, "
            "and choose CTranslate2's own quantization"
        )
    attention = model.decoder_blocks[0].self_attention
    if attention.key_dim != attention.value_dim:
        raise ValueError(
            "CTranslate2 has heads of one size. "
            f"Received: key_dim={attention.key_dim}, value_dim={attention.value_dim}"
        )
    activation = keras.activations.serialize(model.decoder_blocks[0].feed_forward.activation)
    if activation not in ACTIVATIONS:
        raise ValueError(f"CTranslate2 has no activation {activation}")


def _specification(model: Transformer, vocabularies: Sequence[list[str]]) -> Any:
    """The model in CTranslate2's terms."""
    try:
        from ctranslate2.specs import common_spec, transformer_spec
    except ImportError:
        raise ImportError(
            "writing for CTranslate2 needs it: pip install 'keras-aiayn[ctranslate2]'"
        ) from None
    block = model.decoder_blocks[0]
    activation = ACTIVATIONS[keras.activations.serialize(block.feed_forward.activation)]
    options = {
        "num_layers": len(model.decoder_blocks),
        "num_heads": block.self_attention.num_heads,
        "head_dim": block.self_attention.key_dim,
        "pre_norm": model.decoder_norm is not None,
        "activation": getattr(common_spec.Activation, activation),
    }
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(**options),
        transformer_spec.TransformerDecoderSpec(**options),
    )
    positions = _positions(model)
    for side, blocks, norm, embedding in (
        (spec.encoder, model.encoder_blocks, model.encoder_norm, model.source_embedding),
        (spec.decoder, model.decoder_blocks, model.decoder_norm, model.target_embedding),
    ):
        embeddings = side.embeddings[0] if side is spec.encoder else side.embeddings
        embeddings.weight = _array(embedding.table.embeddings)
        side.position_encodings.encodings = positions
        if norm is not None:
            _set_norm(side.layer_norm, norm)
        for layer, one in zip(side.layer, blocks, strict=True):
            _set_block(layer, one)
    _set_projection(spec.decoder.projection, model)
    for register, vocabulary in zip(
        (spec.register_source_vocabulary, spec.register_target_vocabulary),
        vocabularies,
        strict=True,
    ):
        register(vocabulary)
    names = vocabularies[1]
    spec.config.unk_token, spec.config.eos_token = names[UNK], names[EOS]
    spec.config.bos_token = spec.config.decoder_start_token = names[BOS]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = block.self_attention_residual.norm.epsilon
    return spec


def _positions(model: Transformer) -> np.ndarray:
    if isinstance(model.position, SinusoidalPositionEncoding):
        width = model.target_embedding.hidden_dim
        table = SinusoidalPositionEncoding.encode(ops.arange(POSITIONS), width)
        return ops.convert_to_numpy(table)
    return _array(model.position.table)


def _set_block(spec: Any, block: keras.Layer) -> None:
    """An encoder's or a decoder's block."""
    _set_attention(spec.self_attention, block.self_attention, joined=(0, 1, 2))
    _set_norm(spec.self_attention.layer_norm, block.self_attention_residual.norm)
    if hasattr(block, "cross_attention"):
        _set_attention(spec.attention, block.cross_attention, joined=(1, 2))
        _set_norm(spec.attention.layer_norm, block.cross_attention_residual.norm)
    _set_linear(spec.ffn.linear_0, block.feed_forward.inner)
    _set_linear(spec.ffn.linear_1, block.feed_forward.outer)
    _set_norm(spec.ffn.layer_norm, block.feed_forward_residual.norm)


def _set_attention(spec: Any, attention: MultiHeadAttention, joined: tuple[int, ...]) -> None:
    """Queries, keys and values, of which some are one matrix there, and the output."""
    projections = (
        attention.query_projection,
        attention.key_projection,
        attention.value_projection,
    )
    alone = [projections[i] for i in range(3) if i not in joined]
    for linear, parts in zip(
        spec.linear, [*([part] for part in alone), [projections[i] for i in joined]], strict=False
    ):
        _set_linear(linear, *parts)
    _set_linear(spec.linear[-1], attention.output_projection)


def _set_linear(spec: Any, *layers: keras.layers.Dense) -> None:
    """One or more layers on one input; a kernel of ours is (in, out), theirs (out, in)."""
    spec.weight = np.concatenate([_array(layer.kernel).T for layer in layers])
    if layers[0].use_bias:
        spec.bias = np.concatenate([_array(layer.bias) for layer in layers])


def _set_norm(spec: Any, norm: keras.layers.LayerNormalization) -> None:
    spec.gamma, spec.beta = _array(norm.gamma), _array(norm.beta)


def _set_projection(spec: Any, model: Transformer) -> None:
    embedding = model.target_embedding
    table = embedding.table
    tied = embedding.tie_projection
    spec.weight = _array(table.embeddings) if tied else _array(table.reverse_embeddings).T
    bias = np.zeros(model.target_vocabulary_size, "float32")
    if embedding.use_logits_bias:
        bias += _array(embedding.logits_bias)
    bias[[PAD, BOS]] = NEVER
    spec.bias = bias


def _array(variable: Any) -> np.ndarray:
    return np.ascontiguousarray(ops.convert_to_numpy(variable), "float32")
