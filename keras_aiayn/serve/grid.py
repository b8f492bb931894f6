"""The few shapes in which the service translates.

A backend that compiles does so once for each number of rows and each width, and takes seconds for
it, which no client is to wait for. So texts are padded to few widths, and their number to few.
"""

import dataclasses

NARROWEST = 32  # which most sentences are shorter than
STEP = 2  # from one width, or number of rows, to the next: with more, more is padded
FEW = 4  # rows: from these the next is 1, for each number takes seconds to compile


@dataclasses.dataclass(frozen=True)
class Grid:
    """Widths and numbers of rows.

    Attributes:
        tokens: of the longest text, EOS counted.
        tokens_per_batch: rows times width, at most; a wider text goes alone.
        exact: whether every shape will do, for none is compiled. A batch is as high and wide as its
            texts then, and none joins it: to make room for one costs more than it saves.
    """

    tokens: int = 1_024
    tokens_per_batch: int = 2_048
    exact: bool = False

    def width(self, tokens: int) -> int:
        """What a text of so many tokens is padded to."""
        if self.exact:
            return tokens
        width = NARROWEST
        while width < min(tokens, self.tokens):
            width *= STEP
        return min(width, self.tokens)

    def rows(self, width: int) -> int:
        """How many texts of a width are searched at a time."""
        return max(1, self.tokens_per_batch // width)

    def sizes(self, width: int) -> list[int]:
        """The numbers of rows that are compiled for a width, from 1 up."""
        sizes = [self.rows(width)]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // STEP if sizes[-1] > FEW else 1)
        return sizes[::-1]

    @property
    def widths(self) -> list[int]:
        """All that are compiled, narrow ones first."""
        if self.exact:
            return []
        widths = [self.width(1)]
        while widths[-1] < self.tokens:
            widths.append(min(widths[-1] * STEP, self.tokens))
        return widths
