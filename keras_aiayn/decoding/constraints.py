"""What an output may hold, whatever the model thinks of it.

A barred token gets the log-probability -inf, and its share is not dealt out among the others: a
score stays the model's own log-probability of the text.

Axes: B batch, K beams, P longest prefix, V vocabulary, L longest output.
"""

import math
from typing import Any, NamedTuple, TypeAlias

from keras import ops

from keras_aiayn.special_ids import EOS, PAD

Tensor: TypeAlias = Any  # of whatever backend runs


class Constraints(NamedTuple):
    """The rules for the outputs of a batch. What is empty is no rule.

    Attributes:
        prefixes: (B, P) int32, tokens that each output begins with, then pads; P may be 0. They
            cost nothing, and the length penalty does not count them.
        min_lengths: (B, 1) int32, least tokens of each output, prefix and EOS counted; or (B, 0).
        suppressed: (B, any) int32, tokens that an output does not hold; may be of width 0.
    """

    prefixes: Tensor
    min_lengths: Tensor
    suppressed: Tensor

    @classmethod
    def none(cls, batch: Tensor) -> "Constraints":
        """No rule, for as many outputs as `batch` (B,) has entries."""
        empty = ops.cast(ops.expand_dims(batch, 1)[:, :0], "int32")
        return cls(empty, empty, empty)

    def prefix_lengths(self) -> Tensor:
        """(B, 1) int32."""
        real = ops.not_equal(self.prefixes, PAD)
        return ops.sum(ops.cast(real, "int32"), axis=1, keepdims=True)

    def apply(
        self,
        logits: Tensor,
        token_ids: Tensor,
        ages: Tensor,
        no_repeat_ngram_size: int,
        certain: Any = 0.0,
    ) -> Tensor:
        """Logits, or log-probabilities, of the next token under the rules.

        Args:
            logits: (B, K, V).
            token_ids: (B, K, R), what each beam has written, then pads.
            ages: (B,) int32, how many tokens that is.
            no_repeat_ngram_size: n; no output holds the same n tokens twice in a row of its text;
                0 for no such rule.
            certain: (B, K, 1), the logit of a probability of 1; 0 for log-probabilities.

        Returns:
            (B, K, V), -inf where a rule bars the token, and `certain` for what the prefix wants.
        """
        size = logits.shape[-1]
        vocabulary = ops.arange(size, dtype="int32")
        barred = []
        if self.min_lengths.shape[1] != 0:
            early = ops.expand_dims(ages, 1) + 1 < self.min_lengths  # (B, 1)
            barred.append(ops.expand_dims(early, -1) & ops.equal(vocabulary, EOS))
        if self.suppressed.shape[1] != 0:
            named = ops.equal(ops.expand_dims(self.suppressed, -1), vocabulary)  # (B, any, V)
            barred.append(ops.any(named, axis=1, keepdims=True))
        if no_repeat_ngram_size:
            barred.append(_repeats(token_ids, ages, no_repeat_ngram_size, size))
        for one in barred:
            logits = ops.where(one, -math.inf, logits)
        if self.prefixes.shape[1] == 0:
            return logits
        wanted = _at(self.prefixes, ops.expand_dims(ages, 1))  # (B, 1)
        wanted = ops.expand_dims(wanted, -1)
        forced = ops.where(ops.equal(wanted, vocabulary), certain, -math.inf)
        return ops.where(ops.equal(wanted, PAD), logits, forced)


def _at(prefixes, ages):
    """The token of each prefix at a position (B, 1), PAD behind its end."""
    longest = ops.shape(prefixes)[1]
    token = ops.take_along_axis(prefixes, ops.minimum(ages, longest - 1), axis=1)
    return ops.where(ages < longest, token, PAD)


def _repeats(token_ids, ages, ngram_size, vocabulary_size):
    """Tokens that would end an n-gram that the beam has written already, (B, K, V) booleans."""
    batch, beams, room = ops.shape(token_ids)
    windows = room - ngram_size + 1  # places where an n-gram may begin
    windows = max(windows, 0) if isinstance(windows, int) else ops.maximum(windows, 0)
    begins = ops.arange(windows, dtype="int32")
    ages = ops.reshape(ages, (-1, 1, 1))
    same = begins + ngram_size <= ages  # (B, 1, windows), it is written to its end
    for offset in range(ngram_size - 1):
        place = ops.maximum(ages - ngram_size + 1 + offset, 0)
        place = ops.minimum(place, room - 1)
        place = ops.broadcast_to(place, (batch, beams, 1))
        newest = ops.take_along_axis(token_ids, place, axis=2)  # (B, K, 1)
        same = same & ops.equal(token_ids[:, :, offset : offset + windows], newest)
    same = ops.broadcast_to(same, (batch, beams, windows))
    # One column more, for what is not barred.
    barred = ops.where(same, token_ids[:, :, ngram_size - 1 :], vocabulary_size)
    rows = ops.repeat(ops.arange(batch * beams, dtype="int32"), windows)
    places = ops.stack([rows, ops.reshape(barred, (-1,))], axis=-1)
    table = ops.zeros((batch * beams, vocabulary_size + 1), "int32")
    table = ops.scatter_update(table, places, ops.ones_like(rows))
    table = ops.reshape(table, (batch, beams, vocabulary_size + 1))
    return ops.cast(table[:, :, :vocabulary_size], "bool")
