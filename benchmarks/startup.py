"""The first minute: import, the first training step, the first translation; and what is compiled.

    python benchmarks/startup.py run/model.keras --folder /tmp/startup

Each is a process of its own, on each backend, with JAX's compilation cache empty and then warm.
Beside `import keras` alone stands the command's translation of one line. The last column is the
number of programs that training compiled in an epoch of Multi30k, of at most 8 shapes.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import workers

BACKENDS = {"TensorFlow": "tensorflow", "JAX": "jax", "PyTorch": "torch"}
IMPORT = "import keras"
STEP = """
import time; began = time.perf_counter()
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import train
options = train.argparse.Namespace(folder=Path({folder!r}), size="tiny", steps=1, tokens=4096)
train.ours(options)()
"""
COMPILED = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import train
from early_stopping import counted_compilations
options = train.argparse.Namespace(folder=Path({folder!r}), size="tiny", steps=60, tokens=4096)
print(counted_compilations(train.ours(options)))
"""


def seconds(command: list[str], backend: str, cache: Path, stdin: str = "") -> tuple[float, str]:
    """How long a process takes, and what it says."""
    environment = {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    began = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | environment, input=stdin, text=True, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return time.perf_counter() - began, done.stdout


def main() -> None:
    """Measures all and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="A .keras file.")
    parser.add_argument("--folder", type=Path, required=True, help="For corpus and caches.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    from multi30k import opened

    opened(options.folder)
    names = {"here": str(Path(__file__).parent), "folder": str(options.folder)}
    python = [sys.executable, "-c"]
    translate = [sys.executable, "-m", "keras_aiayn", "translate", str(options.model)]
    rows = []
    for name, backend in BACKENDS.items():
        cache = options.folder / f"cache-{backend}"
        shutil.rmtree(cache, ignore_errors=True)
        step = [*python, STEP.format(**names)]
        line = "A man is riding a bicycle.\n"
        cold = [seconds(step, backend, cache)[0], seconds(translate, backend, cache, line)[0]]
        imports, steps, lines = (
            statistics.median(
                seconds(command, backend, cache, stdin)[0] for _ in range(options.rounds)
            )
            for command, stdin in (([*python, IMPORT], ""), (step, ""), (translate, line))
        )
        _, compiled = seconds([*python, COMPILED.format(**names)], backend, cache)
        rows.append([name, f"{imports:.1f}", f"{cold[0]:.1f}", f"{steps:.1f}", f"{cold[1]:.1f}",
                     f"{lines:.1f}", compiled.split()[-1]])  # fmt: skip
    header = ["backend", "`import keras`, s", "first step, cold", "warm",
              "`translate` a line, cold", "warm", "programs compiled in 60 batches"]  # fmt: skip
    workers.write_section("Start", workers.table(header, rows))


if __name__ == "__main__":
    main()
