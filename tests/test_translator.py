"""Texts in, texts out, and the one file that holds a translator."""

import os
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from keras_aiayn.loading import load

LINES = [f"{color} {animal} {verb}" for color in ("red", "blue", "grün") for animal in
         ("dogs", "cats", "owls") for verb in ("run", "sleep", "sing loudly")]  # fmt: skip
SENTENCES = ["red dogs run", "", "blue cats sleep and sing loudly", "   ", "owls 🦉 </s>", "x"]


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePieceTokenizer.learn(LINES, vocabulary_size=300)


@pytest.fixture(scope="module")
def translator(tokenizer):
    keras.utils.set_random_seed(3)
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=16, intermediate_dim=32, num_heads=2
    )
    return Translator(model, tokenizer, max_extra_length=5)


@pytest.fixture(scope="module")
def saved(translator, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    translator.save(path)
    return path


def test_every_text_gets_one_translation_in_its_place(translator):
    together = translator.translate(SENTENCES)
    alone = [translator.translate([text])[0] for text in SENTENCES]
    assert together == alone
    assert [together[i] for i in (1, 3)] == ["", ""]


def test_a_stream_of_lines_gives_what_a_list_gives(translator):
    assert list(translator.translate_lines(iter(SENTENCES), chunk_size=2)) == (
        translator.translate(SENTENCES)
    )


def test_small_batches_give_what_large_ones_give(translator):
    expected = translator.translate(SENTENCES)
    assert translator.translate(SENTENCES, tokens_per_batch=8) == expected
    assert translator.translate(SENTENCES, batch_size=1) == expected
    with pytest.raises(ValueError, match="`batch_size` must be at least 1. Received: 0"):
        translator.translate(SENTENCES, batch_size=0)


def test_details_hold_scores_tokens_and_alternatives(translator):
    (best,) = translator.translate(["red dogs run"], n_best=3, details=True)
    assert best.text == translator.translate(["red dogs run"])[0]
    scores = [best.score, *(one.score for one in best.alternatives)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    penalty = ((5 + len(best.tokens)) / 6) ** translator.length_penalty
    np.testing.assert_allclose(best.score, best.raw_score / penalty, rtol=1e-5)


def test_progress_counts_every_text(translator):
    counts = []
    translator.translate(SENTENCES, progress=counts.append)
    assert sum(counts) == len(SENTENCES)


def test_one_string_is_refused(translator):
    with pytest.raises(ValueError, match="list of strings"):
        translator.translate("red dogs run")


def test_learned_positions_flag_what_they_cut(tokenizer):
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=1,
        positions="learned", max_length=8,
    )  # fmt: skip
    short, long = Translator(model, tokenizer).translate(["owls", "owls " * 30], details=True)
    assert long.hit_limit and len(long.tokens) <= 8 and len(short.tokens) <= 8


def test_a_tokenizer_of_another_size_is_refused(translator):
    with pytest.raises(ValueError, match=r"260.*300"):
        Translator(translator.model, ByteTokenizer())


def test_a_loaded_file_translates_the_same(translator, saved):
    loaded = keras.saving.load_model(saved)
    assert loaded.translate(SENTENCES) == translator.translate(SENTENCES)
    assert loaded.max_extra_length == translator.max_extra_length


def test_the_tie_survives_a_file(saved):
    model = keras.saving.load_model(saved).model
    ids = np.array([[5, 6, 7]])
    inputs = {"encoder_token_ids": ids, "decoder_token_ids": ids}
    before = keras.ops.convert_to_numpy(model(inputs))
    table = model.target_embedding.table.embeddings
    table.assign(table + 1.0)
    assert np.abs(keras.ops.convert_to_numpy(model(inputs)) - before).max() > 0.1
    matrices = [w for w in model.weights if w.shape[0] == model.vocabulary_size]
    assert len(matrices) == 1


def test_two_tokenizers_are_kept_apart(tokenizer, tmp_path):
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=1,
        share_embeddings=False, target_vocabulary_size=260,
    )  # fmt: skip
    Translator(model, tokenizer, ByteTokenizer(), max_extra_length=3).save(tmp_path / "two.keras")
    loaded = load(tmp_path / "two.keras")
    assert loaded.source_tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.target_tokenizer.vocabulary_size == 260
    assert len(loaded.translate(["red dogs run"])) == 1


@pytest.mark.works("a `.keras` that the other two read")
@pytest.mark.works("`.keras`", table="format")
def test_other_backends_read_the_file_and_translate_the_same(translator, saved):
    here = keras.backend.backend()
    code = (
        "import sys, keras, keras_aiayn\n"
        "translator = keras.saving.load_model(sys.argv[1])\n"
        "print(ascii(translator.translate(eval(sys.argv[2]))))"
    )
    for backend in {"tensorflow", "jax", "torch"} - {here}:
        done = subprocess.run(
            [sys.executable, "-c", code, str(saved), ascii(SENTENCES)],
            env=os.environ | {"KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert eval(done.stdout.splitlines()[-1]) == translator.translate(SENTENCES)


def test_a_failed_save_leaves_the_old_file(translator, saved, monkeypatch):
    before = saved.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keras.Model, "save", fail)
    with pytest.raises(OSError, match="No space"):
        translator.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("content", [b"", b"not a model", b"PK\x03\x04 nor this"])
def test_a_foreign_file_is_a_clear_error(content, tmp_path):
    path = tmp_path / "foreign.keras"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a .keras file"):
        load(path)


def test_a_model_that_is_no_translator_is_a_clear_error(tmp_path):
    path = tmp_path / "dense.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
    with pytest.raises(ValueError, match="holds a Sequential and not a Translator"):
        load(path)


def test_a_truncated_file_is_a_clear_error(saved, tmp_path):
    path = tmp_path / "short.keras"
    path.write_bytes(saved.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"short\.keras"):
        load(path)


def test_a_file_of_a_newer_format_is_refused(saved, tmp_path):
    path = tmp_path / "newer.keras"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "config.json":
                assert b'"format": 1' in content
                content = content.replace(b'"format": 1', b'"format": 99')
            new.writestr(name, content)
    with pytest.raises(ValueError, match="format 99.*upgrade"):
        load(path)
