"""Learn and load subwords: texts to token ids and back.

Tokenizers with one interface. `SentencePieceTokenizer` is the one to use; `ByteTokenizer` needs
nothing learned; `WordPieceTokenizer` is KerasHub's; `MarianTokenizer` comes with Marian's models.
They all keep four ids for themselves, PAD 0, UNK 1, BOS 2 and EOS 3, which no text can produce:
"</s>" in a sentence is four characters. (Text that a vocabulary cannot spell gives UNK, which
bytes and byte fallback never need.)

`encode` gives the pieces alone. Whoever builds the batch or the search adds BOS and EOS.

A tokenizer is saved as one file, whose name tells its kind; `load` reads whichever is there.
"""

import base64
import hashlib
import json
import os
import random
import re
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, Self

import keras

from keras_aiayn.data.batching import import_tensorflow
from keras_aiayn.special_ids import BOS, EOS, PAD, UNK

SPECIAL_IDS = {"pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS}
_REPLACEMENT = "\ufffd".encode()
LEARNING_LINES = 2_000_000  # a vocabulary is learned from at most so many lines: memory is bounded


class Tokenizer(Protocol):
    """What a translator and a corpus ask of a tokenizer."""

    asset_name: str

    @classmethod
    def learn(cls, lines: Iterable[str], vocabulary_size: int) -> Self:
        """Learns a vocabulary from text."""

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, the four special ones included."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the ids: equal for equal tokenizers only."""

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Turns texts into ids, without BOS and EOS."""

    def decode(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Turns ids into texts; PAD, BOS and EOS are left out."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The written form of each id, to look at."""

    def words(self, ids: Iterable[int]) -> list[int]:
        """The number of each id's word, from 0, as blanks divide a text; -1 for no word's."""

    def in_graph(self) -> Any:
        """The same tokenizer on TensorFlow tensors, with `tokenize` and `detokenize`."""

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Writes the file `asset_name` into a folder."""

    def load_assets(self, folder: str | os.PathLike[str]) -> None:
        """Reads it back, into a tokenizer made without arguments."""


class _KeptInItsAsset:
    """What Keras wants of an object whose file says all that there is to know of it."""

    def get_config(self) -> dict[str, Any]:
        """An empty dictionary."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """An empty tokenizer, for `load_assets` to fill."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="keras_aiayn")
class SentencePieceTokenizer(_KeptInItsAsset):
    """Subwords by SentencePiece: byte-pair encoding (section 5.1 of the paper) with byte fallback.

    The text is its own: case, accents and white space other than runs of blanks are kept. With
    byte fallback a character outside the vocabulary is spelled in UTF-8 bytes, so every text
    comes back as it was, but for two things: blanks at the ends are dropped and runs of them
    become one, and U+2581, by which SentencePiece writes a blank, is read as one.

    Args:
        proto: The bytes of a SentencePiece `.model` file. Its special ids must be pad 0, unk 1,
            bos 2, eos 3. Without it the tokenizer is empty until `load_assets`.

    Raises:
        ValueError: If the bytes are no SentencePiece model, or its special ids are others.

    Example:
    ```python
    tokenizer = SentencePieceTokenizer.learn(lines, vocabulary_size=8000)
    ids = tokenizer.encode(["A dog runs."])
    tokenizer.decode(ids)  # ["A dog runs."]
    ```
    """

    asset_name = "tokenizer.model"

    def __init__(self, proto: bytes | None = None):
        self._use(proto)

    def _use(self, proto: bytes | None) -> None:
        self._proto = proto
        self._processor = None if proto is None else _sentencepiece_processor(proto)

    @classmethod
    def learn(
        cls,
        lines: Iterable[str],
        vocabulary_size: int,
        *,
        character_coverage: float = 1.0,
        normalization: str = "identity",
        symbols: Sequence[str] = (),
        max_lines: int = LEARNING_LINES,
    ) -> Self:
        """Learns the subwords of a text. The same lines always give the same tokenizer.

        Digits are subwords of their own, so that a number is copied as it is read.

        Args:
            lines: The text. It is read once, and not held in memory beyond `max_lines`.
            vocabulary_size: The number of ids, the 4 special ones and the 256 bytes included.
            character_coverage: The share of the characters of the text that get an id of their
                own; the rare others are spelled in bytes. Lower it (0.9995) for large, mixed text.
            normalization: SentencePiece's rule: `"identity"` keeps the text, `"nfkc"` folds
                compatible characters into one (and so cannot give back "½" or "m²"). It is
                stored in the model.
            symbols: Words that are one piece each whatever their letters, such as `"(NP"`, and
                whether they are in the text or not.
            max_lines: Of a longer text, a uniform sample of so many lines is learned from.

        Returns:
            A `SentencePieceTokenizer`.

        Raises:
            ValueError: If the text is empty, too small for the vocabulary, or the vocabulary is
                too small for the characters of the text; if a symbol is empty or has a blank.
        """
        import sentencepiece

        for symbol in symbols:
            if symbol.split() != [symbol]:
                raise ValueError(f"`symbols` must be words without blanks. Received: {symbol!r}")

        sample = sample_lines(lines, max_lines)
        _require_text(sample)
        model = BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocabulary_size,
                character_coverage=character_coverage,
                normalization_rule_name=normalization,
                byte_fallback=True,
                split_digits=True,
                user_defined_symbols=["▁" + symbol for symbol in symbols],
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                num_threads=16,  # stored in the model: a fixed number keeps its bytes the same
                max_sentence_length=1 << 20,  # in bytes; a longer line would be left out unsaid
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(_what_learning_needs(str(error), vocabulary_size)) from None
        return cls(model.getvalue())

    @property
    def proto(self) -> bytes:
        """The bytes of the SentencePiece `.model` file."""
        if self._proto is None:
            raise ValueError("this SentencePieceTokenizer is empty: call `load_assets` first")
        return self._proto

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, the four special ones included."""
        return self._loaded.vocab_size()

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the model file."""
        return hashlib.sha256(self.proto).hexdigest()

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Turns texts into ids, without BOS and EOS.

        Args:
            texts: A sequence of strings.
            num_threads: How many threads share the work.

        Returns:
            A list of ids for each text.
        """
        _require_strings(texts)
        try:
            return self._loaded.encode(list(texts), num_threads=num_threads)
        except TypeError:
            raise ValueError(
                "`texts` must be strings, without lone surrogates: UTF-8 cannot write those"
            ) from None

    def decode(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Turns ids into texts.

        Args:
            sequences: For each text its ids; PAD, BOS and EOS are left out.

        Returns:
            A list of strings.
        """
        size = self.vocabulary_size
        return [self._loaded.decode(_real_ids(ids, size)) for ids in sequences]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The written form of each id, to look at ("▁" is a blank, "<0x0A>" a byte)."""
        return [self._loaded.id_to_piece(int(i)) for i in ids]

    def words(self, ids: Iterable[int]) -> list[int]:
        """The number of each id's word, from 0, as blanks divide a text; -1 for no word's."""
        return _words(
            (i, piece.startswith("▁"), bool(piece.strip("▁")))
            for i, piece in ((i, self._loaded.id_to_piece(int(i))) for i in ids)
        )

    def in_graph(self) -> Any:
        """The same tokenizer on TensorFlow tensors, for tf.data and SavedModel.

        Returns:
            A `tensorflow_text.SentencepieceTokenizer`: `tokenize` takes a string tensor and gives
            a ragged tensor of ids, `detokenize` goes back.

        Raises:
            ImportError: If TensorFlow Text is missing.
        """
        return _sentencepiece_in_graph(self.proto)

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.model`, which every SentencePiece library reads, into a folder."""
        (Path(folder) / self.asset_name).write_bytes(self.proto)

    def load_assets(self, folder: str | os.PathLike[str]) -> None:
        """Reads `tokenizer.model` from a folder."""
        self._use((Path(folder) / self.asset_name).read_bytes())

    @property
    def _loaded(self) -> Any:
        _ = self.proto  # raises when there is none
        return self._processor

    def __getstate__(self) -> dict[str, Any]:
        return {"proto": self._proto}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._use(state["proto"])


@keras.saving.register_keras_serializable(package="keras_aiayn")
class ByteTokenizer(_KeptInItsAsset):
    """The bytes of UTF-8 after the four special ids: a vocabulary of 260, nothing to learn.

    Example:
    >>> ByteTokenizer().encode(["é"])
    [[199, 173]]
    """

    asset_name = "bytes.txt"
    vocabulary_size = len(SPECIAL_IDS) + 256
    fingerprint = hashlib.sha256(b"keras_aiayn bytes").hexdigest()

    @classmethod
    def learn(cls, lines: Iterable[str] = (), vocabulary_size: int = 260) -> Self:
        """A `ByteTokenizer`, whatever the arguments: it has nothing to learn and one size."""
        return cls()

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Turns texts into ids, without BOS and EOS; `num_threads` is not used."""
        _require_strings(texts)
        first = len(SPECIAL_IDS)
        return [[first + byte for byte in text.encode("utf-8")] for text in texts]

    def decode(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Turns ids into texts; bytes that are not UTF-8 become U+FFFD, and so does UNK."""
        first = len(SPECIAL_IDS)
        return [
            b"".join(
                _REPLACEMENT if i == UNK else bytes([i - first])
                for i in _real_ids(ids, self.vocabulary_size)
            ).decode("utf-8", "replace")
            for ids in sequences
        ]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The written form of each id, to look at: letters, and bytes as "<0x0A>"."""
        names = _special_names()
        names += [chr(b) if 32 < b < 127 else f"<0x{b:02X}>" for b in range(256)]
        return [names[i] for i in ids]

    def words(self, ids: Iterable[int]) -> list[int]:
        """The number of each id's word, from 0, as blanks divide a text; -1 for no word's."""
        blanks = {len(SPECIAL_IDS) + byte for byte in b" \t\n\r\x0b\x0c"}
        return _words((i, i in blanks, i not in blanks) for i in ids)

    def in_graph(self) -> Any:
        """The same tokenizer on TensorFlow tensors, with `tokenize` and `detokenize`."""
        return _BytesInGraph()

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Writes `bytes.txt`, a note that tells `load` what is here."""
        note = f"ids: {SPECIAL_IDS}, then the 256 bytes of UTF-8\n"
        (Path(folder) / self.asset_name).write_text(note, encoding="utf-8")

    def load_assets(self, folder: str | os.PathLike[str]) -> None:
        """Nothing to read."""


class _BytesInGraph:
    def tokenize(self, texts: Any) -> Any:
        tf = import_tensorflow()

        def ids(letters: Any) -> Any:
            numbers = tf.reshape(tf.io.decode_raw(letters, tf.uint8), [-1])  # there may be none
            return len(SPECIAL_IDS) + tf.cast(numbers, tf.int32)

        return tf.ragged.map_flat_values(ids, tf.strings.bytes_split(texts))

    def detokenize(self, ids: Any) -> Any:
        tf = import_tensorflow()
        written = [b""] * len(SPECIAL_IDS) + [bytes([byte]) for byte in range(256)]
        written[UNK] = _REPLACEMENT
        joined = tf.strings.reduce_join(tf.gather(tf.constant(written), ids), axis=-1)
        return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace")


@keras.saving.register_keras_serializable(package="keras_aiayn")
class WordPieceTokenizer(_KeptInItsAsset):
    """KerasHub's WordPiece: words split into the longest known pieces.

    It cannot give a text back to the letter: blanks are put around punctuation, and a word with a
    character that the vocabulary lacks becomes UNK. Prefer `SentencePieceTokenizer`.

    Args:
        vocabulary: The pieces in the order of their ids, beginning with "[PAD]", "[UNK]", "[BOS]"
            and "[EOS]". Without it the tokenizer is empty until `load_assets`.
    """

    asset_name = "vocabulary.txt"
    _SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")

    def __init__(self, vocabulary: Sequence[str] | None = None):
        self._use(vocabulary)

    def _use(self, vocabulary: Sequence[str] | None) -> None:
        self._vocabulary = vocabulary = None if vocabulary is None else list(vocabulary)
        self._tokenizer = None
        if vocabulary is None:
            return
        if tuple(vocabulary[: len(self._SPECIAL)]) != self._SPECIAL:
            raise ValueError(
                f"`vocabulary` must begin with {list(self._SPECIAL)}. "
                f"Received: {vocabulary[: len(self._SPECIAL)]}"
            )
        self._tokenizer = _import_keras_hub().tokenizers.WordPieceTokenizer(
            vocabulary=vocabulary, oov_token="[UNK]", dtype="int32"
        )

    @classmethod
    def learn(
        cls, lines: Iterable[str], vocabulary_size: int, *, max_lines: int = LEARNING_LINES
    ) -> Self:
        """Learns the pieces of a text by `keras_hub.tokenizers.compute_word_piece_vocabulary`.

        Args:
            lines: The text; of a longer one than `max_lines` a uniform sample is learned from.
            vocabulary_size: The largest number of ids; the method may end with fewer.
            max_lines: See `lines`.

        Returns:
            A `WordPieceTokenizer`.
        """
        hub, tf = _import_keras_hub(), import_tensorflow()
        sample = sample_lines(lines, max_lines)
        _require_text(sample)
        vocabulary = hub.tokenizers.compute_word_piece_vocabulary(
            tf.data.Dataset.from_generator(
                lambda: iter(sample), output_signature=tf.TensorSpec((), tf.string)
            ),
            vocabulary_size=vocabulary_size,
            reserved_tokens=list(cls._SPECIAL),
        )
        return cls(vocabulary)

    @property
    def vocabulary(self) -> list[str]:
        """The pieces in the order of their ids."""
        if self._vocabulary is None:
            raise ValueError("this WordPieceTokenizer is empty: call `load_assets` first")
        return self._vocabulary

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, the four special ones included."""
        return len(self.vocabulary)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the vocabulary file."""
        return hashlib.sha256(_lines_of(self.vocabulary)).hexdigest()

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Turns texts into ids, without BOS and EOS; `num_threads` is not used."""
        _require_strings(texts)
        if not len(texts):
            return []
        return [[int(i) for i in ids] for ids in self._loaded.tokenize(list(texts))]

    def decode(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Turns ids into texts: pieces joined by blanks; PAD, BOS and EOS are left out."""
        texts = []
        for ids in sequences:
            pieces = self.pieces(_real_ids(ids, self.vocabulary_size))
            texts.append(" ".join(pieces).replace(" ##", ""))
        return texts

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The written form of each id, to look at ("##" goes on with a word)."""
        return [self.vocabulary[i] for i in ids]

    def words(self, ids: Iterable[int]) -> list[int]:
        """The number of each id's word, from 0; punctuation is a word of its own, as it is here."""
        return _words((i, not self.vocabulary[i].startswith("##"), True) for i in ids)

    def in_graph(self) -> Any:
        """KerasHub's tokenizer, whose `tokenize` and `detokenize` take TensorFlow tensors too."""
        return self._loaded

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Writes `vocabulary.txt`, one piece a line, into a folder."""
        (Path(folder) / self.asset_name).write_bytes(_lines_of(self.vocabulary))

    def load_assets(self, folder: str | os.PathLike[str]) -> None:
        """Reads `vocabulary.txt` from a folder."""
        written = (Path(folder) / self.asset_name).read_bytes().decode("utf-8")
        self._use(written.split("\n")[:-1])

    @property
    def _loaded(self) -> Any:
        _ = self.vocabulary  # raises when there is none
        return self._tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {"vocabulary": self._vocabulary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._use(state["vocabulary"])


@keras.saving.register_keras_serializable(package="keras_aiayn")
class MarianTokenizer(_KeptInItsAsset):
    """The subwords of a Marian or OPUS-MT model: SentencePiece cuts, a vocabulary numbers.

    There the pieces of both languages share one vocabulary, and each language has a SentencePiece
    model of its own. A piece that the vocabulary lacks is UNK. A text may begin with a language
    code such as ">>fra<<", which is one piece where the vocabulary has it.

    Args:
        proto: the bytes of the language's SentencePiece `.model` file.
        vocabulary: all pieces by their ids; PAD, UNK, BOS and EOS first.
    """

    asset_name = "marian.json"

    def __init__(self, proto: bytes | None = None, vocabulary: Sequence[str] | None = None):
        if proto is not None and vocabulary is not None:
            self._use(proto, list(vocabulary))

    def _use(self, proto: bytes, vocabulary: list[str]) -> None:
        import sentencepiece

        if vocabulary[:4] != _special_names():
            raise ValueError(
                f"`vocabulary` must begin with {_special_names()}. Received: {vocabulary[:4]}"
            )
        self.proto, self.vocabulary = proto, vocabulary
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        # Without the special ids, which no text can produce.
        self._ids = {piece: i for i, piece in enumerate(vocabulary) if i >= len(SPECIAL_IDS)}

    @classmethod
    def learn(cls, lines: Iterable[str], vocabulary_size: int) -> Self:
        """Refuses: it comes with a model."""
        raise ValueError("Marian's subwords come with its model: take them by --tokenizer-from")

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, the four special ones included."""
        return len(self.vocabulary)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of what is saved."""
        return hashlib.sha256(self._asset()).hexdigest()

    def encode(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Turns texts into ids, without BOS and EOS."""
        _require_strings(texts)
        return [[self._ids.get(piece, UNK) for piece in self._cut(text)] for text in texts]

    def _cut(self, text: str) -> list[str]:
        code = re.match(">>.*?<<", text, re.DOTALL)
        if code and code[0] in self._ids:
            return [code[0], *self._processor.encode(text[code.end() :], out_type=str)]
        return self._processor.encode(text, out_type=str)

    def decode(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Turns ids into texts."""
        size = self.vocabulary_size
        return [
            self._processor.decode_pieces([self.vocabulary[i] for i in _real_ids(ids, size)])
            for ids in sequences
        ]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The written form of each id ("▁" is a blank)."""
        return [self.vocabulary[int(i)] for i in ids]

    def words(self, ids: Iterable[int]) -> list[int]:
        """The number of each id's word, from 0, as blanks divide a text; -1 for no word's."""
        return _words(
            (i, piece.startswith("▁"), bool(piece.strip("▁")))
            for i, piece in ((i, self.vocabulary[int(i)]) for i in ids)
        )

    def in_graph(self) -> Any:
        """The same tokenizer on TensorFlow tensors, with `tokenize` and `detokenize`."""
        return _marian_in_graph(self.proto, self.vocabulary)

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Writes `marian.json` into a folder."""
        (Path(folder) / self.asset_name).write_bytes(self._asset())

    def load_assets(self, folder: str | os.PathLike[str]) -> None:
        """Reads `marian.json` from a folder."""
        saved = json.loads((Path(folder) / self.asset_name).read_bytes())
        self._use(base64.b64decode(saved["sentencepiece"]), saved["vocabulary"])

    def _asset(self) -> bytes:
        proto = base64.b64encode(self.proto).decode()
        return json.dumps({"sentencepiece": proto, "vocabulary": self.vocabulary}).encode()

    def __getstate__(self) -> dict[str, Any]:
        return {"proto": self.proto, "vocabulary": self.vocabulary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._use(state["proto"], state["vocabulary"])


def _marian_in_graph(proto: bytes, vocabulary: Sequence[str]) -> Any:
    tf = import_tensorflow()

    # A module, so that a SavedModel finds the table.
    class InGraph(tf.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._pieces = _sentencepiece_in_graph(proto, out_type=tf.string)
            first, end = len(SPECIAL_IDS), len(vocabulary)
            ids = tf.lookup.KeyValueTensorInitializer(vocabulary[first:], tf.range(first, end))
            self._ids = tf.lookup.StaticHashTable(ids, UNK)
            self._vocabulary = tf.constant(list(vocabulary))

        def tokenize(self, texts: Any) -> Any:
            """Strings to ragged ids."""
            codes, texts = self._cut(texts)
            pieces = self._pieces.tokenize(texts)
            ids = pieces.with_flat_values(self._ids.lookup(pieces.flat_values))
            return tf.concat([codes, ids], axis=1)

        def _cut(self, texts: Any) -> Any:
            """Each text's language code, where the vocabulary has it, and the rest."""
            begin = tf.strings.regex_replace(texts, r"(?s)\A(>>.*?<<)?.*\z", r"\1")
            code = self._ids.lookup(begin)
            known = code != UNK
            codes = tf.ragged.boolean_mask(code[:, tf.newaxis], known[:, tf.newaxis])
            start = tf.where(known, tf.strings.length(begin), 0)
            return codes, tf.strings.substr(texts, start, tf.strings.length(texts))

        def detokenize(self, ids: Any) -> Any:
            """Ragged ids to strings."""
            pieces = tf.gather(self._vocabulary, ids.flat_values)
            return self._pieces.detokenize(ids.with_flat_values(pieces))

    return InGraph()


KINDS: dict[str, type[Tokenizer]] = {
    "sentencepiece": SentencePieceTokenizer,
    "wordpiece": WordPieceTokenizer,
    "bytes": ByteTokenizer,
    "marian": MarianTokenizer,
}


def one_vocabulary(source: Tokenizer, target: Tokenizer) -> bool:
    """Whether an id means the same piece to both, so that they can share embeddings."""
    return source is target or (
        isinstance(source, MarianTokenizer)
        and isinstance(target, MarianTokenizer)
        and source.vocabulary == target.vocabulary
    )


def save(source: Tokenizer, target: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Writes the tokenizers of a pair of languages into a folder.

    Args:
        source: The tokenizer of the source.
        target: That of the target. The same object is written once, into the folder itself; two
            are written into its folders `source` and `target`.
        folder: A folder that exists.
    """
    folder = Path(folder)
    if source is target:
        source.save_assets(folder)
        return
    for name, tokenizer in (("source", source), ("target", target)):
        (folder / name).mkdir(exist_ok=True)
        tokenizer.save_assets(folder / name)


def load(folder: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """Reads what `save` wrote.

    Args:
        folder: The folder.

    Returns:
        The source and the target tokenizer; one object twice where they are shared.

    Raises:
        ValueError: If there is none, or one that cannot be used.
    """
    folder = Path(folder)
    if (folder / "source").is_dir() and (folder / "target").is_dir():
        return _load_one(folder / "source"), _load_one(folder / "target")
    shared = _load_one(folder)
    return shared, shared


def load_from_keras(path: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """Reads what `save` wrote into a `.keras` file, wherever in it that stands.

    Args:
        path: The file; nothing else of it is read.

    Returns:
        The source and the target tokenizer; one object twice where they are shared.

    Raises:
        ValueError: If it is damaged or unpacks to more than it holds, or has no tokenizer.
    """
    names = {kind.asset_name for kind in KINDS.values()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                assets = [one for one in archive.infolist() if one.filename.split("/")[-1] in names]
                if sum(one.file_size for one in assets) > os.path.getsize(path):
                    raise ValueError(f"{path}: its tokenizer is larger than the file")
                archive.extractall(folder, assets)
        except zipfile.BadZipFile:
            raise ValueError(f"{path} is damaged, or no Keras file") from None
        homes = {(Path(folder) / one.filename).parent for one in assets}
        if len(homes) == 2:  # its folders `source` and `target`
            homes = {home.parent for home in homes}
        if len(homes) != 1:
            raise ValueError(f"there is no tokenizer in {path}")
        return load(homes.pop())


def _load_one(folder: Path) -> Tokenizer:
    for kind in KINDS.values():
        if (folder / kind.asset_name).is_file():
            tokenizer = kind()
            tokenizer.load_assets(folder)
            return tokenizer
    raise ValueError(
        f"there is no tokenizer in {folder}: "
        f"none of {', '.join(kind.asset_name for kind in KINDS.values())}"
    )


def sample_lines(lines: Iterable[str], max_lines: int) -> list[str]:
    """Keeps all lines, or a uniform sample of `max_lines` (Vitter's algorithm R, a fixed seed).

    Args:
        lines: Any number of lines, read once.
        max_lines: How many to keep; of as few lines all are kept, in their order.

    Returns:
        A list of lines that are not blank.
    """
    generator = random.Random(0)
    sample: list[str] = []
    for seen, line in enumerate(line for line in lines if line.strip()):
        if seen < max_lines:
            sample.append(line)
        elif (place := generator.randrange(seen + 1)) < max_lines:
            sample[place] = line
    return sample


def _sentencepiece_processor(proto: bytes) -> Any:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto) if proto else None
    except RuntimeError:
        processor = None
    if processor is None:
        raise ValueError("`proto` is not a SentencePiece model: give the bytes of a .model file")
    ids = {name: getattr(processor, f"{name}_id")() for name in SPECIAL_IDS}
    if ids != SPECIAL_IDS:
        raise ValueError(
            f"the special ids of a SentencePiece model must be {SPECIAL_IDS} "
            "(train it with pad_id=0, unk_id=1, bos_id=2, eos_id=3). "
            f"Received: {ids}"
        )
    return processor


def _sentencepiece_in_graph(proto: bytes, **options: Any) -> Any:
    """Named by its model: a SavedModel takes two of TensorFlow Text's of one name for the same."""
    name = f"sentencepiece_{hashlib.sha256(proto).hexdigest()[:16]}"
    return _import_tensorflow_text().SentencepieceTokenizer(model=proto, name=name, **options)


def _what_learning_needs(error: str, vocabulary_size: int) -> str:
    """One line to act on in the place of SentencePiece's own."""
    if largest := re.search(r"too high.*<= (\d+)", error):
        return (
            f"the text is too small for a vocabulary of {vocabulary_size}: "
            f"`vocabulary_size` can be at most {largest[1]}"
        )
    if smallest := re.search(r"\d+ vs (\d+)", error):
        return (
            f"`vocabulary_size` must be at least {smallest[1]} to hold the characters "
            f"of the text, 256 bytes and {len(SPECIAL_IDS)} special ids (or lower "
            f"`character_coverage`). Received: {vocabulary_size}"
        )
    return f"SentencePiece could not learn a vocabulary: {' '.join(error.split())}"


def _require_text(lines: Sequence[str]) -> None:
    if not lines:
        raise ValueError("there is no text to learn a vocabulary from: every line is blank")


def _require_strings(texts: Sequence[str]) -> None:
    if isinstance(texts, (str, bytes)):
        raise ValueError(f"`texts` must be a list of strings, not one. Received: {texts!r}")


def _words(ids: Iterable[tuple[int, bool, bool]]) -> list[int]:
    """Word numbers of ids, each with whether it begins with a blank, and whether it is more."""
    words, word, begins = [], -1, True
    for i, blank, text in ids:
        begins = begins or blank
        if i in (PAD, BOS, EOS) or not text:
            words.append(-1)
            continue
        word += begins
        begins = False
        words.append(word)
    return words


def _real_ids(ids: Iterable[int], vocabulary_size: int) -> list[int]:
    """The ids that stand for text, as ints; others than those of the vocabulary are refused."""
    ids = [int(i) for i in ids]
    for i in ids:
        if not 0 <= i < vocabulary_size:
            raise ValueError(
                f"token ids must be from 0 to {vocabulary_size - 1}, the vocabulary's last: do "
                f"the model and the tokenizer belong together? Received: {i}"
            )
    return [i for i in ids if i not in (PAD, BOS, EOS)]


def _special_names() -> list[str]:
    return ["<pad>", "<unk>", "<s>", "</s>"]


def _lines_of(vocabulary: Sequence[str]) -> bytes:
    return "".join(piece + "\n" for piece in vocabulary).encode("utf-8")


def _import_tensorflow_text() -> Any:
    import_tensorflow()
    try:
        import tensorflow_text
    except ImportError:
        raise ImportError(
            "a tokenizer in a TensorFlow graph needs tensorflow-text: "
            "pip install 'keras-aiayn[hub]'"
        ) from None
    return tensorflow_text


def _import_keras_hub() -> Any:
    import_tensorflow()  # KerasHub imports TensorFlow, which must not take the GPU first
    try:
        import keras_hub
    except ImportError:
        raise ImportError(
            "WordPieceTokenizer needs KerasHub: pip install 'keras-aiayn[hub]'"
        ) from None
    return keras_hub
