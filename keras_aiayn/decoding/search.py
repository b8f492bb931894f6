"""Section 6.1: beam search with the paper's length penalty. Greedy search is a beam of 1.

The search knows no model, only a `step` function that turns the newest token of every beam into
logits. Its state has fixed shapes, so it compiles.

Axes: B batch, K beams, C candidates, N hypotheses to return, V vocabulary, R room.
A score of -inf marks a slot that holds no hypothesis.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from keras import ops, tree

from keras_aiayn.decoding.constraints import Constraints, Tensor
from keras_aiayn.decoding.loop import SearchResult, Step, View, resized, take
from keras_aiayn.special_ids import BOS, EOS, PAD

BLOCK = 32  # tokens in each of the blocks into which `_top_k_in_blocks` cuts a vocabulary


class Hypotheses(NamedTuple):
    """Some hypotheses of each sentence, side by side."""

    token_ids: Tensor  # (B, any, R) int32, without EOS, then pads
    lengths: Tensor  # (B, any) int32, EOS counted
    raw_scores: Tensor  # (B, any) float32


class Candidates(NamedTuple):
    """The best extensions of a sentence's beams by one token, best first."""

    raw_scores: Tensor  # (B, C)
    parents: Tensor  # (B, C), the beam that is extended
    token_ids: Tensor  # (B, C)


class Beams(NamedTuple):
    """All that one step hands to the next."""

    ages: Tensor  # (B,) int32, steps taken for the sentence, and the length of what is alive
    max_lengths: Tensor  # (B,) int32
    newest: Tensor  # (B, K) int32, last token of each beam, BOS at first
    ancestors: Tensor  # (B, K, R) int32, where each beam's history was written, else -1
    alive: Hypotheses  # (B, K), best first
    finished: Hypotheses  # (B, N), best normalised score first
    done: Tensor  # (B,) bool, nothing alive can change the result
    constraints: Constraints
    step_state: Any

    @property
    def token_ids(self) -> Tensor:
        """What is written, (B, K, R)."""
        return self.alive.token_ids


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Finds the outputs Y with the best `log P(Y | X) / ((5 + |Y|) / 6)^length_penalty`.

    Each step extends the K alive hypotheses of a sentence by one token and keeps the best 2K
    candidates. Those that end in EOS go to a pool of their own, where only the best N stay; the
    best K of the others stay alive. With K = 1 there is one candidate, so that is greedy search.

    A sentence is done when its N finished hypotheses are at least as good as anything that could
    still come, or at its maximum length. It is frozen then: what it gets does not depend on the
    sentences beside it. If fewer than N finished, the best alive ones fill up, flagged. Under
    constraints that nothing satisfies its result is empty.

    Nothing that `step` keeps is moved from beam to beam: see `loop.Step`.

    Args:
        beam_size: K.
        length_penalty: alpha, at least 0.
        num_return: N, at most K.
        early_stopping: whether to stop where the result is proven; it never changes the result.
        no_repeat_ngram_size: of `Constraints.apply`.

    Raises:
        ValueError: where a setting is out of its range.
    """

    beam_size: int = 4
    length_penalty: float = 0.6
    num_return: int = 1
    early_stopping: bool = True
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        """Checks the settings."""
        beam_size, num_return = self.beam_size, self.num_return
        if beam_size < 1:
            raise ValueError(f"`beam_size` must be at least 1. Received: beam_size={beam_size}")
        if not 1 <= num_return <= beam_size:
            raise ValueError(
                "`num_return` must be at least 1 and at most `beam_size`. "
                f"Received: num_return={num_return}, beam_size={beam_size}"
            )
        if not 0 <= self.length_penalty < math.inf:
            # Below 0 longer outputs could rise past any bound.
            raise ValueError(
                "`length_penalty` must be at least 0. "
                f"Received: length_penalty={self.length_penalty}"
            )

    @property
    def beams(self) -> int:
        """K."""
        return self.beam_size

    def start(
        self,
        step_state: Any,
        max_lengths: Tensor,
        room: Any,
        constraints: Constraints,
        seeds: Tensor,
    ) -> Beams:
        """Sentences that have written nothing yet; see `loop.Method`."""
        batch = ops.shape(max_lengths)[0]

        def nothing(count):
            return Hypotheses(
                ops.full((batch, count, room), PAD, dtype="int32"),
                ops.zeros((batch, count), dtype="int32"),
                ops.full((batch, count), -math.inf, dtype="float32"),
            )

        # One hypothesis is alive, the empty one: K equal ones would give everything K times.
        alive = nothing(self.beam_size)
        first = ops.equal(ops.arange(self.beam_size), 0)  # (K,)
        return Beams(
            ages=ops.zeros_like(max_lengths),
            max_lengths=max_lengths,
            newest=ops.full((batch, self.beam_size), BOS, dtype="int32"),
            ancestors=ops.full((batch, self.beam_size, room), -1, dtype="int32"),
            alive=alive._replace(raw_scores=ops.where(first, 0.0, alive.raw_scores)),
            finished=nothing(self.num_return),
            done=max_lengths <= 0,
            constraints=constraints,
            step_state=step_state,
        )

    def advance(self, step: Step, clock: Tensor, beams: Beams) -> Beams:
        """Extends every hypothesis by one token."""
        rules, ages = beams.constraints, beams.ages
        slot = clock % ops.shape(beams.ancestors)[2]
        ancestors = _write(beams.ancestors, slot, ops.arange(self.beam_size, dtype="int32"))
        logits, step_state = step(beams.newest, ages, slot, ancestors, beams.step_state)
        logits = ops.cast(logits, "float32")  # (B, K, V)
        # Log-probabilities are worked out for the best tokens only.
        normalizer = ops.logsumexp(logits, axis=-1, keepdims=True)  # (B, K, 1)
        ngram = self.no_repeat_ngram_size
        logits = rules.apply(logits, beams.token_ids, ages, ngram, certain=normalizer)
        before = ops.expand_dims(beams.alive.raw_scores, -1) - normalizer
        candidates = self._best_candidates(logits, before)
        ended = self._ended(beams.alive, candidates, logits[:, :, EOS] + before[:, :, 0])
        finished = self._best_finished(beams.finished, ended, rules)
        newest, parents, alive = _continued(beams, candidates, self.beam_size)
        alive = _freeze(beams.done, beams.alive, alive)
        finished = _freeze(beams.done, beams.finished, finished)
        ages = ages + ops.cast(ops.logical_not(beams.done), "int32")
        done = beams.done | (ages >= beams.max_lengths)
        if self.early_stopping:
            done = done | self._is_proven(alive, finished, beams.max_lengths, rules)
        return beams._replace(
            ages=ages,
            newest=newest,
            ancestors=_gather(ancestors, parents),
            alive=alive,
            finished=finished,
            done=done,
            step_state=step_state,
        )

    def result(self, beams: Beams) -> SearchResult:
        """The best N hypotheses of each sentence."""
        rules, finished = beams.constraints, beams.finished
        count = ops.sum(ops.cast(finished.raw_scores > -math.inf, "int32"), axis=1, keepdims=True)
        slot = ops.expand_dims(ops.arange(self.num_return, dtype="int32"), axis=0)  # (1, N)
        cut = slot >= count  # fewer than N have finished
        pool = _concatenate(finished, beams.alive)  # N + K of each sentence
        chosen = ops.where(cut, self.num_return + slot - count, slot)
        best = _gather(pool, chosen)  # N
        exists = best.raw_scores > -math.inf  # (B, N)
        lengths = ops.where(exists, best.lengths, 0)
        token_ids = ops.where(ops.expand_dims(exists, -1), best.token_ids, PAD)
        token_ids = _write(token_ids, ops.where(cut, -1, lengths - 1), EOS)
        return SearchResult(
            token_ids=token_ids,
            lengths=lengths,
            scores=self._normalized(best, rules),
            raw_scores=best.raw_scores,
            hit_limit=cut & exists,
            steps=beams.ages,
        )

    def rearrange(self, beams: Beams, view: View) -> Beams:
        """The rows of another batch; see `loop.Method`."""

        def in_room(hypotheses):
            token_ids = resized(hypotheses.token_ids, view.slots, PAD, axis=2)
            return hypotheses._replace(token_ids=token_ids)

        step_state = beams.step_state
        rest = beams._replace(step_state=())
        rest = tree.map_structure(lambda x: ops.take(x, view.rows, axis=0), rest)
        return rest._replace(
            ancestors=take(rest.ancestors, view.slots, view.written, -1, axis=2),
            alive=in_room(rest.alive),
            finished=in_room(rest.finished),
            done=rest.done | ops.logical_not(view.kept),
            step_state=step_state,
        )

    def _penalty(self, lengths: Tensor, rules: Constraints) -> Tensor:
        """Of lengths (B, any); what the prefix holds is free."""
        # A slot that holds nothing has length 0.
        counted = ops.maximum(lengths - rules.prefix_lengths(), 0)
        return ops.power((5.0 + ops.cast(counted, "float32")) / 6.0, self.length_penalty)

    def _normalized(self, hypotheses: Hypotheses, rules: Constraints) -> Tensor:
        return hypotheses.raw_scores / self._penalty(hypotheses.lengths, rules)

    def _best_candidates(self, logits: Tensor, before: Tensor) -> Candidates:
        """Of all extensions by one token, whose score is its logit and what was `before`."""
        # A beam of 1 must stop at the first EOS that is the best token: it has no second choice.
        num_candidates = 1 if self.beam_size == 1 else 2 * self.beam_size
        # The best C of all K * V are among the best C of each beam, so V is looked through once.
        # Two more than C, because pad and BOS may be among them.
        per_beam = min(num_candidates + 2, logits.shape[-1])
        scores, token_ids = _top_k_in_blocks(logits, per_beam)  # (B, K, per_beam)
        # Barred without sharing out their part among the others: a score stays the model's own
        # log-probability of the text.
        barred = ops.equal(token_ids, PAD) | ops.equal(token_ids, BOS)
        scores = ops.where(barred, -math.inf, scores + before)
        width = self.beam_size * per_beam
        scores, best = _top_k(ops.reshape(scores, (-1, width)), num_candidates)  # (B, C)
        token_ids = _gather(ops.reshape(token_ids, (-1, width)), best)  # (B, C)
        return Candidates(scores, best // per_beam, token_ids)

    def _ended(self, alive: Hypotheses, candidates: Candidates, scores: Tensor) -> Hypotheses:
        """The alive hypotheses, each ended by EOS; -inf where that is no candidate."""
        beams = ops.arange(self.beam_size, dtype="int32")  # (K,)
        ending = ops.where(ops.equal(candidates.token_ids, EOS), candidates.parents, -1)  # (B, C)
        is_candidate = ops.any(ops.equal(ops.expand_dims(ending, -1), beams), axis=1)  # (B, K)
        return Hypotheses(
            alive.token_ids,
            alive.lengths + 1,
            ops.where(is_candidate, scores, -math.inf),
        )

    def _best_finished(
        self, finished: Hypotheses, ended: Hypotheses, rules: Constraints
    ) -> Hypotheses:
        pool = _concatenate(finished, ended)  # N + K of each sentence
        _, best = _top_k(self._normalized(pool, rules), self.num_return)
        return _gather(pool, best)

    def _is_proven(
        self, alive: Hypotheses, finished: Hypotheses, max_lengths: Tensor, rules: Constraints
    ) -> Tensor:
        """Whether no alive hypothesis can still enter the pool, for each sentence.

        A raw score only falls, and with alpha >= 0 the divisor is largest at the maximum length.
        """
        largest = self._penalty(ops.expand_dims(max_lengths, axis=1), rules)
        bound = alive.raw_scores[:, :1] / largest  # (B, 1)
        return (self._normalized(finished, rules)[:, -1:] >= bound)[:, 0]


def _continued(beams, candidates, beam_size):
    """The best K candidates that do not end: their last tokens, their parents, and they."""
    ends = ops.equal(candidates.token_ids, EOS)
    scores = ops.where(ends, -math.inf, candidates.raw_scores)
    # A beam ends in at most one way, so K or more of 2K candidates go on.
    scores, best = _top_k(scores, beam_size)  # (B, K)
    parents, newest = _gather((candidates.parents, candidates.token_ids), best)  # (B, K)
    token_ids = _gather(beams.alive.token_ids, parents)  # (B, K, R)
    token_ids = _write(token_ids, ops.expand_dims(beams.ages, 1), newest)
    return newest, parents, Hypotheses(token_ids, beams.alive.lengths + 1, scores)


def _freeze(done, old, new):
    """The old hypotheses of sentences that are done, the new ones of the others."""
    done = ops.reshape(done, (-1, 1))  # (B, 1)
    return Hypotheses(
        ops.where(ops.expand_dims(done, -1), old.token_ids, new.token_ids),
        ops.where(done, old.lengths, new.lengths),
        ops.where(done, old.raw_scores, new.raw_scores),
    )


def _write(rows, index, values):
    """Puts values (B, K) or (K,) at one position of rows (B, K, R); out of range is nowhere."""
    positions = ops.arange(ops.shape(rows)[-1], dtype="int32")
    here = ops.equal(positions, ops.expand_dims(index, axis=-1))
    return ops.where(here, ops.expand_dims(values, axis=-1), rows)


def _concatenate(first, second):
    return Hypotheses(*(ops.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


def _gather(structure, index):
    """Takes entries `index` (B, M) of axis 1 of each x (B, any, ...): (B, M, ...)."""
    batch, count, *_ = ops.shape(tree.flatten(structure)[0])
    start = ops.expand_dims(ops.arange(batch, dtype="int32") * count, axis=-1)  # (B, 1)
    index = start + index

    def take(x):
        # One flat gather: `take_along_axis` would want an index for every element.
        rest = ops.shape(x)[2:] if len(x.shape) > 2 else ()
        return ops.take(ops.reshape(x, (-1, *rest)), index, axis=0)

    return tree.map_structure(take, structure)


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
