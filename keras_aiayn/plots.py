"""Pictures, by Matplotlib."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_aiayn.special_ids import BOS, EOS
from keras_aiayn.translator import Translator


def plot_attention(
    translator: Translator, text: str, output: str | os.PathLike[str], layer: int = -1
) -> None:
    """Draws where the decoder looked in the source, head by head (as the paper's Figure 3).

    Args:
        translator: a trained translator.
        text: a source sentence; it is translated, and the translation's attention drawn.
        output: the picture, `.png`, `.svg` or `.pdf`.
        layer: of the decoder; the last by default.
    """
    translation = translator.translate([text], details=True)[0]
    source_ids = [*translator.source_tokenizer.encode([text])[0], EOS]
    target_ids = translator.target_tokenizer.encode([translation.text])[0]
    scores = translator.model.attention_scores(
        np.array([source_ids], "int32"), np.array([[BOS, *target_ids]], "int32")
    )
    weights = np.asarray(_to_numpy(scores["cross"][layer]))[0]  # (H, T, S)
    _draw_heads(
        weights,
        keys=translator.source_tokenizer.pieces(source_ids),
        queries=translator.target_tokenizer.pieces([*target_ids, EOS]),
        title=f"{text}  →  {translation.text}",
        output=Path(output),
    )


def _draw_heads(
    weights: np.ndarray, keys: list[str], queries: list[str], title: str, output: Path
) -> None:
    figure_module = _matplotlib()
    heads = len(weights)
    width, height = 0.32 * len(keys) + 0.9, 0.32 * len(queries) + 0.9
    figure = figure_module.Figure(figsize=(heads * width + 0.9, height + 0.9), layout="constrained")
    axes = figure.subplots(1, heads, sharey=True, squeeze=False)[0]
    for head, axis in enumerate(axes):
        image = axis.imshow(weights[head], cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
        axis.set_title(f"head {head + 1}", fontsize=9)
        axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=8)
        axis.set_yticks(range(len(queries)), queries, fontsize=8)
    axes[0].set_ylabel("writes")
    figure.supxlabel("reads", fontsize=10)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention")
    figure.savefig(output, dpi=150)


def _to_numpy(tensor: Any) -> np.ndarray:
    from keras import ops

    return ops.convert_to_numpy(tensor)


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError:
        raise ImportError("pictures need Matplotlib: pip install 'keras-aiayn[plots]'") from None
    return matplotlib.figure
