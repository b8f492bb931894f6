"""Draws the pictures of the annotated paper, with the code that they explain.

    python docs/pictures.py                     all of them, into docs/pictures
    python docs/pictures.py scale masks         some

What a trained model attends to is drawn by `keras-aiayn plot attention`.
"""

import argparse
import html
from pathlib import Path
from typing import Any

import numpy as np
from keras import ops

from keras_aiayn import (
    LabelSmoothedCrossentropy,
    NoamSchedule,
    Transformer,
    TransformerConfig,
    plots,
)
from keras_aiayn.layers.position import SinusoidalPositionEncoding

PICTURES = Path(__file__).parent / "pictures"


def draw_positions(folder: Path) -> None:
    """Section 3.5: the encodings, and how alike two of them are."""
    plots.plot_positions(folder / "positions.png", hidden_dim=128, length=100)


def draw_schedule(folder: Path) -> None:
    """Section 5.3: learning rates of the base and the big model."""
    schedules = {
        "base, d 512, warm-up 4,000": NoamSchedule(512, 4_000),
        "d 512, warm-up 8,000": NoamSchedule(512, 8_000),
        "big, d 1024, warm-up 4,000": NoamSchedule(1024, 4_000),
    }
    plots.plot_schedule(schedules, folder / "schedule.png", steps=20_000)


def draw_scale(folder: Path) -> None:
    """Section 3.2.1: scores grow with the size of a head, and gradients of the softmax vanish."""
    sizes = [2**power for power in range(1, 11)]
    random = np.random.default_rng(0)
    figure, (left, middle, right) = _panels(3)
    found: dict[str, list] = {"largest": [], "derivative": []}
    for size in sizes:
        query, key = (random.standard_normal((1, 1_000, 32, size)) for _ in range(2))
        raw = (query[:, :, :1] * key).sum(-1)[0]  # (1000, 32): scores of 32 keys
        both = raw, raw / size**0.5
        if size in (4, 64, 512):
            left.hist(raw.ravel(), 80, density=True, histtype="step", label=f"d_k = {size}")
        weights = [ops.convert_to_numpy(ops.softmax(scores, axis=-1)) for scores in both]
        found["largest"].append([np.median(w.max(-1)) for w in weights])
        found["derivative"].append([np.median(_derivative_norm(w)) for w in weights])
    left.set(title="raw scores", xlabel="score", ylabel="density")
    middle.set(title="largest weight, median", ylim=(0, 1.02))
    right.set(title="norm of the derivative, median", yscale="log", ylim=(1e-6, 1))
    for axis, name in ((middle, "largest"), (right, "derivative")):
        for values, label in zip(zip(*found[name], strict=True), ("raw", "scaled"), strict=True):
            axis.plot(sizes, values, ".-", label=label)
        axis.set(xlabel="d_k", xscale="log")
    _finish(figure, folder / "scale.png")


def _derivative_norm(weights: np.ndarray) -> np.ndarray:
    """Of diag(w) - w w^T, for weights (rows, keys)."""
    derivative = weights[..., None] * (np.eye(weights.shape[-1]) - weights[:, None, :])
    return np.linalg.norm(derivative, axis=(-2, -1))


def draw_masks(folder: Path) -> None:
    """Section 3.2.3: the masks of a source with two pads and a target with two pads."""
    model = Transformer(20, num_layers=1, hidden_dim=4, intermediate_dim=4, num_heads=1)
    source, target = np.array([[5, 6, 7, 8, 3, 0, 0]]), np.array([[2, 9, 10, 11, 0, 0]])
    masks = [ops.convert_to_numpy(mask)[0] for mask in model.build_masks(source, target)]
    rows = (len(source[0]), len(target[0]), len(target[0]))  # queries of the three attentions
    titles = ("encoder", "decoder", "decoder to encoder")
    figure, axes = _panels(3, height=3)
    for axis, mask, count, title in zip(axes, masks, rows, titles, strict=True):
        full = np.broadcast_to(mask, (count, mask.shape[-1]))
        axis.imshow(full, cmap="Blues", vmin=0, vmax=1.3)
        axis.set(title=f"{title}: {mask.shape}", xlabel="key", ylabel="query")
        axis.set(xticks=range(full.shape[1]), yticks=range(full.shape[0]))
        axis.set_xticks(np.arange(full.shape[1] + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(full.shape[0] + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="white")
        axis.tick_params(which="minor", length=0)
    _finish(figure, folder / "masks.png", legend=False)


def draw_offset(folder: Path) -> None:
    """Section 3.5: the matrices that move an encoding by 1, 5 and 20 positions."""
    width, length = 16, 2_000
    encoding = ops.convert_to_numpy(SinusoidalPositionEncoding.encode(np.arange(length), width))
    figure, axes = _panels(3, height=2.9)
    for axis, offset in zip(axes, (1, 5, 20), strict=True):
        matrix = np.linalg.lstsq(encoding[:-offset], encoding[offset:], rcond=None)[0]
        image = axis.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1)
        axis.set(title=f"offset {offset}", xticks=range(0, width, 2), yticks=range(0, width, 2))
        axis.set(xlabel="to dimension", ylabel="from dimension")
    figure.colorbar(image, ax=axes)
    _finish(figure, folder / "offset.png", legend=False)


def draw_smoothing(folder: Path) -> None:
    """Section 5.4: the loss of a token against the probability that it is given."""
    size = 37_000
    given = np.concatenate([np.linspace(0.02, 0.9, 200), 1 - np.logspace(-1, -8, 200)])
    figure, (axis,) = _panels(1, width=6.5)
    for smoothing in (0.0, 0.1, 0.2):
        loss = LabelSmoothedCrossentropy(smoothing)
        values = []
        for probability in given:
            logits = np.zeros((1, 1, size), "float32")  # what is left is shared out evenly
            logits[0, 0, 5] = np.log(probability / (1 - probability) * (size - 1))
            values.append(float(ops.convert_to_numpy(loss(np.array([[5]]), logits))))
        axis.plot(given, values, label=f"ε = {smoothing}")
        best = int(np.argmin(values))
        axis.plot(given[best], values[best], "k.")
    axis.set(xlabel="probability of the true token", ylabel="loss, nats", ylim=(0, 6))
    axis.set_title(f"V = {size:,}; dots at the least loss")
    _finish(figure, folder / "smoothing.png")


def draw_paths(folder: Path) -> None:
    """Section 4: steps from the first position to the last, counted."""
    lengths = [2**power for power in range(2, 11)]
    figure, (axis,) = _panels(1, width=6.5)
    axis.plot(lengths, lengths, ".-", label="recurrent: n")
    axis.plot(lengths, [-(-n // 32) for n in lengths], ".-", label="restricted, r = 64: 2 n / r")
    dilated = [next(k for k in range(1, 99) if 3**k >= n) for n in lengths]
    axis.plot(lengths, dilated, ".-", label="convolution, k = 3, dilated: log n")
    axis.plot(lengths, [1] * len(lengths), ".-", label="self-attention: 1")
    axis.set(xlabel="length n", ylabel="longest path", xscale="log", yscale="log")
    _finish(figure, folder / "paths.png")


def draw_model(folder: Path) -> None:
    """Figure 1: the base model's layers and the shapes of their weights, read from the model."""
    model = TransformerConfig.base().build(seed=1)
    (folder / "model.svg").write_text(diagram(model), encoding="utf-8")


# The block diagram. Two columns of boxes, from the bottom up as in the paper.

BOX, GAP, WIDTH, COLUMN = 44, 20, 300, 400
COLORS = {"embedding": "#fde2e2", "attention": "#fdebd0", "feed_forward": "#d6eaf8",
          "residual": "#fcf8d9", "position": "#ffffff", "projection": "#e8e4f8"}  # fmt: skip


def diagram(model: Transformer) -> str:
    """An SVG of a model: its layers, and what weights each has."""
    columns = [_encoder(model), _decoder(model)]
    height = (max(map(len, columns)) + 1) * (BOX + GAP) + 30
    parts = []
    for number, column in enumerate(columns):
        left = 40 + number * COLUMN
        blocks = (model.encoder_blocks, model.decoder_blocks)[number]
        parts += _column(column, left, height, len(blocks))
    source = _middle(columns[0], len(columns[0]) - 1, 0, height)
    cross = next(i for i, (name, *_) in enumerate(columns[1]) if name == "cross_attention")
    parts.append(_memory_arrow(source, _middle(columns[1], cross, 1, height)))
    parameters = f"{model.count_params():,} parameters"
    parts.append(_text(40 + COLUMN - 50, 18, parameters, weight="bold"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * COLUMN + 20} {height}" '
        f'font-family="sans-serif" font-size="12">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


Row = tuple[str, str, str, bool]  # key of its color, label, weights, whether it is repeated


def _encoder(model: Transformer) -> list[Row]:
    rows = _bottom(model, model.source_embedding, "encoder_token_ids")
    block = model.encoder_blocks[0]
    return rows + _sublayers(block, ("self_attention", "feed_forward"))


def _decoder(model: Transformer) -> list[Row]:
    rows = _bottom(model, model.target_embedding, "decoder_token_ids")
    block = model.decoder_blocks[0]
    rows += _sublayers(block, ("self_attention", "cross_attention", "feed_forward"))
    shared = "the embedding, transposed" if model.target_embedding.tie_projection else "its own"
    return [*rows, ("projection", "output_projection, then softmax", shared, False)]


def _bottom(model: Transformer, embedding: Any, ids: str) -> list[Row]:
    position = type(model.position).__name__
    return [
        ("embedding", f"{ids}: {type(embedding).__name__}", _shapes(embedding), False),
        ("position", f"+ {position}, dropout", _shapes(model.position), False),
    ]


def _sublayers(block: Any, names: tuple[str, ...]) -> list[Row]:
    rows = []
    for name in names:
        layer, residual = getattr(block, name), getattr(block, f"{name}_residual")
        kind = f"{name.replace('_', ' ')}: {type(layer).__name__}"
        rows.append((name, kind, _shapes(layer), True))
        rows.append((f"{name}_residual", "add, normalise", _shapes(residual), True))
    return rows


def _shapes(layer: Any) -> str:
    names = [weight.path.split("/")[-2:] for weight in layer.weights]
    shapes = ["×".join(map(str, weight.shape)) for weight in layer.weights]
    labels = [pair[0] if pair[1] == "kernel" else pair[1] for pair in names]
    return ", ".join(f"{label} {shape}" for label, shape in zip(labels, shapes, strict=True))


def _middle(column: list[Row], index: int, number: int, height: int) -> tuple[int, int]:
    y = height - 20 - (index + 1) * (BOX + GAP) + BOX // 2
    return 40 + number * COLUMN + (WIDTH if number == 0 else 0), y


def _column(column: list[Row], left: int, height: int, repeated: int) -> list[str]:
    parts = []
    for index, (name, label, weights, _) in enumerate(column):
        top = height - 20 - (index + 1) * (BOX + GAP)
        color = next(value for key, value in COLORS.items() if key in _color_key(name))
        middle = left + WIDTH // 2
        parts.append(
            f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{BOX}" rx="5" fill="{color}" '
            'stroke="#555"/>'
        )
        parts.append(_text(middle, top + 18, label))
        parts.append(_text(middle, top + 35, weights, size=9))
        parts.append(_arrow(middle, top + BOX + GAP, middle, top + BOX + 1))
    rows = [i for i, row in enumerate(column) if row[3]]
    top = height - 20 - (rows[-1] + 1) * (BOX + GAP) - 8
    tall = (rows[-1] - rows[0] + 1) * (BOX + GAP) - GAP + 16
    parts.insert(0, f'<rect x="{left - 12}" y="{top}" width="{WIDTH + 24}" height="{tall}" rx="9" '
                    'fill="#f6f6f6" stroke="#999"/>')  # fmt: skip
    parts.append(_text(left - 24, top + tall // 2, f"{repeated} ×", weight="bold"))
    return parts


def _color_key(name: str) -> str:
    return "residual" if name.endswith("_residual") else name


def _memory_arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    turn = (x1 + x2) // 2
    return (
        f'<path d="M{x1} {y1} H{turn} V{y2} H{x2 - 1}" fill="none" stroke="#000" '
        'marker-end="url(#tip)"/>'
    )


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#000" marker-end="url(#tip)"/>'


def _text(x: int, y: int, text: str, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="middle" font-size="{size}" '
        f'font-weight="{weight}">{html.escape(text)}</text>'
    )


def _panels(count: int, width: float = 9.5, height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, np.ravel(figure.subplots(1, count))


def _finish(figure: Any, output: Path, legend: bool = True) -> None:
    for axis in figure.axes if legend else []:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(output, dpi=150)


DRAWN = {
    "model": draw_model,
    "scale": draw_scale,
    "masks": draw_masks,
    "positions": draw_positions,
    "offset": draw_offset,
    "paths": draw_paths,
    "schedule": draw_schedule,
    "smoothing": draw_smoothing,
}


def main() -> None:
    """Draws what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"{', '.join(DRAWN)}; all by default")
    parser.add_argument("--output", type=Path, default=PICTURES)
    options = parser.parse_args()
    unknown = set(options.names) - set(DRAWN)
    if unknown:
        parser.error(f"no picture is called {', '.join(sorted(unknown))}")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or DRAWN:
        DRAWN[name](options.output)


if __name__ == "__main__":
    main()
