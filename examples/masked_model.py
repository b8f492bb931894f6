"""The encoder alone, as in BERT: a masked language model, which fills in what was taken out.

`python examples/masked_model.py --text train.en`: one sentence a line; without a text, made ones.
"""

import keras
import numpy as np
import typer
from language_model import BLOCK, WIDTH, read

import keras_aiayn as ka
from keras_aiayn.special_ids import PAD, UNK

MASK = UNK  # which no text gives: rare characters are spelled in bytes
SHARE = 0.3  # BERT's 0.15 tells less in a minute
LENGTH = 16  # what is short tells soon that the neighbours count


def build(vocabulary_size: int) -> keras.Model:
    """A model from ids (B, T), MASK among them, to logits (B, T, V) of what stood there."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = ka.SharedEmbedding(vocabulary_size, WIDTH)
    x = ka.SinusoidalPositionEncoding()(embedding(token_ids))
    x = ka.TransformerEncoderBlock(**BLOCK)(x, attention_mask=ka.masking.padding_mask(token_ids))
    x = keras.layers.LayerNormalization(epsilon=1e-6)(x)  # which the last block leaves to do
    return keras.Model(token_ids, embedding(x, reverse=True))


def take_out(ids: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids (B, T) with MASK for some tokens, and targets: those tokens, PAD elsewhere.

    A pad in the targets counts nothing, so only what was taken out is learned.
    """
    chosen = (generator.random(ids.shape) < SHARE) & (ids != PAD)
    return np.where(chosen, MASK, ids), np.where(chosen, ids, PAD)


def main(text: typer.FileBinaryRead | None = None, vocabulary_size: int = 600, epochs: int = 10):
    """Trains a masked model, judges it, and lets it fill in."""
    keras.utils.set_random_seed(1)
    tokenizer, rows, unseen = read(text, vocabulary_size, LENGTH)
    model = build(tokenizer.vocabulary_size)
    adam = keras.optimizers.Adam(ka.NoamSchedule(WIDTH, 100, scale=0.5), 0.9, 0.98, 1e-9)
    model.compile(adam, ka.LabelSmoothedCrossentropy(0.0), metrics=[ka.TokenMetrics(0.0)])
    generator = np.random.default_rng(1)
    for _ in range(epochs):  # other tokens each time
        model.fit(*take_out(rows, generator), batch_size=64, verbose=2)
    seen, targets = take_out(unseen, generator)
    judged = model.evaluate(seen, targets, verbose=0, return_dict=True)
    print(f"perplexity of what was taken out of unseen rows: {judged['perplexity']:.2f}")
    best = model.predict_on_batch(seen[:5]).argmax(-1)
    filled = np.where(seen[:5] == MASK, best, seen[:5])
    for three in zip(*map(tokenizer.decode, (seen[:5], filled, unseen[:5])), strict=True):
        print(*three, sep="\n    ")
    return model, tokenizer, rows, unseen


if __name__ == "__main__":
    typer.run(main)
