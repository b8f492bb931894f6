"""Compiled functions.

JAX, and TensorFlow for an accelerator, keep one program per static shape themselves: what matters
is that there is one function object for each model and setting, and not a new one for each call.
On a CPU one graph of TensorFlow takes every shape. On torch nothing is compiled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_aiayn.layers.attention import jax_has_accelerator
from keras_aiayn.special_ids import PAD


def has_accelerator() -> bool:
    """Whether the backend computes on something else than a CPU."""
    backend = keras.backend.backend()
    if backend == "jax":
        return jax_has_accelerator()
    if backend == "torch":
        import torch

        return torch.cuda.is_available()
    import tensorflow as tf

    return bool(tf.config.list_logical_devices("GPU"))


def takes_any_shape() -> bool:
    """Whether a new shape costs nothing: then there is no reason to pad to few of them."""
    backend = keras.backend.backend()
    return backend == "torch" or (backend == "tensorflow" and not has_accelerator())


def compiled(
    models: keras.Layer | Sequence[keras.Layer],
    function: Callable,
    *,
    any_shape: bool = False,
    consumes: bool = False,
    stays: bool = False,
) -> Callable:
    """Compiles a function that reads the weights of a model, or of several.

    Make it once and keep it: every call of `compiled` compiles anew. Weights are read at each
    call, so training between two calls is seen.

    Args:
        models: whose variables the function reads.
        function: of structures of tensors (positional) and of settings (by keyword), in
            `keras.ops`.
        any_shape: whether the function can be traced without knowing the sizes of its tensors,
            which TensorFlow then does where `takes_any_shape`.
        consumes: whether the first argument is of no use any more after a call: JAX then writes
            the result in its place.
        stays: whether the result stays on the device.

    Returns:
        A function of structures of arrays (positional) and of hashable settings (by keyword) that
        gives a structure of numpy arrays, or of tensors. It compiles once for each combination of
        shapes and settings; of any shape, for settings alone (and for which arrays are empty).
    """
    build = {"jax": _jax_function, "tensorflow": _tensorflow_function, "torch": _torch_function}
    models = tuple(models) if isinstance(models, (list, tuple)) else (models,)
    any_shape = any_shape and takes_any_shape()
    run = build[keras.backend.backend()](models, function, any_shape, consumes)
    return run if stays else lambda *arrays, **settings: to_numpy(run(*arrays, **settings))


def to_numpy(structure: Any) -> Any:
    """The same structure of numpy arrays."""
    return tree.map_structure(ops.convert_to_numpy, structure)


def _jax_function(models, function, any_shape, consumes):
    import jax

    # Once: Keras walks through all layers for it, which takes as long as some steps of a search.
    variables = [variable for model in models for variable in model.variables]

    # A plain closure would build the weights into each program as constants: more memory, and
    # blind to training.
    @functools.partial(jax.jit, static_argnums=1, donate_argnums=(2,) if consumes else ())
    def pure(values, settings, *arrays):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*arrays, **dict(settings))

    def run(*arrays, **settings):
        for model in models:
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()  # within `fit` the weights live in the trainer's hands
        values = [variable.value for variable in variables]
        if all(len(v.sharding.device_set) > 1 and v.is_fully_replicated for v in values):
            values = [value.addressable_data(0) for value in values]  # one device is enough
        return pure(values, tuple(sorted(settings.items())), *arrays)

    return run


def _tensorflow_function(models, function, any_shape, consumes):
    import tensorflow as tf

    graphs: dict[Any, Callable] = {}

    def run(*arrays, **settings):
        arrays = tree.map_structure(tf.convert_to_tensor, arrays)
        tensors = tree.flatten(arrays)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if any_shape:
            # What is empty stays so, for functions leave out what they are not given. It has a
            # graph of its own: TensorFlow would take one that is there, of any size.
            shapes = tuple(tuple(None if size else 0 for size in shape) for shape in shapes)
        key = (shapes, *sorted(settings.items()))
        if key not in graphs:
            given = [tf.TensorSpec(s, t.dtype) for s, t in zip(shapes, tensors, strict=True)]
            # XLA only where it pays: on a CPU it takes three times as long to compile, to run a
            # quarter faster.
            # Without AutoGraph, which the ops of Keras do not need: it would wrap each error in
            # pages. A direct call of the function warns of many shapes: where they count, they are
            # meant.
            graphs[key] = tf.function(
                function, jit_compile=has_accelerator(), autograph=False
            ).get_concrete_function(*tree.pack_sequence_as(arrays, given), **settings)
        return graphs[key](*arrays)

    return run


def _torch_function(models, function, any_shape, consumes):
    import torch

    def run(*arrays, **settings):
        with torch.inference_mode():
            return function(*tree.map_structure(ops.convert_to_tensor, arrays), **settings)

    return run


def attention_function(model: keras.Model) -> Callable[..., np.ndarray]:
    """Compiles where the decoder of a Transformer looks in the source.

    Args:
        model: a `Transformer`.

    Returns:
        `attention(source_ids (B, S), decoder_ids (B, T))` to (B, T, S), the mean over the heads of
        the last layer but one, which is where words are aligned best.
    """

    def attention(source_ids, decoder_ids):
        layers = model.attention_scores(source_ids, decoder_ids)["cross"]
        return ops.mean(ops.cast(layers[-min(2, len(layers))], "float32"), axis=1)

    return compiled(model, attention, any_shape=True)


def heads_function(model: keras.Model) -> Callable[..., np.ndarray]:
    """Compiles where each head of the decoder of a Transformer looks in the source.

    Args:
        model: a `Transformer`.

    Returns:
        `heads(source_ids (B, S), decoder_ids (B, T))` to (B, layers, H, T, S).
    """

    def heads(source_ids, decoder_ids):
        layers = model.attention_scores(source_ids, decoder_ids)["cross"]
        return ops.stack([ops.cast(layer, "float32") for layer in layers], axis=1)

    return compiled(model, heads, any_shape=True)


def score_function(model: keras.Model) -> Callable[..., np.ndarray]:
    """Compiles the log-probability of given outputs.

    Args:
        model: a `Transformer`.

    Returns:
        `score(source_ids (B, S), decoder_ids (B, T), targets (B, T))` to (B,) float32, the sum of
        the log-probabilities of the targets that are not pads.
    """

    def score(source_ids, decoder_ids, targets):
        logits = model(
            {"encoder_token_ids": source_ids, "decoder_token_ids": decoder_ids}, training=False
        )
        log_probs = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)
        own = ops.take_along_axis(log_probs, ops.expand_dims(targets, -1), axis=-1)[..., 0]
        return ops.sum(ops.where(ops.equal(targets, PAD), 0.0, own), axis=-1)

    return compiled(model, score, any_shape=True)
