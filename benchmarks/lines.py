"""Ten million lines through `translate_file`, with a stand-in for the model: order, memory, rate.

    python benchmarks/lines.py --lines 10000000 --folder /tmp/lines

The translation of a line is the line backwards, so what the file handling itself costs is seen:
lines a second, and the memory that the process holds while it goes on, which must stay flat. A
second process is killed in the middle and gone on with; both outputs are the same.
"""

import argparse
import hashlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from keras_aiayn import files
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.translator import Translation


class Backwards:
    """Stands in for a translator, and tells the memory it saw."""

    def __init__(self, lines: int):
        self.every, self.seen, self.memory = max(1, lines // 10), 0, []

    def search_settings(self, **settings: Any) -> SearchSettings:
        """The paper's."""
        return SearchSettings()

    def translate(self, texts: list[str], *, progress: Any, **options: Any) -> list[Translation]:
        """Every text backwards."""
        progress(len(texts))
        before, self.seen = self.seen // self.every, self.seen + len(texts)
        if self.seen // self.every > before:
            status = Path("/proc/self/status").read_text()
            self.memory.append(int(status.split("VmRSS:")[1].split()[0]) / 2**10)
        return [Translation(text[::-1]) for text in texts]


def make(path: Path, lines: int) -> None:
    """Writes lines of many lengths, some of them empty."""
    with open(path, "w") as stream:
        for number in range(lines):
            stream.write(f"{number} {'word ' * (number % 23)}\n" if number % 97 else "\n")


def translate(folder: Path, lines: int, output: str, resume: bool) -> None:
    """Translates, and says how it went."""
    translator = Backwards(lines)
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
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume:
        translate(options.folder, options.lines, "again", resume=True)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options.folder / "in", options.lines)
    translate(options.folder, options.lines, "out", resume=False)
    for name in ("again", "again.part"):
        (options.folder / name).unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--resume"]
    killed = subprocess.Popen(command)
    half = (options.folder / "out").stat().st_size // 2
    part = options.folder / "again.part"
    while not part.exists() or part.stat().st_size < half:
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
