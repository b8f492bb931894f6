"""Dates, numbers and times of day from English to German: the whole line in some minutes.

    make demo                       (or: python examples/dates.py)

Makes sentence pairs, prepares them, trains a small Transformer, saves `demo.keras`, translates
lines that it was not trained on, and draws where the decoder looked in one of them.
"""

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import keras
from rich.console import Console
from rich.table import Table

from keras_aiayn.data import prepared
from keras_aiayn.data.tasks import written_dates_and_numbers
from keras_aiayn.plots import plot_attention
from keras_aiayn.training import train

TRAINED, HELD_OUT, VALIDATION = 40_000, 500, 100
EXAMPLE = "Tuesday, 3 March 1998"
AVERAGED = 8  # checkpoints of which the result is the mean, as in section 6.1
SETTINGS = [
    "num_layers=2",
    "dropout=0.0",
    "tokens_per_batch=2048",
    "warmup_steps=150",
    "learning_rate_scale=0.4",
    "max_shapes=3",
    "evaluate_every=400",
    "checkpoint_every=30",
    f"keep_last={AVERAGED}",
]


def main() -> None:
    """Makes the data, trains, translates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="updates")
    parser.add_argument("--output", type=Path, default=Path("demo.keras"))
    options = parser.parse_args()
    console = Console()

    pairs = written_dates_and_numbers(TRAINED + HELD_OUT + VALIDATION, seed=1)
    # No source comes twice, so short ones (times of day) run out early: deal all kinds evenly.
    random.Random(1).shuffle(pairs)
    held_out, rest = pairs[:HELD_OUT], pairs[HELD_OUT:]
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(rest[VALIDATION:], rest[:VALIDATION], Path(folder), console)
        settings = [*SETTINGS, f"steps={options.steps}"]
        configs = train.configure(corpus, "tiny", settings)
        train.run(corpus, Path(folder) / "run", configs, average=AVERAGED, console=console)
        shutil.copyfile(Path(folder) / "run" / "model.keras", options.output)
    translator = keras.saving.load_model(options.output)  # as a service would

    sources, references = zip(*held_out, strict=True)
    translations = translator.translate(sources)
    show(console, sources, translations, references)
    picture = options.output.with_suffix(".png")
    plot_attention(translator, EXAMPLE, picture)
    right = sum(map(str.__eq__, translations, references))
    console.print(f"exact match {100 * right / HELD_OUT:.1f} %")
    console.print(
        f"\nThe model is in {options.output}, where it looked in {picture}. Try next:\n"
        f"  echo '{EXAMPLE}' | keras-aiayn translate {options.output}\n"
        "  keras-aiayn prepare --help    to train on sentences of your own",
        highlight=False,
    )


def prepare(trained, validation, folder: Path, console: Console) -> prepared.Prepared:
    """Writes the pairs as files of text, and prepares them as one would one's own."""
    paths = {}
    for split, pairs in (("train", trained), ("valid", validation)):
        for side, texts in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            paths[split, side] = folder / f"{split}.{side}"
            paths[split, side].write_text("\n".join(texts) + "\n", encoding="utf-8", newline="\n")
    return prepared.write(
        paths["train", "en"],
        paths["train", "de"],
        paths["valid", "en"],
        paths["valid", "de"],
        folder / "prepared",
        vocabulary_size=600,
        progress=console.print,
    )


def show(console: Console, sources, translations, references, rows: int = 12) -> None:
    """A table of some held-out lines, the wrong ones first among them."""
    order = sorted(range(len(sources)), key=lambda i: translations[i] == references[i])
    wrong = [i for i in order if translations[i] != references[i]][:3]
    chosen = wrong + [i for i in range(len(sources)) if i not in wrong][: rows - len(wrong)]
    table = Table("source", "ours", "right answer", title="Lines that were not trained on")
    for i in chosen:
        style = None if translations[i] == references[i] else "red"
        table.add_row(sources[i], translations[i], references[i], style=style)
    console.print(table)


if __name__ == "__main__":
    main()
