"""Outputs drawn at random from what the model thinks, instead of its best ones.

Each draw is a function of a seed, the step and the token alone: the same on every backend, and
whatever sentences and pads stand beside. Axes: B batch, K samples, V vocabulary, L longest output.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from keras_aiayn.decoding.constraints import Constraints, Tensor
from keras_aiayn.decoding.search import SearchResult, Step
from keras_aiayn.special_ids import BOS, EOS, PAD


class SampleState(NamedTuple):
    """All that one step hands to the next."""

    index: Tensor  # () int32, t
    newest: Tensor  # (B, K) int32
    token_ids: Tensor  # (B, K, L) int32, EOS included
    lengths: Tensor  # (B, K) int32, EOS counted
    raw_scores: Tensor  # (B, K) float32
    ended: Tensor  # (B, K) bool
    step_state: Any


def sample(
    step: Step,
    step_state: Any,
    *,
    seeds: Tensor,
    max_lengths: Tensor,
    max_length: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    length_penalty: float = 0.6,
    constraints: Constraints | None = None,
) -> SearchResult:
    """Draws outputs token by token.

    Args:
        step: as of `beam_search`; the K beams are the samples.
        step_state: as of `beam_search`.
        seeds: (B,) int32, of each sentence.
        max_lengths: (B,), most tokens of each output, EOS counted.
        max_length: L.
        num_samples: K, drawn independently; two may be alike.
        temperature: divides the logits; below 1 the likely becomes more likely.
        top_k: how many of the most likely tokens are drawn from; 0 for all.
        top_p: draws from the fewest tokens whose probabilities add up to it; 1 for all.
        length_penalty: alpha of the scores, which draw nothing.
        constraints: what an output must or must not hold.

    Returns:
        The samples of each sentence, best first. Scores are of the model's own probabilities,
        without temperature and cuts.

    Raises:
        ValueError: where a setting is out of its range.
    """
    _check(num_samples, temperature, top_k, top_p)
    max_lengths = ops.cast(ops.minimum(max_lengths, max_length), "int32")
    limits = ops.expand_dims(max_lengths, axis=1)  # (B, 1)
    samples = ops.arange(num_samples, dtype="int32")
    streams = _mix(ops.expand_dims(ops.cast(seeds, "int32"), 1) + _mix(samples + 1))  # (B, K)
    positions = ops.arange(max_length, dtype="int32")

    def advance(state: SampleState) -> tuple[SampleState]:
        written = ops.expand_dims(ops.where(positions <= state.index, 1, 0), 0)  # (1, L)
        # Every sample is its own ancestor.
        own = ops.expand_dims(ops.expand_dims(samples, -1), 0) * written - (1 - written)
        ancestors = ops.broadcast_to(own, ops.shape(state.token_ids))
        logits, step_state = step(state.newest, state.index, ancestors, state.step_state)
        log_probs = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)  # (B, K, V)
        if constraints is not None:
            log_probs = constraints.apply(log_probs, state.token_ids, state.index)
        vocabulary = ops.arange(log_probs.shape[-1], dtype="int32")
        never = ops.equal(vocabulary, PAD) | ops.equal(vocabulary, BOS)
        log_probs = ops.where(never, -math.inf, log_probs)
        chances = _cut(log_probs / temperature, top_k, top_p)
        draws = _mix(ops.expand_dims(_mix(streams + state.index), -1) + vocabulary)
        chosen = ops.cast(ops.argmax(chances + _gumbel(draws), axis=-1), "int32")  # (B, K)
        gained = ops.take_along_axis(log_probs, ops.expand_dims(chosen, -1), axis=-1)[..., 0]
        here = ops.equal(positions, state.index)
        goes_on = ~state.ended & (state.index < limits)
        return (
            SampleState(
                index=state.index + 1,
                newest=ops.where(goes_on, chosen, PAD),
                token_ids=ops.where(
                    here & ops.expand_dims(goes_on, -1),
                    ops.expand_dims(chosen, -1),
                    state.token_ids,
                ),
                lengths=state.lengths + ops.cast(goes_on, "int32"),
                raw_scores=state.raw_scores + ops.where(goes_on, gained, 0.0),
                ended=state.ended | ops.equal(chosen, EOS) | (state.index + 1 >= limits),
                step_state=step_state,
            ),
        )

    batch = ops.shape(max_lengths)[0]
    start = SampleState(
        index=ops.convert_to_tensor(0, dtype="int32"),
        newest=ops.full((batch, num_samples), BOS, dtype="int32"),
        token_ids=ops.full((batch, num_samples, max_length), PAD, dtype="int32"),
        lengths=ops.zeros((batch, num_samples), dtype="int32"),
        raw_scores=ops.zeros((batch, num_samples), dtype="float32"),
        ended=ops.broadcast_to(limits <= 0, (batch, num_samples)),
        step_state=step_state,
    )
    (end,) = ops.while_loop(lambda state: ~ops.all(state.ended), advance, (start,))
    free = 0 if constraints is None else ops.expand_dims(constraints.prefix_lengths(), axis=1)
    return _result(end, free, length_penalty)


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


def _result(state, free, length_penalty):
    counted = ops.cast(ops.maximum(state.lengths - free, 0), "float32")
    scores = state.raw_scores / ops.power((5.0 + counted) / 6.0, length_penalty)
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
        steps=state.index,
    )
