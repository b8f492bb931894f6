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
        min_lengths: (B,) int32, least tokens of each output, prefix and EOS counted; or (0,).
        suppressed: (any,) int32, tokens that no output holds; may be of length 0.
        no_repeat_ngram_size: n; no output holds the same n tokens twice in a row of its text; 0
            for no rule.
    """

    prefixes: Tensor
    min_lengths: Tensor
    suppressed: Tensor
    no_repeat_ngram_size: int = 0

    def are_any(self) -> bool:
        """Whether there is a rule at all; the shapes say so."""
        shapes = (self.prefixes.shape[1], self.min_lengths.shape[0], self.suppressed.shape[0])
        return bool(self.no_repeat_ngram_size) or any(size != 0 for size in shapes)

    def prefix_lengths(self) -> Tensor:
        """(B,) int32."""
        return ops.sum(ops.cast(ops.not_equal(self.prefixes, PAD), "int32"), axis=1)

    def apply(self, log_probs: Tensor, token_ids: Tensor, index: Tensor) -> Tensor:
        """Log-probabilities of the next token under the rules.

        Args:
            log_probs: (B, K, V).
            token_ids: (B, K, L), what each beam has written, then pads.
            index: () int32, how many tokens that is.

        Returns:
            (B, K, V), -inf where a rule bars the token, and 0 for one that the prefix wants.
        """
        size = log_probs.shape[-1]
        vocabulary = ops.arange(size, dtype="int32")
        barred = ops.zeros((1, 1, size), "bool")
        if self.min_lengths.shape[0] != 0:
            early = index + 1 < self.min_lengths  # (B,)
            barred = barred | (ops.reshape(early, (-1, 1, 1)) & ops.equal(vocabulary, EOS))
        if self.suppressed.shape[0] != 0:
            named = ops.equal(ops.expand_dims(self.suppressed, -1), vocabulary)  # (any, V)
            barred = barred | ops.any(named, axis=0)
        if self.no_repeat_ngram_size:
            barred = barred | _repeats(token_ids, index, self.no_repeat_ngram_size, size)
        log_probs = ops.where(barred, -math.inf, log_probs)
        if self.prefixes.shape[1] == 0:
            return log_probs
        wanted = _at(self.prefixes, index)  # (B,)
        wanted = ops.reshape(wanted, (-1, 1, 1))
        forced = ops.where(ops.equal(wanted, vocabulary), 0.0, -math.inf)  # (B, 1, V)
        return ops.where(ops.equal(wanted, PAD), log_probs, forced)


def _at(prefixes, index):
    """The token of each prefix at a position, PAD behind its end."""
    longest = ops.shape(prefixes)[1]
    token = ops.take(prefixes, ops.minimum(index, longest - 1), axis=1)
    return ops.where(index < longest, token, PAD)


def _repeats(token_ids, index, ngram_size, vocabulary_size):
    """Tokens that would end an n-gram that the beam has written already, (B, K, V) booleans."""
    batch, beams, longest = ops.shape(token_ids)
    windows = longest - ngram_size + 1  # places where an n-gram may begin
    windows = max(windows, 0) if isinstance(windows, int) else ops.maximum(windows, 0)
    begins = ops.arange(windows, dtype="int32")
    same = begins + ngram_size <= index  # (windows,), it is written to its end
    for offset in range(ngram_size - 1):
        place = ops.maximum(index - ngram_size + 1 + offset, 0)
        newest = ops.expand_dims(ops.take(token_ids, place, axis=2), -1)  # (B, K, 1)
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
