"""Time and memory of a training step: with freed memory kept, and with blocks computed again.

    KERAS_BACKEND=jax python benchmarks/memory.py

Each figure is the median of pairs of new processes, one of which has the setting and one has not,
in turn. The model is `tiny` with 8,000 subwords, the batch 64 x 32 tokens on either side.

Then the peak against the tokens of a batch and the vocabulary, with freed memory given back, so
that it is what was needed at once. Two numbers are fitted to it: the bytes that each token takes,
and how many float32 arrays of the size of the logits live at once.
"""

import argparse
import json
import statistics
import subprocess
import sys

import curves
import keras
import numpy as np
import workers

LENGTH, VOCABULARY, STEPS = 32, 8_000, 12
STEPS_FOR_PEAK = 3  # it stands from the second on
ROWS = (32, 64, 128)
VOCABULARIES = (8_000, 16_000, 37_000)


def measure(rows: int, vocabulary: int, keep_freed: bool, remat: bool, steps: int) -> None:
    """Prints the median seconds of a step, and the peak memory in MB."""
    import resource

    from keras_aiayn import LabelSmoothedCrossentropy, TransformerConfig
    from keras_aiayn.memory import keep_freed_memory
    from keras_aiayn.training.remat import recompute_blocks

    if keep_freed:
        keep_freed_memory()
    keras.utils.set_random_seed(1)
    model = TransformerConfig.tiny(vocabulary).build(seed=1)
    if remat:
        recompute_blocks(model)
    model.compile(keras.optimizers.Adam(1e-4), LabelSmoothedCrossentropy())
    model.optimizer.build(model.trainable_variables)
    ids = np.random.default_rng(1).integers(4, vocabulary, (3, rows, LENGTH))
    inputs = {"encoder_token_ids": ids[0], "decoder_token_ids": ids[1]}
    seconds = curves.step_seconds(model, [(inputs, ids[2])], 1, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps([statistics.median(seconds), peak]))


def run(
    rows: int = 64,
    vocabulary: int = VOCABULARY,
    keep_freed: bool = True,
    remat: bool = False,
    steps: int = STEPS,
) -> list[float]:
    """`measure` in a new process."""
    options = [rows, vocabulary, int(keep_freed), int(remat), steps]
    command = [sys.executable, __file__, "--one", *map(str, options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, pairs: int, before: dict[str, bool], after: dict[str, bool]) -> list[list]:
    """What a setting changes: medians, and the median of the ratios of the pairs."""
    runs = [(run(**before), run(**after)) for _ in range(pairs)]
    rows = []
    for unit, index, digits in (("s a step", 0, 3), ("MB at most", 1, 0)):
        old, new = ([one[side][index] for one in runs] for side in range(2))
        medians = [f"{statistics.median(each):,.{digits}f} {unit}" for each in (old, new)]
        rows.append([name, *medians, f"{workers.median_ratio(new, old):.2f}"])
    return rows


def against_sizes() -> str:
    """The peak for several batches and vocabularies, and what it is made of."""
    peaks = {
        (rows, size): run(rows, size, keep_freed=False, steps=STEPS_FOR_PEAK)[1]
        for rows in ROWS
        for size in VOCABULARIES
    }
    # The program itself; the weights of each subword; what each token, and each logit takes.
    factors = [[1, size, rows * LENGTH, rows * LENGTH * size] for rows, size in peaks]
    (_, _, token, logit), *_ = np.linalg.lstsq(
        np.array(factors, float), np.array(list(peaks.values())) * 2**20, rcond=None
    )
    header = ["target tokens", *(f"V {size:,}" for size in VOCABULARIES)]
    table = [
        [f"{rows * LENGTH:,}", *(f"{peaks[rows, size]:,.0f} MB" for size in VOCABULARIES)]
        for rows in ROWS
    ]
    return (
        f"{workers.table(header, table)}\n\nFitted: {token / 1e3:,.0f} kB for each pair of "
        f"tokens, and {logit / 4:.1f} float32 arrays of the size of the logits."
    )


def main() -> None:
    """Compares, or as one of the processes measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="0 for the sizes alone.")
    parser.add_argument("--one", type=int, nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rows, vocabulary, keep_freed, remat, steps = options.one
        measure(rows, vocabulary, bool(keep_freed), bool(remat), steps)
        return
    backend = keras.backend.backend()
    if options.pairs:
        settings = compare(
            "freed memory kept", options.pairs, {"keep_freed": False}, {"keep_freed": True}
        ) + compare("blocks computed again", options.pairs, {"remat": False}, {"remat": True})
        header = ["setting", "without", "with", f"ratio, median of {options.pairs} pairs"]
        workers.write_section(f"Memory and settings, {backend}", workers.table(header, settings))
    workers.write_section(f"Memory and sizes, {backend}", against_sizes())


if __name__ == "__main__":
    main()
