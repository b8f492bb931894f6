"""The batch plan, and the tf.data pipeline over it.

A plan is a pure function of the lengths of a corpus, a token budget, a seed and an epoch. It says
which pairs make up each batch, and in what shape, before anything is read. So a place in an epoch
is one integer, to resume takes no time, and the number of batches and the real target tokens of
each are known beforehand.

A *shape* is (rows, source width, target width). Few shapes mean few compilations, many mean little
padding. The widths are chosen by dynamic programming over the histogram of lengths, once for all
epochs. Then the pairs are laid out from the widest shape to the narrowest, and where the last
batch of a shape has room left, pairs of the next narrower one fill it: only one batch of an epoch
holds filler rows, which are all PAD.

Axis letters: B rows of a batch, S source width, T target width.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np

from keras_aiayn.special_ids import BOS, EOS, PAD

Shape = tuple[int, int, int]

# The activations of a layer grow with the tokens, those of its attention with tokens x width. In
# the paper's models the two are equal at about this width: it decides which shape is the largest.
_ATTENTION_EQUALS_REST = 512
# Batches that lie ready. A pipeline is far faster than what takes from it, so a few are enough.
PREFETCHED = 8


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """One epoch of global batches, each of a static shape; `len(plan)` is their number.

    A global batch is what one update learns from, over all replicas and accumulated micro-batches.

    Attributes:
        shapes: The shapes of the run, the widest first: (rows, source width, target width).
        epoch: The epoch.
    """

    shapes: list[Shape]
    epoch: int
    _order: np.ndarray = dataclasses.field(repr=False)  # all pairs, batch after batch
    _starts: np.ndarray = dataclasses.field(repr=False)  # where in `_order` each batch begins
    _stops: np.ndarray = dataclasses.field(repr=False)
    _shape_ids: np.ndarray = dataclasses.field(repr=False)
    _source_tokens: np.ndarray = dataclasses.field(repr=False)
    _target_tokens: np.ndarray = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self._starts)

    def shape(self, batch: int) -> Shape:
        """(rows, source width, target width) of a global batch."""
        return self.shapes[self._shape_ids[batch]]

    def indices(self, batch: int) -> np.ndarray:
        """The pairs of a global batch: as many as it has rows, or fewer (the rest is filler)."""
        return self._order[self._starts[batch] : self._stops[batch]]

    def source_tokens(self, batch: int) -> int:
        """The real source tokens of a global batch, EOS included."""
        return int(self._source_tokens[batch])

    def target_tokens(self, batch: int) -> int:
        """The real target tokens of a global batch, EOS included: what its loss is divided by."""
        return int(self._target_tokens[batch])

    def real_share(self, parts: int = 1) -> float:
        """The share of tokens that are not padding, both sides and filler rows counted.

        Args:
            parts: into which every batch is dealt, each with as many rows as the others.
        """
        rows, *widths = np.array(self.shapes).T
        padded = -(-rows // parts) * parts * sum(widths)
        real = self._source_tokens.sum() + self._target_tokens.sum()
        return int(real) / int(padded[self._shape_ids].sum())


def plan(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    tokens_per_batch: int,
    seed: int,
    epoch: int,
    max_shapes: int = 8,
    corpora: Sequence[tuple[int, float]] = (),
) -> BatchPlan:
    """Plans the batches of an epoch: every pair once, in an order of that epoch alone.

    Where corpora have weights, a weight of 3 takes each pair of that corpus three times an epoch,
    and one of 0.5 takes half of them, others each time.

    All batches are shuffled, but for one of the largest shape, which comes first: if the memory
    does not suffice, it runs out at the first step.

    Args:
        source_lengths: The length of each source, EOS included.
        target_lengths: The length of each target, EOS included.
        tokens_per_batch: The budget of a global batch: its rows times its longer padded side.
        seed: The seed of the run.
        epoch: The epoch, from 0.
        max_shapes: The largest number of shapes.
        corpora: (pairs, weight) of each corpus, in the order of the lengths; none for one corpus
            of weight 1.

    Returns:
        A `BatchPlan`.

    Raises:
        ValueError: If there are no pairs, or a pair is longer than the budget allows.
    """
    source_lengths, target_lengths = np.asarray(source_lengths), np.asarray(target_lengths)
    corpora = corpora or [(len(source_lengths), 1.0)]
    _check(source_lengths, target_lengths, tokens_per_batch, max_shapes)
    _check_corpora(corpora, len(source_lengths))
    longer = np.maximum(source_lengths, target_lengths)
    edges, widths = _bucket_edges(source_lengths, target_lengths, longer, corpora, max_shapes)
    pairs = sum(_share(*corpus) for corpus in corpora)
    rows = np.minimum(tokens_per_batch // edges, pairs)  # a small corpus needs no more

    # Shuffle, then sort by shape without disturbing the order within each.
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(_drawn(corpora, generator))
    bucket_of_length = np.searchsorted(-edges, -np.arange(edges[0] + 1), side="right") - 1
    bucket = bucket_of_length.astype("uint16")[longer]
    bucket = bucket[order]
    order = order[np.argsort(bucket, kind="stable")]

    ends = np.cumsum(np.bincount(bucket, minlength=len(edges)))
    batches = _lay_out(ends, rows)
    rows, widths, batches = (part[batches > 0] for part in (rows, widths, batches))
    shape_ids = np.repeat(np.arange(len(rows)), batches)
    stops = np.minimum(np.cumsum(rows[shape_ids]), pairs)
    starts = np.concatenate([[0], stops[:-1]])
    source_tokens, target_tokens = (
        np.add.reduceat(lengths[order], starts, dtype="int64")
        for lengths in (source_lengths, target_lengths)
    )

    memory = rows * widths.sum(axis=1) * (_ATTENTION_EQUALS_REST + widths.max(axis=1))
    sequence = _largest_first(generator.permutation(len(starts)), shape_ids, memory)
    return BatchPlan(
        shapes=[(int(r), int(s), int(t)) for r, (s, t) in zip(rows, widths, strict=True)],
        epoch=epoch,
        _order=order,
        _starts=starts[sequence],
        _stops=stops[sequence],
        _shape_ids=shape_ids[sequence],
        _source_tokens=source_tokens[sequence],
        _target_tokens=target_tokens[sequence],
    )


def _share(pairs: int, weight: float) -> int:
    """How many times an epoch takes a pair of a corpus."""
    return round(pairs * weight)


def _drawn(corpora: Sequence[tuple[int, float]], generator: np.random.Generator) -> np.ndarray:
    """The pairs of an epoch: each corpus as many times over as its weight says, and a part."""
    parts, first = [], 0
    for pairs, weight in corpora:
        own = np.arange(first, first + pairs, dtype="uint32")
        copies, rest = divmod(_share(pairs, weight), pairs) if pairs else (0, 0)
        parts += [own] * copies
        if rest:
            parts.append(generator.choice(own, rest, replace=False))
        first += pairs
    return np.concatenate(parts)


def _bucket_edges(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    longer: np.ndarray,
    corpora: Sequence[tuple[int, float]],
    max_shapes: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The longest pair of each bucket, descending, and its widths (bucket, side).

    A pair belongs to the narrowest bucket whose edge its longer side does not exceed. The widths
    of a bucket hold all pairs of narrower buckets too, so that those can fill its last batch.
    """
    counts, first = np.zeros(int(longer.max()) + 1), 0
    for pairs, weight in corpora:
        counts += weight * np.bincount(longer[first : first + pairs], minlength=len(counts))
        first += pairs
    widest = np.zeros((2, len(counts)), "int64")
    np.maximum.at(widest[0], longer, source_lengths)
    np.maximum.at(widest[1], longer, target_lengths)
    widest = np.maximum.accumulate(widest, axis=1)
    lengths = np.flatnonzero(counts)
    edges = lengths[_cheapest_cuts(counts[lengths], widest[:, lengths].sum(axis=0), max_shapes)]
    return edges, widest[:, edges].T


def _cheapest_cuts(counts: np.ndarray, costs: np.ndarray, max_parts: int) -> list[int]:
    """Cuts a row of items into parts, each item at the cost of the last one of its part.

    best[k, j] is the least cost of the first j items in k parts: that of the first i in k - 1
    parts and the items i to j - 1 in one, for the best i.

    Returns:
        The last item of each part, the parts from right to left.
    """
    items, parts = len(counts), min(max_parts, len(counts))
    before = np.concatenate([[0], np.cumsum(counts)])
    best = np.full((parts + 1, items + 1), np.inf)
    best[0, 0] = 0
    cut = np.zeros((parts + 1, items + 1), "int64")
    for j in range(1, items + 1):
        last_part = (before[j] - before[:j]) * costs[j - 1]
        total = best[:-1, :j] + last_part
        cut[1:, j] = total.argmin(axis=1)
        best[1:, j] = total.min(axis=1)
    chosen, j = [], items
    for k in range(parts, 0, -1):
        chosen.append(j - 1)
        j = cut[k, j]
    return chosen


def _lay_out(ends: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The number of batches of each bucket, when its last one is filled from the next buckets."""
    batches = np.zeros_like(rows)
    placed = 0
    for bucket, end in enumerate(ends):
        batches[bucket] = max(0, -(-(end - placed) // rows[bucket]))
        placed += batches[bucket] * rows[bucket]
    return batches


def _largest_first(sequence: np.ndarray, shape_ids: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Moves a batch of the shape that takes the most memory to the front."""
    place = int((shape_ids[sequence] == memory.argmax()).argmax())
    return np.concatenate([sequence[[place]], np.delete(sequence, place)])


def _check_corpora(corpora: Sequence[tuple[int, float]], pairs: int) -> None:
    if sum(size for size, _ in corpora) != pairs:
        raise ValueError(
            f"`corpora` must hold all {pairs} pairs. Received: {[size for size, _ in corpora]}"
        )
    weights = [weight for _, weight in corpora]
    if min(weights) <= 0:
        raise ValueError(f"the weight of a corpus must be positive. Received: {weights}")
    if not sum(_share(*corpus) for corpus in corpora):
        raise ValueError(f"an epoch of such weights holds no pair. Received: {list(corpora)}")


def _check(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    tokens_per_batch: int,
    max_shapes: int,
) -> None:
    if max_shapes < 1:
        raise ValueError(f"`max_shapes` must be at least 1. Received: {max_shapes}")
    if source_lengths.shape != target_lengths.shape or source_lengths.ndim != 1:
        raise ValueError(
            "`source_lengths` and `target_lengths` must be vectors of one length. "
            f"Received: shapes {source_lengths.shape} and {target_lengths.shape}"
        )
    if not len(source_lengths):
        raise ValueError("there are no pairs to plan batches of")
    shortest = min(source_lengths.min(), target_lengths.min())
    if shortest < 1:
        raise ValueError(f"lengths count EOS, so the least is 1. Received: {shortest}")
    longest = max(source_lengths.max(), target_lengths.max())
    if longest > tokens_per_batch:
        raise ValueError(
            f"`tokens_per_batch` must be at least {longest}, the tokens of the longest sentence: "
            "raise it, or prepare the corpus with a smaller `max_length`. "
            f"Received: {tokens_per_batch}"
        )


class Tokens(Protocol):
    """A tokenised corpus, such as `prepared.Split`: flat tokens, pair i at [offsets[i], [i+1])."""

    source_tokens: np.ndarray
    source_offsets: np.ndarray
    target_tokens: np.ndarray
    target_offsets: np.ndarray


def gather(
    split: Tokens, indices: np.ndarray, rows: int, source_width: int, target_width: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Reads pairs into one batch: the encoder's ids, the decoder's, and the targets.

    The source is pieces + EOS. The decoder reads BOS + pieces and predicts pieces + EOS: at
    every position the next token.

    Args:
        split: The tokenised corpus.
        indices: The pairs to read, at most `rows`; the rows after them are all PAD.
        rows: B.
        source_width: S.
        target_width: T.

    Returns:
        (`{"encoder_token_ids": (B, S), "decoder_token_ids": (B, T)}`, targets (B, T)), int32.
    """
    indices = np.asarray(indices)
    sources = np.full((rows, source_width), PAD, "int32")
    decoder = np.full((rows, target_width), PAD, "int32")
    targets = np.full((rows, target_width), PAD, "int32")
    real = slice(len(indices))
    sources[real] = _rows(split.source_tokens, split.source_offsets, indices, source_width)
    targets[real] = _rows(split.target_tokens, split.target_offsets, indices, target_width)
    decoder[real, 1:] = np.where(targets[real, :-1] == EOS, PAD, targets[real, :-1])
    decoder[real, 0] = BOS
    return {"encoder_token_ids": sources, "decoder_token_ids": decoder}, targets


def _rows(tokens: np.ndarray, offsets: np.ndarray, indices: np.ndarray, width: int) -> np.ndarray:
    """Pieces + EOS + PAD of some sentences, (sentences, width)."""
    ends = offsets[indices + 1][:, None]
    positions = offsets[indices][:, None] + np.arange(width)
    pieces = tokens[np.minimum(positions, len(tokens) - 1)]
    return np.where(positions < ends, pieces, np.where(positions == ends, EOS, PAD))


def dataset(
    split: Tokens,
    plan: BatchPlan,
    *,
    start: int = 0,
    stop: int | None = None,
    accumulation: int = 1,
    replicas: int = 1,
    parts: Sequence[int] | None = None,
) -> Any:
    """The batches of a plan as a `tf.data.Dataset` for `model.fit`.

    A global batch comes as `accumulation` micro-batches one after the other. Its rows are dealt
    to them, and to the replicas, in turn, so that no part gets all the filler rows. All parts
    have as many rows; where those of a batch do not suffice, each is filled up.

    The weight of a real target token is accumulation / (real target tokens of the global batch).
    With a loss of reduction "sum" the update is then that of the mean over the global batch, in
    whatever parts it was computed.

    Args:
        split: The tokenised corpus that the plan was made for.
        plan: The plan of the epoch.
        start: The first global batch.
        stop: The one to stop before; None for the end of the epoch.
        accumulation: Micro-batches for each update.
        replicas: Devices that share each micro-batch.
        parts: The replicas, from 0, whose rows to give, one after the other; all by default.

    Returns:
        A dataset of known length. An element is `({"encoder_token_ids": (B, S) int32,
        "decoder_token_ids": (B, T) int32}, targets (B, T) int32, sample_weight (B, T) float32)`.

    Raises:
        ImportError: If TensorFlow is missing.
        ValueError: If there is no such part, or no such batch.
    """
    parts = range(replicas) if parts is None else parts
    if accumulation < 1 or not parts or not all(0 <= part < replicas for part in parts):
        raise ValueError(
            "`accumulation` must be at least 1, and `parts` some of the replicas, from 0. "
            f"Received: accumulation={accumulation}, replicas={replicas}, parts={list(parts)}"
        )
    stop = len(plan) if stop is None else stop
    if not 0 <= start <= stop <= len(plan):
        raise ValueError(
            f"`start` and `stop` must be in order, from 0 to {len(plan)}, the number of batches. "
            f"Received: start={start}, stop={stop}"
        )
    tf = import_tensorflow()
    dealt = accumulation * replicas

    def micro_batch(step: np.ndarray) -> tuple[np.ndarray, ...]:
        batch, micro = divmod(int(step), accumulation)
        rows, *widths = plan.shape(batch)
        weight = np.float32(accumulation / plan.target_tokens(batch))
        given = []
        for part in parts:
            own = plan.indices(batch)[micro * replicas + part :: dealt]
            inputs, targets = gather(split, own, -(-rows // dealt), *widths)
            weights = np.where(targets != PAD, weight, np.float32(0))
            given.append((*inputs.values(), targets, weights))
        return tuple(map(np.concatenate, zip(*given, strict=True)))

    def element(step: Any) -> tuple[dict[str, Any], Any, Any]:
        # numpy gathers from the memory map; TensorFlow's own gather would copy the corpus first.
        arrays = tf.numpy_function(micro_batch, [step], [tf.int32, tf.int32, tf.int32, tf.float32])
        for array in arrays:
            array.set_shape((None, None))
        sources, decoder, targets, weights = arrays
        return {"encoder_token_ids": sources, "decoder_token_ids": decoder}, targets, weights

    steps = tf.data.Dataset.range(start * accumulation, stop * accumulation)
    # The thread that tunes a pipeline looks seldomer the longer it lasts, and who drops the
    # pipeline waits for it: up to a minute at the end of each epoch.
    options = tf.data.Options()
    options.autotune.enabled = False
    return steps.map(element).prefetch(PREFETCHED).with_options(options)


def import_tensorflow() -> Any:
    """Imports TensorFlow; where it only feeds data, it leaves the GPU to Keras's backend.

    Returns:
        The module.

    Raises:
        ImportError: If it is missing.
    """
    try:
        import tensorflow as tf
    except ImportError:
        raise ImportError(
            "the data pipeline needs TensorFlow, with any backend: pip install 'keras-aiayn[train]'"
        ) from None
    if keras.backend.backend() != "tensorflow":
        try:
            tf.config.set_visible_devices([], "GPU")
        except RuntimeError:  # in use already: whoever began decided, and it cannot be taken back
            pass
    return tf
