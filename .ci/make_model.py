"""Writes a small untrained translator, and what the backend that made it translates.

Run: python .ci/make_model.py FOLDER
Writes FOLDER/model.keras and FOLDER/expected.json, which translate_without_tensorflow.py reads.
"""

import json
import sys
from pathlib import Path

import keras

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import SentencePieceTokenizer

TEXTS = ["two young men are outside near many bushes", "", "café 🙂", "the men"]
LINES = [
    f"{who} {what} {where}"
    for who in ("two men", "a girl", "the dog", "many people")
    for what in ("run", "wait", "sleep", "are standing")
    for where in ("outside", "at home")
]


def main(folder: Path) -> None:
    """Makes the translator, saves it and translates with it."""
    keras.utils.set_random_seed(1)
    tokenizer = SentencePieceTokenizer.learn(LINES, vocabulary_size=300)
    model = Transformer(
        vocabulary_size=tokenizer.vocabulary_size,
        num_layers=2,
        hidden_dim=32,
        intermediate_dim=64,
        num_heads=4,
    )
    translator = Translator(model, source_tokenizer=tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    translator.save(folder / "model.keras")
    found = translator.translate(TEXTS, details=True)
    expected = {
        "backend": keras.backend.backend(),
        "texts": TEXTS,
        "translations": [one.text for one in found],
        "scores": [float(one.score) for one in found],
    }
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
