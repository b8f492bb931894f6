"""Files made on this backend, opened by other processes on the other two backends.

Run as a program, this file is such a process: `python test_backends.py FOLDER` answers for the
files in the folder, and leaves what it found there.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_aiayn as ka
from keras_aiayn import masking

HERE = keras.backend.backend()

V, D, UPDATES = 17, 16, 4
SIZES = {"num_layers": 1, "hidden_dim": D, "intermediate_dim": 32, "num_heads": 2}
# On TensorFlow Adam trains a table that is only looked up wrongly (see layers/embedding.py): in
# the second model that is the source's, in the third the positions'.
TRAINED = {
    "tied": {},
    "untied": {"share_embeddings": False, "tie_projection": False},
    "learned": {"positions": "learned", "max_length": 6},
}
# Tokens come more than once, and rows are of uneven length.
INPUTS = {
    "encoder_token_ids": np.array([[4, 5, 5, 6, 5, 3], [5, 4, 3, 0, 0, 0]], "int32"),
    "decoder_token_ids": np.array([[2, 7, 7, 8, 7], [2, 7, 9, 0, 0]], "int32"),
}
TARGETS = np.array([[7, 7, 8, 7, 3], [7, 9, 3, 0, 0]], "int32")


def with_weights_of_numpy(model):
    """The same weights on every backend, as after training: no gain is 1 and no bias 0."""
    rng = np.random.default_rng(1)
    for weight in model.trainable_variables:
        spread = 0.2 if weight.shape[0] == D and len(weight.shape) == 1 else D**-0.5
        weight.assign(rng.normal(weight.path.endswith("gamma"), spread, weight.shape))
    return model


def every_layer_alone():
    """A user's functional model that holds each layer by itself."""
    ids = keras.Input((None,), dtype="int32", name="decoder_token_ids")
    causal, pads = masking.decoder_mask(ids), masking.padding_mask(ids)
    embedding = ka.SharedEmbedding(V, D, use_logits_bias=True)
    x = ka.LearnedPositionEmbedding(6)(ka.SinusoidalPositionEncoding()(embedding(ids)))
    x = x + ka.MultiHeadAttention(2, 4, value_dim=3)(x, x, attention_mask=causal)
    x = x + ka.PositionwiseFeedForward(32, activation="gelu")(x)
    memory = ka.TransformerEncoderBlock(2, 32, normalize_first=True)(x, attention_mask=causal)
    x = ka.TransformerDecoderBlock(2, 32, key_dim=4, value_dim=3)(
        x, memory, self_attention_mask=causal, memory_mask=pads
    )
    return keras.Model({"decoder_token_ids": ids}, embedding(x, reverse=True))


def make_files(folder):
    for name, options in TRAINED.items():
        model = with_weights_of_numpy(ka.Transformer(V, **SIZES, **options, dropout=0.0))
        # A warm-up of ordinary length has first steps that hide any wrong update.
        schedule = ka.NoamSchedule(D, warmup_steps=UPDATES, scale=0.02)
        model.compile(
            keras.optimizers.Adam(schedule, beta_1=0.9, beta_2=0.98, epsilon=1e-9),
            ka.LabelSmoothedCrossentropy(0.1),
        )
        model.optimizer.build(model.trainable_variables)
        model.save(folder / f"{name}.keras")
    mixed = ka.Transformer(V, **SIZES, dtype="mixed_bfloat16")
    with_weights_of_numpy(mixed).save(folder / "mixed.keras")
    with_weights_of_numpy(every_layer_alone()).save(folder / "layers.keras")


def answers(folder):
    """What this backend makes of the files: logits, and what training does to weights."""
    found = {}
    for path in sorted(folder.glob("*.keras")):
        model = keras.saving.load_model(path)
        name, inputs = path.stem, {key: INPUTS[key] for key in model.input}
        found[f"logits {name}"] = model.predict_on_batch(inputs)
        if name in TRAINED:
            before = flat(model)
            logs = [model.train_on_batch(INPUTS, TARGETS, return_dict=True) for _ in range(UPDATES)]
            found[f"losses {name}"] = np.array([float(log["loss"]) for log in logs])
            found[f"update {name}"] = flat(model) - before
        if name == "mixed":
            found["dtypes mixed"] = np.array(
                [model.decoder_blocks[0].feed_forward.compute_dtype, model.variables[0].dtype]
            )
    return found


def flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return answers(folder)


def test_updates_are_large_enough_to_tell(ours):
    for name in TRAINED:
        assert np.abs(ours[f"update {name}"]).max() > 5e-3
        assert ours[f"losses {name}"][-1] < ours[f"losses {name}"][0] - 0.01


def test_another_backend_computes_and_trains_the_same_from_our_files(
    on_another_backend, folder, ours
):
    # Optimizations take longer here than what they speed up.
    backend = on_another_backend(__file__, folder, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    with np.load(folder / f"{backend}.npz") as theirs:
        assert set(theirs) == set(ours)
        assert list(theirs["dtypes mixed"]) == list(ours["dtypes mixed"]) == ["bfloat16", "float32"]
        for name in ("layers", *TRAINED):
            assert_close(theirs[f"logits {name}"], ours[f"logits {name}"], 1e-5)
        mixed = ours["logits mixed"]
        assert_close(theirs["logits mixed"], mixed, 0.05 * np.abs(mixed).max())
        for name in TRAINED:
            assert_close(theirs[f"losses {name}"], ours[f"losses {name}"], 1e-5)
            assert_close(theirs[f"update {name}"], ours[f"update {name}"], 1e-6)


def assert_close(found, expected, atol):
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    np.savez(where / f"{HERE}.npz", **answers(where))
