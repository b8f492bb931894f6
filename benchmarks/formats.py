"""Which format for which need: size, start, latency, throughput and BLEU of each, side by side.

    python benchmarks/formats.py run/model.keras \
        --source test_2016_flickr.en --reference test_2016_flickr.de

From one `.keras` all other formats are written, and each translates in a process of its own, with
what a user of it would have: CTranslate2, ONNX Runtime and the SavedModel in processes that can
import neither this package nor Keras. All search by one rule: beam 4, length penalty 0, and at most
50 tokens more than the input. (CTranslate2 gives no empty output, and a hypothesis of its beam ends
only where EOS is among the best 4 continuations, not 8.)

- Size: of the file or folder.
- Start: from the start of the process to its first translation, files and JAX's programs on disk.
- One sentence: the median over 64, one at a time.
- Output tokens/s: all sentences in one call, which CTranslate2 is told to cut into batches of 64;
  the SavedModel in batches of 64 sorted by length; ONNX, whose search is that of
  `examples/onnx_search.py`, one at a time. Tokens are those of the texts, EOS counted.
- The same: the texts are equal to those of the first format. What is not is a tie where the
  float32 model gives both texts the same score, but for 1e-4, and different otherwise.

The tokenizers have to be SentencePiece's. CTranslate2 and ONNX come with the extras of their names,
the SavedModel with [hub].
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import workers

BEAM, EXTRA, BATCH, ALONE, TIE = 4, 50, 64, 64, 1e-4


class Keras:
    """A `.keras`, by this package."""

    def __init__(self, file: Path):
        from keras_aiayn.loading import load
        from keras_aiayn.memory import keep_freed_memory

        keep_freed_memory()  # as the commands do
        self.translator = load(file)

    def __call__(self, lines: list[str]) -> list[str]:
        """By `Translator.translate`, with the settings of the file."""
        return self.translator.translate(lines)


class CTranslate2:
    """CTranslate2, and SentencePiece for the pieces."""

    def __init__(self, folder: Path):
        import ctranslate2

        self.engine = ctranslate2.Translator(str(folder))
        self.source, self.target = example().tokenizers(folder)

    def __call__(self, lines: list[str]) -> list[str]:
        """By `translate_batch`, which knows one limit for all: each sentence has its own."""
        pieces = self.source.encode(lines, out_type=str)
        limits = [len(one) + 1 + EXTRA for one in pieces]
        found = self.engine.translate_batch(
            pieces,
            beam_size=BEAM,
            length_penalty=0,
            max_batch_size=BATCH,
            max_input_length=0,
            max_decoding_length=max(limits),
        )
        return [
            self.target.decode(one.hypotheses[0][:limit])
            for one, limit in zip(found, limits, strict=True)
        ]


class SavedModel:
    """A SavedModel, by TensorFlow and TensorFlow Text."""

    def __init__(self, folder: Path):
        import tensorflow as tf
        import tensorflow_text  # noqa: F401

        self.tf, self.model = tf, tf.saved_model.load(str(folder))

    def __call__(self, lines: list[str]) -> list[str]:
        """By its signature of texts, those of like length together."""
        order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
        found = {}
        for at in range(0, len(order), BATCH):
            part = order[at : at + BATCH]
            texts = self.tf.constant([lines[i] for i in part])
            outputs = self.model.signatures["serving_default"](texts=texts)
            found |= dict(zip(part, outputs["translations"].numpy(), strict=True))
        return [found[i].decode() for i in range(len(lines))]


class Onnx:
    """ONNX Runtime, by the search of the example."""

    def __init__(self, folder: Path):
        self.translator = example().Translator(folder, BEAM, alpha=0, extra=EXTRA)

    def __call__(self, lines: list[str]) -> list[str]:
        """One after another."""
        return [self.translator(line) for line in lines]


def example() -> types.ModuleType:
    """`examples/onnx_search.py`."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import onnx_search

    return onnx_search


class Format(NamedTuple):
    """What is loaded, by what, and Keras's backend where it is Keras."""

    file: str
    engine: type
    backend: str = "tensorflow"


BACKENDS = {"TensorFlow": "tensorflow", "JAX": "jax", "PyTorch": "torch"}
FORMATS = {
    f"{kind}, {name}": Format(file, Keras, backend)
    for kind, file in ((".keras", "model.keras"), ("int8 .keras", "int8.keras"))
    for name, backend in BACKENDS.items()
} | {
    "CTranslate2 float32": Format("ctranslate2-float32", CTranslate2),
    "CTranslate2 int8": Format("ctranslate2-int8", CTranslate2),
    "SavedModel": Format("saved_model", SavedModel),
    "ONNX": Format("onnx", Onnx),
}
FIRST = next(iter(FORMATS))
COMMANDS = {  # that write them
    "int8.keras": ["quantize", "--mode", "int8"],
    "ctranslate2-float32": ["export", "--format", "ctranslate2"],
    "ctranslate2-int8": ["export", "--format", "ctranslate2", "--quantization", "int8"],
    "saved_model": ["export", "--format", "saved_model", "--backend", "tensorflow"],
    "onnx": ["export", "--format", "onnx", "--backend", "torch"],
}


def work(options: argparse.Namespace) -> None:
    """A worker's life."""
    engine = FORMATS[options.worker].engine
    if engine is not Keras:
        hide_keras()
    translate = engine(options.model)

    def handle(batches: list[list[str]]) -> dict[str, Any]:
        texts, seconds = [], []
        for batch in batches:
            began = time.perf_counter()
            texts += translate(batch)
            seconds.append(time.perf_counter() - began)
        return {"texts": texts, "seconds": seconds}

    workers.serve(handle)


def hide_keras() -> None:
    """Makes this process one that can import neither this package nor Keras."""
    sys.modules.update(dict.fromkeys(("keras_aiayn", "keras")))
    # TensorFlow Text brings layers for Keras, which no graph needs.
    layers = "tensorflow_text.python.keras"
    sys.modules[layers] = types.ModuleType(layers)


def write(model: Path, folder: Path, files: set[str]) -> Any:
    """Writes formats of a model, all to be searched by one rule, and gives its translator."""
    from keras_aiayn.data.tokenizer import SentencePieceTokenizer
    from keras_aiayn.loading import load

    translator = load(model)
    for tokenizer in (translator.source_tokenizer, translator.target_tokenizer):
        if not isinstance(tokenizer, SentencePieceTokenizer):
            raise ValueError(f"the tokenizers of {model} are not SentencePiece's")
    translator.beam_size, translator.length_penalty = BEAM, 0.0
    translator.max_extra_length = EXTRA
    translator.save(folder / "model.keras")
    for file in sorted(files & COMMANDS.keys()):
        verb, *settings = COMMANDS[file]
        command = [verb, folder / "model.keras", "--output", folder / file, *settings]
        subprocess.run([sys.executable, "-m", "keras_aiayn", *map(str, command)], check=True)
    return translator


def size(path: Path) -> int:
    """The bytes of a file, or of all that is in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def start(
    names: list[str], folder: Path, line: str, number: int
) -> tuple[dict[str, workers.Worker], dict[str, list[float]]]:
    """Starts every worker once to warm the disk and so many times more, and leaves it running.

    Returns:
        The workers, and the seconds of each until its first translation.
    """
    running: dict[str, workers.Worker] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(number + 1):
        for name in names:
            if turn:
                running[name].close()
            one = FORMATS[name]
            began = time.perf_counter()
            running[name] = workers.Worker(
                __file__, folder / one.file, "--worker", name, backend=one.backend
            )
            running[name].ask(batches=[[line]])
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return running, seconds


@dataclasses.dataclass
class Measured:
    """A format's row.

    Attributes:
        bytes: of its files.
        start: seconds to the first translation.
        latency: seconds of a sentence alone.
        speeds: output tokens a second of each round.
        bleu: sacreBLEU.
        same: sentences whose texts are those of the first format.
        ties: others with the same score.
        different: the rest.
    """

    bytes: int
    start: float
    latency: float
    speeds: list[float]
    bleu: float
    same: int
    ties: int
    different: int


def compare(
    translator: Any, lines: list[str], ours: list[str], theirs: list[str]
) -> tuple[int, int, int]:
    """How many translations of the lines are the same, ties, and different."""
    other = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    sources = [lines[i] for i in other]
    scores = [
        [one.raw_score for one in translator.score(sources, [texts[i] for i in other])]
        for texts in (ours, theirs)
    ]
    ties = sum(abs(a - b) < TIE for a, b in zip(*scores, strict=True))
    return len(lines) - len(other), ties, len(other) - ties


def measure(
    names: list[str], folder: Path, translator: Any, pairs: list[tuple[str, str]], number: int
) -> dict[str, Measured]:
    """All that is told of the formats in a folder."""
    from keras_aiayn.evaluation import corpus_scores

    lines, references = map(list, zip(*pairs, strict=True))
    running, starts = start(names, folder, lines[0], number)
    few = [[line] for line in workers.evenly(lines, ALONE)]
    alone = workers.rounds(running, number, batches=few)
    together = workers.rounds(running, number, batches=[lines])
    for worker in running.values():
        worker.close()
    texts = {name: answers[0]["texts"] for name, answers in together.items()}
    rows = {}
    for name in names:
        encoded = translator.target_tokenizer.encode(texts[name])
        tokens = sum(len(ids) + 1 for ids in encoded)
        rows[name] = Measured(
            size(folder / FORMATS[name].file),
            statistics.median(starts[name]),
            statistics.median(second for one in alone[name] for second in one["seconds"]),
            [tokens / one["seconds"][0] for one in together[name]],
            corpus_scores(texts[name], references).bleu,
            *compare(translator, lines, texts[FIRST], texts[name]),
        )
    return rows


def told(rows: dict[str, Measured]) -> str:
    """The section of the results: a table, and a line for each format but the `.keras`."""
    first = rows[FIRST]
    header = ["format", "size, MB", "start, s", "one sentence, ms", "output tokens/s", "BLEU",
              "to the first", "the same", "ties", "different"]  # fmt: skip
    table = workers.table(
        header,
        [
            [name, f"{one.bytes / 1e6:.1f}", f"{one.start:.1f}", f"{1e3 * one.latency:.1f}",
             f"{statistics.median(one.speeds):,.0f}", f"{one.bleu:.2f}",
             f"{one.bleu - first.bleu:+.2f}", f"{one.same:,}", one.ties, one.different]
            for name, one in rows.items()
        ],
    )  # fmt: skip
    number = first.same
    lines = []
    for name, one in rows.items():
        if name.startswith(".keras"):
            continue
        beside = f".keras, {name.rpartition(', ')[2]}"
        beside = beside if beside in rows else FIRST
        ratio = workers.median_ratio(one.speeds, rows[beside].speeds)
        lines.append(
            f"- {name}: {one.same:,} of {number:,} sentences ({100 * one.same / number:.1f} %) the "
            f"same as by {FIRST}, and BLEU {one.bleu - first.bleu:+.2f}; {ratio:.2f} of the "
            f"tokens/s and {one.bytes / rows[beside].bytes:.2f} of the size of {beside}."
        )
    return table + "\n\n" + "\n".join(lines)


def main() -> None:
    """Compares, or as a worker translates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="A .keras file.")
    parser.add_argument("--source", type=Path, help="Sentences, one a line.")
    parser.add_argument("--reference", type=Path, help="Their right translations.")
    parser.add_argument("--sentences", type=int, default=1_000, help="Evenly drawn.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append",
                        help="Only formats whose names begin so, beside the first.")  # fmt: skip
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if options.source is None or options.reference is None:
        parser.error("name a --source and its --reference")
    from keras_aiayn.data import corpus

    pairs = [pair for pair in corpus.read_pairs(options.source, options.reference)
             if pair[0].strip()]  # fmt: skip
    pairs = workers.evenly(pairs, options.sentences)
    only = tuple(options.only or [""])
    names = [name for name in FORMATS if name == FIRST or name.startswith(only)]
    with tempfile.TemporaryDirectory() as folder:
        # As the command does: what JAX compiled once it need not compile again.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/jax"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        translator = write(options.model, Path(folder), {FORMATS[name].file for name in names})
        rows = measure(names, Path(folder), translator, pairs, options.rounds)
    workers.write_section(
        f"Formats, {options.model.parent.name}, {options.source.name}",
        f"{len(pairs):,} sentences; one at a time: {len(workers.evenly(pairs, ALONE))}. Beam "
        f"{BEAM}, length penalty 0, at most {EXTRA} tokens more than the input.\n\n{told(rows)}",
        keep=len(pairs) >= 500 and not options.only,
    )


if __name__ == "__main__":
    main()
