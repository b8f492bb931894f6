"""A Marian or OPUS-MT model of transformers as a `Translator`.

The folder is what `MarianMTModel.save_pretrained` and `MarianTokenizer.save_pretrained` write. The
model is the paper's with biases and a bias on the logits. Three things lie otherwise there:

- The special ids. There `</s>` is 0, `<unk>` 1, and `<pad>` the last; the decoder begins with
  `<pad>`, which is our BOS: its row is there twice here.
- The positions. There all sines come first, then all cosines; here they take turns. So all weights
  at the residual stream have their channels permuted.
- Matrices are (out, in) there.
"""

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_aiayn.data.tokenizer import MarianTokenizer
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator


def load(folder: str | os.PathLike[str]) -> Translator:
    """Reads a model of transformers.

    Args:
        folder: with `config.json`, the weights, `vocab.json`, `source.spm` and `target.spm`.

    Returns:
        A translator.

    Raises:
        FileNotFoundError: where a file is missing.
        ValueError: where the model has something that ours has not.
    """
    folder = Path(folder)
    config = _config(folder)
    pieces = _read_json(folder, "vocab.json")
    order = _order(config, pieces)
    weights = _weights(folder)
    width = config["d_model"]
    model = Transformer(
        len(order),
        num_layers=config["encoder_layers"],
        hidden_dim=width,
        intermediate_dim=config["encoder_ffn_dim"],
        num_heads=config["encoder_attention_heads"],
        dropout=config.get("dropout", 0.1),
        use_bias=True,
        use_logits_bias=True,
        activation=config["activation_function"],
        layer_norm_epsilon=1e-5,
    )
    _set_weights(model, weights, np.array(order), np.arange(width).reshape(2, -1).T.ravel())
    by_id = {i: piece for piece, i in pieces.items()}
    vocabulary = ["<pad>", "<unk>", "<s>", "</s>", *(by_id[i] for i in order[4:])]
    source, target = (
        MarianTokenizer((folder / f"{side}.spm").read_bytes(), vocabulary)
        for side in ("source", "target")
    )
    return Translator(model, source, target, beam_size=config.get("num_beams") or 4)


def _config(folder: Path) -> dict[str, Any]:
    """The configuration, of a model that ours can be."""
    config = _read_json(folder, "config.json")
    wanted = {
        "model_type": "marian",
        "decoder_layers": config.get("encoder_layers"),
        "decoder_attention_heads": config.get("encoder_attention_heads"),
        "decoder_ffn_dim": config.get("encoder_ffn_dim"),
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "decoder_start_token_id": config.get("pad_token_id"),
    }
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"{folder}: only models with {name}={value} can be imported. "
                f"Received: {config[name]}"
            )
    return config


def _read_json(folder: Path, name: str) -> Any:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no folder of a Marian model: it has no {name}")
    return json.loads(path.read_text(encoding="utf-8"))


def _order(config: dict[str, Any], pieces: dict[str, int]) -> list[int]:
    """Their id of each of ours; that of `<pad>` is there for PAD and for BOS."""
    pad, eos, unk = config["pad_token_id"], config["eos_token_id"], pieces["<unk>"]
    return [pad, unk, pad, eos, *sorted(set(pieces.values()) - {pad, unk, eos})]


def _weights(folder: Path) -> dict[str, np.ndarray]:
    """The weights by their names there."""
    if (folder / "model.safetensors").is_file():
        try:
            from safetensors.numpy import load_file
        except ImportError:
            raise ImportError(
                "the weights are safetensors: pip install 'keras-aiayn[marian]'"
            ) from None
        return load_file(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        try:
            import torch
        except ImportError:
            raise ImportError("the weights were written by torch: pip install torch") from None
        state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        return {name: tensor.float().numpy() for name, tensor in state.items()}
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _set_weights(
    model: Transformer, weights: dict[str, np.ndarray], order: np.ndarray, channels: np.ndarray
) -> None:
    """Gives the model theirs.

    Args:
        model: ours.
        weights: by their names.
        order: their id of each of ours.
        channels: their channel of each of ours, along the residual stream.
    """

    def put(variable: keras.Variable, array: np.ndarray) -> None:
        variable.assign(np.ascontiguousarray(array, "float32"))

    def dense(layer: keras.layers.Dense, name: str, reads: Any, writes: Any) -> None:
        put(layer.kernel, weights[f"{name}.weight"].T[reads][:, writes])
        put(layer.bias, weights[f"{name}.bias"][writes])

    def norm(layer: keras.layers.LayerNormalization, name: str) -> None:
        put(layer.gamma, weights[f"{name}.weight"][channels])
        put(layer.beta, weights[f"{name}.bias"][channels])

    everything = slice(None)

    def attention(layer: keras.Layer, name: str) -> None:
        for part, projection in (
            ("q", layer.query_projection),
            ("k", layer.key_projection),
            ("v", layer.value_projection),
        ):
            dense(projection, f"{name}.{part}_proj", channels, everything)
        dense(layer.output_projection, f"{name}.out_proj", everything, channels)

    put(model.target_embedding.table.embeddings, weights["model.shared.weight"][order][:, channels])
    put(model.target_embedding.logits_bias, weights["final_logits_bias"].ravel()[order])
    for side, blocks in (("encoder", model.encoder_blocks), ("decoder", model.decoder_blocks)):
        for number, block in enumerate(blocks):
            name = f"model.{side}.layers.{number}"
            attention(block.self_attention, f"{name}.self_attn")
            norm(block.self_attention_residual.norm, f"{name}.self_attn_layer_norm")
            if side == "decoder":
                attention(block.cross_attention, f"{name}.encoder_attn")
                norm(block.cross_attention_residual.norm, f"{name}.encoder_attn_layer_norm")
            dense(block.feed_forward.inner, f"{name}.fc1", channels, everything)
            dense(block.feed_forward.outer, f"{name}.fc2", everything, channels)
            norm(block.feed_forward_residual.norm, f"{name}.final_layer_norm")
