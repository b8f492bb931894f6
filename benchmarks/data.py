"""How fast corpora are prepared and batches made, beside what the fastest training consumes.

    python benchmarks/data.py --folder /tmp/data

On Multi30k, English to German, vocabulary 8,000, batches of 4,096 tokens: the pairs a second of
`prepare`; the real target tokens a second of our pipeline, and of `bucket_by_sequence_length` done
as its documentation has it (a generator of pairs, buckets at multiples of 8 up to 64); the share
of real tokens of both; and the memory that a process gains over many epochs.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import workers
from multi30k import opened, texts

from keras_aiayn.data import batching, prepared

TOKENS = 4_096
EDGES = list(range(8, 65, 8))


def preparing(rounds: int) -> float:
    """Pairs a second of `prepare`, the learning of the subwords included."""
    rates = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            made = prepared.write(*texts("train"), None, None, Path(folder) / "data",
                                  vocabulary_size=8_000)  # fmt: skip
            rates.append(len(made.train) / (time.perf_counter() - began))
    return statistics.median(rates)


def ours(data: Any, epoch: int) -> Any:
    """An epoch by plan and pipeline."""
    plan = batching.plan(
        data.train.source_lengths(), data.train.target_lengths(), tokens_per_batch=TOKENS, seed=1,
        epoch=epoch,
    )  # fmt: skip
    return batching.dataset(data.train, plan)


def usual(data: Any, epoch: int) -> Any:
    """An epoch by `bucket_by_sequence_length`."""
    tf = batching.import_tensorflow()
    train = data.train

    def pairs() -> Any:
        for index in np.random.default_rng(epoch).permutation(len(train)):
            sides = []
            for side in ("source", "target"):
                tokens, offsets = (
                    getattr(train, f"{side}_{what}") for what in ("tokens", "offsets")
                )
                sides.append([*tokens[offsets[index] : offsets[index + 1]].tolist(), 3])
            yield tuple(sides)

    spec = tf.TensorSpec([None], tf.int32)
    dataset = tf.data.Dataset.from_generator(pairs, output_signature=(spec, spec))
    dataset = dataset.bucket_by_sequence_length(
        lambda source, target: tf.maximum(tf.shape(source)[0], tf.shape(target)[0]),
        bucket_boundaries=[edge + 1 for edge in EDGES],
        bucket_batch_sizes=[TOKENS // edge for edge in [*EDGES, 2 * EDGES[-1]]],
    )

    def framed(source: Any, target: Any) -> Any:
        begin = tf.fill([tf.shape(target)[0], 1], 2)
        decoder = tf.concat([begin, tf.where(target[:, :-1] == 3, 0, target[:, :-1])], 1)
        inputs = {"encoder_token_ids": source, "decoder_token_ids": decoder}
        return inputs, target, tf.cast(target != 0, tf.float32)

    return dataset.map(framed, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def measured(make: Any, data: Any, rounds: int) -> tuple[float, float, int]:
    """Real target tokens a second, the share of real tokens, and the number of shapes."""
    rates, real, padded, shapes = [], 0, 0, set()
    for epoch in range(rounds + 1):
        tokens, began = 0, time.perf_counter()
        for inputs, targets, _ in make(data, epoch).as_numpy_iterator():
            tokens += np.count_nonzero(targets)
            if epoch == 0:
                source = inputs["encoder_token_ids"]
                real += np.count_nonzero(source) + np.count_nonzero(targets)
                padded += source.size + targets.size
                shapes.add((source.shape, targets.shape))
        if epoch:
            rates.append(tokens / (time.perf_counter() - began))
    return statistics.median(rates), real / padded, len(shapes)


def main() -> None:
    """Measures all and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="For the prepared corpus.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--training", type=float, default=6_000,
                        help="Target tokens a second of the fastest training.")  # fmt: skip
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    data = opened(options.folder)
    rows = []
    for name, make in (("ours", ours), ("bucket_by_sequence_length", usual)):
        rate, share, shapes = measured(make, data, options.rounds)
        rows.append([name, f"{rate:,.0f}", f"{rate / options.training:.0f}", f"{100 * share:.1f} %",
                     shapes])  # fmt: skip
    before = workers.anonymous_mb()
    for _ in itertools.chain.from_iterable(ours(data, epoch) for epoch in range(20)):
        pass
    grown = workers.anonymous_mb() - before
    header = ["pipeline", "target tokens/s", f"over {options.training:,.0f} of training",
              "real tokens", "shapes in an epoch"]  # fmt: skip
    workers.write_section(
        "Data",
        f"`prepare`: {preparing(options.rounds):,.0f} pairs/s. Twenty epochs of our pipeline grew "
        f"the process by {grown:+.0f} MB.\n\n{workers.table(header, rows)}",
    )


if __name__ == "__main__":
    main()
