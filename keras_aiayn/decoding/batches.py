"""Texts of like length, padded to few shapes."""

from collections.abc import Iterator

import numpy as np

from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.special_ids import EOS, PAD

# Widths of padded sources grow by a third or a half: few shapes to compile, little padding.
WIDTHS = sorted({2**i for i in range(3, 18)} | {3 * 2**i for i in range(2, 16)})


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


class SourceBatch:
    """The arrays of some texts that are searched together.

    Attributes:
        sources: (B, S) int32.
        limits: (B,) most tokens of each output; 0 for a row that only fills the batch.
        least: (B,) least tokens.
        prefixes: (B, P).
        seeds: (B,).
    """

    def __init__(self, rows: int, width: int, longest_prefix: int):
        prefix_width = -(-longest_prefix // 8) * 8  # few widths, few compilations
        self.sources = np.full((rows, width), PAD, "int32")
        self.prefixes = np.full((rows, prefix_width), PAD, "int32")
        self.limits, self.least, self.seeds = np.zeros((3, rows), "int32")

    def put(
        self,
        row: int,
        source: list[int],
        prefix: list[int],
        asked: SearchSettings,
        longest: int | None,
    ) -> None:
        """Fills a row; a source that is wider than the batch is cut before its EOS."""
        width = self.sources.shape[1]
        if len(source) > width:
            source = [*source[: width - 1], EOS]
        self.sources[row, : len(source)] = source
        self.prefixes[row, : len(prefix)] = prefix
        limit = asked.max_output(len(source)) + len(prefix)
        self.limits[row] = limit if longest is None else min(limit, longest)
        least = asked.min_output(len(source))
        self.least[row] = least + len(prefix) if least else 0

    def capacity(self, asked: SearchSettings, longest: int | None) -> int:
        """Room for the longest output of any batch of this shape: one compilation for all."""
        rooms = asked.max_output(self.sources.shape[1]) + self.prefixes.shape[1]
        return rooms if longest is None else min(rooms, longest)


def seed_of(seed: int, number: int) -> int:
    """A seed of a text's own, in 32 bits."""
    return int(np.uint32((seed * 1_000_003 + number) & 0xFFFFFFFF).view("int32"))
