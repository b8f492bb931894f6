"""Writes a small translator, and what the backend that made it translates.

Run: python .ci/make_model.py FOLDER
Writes FOLDER/model.keras and FOLDER/expected.json, which translate_without_tensorflow.py reads.
"""

import itertools
import json
import sys
from pathlib import Path

import keras
import numpy as np

from keras_aiayn import LabelSmoothedCrossentropy, Transformer, Translator
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.special_ids import BOS, EOS, PAD

# Said the other way round: enough to learn in seconds, and an output whose words can be told apart.
WORDS = (["two men", "a girl", "the dog"], ["run", "wait", "sleep"], ["outside", "at home"])
PAIRS = [(" ".join(said), " ".join(said[::-1])) for said in itertools.product(*WORDS)]


def padded(rows: list[list[int]]) -> np.ndarray:
    """Rows of ids of any length as one array."""
    width = max(map(len, rows))
    return np.array([row + [PAD] * (width - len(row)) for row in rows], dtype="int32")


def main(folder: Path) -> None:
    """Trains the translator, saves it and translates with it."""
    keras.utils.set_random_seed(1)
    tokenizer = SentencePieceTokenizer.learn([source for source, _ in PAIRS], vocabulary_size=300)
    sources, targets = (tokenizer.encode(list(side)) for side in zip(*PAIRS, strict=True))
    model = Transformer(
        vocabulary_size=tokenizer.vocabulary_size,
        num_layers=1,
        hidden_dim=64,
        intermediate_dim=128,
        num_heads=4,
        dropout=0.0,
    )
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=LabelSmoothedCrossentropy())
    inputs = {
        "encoder_token_ids": padded([ids + [EOS] for ids in sources]),
        "decoder_token_ids": padded([[BOS] + ids for ids in targets]),
    }
    model.fit(inputs, padded([ids + [EOS] for ids in targets]), epochs=100, batch_size=9, verbose=0)

    folder.mkdir(parents=True, exist_ok=True)
    translator = Translator(model, source_tokenizer=tokenizer)
    translator.save(folder / "model.keras")
    texts = [source for source, _ in PAIRS] + ["", "café 🙂"]
    found = translator.translate(texts, details=True)
    right = sum(one.text == target for one, (_, target) in zip(found, PAIRS, strict=False))
    if right < len(PAIRS) / 2:
        sys.exit(f"{right} of {len(PAIRS)} learned: too few for a comparison to mean anything")
    expected = {
        "backend": keras.backend.backend(),
        "texts": texts,
        "translations": [one.text for one in found],
        "scores": [float(one.score) for one in found],
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    print(f"{right} of {len(PAIRS)} learned")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
