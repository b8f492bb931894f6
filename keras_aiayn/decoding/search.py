"""Section 6.1: beam search with the paper's length penalty. Greedy search is a beam of 1.

The search knows no model, only a `step` function that turns the newest token of every beam into
logits. It is one `ops.while_loop` over one named state of fixed shapes, so it compiles.

Axes: B batch, K beams, C candidates, N hypotheses to return, V vocabulary, L longest output.
A score of -inf marks a slot that holds no hypothesis.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from keras import ops

from keras_aiayn.decoding.constraints import Constraints, Tensor
from keras_aiayn.special_ids import BOS, EOS, PAD

Step: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]

BLOCK = 32  # tokens in each of the blocks into which `_top_k_in_blocks` cuts a vocabulary


class SearchResult(NamedTuple):
    """The best N hypotheses of each sentence, best first; finished ones before cut ones."""

    token_ids: Tensor  # (B, N, L) int32, EOS included where there is one, then pads
    lengths: Tensor  # (B, N) int32, EOS counted; 0 where fewer than N hypotheses exist
    scores: Tensor  # (B, N) float32, raw score / length penalty
    raw_scores: Tensor  # (B, N) float32, sum of log-probabilities
    hit_limit: Tensor  # (B, N) bool, the hypothesis was cut at its maximum length
    steps: Tensor  # () int32, calls of `step`


class Hypotheses(NamedTuple):
    """Some hypotheses of each sentence, side by side."""

    token_ids: Tensor  # (B, any, L) int32, without EOS, then pads
    lengths: Tensor  # (B, any) int32, EOS counted
    raw_scores: Tensor  # (B, any) float32


class Candidates(NamedTuple):
    """The best extensions of a sentence's beams by one token, best first."""

    raw_scores: Tensor  # (B, C)
    parents: Tensor  # (B, C), the beam that is extended
    token_ids: Tensor  # (B, C)


class SearchState(NamedTuple):
    """All that one step hands to the next."""

    index: Tensor  # () int32, t: the step to be taken, and the length of what is alive
    newest: Tensor  # (B, K) int32, last token of each beam, BOS at first
    ancestors: Tensor  # (B, K, L) int32, where each beam's history was written
    alive: Hypotheses  # (B, K), best first
    finished: Hypotheses  # (B, N), best normalised score first
    done: Tensor  # (B,) bool, nothing alive can change the result
    step_state: Any


def beam_search(
    step: Step,
    step_state: Any,
    *,
    max_lengths: Tensor,
    max_length: int,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    num_return: int = 1,
    early_stopping: bool = True,
    constraints: Constraints | None = None,
) -> SearchResult:
    """Finds the outputs Y with the best `log P(Y | X) / ((5 + |Y|) / 6)^length_penalty`.

    Each step extends the K alive hypotheses of a sentence by one token and keeps the best 2K
    candidates. Those that end in EOS go to a pool of their own, where only the best N stay; the
    best K of the others stay alive. With K = 1 there is one candidate, so that is greedy search.

    A sentence is done when its N finished hypotheses are at least as good as anything that could
    still come, or at its maximum length. It is frozen then: what it gets does not depend on the
    sentences beside it. If fewer than N finished, the best alive ones fill up, flagged.

    Nothing that `step` keeps is moved from beam to beam. It writes what belongs to the K beams at
    step t into K rows for good, and `ancestors[b, k, u]` says which of the K rows written at
    step u belongs to the history of beam k (-1 for u > t, k for u = t).

    Args:
        step: `(token_ids (B, K), t, ancestors (B, K, L), step_state)` to
            `(logits (B, K, V), step_state)`, where `token_ids` are the tokens at position t.
        step_state: any structure of tensors; its shapes and dtypes must stay as they are.
        max_lengths: integers (B,), most tokens of each output, EOS counted. A sentence of 0 (a
            row that only fills the batch) is done from the start, and empty.
        max_length: L, at least the largest of `max_lengths`.
        beam_size: K.
        length_penalty: alpha, at least 0.
        num_return: N, at most K.
        early_stopping: whether to stop where the result is proven; it never changes the result.
        constraints: what an output must or must not hold.

    Returns:
        A `SearchResult`. Under constraints that nothing satisfies it is empty.

    Raises:
        ValueError: where a setting is out of its range.
    """
    _check(max_length, beam_size, length_penalty, num_return)
    # A beam of 1 must stop at the first EOS that is the best token, so it has no second choice.
    num_candidates = 1 if beam_size == 1 else 2 * beam_size

    def unfinished(state: SearchState) -> Tensor:
        return ops.logical_not(ops.all(state.done))

    def advance(state: SearchState) -> tuple[SearchState]:
        logits, step_state = step(state.newest, state.index, state.ancestors, state.step_state)
        log_probs = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)  # (B, K, V)
        if constraints is not None:
            log_probs = constraints.apply(log_probs, state.alive.token_ids, state.index)
        candidates = _best_candidates(log_probs, state.alive.raw_scores, num_candidates)
        ended = _ended(state, candidates, log_probs)
        finished = _best_finished(state.finished, ended, penalty, num_return)
        newest, parents, alive = _continued(state, candidates, beam_size)
        alive = _freeze(state.done, state.alive, alive)
        finished = _freeze(state.done, state.finished, finished)
        done = state.done | (state.index + 1 >= max_lengths)
        if early_stopping:
            done = done | _is_proven(alive, finished, max_lengths, penalty)
        ancestors = _descend(state.ancestors, parents, state.index + 1)
        return (SearchState(state.index + 1, newest, ancestors, alive, finished, done, step_state),)

    max_lengths = ops.cast(ops.minimum(max_lengths, max_length), "int32")
    free = 0 if constraints is None else ops.expand_dims(constraints.prefix_lengths(), axis=1)

    def penalty(lengths: Tensor) -> Tensor:
        """Of lengths (B, any); what the prefix holds is free."""
        counted = ops.maximum(lengths - free, 0)  # a slot that holds nothing has length 0
        return ops.power((5.0 + ops.cast(counted, "float32")) / 6.0, length_penalty)

    start = _start(step_state, max_lengths, max_length, beam_size, num_return)
    (end,) = ops.while_loop(unfinished, advance, (start,))
    return _result(end, penalty)


def _check(max_length, beam_size, length_penalty, num_return):
    if beam_size < 1:
        raise ValueError(f"`beam_size` must be at least 1. Received: beam_size={beam_size}")
    if not 1 <= num_return <= beam_size:
        raise ValueError(
            "`num_return` must be at least 1 and at most `beam_size`. "
            f"Received: num_return={num_return}, beam_size={beam_size}"
        )
    if not 0 <= length_penalty < math.inf:
        # Below 0 longer outputs could rise past any bound.
        raise ValueError(
            f"`length_penalty` must be at least 0. Received: length_penalty={length_penalty}"
        )
    if isinstance(max_length, int) and max_length < 1:
        raise ValueError(f"`max_length` must be at least 1. Received: max_length={max_length}")


def _start(step_state, max_lengths, max_length, beam_size, num_return):
    batch = ops.shape(max_lengths)[0]

    def nothing(count):
        return Hypotheses(
            ops.full((batch, count, max_length), PAD, dtype="int32"),
            ops.zeros((batch, count), dtype="int32"),
            ops.full((batch, count), -math.inf, dtype="float32"),
        )

    # One hypothesis is alive, the empty one: K equal ones would give everything K times.
    alive = nothing(beam_size)
    first = ops.equal(ops.arange(beam_size), 0)  # (K,)
    alive = alive._replace(raw_scores=ops.where(first, 0.0, alive.raw_scores))
    unwritten = ops.full((batch, beam_size, max_length), -1, dtype="int32")
    return SearchState(
        index=ops.convert_to_tensor(0, dtype="int32"),
        newest=ops.full((batch, beam_size), BOS, dtype="int32"),
        ancestors=_write(unwritten, 0, ops.arange(beam_size, dtype="int32")),
        alive=alive,
        finished=nothing(num_return),
        done=max_lengths <= 0,
        step_state=step_state,
    )


def _best_candidates(log_probs, alive_scores, num_candidates):
    # The best C of all K * V are among the best C of each beam, so V is looked through once. Two
    # more than C, because pad and BOS may be among them.
    per_beam = min(num_candidates + 2, log_probs.shape[-1])
    scores, token_ids = _top_k_in_blocks(log_probs, per_beam)  # (B, K, per_beam)
    # Barred without sharing out their part among the others: a score stays the model's own
    # log-probability of the text.
    barred = ops.equal(token_ids, PAD) | ops.equal(token_ids, BOS)
    scores = ops.where(barred, -math.inf, scores + ops.expand_dims(alive_scores, axis=-1))
    width = scores.shape[1] * per_beam
    scores, best = _top_k(ops.reshape(scores, (-1, width)), num_candidates)  # (B, C)
    token_ids = _gather(ops.reshape(token_ids, (-1, width)), best)  # (B, C)
    return Candidates(scores, best // per_beam, token_ids)


def _ended(state, candidates, log_probs):
    """The alive hypotheses, each ended by EOS; -inf where that is no candidate."""
    beams = ops.arange(log_probs.shape[1], dtype="int32")  # (K,)
    ending = ops.where(ops.equal(candidates.token_ids, EOS), candidates.parents, -1)  # (B, C)
    is_candidate = ops.any(ops.equal(ops.expand_dims(ending, -1), beams), axis=1)  # (B, K)
    scores = state.alive.raw_scores + log_probs[:, :, EOS]
    return Hypotheses(
        state.alive.token_ids,
        state.alive.lengths + 1,
        ops.where(is_candidate, scores, -math.inf),
    )


def _best_finished(finished, ended, penalty, num_return):
    pool = _concatenate(finished, ended)  # N + K of each sentence
    _, best = _top_k(_normalized(pool, penalty), num_return)
    return Hypotheses(*(_gather(field, best) for field in pool))


def _continued(state, candidates, beam_size):
    """The best K candidates that do not end: their last tokens, their parents, and they."""
    ends = ops.equal(candidates.token_ids, EOS)
    scores = ops.where(ends, -math.inf, candidates.raw_scores)
    # A beam ends in at most one way, so K or more of 2K candidates go on.
    scores, best = _top_k(scores, beam_size)  # (B, K)
    parents = _gather(candidates.parents, best)  # (B, K)
    newest = _gather(candidates.token_ids, best)  # (B, K)
    token_ids = _gather(state.alive.token_ids, parents)  # (B, K, L)
    token_ids = _write(token_ids, state.index, newest)
    return newest, parents, Hypotheses(token_ids, state.alive.lengths + 1, scores)


def _descend(ancestors, parents, index):
    """Gives each beam the history of its parent, and its own row at step `index`."""
    beams = ops.arange(ancestors.shape[1], dtype="int32")
    return _write(_gather(ancestors, parents), index, beams)


def _is_proven(alive, finished, max_lengths, penalty):
    """Whether no alive hypothesis can still enter the pool, for each sentence.

    A raw score only falls, and with alpha >= 0 the divisor is largest at the maximum length.
    """
    bound = alive.raw_scores[:, :1] / penalty(ops.expand_dims(max_lengths, axis=1))  # (B, 1)
    return (_normalized(finished, penalty)[:, -1:] >= bound)[:, 0]


def _result(state, penalty):
    num_return = state.finished.lengths.shape[1]
    count = ops.sum(ops.cast(state.finished.raw_scores > -math.inf, "int32"), axis=1)
    count = ops.expand_dims(count, axis=1)  # (B, 1), number that finished
    slot = ops.expand_dims(ops.arange(num_return, dtype="int32"), axis=0)  # (1, N)
    cut = slot >= count
    pool = _concatenate(state.finished, state.alive)  # N + K of each sentence
    chosen = ops.where(cut, num_return + slot - count, slot)
    best = Hypotheses(*(_gather(field, chosen) for field in pool))  # N
    exists = best.raw_scores > -math.inf  # (B, N)
    lengths = ops.where(exists, best.lengths, 0)
    token_ids = ops.where(ops.expand_dims(exists, -1), best.token_ids, PAD)
    token_ids = _write(token_ids, ops.where(cut, -1, lengths - 1), EOS)
    return SearchResult(
        token_ids=token_ids,
        lengths=lengths,
        scores=_normalized(best, penalty),
        raw_scores=best.raw_scores,
        hit_limit=cut & exists,
        steps=state.index,
    )


def _normalized(hypotheses, penalty):
    return hypotheses.raw_scores / penalty(hypotheses.lengths)


def _freeze(done, old, new):
    """The old hypotheses of sentences that are done, the new ones of the others."""
    done = ops.reshape(done, (-1, 1))  # (B, 1)
    return Hypotheses(
        ops.where(ops.expand_dims(done, -1), old.token_ids, new.token_ids),
        ops.where(done, old.lengths, new.lengths),
        ops.where(done, old.raw_scores, new.raw_scores),
    )


def _write(rows, index, values):
    """Puts values (B, K) or (K,) at one position of rows (B, K, L); out of range is nowhere."""
    positions = ops.arange(ops.shape(rows)[-1], dtype="int32")
    here = ops.equal(positions, ops.expand_dims(index, axis=-1))
    return ops.where(here, ops.expand_dims(values, axis=-1), rows)


def _concatenate(first, second):
    return Hypotheses(*(ops.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


def _gather(x, index):
    """Takes entries `index` (B, M) of axis 1 of x (B, any, ...): (B, M, ...)."""
    batch, count, *rest = ops.shape(x)
    start = ops.expand_dims(ops.arange(batch, dtype="int32") * count, axis=-1)  # (B, 1)
    # One flat gather: `take_along_axis` would want an index for every element.
    return ops.take(ops.reshape(x, (batch * count, *rest)), start + index, axis=0)


def _top_k(x, k):
    values, index = ops.top_k(x, k)
    return values, ops.cast(index, "int32")  # torch gives int64


def _top_k_in_blocks(x, k):
    """The same, faster where the last axis is long: the best k are in the best k blocks."""
    batch, beams, size = ops.shape(x)
    if size <= k * BLOCK:
        return _top_k(x, k)
    padding = -size % BLOCK
    if padding:
        x = ops.pad(x, ((0, 0), (0, 0), (0, padding)), constant_values=-math.inf)
    blocks = ops.reshape(x, (batch * beams, (size + padding) // BLOCK, BLOCK))
    _, best_blocks = _top_k(ops.max(blocks, axis=-1), k)  # (B * K, k)
    values = ops.reshape(_gather(blocks, best_blocks), (batch * beams, k * BLOCK))
    values, place = _top_k(values, k)  # (B * K, k)
    index = _gather(best_blocks, place // BLOCK) * BLOCK + place % BLOCK
    index = ops.minimum(index, size - 1)  # a place in the padding holds -inf: it is not taken
    return ops.reshape(values, (batch, beams, k)), ops.reshape(index, (batch, beams, k))
