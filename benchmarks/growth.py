"""How time and memory grow: with sentences, batch, vocabulary and layers, and with the corpus.

    python benchmarks/growth.py --backend jax

A training step of a model of width 128, and a search of 4 beams for as many tokens as the source
has, grow in one size while the others stay at 32 tokens, 16 rows, 2,000 subwords and 2 layers. A
made corpus grows by its pairs: how long `prepare` takes, its subwords learned before, and how long
an epoch, which is planned and read through the pipeline.

Every measurement is a process of its own. Memory is what it holds beside files at the end, where
freed memory is kept (as in training), less what it held after a smallest model or corpus. Times
are medians after a first call. The exponents are fitted over the upper half of each range; the
expected ones are those of the largest sizes, when what does not grow has become small: the length
of a sentence counts once in all products but those of attention, where it counts twice. The plan
of an epoch holds some numbers for each pair; nothing else grows with a corpus.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import curves
import scale
import workers

FIXED = {"length": 32, "rows": 16, "vocabulary": 2_000, "layers": 2, "pairs": 1_000}
SMALLEST = {"length": 4, "rows": 2, "vocabulary": 100, "layers": 1, "pairs": 500}
RANGES = {
    "length": [16, 32, 64, 128, 256, 512],
    "rows": [16, 32, 64, 128, 256, 512],
    "vocabulary": [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000],
    "layers": [1, 2, 4, 8, 16, 32],
    "pairs": [10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 640_000],
}
QUICK_FIXED = {"length": 16, "rows": 4, "vocabulary": 500, "layers": 1, "pairs": 1_000}
QUICK_RANGES = {
    "length": [16, 32, 64],
    "rows": [4, 8, 16],
    "vocabulary": [500, 1_000, 2_000],
    "layers": [1, 2, 4],
    "pairs": [1_000, 2_000, 4_000],
}
TITLES = {
    "length": "tokens of a sentence",
    "rows": "sentences of a batch",
    "vocabulary": "subwords",
    "layers": "layers of either stack",
    "pairs": "pairs of the corpus",
}
# The exponents of time and of memory.
EXPECTED = {
    "length": {"training step": ("1 to 2", "1 to 2"), "decoding": ("1 to 2", "1 to 2")},
    "rows": {"training step": ("1", "1"), "decoding": ("1", "1")},
    "vocabulary": {"training step": ("1", "1"), "decoding": ("1", "1")},
    "layers": {"training step": ("1", "1"), "decoding": ("1", "1")},
    "pairs": {"prepare": ("1", "0"), "an epoch": ("1", "0 to 1")},
}
MEASURES = ("s", "MB")
RESOLUTION = 1.0  # MB: what is less cannot be told from chance


def model_of(sizes: dict[str, int]) -> Any:
    """A model of these sizes."""
    from keras_aiayn import TransformerConfig

    return TransformerConfig.tiny(sizes["vocabulary"], num_layers=sizes["layers"]).build(seed=1)


def sentences(sizes: dict[str, int]) -> Any:
    """Random ids without pads: source, decoder's input and target."""
    import numpy as np

    shape = (3, sizes["rows"], sizes["length"])
    return np.random.default_rng(1).integers(4, sizes["vocabulary"], shape, dtype="int32")


def training(folder: Path, sizes: dict[str, int]) -> Callable[[int], float]:
    """Times training steps."""
    import keras

    from keras_aiayn import LabelSmoothedCrossentropy

    model = model_of(sizes)
    model.compile(keras.optimizers.Adam(1e-4), LabelSmoothedCrossentropy())
    model.optimizer.build(model.trainable_variables)
    source, decoder, target = sentences(sizes)
    batch = {"encoder_token_ids": source, "decoder_token_ids": decoder}, target
    return lambda rounds: statistics.median(curves.step_seconds(model, [batch], 1, rounds))


def decoding(folder: Path, sizes: dict[str, int]) -> Callable[[int], float]:
    """Times a search that never stops early: random weights end no output."""
    import numpy as np

    from keras_aiayn.decoding.search import BeamSearch
    from keras_aiayn.decoding.stream import CompiledSearch

    search = CompiledSearch(model_of(sizes), BeamSearch(early_stopping=False))
    source, length = sentences(sizes)[0], sizes["length"]
    limits = np.full(len(source), length)
    return lambda rounds: curves.seconds(lambda: search(source, limits), rounds)


def texts(folder: Path, pairs: int) -> list[Path]:
    """The first pairs of the made text, as files of their own."""
    files = [folder / f"{pairs}.{language}" for language in ("en", "de")]
    for file in files:
        if not file.exists():
            with open(folder / f"train{file.suffix}") as whole, open(file, "w") as part:
                part.writelines(islice(whole, pairs))
    return files


def preparing(folder: Path, sizes: dict[str, int]) -> Callable[[int], float]:
    """Times the preparation of a corpus, with the subwords of the smallest one."""
    from keras_aiayn.data import prepared

    files = texts(folder, sizes["pairs"])

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            prepared.write(
                *files, None, None, Path(output) / "data", tokenizer_from=folder / "subwords"
            )

    return lambda rounds: curves.seconds(run, rounds)


def reading(folder: Path, sizes: dict[str, int]) -> Callable[[int], float]:
    """Times an epoch of a corpus that is prepared."""
    from keras_aiayn.data import batching, prepared

    data = prepared.open(folder / f"prepared-{sizes['pairs']}")

    def run() -> None:
        lengths = data.train.source_lengths(), data.train.target_lengths()
        plan = batching.plan(*lengths, tokens_per_batch=scale.TOKENS_PER_BATCH, seed=1, epoch=0)
        for _ in batching.dataset(data.train, plan):
            pass

    return lambda rounds: curves.seconds(run, rounds)


KINDS = {"training step": training, "decoding": decoding, "prepare": preparing,
         "an epoch": reading}  # fmt: skip


def measure(kind: str, folder: Path, sizes: dict[str, int], rounds: int) -> None:
    """Prints seconds, and the MB that were needed for it."""
    from keras_aiayn.memory import keep_freed_memory

    keep_freed_memory()  # so that what is held in the end is the most that was held
    KINDS[kind](folder, SMALLEST)(1)  # loads what is loaded once
    before = workers.anonymous_mb()
    seconds = KINDS[kind](folder, sizes)(rounds)
    print(json.dumps([seconds, max(RESOLUTION, workers.anonymous_mb() - before)]))


def run(kind: str, sizes: dict[str, int], options: argparse.Namespace) -> list[float]:
    """`measure` in a new process."""
    command = [
        sys.executable, __file__, "--one", kind, "--sizes", json.dumps(sizes),
        "--rounds", str(options.rounds), "--folder", str(options.folder),
    ]  # fmt: skip
    environment = {"KERAS_BACKEND": options.backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def make_corpora(folder: Path, sizes: list[int]) -> None:
    """Makes the text once, learns subwords of a part, and prepares each size for its epoch."""
    from keras_aiayn.data import prepared

    scale.make(folder, max(sizes))
    smallest = texts(folder, SMALLEST["pairs"])
    prepared.write(*smallest, None, None, folder / "subwords", vocabulary_size=500)
    for pairs in (SMALLEST["pairs"], *sizes):
        prepared.write(
            *texts(folder, pairs), None, None, folder / f"prepared-{pairs}",
            tokenizer_from=folder / "subwords",
        )  # fmt: skip


def measured(options: argparse.Namespace) -> dict[str, dict[str, list[list[float]]]]:
    """Seconds and MB at each size, by what grows and by what is done."""
    ranges, fixed = (QUICK_RANGES, QUICK_FIXED) if options.quick else (RANGES, FIXED)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for what in options.only or ranges:
        if what == "pairs":
            make_corpora(options.folder, ranges[what])
        found[what] = {
            kind: [run(kind, fixed | {what: size}, options) for size in ranges[what]]
            for kind in EXPECTED[what]
        }
        print(f"measured: {TITLES[what]}", flush=True)
    return found


def as_curves(found: dict, options: argparse.Namespace) -> dict[str, list[dict]]:
    """For each thing that grows the curves of time and those of memory."""
    ranges = QUICK_RANGES if options.quick else RANGES
    return {
        what: [
            {
                kind: curves.Curve(
                    ranges[what], [each[measure] for each in points], EXPECTED[what][kind][measure]
                )
                for kind, points in kinds.items()
            }
            for measure in range(len(MEASURES))
        ]
        for what, kinds in found.items()
    }


def draw(grown: dict[str, list[dict]], title: str, picture: Path) -> None:
    """A column for each thing that grows, time above and memory below."""
    drawn = curves.figure(3.4 * len(grown), 6.4, title)
    axes = drawn.subplots(len(MEASURES), len(grown), squeeze=False)
    for column, (what, both) in enumerate(grown.items()):
        for line, (lines, unit) in enumerate(zip(both, ("time, s", "memory, MB"), strict=True)):
            label = "" if column else unit
            curves.draw(axes[line][column], lines, TITLES[what] if line else "", label)
    curves.save(drawn, picture)


def rows(grown: dict[str, list[dict]]) -> list[list[str]]:
    """The lines of the table."""
    lines = []
    for what, (times, memory) in grown.items():
        for kind, time in times.items():
            sizes, held = time.sizes, memory[kind]
            lines.append(
                [TITLES[what], kind, f"{sizes[0]:,} to {sizes[-1]:,}", time.exponents(),
                 held.exponents(), f"{time.values[-1]:,.3g}", f"{held.values[-1]:,.0f}"]
            )  # fmt: skip
    return lines


def main() -> None:
    """Measures all and draws it, or as one of the processes measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    parser.add_argument("--backend", default=backend, help="Of Keras: %(default)s.")
    parser.add_argument("--only", action="append", choices=list(RANGES), help="Only this grows.")
    parser.add_argument("--rounds", type=int, default=5, help="Of each timing: %(default)s.")
    parser.add_argument("--picture", type=Path, help="docs/growth.png, or growth.png if --quick.")
    parser.add_argument("--quick", action="store_true", help="Toy sizes; not kept in RESULTS.md.")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.folder, options.sizes, options.rounds)
        return
    picture = options.picture or curves.picture("growth.png", options.quick)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        grown = as_curves(measured(options), options)
    draw(
        grown,
        f"How time and memory grow, on {options.backend}: exponents measured (expected)",
        picture,
    )
    header = ["what grows", "of", "range", "exponent of time (expected)",
              "exponent of memory (expected)", "s at the largest", "MB at the largest"]  # fmt: skip
    text = f"{workers.table(header, rows(grown))}\n\n![growth](../docs/growth.png)"
    workers.write_section(f"Growth, {options.backend}", text, keep=not options.quick)


if __name__ == "__main__":
    main()
