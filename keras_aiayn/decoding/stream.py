"""The compiled search of a Transformer, over batches in which sentences come and go.

A static batch waits for its last sentence: on real text four of ten steps of its rows are for
nothing. Here rows that are done are given to the next sentences as soon as a quarter of them is
free. Long sentences come first, so memory runs out at once or never, and the batch grows shorter
and higher on the way.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_aiayn.decoding import loop
from keras_aiayn.decoding.batches import Arrays, Rules, Sentence, Shape, Shapes
from keras_aiayn.decoding.compiled import compiled, takes_any_shape, to_numpy
from keras_aiayn.decoding.constraints import Tensor
from keras_aiayn.decoding.loop import Method, SearchResult, View
from keras_aiayn.decoding.steps import TransformerSteps
from keras_aiayn.special_ids import PAD


class CompiledSearch:
    """The search of a Transformer, or of several together.

    Make it once for each setting and keep it: it holds what is compiled, a program for each shape
    of a batch, or one for all where `takes_any_shape`.

    Args:
        models: a `Transformer`, or several with one vocabulary, whose probabilities are averaged.
        method: `BeamSearch` or `Sampler`.
    """

    def __init__(self, models: keras.Model | Sequence[keras.Model], method: Method):
        models = tuple(models) if isinstance(models, (list, tuple)) else (models,)
        steps = TransformerSteps(models, method.beams)

        def begin(arrays: Arrays, slots: Tensor) -> Any:
            room = ops.shape(slots)[0]
            state = steps.begin(arrays.sources, room)
            return method.start(state, arrays.max_lengths, room, arrays.constraints, arrays.seeds)

        def advance(state: Any, clock: Tensor, most_live: Tensor) -> tuple:
            clock, state = loop.advance(method, steps, clock, state, most_live)
            return state, clock, state.done, method.result(state)

        def rearrange(state: Any, view: View) -> Any:
            step_state = steps.rearrange(state.step_state, view)
            return method.rearrange(state._replace(step_state=step_state), view)

        kept = {"any_shape": True, "stays": True}
        self.begin = compiled(models, begin, **kept)
        self.advance = compiled(models, advance, consumes=True, **kept)
        self.admit = compiled((), loop.admit, consumes=True, **kept)
        self.rearrange = compiled((), rearrange, **kept)

    def __call__(self, source_ids: np.ndarray, max_lengths: np.ndarray) -> SearchResult:
        """Searches for the outputs of one batch, under no rules.

        Args:
            source_ids: (B, S).
            max_lengths: (B,), most tokens of each output; 0 for a row that only fills the batch.

        Returns:
            A `SearchResult` of numpy arrays, whose outputs have room for the largest maximum.

        Raises:
            ValueError: where there is not one maximum for each source.
        """
        sources, limits = np.asarray(source_ids, "int32"), np.asarray(max_lengths, "int32")
        if limits.shape != sources.shape[:1]:
            raise ValueError(
                "`max_lengths` must be one length for each source. "
                f"Received: max_lengths of shape {limits.shape}, source_ids of {sources.shape}"
            )
        rows, width = sources.shape
        filled = Arrays.of([], rows, width, Rules())
        return self.one_batch(filled._replace(sources=sources, max_lengths=limits))

    def one_batch(self, arrays: Arrays) -> SearchResult:
        """Searches for the outputs of sentences that come and go together."""
        rows, width = arrays.sources.shape
        longest = max(1, int(arrays.max_lengths.max(initial=0)))
        shapes = Shapes(rows * width, lambda width: longest)
        batch = Batch(self, Shape(rows, width, shapes.room(width, 0), rows))
        batch.put(list(range(rows)), [width] * rows, arrays)
        batch.advance(0)
        while not batch.done.all():
            batch.change(batch.shape._replace(room=shapes.room(width, batch.oldest)))
            batch.advance(0)
        more = ((0, 0), (0, 0), (0, longest - batch.shape.room))
        token_ids = np.pad(batch.result.token_ids, more, constant_values=PAD)
        return batch.result._replace(token_ids=token_ids)

    def stream(
        self, sentences: Sequence[Sentence], shapes: Shapes
    ) -> Iterator[tuple[int, SearchResult]]:
        """Searches for the outputs of any number of sentences.

        Args:
            sentences: to be searched for.
            shapes: which batches there are.

        Yields:
            The place of a sentence among them, and its `SearchResult` of numpy arrays without the
            axis B; in the order in which they are done.
        """
        lengths = [len(sentence.source) for sentence in sentences]
        waiting = deque(sorted(range(len(sentences)), key=lambda place: -lengths[place]))
        rules = Rules.of(sentences)
        batch: Batch | None = None
        while waiting or (batch is not None and batch.live):
            longest = max([lengths[place] for place in list(waiting)[:1]] + _longest(batch))
            if batch is None:
                batch = Batch(self, shapes.first(longest, len(waiting)))
            else:
                batch.change(
                    shapes.next(batch.shape, longest, len(batch.live), len(waiting), batch.oldest)
                )
            while waiting and len(batch.free) >= batch.shape.chunk:
                most = len(batch.free) if takes_any_shape() else batch.shape.chunk
                places = [waiting.popleft() for _ in range(min(most, len(waiting)))]
                rows = len(places) if takes_any_shape() else most
                chosen = [sentences[place] for place in places]
                arrays = Arrays.of(chosen, rows, batch.shape.width, rules)
                batch.put(places, [lengths[place] for place in places], arrays)
            batch.advance(shapes.most_live(batch.shape, len(batch.live), len(waiting)))
            yield from batch.take_results()


def _longest(batch: "Batch | None") -> list[int]:
    return [] if batch is None else [batch.lengths[row] for row in batch.live]


class Batch:
    """A batch of a compiled search, on the device, and which sentence is in each of its rows.

    Args:
        search: whose batch it is.
        shape: to begin with.

    Attributes:
        places: of the sentence of each row, whatever number it is known by; else none.
    """

    def __init__(self, search: CompiledSearch, shape: Shape):
        self.search, self.shape = search, shape
        self.state: Any = None
        self.clock = np.int32(0)
        self.places: list[int | None] = [None] * shape.rows
        self.lengths = [0] * shape.rows  # of the sources
        self.done = np.ones(shape.rows, "bool")
        self.ages = np.zeros(shape.rows, "int32")
        self.result: Any = None

    @property
    def live(self) -> list[int]:
        """The rows of sentences whose results were not taken."""
        return [row for row, place in enumerate(self.places) if place is not None]

    @property
    def free(self) -> list[int]:
        """The other rows."""
        return [row for row, place in enumerate(self.places) if place is None]

    @property
    def oldest(self) -> int:
        """Tokens that the oldest sentence that is not done has written."""
        return int(self.ages[~self.done].max(initial=0))

    def put(self, places: list[int], lengths: list[int], arrays: Arrays) -> None:
        """Gives as many free rows as the arrays have to new sentences.

        Args:
            places: of the sentences, no more than the arrays have rows.
            lengths: of their sources.
            arrays: as wide as the batch.
        """
        rows = self.free[: len(arrays.sources)]
        fresh = self.search.begin(arrays, np.arange(self.shape.room, dtype="int32"))
        if self.state is None:
            self.state = fresh
            if len(rows) < self.shape.rows:
                kept = np.arange(self.shape.rows) < len(rows)
                self._rearrange(np.where(kept, np.arange(self.shape.rows), 0), kept, self.shape)
        else:
            self.state = self.search.admit(self.state, np.array(rows, "int32"), fresh)
        for row, place, length in zip(rows, places, lengths, strict=False):
            self.places[row], self.lengths[row] = place, length
            self.done[row], self.ages[row] = False, 0

    def advance(self, most_live: int) -> None:
        """Takes steps; see `loop.advance`."""
        self.state, self.clock, done, result = self.search.advance(
            self.state, self.clock, np.int32(most_live)
        )
        # Copies: JAX will write over what it has given up.
        self.done, self.result = tree.map_structure(np.array, to_numpy((done, result)))
        self.ages = self.result.steps.copy()

    def take_results(self) -> Iterator[tuple[int, SearchResult]]:
        """The results of what is done, whose rows are free then."""
        for row, place in enumerate(self.places):
            if place is not None and self.done[row]:
                self.places[row] = None
                yield place, SearchResult(*(field[row] for field in self.result))

    def change(self, shape: Shape) -> None:
        """Goes on in another shape, with the sentences that are in it."""
        if shape == self.shape:
            return
        live = self.live
        kept = np.arange(shape.rows) < len(live)
        rows = np.array([*live, *[0] * (shape.rows - len(live))])
        self._rearrange(rows, kept, shape)
        self.places = [
            self.places[row] if keep else None for row, keep in zip(rows, kept, strict=True)
        ]
        self.lengths = [self.lengths[row] for row in rows]
        self.done, self.ages = self.done[rows] | ~kept, self.ages[rows]

    def _rearrange(self, rows: np.ndarray, kept: np.ndarray, shape: Shape) -> None:
        # The steps that anybody still remembers are the last ones.
        oldest = self.oldest
        slots = np.arange(shape.room)
        written = slots < oldest
        before = np.where(written, (int(self.clock) - oldest + slots) % self.shape.room, 0)
        columns = np.arange(shape.width, dtype="int32")
        view = View(rows.astype("int32"), kept, before.astype("int32"), written, columns)
        self.state = self.search.rearrange(self.state, view)
        self.shape, self.clock = shape, np.int32(oldest)
