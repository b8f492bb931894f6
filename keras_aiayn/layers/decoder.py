"""Section 3.1: one of the N layers of the decoder. The only file that touches a cache.

Axes: B batch, T target positions, S source positions, L capacity of the cache, H heads.
"""

import keras
from keras import ops

from keras_aiayn.layers.attention import jax_has_accelerator
from keras_aiayn.layers.encoder import TransformerEncoderBlock


@keras.saving.register_keras_serializable(package="keras_aiayn")
class TransformerDecoderBlock(TransformerEncoderBlock):
    """Causal self-attention, attention to the encoder's output, and a feed-forward network.

    It takes the arguments of `TransformerEncoderBlock`, and `cross_attention`.

    With a cache it computes new positions only. The cache holds, per layer, the projected keys
    and values: those of the decoder's own positions, written from `cache_index` on, and those of
    the memory, computed once by `init_cache`. The block does not know what the rows are: T
    positions of one sequence, or K beams at one position, whose mask then tells them apart.

    Args:
        cross_attention: whether there is an encoder to attend to. Without it the block is that
            of a decoder-only model.

    Call arguments:
        inputs: (B, T, d).
        memory: output of the encoder (B, S, d); not read where a cache is given.
        self_attention_mask: booleans (B, T, T), with a cache (B, T, L), True = keep.
        memory_mask: booleans (B, 1, S), True = keep.
        cache: what `init_cache` returned, or the last call. It is used up: torch writes into it.
        cache_index: where in the cache the first of the T rows goes.
        return_attention_scores: whether to return the weights as well.

    Returns:
        (B, T, d); with a cache, that and the cache; with `return_attention_scores`, also a dict
        of weights (B, H, T, keys) named `"self"` and `"cross"`.
    """

    def __init__(self, *args, cross_attention=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.has_cross_attention = cross_attention

    def build(self, inputs_shape, memory_shape=None):
        """Makes the three sub-layers."""
        self.self_attention = self._attention("self_attention", inputs_shape[-1], index=0)
        self.self_attention.build(inputs_shape, inputs_shape)
        self.self_attention_residual = self._residual("self_attention_residual", index=1)
        self.self_attention_residual.build(inputs_shape)
        if self.has_cross_attention:
            memory_shape = memory_shape or inputs_shape
            self.cross_attention = self._attention("cross_attention", inputs_shape[-1], index=3)
            self.cross_attention.build(inputs_shape, memory_shape)
            self.cross_attention_residual = self._residual("cross_attention_residual", index=4)
            self.cross_attention_residual.build(inputs_shape)
        self._build_feed_forward(inputs_shape, index=2)

    def init_cache(self, memory, length, batch_size=None):
        """An empty cache for `length` rows, with the keys and values of the memory.

        Args:
            memory: (B, S, d), or None without cross-attention.
            length: L, capacity in rows.
            batch_size: needed where there is no memory.
        """
        attention = self.self_attention
        batch = batch_size if memory is None else ops.shape(memory)[0]
        rows = (batch, attention.num_heads, length)
        keys, values = (
            ops.zeros((*rows, width), self.compute_dtype)
            for width in (attention.key_dim, attention.value_dim)
        )
        cache = {"self_key": _stored(keys), "self_value": values}
        if self.has_cross_attention:
            keys, values = self.cross_attention.project_keys(memory)
            cache |= {"cross_key": _stored(keys), "cross_value": values}
        return cache

    def take_from_cache(self, cache, batch, rows, memory):
        """A cache made of parts of another one.

        Args:
            cache: of B sequences.
            batch: integers, which of the sequences.
            rows: integers, which rows of their own keys and values.
            memory: integers, which positions of the memory.
        """
        taken = {}
        for name, x in cache.items():
            axis = 3 if name.endswith("key") and _keys_stand_upright() else 2
            index = memory if name.startswith("cross") else rows
            taken[name] = ops.take(ops.take(x, batch, axis=0), index, axis=axis)
        return taken

    def call(
        self,
        inputs,
        memory=None,
        self_attention_mask=None,
        memory_mask=None,
        cache=None,
        cache_index=0,
        return_attention_scores=False,
        training=None,
    ):
        """Attends to earlier positions, then to the source, then transforms each position."""
        scores = {}

        def self_attention(x):
            nonlocal cache
            query = self.self_attention.project_query(x)
            keys, values = self.self_attention.project_keys(x)
            if cache is not None:
                keys, values = _write(cache, keys, values, cache_index)
                cache = cache | {"self_key": keys, "self_value": values}
                keys = _stored(keys)
            output, scores["self"] = self.self_attention.attend(
                query,
                keys,
                values,
                attention_mask=self_attention_mask,
                need_weights=return_attention_scores,
                training=training,
            )
            return output

        def cross_attention(x):
            attention = self.cross_attention
            if cache is None:
                keys, values = attention.project_keys(memory)
            else:
                keys, values = _stored(cache["cross_key"]), cache["cross_value"]
            output, scores["cross"] = attention.attend(
                attention.project_query(x),
                keys,
                values,
                attention_mask=memory_mask,
                need_weights=return_attention_scores,
                training=training,
            )
            return output

        x = self.self_attention_residual(inputs, sublayer=self_attention, training=training)
        if self.has_cross_attention:
            x = self.cross_attention_residual(x, sublayer=cross_attention, training=training)
        x = self.feed_forward_residual(x, sublayer=self.feed_forward, training=training)
        extras = ([] if cache is None else [cache]) + ([scores] if return_attention_scores else [])
        return (x, *extras) if extras else x

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "cross_attention": self.has_cross_attention}


def _keys_stand_upright():
    """Whether a cache holds its keys as (B, H, D, L) and not as (B, H, L, D).

    XLA for CPUs would else copy all of them at every step, to multiply queries by their transpose.
    """
    return keras.backend.backend() == "jax" and not jax_has_accelerator()


def _stored(keys):
    """Keys as a cache holds them, and back."""
    return ops.swapaxes(keys, -1, -2) if _keys_stand_upright() else keys


def _write(cache, keys, values, index):
    """The cached keys and values, with new ones (B, H, T, D) from row `index` on."""
    backend = keras.backend.backend()
    old_keys, old_values = cache["self_key"], cache["self_value"]
    if backend == "jax":
        at = (0, 0, 0, index) if _keys_stand_upright() else (0, 0, index, 0)
        values = ops.slice_update(old_values, (0, 0, index, 0), values)
        return ops.slice_update(old_keys, at, _stored(keys)), values
    batch, heads, length, _ = ops.shape(keys)
    if backend == "torch":  # in place: `slice_update` would copy all of it
        old_keys[:, :, index : index + length] = keys
        old_values[:, :, index : index + length] = values
        return old_keys, old_values
    # There `slice_update` is an operation of XLA, which is compiled again for every shape, and
    # which not everything that runs a graph has.
    first = ops.arange(batch * heads, dtype="int32") * ops.shape(old_keys)[2] + index
    places = ops.expand_dims(first, 1) + ops.arange(length, dtype="int32")
    places = ops.reshape(places, (-1, 1))

    def put(old, new):
        width = new.shape[-1]
        old, new = ops.reshape(old, (-1, width)), ops.reshape(new, (-1, width))
        return ops.reshape(ops.scatter_update(old, places, new), (batch, heads, -1, width))

    return put(old_keys, keys), put(old_values, values)
