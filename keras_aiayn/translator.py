"""Texts in, texts out: a Transformer, its tokenizers and its search in one `.keras` file."""

import dataclasses
import itertools
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.tokenizer import Tokenizer
from keras_aiayn.decoding.compiled import search_function
from keras_aiayn.special_ids import EOS, PAD
from keras_aiayn.transformer import Transformer

# Raised when a file could no longer be read by an older package.
FORMAT = 1
# Widths of padded sources grow by a third or a half: few shapes to compile, little padding.
WIDTHS = sorted({2**i for i in range(3, 18)} | {3 * 2**i for i in range(2, 16)})


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a search found for one text.

    Attributes:
        text: the translation.
        tokens: its subwords, EOS included where it ended.
        score: log-probability over the length penalty ((5 + length) / 6)^alpha.
        raw_score: log-probability, in nats.
        hit_limit: whether it was cut at its maximum length (or its source was, where positions
            are learned and end).
        alternatives: further hypotheses, best first.
    """

    text: str
    tokens: list[str] = dataclasses.field(default_factory=list)
    score: float = 0.0
    raw_score: float = 0.0
    hit_limit: bool = False
    alternatives: list["Translation"] = dataclasses.field(default_factory=list)


@keras.saving.register_keras_serializable(package="keras_aiayn")
class Translator(keras.Model):
    """A trained model that translates.

    `save("model.keras")` keeps weights, tokenizers and search settings in one file, and
    `keras.saving.load_model("model.keras")` gives it back on any backend.

    Args:
        model: the `Transformer`.
        source_tokenizer: of the source.
        target_tokenizer: of the target; the source's by default.
        beam_size: beams of the search; 4 in section 6.1, 1 is greedy.
        length_penalty: alpha of section 6.1.
        max_extra_length: an output has at most this many tokens more than its input, EOS
            counted on both sides (50 in section 6.1).

    Raises:
        ValueError: where a tokenizer does not fit the model.
    """

    def __init__(
        self,
        model: Transformer,
        source_tokenizer: Tokenizer | None = None,
        target_tokenizer: Tokenizer | None = None,
        *,
        beam_size: int = 4,
        length_penalty: float = 0.6,
        max_extra_length: int = 50,
        name: str = "translator",
        **kwargs: Any,
    ):
        super().__init__(name=name, **kwargs)
        self.model = model
        self.beam_size = beam_size
        self.length_penalty = length_penalty
        self.max_extra_length = max_extra_length
        self._searches: dict[tuple, Callable] = {}
        self.built = True
        self._tokenizers: tuple[Tokenizer, Tokenizer] | None = None
        if source_tokenizer is not None:
            self._set_tokenizers(source_tokenizer, target_tokenizer or source_tokenizer)

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The tokenizer of the source."""
        return self._both_tokenizers()[0]

    @property
    def target_tokenizer(self) -> Tokenizer:
        """The tokenizer of the target, the same object where the vocabulary is shared."""
        return self._both_tokenizers()[1]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The model's logits."""
        return self.model(inputs, training=training)

    def translate(
        self,
        texts: Sequence[str],
        *,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        n_best: int = 1,
        tokens_per_batch: int = 2048,
        details: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Translates texts, in the order given. An empty or blank text stays empty.

        Sentences of like length are searched together; what a sentence gets does not depend on
        the others.

        Args:
            texts: the sentences.
            beam_size: instead of the translator's own.
            length_penalty: instead of the translator's own.
            n_best: number of hypotheses for each text, at most the beam size.
            tokens_per_batch: padded source tokens searched at a time.
            details: whether to return `Translation`s, with tokens and scores.
            progress: called with the number of texts done since its last call.

        Returns:
            A string for each text, or a `Translation`.
        """
        if isinstance(texts, str):
            raise ValueError(f"`texts` must be a list of strings, not one. Received: {texts!r}")
        texts = list(texts)
        search = self._search(
            self.beam_size if beam_size is None else beam_size,
            self.length_penalty if length_penalty is None else length_penalty,
            n_best,
        )
        results = [Translation("")] * len(texts)
        sources = self._encode(texts)
        done = len(texts) - len(sources)
        if progress and done:
            progress(done)
        for indices, width, rows in _batches(sources, tokens_per_batch, self.model.max_length):
            batch = np.full((rows, width), PAD, "int32")
            limits = np.zeros(rows, "int32")
            for row, index in enumerate(indices):
                ids = (
                    sources[index]
                    if len(sources[index]) <= width
                    else [
                        *sources[index][: width - 1],
                        EOS,
                    ]
                )
                batch[row, : len(ids)] = ids
                limits[row] = self._limit(len(ids))
            found = search(batch, limits, max_length=self._limit(width))
            for row, index in enumerate(indices):
                cut = len(sources[index]) > width
                results[index] = self._translation(found, row, cut)
            if progress:
                progress(len(indices))
        return results if details else [result.text for result in results]

    def translate_lines(
        self, lines: Iterable[str], *, chunk_size: int = 2048, **settings: Any
    ) -> Iterator[Any]:
        """Translates a stream of lines in order, holding `chunk_size` of them at a time.

        Args:
            lines: any number of sentences.
            chunk_size: lines read ahead, so that sentences of like length meet.
            **settings: of `translate`.

        Yields:
            What `translate` gives for each line.
        """
        lines = iter(lines)
        while chunk := list(itertools.islice(lines, chunk_size)):
            yield from self.translate(chunk, **settings)

    def save(self, filepath: str | os.PathLike[str], overwrite: bool = True, **kwargs: Any) -> None:
        """Saves to one `.keras` file, which appears whole or not at all.

        What training needs beside the weights stays out: the optimizer's state is twice their
        size.
        """
        path = Path(filepath)
        if path.suffix != ".keras":
            raise ValueError(f"a translator is saved as FILE.keras. Received: {path}")
        part = path.with_name(path.stem + ".part.keras")
        try:
            keras.Model.save(self._untrained(), part, overwrite=True, **kwargs)
            if path.exists() and not overwrite:
                raise FileExistsError(f"{path} exists, and overwrite=False")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _untrained(self) -> "Translator":
        """This translator, or where its model is compiled one with a copy that is not."""
        if not self.model.compiled:
            return self
        model = Transformer.from_config(self.model.get_config())
        model.set_weights(self.model.get_weights())
        config = self.get_config() | {"model": model}
        del config["format"]
        return Translator(
            **config, source_tokenizer=self.source_tokenizer, target_tokenizer=self.target_tokenizer
        )

    def save_assets(self, folder: str) -> None:
        """Writes the tokenizers into a folder of the file."""
        tokenizers.save(self.source_tokenizer, self.target_tokenizer, folder)

    def load_assets(self, folder: str) -> None:
        """Reads the tokenizers from a folder of the file."""
        self._set_tokenizers(*tokenizers.load(folder))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments without the tokenizers, which are assets of the file."""
        return {
            "format": FORMAT,
            "model": keras.saving.serialize_keras_object(self.model),
            "beam_size": self.beam_size,
            "length_penalty": self.length_penalty,
            "max_extra_length": self.max_extra_length,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> Self:
        """Makes the translator; its tokenizers follow by `load_assets`."""
        config = dict(config)
        file_format = config.pop("format")
        if file_format > FORMAT:
            raise ValueError(
                f"this file has format {file_format}, of a newer keras-aiayn than this one, "
                f"which reads up to format {FORMAT}: upgrade the package"
            )
        model = keras.saving.deserialize_keras_object(config.pop("model"))
        return cls(model, **config)

    def _both_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        if self._tokenizers is None:
            raise ValueError("this translator has no tokenizers: give them to its constructor")
        return self._tokenizers

    def _set_tokenizers(self, source: Tokenizer, target: Tokenizer) -> None:
        sizes = (source.vocabulary_size, target.vocabulary_size)
        expected = (self.model.vocabulary_size, self.model.target_vocabulary_size)
        if sizes != expected:
            raise ValueError(
                "the tokenizers do not fit the model: their vocabularies (source, target) have "
                f"{sizes} tokens, the model's {expected}"
            )
        self._tokenizers = (source, target)

    def _search(self, beam_size: int, length_penalty: float, n_best: int) -> Callable:
        """The compiled search of these settings, made once."""
        key = (beam_size, length_penalty, n_best)
        if key not in self._searches:
            self._searches[key] = search_function(
                self.model,
                beam_size=beam_size,
                length_penalty=length_penalty,
                num_return=n_best,
            )
        return self._searches[key]

    def _encode(self, texts: list[str]) -> dict[int, list[int]]:
        """The ids of every text that has any, EOS included, by its place in the list."""
        real = [index for index, text in enumerate(texts) if text.strip()]
        encoded = self.source_tokenizer.encode([texts[index] for index in real])
        return {index: [*ids, EOS] for index, ids in zip(real, encoded, strict=True) if ids}

    def _limit(self, source_length: int) -> int:
        """Most tokens of the output of a source of this length, EOS counted on both sides."""
        limit = source_length + self.max_extra_length
        return limit if self.model.max_length is None else min(limit, self.model.max_length)

    def _translation(self, found: Any, row: int, source_was_cut: bool) -> Translation:
        hypotheses = []
        for ids, length, score, raw_score, hit_limit in zip(
            *(field[row] for field in found[:5]), strict=True
        ):
            if length:
                hypotheses.append(
                    Translation(
                        text=self.target_tokenizer.decode([ids[:length]])[0],
                        tokens=self.target_tokenizer.pieces(ids[:length]),
                        score=float(score),
                        raw_score=float(raw_score),
                        hit_limit=bool(hit_limit) or source_was_cut,
                    )
                )
        return dataclasses.replace(hypotheses[0], alternatives=hypotheses[1:])


def load(path: str | os.PathLike[str]) -> Translator:
    """Loads a translator, with an error of one line for any other file.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: where it is not a translator of this package, or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a .keras file: train a model, or name RUN/model.keras")
    try:
        loaded = keras.saving.load_model(path)
    except Exception as error:
        # Whatever a foreign or broken archive makes Keras raise, it is this file that is wrong.
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} cannot be loaded as a translator: {reason}") from error
    if not isinstance(loaded, Translator):
        raise ValueError(
            f"{path} holds a {type(loaded).__name__} and not a Translator: "
            "save one with `Translator(model, tokenizer).save(...)`"
        )
    return loaded


def _batches(
    sources: dict[int, list[int]], tokens_per_batch: int, max_width: int | None
) -> Iterator[tuple[list[int], int, int]]:
    """Groups sources of like length: (their places, padded width, padded rows) of each batch.

    Long ones first, so that memory runs out at once or never.
    """
    order = sorted(sources, key=lambda index: -len(sources[index]))
    start = 0
    while start < len(order):
        longest = len(sources[order[start]])
        width = next(width for width in WIDTHS if width >= longest)
        if max_width is not None:
            width = min(width, max_width)
        rows = max(1, tokens_per_batch // width)
        indices = order[start : start + rows]
        # A rest is padded to a power of two, so that few sizes are ever compiled.
        yield indices, width, min(rows, 1 << (len(indices) - 1).bit_length())
        start += rows
