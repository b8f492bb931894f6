"""Translation speed beside CTranslate2, transformers' Marian and KerasHub's sampler.

    python benchmarks/decode.py run/model.keras --source test_2016_flickr.en
    python benchmarks/decode.py run/model.keras --size base --source newstest2013.en

All systems have the same weights and translate the same sentences with a length penalty of 0; an
output has at most 50 tokens more than its input, and one at least, which is CTranslate2's rule
(KerasHub's sampler has none). So many sentences are searched at a time, sorted by length;
CTranslate2 takes those that are done out of its batches, ours puts others in their place, the
other two wait for the longest of each batch. Counted are the tokens of the best outputs, EOS
included. With `--size` the weights are random, so that no output ends by itself: each is as long
as its input.

CTranslate2, transformers and KerasHub come with the extra [bench].
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import workers

BATCHES = (1, 16, 64)
EXTRA = 50
OURS = {"ours, TensorFlow": "tensorflow", "ours, JAX": "jax", "ours, PyTorch": "torch"}
KERAS_HUB = {f"KerasHub, {name.removeprefix('ours, ')}": b for name, b in OURS.items()}


class System:
    """A way to translate: `translate_all` gives the tokens of each output, without pads."""

    def __init__(self, model: Path, extra: int):
        from keras_aiayn.loading import load

        self.translator, self.extra = load(model), extra
        self.tokenizer = self.translator.source_tokenizer

    def ids(self, batch: list[str]) -> list[list[int]]:
        """Pieces and EOS of each sentence."""
        return [[*ids, 3] for ids in self.tokenizer.encode(batch)]

    def padded(self, batch: list[str]) -> Any:
        """The same as an array (B, S), and the longest output."""
        import numpy as np

        ids = self.ids(batch)
        array = np.zeros((len(ids), max(map(len, ids))), "int32")
        for row, one in zip(array, ids, strict=True):
            row[: len(one)] = one
        return array, array.shape[1] + self.extra


def ended(row: list[int]) -> list[int]:
    """An output up to its EOS: what comes after it fills the batch, with pads or more of it."""
    return row[: row.index(3) + 1] if 3 in row else [i for i in row if i]


class InBatches(System):
    """A system that waits for the longest output of each batch."""

    def __init__(self, model: Path, extra: int, translate: Any):
        super().__init__(model, extra)
        self.translate = translate  # sources (B, S), longest output, beam, to tokens

    def translate_all(self, lines: list[str], size: int, beam: int) -> list[list[int]]:
        """Sorted by length, one batch after another."""
        lengths = [len(ids) for ids in self.tokenizer.encode(lines)]
        order = sorted(range(len(lines)), key=lambda i: -lengths[i])
        found = {}
        for at in range(0, len(order), size):
            part = order[at : at + size]
            outputs = self.translate(*self.padded([lines[i] for i in part]), beam)
            found |= dict(zip(part, outputs, strict=True))
        return [found[i] for i in range(len(lines))]


class Ours(System):
    """This package, on Keras's backend."""

    def translate_all(self, lines: list[str], size: int, beam: int) -> list[list[int]]:
        """By `Translator.translate`, as anyone would."""
        found = self.translator.translate(
            lines, beam_size=beam, length_penalty=0.0, max_extra_length=self.extra, min_length=2,
            tokens_per_batch=10**9, batch_size=size, details=True,
        )  # fmt: skip
        return [one.token_ids for one in found]


class CTranslate2(System):
    """CTranslate2, from our own export."""

    def __init__(self, model: Path, extra: int, compute_type: str):
        import ctranslate2

        from keras_aiayn.interop.ctranslate2 import export

        super().__init__(model, extra)
        with tempfile.TemporaryDirectory() as folder:
            export(self.translator, Path(folder) / "model")
            self.engine = ctranslate2.Translator(
                f"{folder}/model", compute_type=compute_type, intra_threads=0
            )

    def translate_all(self, lines: list[str], size: int, beam: int) -> list[list[int]]:
        """By `translate_batch`."""
        ids = self.ids(lines)
        found = self.engine.translate_batch(
            [self.tokenizer.pieces(one[:-1]) for one in ids],
            max_batch_size=size,
            beam_size=beam,
            length_penalty=0,
            max_decoding_length=max(map(len, ids)) + self.extra,
            return_end_token=True,
        )
        number = self.number_of_piece
        return [[number[piece] for piece in one.hypotheses[0]] for one in found]

    @property
    def number_of_piece(self) -> dict[str, int]:
        """Ids by their pieces."""
        if not hasattr(self, "_numbers"):
            size = self.tokenizer.vocabulary_size
            self._numbers = {p: i for i, p in enumerate(self.tokenizer.pieces(range(size)))}
        return self._numbers


class Marian(InBatches):
    """transformers' Marian, with our weights."""

    def __init__(self, model: Path, extra: int):
        from marian import from_ours

        super().__init__(model, extra, self.generate)
        self.marian = from_ours(self.translator.model, max_length=2048)

    def generate(self, sources: Any, longest: int, beam: int) -> list[list[int]]:
        """By `generate`."""
        import torch

        sources = torch.tensor(sources).long()
        found = self.marian.generate(
            input_ids=sources,
            attention_mask=(sources != 0).long(),
            num_beams=beam,
            do_sample=False,
            length_penalty=0.0,
            max_new_tokens=longest,
            min_new_tokens=1,
        )
        return [ended(row) for row in found[:, 1:].tolist()]


class KerasHub(InBatches):
    """KerasHub's samplers over our model, whose cache they reorder."""

    def __init__(self, model: Path, extra: int):
        from keras_aiayn.decoding.compiled import compiled

        super().__init__(model, extra, self.sample)
        self.search = compiled(self.translator.model, self._search)

    def _search(self, sources: Any, *, beam: int, longest: int) -> Any:
        """A step function of a row for each beam, as KerasHub's sampler wants it."""
        import keras_hub
        from keras import ops, tree

        from keras_aiayn import masking

        model = self.translator.model
        memory_mask = masking.padding_mask(sources)
        memory = model.encode(sources, memory_mask, training=False)
        rows = sources.shape[0]
        positions = ops.reshape(ops.arange(longest), (1, 1, longest))

        def step(prompt: Any, cache: Any, index: Any) -> Any:
            blocks, mask = cache
            if rows == 1:  # its beams are views of one sentence, which PyTorch does not write to
                blocks = tree.map_structure(ops.copy, blocks)
            now = index - 1
            tokens = ops.slice(prompt, (0, now), (prompt.shape[0], 1))
            hidden, blocks = model.decode(
                tokens, None, ops.broadcast_to(positions <= now, (tokens.shape[0], 1, longest)),
                mask, cache=blocks, cache_index=now, positions=now, training=False,
            )  # fmt: skip
            logits = model.output_projection(hidden)
            return logits[:, 0], hidden, (blocks, mask)

        prompt = ops.concatenate(
            [ops.full((rows, 1), 2, "int32"), ops.zeros((rows, longest), "int32")], axis=1
        )
        known = ops.concatenate(
            [ops.ones((rows, 1), "bool"), ops.zeros((rows, longest), "bool")], 1
        )
        if beam == 1:
            sampler = keras_hub.samplers.GreedySampler()
        else:
            sampler = keras_hub.samplers.BeamSampler(num_beams=beam)
        cache = (model.init_cache(memory, longest), memory_mask)
        return sampler(step, prompt, cache=cache, index=1, mask=known, stop_token_ids=[3])

    def sample(self, sources: Any, longest: int, beam: int) -> list[list[int]]:
        """By KerasHub's sampler, compiled as its models compile it."""
        found = self.search(sources, beam=beam, longest=longest)
        found = found[:, 1:].tolist()
        return [ended(row) for row in found]


def system(name: str, model: Path, extra: int) -> System:
    """A system by the name of its row."""
    if name.startswith("CTranslate2"):
        return CTranslate2(model, extra, name.split()[-1])
    kinds = {"ours": Ours, "KerasHub": KerasHub, "Marian": Marian}
    return kinds[name.split(",")[0]](model, extra)


def work(options: argparse.Namespace) -> None:
    """A worker's life."""
    made = system(options.worker, options.model, options.extra)

    def handle(lines: list[str], size: int, beam: int) -> dict[str, Any]:
        began = time.perf_counter()
        found = made.translate_all(lines, size, beam)
        seconds = time.perf_counter() - began
        # Others know one limit for a batch; each sentence has its own.
        limits = [len(ids) + made.extra for ids in made.ids(lines)]
        outputs = [ids[:limit] for ids, limit in zip(found, limits, strict=True)]
        return {"seconds": seconds, "tokens": sum(map(len, outputs)), "ids": outputs}

    workers.serve(handle)


def sized(model: Path, size: str, folder: Path) -> Path:
    """A model of another size with the same tokenizer and random weights."""
    from keras_aiayn import TransformerConfig, Translator
    from keras_aiayn.loading import load

    tokenizer = load(model).source_tokenizer
    config = getattr(TransformerConfig, size)(tokenizer.vocabulary_size)
    Translator(config.build(seed=1), tokenizer).save(folder / f"{size}.keras")
    return folder / f"{size}.keras"


def compare(running: dict[str, Any], lines: list[str], size: int, beam: int, number: int) -> list:
    """A row for each system: tokens a second, beside those of others, ids as CTranslate2's."""
    answers = workers.rounds(running, number, lines=lines, size=size, beam=beam)
    speeds = {
        name: [answer["tokens"] / answer["seconds"] for answer in each]
        for name, each in answers.items()
    }
    theirs = answers.get("CTranslate2 float32")
    rows = []
    for name, own in speeds.items():
        ratios = [
            f"{workers.median_ratio(own, speeds[other]):.2f}" if other in speeds else ""
            for other in ("CTranslate2 float32", "Marian")
        ]
        same = ""
        if theirs:
            equal = zip(answers[name][0]["ids"], theirs[0]["ids"], strict=True)
            same = f"{100 * sum(a == b for a, b in equal) / len(lines):.1f} %"
        middle = sorted(own)[len(own) // 2]
        rows.append([size, beam, name, f"{middle:,.0f}", *ratios, same])
    return rows


def main() -> None:
    """Compares, or as a worker translates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="A .keras file.")
    parser.add_argument("--source", type=Path, help="Sentences, one a line.")
    parser.add_argument("--size", help="tiny, small or base with random weights.")
    parser.add_argument("--sentences", type=int, default=256, help="Evenly drawn.")
    parser.add_argument("--batch", type=int, action="append", help="1, 16 and 64 by default.")
    parser.add_argument("--beam", type=int, action="append", help="4 and 1 by default.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="Only systems whose names begin so.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--extra", type=int, default=EXTRA, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    from keras_aiayn.data import corpus

    backends = OURS | {"CTranslate2 float32": "torch", "CTranslate2 int8": "torch",
                       "Marian": "torch"} | KERAS_HUB  # fmt: skip
    names = [n for n in backends if not options.only or n.startswith(tuple(options.only))]
    lines = list(dict.fromkeys(filter(str.strip, corpus.read_lines(options.source))))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.size:
            model = sized(model, options.size, Path(folder))
        extra = 0 if options.size else EXTRA
        running = {
            name: workers.Worker(
                __file__, model, "--worker", name, "--extra", extra, backend=backends[name]
            )
            for name in names
        }
        for size in options.batch or BATCHES:
            for beam in options.beam or (4, 1):
                # One sentence at a time takes longer, and needs fewer to be told.
                wanted = max(16, options.sentences // (8 if size == 1 else 1))
                drawn = workers.evenly(lines, wanted)
                rows += compare(running, drawn, size, beam, options.rounds)
        for worker in running.values():
            worker.close()
    header = ["batch", "beam", "system", "output tokens/s", "over CTranslate2 float32",
              "over Marian", "ids as CTranslate2's"]  # fmt: skip
    title = f"Translation, {options.size or options.model.parent.name}, {options.source.name}"
    workers.write_section(title, workers.table(header, rows))


if __name__ == "__main__":
    main()
