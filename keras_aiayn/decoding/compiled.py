"""Compiled functions, and the search of a Transformer.

JAX, and TensorFlow for an accelerator, keep one program per static shape themselves: what matters
is that there is one function object for each model and setting, and not a new one for each call.
On a CPU one graph of TensorFlow takes every shape. On torch nothing is compiled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_aiayn import masking
from keras_aiayn.decoding.constraints import Constraints, Tensor
from keras_aiayn.decoding.sampling import sample
from keras_aiayn.decoding.search import SearchResult, beam_search
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
    models: keras.Layer | Sequence[keras.Layer], function: Callable, *, any_shape: bool = False
) -> Callable:
    """Compiles a function that reads the weights of a model, or of several.

    Make it once and keep it: every call of `compiled` compiles anew. Weights are read at each
    call, so training between two calls is seen.

    Args:
        models: whose variables the function reads.
        function: of tensors (positional) and of settings (by keyword), in `keras.ops`.
        any_shape: whether the function can be traced without knowing the sizes of its tensors,
            which TensorFlow then does where `takes_any_shape`.

    Returns:
        A function of numpy arrays (positional) and of hashable settings (by keyword) that gives
        a structure of numpy arrays. It compiles once for each combination of shapes and settings;
        of any shape, for settings alone (and for which arrays are empty).
    """
    build = {"jax": _jax_function, "tensorflow": _tensorflow_function, "torch": _torch_function}
    models = tuple(models) if isinstance(models, (list, tuple)) else (models,)
    run = build[keras.backend.backend()](models, function, any_shape and takes_any_shape())

    def call(*arrays, **settings):
        return tree.map_structure(ops.convert_to_numpy, run(*arrays, **settings))

    return call


def _jax_function(models, function, any_shape):
    import jax

    def variables():
        return [variable for model in models for variable in model.variables]

    # A plain closure would build the weights into each program as constants: more memory, and
    # blind to training.
    @functools.partial(jax.jit, static_argnums=1)
    def pure(values, settings, *arrays):
        with keras.StatelessScope(state_mapping=list(zip(variables(), values, strict=True))):
            return function(*arrays, **dict(settings))

    def run(*arrays, **settings):
        for model in models:
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()  # within `fit` the weights live in the trainer's hands
        values = [variable.value for variable in variables()]
        if all(len(v.sharding.device_set) > 1 and v.is_fully_replicated for v in values):
            values = [value.addressable_data(0) for value in values]  # one device is enough
        return pure(values, tuple(sorted(settings.items())), *arrays)

    return run


def _tensorflow_function(models, function, any_shape):
    import tensorflow as tf

    @functools.cache
    def graph(shapes):
        # XLA only where it pays: on a CPU it takes three times as long to compile, to run a
        # quarter faster.
        # Without AutoGraph, which the ops of Keras do not need: it would wrap each error in pages.
        return tf.function(function, jit_compile=has_accelerator(), autograph=False)

    def run(*arrays, **settings):
        tensors = [tf.convert_to_tensor(array) for array in arrays]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if any_shape:
            # What is empty stays so, for functions leave out what they are not given. It has a
            # graph of its own: TensorFlow would take one that is there, of any size.
            shapes = tuple(tuple(None if size else 0 for size in shape) for shape in shapes)
        given = [tf.TensorSpec(s, t.dtype) for s, t in zip(shapes, tensors, strict=True)]
        # A direct call of the graph warns of many shapes: where they count, they are meant.
        return graph(shapes).get_concrete_function(*given, **settings)(*tensors)

    return run


def _torch_function(models, function, any_shape):
    import torch

    def run(*arrays, **settings):
        with torch.inference_mode():
            return function(*(ops.convert_to_tensor(array) for array in arrays), **settings)

    return run


class Sampling(NamedTuple):
    """How to draw outputs at random; see `sampling.sample`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def search_function(
    models: keras.Model | Sequence[keras.Model],
    *,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    num_return: int = 1,
    early_stopping: bool = True,
    no_repeat_ngram_size: int = 0,
    sampling: Sampling | None = None,
) -> Callable[..., SearchResult]:
    """Compiles the search of a Transformer, or of several together.

    Args:
        models: a `Transformer`, or several with one vocabulary, whose probabilities are averaged.
        beam_size: K, 1 for greedy search.
        length_penalty: alpha.
        num_return: number of hypotheses for each sentence.
        early_stopping: whether to stop where the result is proven.
        no_repeat_ngram_size: of `Constraints`.
        sampling: draws `num_return` outputs at random instead of searching for the best.

    Returns:
        `search(source_ids (B, S), max_lengths (B,), *, max_length, prefixes, min_lengths,
        suppressed, seeds)` to a `SearchResult` of numpy arrays; the last four, of `Constraints`
        and of `sample`, may be left out. Each combination of shapes and `max_length` is compiled
        once, unless `takes_any_shape`.
    """
    models = tuple(models) if isinstance(models, (list, tuple)) else (models,)
    settings: dict[str, Any] = {"length_penalty": length_penalty}
    if sampling is None:
        settings |= {"num_return": num_return, "early_stopping": early_stopping}
    else:
        settings |= sampling._asdict()
        beam_size = num_return

    def translate(source_ids, max_lengths, prefixes, min_lengths, suppressed, seeds, max_length):
        rules = Constraints(prefixes, min_lengths, suppressed, no_repeat_ngram_size)
        options = settings if sampling is None else settings | {"seeds": seeds}
        return translate_ids(
            models,
            source_ids,
            max_lengths,
            max_length=max_length,
            beam_size=beam_size,
            constraints=rules if rules.are_any() else None,
            sampled=sampling is not None,
            **options,
        )

    run = compiled(models, translate, any_shape=True)

    def search(
        source_ids: np.ndarray,
        max_lengths: np.ndarray,
        *,
        max_length: int,
        prefixes: np.ndarray | None = None,
        min_lengths: np.ndarray | None = None,
        suppressed: np.ndarray | None = None,
        seeds: np.ndarray | None = None,
    ) -> SearchResult:
        source_ids = np.asarray(source_ids, "int32")
        max_lengths = np.asarray(max_lengths, "int32")
        longest = max_lengths.max(initial=0)
        if max_lengths.shape != source_ids.shape[:1] or longest > max_length:
            raise ValueError(
                "`max_lengths` must be one length for each source, `max_length` at most. "
                f"Received: max_lengths of shape {max_lengths.shape} up to {longest}, "
                f"max_length={max_length}, source_ids of shape {source_ids.shape}"
            )
        rows = len(source_ids)
        given = [
            np.zeros(empty, "int32") if array is None else np.asarray(array, "int32")
            for array, empty in (
                (prefixes, (rows, 0)),
                (min_lengths, (0,)),
                (suppressed, (0,)),
                (seeds, (rows,)),
            )
        ]
        if keras.backend.backend() == "tensorflow" and takes_any_shape():
            return run(source_ids, max_lengths, *given, np.int32(max_length))
        return run(source_ids, max_lengths, *given, max_length=max_length)

    return search


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


def translate_ids(
    models: keras.Model | Sequence[keras.Model],
    source_ids: Tensor,
    max_lengths: Tensor,
    *,
    max_length: int,
    beam_size: int = 4,
    sampled: bool = False,
    **settings: Any,
) -> SearchResult:
    """Searches for the best outputs of a Transformer; traceable, not compiled.

    The source is encoded once. The K beams of a sentence are K queries in one call of `decode`,
    and K rows of its cache; they share the memory of their source.

    Args:
        models: a `Transformer`, or several whose probabilities are averaged.
        source_ids: (B, S).
        max_lengths: (B,).
        max_length: L.
        beam_size: K, or the number of samples.
        sampled: whether to draw outputs by `sample`.
        **settings: of `beam_search`, or of `sample`.

    Returns:
        A `SearchResult`.
    """
    models = tuple(models) if isinstance(models, (list, tuple)) else (models,)
    memory_mask = masking.padding_mask(source_ids)
    memories = [model.encode(source_ids, memory_mask, training=False) for model in models]

    def step(token_ids, index, ancestors, caches):
        if keras.backend.backend() == "torch":
            index = int(index)  # a number cuts a slice of the cache; a tensor gathers elements
        decoder_mask = masking.ancestor_mask(ancestors)
        logits, new_caches = [], []
        for model, memory, cache in zip(models, memories, caches, strict=True):
            hidden, cache = model.decode(
                token_ids,
                memory,
                decoder_mask=decoder_mask,
                memory_mask=memory_mask,
                cache=cache,
                cache_index=index * beam_size,
                positions=index,
                training=False,
            )
            logits.append(model.output_projection(hidden))
            new_caches.append(cache)
        return _mean_in_logits(logits), tuple(new_caches)

    caches = tuple(
        model.init_cache(memory, max_length * beam_size)
        for model, memory in zip(models, memories, strict=True)
    )
    lengths = {"max_lengths": max_lengths, "max_length": max_length}
    if sampled:
        return sample(step, caches, **lengths, num_samples=beam_size, **settings)
    return beam_search(step, caches, **lengths, beam_size=beam_size, **settings)


def _mean_in_logits(logits):
    """Logits whose softmax is the mean of the models' probabilities."""
    if len(logits) == 1:
        return logits[0]
    each = [ops.log_softmax(ops.cast(one, "float32"), axis=-1) for one in logits]
    return ops.logsumexp(ops.stack(each, axis=0), axis=0)  # the divisor cancels
