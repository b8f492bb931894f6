"""Texts in, texts out: a Transformer, its tokenizers and its search in one `.keras` file."""

import dataclasses
import functools
import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from keras_aiayn.data import sentences
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.tokenizer import Tokenizer
from keras_aiayn.decoding.alignment import Pairs, word_alignment
from keras_aiayn.decoding.batches import Rules, Sentence, like_length, seed_of, shapes_for
from keras_aiayn.decoding.compiled import attention_function, heads_function, score_function
from keras_aiayn.decoding.loop import SearchResult
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.decoding.stream import CompiledSearch
from keras_aiayn.layers.precision import check_mode
from keras_aiayn.special_ids import BOS, EOS, PAD
from keras_aiayn.transformer import Transformer

# Raised when a file could no longer be read by an older package.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a search found for one text.

    Attributes:
        text: the translation.
        token_ids: its subwords, EOS included where it ended.
        tokens: their written form.
        score: log-probability over the length penalty ((5 + length) / 6)^alpha.
        raw_score: log-probability, in nats.
        hit_limit: whether it was cut at its maximum length (or its source was, where positions
            are learned and end).
        alternatives: further hypotheses, best first.
        alignment: (source word, target word) pairs from 0, where they were asked for.
    """

    text: str
    token_ids: list[int] = dataclasses.field(default_factory=list)
    tokens: list[str] = dataclasses.field(default_factory=list)
    score: float = 0.0
    raw_score: float = 0.0
    hit_limit: bool = False
    alternatives: list["Translation"] = dataclasses.field(default_factory=list)
    alignment: Pairs = dataclasses.field(default_factory=list)


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
        self._searches: dict[tuple, Any] = {}
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
        prefixes: Sequence[str] | None = None,
        together_with: Sequence["Translator"] = (),
        alignments: bool = False,
        tokens_per_batch: int = 2048,
        batch_size: int | None = None,
        details: bool = False,
        progress: Callable[[int], None] | None = None,
        split_long: int | None = None,
        first: int = 0,
        **settings: Any,
    ) -> list[Any]:
        """Translates texts, in the order given. An empty or blank text stays empty.

        Sentences of like length are searched together; what a sentence gets does not depend on
        the others.

        Args:
            texts: the sentences.
            prefixes: for each text what its translation begins with; none where empty.
            together_with: translators with the same tokenizers, whose models' probabilities are
                averaged with this one's.
            alignments: whether each `Translation` says which word was translated to which.
            tokens_per_batch: padded source tokens searched at a time, at most.
            batch_size: sentences searched at a time, at most.
            details: whether to return `Translation`s, with tokens and scores.
            progress: called with the number of texts done since its last call.
            split_long: cuts a text of more tokens than this at sentence ends, translates the parts
                and joins them again; by default a text of any length is translated whole.
            first: the number of the first text, which together with the seed decides what is
                sampled.
            **settings: of `SearchSettings`, instead of the translator's own: `beam_size`,
                `length_penalty`, `n_best`, `max_length`, `sampling` and others.

        Returns:
            A string for each text, or a `Translation`.

        Raises:
            ValueError: where a setting cannot be, or a translator does not fit the others.
        """
        if isinstance(texts, str):
            raise ValueError(f"`texts` must be a list of strings, not one. Received: {texts!r}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1. Received: {batch_size}")
        texts = list(texts)
        asked = self.search_settings(**settings)
        run = functools.partial(
            self._translate,
            asked=asked,
            models=self._models(together_with),
            alignments=alignments,
            tokens_per_batch=tokens_per_batch,
            batch_size=batch_size,
        )
        numbers = range(first, first + len(texts))
        if split_long is None:
            forced = self._prefixes(prefixes, len(texts))
            results = run(texts, numbers, forced, progress=progress)
        else:
            if prefixes is not None or asked.n_best > 1:
                raise ValueError("`split_long` goes neither with `prefixes` nor with n-best")
            results = self._translate_in_parts(texts, numbers, split_long, run)
            if progress:
                progress(len(texts))
        return results if details else [result.text for result in results]

    def _translate(
        self,
        texts: list[str],
        numbers: Sequence[int],
        prefixes: list[list[int]],
        *,
        asked: SearchSettings,
        models: tuple[Transformer, ...],
        alignments: bool,
        tokens_per_batch: int,
        batch_size: int | None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Translation]:
        suppressed = self._suppressed(asked.suppress)
        results = [Translation("")] * len(texts)
        encoded = self._encode(texts)
        if progress and len(encoded) < len(texts):
            progress(len(texts) - len(encoded))
        longest = min((m.max_length for m in models if m.max_length is not None), default=None)
        places = list(encoded)
        waiting = [
            Sentence.asked_for(
                encoded[index],
                asked,
                longest,
                prefixes[index],
                suppressed,
                seed_of(asked.seed, numbers[index]),
            )
            for index in places
        ]
        prefix = Rules.of(waiting).prefix
        shapes = shapes_for(asked, tokens_per_batch, longest, prefix, batch_size)
        for place, found in self._search(models, asked).stream(waiting, shapes):
            index = places[place]
            cut = len(encoded[index]) > len(waiting[place].source)
            results[index] = self._translation(found, cut)
            if progress:
                progress(1)
        if alignments:
            sources = {index: one.source for index, one in zip(places, waiting, strict=True)}
            self._align(results, sources, tokens_per_batch)
        return results

    def _translate_in_parts(
        self,
        texts: list[str],
        numbers: Sequence[int],
        longest: int,
        run: Callable[..., list[Translation]],
    ) -> list[Translation]:
        """Translates the sentences of long texts one by one, and joins them again."""

        def length(text: str) -> int:
            return len(self.source_tokenizer.encode([text])[0]) + 1

        cuts = [sentences.cut(text, longest, length) for text in texts]
        parts = [part for cut in cuts for part, _ in cut]
        # A number of its own for each part, whatever the other texts were cut into.
        part_numbers = [
            number + place * 1_000_000_007
            for number, cut in zip(numbers, cuts, strict=True)
            for place in range(len(cut))
        ]
        found = iter(run(parts, part_numbers, [[]] * len(parts)))
        return [self._joined([(part, blanks, next(found)) for part, blanks in cut]) for cut in cuts]

    def _joined(self, parts: list[tuple[str, str, Translation]]) -> Translation:
        """One translation of a text's parts: (part, blanks behind it, its translation) of each."""
        if len(parts) == 1:
            return parts[0][2]
        alignment: Pairs = []
        source_words = target_words = 0
        for part, _, found in parts:
            alignment += [(s + source_words, t + target_words) for s, t in found.alignment]
            (source_ids,) = self.source_tokenizer.encode([part])
            source_words += max(self.source_tokenizer.words(source_ids), default=-1) + 1
            target_words += max(self.target_tokenizer.words(found.token_ids), default=-1) + 1
        return Translation(
            text=sentences.join([(found.text, blanks) for _, blanks, found in parts]),
            token_ids=[i for _, _, found in parts for i in found.token_ids],
            tokens=[token for _, _, found in parts for token in found.tokens],
            score=sum(found.score for _, _, found in parts),
            raw_score=sum(found.raw_score for _, _, found in parts),
            hit_limit=any(found.hit_limit for _, _, found in parts),
            alignment=alignment,
        )

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        length_penalty: float | None = None,
        tokens_per_batch: int = 2048,
    ) -> list[Translation]:
        """The scores of given translations, as search would give them.

        Args:
            sources: the sentences.
            targets: their translations, as many.
            length_penalty: alpha; the translator's own by default.
            tokens_per_batch: padded tokens of either side that are scored at a time.

        Returns:
            For each pair a `Translation`: `raw_score` is the log-probability of the target in
            nats, its EOS included, `score` that over the length penalty.

        Raises:
            ValueError: where the numbers of texts differ, or one is longer than learned positions.
        """
        if len(sources) != len(targets):
            raise ValueError(
                "every source needs one target. "
                f"Received: {len(sources)} sources and {len(targets)} targets"
            )
        pairs = [
            ([*source, EOS], [*target, EOS])
            for source, target in zip(
                self.source_tokenizer.encode(list(sources)),
                self.target_tokenizer.encode(list(targets)),
                strict=True,
            )
        ]
        alpha = self.search_settings(length_penalty=length_penalty).length_penalty
        limit = self.model.max_length
        if limit is not None and any(len(ids) > limit for pair in pairs for ids in pair):
            raise ValueError(f"a text is longer than the {limit} positions of the model")
        if ("score",) not in self._searches:
            self._searches["score",] = score_function(self.model)
        results = [Translation("")] * len(pairs)
        for indices, *arrays in self._teacher_forced(pairs, tokens_per_batch):
            raw_scores = self._searches["score",](*arrays)
            for index, raw_score in zip(indices, raw_scores.tolist(), strict=False):
                ids = pairs[index][1]
                penalty = ((5 + len(ids)) / 6) ** alpha
                results[index] = Translation(
                    text=targets[index],
                    token_ids=ids,
                    tokens=self.target_tokenizer.pieces(ids),
                    score=raw_score / penalty,
                    raw_score=raw_score,
                )
        return results

    def _teacher_forced(
        self, pairs: Sequence[tuple[list[int], list[int]]], tokens_per_batch: int
    ) -> Iterator[tuple[list[int], np.ndarray, np.ndarray, np.ndarray]]:
        """Batches of pairs of ids: their places, sources, what the decoder reads, and targets."""
        longer = {index: max(pair, key=len) for index, pair in enumerate(pairs)}
        for indices, width, rows in like_length(longer, tokens_per_batch, self.model.max_length):
            source, decoder, target = np.full((3, rows, width), PAD, "int32")
            decoder[:, 0] = BOS
            for row, index in enumerate(indices):
                source_ids, target_ids = pairs[index]
                source[row, : len(source_ids)] = source_ids
                target[row, : len(target_ids)] = target_ids
                decoder[row, 1 : len(target_ids)] = target_ids[:-1]
            source[len(indices) :, 0] = EOS  # a row that only fills the batch reads something
            yield indices, source, decoder, target

    def translate_lines(
        self, lines: Iterable[str], *, chunk_size: int = 2048, first: int = 0, **options: Any
    ) -> Iterator[Any]:
        """Translates a stream of lines in order, holding `chunk_size` of them at a time.

        Args:
            lines: any number of sentences.
            chunk_size: lines read ahead, so that sentences of like length meet.
            first: the number of the first line; see `translate`.
            **options: of `translate`.

        Yields:
            What `translate` gives for each line.
        """
        lines = iter(lines)
        while chunk := list(itertools.islice(lines, chunk_size)):
            yield from self.translate(chunk, first=first, **options)
            first += len(chunk)

    def search_settings(self, **settings: Any) -> SearchSettings:
        """The settings of a search: the translator's own, but for those that are given.

        Raises:
            ValueError: for a name that is none, or a value that cannot be.
        """
        names = [field.name for field in dataclasses.fields(SearchSettings)]
        unknown = settings.keys() - set(names)
        if unknown:
            raise ValueError(
                f"there is no setting {', '.join(sorted(unknown))}. Settings: {', '.join(names)}"
            )
        own = {
            "beam_size": self.beam_size,
            "length_penalty": self.length_penalty,
            "max_extra_length": self.max_extra_length,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        return SearchSettings(**own | given)

    def attention(self, text: str, translation: Translation) -> tuple[list[str], np.ndarray]:
        """Where the decoder looked as it wrote a translation.

        Args:
            text: the source.
            translation: of it, as `translate` gave it with details.

        Returns:
            The source's tokens, and weights (tokens written, tokens read), the mean over heads.
        """
        source = np.array([[*self.source_tokenizer.encode([text])[0], EOS]], "int32")
        if self.model.max_length is not None:  # what the search read, too
            source = source[:, : self.model.max_length]
        decoder = np.array([[BOS, *translation.token_ids[:-1]]], "int32")
        return self.source_tokenizer.pieces(source[0]), self._attention(source, decoder)[0]

    def attention_by_head(
        self, source: str, target: str
    ) -> tuple[list[str], list[str], np.ndarray]:
        """Where each head of each layer looks as the decoder writes a given translation.

        Args:
            source: a text.
            target: its translation, of this translator or not.

        Returns:
            The tokens read (S), the tokens written (T), EOS included on both sides, and weights
            (layers, H, T, S), each row of which sums to 1. Where positions are learned and end,
            so do the tokens.
        """
        read, written = (
            [*tokenizer.encode([text])[0], EOS][: self.model.max_length]
            for tokenizer, text in (
                (self.source_tokenizer, source),
                (self.target_tokenizer, target),
            )
        )
        if ("heads",) not in self._searches:
            self._searches["heads",] = heads_function(self.model)
        ((_, source_ids, decoder_ids, _),) = self._teacher_forced([(read, written)], 1)
        weights = self._searches["heads",](source_ids, decoder_ids)[0]
        return (
            self.source_tokenizer.pieces(read),
            self.target_tokenizer.pieces(written),
            weights[..., : len(written), : len(read)],
        )

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

    def as_dtype(self, dtype: str) -> "Translator":
        """The same translator computing in another precision.

        Args:
            dtype: `"float32"`, `"bfloat16"` or `"float16"`; scores stay float32.

        Raises:
            ValueError: where this one is quantised.
        """
        if self.model.quantized_to is not None:
            raise ValueError(
                f"a translator of {self.model.quantized_to} computes in the precision that it was "
                f"quantised from: quantise one of another. Received: dtype={dtype!r}"
            )
        config = self.model.get_config() | {"dtype": dtype}
        return self._with(Transformer.from_config(config))

    def quantized(self, mode: str = "int8") -> "Translator":
        """The same translator with quantised weights: smaller, with slightly other scores.

        It is saved and loaded as any other, on every backend, and cannot be trained.

        Args:
            mode: `"int8"`.

        Raises:
            ValueError: for another mode, where this one is quantised already, and for weights in
                float16, which Keras does not quantise.
        """
        check_mode(mode)  # Keras would name modes that it has and we have not
        translator = self._with(Transformer.from_config(self.model.get_config()))
        translator.quantize(mode)
        return translator

    def quantize(self, mode: Any = None, config: Any = None, **kwargs: Any) -> None:
        """As Keras does, in place: see `Transformer.quantize`, and `quantized` for a new one."""
        self.model.quantize(mode, config=config, **kwargs)
        self._searches.clear()  # what was compiled reads the weights that are gone

    def _with(self, model: Transformer) -> "Translator":
        """The same with another model, which gets the weights of this one."""
        model.set_weights(self.model.get_weights())
        config = self.get_config() | {"model": model}
        del config["format"], config["version"]
        return Translator(
            **config, source_tokenizer=self.source_tokenizer, target_tokenizer=self.target_tokenizer
        )

    def _untrained(self) -> "Translator":
        """This translator, or where its model is compiled one with a copy that is not."""
        if not self.model.compiled:
            return self
        return self._with(Transformer.from_config(self.model.get_config()))

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
            "version": importlib.metadata.version("keras-aiayn"),
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
        config.pop("version", None)  # for people
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

    def _models(self, together_with: Sequence["Translator"]) -> tuple[Transformer, ...]:
        """This translator's model and those of others that read and write the same tokens."""
        for other in together_with:
            theirs, ours = (
                (one.source_tokenizer.fingerprint, one.target_tokenizer.fingerprint)
                for one in (other, self)
            )
            if theirs != ours:
                raise ValueError(
                    "translators can work together only where their vocabularies are the same; "
                    f"that of {other.name} is another"
                )
        return (self.model, *(other.model for other in together_with))

    def _search(self, models: tuple[Transformer, ...], asked: SearchSettings) -> CompiledSearch:
        """The compiled search of these models and settings, made once."""
        method = asked.method
        key = (*map(id, models), method)
        if key not in self._searches:
            self._searches[key] = CompiledSearch(models, method)
        return self._searches[key]

    def _suppressed(self, pieces: tuple[str, ...]) -> list[int]:
        """The ids of pieces that no output may hold."""
        if not pieces:
            return []
        tokenizer = self.target_tokenizer
        every = tokenizer.pieces(range(tokenizer.vocabulary_size))
        ids = [every.index(piece) if piece in every else -1 for piece in pieces]
        if -1 in ids:
            raise ValueError(
                f"`suppress` takes pieces of the vocabulary. Received: {pieces[ids.index(-1)]!r}"
            )
        return ids

    def _prefixes(self, prefixes: Sequence[str] | None, texts: int) -> list[list[int]]:
        """The ids that each output begins with."""
        if prefixes is None:
            return [[]] * texts
        if isinstance(prefixes, str) or len(prefixes) != texts:
            raise ValueError("`prefixes` must be a list of as many strings as there are texts")
        return self.target_tokenizer.encode(list(prefixes))

    def _encode(self, texts: list[str]) -> dict[int, list[int]]:
        """The ids of every text that has any, EOS included, by its place in the list."""
        real = [index for index, text in enumerate(texts) if text.strip()]
        encoded = self.source_tokenizer.encode([texts[index] for index in real])
        return {index: [*ids, EOS] for index, ids in zip(real, encoded, strict=True) if ids}

    def _translation(self, found: SearchResult, source_was_cut: bool) -> Translation:
        """Of one sentence, with its alternatives."""
        hypotheses = []
        for ids, length, score, raw_score, hit_limit in zip(*found[:5], strict=True):
            if length:
                hypotheses.append(
                    Translation(
                        text=self.target_tokenizer.decode([ids[:length]])[0],
                        token_ids=ids[:length].tolist(),
                        tokens=self.target_tokenizer.pieces(ids[:length]),
                        score=float(score),
                        raw_score=float(raw_score),
                        hit_limit=bool(hit_limit) or source_was_cut,
                    )
                )
        if not hypotheses:  # nothing satisfies what was asked of it
            return Translation("", score=-np.inf, raw_score=-np.inf, hit_limit=True)
        return dataclasses.replace(hypotheses[0], alternatives=hypotheses[1:])

    @property
    def _attention(self) -> Callable[..., np.ndarray]:
        """The compiled attention of the model."""
        if ("attention",) not in self._searches:
            self._searches["attention",] = attention_function(self.model)
        return self._searches["attention",]

    def _align(
        self, results: list[Translation], sources: dict[int, list[int]], tokens_per_batch: int
    ) -> None:
        """Adds to translations, and to their alternatives, which word became which."""
        places = [
            (index, rank)
            for index in sources
            for rank in range(1 + len(results[index].alternatives))
            if results[index].token_ids
        ]
        pairs = [
            (sources[index], [results[index], *results[index].alternatives][rank].token_ids)
            for index, rank in places
        ]
        for batch, source, decoder, _ in self._teacher_forced(pairs, tokens_per_batch):
            weights = self._attention(source, decoder)
            for row, number in enumerate(batch):
                (index, rank), (source_ids, output) = places[number], pairs[number]
                alignment = word_alignment(
                    weights[row, : len(output), : len(source_ids)],
                    self.source_tokenizer.words(source_ids),
                    self.target_tokenizer.words(output),
                )
                if rank:
                    others = results[index].alternatives
                    others[rank - 1] = dataclasses.replace(others[rank - 1], alignment=alignment)
                else:
                    results[index] = dataclasses.replace(results[index], alignment=alignment)
