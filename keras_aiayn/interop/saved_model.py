"""A translator as a SavedModel: text in, text out, with TensorFlow and TensorFlow Text alone.

    import tensorflow as tf
    import tensorflow_text  # it knows the operations of the tokenizers

    translate = tf.saved_model.load("folder").signatures["serving_default"]
    translate(texts=tf.constant(["A dog runs."]))["translations"].numpy()

| signature | takes | gives |
|---|---|---|
| `serving_default` | `texts` (B,) strings, UTF-8 | `translations` (B,) strings, `scores`, `hit_limit` |
| `ids` | `source_ids` (B, S) int32: pieces, EOS, pads | `output_ids` (B, L) int32: pieces, EOS, pads; `lengths` (B,) int32, EOS counted; `scores`, `hit_limit` |

`scores` (B,) float32 are over the length penalty, `hit_limit` (B,) booleans, both as in
`Translation`. The graph is the search that `Translator.translate` compiles, traced once for
batches of any size and texts of any length, so it gives the same translations. Its rules for texts
are the same too: an empty or blank one stays empty with a score of 0, any other is translated
whole, whatever is in it, or cut and flagged where positions are learned and end. Bytes that are
not UTF-8 are read as U+FFFD. One thing differs: in the graph KerasHub's WordPiece reads a text up
to its first character NUL only.

A batch is padded to its longest text and searched as one: whoever sends many sorts them by length.
"""  # noqa: E501

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_aiayn.data import corpus
from keras_aiayn.data.batching import import_tensorflow
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.decoding.steps import translate_ids
from keras_aiayn.special_ids import BOS, EOS, PAD
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator


def export(
    translator: Translator,
    folder: str | os.PathLike[str],
    *,
    beam_size: int | None = None,
    length_penalty: float | None = None,
) -> None:
    """Writes a translator as a SavedModel, whole or not at all.

    Args:
        translator: to be written.
        folder: a new one.
        beam_size: of the search; the translator's by default.
        length_penalty: of the search; the translator's by default.

    Raises:
        FileExistsError: where the folder holds something.
        ImportError: where TensorFlow Text is missing, and the tokenizer needs it.
        ValueError: on another backend than TensorFlow, and where a setting cannot be.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            "only TensorFlow writes a SavedModel, of a .keras from any backend: "
            f"set KERAS_BACKEND=tensorflow. Received: KERAS_BACKEND={backend}"
        )
    asked = translator.search_settings(beam_size=beam_size, length_penalty=length_penalty)
    tf = import_tensorflow()
    with corpus.whole_folder(Path(folder)) as part:
        module = tf.Module()
        # What the graph reads is saved if it hangs on the module.
        module.weights = [variable.value for variable in translator.model.variables]
        source, target = translator.source_tokenizer, translator.target_tokenizer
        module.source = source.in_graph()
        module.target = module.source if target is source else target.in_graph()
        signatures = _signatures(translator.model, module.source, module.target, asked)
        tf.saved_model.save(module, str(part), signatures=signatures)


def _signatures(
    model: Transformer, source: Any, target: Any, asked: SearchSettings
) -> dict[str, Callable]:
    """The functions to be saved; `source` and `target` are tokenizers in the graph."""
    tf = import_tensorflow()

    def from_ids(source_ids: Any) -> dict[str, Any]:
        return _search(model, source_ids, asked)

    def from_texts(texts: Any) -> dict[str, Any]:
        found = _search(model, _to_ids(texts, source), asked)
        return {
            "translations": _to_texts(found["output_ids"], target),
            "scores": found["scores"],
            "hit_limit": found["hit_limit"],
        }

    texts = tf.TensorSpec([None], tf.string, name="texts")
    source_ids = tf.TensorSpec([None, None], tf.int32, name="source_ids")
    return {
        "serving_default": tf.function(from_texts, [texts], autograph=False),
        "ids": tf.function(from_ids, [source_ids], autograph=False),
    }


def _search(model: Transformer, source_ids: Any, asked: SearchSettings) -> dict[str, Any]:
    """The best output of each source; of a row without tokens an empty one."""
    tf = import_tensorflow()
    longest = tf.int32.max if model.max_length is None else model.max_length
    lengths = tf.math.count_nonzero(source_ids != PAD, axis=1, dtype=tf.int32)
    real, too_long = lengths > 0, lengths > longest
    source_ids = _cut(source_ids, too_long, longest)
    most = tf.minimum(asked.max_output(tf.minimum(lengths, longest)), longest)
    limits = tf.where(real, most, 0)
    found = translate_ids(
        model,
        source_ids,
        limits,
        max_length=tf.maximum(tf.reduce_max(limits), 1),  # there may be no row
        beam_size=asked.beam_size,
        length_penalty=asked.length_penalty,
    )
    return {
        "output_ids": found.token_ids[:, 0],
        "lengths": found.lengths[:, 0],
        "scores": found.scores[:, 0],
        "hit_limit": found.hit_limit[:, 0] & real | too_long,
    }


def _cut(source_ids: Any, too_long: Any, longest: int) -> Any:
    """Cuts sources (B, S) to what learned positions reach, before an EOS of their own."""
    tf = import_tensorflow()
    is_last = tf.range(tf.shape(source_ids)[1]) == longest - 1  # (S,)
    source_ids = tf.where(too_long[:, tf.newaxis] & is_last, EOS, source_ids)
    return source_ids[:, :longest]


def _to_ids(texts: Any, tokenizer: Any) -> Any:
    """Texts (B,) to pieces, EOS and pads (B, S); of a text to be left empty, only pads."""
    tf = import_tensorflow()
    texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
    pieces = tokenizer.tokenize(texts)
    ends = tf.fill([tf.shape(texts)[0], 1], EOS)
    ids = tf.concat([pieces, ends], axis=1).to_tensor(PAD)
    blank = tf.strings.regex_full_match(texts, _blank())
    real = (pieces.row_lengths() > 0) & ~blank
    return tf.where(real[:, tf.newaxis], ids, PAD)


def _to_texts(ids: Any, tokenizer: Any) -> Any:
    """Ids (B, L) to texts (B,)."""
    tf = import_tensorflow()
    is_text = (ids != PAD) & (ids != BOS) & (ids != EOS)
    return tokenizer.detokenize(tf.ragged.boolean_mask(ids, is_text))


def _blank() -> str:
    """A pattern of TensorFlow's for what Python's `str.strip` leaves nothing of."""
    spaces = filter(str.isspace, map(chr, range(sys.maxunicode + 1)))
    return f"[{''.join(spaces)}]*"
