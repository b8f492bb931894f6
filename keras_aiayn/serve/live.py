"""A search that texts join while others are under way.

It goes on in turns. In each, new texts get the rows that are free, and steps are taken until a
quarter of what is searched for is done. A text waits neither for those that are longer nor, where
there is room, for those that came before it.

Where a new shape costs nothing a batch is as high and wide as its texts. Else it has the shapes of
a `Grid`, all of which are compiled before the first request; what is rarely asked for, n-best and
alignments, is compiled when it is.
"""

import dataclasses
import functools
from collections.abc import Sequence

from keras_aiayn.decoding.batches import Arrays, Rules, Sentence, Shape, Shapes, shapes_for
from keras_aiayn.decoding.compiled import takes_any_shape
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
        self._search_for(Asked())

    def turn(self, new: dict[int, str], asked: Asked) -> dict[int, Translation]:
        """Lets texts join, and takes steps until some are done.

        Args:
            new: texts, by numbers of the caller's. With those under way they are at most
                `grid.rows` of `grid.width`, which is the same for all.
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
        if takes_any_shape():
            return []
        longest = self._translator.model.max_length or self._grid.tokens
        return [width for width in self._grid.widths if width <= self._grid.width(longest)]

    def compile_width(self, width: int) -> None:
        """Compiles all that `turn` runs where it is asked for nothing rare."""
        sizes = self._grid.sizes(width)
        width = self._width(width)
        for number, rows in enumerate(sizes):
            batch = Batch(self._search, self._shape(rows, width, 0))
            for smaller in (rows, *sizes[:number]):  # nobody is there: all rows stay free
                batch.put([], [], Arrays.of([], smaller, width, Rules()))
                batch.advance(0)
            for other in (*sizes[number - 1 : number], rows):
                batch.change(batch.shape._replace(rows=other))

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
        if takes_any_shape():
            self._join_exactly(joining)
        else:
            self._join_in_few_shapes(joining)
        return {number: Translation("") for number in numbers if number not in self._texts}

    def _join_exactly(self, joining: list[int]) -> None:
        live = [] if self._batch is None else self._batch.live
        count = len(live) + len(joining)
        if not joining and (self._batch is None or 2 * count > self._batch.shape.rows):
            return  # to cut it costs something too
        lengths = [len(self._texts[number][0].source) for number in joining]
        width = max(lengths, default=0)
        if self._batch is None:
            self._batch = Batch(self._search, self._shape(count, width, 0))
        else:
            width = max(width, self._batch.shape.width)
            self._batch.change(self._shape(count, width, self._batch.oldest))
        if joining:
            self._put(self._batch, joining, len(joining))

    def _join_in_few_shapes(self, joining: list[int]) -> None:
        live = 0 if self._batch is None else len(self._batch.live)
        if self._batch is None:
            if not joining:
                return
            # Those that joined a search are of one width of the grid.
            width = self._grid.width(len(self._texts[joining[0]][0].source))
            self._sizes = self._grid.sizes(width)
            rows = self._fitting(len(joining))
            self._batch = Batch(self._search, self._shape(rows, self._width(width), 0))
        batch, goal = self._batch, self._fitting(live + len(joining))
        while batch.shape.rows != goal:  # from size to size: not all ways are compiled
            now = self._sizes.index(batch.shape.rows)
            rows = self._sizes[now + 1 if goal > batch.shape.rows else now - 1]
            batch.change(batch.shape._replace(rows=rows))
        while joining:
            free = len(batch.free)
            rows = min(self._fitting(len(joining)), max(s for s in self._sizes if s <= free))
            self._put(batch, joining[:rows], rows)
            joining = joining[rows:]

    def _fitting(self, count: int) -> int:
        """The least number of rows in which there is room for so many texts."""
        return next(size for size in self._sizes if size >= count)

    def _width(self, width: int) -> int:
        longest = self._translator.model.max_length
        return width if longest is None else min(width, longest)

    def _shape(self, rows: int, width: int, oldest: int) -> Shape:
        """With room for all that may come, where each room is compiled."""
        any_shape = takes_any_shape()
        room = self._shapes.room(width, oldest) if any_shape else self._shapes.capacity(width)
        return Shape(rows, width, room, rows)

    def _put(self, batch: Batch, numbers: Sequence[int], rows: int) -> None:
        sentences = [self._texts[number][0] for number in numbers]
        arrays = Arrays.of(sentences, rows, batch.shape.width, Rules())
        batch.put(list(numbers), [len(one.source) for one in sentences], arrays)

    def _advance(self, batch: Batch) -> dict[int, Translation]:
        """What is done after some steps more."""
        if batch.oldest >= batch.shape.room:
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


@functools.lru_cache(maxsize=1)
def live(translator: Translator, grid: Grid) -> Live:
    """The one search of a translator in this process."""
    return Live(translator, grid)
