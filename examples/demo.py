"""The smallest thing a Transformer can learn: to copy a sequence.

    python examples/demo.py --steps 500

Trains 2 + 2 layers on random symbols by plain `model.fit`, then lets the model write copies of
sequences it has never seen, one symbol at a time, and counts those that are right from end to end.
"""

import argparse

import keras
import numpy as np

from keras_aiayn import LabelSmoothedCrossentropy, NoamSchedule, Transformer
from keras_aiayn.data.tasks import copy_task
from keras_aiayn.decoding.search import BeamSearch
from keras_aiayn.decoding.stream import CompiledSearch
from keras_aiayn.memory import keep_freed_memory

ROWS = 256
NUM_SYMBOLS = 30
UNSEEN = 512


def main() -> None:
    """Trains, copies, counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="updates (default 500)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    keep_freed_memory()
    keras.utils.set_random_seed(options.seed)
    model = Transformer(
        vocabulary_size=NUM_SYMBOLS + 4,  # and pad, unknown, begin, end
        num_layers=2,
        hidden_dim=64,
        intermediate_dim=256,
        num_heads=2,
        dropout=0.0,
    )
    model.summary(line_length=90)
    model.compile(
        optimizer=keras.optimizers.Adam(NoamSchedule(64, 100, scale=0.2), 0.9, 0.98, 1e-9),
        loss=LabelSmoothedCrossentropy(0.1),
    )
    inputs, targets = copy_task(options.steps * ROWS, num_symbols=NUM_SYMBOLS, seed=options.seed)
    model.fit(inputs, targets, batch_size=ROWS, verbose=2)

    unseen, right = copy_task(UNSEEN, num_symbols=NUM_SYMBOLS, seed=options.seed + 1)
    sources = unseen["encoder_token_ids"]
    length = sources.shape[1]
    greedy = CompiledSearch(model, BeamSearch(beam_size=1))
    found = greedy(sources, np.full(UNSEEN, length))
    correct = np.all(found.token_ids[:, 0] == right, axis=1)
    print("a sequence:", *sources[0][sources[0] > 3])
    print("its copy:  ", *found.token_ids[0, 0][found.token_ids[0, 0] > 3])
    print(f"sequence accuracy {100 * correct.mean():.1f} %")


if __name__ == "__main__":
    main()
