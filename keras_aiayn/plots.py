"""Pictures, by Matplotlib: attention, positions, learning rates, how a run went, and Table 3.

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


def plot_ablation(rows: Sequence[Mapping[str, Any]], output: Output) -> None:
    """Draws by how much each row of Table 3 differs from base, and by how much the paper's does.

    Args:
        rows: of `ablation.table`, base among them.
        output: the picture.

    Raises:
        ValueError: where base is missing, or stands alone.
    """
    base = next((row for row in rows if row["row"] == "base"), None)
    others = [row for row in rows if row["row"] != "base"]
    if base is None or not others:
        raise ValueError(
            "changes are those from base to another row. "
            f"Received: {', '.join(row['row'] for row in rows) or 'no row'}"
        )
    size = (11, 2 + 0.28 * len(others))
    figure = _matplotlib().Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_changes(left, base, others, "perplexity", lambda value, to: 100 * (value / to - 1))
    _draw_changes(right, base, others, "bleu", lambda value, to: value - to)
    left.set_xlabel("change of perplexity, % (left is better)")
    right.set_xlabel("change of BLEU (right is better)")
    left.set_yticks(range(len(others)), [row["row"] for row in others])
    left.invert_yaxis()
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    _save(figure, output)


def _draw_changes(
    axis: Any,
    base: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    measure: str,
    change: Callable[[float, float], float],
) -> None:
    """One measure: rows from above to below, their change from base, and base's noise as a band."""
    mean, spread = base[measure]["mean"], base[measure]["spread"]
    if spread is not None:
        band = change(mean - spread, mean), change(mean + spread, mean)
        axis.axvspan(*band, color="0.88", label=f"noise: base over {len(base['seeds'])} seeds")
    axis.axvline(0, color="0.4", linewidth=0.8)
    places = range(len(others))
    ours = [change(row[measure]["mean"], mean) for row in others]
    spreads = [row[measure]["spread"] or 0.0 for row in others]
    bars = [
        change(row[measure]["mean"] + spread, mean) - one
        for row, spread, one in zip(others, spreads, ours, strict=True)
    ]
    paper = [change(row["paper"][measure], base["paper"][measure]) for row in others]
    axis.errorbar(ours, places, xerr=bars, fmt="o", color="C0", label="here, ± spread over seeds")
    axis.plot(paper, places, "D", color="C1", fillstyle="none", label="the paper")
    axis.grid(alpha=0.3)


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
