"""Texts of like length, padded to few shapes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.decoding.constraints import Constraints
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.special_ids import EOS, PAD

# Of what is read in one pass. They grow by a third or a half: few shapes, and little padding.
WIDTHS = sorted({2**i for i in range(3, 18)} | {3 * 2**i for i in range(2, 16)})

NARROWEST = 16  # width, and least room, of a search, which has more to compile for each


def padded_width(length: int) -> int:
    """The width that a row of so many tokens is padded to: its own, where a shape costs nothing."""
    if takes_any_shape():
        return length
    longest = WIDTHS[-1]
    return next((width for width in WIDTHS if width >= length), -(-length // longest) * longest)


def like_length(
    sources: dict[int, list[int]], tokens_per_batch: int, max_width: int | None
) -> Iterator[tuple[list[int], int, int]]:
    """Groups sources of like length: (their places, padded width, padded rows) of each batch.

    Long ones first, so that memory runs out at once or never.
    """
    order = sorted(sources, key=lambda index: -len(sources[index]))
    start = 0
    while start < len(order):
        longest = len(sources[order[start]])
        width = padded_width(longest)
        if max_width is not None:
            width = min(width, max_width)
        rows = max(1, tokens_per_batch // width)
        indices = order[start : start + rows]
        # A rest is padded to a power of two, so that few sizes are ever compiled.
        padded = len(indices) if takes_any_shape() else 1 << (len(indices) - 1).bit_length()
        yield indices, width, min(rows, padded)
        start += rows


class Sentence(NamedTuple):
    """What is to be searched for."""

    source: list[int]  # ids, EOS included
    max_length: int  # most tokens of the output, prefix and EOS counted
    min_length: int = 0  # least
    prefix: Sequence[int] = ()  # the ids that it begins with
    suppressed: Sequence[int] = ()  # ids that it does not hold
    seed: int = 0  # of what is drawn

    @classmethod
    def asked_for(
        cls,
        source: list[int],
        asked: SearchSettings,
        longest: int | None,
        prefix: Sequence[int] = (),
        suppressed: Sequence[int] = (),
        seed: int = 0,
    ) -> "Sentence":
        """With lengths by the settings; what is longer than learned positions is cut.

        A source is cut before its EOS.
        """
        if longest is not None and len(source) > longest:
            source = [*source[: longest - 1], EOS]
        most = asked.max_output(len(source)) + len(prefix)
        least = asked.min_output(len(source))
        return cls(
            source,
            most if longest is None else min(most, longest),
            least + len(prefix) if least else 0,
            prefix,
            suppressed,
            seed,
        )


class Arrays(NamedTuple):
    """Sentences as arrays; what none of them has is of width 0."""

    sources: np.ndarray  # (B, S) int32
    max_lengths: np.ndarray  # (B,) int32; 0 for a row that only fills the batch
    constraints: Constraints
    seeds: np.ndarray  # (B,) int32

    @classmethod
    def of(cls, sentences: Sequence[Sentence], rows: int, width: int, rules: "Rules") -> "Arrays":
        """The first of `rows` rows are the sentences, the others fill up."""
        # A pad never comes anyway, so it may be suppressed.
        sources, prefixes, suppressed = (
            np.full((rows, size), PAD, "int32") for size in (width, rules.prefix, rules.suppressed)
        )
        min_lengths = np.zeros((rows, rules.min_length), "int32")
        max_lengths, seeds = np.zeros((2, rows), "int32")
        for row, sentence in enumerate(sentences):
            sources[row, : len(sentence.source)] = sentence.source
            max_lengths[row] = sentence.max_length
            prefixes[row, : len(sentence.prefix)] = sentence.prefix
            min_lengths[row] = sentence.min_length
            suppressed[row, : len(sentence.suppressed)] = sentence.suppressed
            seeds[row] = sentence.seed
        return cls(sources, max_lengths, Constraints(prefixes, min_lengths, suppressed), seeds)


class Rules(NamedTuple):
    """How much of each rule the sentences of a stream have, so that their arrays are alike."""

    prefix: int = 0
    min_length: int = 0
    suppressed: int = 0

    @classmethod
    def of(cls, sentences: Sequence[Sentence]) -> "Rules":
        """The widest of each."""
        longest = max((len(sentence.prefix) for sentence in sentences), default=0)
        return cls(
            -(-longest // 8) * 8,  # few widths, few compilations
            int(any(sentence.min_length for sentence in sentences)),
            max((len(sentence.suppressed) for sentence in sentences), default=0),
        )


class Shape(NamedTuple):
    """Of a batch."""

    rows: int  # B
    width: int  # S
    room: int  # R
    chunk: int  # rows that must be free before any is given to a new sentence


class Shapes:
    """Which batches there are.

    Where a new shape is compiled they are few: widths are powers of two, with two rooms for each,
    one that most outputs fit in, and one for all.

    Args:
        tokens_per_batch: rows times width, at most.
        capacity: the longest output of any source of a width.
        max_width: of a source.
        max_rows: rows, at most.
    """

    def __init__(
        self,
        tokens_per_batch: int,
        capacity: Callable[[int], int],
        max_width: int | None = None,
        max_rows: int | None = None,
    ):
        self.tokens_per_batch, self.capacity = tokens_per_batch, capacity
        self.max_width, self.max_rows = max_width, max_rows

    def width(self, length: int) -> int:
        """What sources of a length are padded to."""
        width = length if takes_any_shape() else max(NARROWEST, 1 << (length - 1).bit_length())
        return width if self.max_width is None else min(width, self.max_width)

    def first(self, longest: int, count: int) -> Shape:
        """For `count` sentences, the longest of which has so many tokens."""
        width = self.width(longest)
        rows = max(1, self.tokens_per_batch // width)
        if self.max_rows is not None:
            rows = min(rows, self.max_rows)
        if takes_any_shape():
            rows = min(rows, count)
        elif count <= rows:
            rows = chunk = min(rows, 1 << (count - 1).bit_length())
            return Shape(rows, width, self.room(width, 0), chunk)
        elif rows > 4:
            rows -= rows % 4
        return Shape(rows, width, self.room(width, 0), max(1, rows // 4))

    def room(self, width: int, oldest: int) -> int:
        """Room for sentences that have written up to `oldest` tokens, and for more."""
        capacity = self.capacity(width)
        if takes_any_shape():
            return min(capacity, max(NARROWEST, oldest + oldest // 2))
        usual = width + width // 2
        return usual if oldest < usual < capacity else capacity

    def next(self, now: Shape, longest: int, live: int, waiting: int, oldest: int) -> Shape:
        """The shape to go on with.

        Args:
            now: the present shape.
            longest: tokens of the longest source that is in the batch, or comes next.
            live: sentences in the batch.
            waiting: sentences that are not yet.
            oldest: tokens that have been written at most.
        """
        best = self.first(longest, live + waiting)
        if takes_any_shape():
            narrower = 3 * best.width <= 2 * now.width or 2 * best.rows >= 3 * now.rows
            change = 2 * best.rows <= now.rows or (waiting and narrower)
        else:
            change = waiting and best.width != now.width
        if change and best.rows >= live:
            few = max(
                1, best.rows // 4
            )  # there are some already, so that others do not come at once
            return best._replace(room=self.room(best.width, oldest), chunk=few)
        if oldest >= now.room:
            return now._replace(room=self.room(now.width, oldest))
        return now

    def most_live(self, now: Shape, live: int, waiting: int) -> int:
        """How many sentences may be left when others are to come, or the batch is to be cut."""
        if waiting:
            return now.rows - now.chunk
        return live // 2 if takes_any_shape() and live > now.chunk else 0


def shapes_for(
    asked: SearchSettings,
    tokens_per_batch: int,
    longest: int | None,
    prefix: int = 0,
    batch_size: int | None = None,
) -> Shapes:
    """The shapes of searches with some settings.

    Args:
        asked: the settings.
        tokens_per_batch: padded source tokens, at most.
        longest: positions of the models, where they are learned.
        prefix: tokens that an output may begin with.
        batch_size: sentences, at most.
    """

    def capacity(width: int) -> int:
        most = asked.max_output(width) + prefix
        return most if longest is None else min(most, longest)

    return Shapes(tokens_per_batch, capacity, longest, batch_size)


def seed_of(seed: int, number: int) -> int:
    """A seed of a text's own, in 32 bits."""
    return int(np.uint32((seed * 1_000_003 + number) & 0xFFFFFFFF).view("int32"))
