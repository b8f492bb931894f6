"""Whether a model gives the same translations on TensorFlow, JAX and PyTorch.

    python benchmarks/backends.py run/model.keras --source test.en

Each backend translates in a process of its own. Two translations are the same if their tokens are,
or a tie if their scores differ by less than 1e-4: floating-point sums differ in their last bits,
and then either is the best. Ties are counted, and should be at most 0.1 %.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")
TIE = 1e-4


def translate(model: str, source: Path) -> None:
    """Prints tokens and score of each line's translation, and the seconds it took."""
    from keras_aiayn.data import corpus
    from keras_aiayn.loading import load

    translator = load(model)
    lines = list(corpus.read_lines(source))
    began = time.perf_counter()
    found = translator.translate(lines, details=True)
    seconds = time.perf_counter() - began
    print(json.dumps([seconds, [[one.tokens, one.score] for one in found]]))


def run(backend: str, options: argparse.Namespace) -> tuple[float, list]:
    """`translate` on a backend, in a new process."""
    command = [sys.executable, __file__, options.model, "--source", str(options.source), "--one"]
    done = subprocess.run(
        command,
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, found = json.loads(done.stdout.splitlines()[-1])
    return seconds, found


def main() -> None:
    """Compares, or as one of the processes translates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="A .keras file.")
    parser.add_argument("--source", type=Path, required=True, help="Sentences, one a line.")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        translate(options.model, options.source)
        return
    first: list = []
    for backend in BACKENDS:
        seconds, found = run(backend, options)
        first = first or found
        other = [(a, b) for a, b in zip(first, found, strict=True) if a[0] != b[0]]
        ties = sum(abs(a[1] - b[1]) < TIE for a, b in other)
        print(f"{backend}: {len(found):,} lines in {seconds:.1f} s with compilation; "
              f"as on {BACKENDS[0]}: {len(found) - len(other):,}, "
              f"ties {ties}, different {len(other) - ties}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
