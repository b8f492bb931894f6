"""Multi30k for the benchmarks: its files below $AIAYN_DATA, and the prepared corpus."""

import os
import sys
from pathlib import Path

from keras_aiayn.data import prepared


def texts(split: str) -> list[Path]:
    """The English and the German file of a split."""
    folder = os.environ.get("AIAYN_DATA")
    if not folder:
        sys.exit("AIAYN_DATA must name the folder that holds multi30k")
    return [Path(folder) / "multi30k" / f"{split}.{language}" for language in ("en", "de")]


def opened(folder: Path) -> prepared.Prepared:
    """The corpus with 8,000 subwords, prepared in a folder where it is not yet."""
    if not (folder / "data").exists():
        prepared.write(*texts("train"), *texts("val"), folder / "data", vocabulary_size=8_000)
    return prepared.open(folder / "data")
