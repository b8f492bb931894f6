"""The decoder alone, as in GPT: a language model, which gives the next token from those before.

`python examples/language_model.py --text train.en`: one sentence a line; without a text, made ones.
"""

import keras
import numpy as np
import typer
from parsing import made_trees, words

import keras_aiayn as ka
from keras_aiayn.data.corpus import read_lines
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.special_ids import EOS

WIDTH, LENGTH = 128, 64  # d_model; tokens of a row
BLOCK = {"num_heads": 4, "intermediate_dim": 512, "dropout": 0.0, "normalize_first": True}


def build(vocabulary_size: int) -> keras.Model:
    """A model from ids (B, T) to logits (B, T, V) of the token after each."""
    token_ids = keras.Input((None,), dtype="int32")
    embedding = ka.SharedEmbedding(vocabulary_size, WIDTH)
    x = ka.SinusoidalPositionEncoding()(embedding(token_ids))
    mask = ka.masking.decoder_mask(token_ids)
    for _ in range(2):
        x = ka.TransformerDecoderBlock(**BLOCK, cross_attention=False)(x, self_attention_mask=mask)
    x = keras.layers.LayerNormalization(epsilon=1e-6)(x)  # which the last block leaves to do
    return keras.Model(token_ids, embedding(x, reverse=True))


def read(text: typer.FileBinaryRead | None, vocabulary_size: int, length: int) -> tuple:
    """The tokenizer of a text, and its ids: rows (N, length) to train on, a twentieth to judge."""
    lines = list(read_lines(text) if text else map(" ".join, map(words, made_trees(20_000, 1))))
    tokenizer = SentencePieceTokenizer.learn(lines, vocabulary_size)
    ids = [i for pieces in tokenizer.encode(lines) if pieces for i in (*pieces, EOS)]
    rows = np.array(ids[: len(ids) // length * length], "int32").reshape(-1, length)
    return tokenizer, *np.split(rows, [len(rows) * 19 // 20])


def main(text: typer.FileBinaryRead | None = None, vocabulary_size: int = 600, epochs: int = 2):
    """Trains a language model, judges it, and lets it write."""
    keras.utils.set_random_seed(1)
    tokenizer, rows, unseen = read(text, vocabulary_size, LENGTH + 1)
    model = build(tokenizer.vocabulary_size)
    adam = keras.optimizers.Adam(ka.NoamSchedule(WIDTH, 100, scale=0.5), 0.9, 0.98, 1e-9)
    model.compile(adam, ka.LabelSmoothedCrossentropy(0.0), metrics=[ka.TokenMetrics(0.0)])
    model.fit(rows[:, :-1], rows[:, 1:], batch_size=32, epochs=epochs, verbose=2)
    judged = model.evaluate(unseen[:, :-1], unseen[:, 1:], verbose=0, return_dict=True)
    print(f"perplexity of a token of what was not trained on: {judged['perplexity']:.2f}")
    ids = np.full((1, LENGTH), EOS, "int32")
    for place in range(1, LENGTH):  # what stands from here on, no earlier place sees
        logits = model.predict_on_batch(ids)[0, place - 1]
        ids[0, place] = np.argmax(logits + np.random.gumbel(size=len(logits)))
    print(*tokenizer.decode(ids))
    return model, tokenizer, rows, unseen


if __name__ == "__main__":
    typer.run(main)
