"""Loads a `.keras` made elsewhere, where JAX is alone, and translates as its maker did.

Run: KERAS_BACKEND=jax python .ci/translate_without_tensorflow.py FOLDER
FOLDER is one that make_model.py has filled. A translation may differ from the maker's only where
the scores of the two are less than 1e-4 apart.
"""

import importlib.util
import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Compares the translations of model.keras with expected.json; exits with 1 if they differ."""
    there = [name for name in ("tensorflow", "torch") if importlib.util.find_spec(name)]
    if there:
        sys.exit(f"this environment is to hold JAX alone, and has {', '.join(there)}")

    import keras

    import keras_aiayn  # noqa: F401  (registers what the file holds)

    expected = json.loads((folder / "expected.json").read_text())
    translator = keras.saving.load_model(folder / "model.keras")
    found = translator.translate(expected["texts"], details=True)
    rows = zip(expected["translations"], expected["scores"], found, strict=True)
    wrong = [
        f"{theirs!r} ({their_score}) against {ours.text!r} ({ours.score})"
        for theirs, their_score, ours in rows
        if theirs != ours.text and not abs(their_score - ours.score) < 1e-4
    ]
    if wrong:
        sys.exit(f"{expected['backend']} against {keras.backend.backend()}: " + "; ".join(wrong))
    print(f"{len(found)} translations as on {expected['backend']}, without TensorFlow")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
