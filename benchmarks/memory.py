"""Time and memory of a training step: with freed memory kept, and with blocks computed again.

    KERAS_BACKEND=jax python benchmarks/memory.py

Each figure is the median of pairs of new processes, one of which has the setting and one has not,
in turn. The model is `tiny` with 8,000 subwords, the batch 64 x 32 tokens on either side.
"""

import argparse
import json
import statistics
import subprocess
import sys

ROWS, LENGTH, VOCABULARY, STEPS = 64, 32, 8_000, 12


def measure(keep_freed: bool, remat: bool) -> None:
    """Prints the median seconds of a step, and the peak memory in MB."""
    import resource
    import time

    import keras
    import numpy as np

    from keras_aiayn import LabelSmoothedCrossentropy, TransformerConfig
    from keras_aiayn.training.memory import keep_freed_memory
    from keras_aiayn.training.remat import recompute_blocks

    if keep_freed:
        keep_freed_memory()
    keras.utils.set_random_seed(1)
    model = TransformerConfig.tiny(VOCABULARY).build(seed=1)
    if remat:
        recompute_blocks(model)
    model.compile(keras.optimizers.Adam(1e-4), LabelSmoothedCrossentropy())
    model.optimizer.build(model.trainable_variables)
    ids = np.random.default_rng(1).integers(4, VOCABULARY, (3, ROWS, LENGTH))
    inputs = {"encoder_token_ids": ids[0], "decoder_token_ids": ids[1]}
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model.train_on_batch(inputs, ids[2])
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps([statistics.median(seconds[3:]), peak]))  # the first ones compile


def run(keep_freed: bool, remat: bool) -> list[float]:
    """`measure` in a new process."""
    flags = [f"--keep-freed={int(keep_freed)}", f"--remat={int(remat)}"]
    done = subprocess.run(
        [sys.executable, __file__, "--one", *flags], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, pairs: int, before: tuple[bool, bool], after: tuple[bool, bool]) -> None:
    """Prints what a setting changes: medians, and the median of the ratios of the pairs."""
    runs = [(run(*before), run(*after)) for _ in range(pairs)]
    for unit, index, digits in (("s a step", 0, 3), ("MB at most", 1, 0)):
        old, new = ([one[side][index] for one in runs] for side in range(2))
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        medians = f"{statistics.median(old):,.{digits}f} to {statistics.median(new):,.{digits}f}"
        print(f"{name}: {medians} {unit}, ratio {ratio:.2f} in {pairs} pairs", flush=True)


def main() -> None:
    """Compares, or as one of the processes measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep-freed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--remat", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(bool(options.keep_freed), bool(options.remat))
        return
    compare("freed memory kept", options.pairs, (False, False), (True, False))
    compare("blocks computed again", options.pairs, (True, False), (True, True))


if __name__ == "__main__":
    main()
