"""The paper's Table 1, measured: what layers cost as n and d grow, and how far they see.

    KERAS_BACKEND=jax python benchmarks/table1.py

Self-attention, a recurrent layer (`SimpleRNN`), a causal convolution of width 3 and self-attention
to a neighbourhood of 64 positions, forward, on a batch of 4: compiled on JAX and TensorFlow, eager
on PyTorch. Attention is Equation 1 alone, with one head and without projections, as the paper
counts it. The length n grows at width d = 256, the width at n = 512; exponents are fitted over the
upper half of each range.

The other two columns are counted in the graph of who reads whom: the operations of a layer that
have to wait for one another, and the steps on the shortest way from the first position to the one
that is hardest to reach, through as many layers as it takes. The paper's log_k n is that of dilated
convolutions; without dilation it is of order n / k.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import curves
import numpy as np
import workers

Node = tuple[int, int]  # (layer, position); layer 0 are the inputs
KERNEL = 3


class Settings(NamedTuple):
    """The sizes of a run."""

    lengths: list[int]
    widths: list[int]
    length: int  # while the width grows
    width: int  # while the length grows
    batch: int
    radius: int  # of a neighbourhood, on either side
    counted: list[int]  # lengths at which operations are counted


FULL = Settings([128, 256, 512, 1_024, 2_048, 4_096], [64, 128, 256, 512, 1_024], 512, 256, 4, 32,
                [16, 32, 64, 128, 256, 512, 1_024])  # fmt: skip
QUICK = Settings([32, 64, 128], [16, 32, 64], 32, 16, 1, 8, [16, 32, 64])


def restricted_attention(query: Any, key: Any, value: Any, radius: int) -> Any:
    """Self-attention to the nearest `radius` positions on either side, in O(r n d).

    A block of `radius` queries finds all its keys in its own block and the two beside it.

    Args:
        query: (B, n, d), n a multiple of `radius`.
        key: (B, n, d).
        value: (B, n, d).
        radius: of the neighbourhood.

    Returns:
        (B, n, d).
    """
    from keras import ops

    from keras_aiayn.layers.attention import scaled_dot_product_attention

    batch, length, width = query.shape
    blocks = length // radius

    def cut(x: Any) -> Any:
        # Blocks come where attention has its batch, for which masks differ; the batch comes where
        # it has its heads.
        return ops.swapaxes(ops.reshape(x, (batch, blocks, radius, width)), 0, 1)

    def with_neighbours(x: Any) -> Any:
        x = ops.pad(cut(x), [[1, 1], [0, 0], [0, 0], [0, 0]])
        return ops.concatenate([x[:-2], x[1:-1], x[2:]], axis=2)  # (blocks, B, 3 radius, d)

    first = np.arange(blocks)[:, None, None] * radius
    queries = first + np.arange(radius)[:, None]
    keys = first - radius + np.arange(3 * radius)
    mask = (abs(queries - keys) <= radius) & (keys >= 0) & (keys < length)
    output, _ = scaled_dot_product_attention(
        cut(query), with_neighbours(key), with_neighbours(value), ops.convert_to_tensor(mask)
    )
    return ops.reshape(ops.swapaxes(output, 0, 1), (batch, length, width))


def full_attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """Self-attention of one head: (B, n, d) each, a mask (1, n, n)."""
    from keras_aiayn.layers.attention import scaled_dot_product_attention

    heads = (x[:, None] for x in (query, key, value))
    return scaled_dot_product_attention(*heads, mask)[0][:, 0]


def band(length: int, radius: int) -> np.ndarray:
    """The mask that restricts full attention to a neighbourhood: (1, n, n)."""
    positions = np.arange(length)
    return (abs(positions[:, None] - positions) <= radius)[None]


def check_restricted(length: int, width: int, radius: int) -> None:
    """Fails where restricted attention is not full attention with a mask."""
    from keras import ops

    drawn = np.random.default_rng(1).normal(size=(3, 2, length, width)).astype("float32")
    one = restricted_attention(*map(ops.convert_to_tensor, drawn), radius)
    mask = ops.convert_to_tensor(band(length, radius))
    other = full_attention(*map(ops.convert_to_tensor, drawn), mask)
    one, other = (ops.convert_to_numpy(output) for output in (one, other))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def layer_of(name: str, shape: tuple[int, int, int], radius: int) -> tuple[list, Callable]:
    """The Keras layers of a kind, built, and the function of (B, n, d) that it is."""
    import keras

    if name == "self-attention":
        return [], lambda x: full_attention(x, x, x)
    if name == "restricted":
        return [], lambda x: restricted_attention(x, x, x, radius)
    if name == "recurrent":
        layer = keras.layers.SimpleRNN(shape[-1], return_sequences=True)
    else:
        layer = keras.layers.Conv1D(shape[-1], KERNEL, padding="causal")
    layer.build(shape)
    return [layer], layer


def seconds(name: str, length: int, width: int, settings: Settings, rounds: int) -> float:
    """The median time of a layer."""
    from keras import ops

    from keras_aiayn.decoding.compiled import compiled

    shape = (settings.batch, length, width)
    layers, function = layer_of(name, shape, settings.radius)
    # One number of all comes back, so that the copy does not count.
    run = compiled(layers, lambda x: ops.max(function(x)))
    x = ops.convert_to_tensor(np.random.default_rng(1).normal(size=shape).astype("float32"))
    return curves.seconds(lambda: run(x), rounds)


# Who reads whom: the nodes that read a node, in a stack of as many layers as it takes.


def readers_of_attention(layer: int, position: int, length: int) -> Iterable[Node]:
    """Everyone in the next layer."""
    return ((layer + 1, other) for other in range(length))


def readers_of_recurrence(layer: int, position: int, length: int) -> Iterable[Node]:
    """The state at an input's place, and the state after a state."""
    other = position + layer
    return [(1, other)] if other < length else []


def readers_of_convolution(dilated: bool) -> Callable[[int, int, int], Iterable[Node]]:
    """The places after a position in the next layer, in a dilated stack KERNEL ** layer apart."""

    def readers(layer: int, position: int, length: int) -> Iterable[Node]:
        step = KERNEL**layer if dilated else 1
        others = range(position, min(length, position + KERNEL * step), step)
        return ((layer + 1, other) for other in others)

    return readers


def readers_of_restricted(radius: int) -> Callable[[int, int, int], Iterable[Node]]:
    """The neighbourhood in the next layer."""

    def readers(layer: int, position: int, length: int) -> Iterable[Node]:
        others = range(max(0, position - radius), min(length, position + radius + 1))
        return ((layer + 1, other) for other in others)

    return readers


def sequential_operations(readers: Callable, length: int) -> int:
    """The longest chain of operations in one layer that wait for one another."""
    chain = 0
    waiting = {(0, position) for position in range(length)}
    while waiting := {n for node in waiting for n in readers(*node, length) if n[0] == 1}:
        chain += 1
    return chain


def path_length(readers: Callable, length: int) -> int:
    """The steps from the first input to the position that takes the most, breadth first."""
    steps, reached = 0, set()
    seen = last = {(0, 0)}
    while len(reached) < length:
        last = {n for node in last for n in readers(*node, length)} - seen
        seen, steps = seen | last, steps + 1
        reached |= {position for _, position in last}
    return steps


class Row(NamedTuple):
    """What Table 1 says of a kind of layer, and how to count it."""

    complexity: str
    exponents: tuple[str, str]  # of n and of d
    operations: str
    path: str
    path_exponent: str  # of n
    readers: Callable


def table_1(radius: int) -> dict[str, Row]:
    """The paper's table."""
    convolution = readers_of_convolution(dilated=True)
    restricted = readers_of_restricted(radius)
    return {
        "self-attention": Row("n² d", ("2", "1"), "1", "1", "0", readers_of_attention),
        "recurrent": Row("n d²", ("1", "2"), "n", "n", "1", readers_of_recurrence),
        "convolution": Row("k n d²", ("1", "2"), "1", "log_k n", "log", convolution),
        "restricted": Row("r n d", ("1", "1"), "1", "n / r", "1", restricted),
    }


def measured(paper: dict[str, Row], settings: Settings, rounds: int) -> list[dict]:
    """The curves of time by length, of time by width, and of path lengths."""
    by_length, by_width, paths = {}, {}, {}
    for name, row in paper.items():
        by_length[name] = curves.Curve(
            settings.lengths,
            [seconds(name, n, settings.width, settings, rounds) for n in settings.lengths],
            row.exponents[0],
        )
        by_width[name] = curves.Curve(
            settings.widths,
            [seconds(name, settings.length, d, settings, rounds) for d in settings.widths],
            row.exponents[1],
        )
        steps = [path_length(row.readers, n) for n in settings.counted]
        paths[name] = curves.Curve(settings.counted, steps, row.path_exponent)
        print(f"measured: {name}", flush=True)
    return [by_length, by_width, paths]


def draw(found: list[dict], settings: Settings, title: str, picture: Path) -> None:
    """A panel for each of the three."""
    drawn = curves.figure(13, 4.6, title)
    by_length, by_width, paths = drawn.subplots(1, 3)
    curves.draw(by_length, found[0], f"length n, at d = {settings.width}", "time, s")
    curves.draw(by_width, found[1], f"width d, at n = {settings.length}", "time, s")
    curves.draw(paths, found[2], "length n", "longest path, counted")
    curves.save(drawn, picture)


def rows(paper: dict[str, Row], found: list[dict], length: int) -> list[list[Any]]:
    """The lines of the table."""
    by_length, by_width, _ = found
    return [
        [name, f"O({row.complexity})", by_length[name].exponents(), by_width[name].exponents(),
         f"O({row.operations})", sequential_operations(row.readers, length),
         f"O({row.path})", path_length(row.readers, length)]
        for name, row in paper.items()
    ]  # fmt: skip


def main() -> None:
    """Measures, counts and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="Of each timing: %(default)s.")
    parser.add_argument("--picture", type=Path, help="docs/table1.png, or table1.png if --quick.")
    parser.add_argument("--quick", action="store_true", help="Toy sizes; not kept in RESULTS.md.")
    options = parser.parse_args()
    import keras

    settings = QUICK if options.quick else FULL
    picture = options.picture or curves.picture("table1.png", options.quick)
    check_restricted(4 * settings.radius, settings.width, settings.radius)
    paper = table_1(settings.radius)
    found = measured(paper, settings, options.rounds)
    backend = keras.backend.backend()
    draw(found, settings, f"Table 1, on {backend}: exponents measured (paper's)", picture)
    length = settings.counted[-1]
    header = ["layer", "complexity", "exponent of n (paper)", "of d (paper)",
              "sequential operations", f"counted at n = {length}", "path length",
              f"counted at n = {length}"]  # fmt: skip
    plain = path_length(readers_of_convolution(dilated=False), length)
    text = (
        f"n from {settings.lengths[0]} to {settings.lengths[-1]:,} at d = {settings.width}, d from "
        f"{settings.widths[0]} to {settings.widths[-1]:,} at n = {settings.length}; k = {KERNEL}, "
        f"r = {2 * settings.radius}. Restricted attention equals full attention with a mask. "
        f"Convolutions without dilation have a path of {plain}.\n\n"
        f"{workers.table(header, rows(paper, found, length))}\n\n![Table 1](../docs/table1.png)"
    )
    workers.write_section(f"Table 1, {backend}", text, keep=not options.quick)


if __name__ == "__main__":
    main()
