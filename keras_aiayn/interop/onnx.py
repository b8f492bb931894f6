"""A translator as two ONNX graphs, for ONNX Runtime and whatever else reads them.

`encoder.onnx`, once for each batch of sources:

| takes | gives |
|---|---|
| `source_ids` (B, S) int64: pieces, EOS, pads | `memory_keys` (N, B, H, S, d_k), `memory_values` (N, B, H, S, d_v) |

`decoder.onnx`, once for each step, which gives back a longer cache than it was given:

| takes | gives |
|---|---|
| `token_ids` (B, T) int64: BOS at first, then what was chosen | `logits` (B, T, V): of the token after each |
| `source_ids`, `memory_keys`, `memory_values`, as above | |
| `past_keys` (N, B, H, L, d_k), `past_values` (N, B, H, L, d_v): of L tokens before, L = 0 at first | `keys`, `values`: the same of L + T tokens |

N are the layers, H the heads; all numbers are float32, and B, S, T and L of any size. The layers
share one tensor, so that a search reorders the beams of its cache by one gather along B. The folder
holds our tokenizers too. Pads (0) and BOS (2) are nothing that an output may hold: a search has to
leave them out.
"""  # noqa: E501

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
from keras import ops

from keras_aiayn import masking
from keras_aiayn.data import corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

# Sizes of the arrays that the graphs are traced with: any that differ, and none that is 0 or 1.
BATCH, SOURCE, PAST, NEW = 2, 5, 7, 3


def export(translator: Translator, folder: str | os.PathLike[str]) -> None:
    """Writes a translator as two graphs in float32 and its tokenizers, whole or not at all.

    Args:
        translator: to be written.
        folder: a new one.

    Raises:
        FileExistsError: where the folder holds something.
        ImportError: where ONNX is missing.
        ValueError: on another backend than PyTorch, and where the model is quantised.
    """
    backend = keras.backend.backend()
    if backend != "torch":
        raise ValueError(
            "only PyTorch writes ONNX, of a .keras from any backend: "
            f"set KERAS_BACKEND=torch. Received: KERAS_BACKEND={backend}"
        )
    if translator.model.quantized_to is not None:
        raise ValueError(
            f"the model is quantised, to {translator.model.quantized_to}: export the one that it "
            "was made of"
        )
    model = translator.as_dtype("float32").model
    with corpus.whole_folder(Path(folder)) as part:
        for name, graph in (("encoder", _encoder(model)), ("decoder", _decoder(model))):
            _write(graph, part / f"{name}.onnx")
        tokenizers.save(translator.source_tokenizer, translator.target_tokenizer, part)


def _encoder(model: Transformer) -> dict[str, Any]:
    """What `torch.onnx.export` needs to know of the encoder."""
    import torch

    class Encoder(torch.nn.Module):
        def forward(self, source_ids: Any) -> tuple[Any, Any]:
            memory = model.encode(source_ids, masking.padding_mask(source_ids), training=False)
            cache = model.init_cache(memory, 0)
            return _stacked(cache, "cross_key"), _stacked(cache, "cross_value")

    return {
        "model": Encoder().eval(),
        "kwargs": {"source_ids": torch.ones((BATCH, SOURCE), dtype=torch.int64)},
        "dynamic_shapes": {"source_ids": {0: "batch", 1: "source"}},
        "output_names": ["memory_keys", "memory_values"],
    }


def _decoder(model: Transformer) -> dict[str, Any]:
    """The same of a step of the decoder."""
    import torch

    attention = model.decoder_blocks[0].self_attention
    layers, heads = len(model.decoder_blocks), attention.num_heads

    class Decoder(torch.nn.Module):
        def forward(
            self, token_ids: Any, source_ids: Any, memory_keys: Any, memory_values: Any,
            past_keys: Any, past_values: Any,
        ) -> tuple[Any, Any, Any]:  # fmt: skip
            past, new = past_keys.shape[3], token_ids.shape[1]
            cache = [
                {
                    "self_key": _lengthened(past_keys[layer], new),
                    "self_value": _lengthened(past_values[layer], new),
                    "cross_key": memory_keys[layer],
                    "cross_value": memory_values[layer],
                }
                for layer in range(layers)
            ]
            positions = torch.arange(past, past + new)
            seen = torch.arange(past + new) <= positions[:, None]  # (T, L + T)
            hidden, cache = model.decode(
                token_ids,
                None,
                decoder_mask=seen[None].expand(token_ids.shape[0], -1, -1),
                memory_mask=masking.padding_mask(source_ids),
                cache=cache,
                cache_index=past,
                positions=positions[None],
                training=False,
            )
            logits = model.output_projection(hidden)
            return logits, _stacked(cache, "self_key"), _stacked(cache, "self_value")

    def of_heads(length: int, width: int) -> Any:
        return torch.zeros((layers, BATCH, heads, length, width))

    memory, past = {1: "batch", 3: "source"}, {1: "batch", 3: "past"}
    ids = torch.ones((BATCH, SOURCE), dtype=torch.int64)
    return {
        "model": Decoder().eval(),
        "kwargs": {
            "token_ids": ids[:, :NEW].clone(),
            "source_ids": ids,
            "memory_keys": of_heads(SOURCE, attention.key_dim),
            "memory_values": of_heads(SOURCE, attention.value_dim),
            "past_keys": of_heads(PAST, attention.key_dim),
            "past_values": of_heads(PAST, attention.value_dim),
        },
        "dynamic_shapes": {
            "token_ids": {0: "batch", 1: "new"},
            "source_ids": {0: "batch", 1: "source"},
            "memory_keys": memory,
            "memory_values": memory,
            "past_keys": past,
            "past_values": past,
        },
        "output_names": ["logits", "keys", "values"],
    }


def _stacked(cache: Sequence[dict[str, Any]], name: str) -> Any:
    """An array of all layers, (N, B, H, any, width)."""
    return ops.stack([layer[name] for layer in cache])


def _lengthened(cached: Any, new: Any) -> Any:
    """Cached heads (B, H, L, width) with room for new ones."""
    import torch

    return torch.nn.functional.pad(cached, (0, 0, 0, new))


def _write(graph: dict[str, Any], path: Path) -> None:
    """Traces a graph and writes it to one file."""
    import torch

    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("writing ONNX needs it: pip install 'keras-aiayn[onnx]'") from None
    with _quietly(), torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(**graph, dynamo=True, verbose=False)
        program.save(path, external_data=False)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporter tells of itself."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
