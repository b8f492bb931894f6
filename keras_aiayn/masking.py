"""The only code that makes a mask. Masks are boolean, True = keep, and cover keys only.

Keras's implicit masks are not used: they are lost from the second layer on.
Axes: B batch, S source, T target, K beams, L capacity of a cache.
"""

from keras import ops

from keras_aiayn.special_ids import PAD


def padding_mask(token_ids):
    """Keeps the real tokens as keys: (B, S) ids to (B, 1, S) booleans."""
    return ops.expand_dims(ops.not_equal(token_ids, PAD), axis=1)


def causal_mask(token_ids):
    """Keeps, for each position, itself and what came before (section 3.2.3).

    Only the shape of the ids matters, but it comes from the ids themselves: while a functional
    model is built its lengths are unknown, and `ops.arange` would fail.

    Args:
        token_ids: integers (B, T).

    Returns:
        Booleans (B, T, T), `mask[b, query, key]`.
    """
    positions = ops.cumsum(ops.ones_like(token_ids), axis=1)
    return ops.greater_equal(ops.expand_dims(positions, axis=2), ops.expand_dims(positions, axis=1))


def decoder_mask(token_ids):
    """Causal and without pads: (B, T) ids to (B, T, T) booleans."""
    return ops.logical_and(causal_mask(token_ids), padding_mask(token_ids))


def ancestor_mask(ancestors):
    """Lets each beam see its own history in a cache that holds all beams side by side.

    Args:
        ancestors: integers (B, K, L). `ancestors[b, k, t]` is the row, of the K written at step
            t, that belongs to the history of beam k; -1 where nothing is written yet.

    Returns:
        Booleans (B, K, L * K): the cache holds row j of step t at t * K + j.
    """
    batch, beams, length = ops.shape(ancestors)
    rows = ops.arange(beams, dtype=ancestors.dtype)
    own = ops.equal(ops.expand_dims(ancestors, axis=-1), rows)  # (B, K, L, K)
    return ops.reshape(own, (batch, beams, length * beams))
