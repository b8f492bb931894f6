"""The encoder alone: a masked language model, which fills in the tokens that were taken out.

    python examples/masked_model.py                   on sentences of the grammar in parsing.py
    python examples/masked_model.py --text train.en   on any text, one sentence a line

The form of BERT (Devlin et al., 2018), which however keeps or changes a fifth of the tokens that it
asks for, because none is missing in the tasks that follow.
"""

from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from language_model import BLOCK, WIDTH, Trained, compile_, options, read, stream

from keras_aiayn import (
    SharedEmbedding,
    SinusoidalPositionEncoding,
    TransformerEncoderBlock,
    masking,
)
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.special_ids import EOS, PAD, UNK

MASK = UNK  # which no text gives: rare characters are spelled in bytes
SHARE = 0.3  # BERT's 0.15 tells less in a minute
LENGTH, ROWS = 16, 64  # what is short tells soon that the neighbours count


def build(vocabulary_size: int, num_layers: int = 1) -> keras.Model:
    """A model from ids (B, T), MASK among them, to logits (B, T, V) of what stood there."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = SharedEmbedding(vocabulary_size, WIDTH)
    x = SinusoidalPositionEncoding()(embedding(token_ids))
    mask = masking.padding_mask(token_ids)
    for _ in range(num_layers):
        x = TransformerEncoderBlock(**BLOCK)(x, attention_mask=mask)
    x = keras.layers.LayerNormalization(epsilon=1e-6)(x)  # which the last block leaves to do
    return keras.Model(token_ids, embedding(x, reverse=True))


def take_out(ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids (B, T) with MASK for some tokens, and targets: those tokens, PAD elsewhere.

    A pad in the targets counts nothing, so only what was taken out is learned.
    """
    chosen = (generator.random(ids.shape) < SHARE) & (ids != PAD)
    return np.where(chosen, MASK, ids), np.where(chosen, ids, PAD)


def guesses(model: keras.Model, tokenizer: SentencePieceTokenizer, text: str) -> list[list[str]]:
    """The three likeliest tokens for each "_" of a text."""
    parts = tokenizer.encode(text.split("_"))
    ids = [i for part in parts for i in (*part, MASK)][:-1]
    row = np.array([[EOS, *ids, EOS] + [PAD] * (LENGTH - len(ids))], "int32")  # of one shape
    logits = model.predict_on_batch(row)[0, 1:]
    best = [np.argsort(-logits[place])[:3] for place, i in enumerate(ids) if i == MASK]
    return [tokenizer.pieces(three) for three in best]


def train(path: Path | None, vocabulary_size: int, epochs: int) -> Trained:
    """The model, its tokenizer, the rows that it was trained on, and rows that it has not seen."""
    trained, held_out = read(path)
    tokenizer = SentencePieceTokenizer.learn(trained, vocabulary_size)
    model = build(tokenizer.vocabulary_size)
    compile_(model)
    rows, unseen = (stream(tokenizer, lines, LENGTH) for lines in (trained, held_out))
    generator = np.random.default_rng(1)
    for _ in range(epochs):  # other tokens each time
        model.fit(*take_out(rows, generator), batch_size=ROWS, verbose=2)
    return model, tokenizer, rows, unseen


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, judges, and fills in a word."""
    given = options(__doc__.splitlines()[0], 12, arguments)
    keras.utils.set_random_seed(1)
    model, tokenizer, _, unseen = train(given.text, given.vocabulary_size, given.epochs)
    asked = take_out(unseen, np.random.default_rng(0))
    judged = model.evaluate(*asked, ROWS, verbose=0, return_dict=True)
    print(f"perplexity of what was taken out, on unseen lines: {judged['perplexity']:.2f}")
    for text in tokenizer.decode(unseen[:3]):
        one, _, *rest = text.split()
        hidden = " ".join([one, "_", *rest[:10]])
        print(hidden, *guesses(model, tokenizer, hidden), sep="\n    ")


if __name__ == "__main__":
    main()
