"""One compiled function per shape, and the search of a Transformer.

JAX and TensorFlow keep one program per static shape themselves: what matters is that there is one
function object for each model and setting, and not a new one for each call. On torch nothing is
compiled.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_aiayn import masking
from keras_aiayn.decoding.search import SearchResult, Tensor, beam_search


def compiled(model: keras.Layer, function: Callable) -> Callable:
    """Compiles a function that reads the weights of a model.

    Make it once and keep it: every call of `compiled` compiles anew. Weights are read at each
    call, so training between two calls is seen.

    Args:
        model: whose variables the function reads.
        function: of tensors (positional) and of settings (by keyword), in `keras.ops`.

    Returns:
        A function of numpy arrays (positional) and of hashable settings (by keyword) that gives
        a structure of numpy arrays. It compiles once for each combination of shapes and settings.
    """
    build = {"jax": _jax_function, "tensorflow": _tensorflow_function, "torch": _torch_function}
    run = build[keras.backend.backend()](model, function)

    def call(*arrays, **settings):
        return tree.map_structure(ops.convert_to_numpy, run(*arrays, **settings))

    return call


def _jax_function(model, function):
    import jax

    # A plain closure would build the weights into each program as constants: more memory, and
    # blind to training.
    @functools.partial(jax.jit, static_argnums=1)
    def pure(values, settings, *arrays):
        with keras.StatelessScope(state_mapping=list(zip(model.variables, values, strict=True))):
            return function(*arrays, **dict(settings))

    def run(*arrays, **settings):
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # within `fit` the weights live in the trainer's hands
        return pure([v.value for v in model.variables], tuple(sorted(settings.items())), *arrays)

    return run


def _tensorflow_function(model, function):
    import tensorflow as tf

    # XLA only where it pays: on a CPU it takes three times as long to compile, to run a quarter
    # faster.
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    # Without AutoGraph, which the ops of Keras do not need: it would wrap each error in pages.
    graph = tf.function(function, jit_compile=on_gpu, autograph=False)

    def run(*arrays, **settings):
        tensors = [tf.convert_to_tensor(array) for array in arrays]
        # A direct call of `graph` does the same, and warns of many shapes: here they are meant.
        return graph.get_concrete_function(*tensors, **settings)(*tensors)

    return run


def _torch_function(model, function):
    import torch

    def run(*arrays, **settings):
        with torch.inference_mode():
            return function(*(ops.convert_to_tensor(array) for array in arrays), **settings)

    return run


def search_function(
    model: keras.Model,
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    num_return: int = 1,
    early_stopping: bool = True,
) -> Callable[..., SearchResult]:
    """Compiles the search of a Transformer.

    Args:
        model: a `Transformer`.
        beam_size: K, 1 for greedy search.
        length_penalty: alpha.
        num_return: number of hypotheses for each sentence.
        early_stopping: whether to stop where the result is proven.

    Returns:
        `search(source_ids (B, S), max_lengths (B,), max_length=int)` to a `SearchResult` of
        numpy arrays. Each combination of B, S and `max_length` is compiled once.
    """
    settings: dict[str, Any] = {
        "beam_size": beam_size,
        "length_penalty": length_penalty,
        "num_return": num_return,
        "early_stopping": early_stopping,
    }

    def translate(source_ids, max_lengths, max_length):
        return translate_ids(model, source_ids, max_lengths, max_length=max_length, **settings)

    run = compiled(model, translate)

    def search(source_ids: np.ndarray, max_lengths: np.ndarray, *, max_length: int) -> SearchResult:
        source_ids = np.asarray(source_ids, "int32")
        max_lengths = np.asarray(max_lengths, "int32")
        longest = max_lengths.max(initial=0)
        if max_lengths.shape != source_ids.shape[:1] or longest > max_length:
            raise ValueError(
                "`max_lengths` must be one length for each source, `max_length` at most. "
                f"Received: max_lengths of shape {max_lengths.shape} up to {longest}, "
                f"max_length={max_length}, source_ids of shape {source_ids.shape}"
            )
        return run(source_ids, max_lengths, max_length=max_length)

    return search


def translate_ids(
    model: keras.Model,
    source_ids: Tensor,
    max_lengths: Tensor,
    *,
    max_length: int,
    beam_size: int = 4,
    **settings: Any,
) -> SearchResult:
    """Searches for the best outputs of a Transformer; traceable, not compiled.

    The source is encoded once. The K beams of a sentence are K queries in one call of `decode`,
    and K rows of its cache; they share the memory of their source.

    Args:
        model: a `Transformer`.
        source_ids: (B, S).
        max_lengths: (B,).
        max_length: L.
        beam_size: K.
        **settings: of `beam_search`.

    Returns:
        A `SearchResult`.
    """
    memory_mask = masking.padding_mask(source_ids)
    memory = model.encode(source_ids, memory_mask, training=False)

    def step(token_ids, index, ancestors, cache):
        if keras.backend.backend() == "torch":
            index = int(index)  # a number cuts a slice of the cache; a tensor gathers elements
        hidden, cache = model.decode(
            token_ids,
            memory,
            decoder_mask=masking.ancestor_mask(ancestors),
            memory_mask=memory_mask,
            cache=cache,
            cache_index=index * beam_size,
            positions=index,
            training=False,
        )
        return model.output_projection(hidden), cache

    return beam_search(
        step,
        model.init_cache(memory, max_length * beam_size),
        max_lengths=max_lengths,
        max_length=max_length,
        beam_size=beam_size,
        **settings,
    )
