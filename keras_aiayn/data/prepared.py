"""A tokenised corpus on disk: flat token arrays and offsets, memory-mapped.

A folder holds, for each split (`train`, `valid`) and side (`source`, `target`),

    train.source.tokens     the ids of all sentences, one after the other, without special ids
    train.source.offsets    int64: sentence i is tokens[offsets[i] : offsets[i + 1]]
    valid.source.txt        the lines themselves, for BLEU (validation only)
    tokenizer.model         the tokenizer; two, in folders `source` and `target`, when separate
    meta.json               what was read, dropped and kept, and the size and hash of every file

`write` makes it in one pass over the text after learning the vocabulary, and holds a few thousand
pairs in memory at a time; `open` takes no time and no memory, whatever the size.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from keras_aiayn.data import corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.corpus import PathLike
from keras_aiayn.data.tokenizer import Tokenizer
from keras_aiayn.special_ids import BOS, EOS, PAD

FORMAT = "keras_aiayn.prepared.1"
SIDES = ("source", "target")
DROP_REASONS = ("empty", "too_long", "length_ratio")
_CHUNK = 8192  # pairs held in memory at a time


class Split:
    """The pairs of one split, on disk.

    Attributes:
        source_tokens: The ids of all sources, one after the other, without special ids.
        source_offsets: Source i is `source_tokens[source_offsets[i] : source_offsets[i + 1]]`.
        target_tokens: The same of the targets.
        target_offsets: The same of the targets.
    """

    def __init__(self, folder: Path, name: str, dtypes: dict[str, str]):
        self._folder, self._name = folder, name
        self.source_tokens, self.source_offsets = self._map("source", dtypes["source"])
        self.target_tokens, self.target_offsets = self._map("target", dtypes["target"])

    def _map(self, side: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        stem = self._folder / f"{self._name}.{side}"
        tokens = np.memmap(f"{stem}.tokens", dtype, mode="r")
        offsets = np.memmap(f"{stem}.offsets", "int64", mode="r")
        if offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(f"{stem}.offsets does not fit {stem}.tokens: prepare the corpus again")
        return tokens, offsets

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    def source_lengths(self) -> np.ndarray:
        """The length of each source, EOS included, int32."""
        return _lengths(self.source_offsets)

    def target_lengths(self) -> np.ndarray:
        """The length of each target, EOS included, int32."""
        return _lengths(self.target_offsets)

    def source_texts(self) -> list[str]:
        """The sources as they stood in the file (validation only)."""
        return self._texts("source")

    def target_texts(self) -> list[str]:
        """The targets as they stood in the file (validation only)."""
        return self._texts("target")

    def _texts(self, side: str) -> list[str]:
        path = self._folder / f"{self._name}.{side}.txt"
        if not path.is_file():
            raise ValueError(f"the texts of the split {self._name!r} were not kept: only its ids")
        return path.read_bytes().decode("utf-8").split("\n")[:-1]


def _lengths(offsets: np.ndarray) -> np.ndarray:
    return np.diff(offsets).astype("int32") + 1


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A tokenised corpus.

    Attributes:
        folder: Where it stands.
        meta: What `meta.json` says.
        source_tokenizer: The tokenizer of the sources.
        target_tokenizer: That of the targets, the same object when they share a vocabulary.
        train: The training pairs that were kept.
        valid: The validation pairs, all of them; None if there are none.
    """

    folder: Path
    meta: dict[str, Any]
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    train: Split
    valid: Split | None
    _stamps: dict[str, tuple[int, ...]] = dataclasses.field(repr=False)

    @property
    def fingerprint(self) -> str:
        """A hash of the contents: equal for corpora that train alike."""
        return self.meta["fingerprint"]

    @property
    def corpus_sizes(self) -> list[int]:
        """How many training pairs were kept of each pair of files, in their order."""
        train = self.meta["splits"]["train"]
        return train.get("corpora", [train["pairs"]])

    def check_unchanged(self) -> None:
        """Refuses to go on over files that are not those that were opened.

        Raises:
            ValueError: If one is gone, or was written to since.
        """
        for name, opened in self._stamps.items():
            if _stamp(self.folder / name) != opened:
                raise ValueError(
                    f"{self.folder / name} changed while it was in use: prepare into a new folder"
                )

    def check_contents(self) -> None:
        """Refuses files that are not what `write` wrote, by their hashes: every byte is read.

        Raises:
            ValueError: If one is not.
        """
        for name, file in _sizes_and_hashes(self.folder, self.meta["files"]).items():
            if file != self.meta["files"][name]:
                raise ValueError(
                    f"{self.folder / name} is not what was prepared: prepare into a new folder"
                )

    def longest(self) -> int:
        """The most tokens of a text, EOS included."""
        splits = [split for split in (self.train, self.valid) if split is not None]
        return max(
            int(lengths.max(initial=0))
            for split in splits
            for lengths in (split.source_lengths(), split.target_lengths())
        )


def open(folder: PathLike) -> Prepared:
    """Opens what `write` made.

    Args:
        folder: The folder.

    Returns:
        A `Prepared`.

    Raises:
        ValueError: If it is no such folder, or not whole.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    for name, file in meta["files"].items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file["bytes"]:
            raise ValueError(
                f"{folder / name} is damaged: prepare the corpus again. "
                f"Received: {'no file' if size is None else f'{size} bytes'}, "
                f"where {file['bytes']} were written"
            )
    source_tokenizer, target_tokenizer = tokenizers.load(folder)
    splits = {name: Split(folder, name, meta["token_dtypes"]) for name in meta["splits"]}
    return Prepared(
        folder,
        meta,
        source_tokenizer,
        target_tokenizer,
        splits["train"],
        splits.get("valid"),
        {name: _stamp(folder / name) for name in (*meta["files"], "meta.json")},
    )


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced; empty for no file."""
    if not path.is_file():
        return ()
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(
            f"{folder} is not a prepared corpus (no meta.json of the format {FORMAT}): "
            "make one with `keras-aiayn prepare`"
        )
    return meta


def write(
    train_source: PathLike | Sequence[PathLike],
    train_target: PathLike | Sequence[PathLike],
    valid_source: PathLike | Sequence[PathLike] | None,
    valid_target: PathLike | Sequence[PathLike] | None,
    output: PathLike,
    *,
    vocabulary_size: int = 8000,
    tokenizer: str = "sentencepiece",
    tokenizer_from: PathLike | None = None,
    separate_vocabularies: bool = False,
    max_length: int = 256,
    max_length_ratio: float = 9.0,
    num_threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Prepared:
    """Tokenises a corpus into a folder, which appears whole or not at all.

    A training pair is dropped when a side is empty or blank, when one is longer than `max_length`,
    or when one is more than `max_length_ratio` times as long as the other; lengths are in tokens,
    EOS included. The drops are counted by reason in `meta["splits"]["train"]`.
    Validation pairs are all kept.

    Args:
        train_source: The file, or files, of training sources, one sentence a line.
        train_target: As many files of targets, aligned with them by line.
        valid_source: The validation sources, or None.
        valid_target: The validation targets, or None.
        output: The folder to make.
        vocabulary_size: How many token ids to learn, of both languages together, from all lines
            or, where there are more than two million, from a uniform sample of so many.
        tokenizer: `"sentencepiece"`, `"wordpiece"` or `"bytes"` (which has 260 ids, always).
        tokenizer_from: Takes the tokenizers of another model instead of learning: a `.keras`
            file, a prepared folder, or a SentencePiece `.model`.
        separate_vocabularies: Learns one vocabulary of this size for each language.
        max_length: The largest number of tokens of a training sentence.
        max_length_ratio: See above.
        num_threads: How many threads tokenise; None for one a core.
        progress: Is called with a line of text now and then.

    Returns:
        The new `Prepared`, open.

    Raises:
        ValueError: If the files do not fit together, or nothing is left of them.
        FileExistsError: If `output` holds something.
    """
    _check_choices(tokenizer, max_length, max_length_ratio)
    report = progress or (lambda line: None)
    num_threads = num_threads or os.cpu_count() or 1

    if (valid_source is None) != (valid_target is None):
        raise ValueError("`valid_source` and `valid_target` must be given together, or neither")
    # The small one first: what is wrong with it is known at once.
    corpora = {}
    if valid_source is not None and valid_target is not None:
        collections.deque(corpus.read_pairs(valid_source, valid_target), maxlen=0)
        corpora["valid"] = corpus.read_corpora(valid_source, valid_target)
    corpora["train"] = corpus.read_corpora(train_source, train_target)
    with corpus.whole_folder(output) as folder:
        if tokenizer_from is not None:
            both = _tokenizers_of(Path(tokenizer_from))
        else:
            report(
                f"learning the vocabulary ({tokenizer}) from all lines, "
                f"or from a sample of {tokenizers.LEARNING_LINES:,} of more"
            )
            both = _learn(
                tokenizer, vocabulary_size, train_source, train_target, separate_vocabularies
            )
        tokenizers.save(*both, folder)
        rules = {"train": _training_rule(max_length, max_length_ratio), "valid": None}
        splits = {
            name: _write_split(folder, name, corpora[name], both, rules[name], num_threads, report)
            for name in corpora
        }
        limits = {"max_length": max_length, "max_length_ratio": max_length_ratio}
        _write_meta(folder, both, splits, limits)
    return open(output)


def _check_choices(tokenizer: str, max_length: int, max_length_ratio: float) -> None:
    if tokenizer not in tokenizers.KINDS:
        raise ValueError(
            f"`tokenizer` must be one of {', '.join(tokenizers.KINDS)}. Received: {tokenizer!r}"
        )
    if max_length < 2:
        raise ValueError(
            f"`max_length` must be at least 2: a piece and EOS. Received: {max_length}"
        )
    if max_length_ratio < 1:
        raise ValueError(f"`max_length_ratio` must be at least 1. Received: {max_length_ratio}")


def _learn(
    tokenizer: str,
    vocabulary_size: int,
    sources: PathLike | Sequence[PathLike],
    targets: PathLike | Sequence[PathLike],
    separate: bool,
) -> tuple[Tokenizer, Tokenizer]:
    def learned(*sides: PathLike | Sequence[PathLike]) -> Tokenizer:
        paths = itertools.chain.from_iterable(map(corpus.path_list, sides))
        lines = itertools.chain.from_iterable(map(corpus.read_lines, paths))
        return tokenizers.KINDS[tokenizer].learn(lines, vocabulary_size)

    if separate:
        return learned(sources), learned(targets)
    shared = learned(sources, targets)
    return shared, shared


def _tokenizers_of(path: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers in a prepared folder, a `.keras` file or a SentencePiece model."""
    if path.is_dir():
        return tokenizers.load(path)
    if not path.is_file():
        raise FileNotFoundError(f"`tokenizer_from`: there is no file or folder {path}")
    if path.suffix != ".keras":
        shared = tokenizers.SentencePieceTokenizer(path.read_bytes())
        return shared, shared
    return tokenizers.load_from_keras(path)


Rule = Callable[[str, str, int, int], str | None]


def _training_rule(max_length: int, max_length_ratio: float) -> Rule:
    """Why to drop a pair, from its texts and its lengths with EOS; None to keep it."""

    def reason(source: str, target: str, source_length: int, target_length: int) -> str | None:
        if not source.strip() or not target.strip() or min(source_length, target_length) < 2:
            return "empty"
        longer, shorter = max(source_length, target_length), min(source_length, target_length)
        if longer > max_length:
            return "too_long"
        if longer > max_length_ratio * shorter:
            return "length_ratio"
        return None

    return reason


def _write_split(
    folder: Path,
    name: str,
    corpora: Sequence[Iterator[tuple[str, str]]],
    both: tuple[Tokenizer, Tokenizer],
    drop_rule: Rule | None,
    num_threads: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Tokenises pairs to disk; without a rule to drop by, all of them and their texts."""
    read, dropped = 0, collections.Counter(dict.fromkeys(DROP_REASONS, 0))
    kept = [0] * len(corpora)
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(_Side(folder / f"{name}.{side}", one, drop_rule is None))
            for side, one in zip(SIDES, both, strict=True)
        ]
        for number, chunk in _chunks(corpora):
            texts = list(zip(*chunk, strict=True))  # (sources, targets)
            ids = [one.encode(side, num_threads) for one, side in zip(both, texts, strict=True)]
            reasons: list[str | None] = [None] * len(chunk)
            if drop_rule is not None:
                lengths = [[len(pieces) + 1 for pieces in side_ids] for side_ids in ids]
                reasons = list(map(drop_rule, *texts, *lengths))
            dropped.update(reason for reason in reasons if reason)
            keep = [i for i, reason in enumerate(reasons) if reason is None]
            for side, side_texts, side_ids in zip(sides, texts, ids, strict=True):
                side.append([side_texts[i] for i in keep], [side_ids[i] for i in keep])
            kept[number] += len(keep)
            read += len(chunk)
            if read % (_CHUNK * 100) == 0:
                report(f"{name}: {read:,} pairs read")
    counts = ", ".join(f"{reason} {dropped[reason]:,}" for reason in DROP_REASONS)
    summary = f"{name}: {sum(kept):,} of {read:,} pairs kept; dropped: {counts}"
    report(summary)
    if not min(sum(kept), *(side.end for side in sides)):
        raise ValueError(f"nothing is left of the corpus. {summary}")
    return {
        "read": read,
        "pairs": sum(kept),
        "corpora": kept,
        "dropped": dict(dropped),
        "source_tokens": sides[0].end,
        "target_tokens": sides[1].end,
    }


def _chunks(
    corpora: Sequence[Iterator[tuple[str, str]]],
) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Some thousand pairs at a time, with the number of their corpus."""
    for number, pairs in enumerate(corpora):
        while chunk := list(itertools.islice(pairs, _CHUNK)):
            yield number, chunk


class _Side:
    """One side of a split being written: its ids, where each sentence begins, and its texts."""

    def __init__(self, stem: Path, tokenizer: Tokenizer, with_texts: bool):
        self.end = 0
        self._tokenizer = tokenizer
        self._tokens = Path(f"{stem}.tokens").open("wb")
        self._offsets = Path(f"{stem}.offsets").open("wb")
        self._offsets.write(np.int64(0).tobytes())
        self._texts = Path(f"{stem}.txt").open("wb") if with_texts else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in filter(None, (self._tokens, self._offsets, self._texts)):
            file.close()

    def append(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        lengths = np.fromiter(map(len, ids), "int64", len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), "int64", int(lengths.sum()))
        _check_ids(flat, self._tokenizer.vocabulary_size)
        self._tokens.write(flat.astype(_token_dtype(self._tokenizer)).tobytes())
        self._offsets.write((self.end + np.cumsum(lengths)).tobytes())
        self.end += len(flat)
        if self._texts is not None:
            self._texts.write("".join(text + "\n" for text in texts).encode("utf-8"))


def _check_ids(ids: np.ndarray, vocabulary_size: int) -> None:
    """The one place to find a wrong id: on JAX it would train, as a NaN or a loss of 0."""
    wrong = ids[(ids < 0) | (ids >= vocabulary_size) | np.isin(ids, (PAD, BOS, EOS))]
    if len(wrong):
        raise ValueError(
            f"the tokenizer gives an id that no text may have (special, or not below its "
            f"vocabulary of {vocabulary_size}). Received: {wrong[0]}"
        )


def _token_dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32"


def _write_meta(
    folder: Path,
    both: tuple[Tokenizer, Tokenizer],
    splits: dict[str, dict[str, Any]],
    limits: dict[str, float],
) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = _sizes_and_hashes(folder, [path.relative_to(folder).as_posix() for path in paths])
    meta = {
        "format": FORMAT,
        "vocabulary_sizes": [one.vocabulary_size for one in both],
        "shared_vocabulary": both[0] is both[1],
        **limits,
        "token_dtypes": {side: _token_dtype(one) for side, one in zip(SIDES, both, strict=True)},
        "splits": splits,
        "files": files,
        "fingerprint": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
    }
    text = json.dumps(meta, indent=2) + "\n"
    (folder / "meta.json").write_text(text, encoding="utf-8")


def _sizes_and_hashes(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    files = {}
    for name in names:
        path = folder / name
        files[name] = {"bytes": path.stat().st_size, "sha256": corpus.sha256(path)}
    return files
