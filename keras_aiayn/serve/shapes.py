"""The few shapes in which the service translates, all of them compiled before the first request.

A backend that compiles does so once for each number of rows and each width, and takes seconds for
it, which no client is to wait for. Here a batch has one of few numbers of rows, its sentences come
and go together, and no width is above the longest text that is taken. What is rarely asked for,
n-best and alignments, is compiled when it is.
"""

from collections.abc import Iterator

from keras_aiayn.decoding.batches import Shape, Shapes, shapes_for
from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.translator import Translation, Translator

STEP = 4  # from one number of rows to the next: fewer are compiled sooner, and more are fuller

RowsAndWidth = tuple[int, int]


def shapes(translator: Translator, tokens: int, tokens_per_batch: int) -> list[RowsAndWidth]:
    """All shapes of texts of at most so many tokens; none where a new one costs nothing."""
    if takes_any_shape():
        return []
    every = _shapes(translator, tokens_per_batch)
    widths = sorted({every.width(length) for length in range(1, tokens + 1)})
    return [(rows, width) for width in widths for rows in _row_sizes(width, tokens_per_batch)]


def compile_shape(translator: Translator, shape: RowsAndWidth) -> None:
    """Compiles what `translate` runs in a shape: a search whose rows are done from the start."""
    rows, width = shape
    every = _shapes(translator, rows * width)
    search = translator._search((translator.model,), translator.search_settings())
    search.warm_up(Shape(rows, width, every.room(width, 0), rows), every)


def translate(
    translator: Translator, texts: list[str], n_best: int, alignments: bool, tokens_per_batch: int
) -> list[Translation]:
    """What `Translator.translate` gives, with a beam of n-best at least, in few shapes."""
    results = [Translation("")] * len(texts)
    for indices, rows in _groups(translator, texts, tokens_per_batch):
        group = [texts[index] for index in indices]
        found = translator.translate(
            group + group[-1:] * (rows - len(group)),
            details=True,
            n_best=n_best,
            beam_size=max(n_best, translator.beam_size),
            alignments=alignments,
            tokens_per_batch=tokens_per_batch,
        )
        for index, translation in zip(indices, found, strict=False):
            results[index] = translation
    return results


def _groups(
    translator: Translator, texts: list[str], tokens_per_batch: int
) -> Iterator[tuple[list[int], int]]:
    """The places of the texts that are searched together, and how many there are to be."""
    real = [index for index, text in enumerate(texts) if text.strip()]  # the others stay empty
    if takes_any_shape():
        yield real, len(real)
        return
    encoded = translator.source_tokenizer.encode([texts[index] for index in real])
    lengths = {i: len(ids) + 1 for i, ids in zip(real, encoded, strict=True) if ids}  # with EOS
    order = sorted(lengths, key=lambda index: -lengths[index])
    every = _shapes(translator, tokens_per_batch)
    while order:
        sizes = _row_sizes(every.width(lengths[order[0]]), tokens_per_batch)
        indices, order = order[: sizes[-1]], order[sizes[-1] :]
        yield indices, next(rows for rows in sizes if rows >= len(indices))


def _shapes(translator: Translator, tokens_per_batch: int) -> Shapes:
    longest = translator.model.max_length
    return shapes_for(translator.search_settings(), tokens_per_batch, longest)


def _row_sizes(width: int, tokens_per_batch: int) -> list[int]:
    """The numbers of rows of a width: powers, and as many as are searched at a time."""
    full = max(1, tokens_per_batch // width)
    sizes = []
    rows = 1
    while rows < full:
        sizes.append(rows)
        rows *= STEP
    return [*sizes, full]
