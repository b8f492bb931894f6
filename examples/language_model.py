"""The decoder alone: a language model, which reads what came before and gives the next token.

    python examples/language_model.py                   on sentences of the grammar in parsing.py
    python examples/language_model.py --text train.en   on any text, one sentence a line

The form of GPT (Radford et al., 2018), from the blocks of section 3.1 and the mask of 3.2.3.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_aiayn import (
    LabelSmoothedCrossentropy,
    NoamSchedule,
    SharedEmbedding,
    SinusoidalPositionEncoding,
    TokenMetrics,
    TransformerDecoderBlock,
    masking,
)
from keras_aiayn.data import corpus
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.special_ids import EOS, PAD

WIDTH, LENGTH, ROWS = 128, 64, 32  # d_model; tokens of a row; rows of a batch
# Normalised first, as models of one half are since GPT-2: they learn sooner.
BLOCK = {"num_heads": 4, "intermediate_dim": 512, "dropout": 0.1, "normalize_first": True}


def build(vocabulary_size: int, num_layers: int = 2) -> keras.Model:
    """A model from ids (B, T) to logits (B, T, V) of the token after each."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = SharedEmbedding(vocabulary_size, WIDTH)
    x = SinusoidalPositionEncoding()(embedding(token_ids))
    mask = masking.decoder_mask(token_ids)
    for _ in range(num_layers):
        x = TransformerDecoderBlock(**BLOCK, cross_attention=False)(x, self_attention_mask=mask)
    x = keras.layers.LayerNormalization(epsilon=1e-6)(x)  # which the last block leaves to do
    return keras.Model(token_ids, embedding(x, reverse=True))


def compile_(model: keras.Model) -> None:
    """The paper's optimizer and loss, without smoothing: perplexity is what counts here."""
    schedule = NoamSchedule(WIDTH, warmup_steps=100, scale=0.5)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule, 0.9, 0.98, 1e-9),
        loss=LabelSmoothedCrossentropy(0.0),
        metrics=[TokenMetrics(0.0)],
    )


def stream(tokenizer: SentencePieceTokenizer, lines: Sequence[str], length: int) -> np.ndarray:
    """All lines, EOS behind each, cut into rows (N, length); what is left over is left out."""
    ids = [i for pieces in tokenizer.encode(lines) for i in (*pieces, EOS)]
    return np.array(ids[: len(ids) // length * length], "int32").reshape(-1, length)


def read(path: Path | None) -> tuple[list[str], list[str]]:
    """Lines to train on, and each twentieth to judge by."""
    if path is None:
        from parsing import made_trees, words

        lines = [" ".join(words(tree)) for tree in made_trees(20_000, seed=1)]
    else:
        lines = [line for line in corpus.read_lines(path) if line.strip()]
    return [line for i, line in enumerate(lines) if i % 20], lines[::20]


def write_on(model: keras.Model, ids: Sequence[int], generator: Any, longest: int) -> list[int]:
    """Draws tokens after those given, to EOS or to the `longest`."""
    ids = list(ids)
    while len(ids) < longest and (len(ids) == 1 or ids[-1] != EOS):
        row = np.array([ids + [PAD] * (longest - len(ids))], "int32")  # one shape, compiled once
        logits = model.predict_on_batch(row)[0, len(ids) - 1]
        ids.append(int(np.argmax(logits + generator.gumbel(size=len(logits)))))
    return ids


Trained = tuple[keras.Model, SentencePieceTokenizer, np.ndarray, np.ndarray]


def train(path: Path | None, vocabulary_size: int, epochs: int) -> Trained:
    """The model, its tokenizer, the rows that it was trained on, and rows that it has not seen.

    A row has a token more than the model reads: the targets are what it reads, one token further
    on.
    """
    trained, held_out = read(path)
    tokenizer = SentencePieceTokenizer.learn(trained, vocabulary_size)
    model = build(tokenizer.vocabulary_size)
    compile_(model)
    rows, unseen = (stream(tokenizer, lines, LENGTH + 1) for lines in (trained, held_out))
    model.fit(rows[:, :-1], rows[:, 1:], batch_size=ROWS, epochs=epochs, verbose=2)
    return model, tokenizer, rows, unseen


def options(description: str, epochs: int, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--text", type=Path, help="sentences; a made grammar's by default")
    parser.add_argument("--vocabulary-size", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=epochs)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, judges, and writes some sentences."""
    given = options(__doc__.splitlines()[0], 2, arguments)
    keras.utils.set_random_seed(1)
    model, tokenizer, _, unseen = train(given.text, given.vocabulary_size, given.epochs)
    judged = model.evaluate(unseen[:, :-1], unseen[:, 1:], ROWS, verbose=0, return_dict=True)
    print(f"perplexity of a token on lines that were not trained on: {judged['perplexity']:.2f}")
    generator = np.random.default_rng(1)
    drawn = [write_on(model, [EOS], generator, LENGTH) for _ in range(5)]
    print(*tokenizer.decode(drawn), sep="\n")


if __name__ == "__main__":
    main()
