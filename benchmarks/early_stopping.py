"""What the early stop of the search saves, and that it changes nothing; what is compiled, and when.

    python benchmarks/early_stopping.py run/model.keras --source test_2016_flickr.en

Every batch is searched twice, to the end and until the result is proven: tokens and scores must be
the same. The steps of both are counted. Then the first batch is searched again, and the programs
that were compiled for it are counted: there must be no new one.
"""

import argparse
import contextlib
import io
import logging
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import workers

from keras_aiayn.data import corpus
from keras_aiayn.decoding.batches import SourceBatch, like_length
from keras_aiayn.decoding.compiled import search_function
from keras_aiayn.loading import load
from keras_aiayn.special_ids import EOS


def searches(translator: Any, lines: list[str], beam_size: int) -> list[tuple[tuple, dict]]:
    """The arguments of the search of each batch."""
    asked = translator.search_settings(beam_size=beam_size)
    encoded = translator.source_tokenizer.encode(lines)
    sources = {i: [*ids, EOS] for i, ids in enumerate(encoded) if ids}
    made = []
    for indices, width, rows in like_length(sources, 1_024, translator.model.max_length):
        batch = SourceBatch(rows, width, 0)
        for row, index in enumerate(indices):
            batch.put(row, sources[index], [], asked, translator.model.max_length)
        capacity = batch.capacity(asked, translator.model.max_length)
        made.append(((batch.sources, batch.limits), {"max_length": capacity}))
    return made


def counted_compilations(run: Any) -> int:
    """How many programs JAX or TensorFlow compile while something runs; none on torch."""
    if keras.backend.backend() == "jax":
        import jax

        stream = io.StringIO()
        handler, log = logging.StreamHandler(stream), logging.getLogger("jax")
        log.addHandler(handler)
        with jax.log_compiles(), contextlib.redirect_stderr(io.StringIO()):
            run()
        log.removeHandler(handler)
        return stream.getvalue().count("Finished XLA compilation")
    if keras.backend.backend() == "tensorflow":
        from tensorflow.python.eager import context  # the only counter that TensorFlow has

        before = set(context.context().list_function_names())
        run()
        return len(set(context.context().list_function_names()) - before)
    run()
    return 0


def main() -> None:
    """Searches, compares and counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="A .keras file.")
    parser.add_argument("--source", type=Path, required=True, help="Sentences, one a line.")
    parser.add_argument("--beam", type=int, default=4)
    options = parser.parse_args()
    translator = load(options.model)
    lines = list(corpus.read_lines(options.source))
    made = searches(translator, lines, options.beam)
    found: dict[bool, list] = {}
    seconds: dict[bool, float] = {}
    compiled = []
    for early in (True, False):
        search = search_function(
            translator.model, beam_size=options.beam, early_stopping=early, num_return=options.beam
        )

        def run(search: Any = search) -> list:
            return [search(*arrays, **settings) for arrays, settings in made]

        compiled.append(counted_compilations(run))
        compiled.append(counted_compilations(run))
        began = time.perf_counter()
        found[early] = run()
        seconds[early] = time.perf_counter() - began
    differing = sum(
        not (
            np.array_equal(a.token_ids, b.token_ids) and np.allclose(a.scores, b.scores, atol=1e-5)
        )
        for a, b in zip(found[True], found[False], strict=True)
    )
    steps = {early: sum(int(one.steps) for one in each) for early, each in found.items()}
    workers.write_section(
        f"Early stopping, {keras.backend.backend()}, beam {options.beam}",
        f"{len(lines):,} sentences in {len(made)} batches, {options.beam} hypotheses each: "
        f"{differing} batches differ. Steps: {steps[True]:,} of {steps[False]:,}, "
        f"{100 - 100 * steps[True] / steps[False]:.0f} % saved; "
        f"{seconds[True]:.1f} s and {seconds[False]:.1f} s.\n\n"
        f"Programs compiled in the first pass over the batches: {compiled[0]}; in a second one: "
        f"{compiled[1]}.",
    )


if __name__ == "__main__":
    main()
