"""A search that texts join while others are under way.

It goes on in turns. In each, new texts get the rows that are free, and steps are taken until a
quarter of what is searched for is done. A text waits neither for those that are longer nor, where
there is room, for those that came before it.

Where a new shape costs nothing a batch is as high and wide as its texts. Else it has those of a
`Grid`, all of which are compiled before the first request. What is rarely asked for, n-best and
alignments, is compiled when it is.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from keras_aiayn.decoding.batches import Arrays, Rules, Sentence, Shape, Shapes, shapes_for
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.decoding.stream import Batch, CompiledSearch
from keras_aiayn.serve.grid import Grid
from keras_aiayn.translator import Translation, Translator


@dataclasses.dataclass(frozen=True)
class Asked:
    """The settings of a text; equal ones are translated together."""

    n_best: int = 1
    alignments: bool = False


class Live:
    """The search of a translator.

    Args:
        translator: that translates.
        grid: the shapes.
    """

    def __init__(self, translator: Translator, grid: Grid):
        self._translator, self._grid = translator, grid
        self._texts: dict[int, tuple[Sentence, bool]] = {}  # and whether the source was cut
        self._batch: Batch | None = None
        self._at = (1, 1)  # where in the grid the batch is
        self._search_for(Asked())

    def turn(self, new: dict[int, str], asked: Asked) -> dict[int, Translation]:
        """Lets texts join, and takes steps until some are done.

        Args:
            new: texts, by numbers of the caller's. With those under way they are at most
                `grid.rows` of the widest one's `grid.width`.
            asked: of them; the same as long as any text is under way.

        Returns:
            What `Translator.translate` gives with a beam of n-best at least, of each text that is
            done. After an error nothing is under way any more.
        """
        try:
            if self._batch is None:
                self._search_for(asked)
            found = self._join(new)
            if self._batch is not None:
                found |= self._advance(self._batch)
            return found
        except BaseException:
            self._batch, self._texts = None, {}
            raise

    @property
    def widths(self) -> list[int]:
        """Those of the grid that are compiled."""
        longest = self._translator.model.max_length or self._grid.tokens
        return [width for width in self._grid.widths if width <= self._grid.width(longest)]

    def compile_width(self, width: int) -> None:
        """Compiles all that `turn` runs where it is asked for nothing rare; narrow ones first."""
        sizes = self._grid.sizes(width)
        for number, rows in enumerate(sizes):
            batch = Batch(self._search, self._shape(rows, width))
            for smaller in (rows, *sizes[:number]):  # nobody is there: all rows stay free
                batch.put([], [], Arrays.of([], smaller, batch.shape.width, Rules()))
                batch.advance(0)
            for other in (*sizes[number - 1 : number], rows):
                batch.change(self._shape(other, width))
        place = self.widths.index(width)
        for narrower in self.widths[:place][-1:]:  # `batch` has all rows of this width
            batch.change(self._shape(_fitting(self._grid.sizes(narrower), rows), narrower))
            batch.change(self._shape(rows, width))

    def _search_for(self, asked: Asked) -> None:
        self._asked = asked
        self._settings: SearchSettings = self._translator.search_settings(
            n_best=asked.n_best, beam_size=max(asked.n_best, self._translator.beam_size)
        )
        self._search: CompiledSearch = self._translator._search(
            (self._translator.model,), self._settings
        )
        longest = self._translator.model.max_length
        self._shapes: Shapes = shapes_for(self._settings, self._grid.tokens_per_batch, longest)

    def _join(self, new: dict[int, str]) -> dict[int, Translation]:
        """Gives rows to texts: what is found already, for those that are blank."""
        numbers = list(new)
        encoded = self._translator._encode(list(new.values()))
        longest = self._translator.model.max_length
        for index, ids in encoded.items():
            sentence = Sentence.asked_for(ids, self._settings, longest)
            self._texts[numbers[index]] = sentence, len(ids) > len(sentence.source)
        joining = [numbers[index] for index in encoded]
        if self._grid.exact:
            self._join_exactly(joining)
        elif joining or self._batch is not None:
            self._join_in_few_shapes(joining)
        return {number: Translation("") for number in numbers if number not in self._texts}

    def _join_exactly(self, joining: list[int]) -> None:
        live = [] if self._batch is None else self._batch.live
        count = len(live) + len(joining)
        if not joining and (self._batch is None or 2 * count > self._batch.shape.rows):
            return  # to cut it costs something too
        width = max(self._length(number) for number in self._texts)
        if self._batch is None:
            self._batch = Batch(self._search, self._shape(count, width))
        else:
            self._batch.change(self._shape(count, width, self._batch.oldest))
        if joining:
            self._put(self._batch, joining, len(joining))

    def _join_in_few_shapes(self, joining: list[int]) -> None:
        width = self._grid.width(max(self._length(number) for number in self._texts))
        sizes = self._grid.sizes(width)
        rows = _fitting(sizes, len(self._texts))
        if self._batch is None:
            self._batch = Batch(self._search, self._shape(rows, width))
        else:
            for shape in self._way(*self._at, rows, width):
                self._batch.change(self._shape(*shape))
        self._at = rows, width
        while joining:
            free = len(self._batch.free)
            most = max(size for size in sizes if size <= free)
            rows = min(_fitting(sizes, len(joining)), most)
            self._put(self._batch, joining[:rows], rows)
            joining = joining[rows:]

    def _way(self, rows: int, width: int, to_rows: int, to_width: int) -> Iterator[tuple[int, int]]:
        """Rows and width, step by step: not all ways are compiled.

        From width to width it is with all the rows of the wider one.
        """
        widths = self._grid.widths
        while width != to_width:
            now = widths.index(width)
            other = widths[now + 1 if to_width > width else now - 1]
            gate = self._grid.rows(max(width, other))
            here, there = (_fitting(self._grid.sizes(one), gate) for one in (width, other))
            yield from self._way(rows, width, here, width)
            rows, width = there, other
            yield rows, width
        sizes = self._grid.sizes(width)
        now, to = sizes.index(rows), sizes.index(to_rows)
        for place in range(now + 1, to + 1) if to > now else range(now - 1, to - 1, -1):
            yield sizes[place], width

    def _length(self, number: int) -> int:
        return len(self._texts[number][0].source)

    def _shape(self, rows: int, width: int, oldest: int = 0) -> Shape:
        """With room for all that may come, where each room is compiled."""
        longest = self._translator.model.max_length
        width = width if longest is None else min(width, longest)
        exact = self._grid.exact
        room = self._shapes.room(width, oldest) if exact else self._shapes.capacity(width)
        return Shape(rows, width, room, rows)

    def _put(self, batch: Batch, numbers: Sequence[int], rows: int) -> None:
        sentences = [self._texts[number][0] for number in numbers]
        arrays = Arrays.of(sentences, rows, batch.shape.width, Rules())
        batch.put(list(numbers), [len(one.source) for one in sentences], arrays)

    def _advance(self, batch: Batch) -> dict[int, Translation]:
        """What is done after some steps more."""
        if batch.oldest >= batch.shape.room:  # which is where shapes are exact
            batch.change(self._shape(batch.shape.rows, batch.shape.width, batch.oldest))
        live = len(batch.live)
        batch.advance(live - max(1, live // 4))
        done = dict(batch.take_results())
        if not batch.live:
            self._batch = None
        texts = [self._texts.pop(number) for number in done]
        translations = [
            self._translator._translation(result, cut)
            for result, (_, cut) in zip(done.values(), texts, strict=True)
        ]
        if self._asked.alignments:
            sources = {place: sentence.source for place, (sentence, _) in enumerate(texts)}
            self._translator._align(translations, sources, self._grid.tokens_per_batch)
        return dict(zip(done, translations, strict=True))


def _fitting(sizes: list[int], count: int) -> int:
    """The least number of rows in which there is room for so many."""
    return next(size for size in sizes if size >= count)


@functools.lru_cache(maxsize=1)
def live(translator: Translator, grid: Grid) -> Live:
    """The one search of a translator in this process."""
    return Live(translator, grid)
