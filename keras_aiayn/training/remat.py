"""Rematerialisation: gradients in less memory, for the time of another forward pass."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_aiayn.transformer import Transformer


def recompute_blocks(model: Transformer) -> None:
    """Makes training keep the inputs of each block only, and compute the rest again.

    Keras's own `RematScope` draws new dropout masks for the second computation, so its gradients
    are those of another function: here each mask is drawn once. It is a setting of training and
    not of the model: no config and no file knows of it.

    Args:
        model: whose blocks to change.
    """
    for block in (*model.encoder_blocks, *model.decoder_blocks):
        block.call = _recomputing(block)


def _recomputing(block: keras.Layer) -> Callable[..., Any]:
    call = block.call
    dropouts = [
        layer for layer in block._flatten_layers() if isinstance(layer, keras.layers.Dropout)
    ]
    generators = [layer.seed_generator for layer in dropouts if layer.rate > 0]

    def recomputing(*tensors: Any, training: bool | None = None, **options: Any) -> Any:
        if not training:
            return call(*tensors, training=training, **options)
        seeds = [generator.next() for generator in generators]

        def pure(*tensors: Any) -> Any:
            with _giving(generators, seeds):
                return call(*tensors, training=True, **options)

        return keras.remat(pure)(*tensors)

    return recomputing


@contextlib.contextmanager
def _giving(generators: Sequence[Any], seeds: Sequence[Any]) -> Iterator[None]:
    """Lets generators give seeds that were drawn before, and leaves their state alone."""
    for generator, seed in zip(generators, seeds, strict=True):
        generator.next = lambda ordered=True, seed=seed: seed
    try:
        yield
    finally:
        for generator in generators:
            del generator.next
