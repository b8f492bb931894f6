"""Outputs drawn at random from what the model thinks, instead of its best ones.

Each draw is a function of a seed, the step and the token alone: the same on every backend, and
whatever sentences and pads stand beside. Axes: B batch, K samples, V vocabulary, R room.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from keras import ops, tree

from keras_aiayn.decoding.constraints import Constraints, Tensor
from keras_aiayn.decoding.loop import SearchResult, Step, View, resized
from keras_aiayn.special_ids import BOS, EOS, PAD


class Samples(NamedTuple):
    """All that one step hands to the next."""

    ages: Tensor  # (B,) int32, steps taken for the sentence
    max_lengths: Tensor  # (B,) int32
    streams: Tensor  # (B, K) int32, where the bits of each sample come from
    newest: Tensor  # (B, K) int32
    token_ids: Tensor  # (B, K, R) int32, EOS included
    lengths: Tensor  # (B, K) int32, EOS counted
    raw_scores: Tensor  # (B, K) float32
    ended: Tensor  # (B, K) bool
    constraints: Constraints
    step_state: Any

    @property
    def done(self) -> Tensor:
        """Whether all samples of a sentence have ended, (B,)."""
        return ops.all(self.ended, axis=1)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws outputs token by token.

    Scores are of the model's own probabilities, without temperature and cuts.

    Args:
        num_samples: K, drawn independently; two may be alike.
        temperature: divides the logits; below 1 the likely becomes more likely.
        top_k: how many of the most likely tokens are drawn from; 0 for all.
        top_p: draws from the fewest tokens whose probabilities add up to it; 1 for all.
        length_penalty: alpha of the scores, which draw nothing.
        no_repeat_ngram_size: of `Constraints.apply`.

    Raises:
        ValueError: where a setting is out of its range.
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    length_penalty: float = 0.6
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        """Checks the settings."""
        _check(self.num_samples, self.temperature, self.top_k, self.top_p)

    @property
    def beams(self) -> int:
        """K."""
        return self.num_samples

    def start(
        self,
        step_state: Any,
        max_lengths: Tensor,
        room: Any,
        constraints: Constraints,
        seeds: Tensor,
    ) -> Samples:
        """Sentences that have written nothing yet; see `loop.Method`."""
        batch = ops.shape(max_lengths)[0]
        shape = (batch, self.num_samples)
        samples = ops.arange(self.num_samples, dtype="int32")
        return Samples(
            ages=ops.zeros_like(max_lengths),
            max_lengths=max_lengths,
            streams=_mix(ops.expand_dims(seeds, 1) + _mix(samples + 1)),
            newest=ops.full(shape, BOS, dtype="int32"),
            token_ids=ops.full((*shape, room), PAD, dtype="int32"),
            lengths=ops.zeros(shape, dtype="int32"),
            raw_scores=ops.zeros(shape, dtype="float32"),
            ended=ops.broadcast_to(ops.expand_dims(max_lengths <= 0, 1), shape),
            constraints=constraints,
            step_state=step_state,
        )

    def advance(self, step: Step, clock: Tensor, state: Samples) -> Samples:
        """Draws one token of every sample."""
        room, ages = ops.shape(state.token_ids)[2], ops.expand_dims(state.ages, 1)  # (B, 1)
        slot = clock % room
        ancestors = self._own_rows(slot, ages, room)
        logits, step_state = step(state.newest, state.ages, slot, ancestors, state.step_state)
        log_probs = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)  # (B, K, V)
        log_probs = state.constraints.apply(
            log_probs, state.token_ids, state.ages, self.no_repeat_ngram_size
        )
        vocabulary = ops.arange(log_probs.shape[-1], dtype="int32")
        never = ops.equal(vocabulary, PAD) | ops.equal(vocabulary, BOS)
        log_probs = ops.where(never, -math.inf, log_probs)
        chances = _cut(log_probs / self.temperature, self.top_k, self.top_p)
        draws = _mix(ops.expand_dims(_mix(state.streams + ages), -1) + vocabulary)
        chosen = ops.cast(ops.argmax(chances + _gumbel(draws), axis=-1), "int32")  # (B, K)
        gained = ops.take_along_axis(log_probs, ops.expand_dims(chosen, -1), axis=-1)[..., 0]
        goes_on = ~state.ended
        here = ops.equal(ops.arange(room, dtype="int32"), ops.expand_dims(ages, -1))  # (B, 1, R)
        token_ids = ops.where(
            here & ops.expand_dims(goes_on, -1), ops.expand_dims(chosen, -1), state.token_ids
        )
        at_limit = ages + 1 >= ops.expand_dims(state.max_lengths, 1)
        return state._replace(
            ages=state.ages + ops.cast(~state.done, "int32"),
            newest=ops.where(goes_on, chosen, PAD),
            token_ids=token_ids,
            lengths=state.lengths + ops.cast(goes_on, "int32"),
            raw_scores=state.raw_scores + ops.where(goes_on, gained, 0.0),
            ended=state.ended | ops.equal(chosen, EOS) | at_limit,
            step_state=step_state,
        )

    def result(self, state: Samples) -> SearchResult:
        """The samples of each sentence, best first."""
        free = state.constraints.prefix_lengths()
        counted = ops.cast(ops.maximum(state.lengths - free, 0), "float32")
        scores = state.raw_scores / ops.power((5.0 + counted) / 6.0, self.length_penalty)
        # Constraints that nothing satisfies leave a sample that cannot be.
        exists = state.raw_scores > -math.inf
        lengths = ops.where(exists, state.lengths, 0)
        token_ids = ops.where(ops.expand_dims(exists, -1), state.token_ids, PAD)
        order = ops.argsort(-scores, axis=-1)
        last = ops.expand_dims(ops.maximum(lengths - 1, 0), -1)
        cut = ops.not_equal(ops.take_along_axis(token_ids, last, axis=-1)[..., 0], EOS)

        def sorted_by_score(field):
            return ops.take_along_axis(field, order, axis=1)

        return SearchResult(
            token_ids=ops.take_along_axis(token_ids, ops.expand_dims(order, -1), axis=1),
            lengths=sorted_by_score(lengths),
            scores=sorted_by_score(scores),
            raw_scores=sorted_by_score(state.raw_scores),
            hit_limit=sorted_by_score(cut & (lengths > 0)),
            steps=state.ages,
        )

    def rearrange(self, state: Samples, view: View) -> Samples:
        """The rows of another batch; see `loop.Method`."""
        step_state = state.step_state
        rest = state._replace(step_state=())
        rest = tree.map_structure(lambda x: ops.take(x, view.rows, axis=0), rest)
        return rest._replace(
            token_ids=resized(rest.token_ids, view.slots, PAD, axis=2),
            ended=rest.ended | ops.expand_dims(ops.logical_not(view.kept), 1),
            step_state=step_state,
        )

    def _own_rows(self, slot: Tensor, ages: Tensor, room: Any) -> Tensor:
        """The ancestors (B, K, R) of samples, each of which is its own."""
        steps_ago = (slot - ops.arange(room, dtype="int32")) % room
        written = ops.expand_dims(steps_ago <= ages, 1)  # (B, 1, R)
        samples = ops.reshape(ops.arange(self.num_samples, dtype="int32"), (1, -1, 1))
        return ops.where(written, samples, -1)


def _check(num_samples, temperature, top_k, top_p):
    if num_samples < 1:
        raise ValueError(f"`num_samples` must be at least 1. Received: num_samples={num_samples}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be above 0. Received: temperature={temperature}")
    if top_k < 0:
        raise ValueError(f"`top_k` must be at least 0. Received: top_k={top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1. Received: top_p={top_p}")


def _cut(logits, top_k, top_p):
    """-inf for all but the likeliest tokens."""
    size = logits.shape[-1]
    if 0 < top_k < size:
        values, _ = ops.top_k(logits, top_k)
        logits = ops.where(logits >= values[..., -1:], logits, -math.inf)
    if top_p < 1:
        values, _ = ops.top_k(logits, size)  # from the likeliest on
        probabilities = ops.softmax(values, axis=-1)
        before = ops.cumsum(probabilities, axis=-1) - probabilities
        # The token that reaches `top_p` is still in, so there is always one.
        least = ops.min(ops.where(before < top_p, values, math.inf), axis=-1, keepdims=True)
        logits = ops.where(logits >= least, logits, -math.inf)
    return logits


def _gumbel(bits):
    """Noise whose argmax over `logits + noise` is a draw from softmax(logits)."""
    # 23 bits and a half: float32 holds these exactly, and none is 0 or 1.
    uniform = (ops.cast(ops.bitwise_and(bits, 0x7FFFFF), "float32") + 0.5) / 2**23
    return -ops.log(-ops.log(uniform))


def _mix(x):
    """Scrambles the bits of int32s (a hash of the kind xor, shift, multiply).

    Integer arithmetic is the same everywhere; the generators of the backends are not.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B93_5975), (16, 1)):
        low = (1 << (32 - shift)) - 1  # what a shift of an unsigned number would leave
        x = ops.bitwise_xor(x, ops.bitwise_and(ops.bitwise_right_shift(x, shift), low))
        x = x * factor
    return x
