"""Pictures, by Matplotlib: attention, positions, learning rates, and how a run went.

Each function writes one file, `.png`, `.svg` or `.pdf` by its name.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_aiayn.data.corpus import whole_file
from keras_aiayn.layers.position import SinusoidalPositionEncoding
from keras_aiayn.special_ids import BOS, EOS
from keras_aiayn.training.report import read_log
from keras_aiayn.translator import Translator

Output = str | os.PathLike[str]
KINDS = ("encoder", "decoder", "cross")


def plot_attention(
    translator: Translator, text: str, output: Output, layer: int = -1, kind: str = "cross"
) -> None:
    """Draws where a layer looked, head by head (as the paper's Figures 3 to 5).

    Args:
        translator: a trained translator.
        text: a source sentence; it is translated, and the attention of both drawn.
        output: the picture.
        layer: its number, from 0; the last by default.
        kind: `"encoder"` for how the source looks at itself, `"decoder"` for how the translation
            looks at what was written before, `"cross"` for how it looks at the source.

    Raises:
        ValueError: for another kind, or a layer that is not there.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}. Received: {kind!r}")
    layers = len(translator.model.encoder_blocks)
    if not -layers <= layer < layers:
        raise ValueError(f"`layer` must be from 0 to {layers - 1}. Received: {layer}")
    translation = translator.translate([text], details=True)[0]
    source_ids = [*translator.source_tokenizer.encode([text])[0], EOS]
    source_ids = source_ids[: translator.model.max_length]  # what the search read, too
    if not translation.token_ids:
        raise ValueError(f"there is no translation to look at. Received: {text!r}")
    decoder_ids = [BOS, *translation.token_ids[:-1]]  # those searched: text can be cut otherwise
    scores = translator.model.attention_scores(
        np.array([source_ids], "int32"), np.array([decoder_ids], "int32")
    )
    sources = translator.source_tokenizer.pieces(source_ids)
    read, written = translator.target_tokenizer.pieces(decoder_ids), translation.tokens
    keys, queries = {
        "encoder": (sources, sources),
        "decoder": (read, written),
        "cross": (sources, written),
    }[kind]
    _draw_heads(
        _to_numpy(scores[kind][layer])[0],  # (H, queries, keys)
        keys,
        queries,
        title=_printable(
            f"{kind}, layer {layer % layers + 1} of {layers}:  {text}  →  {translation.text}"
        ),
        ylabel="reads for" if kind == "encoder" else "writes",
        output=Path(output),
    )


def plot_positions(output: Output, hidden_dim: int = 512, length: int = 100) -> None:
    """Draws the encodings of positions (section 3.5) and how alike two of them are by distance.

    Args:
        output: the picture.
        hidden_dim: d_model, even.
        length: how many positions.
    """
    if hidden_dim % 2 or hidden_dim < 2 or length < 1:
        raise ValueError(
            "`hidden_dim` must be even and positive, `length` positive. "
            f"Received: hidden_dim={hidden_dim}, length={length}"
        )
    encoding = _to_numpy(SinusoidalPositionEncoding.encode(np.arange(length), hidden_dim))
    figure = _matplotlib().Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(encoding, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    left.set(xlabel="dimension (even: sine, odd: cosine)", ylabel="position")
    left.set_title(f"PE(position), d = {hidden_dim}")
    figure.colorbar(image, ax=left)
    right.plot(encoding @ encoding[length // 2] / (hidden_dim / 2))
    right.set(
        xlabel="position", ylabel="dot product, 1 for equal", title="Near positions are alike"
    )
    right.annotate(
        f"position {length // 2}", (length // 2, 1), xytext=(12, 0), textcoords="offset points",
        ha="left", va="center",
    )  # fmt: skip
    _save(figure, output)


def plot_schedule(
    schedules: Mapping[str, Callable[[int], Any]], output: Output, steps: int = 20_000
) -> None:
    """Draws learning rates against updates (section 5.3).

    Args:
        schedules: by their names; each is called with the number of earlier updates.
        output: the picture.
        steps: how many updates.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be positive. Received: {steps}")
    figure = _matplotlib().Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    updates = np.unique(np.linspace(1, steps, 400).astype(int))
    for name, schedule in schedules.items():
        axis.plot(updates, [float(schedule(int(update) - 1)) for update in updates], label=name)
    axis.set(xlabel="update", ylabel="learning rate", ylim=(0, None), xlim=(0, steps))
    axis.legend()
    _save(figure, output)


def plot_run(folders: Sequence[str | os.PathLike[str]], output: Output) -> None:
    """Draws how runs went: BLEU against time and updates, perplexity, and the learning rate.

    Args:
        folders: of the runs, whose `log.jsonl` is read.
        output: the picture.

    Raises:
        ValueError: where a folder has no log.
    """
    figure = _matplotlib().Figure(figsize=(11, 7.5), layout="constrained")
    by_time, by_update, perplexity, rate = figure.subplots(2, 2).flat
    for number, folder in enumerate(folders):
        log = _read_log(Path(folder))
        name, color = Path(folder).name, f"C{number}"
        steps = [record["step"] for record in log]
        minutes = [record["seconds"] / 60 for record in log]
        if all("bleu" in record for record in log):
            bleu = [record["bleu"] for record in log]
            by_time.plot(minutes, bleu, ".-", color=color, label=name)
            by_update.plot(steps, bleu, ".-", color=color, label=name)
            valid = [record["valid_perplexity"] for record in log]
            perplexity.plot(steps, valid, ".-", color=color, label=f"{name}, validation")
        train = [record["perplexity"] for record in log]
        perplexity.plot(steps, train, "--", color=color, label=f"{name}, training")
        rate.plot(steps, [record["learning_rate"] for record in log], color=color, label=name)
    by_time.set(xlabel="minutes of training", ylabel="BLEU of the validation")
    by_update.set(xlabel="update", ylabel="BLEU of the validation")
    perplexity.set(xlabel="update", ylabel="perplexity, not smoothed", yscale="log")
    rate.set(xlabel="update", ylabel="learning rate", ylim=(0, None))
    for axis in (by_time, by_update, perplexity, rate):
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    _save(figure, output)


def _save(figure: Any, output: Output) -> None:
    with whole_file(output) as stream:
        figure.savefig(stream, format=Path(output).suffix.removeprefix("."), dpi=150)


def _read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    records, _ = read_log(path) if path.is_file() else ([], False)
    if not records:
        raise ValueError(f"{folder} has no log of a run: log.jsonl is missing or empty")
    return records


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{MIDDLE DOT}" for letter in text)


def _draw_heads(
    weights: np.ndarray, keys: list[str], queries: list[str], title: str, ylabel: str, output: Path
) -> None:
    rows = math.isqrt(len(weights))  # so that a page need not shrink many heads beyond reading
    columns = -(-len(weights) // rows)
    width, height = 0.32 * len(keys) + 0.9, 0.32 * len(queries) + 0.9
    size = (columns * width + 0.9, rows * height + 0.9)
    figure = _matplotlib().Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    axes = grid.flat[: len(weights)]
    for axis in grid.flat[len(weights) :]:
        axis.remove()
    for head, axis in enumerate(axes):
        image = axis.imshow(weights[head], cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
        axis.set_title(f"head {head + 1}", fontsize=9)
        # Two dollar signs in a text are no formula.
        axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=8, parse_math=False)
        axis.set_yticks(range(len(queries)), queries, fontsize=8, parse_math=False)
    figure.supylabel(ylabel, fontsize=10)
    figure.supxlabel("reads", fontsize=10)
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.8 / rows, label="attention")
    _save(figure, output)


def _to_numpy(tensor: Any) -> np.ndarray:
    from keras import ops

    return ops.convert_to_numpy(tensor)


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError:
        raise ImportError("pictures need Matplotlib: pip install 'keras-aiayn[plots]'") from None
    return matplotlib.figure
