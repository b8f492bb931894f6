"""A corpus of many millions of pairs: preparing, planning, training, reading in shares.

    KERAS_BACKEND=tensorflow python benchmarks/scale.py --pairs 20000000 --folder /tmp/scale

Each stage is a process of its own and says how long it took and what memory it held: *anonymous*
memory is what it allocated; the corpus is a memory map, whose pages the system drops at need.
The pairs are made: a number, and some words of a list of a thousand.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from workers import anonymous_mb

TOKENS_PER_BATCH, BATCHES, PROCESSES = 2_048, 200, 4
POOL = 200_000  # different texts; with its number every pair is different


def make(folder: Path, pairs: int) -> None:
    """Writes `pairs` pairs of text, all different."""
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.gamma(3, 6, POOL), 2, 80).astype(int)
    letters = "aeioubdfgk"
    words = ["".join(letters[n // 10**place % 10] for place in range(3)) for n in range(1000)]
    drawn = iter(generator.zipf(1.3, lengths.sum()) % 1000)
    texts = [" ".join(words[next(drawn)] for _ in range(length)) for length in lengths]
    source_path, target_path = folder / "train.en", folder / "train.de.part"
    with open(source_path, "w") as source, open(target_path, "w") as target:
        for number in range(pairs):
            text = texts[number % POOL]
            source.write(f"{number} {text}\n")
            target.write(f"{text} {number}\n")
    target_path.rename(folder / "train.de")


def prepare(folder: Path, pairs: int) -> None:
    """Prepares the text, and says how fast."""
    from keras_aiayn.data import prepared

    began = time.perf_counter()
    before = anonymous_mb()
    texts = folder / "train.en", folder / "train.de"
    prepared.write(*texts, None, None, folder / "data", vocabulary_size=1_000)
    seconds = time.perf_counter() - began
    print(f"prepare: {seconds:,.0f} s, {pairs / seconds:,.0f} pairs/s; "
          f"anonymous memory {before:,.0f} MB before, {anonymous_mb():,.0f} MB after")  # fmt: skip


def planned(folder: Path, epoch: int):
    """The corpus, and the plan of an epoch."""
    from keras_aiayn.data import batching, prepared

    data = prepared.open(folder / "data")
    lengths = data.train.source_lengths(), data.train.target_lengths()
    options = {"tokens_per_batch": TOKENS_PER_BATCH, "seed": 1}
    return data, batching.plan(*lengths, **options, epoch=epoch)


def plan(folder: Path, pairs: int) -> None:
    """Plans two epochs, and says how long each took."""
    for epoch in range(2):
        began = time.perf_counter()
        _, epoch_plan = planned(folder, epoch)
        print(f"plan of epoch {epoch}: {time.perf_counter() - began:,.1f} s, "
              f"{len(epoch_plan):,} batches, {len(epoch_plan.shapes)} shapes, "
              f"{100 * epoch_plan.real_share():.1f} % real tokens; "
              f"anonymous memory {anonymous_mb():,.0f} MB")  # fmt: skip


def train(folder: Path, pairs: int) -> None:
    """Trains a small model, and says what memory it held as it went."""
    import keras

    from keras_aiayn import LabelSmoothedCrossentropy, TransformerConfig
    from keras_aiayn.data import batching
    from keras_aiayn.memory import keep_freed_memory

    keep_freed_memory()
    data, epoch_plan = planned(folder, 0)
    held = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if batch % (BATCHES // 4) == BATCHES // 4 - 1:
                held.append(f"{anonymous_mb():,.0f}")

    sizes = {"num_layers": 1, "hidden_dim": 32, "intermediate_dim": 32}
    model = TransformerConfig.tiny(data.source_tokenizer.vocabulary_size, **sizes).build(seed=1)
    model.compile(keras.optimizers.Adam(1e-3), LabelSmoothedCrossentropy())
    batches = batching.dataset(data.train, epoch_plan, stop=2 * BATCHES)
    model.fit(batches, shuffle=False, verbose=0, callbacks=[Watch()])
    print(f"train: {2 * BATCHES} batches; anonymous memory every {BATCHES // 4}: "
          f"{', '.join(held)} MB")  # fmt: skip


def read(folder: Path, pairs: int, process: int) -> None:
    """Prints what the process read of the epoch: a number for each row."""
    from keras_aiayn.data import batching

    data, epoch_plan = planned(folder, 0)
    share = {"replicas": PROCESSES, "parts": [process]}
    rows = [
        hashlib.blake2b(row[row != 0].tobytes(), digest_size=8).hexdigest()
        for _, targets, _ in batching.dataset(data.train, epoch_plan, stop=BATCHES, **share)
        for row in targets.numpy()
        if row.any()
    ]
    print(json.dumps(rows))


def shares(folder: Path, pairs: int) -> None:
    """Lets several processes read at once, and compares what they read with the epoch's batches."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--pairs", str(pairs), "--folder", str(folder), "--stage"]
    running = [
        subprocess.Popen([*command, f"read{process}"], stdout=subprocess.PIPE, text=True)
        for process in range(PROCESSES)
    ]
    read_rows = [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
    together = [row for rows in read_rows for row in rows]
    _, epoch_plan = planned(folder, 0)
    expected = sum(len(epoch_plan.indices(batch)) for batch in range(BATCHES))
    counts = ", ".join(f"{len(rows):,}" for rows in read_rows)
    twice, missing = len(together) - len(set(together)), expected - len(together)
    print(f"shares: {PROCESSES} processes read {counts} rows of {BATCHES} batches "
          f"in {time.perf_counter() - began:,.0f} s; {twice} twice, {missing} missing")  # fmt: skip


STAGES: dict[str, Callable[[Path, int], None]] = {
    "make": make,
    "prepare": prepare,
    "plan": plan,
    "train": train,
    "shares": shares,
} | {
    f"read{process}": lambda folder, pairs, process=process: read(folder, pairs, process)
    for process in range(PROCESSES)
}


def main() -> None:
    """Runs the stages one after the other, each in a new process, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path, required=True, help="For some GB; kept.")
    parser.add_argument("--stage", choices=STAGES, help="Only this one.")
    options = parser.parse_args()
    if options.stage:
        STAGES[options.stage](options.folder, options.pairs)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for stage in ("make", "prepare", "plan", "train", "shares"):
        if stage == "make" and (options.folder / "train.de").exists():
            continue
        if stage == "prepare" and (options.folder / "data").exists():
            continue
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--stage", stage], check=True)


if __name__ == "__main__":
    main()
