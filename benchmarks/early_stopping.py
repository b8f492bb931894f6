"""What the early stop of the search saves, and that it changes nothing; what is compiled, and when.

    python benchmarks/early_stopping.py run/model.keras --source test_2016_flickr.en

All sentences are searched twice, to the end and until the result is proven: tokens and scores must
be the same. The steps of both are counted. Then they are searched again, and the programs that
were compiled for it are counted: there must be no new one.
"""

import argparse
import contextlib
import dataclasses
import io
import logging
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import workers

from keras_aiayn.data import corpus
from keras_aiayn.decoding.batches import Sentence, shapes_for
from keras_aiayn.decoding.loop import SearchResult
from keras_aiayn.decoding.stream import CompiledSearch
from keras_aiayn.loading import load
from keras_aiayn.special_ids import EOS


def searched(translator: Any, lines: list[str], beam_size: int, early: bool) -> Any:
    """A function that searches for all lines, and gives what was found for each."""
    asked = translator.search_settings(beam_size=beam_size, n_best=beam_size)
    longest = translator.model.max_length
    sentences = [
        Sentence.asked_for([*ids, EOS], asked, longest)
        for ids in translator.source_tokenizer.encode(lines)
        if ids
    ]
    method = dataclasses.replace(asked.method, early_stopping=early)
    search = CompiledSearch(translator.model, method)
    shapes = shapes_for(asked, 1_024, longest)

    def run() -> list[SearchResult]:
        found = dict(search.stream(sentences, shapes))
        return [found[place] for place in range(len(sentences))]

    return run


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
    found: dict[bool, list[SearchResult]] = {}
    seconds: dict[bool, float] = {}
    compiled = []
    for early in (True, False):
        run = searched(translator, lines, options.beam, early)
        compiled.append(counted_compilations(run))
        compiled.append(counted_compilations(run))
        began = time.perf_counter()
        found[early] = run()
        seconds[early] = time.perf_counter() - began
    differing = sum(map(differs, found[True], found[False]))
    steps = {early: sum(int(one.steps) for one in each) for early, each in found.items()}
    workers.write_section(
        f"Early stopping, {keras.backend.backend()}, beam {options.beam}",
        f"{len(lines):,} sentences, {options.beam} hypotheses each: those of {differing} "
        f"sentences differ. Steps of sentences: {steps[True]:,} of {steps[False]:,}, "
        f"{100 - 100 * steps[True] / steps[False]:.0f} % saved; "
        f"{seconds[True]:.1f} s and {seconds[False]:.1f} s.\n\n"
        f"Programs compiled in the first pass over them: {compiled[0]}; in a second one: "
        f"{compiled[1]}.",
    )


def differs(one: SearchResult, other: SearchResult) -> bool:
    """Whether two results are not the same hypotheses with the same scores."""
    longest = max(one.lengths)
    return not (
        np.array_equal(one.lengths, other.lengths)
        and np.array_equal(one.token_ids[:, :longest], other.token_ids[:, :longest])
        and np.allclose(one.scores, other.scores, atol=1e-5)
    )


if __name__ == "__main__":
    main()
