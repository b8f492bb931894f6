"""Table 3 as one command: every row trained, scaled to what is at hand, beside the paper's figures.

The folder holds

    ablation.json   what it was begun with; going on must agree with it
    runs/           ROW-SEED, the folder of a run as `train` makes it; may be removed once done
    results/        ROW-SEED.json, what a finished run reached
    table.md        the table, of all results that are there; table.json, table.png
"""

import dataclasses
import gc
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from keras_aiayn import plots
from keras_aiayn.config import TABLE_3, TransformerConfig, table3
from keras_aiayn.data import corpus
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.training import distribution, folder, report, train
from keras_aiayn.training.distribution import Devices
from keras_aiayn.training.folder import Configs

# What the paper prints: perplexity, BLEU, millions of parameters where there are any.
PAPER: dict[str, tuple[float, float, int | None]] = {
    "base": (4.92, 25.8, 65),
    "A-h1": (5.29, 24.9, None),
    "A-h4": (5.00, 25.5, None),
    "A-h16": (4.91, 25.8, None),
    "A-h32": (5.01, 25.4, None),
    "B-dk16": (5.16, 25.1, 58),
    "B-dk32": (5.01, 25.4, 60),
    "C-N2": (6.11, 23.7, 36),
    "C-N4": (5.19, 25.3, 50),
    "C-N8": (4.88, 25.5, 80),
    "C-d256": (5.75, 24.5, 28),
    "C-d1024": (4.66, 26.0, 168),
    "C-ff1024": (5.12, 25.4, 53),
    "C-ff4096": (4.75, 26.2, 90),
    "D-drop0.0": (5.77, 24.6, None),
    "D-drop0.2": (4.95, 25.5, None),
    "D-ls0.0": (4.67, 25.3, None),
    "D-ls0.2": (5.47, 25.7, None),
    "E-learned": (4.92, 25.7, None),
    "big": (4.33, 26.4, 213),
}
# The paper's letters for what a row changes.
LETTERS = {
    "num_layers": "N",
    "hidden_dim": "d_model",
    "intermediate_dim": "d_ff",
    "num_heads": "h",
    "key_dim": "d_k",
    "value_dim": "d_v",
    "dropout": "P_drop",
    "label_smoothing": "ε_ls",
    "positions": "positions",
}
# The smallest width of a row, d_k of A-h32 and B-dk16: in sixteenths, each width stays whole.
SMALLEST_WIDTH = 16
# A row is judged once, at its end, and of its checkpoints only the last is of use.
ONE_VALIDATION = ["evaluate_every=0", "keep_last=1"]
# What makes the rows, and what would end one before the others.
NOT_TO_SET = {name for row in TABLE_3.values() for changes in row for name in changes}
NOT_TO_SET |= {"vocabulary_size", "target_vocabulary_size", "seed", "patience"}


def run(
    data: Prepared,
    output: Path,
    *,
    steps: int,
    rows: Sequence[str] = (),
    seeds: int = 1,
    scale: float = 1.0,
    settings: Sequence[str] = (),
    devices: Devices | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Trains rows of Table 3 (section 6.2) and writes the table; goes on where it was stopped.

    The first seed of all rows comes first, then the second. What has a result is not trained
    again, so that more rows, or more seeds of some rows, can be added in the same folder.

    Args:
        data: the prepared corpus, with validation texts.
        output: the folder; a new one, or that of an earlier call with the same settings.
        steps: updates of each row; `big` has no more than the others.
        rows: names of `TABLE_3`; all by default. `base` is always among them.
        seeds: how many runs of each row, with seeds 1, 2 ...
        scale: of d_model, d_ff, d_k and d_v of each row; see `scaled`.
        settings: of all rows, such as `"warmup_steps=1000"`.
        devices: what `distribution.start` took; all by default.
        console: where the first process reports; standard error by default.

    Returns:
        The table's rows, as in `table.json`.

    Raises:
        ValueError: for a row that is none, or settings that cannot be or that differ from those
            the folder was begun with.
    """
    own = devices or distribution.start()
    console = console or Console(stderr=True)
    console.quiet = console.quiet or not own.is_first
    chosen = _chosen(rows)
    _check(data, seeds, settings)
    settings = [*settings, f"steps={steps}"]
    # At the paper's size, so that of two scales only the scale itself differs.
    begun = folder.started_now(data, configure(data, "base", 1.0, settings, seed=1))
    all_configs = {row: configure(data, row, scale, settings, seed=1) for row in chosen}
    own.first(lambda: _begin(output, {"scale": scale, **begun}))

    wanted = [(row, seed) for seed in range(1, seeds + 1) for row in chosen]
    missing = own.first(lambda: [one for one in wanted if not _result_path(output, *one).exists()])
    console.print(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them done before")
    for number, (row, seed) in enumerate(missing, start=1):
        console.print(f"run {number} of {len(missing)}: {row}, seed {seed}: {difference(row)}")
        model_config, config = all_configs[row]
        configs = model_config, dataclasses.replace(config, seed=seed)
        try:
            _train(data, output, row, configs, own, console)
        except KeyboardInterrupt:
            console.print("the same command goes on with this row")
            raise
        own.first(lambda: _write_table(output))
    own.first(lambda: _draw(output, console))
    return own.first(lambda: _write_table(output))


def scaled(config: TransformerConfig, scale: float) -> TransformerConfig:
    """A model whose d_model, d_ff, d_k and d_v are those of another, times `scale`.

    Layers and heads stay, and so do all ratios of widths: eight heads of 64 in a width of 512
    become eight heads of 16 in 128 at 0.25.

    Raises:
        ValueError: for a scale that is no whole number of sixteenths: some row's d_k would not
            be whole.
    """
    sixteenths = scale * SMALLEST_WIDTH
    if not (1 <= sixteenths < math.inf and sixteenths == int(sixteenths)):
        raise ValueError(
            "`scale` must be a whole number of sixteenths, such as 0.125, 0.25 or 1: the smallest "
            f"d_k of a row is {SMALLEST_WIDTH}. Received: {scale}"
        )
    key_dim, value_dim = _head_sizes(config)
    return dataclasses.replace(
        config,
        hidden_dim=int(config.hidden_dim * scale),
        intermediate_dim=int(config.intermediate_dim * scale),
        key_dim=int(key_dim * scale),
        value_dim=int(value_dim * scale),
    )


def parameters(config: TransformerConfig) -> int:
    """The weights of a model of Table 3, by formula: one embedding matrix, attention without bias.

    Sections 3.1 to 3.4; the same as `count_params()` of the model that is built.
    """
    d, ff = config.hidden_dim, config.intermediate_dim
    d_k, d_v = _head_sizes(config)
    attention = 2 * d * config.num_heads * d_k + 2 * d * config.num_heads * d_v
    feed_forward = 2 * d * ff + ff + d
    norm = 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    positions = d * (config.max_length or 0)
    layers = config.num_layers * (encoder_layer + decoder_layer)
    return layers + config.vocabulary_size * d + positions


def configure(
    data: Prepared, row: str, scale: float, settings: Sequence[str], seed: int
) -> Configs:
    """A row's configurations for a corpus.

    Args:
        data: the corpus.
        row: a name of `TABLE_3`.
        scale: of the widths.
        settings: `name=value`, of all rows.
        seed: of the run.
    """
    model, training = train.configure(data, row, [*ONE_VALIDATION, *settings, f"seed={seed}"])
    return scaled(model, scale), training


def difference(row: str) -> str:
    """What a row of Table 3 changes of base, in the paper's letters and at its size."""
    if row == "base":
        model, training = table3("base")
        key_dim, value_dim = _head_sizes(model)
        values = dataclasses.asdict(model) | {"key_dim": key_dim, "value_dim": value_dim}
        changes = values | {"label_smoothing": training.label_smoothing}
    else:
        changes = TABLE_3[row][0] | TABLE_3[row][1]
    named = [f"{letter} {changes[name]}" for name, letter in LETTERS.items() if name in changes]
    return ", ".join(named)


def table(output: Path) -> list[dict[str, Any]]:
    """The rows of the table, of all results in a folder, in the paper's order."""
    read = [_read(path) for path in sorted((output / "results").glob("*.json"))]
    rows = []
    for name, (perplexity, bleu, millions) in PAPER.items():
        results = sorted((one for one in read if one["row"] == name), key=lambda one: one["seed"])
        if results:
            rows.append(
                {
                    "row": name,
                    "difference": difference(name),
                    "parameters_at_the_papers_size": parameters(table3(name)[0]),
                    "parameters": results[0]["parameters"],
                    "seeds": [one["seed"] for one in results],
                    "perplexity": _mean_and_spread([one["perplexity"] for one in results]),
                    "bleu": _mean_and_spread([one["bleu"] for one in results]),
                    "bleu_signature": results[0]["bleu_signature"],
                    "paper": {"perplexity": perplexity, "bleu": bleu, "millions": millions},
                }
            )
    return rows


def _head_sizes(config: TransformerConfig) -> tuple[int, int]:
    """d_k and d_v, where they are not said d_model / h."""
    key_dim = config.key_dim or config.hidden_dim // config.num_heads
    return key_dim, config.value_dim or key_dim


def _chosen(rows: Sequence[str]) -> list[str]:
    """The rows in the paper's order, base among them."""
    for row in rows:
        table3(row)  # refuses what is no row
    return [row for row in TABLE_3 if row == "base" or row in (rows or TABLE_3)]


def _check(data: Prepared, seeds: int, settings: Sequence[str]) -> None:
    """Refuses what would make another table than the paper's."""
    if data.valid is None:
        raise ValueError(
            f"{data.folder} was prepared without validation texts, by which rows are compared: "
            "prepare with --valid-source and --valid-target"
        )
    if seeds < 1:
        raise ValueError(f"`seeds` must be positive. Received: {seeds}")
    for setting in settings:
        name = setting.partition("=")[0]
        if name in NOT_TO_SET:
            raise ValueError(
                f"`{name}` is what rows differ by, or must be alike in all, and cannot be set. "
                f"Received: {setting!r}"
            )


def _begin(output: Path, begun: dict[str, Any]) -> None:
    """Makes the folder, or refuses one that was begun otherwise."""
    path = output / "ablation.json"
    if path.exists():
        folder.check_alike(output, _read(path), begun, may_change=("package",))
        return
    with corpus.whole_folder(output) as new:
        _write(new / "ablation.json", begun)


def _train(
    data: Prepared, output: Path, row: str, configs: Configs, own: Devices, console: Console
) -> None:
    """One run, begun or gone on with, and its result."""
    seed = configs[1].seed
    path = output / "runs" / f"{row}-{seed}"
    resume = own.first((path / "config.json").exists)
    translator = train.run(data, path, configs, resume=resume, devices=own, console=console)
    count = translator.model.count_params()

    def write() -> None:
        record = report.read_log(path / "log.jsonl")[0][-1]
        result = {
            "row": row,
            "seed": seed,
            "parameters": count,
            "step": record["step"],
            "perplexity": record["valid_perplexity"],
            "bleu": record["bleu"],
            "bleu_signature": record["bleu_signature"],
            "training_perplexity": record["perplexity"],
            "training_minutes": record["seconds"] / 60,
            "backend": keras.backend.backend(),
        }
        _result_path(output, row, seed).parent.mkdir(exist_ok=True)
        _write(_result_path(output, row, seed), result)

    own.first(write)
    del translator
    gc.collect()  # the model and what was compiled for it go before the next ones come


def _result_path(output: Path, row: str, seed: int) -> Path:
    return output / "results" / f"{row}-{seed}.json"


def _write(path: Path, value: Any) -> None:
    with corpus.whole_file(path, "w") as stream:
        stream.write(json.dumps(value, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is damaged: remove it, and what it tells is made again") from None


def _mean_and_spread(values: Sequence[float]) -> dict[str, float | None]:
    """The mean, and the standard deviation of one run where there are several."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "spread": spread}


def _draw(output: Path, console: Console) -> None:
    """The picture, where Matplotlib is installed and there is a row to compare with base."""
    if len(table(output)) < 2:
        return
    try:
        plots.plot_ablation(table(output), output / "table.png")
    except ImportError as error:
        console.print(f"no picture is drawn: {error}")


def _write_table(output: Path) -> list[dict[str, Any]]:
    """Writes `table.json` and `table.md`; gives the rows."""
    rows, begun = table(output), _read(output / "ablation.json")
    _write(output / "table.json", {"begun": begun, "rows": rows})
    with corpus.whole_file(output / "table.md", "w") as stream:
        stream.write(text(rows, begun))
    return rows


def text(rows: Sequence[dict[str, Any]], begun: dict[str, Any]) -> str:
    """The table in Markdown, with what its figures are.

    Args:
        rows: of `table`.
        begun: what the folder was begun with.
    """
    heads = ["row", "what differs", "M by formula", "M, paper", "M here", "seeds",
             "perplexity", "BLEU", "perplexity, paper", "BLEU, paper"]  # fmt: skip
    cells = [heads, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    training = begun["training"]
    notes = (
        f"Widths times {begun['scale']:g}, {training['steps']:,} updates of "
        f"{training['tokens_per_batch']:,} tokens. What differs, and M by formula (millions of "
        "parameters, 37,000 subwords), are at the paper's size. Perplexity, of a subword and "
        "without smoothing, and BLEU are of the validation pairs, as mean ± standard deviation "
        f"over seeds; beam search, no averaging. BLEU: {rows[0]['bleu_signature']}. The paper's "
        "figures are of newstest2013, its BLEU is tokenised: compare changes, not figures."
    )
    return "\n".join(lines) + f"\n\n{notes}\n"


def _cells(row: dict[str, Any]) -> list[str]:
    paper = row["paper"]
    return [
        row["row"],
        row["difference"],
        f"{row['parameters_at_the_papers_size'] / 1e6:.1f}",
        str(paper["millions"] or ""),
        f"{row['parameters'] / 1e6:.2f}",
        str(len(row["seeds"])),
        _with_spread(row["perplexity"], 2),
        _with_spread(row["bleu"], 2),
        f"{paper['perplexity']:.2f}",
        f"{paper['bleu']:.1f}",
    ]


def _with_spread(value: dict[str, float | None], digits: int) -> str:
    mean, spread = value["mean"], value["spread"]
    return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"
