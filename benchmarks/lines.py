"""Very many lines through `translate_file`: order, memory, rate, and a resume.

    python benchmarks/lines.py --lines 10000000 --folder /tmp/lines
    python benchmarks/lines.py --lines 50000 --folder /tmp/lines --model M.keras --source train.en

Without a model the translation of a line is the line backwards, so that what the file handling
itself costs is seen. With one, lines are taken from a file of sentences, again and again. Printed
are lines a second, and the memory that the process holds while it goes on, which must stay flat. A
second process is killed in the middle and gone on with; both outputs are the same.
"""

import argparse
import hashlib
import signal
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from keras_aiayn import files
from keras_aiayn.data import corpus
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.loading import load
from keras_aiayn.memory import keep_freed_memory
from keras_aiayn.translator import Translation


class Watched:
    """A translator, or what stands in for one, that tells the memory it saw."""

    def __init__(self, lines: int, model: Path | None):
        self.every, self.seen, self.memory = max(1, lines // 10), 0, []
        self.translator = None if model is None else load(model)

    def search_settings(self, **settings: Any) -> SearchSettings:
        """The translator's, or the paper's."""
        given = self.translator and self.translator.search_settings(**settings)
        return given or SearchSettings()

    def translate(self, texts: list[str], *, progress: Any, **options: Any) -> list[Translation]:
        """Every text in the other language, or backwards."""
        if self.translator is None:
            progress(len(texts))
            found = [Translation(text[::-1]) for text in texts]
        else:
            found = self.translator.translate(texts, progress=progress, **options)
        before, self.seen = self.seen // self.every, self.seen + len(texts)
        if self.seen // self.every > before:
            status = Path("/proc/self/status").read_text()
            self.memory.append(int(status.split("VmRSS:")[1].split()[0]) / 2**10)
        return found


def make(path: Path, lines: int, source: Path | None) -> None:
    """Writes lines of many lengths, some of them empty, or those of a file."""
    with open(path, "w", encoding="utf-8") as stream:
        if source is None:
            for number in range(lines):
                stream.write(f"{number} {'word ' * (number % 23)}\n" if number % 97 else "\n")
        else:
            sentences = list(corpus.read_lines(source))
            for line in islice(cycle(sentences), lines):
                stream.write(line + "\n")


def translate(folder: Path, lines: int, output: str, resume: bool, model: Path | None) -> None:
    """Translates, and says how it went."""
    keep_freed_memory()  # as the command does
    translator = Watched(lines, model)
    report = files.translate_file(translator, folder / "in", folder / output, resume=resume)
    memory = ", ".join(f"{mb:,.0f}" for mb in translator.memory)
    rate = report.lines / report.seconds
    print(f"{report.lines:,} lines after {report.skipped:,}: {report.seconds:,.0f} s, "
          f"{rate:,.0f} lines/s; memory on the way {memory} MB")  # fmt: skip


def main() -> None:
    """Runs all, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="A .keras file; a stand-in by default.")
    parser.add_argument("--source", type=Path, help="Sentences for the model.")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume:
        translate(options.folder, options.lines, "again", True, options.model)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options.folder / "in", options.lines, options.source)
    translate(options.folder, options.lines, "out", False, options.model)
    for name in ("again", "again.part", "again.part.json"):
        (options.folder / name).unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--resume"]
    killed = subprocess.Popen(command)
    half = (options.folder / "out").stat().st_size // 2
    part = options.folder / "again.part"
    while not part.exists() or part.stat().st_size < half:
        if killed.poll() is not None:
            sys.exit("it ended before it could be killed: take more --lines")
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run(command, check=True)
    sums = {
        hashlib.sha256((options.folder / name).read_bytes()).hexdigest()
        for name in ("out", "again")
    }
    print("killed and gone on with: the same file" if len(sums) == 1 else "THE FILES DIFFER")


if __name__ == "__main__":
    main()
