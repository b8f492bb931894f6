"""What a Transformer, or several together, add to the loop of decoding: its step."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_aiayn import masking
from keras_aiayn.decoding.constraints import Tensor
from keras_aiayn.decoding.loop import SearchResult, View, resized, run
from keras_aiayn.decoding.search import BeamSearch


class TransformerSteps:
    """The step function of a batch, and what it keeps.

    The source is encoded once. The K beams of a sentence are K queries in one call of `decode`,
    and K rows of its cache at each step; they share the memory of their source.

    Args:
        models: of one vocabulary, whose probabilities are averaged.
        beams: K.
    """

    def __init__(self, models: Sequence[keras.Model], beams: int):
        self.models, self.beams = tuple(models), beams

    def begin(self, source_ids: Tensor, room: Any) -> dict[str, Any]:
        """The step state of sources (B, S) from which nothing is decoded yet."""
        memory_mask = masking.padding_mask(source_ids)
        caches = []
        for model in self.models:
            memory = model.encode(source_ids, memory_mask, training=False)
            caches.append(model.init_cache(memory, room * self.beams))
        return {"memory_mask": memory_mask, "caches": caches}

    def __call__(
        self, token_ids: Tensor, ages: Tensor, slot: Tensor, ancestors: Tensor, state: dict
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits (B, K, V); see `loop.Step`."""
        if keras.backend.backend() == "torch":
            slot = int(slot)  # a number cuts a slice of the cache; a tensor gathers elements
        decoder_mask = masking.ancestor_mask(ancestors)
        token_ids = ops.reshape(token_ids, (-1, self.beams))  # K is known while it is traced
        # A sentence that is as long as there are positions reads on, for nothing, beside others.
        positions = ops.minimum(ages, ops.shape(ancestors)[2] - 1)
        logits, caches = [], []
        for model, cache in zip(self.models, state["caches"], strict=True):
            hidden, cache = model.decode(
                token_ids,
                None,
                decoder_mask=decoder_mask,
                memory_mask=state["memory_mask"],
                cache=cache,
                cache_index=slot * self.beams,
                positions=ops.expand_dims(positions, 1),
                training=False,
            )
            logits.append(model.output_projection(hidden))
            caches.append(cache)
        return _mean_in_logits(logits), state | {"caches": caches}

    def rearrange(self, state: dict, view: View) -> dict[str, Any]:
        """The step state of the rows of another batch."""
        mask = ops.take(state["memory_mask"], view.rows, axis=0)
        columns = ops.minimum(view.columns, ops.shape(mask)[2] - 1)
        beams = ops.arange(self.beams, dtype="int32")
        cells = ops.reshape(ops.expand_dims(view.slots * self.beams, 1) + beams, (-1,))
        return {
            "memory_mask": resized(mask, view.columns, False, axis=2),
            "caches": [
                model.take_from_cache(cache, view.rows, cells, columns)
                for model, cache in zip(self.models, state["caches"], strict=True)
            ],
        }


def translate_ids(
    models: keras.Model | Sequence[keras.Model],
    source_ids: Tensor,
    max_lengths: Tensor,
    *,
    max_length: Any,
    **settings: Any,
) -> SearchResult:
    """Searches for the best outputs of a Transformer; traceable, not compiled.

    Args:
        models: a `Transformer`, or several whose probabilities are averaged.
        source_ids: (B, S).
        max_lengths: (B,).
        max_length: at least the largest of `max_lengths`.
        **settings: of `BeamSearch`.

    Returns:
        A `SearchResult`.
    """
    models = models if isinstance(models, (list, tuple)) else (models,)
    method = BeamSearch(**settings)
    steps = TransformerSteps(models, method.beams)
    state = steps.begin(source_ids, max_length)
    return run(method, steps, state, max_lengths=max_lengths, max_length=max_length)


def _mean_in_logits(logits):
    """Logits whose softmax is the mean of the models' probabilities."""
    if len(logits) == 1:
        return logits[0]
    each = [ops.log_softmax(ops.cast(one, "float32"), axis=-1) for one in logits]
    return ops.logsumexp(ops.stack(each, axis=0), axis=0)  # the divisor cancels
