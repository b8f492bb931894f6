"""The loop of decoding, whatever chooses the tokens, over rows in which sentences come and go.

A batch has B rows. Each holds a sentence of an age of its own, the number of tokens that it has
written, so a row that is done may be given to another sentence while its neighbours go on. What
they share is a clock, the number of steps taken. What the K beams of a row keep of step t lies in
slot t modulo R, where R, the room, is at least every age: a sentence never meets its own past.

Axes: B rows, K beams or samples, N hypotheses to return, R room, S source, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from keras import ops, tree

from keras_aiayn.decoding.constraints import Constraints, Tensor

# (token_ids (B, K), ages (B,), slot (), ancestors (B, K, R), step_state)
# to (logits (B, K, V), step_state), where `token_ids` are the tokens at the positions `ages`. What
# the step keeps of them it writes into K rows of its slot. `ancestors[b, k, r]` says which of the
# K rows of slot r belongs to the history of beam k: k in the present slot, -1 where none does.
Step: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]


class SearchResult(NamedTuple):
    """The best N hypotheses of each sentence, best first; finished ones before cut ones."""

    token_ids: Tensor  # (B, N, R) int32, EOS included where there is one, then pads
    lengths: Tensor  # (B, N) int32, EOS counted; 0 where fewer than N hypotheses exist
    scores: Tensor  # (B, N) float32, raw score / length penalty
    raw_scores: Tensor  # (B, N) float32, sum of log-probabilities
    hit_limit: Tensor  # (B, N) bool, the hypothesis was cut at its maximum length
    steps: Tensor  # (B,) int32, steps until the sentence was done


class View(NamedTuple):
    """Which part of a batch another one takes over."""

    rows: Tensor  # (B',) int32, the row of the old batch that each one was
    kept: Tensor  # (B',) bool, whether it still is; else it is free
    slots: Tensor  # (R',) int32, the slot of the old batch that each one was
    written: Tensor  # (R',) bool, whether it was one at all
    columns: Tensor  # (S',) int32, the numbers 0, 1, ...: positions of the source


class Method(Protocol):
    """How tokens are chosen. The state is a structure of tensors, whose first axis is B.

    It has at least the fields `ages`, `done` and `token_ids` (B, any, R).
    """

    @property
    def beams(self) -> int:
        """K."""

    def start(
        self,
        step_state: Any,
        max_lengths: Tensor,
        room: Any,
        constraints: Constraints,
        seeds: Tensor,
    ) -> Any:
        """The state of sentences that have written nothing yet.

        Args:
            step_state: of the step.
            max_lengths: integers (B,), most tokens of each output, EOS counted. A row of 0 is done.
            room: R.
            constraints: what each output must or must not hold.
            seeds: (B,) int32, for what is drawn at random.
        """

    def advance(self, step: Step, clock: Tensor, state: Any) -> Any:
        """The state after one step more."""

    def result(self, state: Any) -> SearchResult:
        """What each sentence has come to."""

    def rearrange(self, state: Any, view: View) -> Any:
        """The rows of another batch, whose step state is done already."""


def advance(
    method: Method, step: Step, clock: Tensor, state: Any, most_live: Tensor
) -> tuple[Tensor, Any]:
    """Takes steps until few enough sentences are left, or one of them needs more room.

    Args:
        method: how tokens are chosen.
        step: of the model.
        clock: () int32, steps taken.
        state: of the method.
        most_live: () int32, how many sentences may be left; 0 to take all to their end.

    Returns:
        The clock and the state.
    """

    def goes_on(clock, state):
        live = ops.logical_not(state.done)
        full = live & (state.ages >= ops.shape(state.token_ids)[2])
        return (ops.sum(ops.cast(live, "int32")) > most_live) & ops.logical_not(ops.any(full))

    def one_step(clock, state):
        return clock + 1, method.advance(step, clock, state)

    return ops.while_loop(goes_on, one_step, (clock, state))


def run(
    method: Method,
    step: Step,
    step_state: Any,
    *,
    max_lengths: Tensor,
    max_length: Any,
    constraints: Constraints | None = None,
    seeds: Tensor | None = None,
) -> SearchResult:
    """Decodes a batch from its beginning to its end; traceable, not compiled.

    Args:
        method: how tokens are chosen.
        step: of the model.
        step_state: any structure of tensors; its shapes and dtypes must stay as they are.
        max_lengths: integers (B,), most tokens of each output, EOS counted. A sentence of 0 (a
            row that only fills the batch) is done from the start, and empty.
        max_length: R, at least the largest of `max_lengths`.
        constraints: what an output must or must not hold.
        seeds: (B,) int32, where outputs are drawn at random.

    Raises:
        ValueError: where `max_length` is below 1.
    """
    if isinstance(max_length, int) and max_length < 1:
        raise ValueError(f"`max_length` must be at least 1. Received: max_length={max_length}")
    max_lengths = ops.cast(ops.minimum(max_lengths, max_length), "int32")
    constraints = Constraints.none(max_lengths) if constraints is None else constraints
    seeds = ops.zeros_like(max_lengths) if seeds is None else ops.cast(seeds, "int32")
    state = method.start(step_state, max_lengths, max_length, constraints, seeds)
    nothing = ops.convert_to_tensor(0, dtype="int32")
    _, state = advance(method, step, nothing, state, nothing)
    return method.result(state)


def admit(state: Any, rows: Tensor, fresh: Any) -> Any:
    """Puts the sentences of a fresh state into rows (F,) of a batch."""
    rows = ops.expand_dims(rows, axis=-1)

    def put(old, new):
        if 0 in old.shape[1:]:  # a rule that there is not, where TensorFlow would find no place
            return old
        return ops.scatter_update(old, rows, new)

    return tree.map_structure(put, state, fresh)


def take(x: Tensor, index: Tensor, there: Tensor, fill: Any, axis: int) -> Tensor:
    """Entries of an axis of x, `fill` where the entry is not `there`."""
    shape = [1] * len(x.shape)
    shape[axis] = -1
    return ops.where(ops.reshape(there, shape), ops.take(x, index, axis=axis), fill)


def resized(x: Tensor, like: Tensor, fill: Any, axis: int) -> Tensor:
    """Cuts an axis of x, or fills it up behind, to as many entries as `like` has."""
    size = ops.shape(x)[axis]
    index = ops.arange(ops.shape(like)[0], dtype="int32")
    return take(x, ops.minimum(index, size - 1), index < size, fill, axis)
