"""A user's own tf.data of raw text, through the tokenizer in the graph, straight into `fit`."""

import keras
import numpy as np
import pytest

from keras_aiayn import LabelSmoothedCrossentropy, Transformer
from keras_aiayn.data import batching
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.special_ids import BOS, EOS

SOURCES = ["red dogs run", "blue cats", "green owls sleep here", "dogs 🦉", "cats run", "owls sing"]
TARGETS = ["rote Hunde laufen", "blaue Katzen", "grüne Eulen schlafen hier", "Hunde 🦉",
           "Katzen laufen", "Eulen singen"]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tensorflow_text")
    return SentencePieceTokenizer.learn([*SOURCES, *TARGETS] * 3, vocabulary_size=310)


def raw_text(tokenizer):
    """As the README does it."""
    tf = batching.import_tensorflow()
    in_graph = tokenizer.in_graph()

    def to_batch(source, target):
        begin, end = (tf.fill([tf.shape(target)[0], 1], special) for special in (BOS, EOS))
        pieces = in_graph.tokenize(target)
        inputs = {
            "encoder_token_ids": tf.concat([in_graph.tokenize(source), end], 1).to_tensor(),
            "decoder_token_ids": tf.concat([begin, pieces], 1).to_tensor(),
        }
        return inputs, tf.concat([pieces, end], 1).to_tensor()

    return tf.data.Dataset.from_tensor_slices((SOURCES, TARGETS)).batch(3).map(to_batch)


def test_raw_text_becomes_the_ids_of_the_tokenizer(tokenizer):
    sources, targets = tokenizer.encode(SOURCES), tokenizer.encode(TARGETS)
    rows = iter(zip(sources, targets, strict=True))
    for inputs, wanted in raw_text(tokenizer):
        for encoder, decoder, target in zip(
            inputs["encoder_token_ids"].numpy(), inputs["decoder_token_ids"].numpy(),
            wanted.numpy(), strict=True,
        ):  # fmt: skip
            source_ids, target_ids = next(rows)
            assert encoder[: len(source_ids) + 1].tolist() == [*source_ids, EOS]
            assert decoder[: len(target_ids) + 1].tolist() == [BOS, *target_ids]
            assert target[: len(target_ids) + 1].tolist() == [*target_ids, EOS]
            for row, length in ((encoder, len(source_ids)), (target, len(target_ids))):
                assert not row[length + 1 :].any()


@pytest.mark.works("text straight into `fit`")
def test_raw_text_goes_straight_into_fit(tokenizer):
    keras.utils.set_random_seed(1)
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=16, intermediate_dim=16, num_heads=2,
        dropout=0.0,
    )  # fmt: skip
    model.compile(keras.optimizers.Adam(1e-2), LabelSmoothedCrossentropy(0.1))
    history = model.fit(raw_text(tokenizer), epochs=4, shuffle=False, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert np.isfinite(history["perplexity"]).all()
