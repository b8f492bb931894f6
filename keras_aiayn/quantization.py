"""A translator with smaller weights, and what that costs and gives.

    translator.quantized("int8").save("small.keras")

takes a quarter of the room for each matrix. Whether it is faster depends on the backend and on the
machine, so it is measured, on the sentences that it is for.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_aiayn import evaluation
from keras_aiayn.data import corpus
from keras_aiayn.loading import load
from keras_aiayn.translator import Translation, Translator


@dataclasses.dataclass(frozen=True)
class Measured:
    """How a translator does on some sentences.

    Attributes:
        tokens_per_second: tokens that were written, EOS counted.
        bleu: sacreBLEU, 0 to 100, where there are references.
        translations: what it wrote.
    """

    tokens_per_second: float
    bleu: float | None
    translations: list[str]


def quantize_file(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    mode: str = "int8",
    *,
    source: Path | None = None,
    reference: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Quantises a `.keras` file, and reports size, speed and BLEU before and after.

    Args:
        path: of a translator.
        output: the `.keras` file to write.
        mode: `"int8"`.
        source: a file of sentences to measure the speed on; nothing is measured by default.
        reference: a file of their right translations, for BLEU; none by default.
        say: told what was found, line by line.

    Raises:
        ImportError: where there are references, and sacreBLEU is missing.
        ValueError: for another mode, where the file is quantised already, and where the files of
            sentences do not fit each other.
    """
    corpus.check_apart(path, output)
    corpus.check_writable(output)
    sources, references = _sentences(source, reference)
    if references:
        evaluation.corpus_scores(references, references)  # says now what is missing
    translator = load(path)
    translator.quantized(mode).save(output)
    sizes = [Path(file).stat().st_size for file in (path, output)]
    say(f"size: {sizes[0] / 1e6:.1f} MB before, {sizes[1] / 1e6:.1f} MB after")
    if not sources:
        return
    # What is measured is what was written.
    before, after = (measure(one, sources, references) for one in (translator, load(output)))
    speeds = (before.tokens_per_second, after.tokens_per_second)
    say(f"speed: {speeds[0]:,.0f} tokens/s before, {speeds[1]:,.0f} after")
    if before.bleu is not None and after.bleu is not None:
        say(f"BLEU: {before.bleu:.2f} before, {after.bleu:.2f} after")
    same = sum(a == b for a, b in zip(before.translations, after.translations, strict=True))
    say(f"translations that are the same: {same:,} of {len(sources):,}")


def _sentences(source: Path | None, reference: Path | None) -> tuple[list[str], list[str]]:
    """What to translate, and its right translations; empty where none are given."""
    if source is None:
        if reference is not None:
            raise ValueError("`reference` needs the `source` that it is the translation of")
        return [], []
    sources = list(corpus.read_lines(source))
    if not sources:
        raise ValueError(f"{source} has no sentences to measure on")
    if reference is None:
        return sources, []
    return sources, [target for _, target in corpus.read_pairs(source, reference)]


def measure(
    translator: Translator, sources: Sequence[str], references: Sequence[str] = ()
) -> Measured:
    """Translates sentences twice: once to compile, and once for the time.

    Args:
        translator: to be measured, with its own settings of search.
        sources: the sentences.
        references: their right translations; none by default.
    """
    translator.translate(sources)
    start = time.perf_counter()
    found: list[Translation] = translator.translate(sources, details=True)
    seconds = time.perf_counter() - start
    texts = [one.text for one in found]
    return Measured(
        tokens_per_second=sum(len(one.token_ids) for one in found) / seconds,
        bleu=evaluation.corpus_scores(texts, references).bleu if references else None,
        translations=texts,
    )
