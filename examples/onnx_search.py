"""Translate with ONNX Runtime: the beam search of section 6.1 around the two graphs of an export.

    keras-aiayn export run/model.keras --format onnx --output folder
    python examples/onnx_search.py folder < new.en > new.de

It needs numpy, onnxruntime and, for a model whose tokenizer is SentencePiece's, sentencepiece;
nothing of Keras. One sentence is searched at a time.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PAD, BOS, EOS = 0, 2, 3


class Engine:
    """A folder in ONNX Runtime.

    Args:
        folder: of the export.
        threads: of an operation; 0 for as many as there are cores.
    """

    def __init__(self, folder: Path, threads: int = 0):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(folder / f"{name}.onnx", options)
            for name in ("encoder", "decoder")
        )

    def begin(self, source_ids: np.ndarray) -> tuple[dict[str, np.ndarray], Sequence[np.ndarray]]:
        """What every step is given of sources (B, S), and an empty cache."""
        keys, values = self.encoder.run(None, {"source_ids": source_ids})
        source = {"source_ids": source_ids, "memory_keys": keys, "memory_values": values}
        return source, (keys[:, :, :, :0], values[:, :, :, :0])

    def step(
        self, token_ids: np.ndarray, source: dict[str, np.ndarray], cache: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Logits (B, T, V) of tokens (B, T), and the cache, longer by T."""
        past = dict(zip(("past_keys", "past_values"), cache, strict=True))
        logits, *cache = self.decoder.run(None, {"token_ids": token_ids, **source, **past})
        return logits, cache


def search(
    engine: Engine, source_ids: list[int], beams: int, alpha: float, longest: int
) -> list[int]:
    """Section 6.1 for one sentence: the ids of the best output, of at most so many tokens."""
    source, cache = engine.begin(np.array([source_ids], "int64"))
    alive, finished = [(0.0, [])], []

    def normalized(one: tuple[float, list[int]]) -> float:
        return one[0] / ((5 + len(one[1])) / 6) ** alpha

    for _ in range(longest):
        newest = np.array([[ids[-1] if ids else BOS] for _, ids in alive], "int64")
        wide = {
            name: np.repeat(x, len(alive), axis=0 if name == "source_ids" else 1)
            for name, x in source.items()
        }
        logits, cache = engine.step(newest, wide, cache)
        scores = log_softmax(logits[:, -1])
        scores[:, [PAD, BOS]] = -np.inf
        scores += [[score] for score, _ in alive]
        best = largest(scores.ravel(), 1 if beams == 1 else 2 * beams)
        found = [
            (scores.flat[i], alive[i // scores.shape[1]][1] + [int(i) % scores.shape[1]])
            for i in best
        ]
        finished += [one for one in found if one[1][-1] == EOS]
        kept = [i for i, one in zip(best, found, strict=True) if one[1][-1] != EOS][:beams]
        alive = [one for one in found if one[1][-1] != EOS][:beams]
        if not alive:
            break
        # Sums only fall: no one ends with more than the best has now, over the largest penalty.
        bound = alive[0][0] / ((5 + longest) / 6) ** alpha
        if finished and max(map(normalized, finished)) >= bound:
            break
        parents = np.array(kept) // scores.shape[1]
        cache = [np.take(x, parents, axis=1) for x in cache]
    return max(finished or alive, key=normalized)[1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def largest(values: np.ndarray, number: int) -> np.ndarray:
    """The places of so many largest values, the largest first."""
    places = np.argpartition(-values, number - 1)[:number]
    return places[np.argsort(-values[places])]


def tokenizers(folder: Path) -> list[Any]:
    """SentencePiece's of source and target: one twice where they share a vocabulary."""
    import sentencepiece

    files = [folder / side / "tokenizer.model" for side in ("source", "target")]
    if not files[0].exists():
        files = [folder / "tokenizer.model"] * 2
    return [sentencepiece.SentencePieceProcessor(model_file=str(file)) for file in files]


class Translator:
    """Text to text.

    Args:
        folder: of the export.
        beams: of the search.
        alpha: the length penalty.
        extra: an output has at most so many tokens more than its input, EOS counted.
    """

    def __init__(self, folder: Path, beams: int = 4, alpha: float = 0.6, extra: int = 50):
        self.engine = Engine(folder)
        self.source, self.target = tokenizers(folder)
        self.beams, self.alpha, self.extra = beams, alpha, extra

    def __call__(self, text: str) -> str:
        """The translation; of a blank text an empty one."""
        pieces = self.source.encode(text)
        if not text.strip() or not pieces:
            return ""
        ids = [*pieces, EOS]
        found = search(self.engine, ids, self.beams, self.alpha, len(ids) + self.extra)
        return self.target.decode([i for i in found if i != EOS])


def main() -> None:
    """Translates the lines of the standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Of the export.")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--length-penalty", type=float, default=0.6)
    options = parser.parse_args()
    if not (options.folder / "decoder.onnx").exists():
        parser.error(f"there is no decoder.onnx in {options.folder}")
    translate = Translator(options.folder, options.beam, options.length_penalty)
    for line in sys.stdin.buffer:  # only \n ends a line
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
        sys.stdout.buffer.write(translate(text).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
