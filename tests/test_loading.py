"""A file from a stranger: what is not a whole translator is refused, and runs nothing."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.loading import load, load_tokenizers


@pytest.fixture(scope="module")
def translator():
    tokenizer = ByteTokenizer()
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=2
    )
    return Translator(model, tokenizer)


@pytest.fixture(scope="module")
def file(translator, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "model.keras"
    translator.save(path)
    return path.read_bytes()


def loaded(content, tmp_path):
    path = tmp_path / "some.keras"
    path.write_bytes(content)
    return load(path)


def mutations(file, count, seed):
    """Files that differ from a real one, in some of the ways in which files go wrong."""
    generator = np.random.default_rng(seed)
    for number in range(count):
        content = bytearray(file)
        place, other = generator.integers(0, len(file), 2)
        size = int(generator.integers(1, 64))
        kind = number % 6
        if kind == 0:
            content[place] ^= 1 << generator.integers(8)
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            content[place : place + size] = bytes(size)
        elif kind == 3:
            del content[place : place + size]
        elif kind == 4:
            content[place:place] = content[other : other + size]
        else:
            content[place : place + size] = generator.bytes(size)
        yield bytes(content)


def test_a_mutated_file_is_refused_or_is_the_same(file, translator, tmp_path):
    refused = 0
    for content in mutations(file, 240, seed=1):
        try:
            other = loaded(content, tmp_path)
        except ValueError as error:
            assert "\n" not in str(error) and "some.keras" in str(error)
            refused += 1
            continue
        # What no one reads may change: a date, the room between two parts of the archive.
        for one, same in zip(translator.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(one, same)
        assert other.source_tokenizer.fingerprint == translator.source_tokenizer.fingerprint
        own, theirs = (
            {k: v for k, v in one.get_config().items() if k != "version"}
            for one in (translator, other)
        )
        assert own == theirs
    assert refused > 200


def rewritten(file, change=lambda config: config, members=(), leave_out=()):
    """The file with another configuration, with more members or fewer."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            if name in leave_out:
                continue
            content = old.read(name)
            if name == "config.json":
                content = json.dumps(change(json.loads(content))).encode()
            new.writestr(name, content)
        for name, content in members:
            new.writestr(name, content)
    return stream.getvalue()


def test_an_unchanged_copy_is_loaded(file, tmp_path):
    assert isinstance(loaded(rewritten(file), tmp_path), Translator)


def inside(config, **values):
    """Changes the configuration of the model in that of a translator."""
    config["config"]["model"]["config"].update(values)
    return config


LAMBDA = {"module": "keras.layers", "class_name": "Lambda", "config": {"function": "print"}}
FUNCTION = {"module": "builtins", "class_name": "function", "config": "eval",
            "registered_name": "function"}  # fmt: skip
LOOKUP = {"module": "keras.layers", "class_name": "StringLookup",
          "config": {"vocabulary": "/etc/passwd"}}  # fmt: skip


def quantized(mode):
    config = {"mode": mode, "source_name": "float32"}
    return {"module": "keras.dtype_policies", "class_name": "QuantizedDTypePolicy",
            "config": config, "registered_name": None}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: inside(c, activation=LAMBDA), "keras.layers.Lambda, which is no part"),
        (lambda c: inside(c, activation=FUNCTION), "builtins.function, which is no part"),
        (lambda c: inside(c, name=[{"deep": LOOKUP}]), "StringLookup, which is no part"),
        (lambda c: c | {"class_name": "Sequential"}, "a Sequential and not a Translator"),
        (lambda c: c | {"registered_name": "keras_hub>Other"}, "which is no part"),
        (lambda c: c | {"module": "os"}, "os.Translator, which is no part"),
        (lambda c: inside(c, vocabulary_size=10**12), "vocabulary_size asks for more weights"),
        (lambda c: inside(c, num_layers=10**9), "num_layers asks for more weights"),
        (lambda c: inside(c, num_layers=1_000, hidden_dim=2), "num_layers asks for more weights"),
        (lambda c: c["config"].update(beam_size=10**9) or c, "its beam_size is 1000000000"),
        (lambda c: c["config"].update(max_extra_length=10**9) or c, "its max_extra_length is"),
        (lambda c: inside(c, key_dim=10**9), "key_dim asks for more weights"),
        (lambda c: inside(c, max_length=10**12), "max_length asks for more weights"),
        (lambda c: inside(c, hidden_dim="8"), "cannot be loaded"),
        (lambda c: inside(c, dtype=quantized("gptq")), "its weights are in 'gptq', which is none"),
        (lambda c: inside(c, dtype=quantized("int8")), "cannot be loaded"),  # they are not
        (lambda c: inside(c, dtype="gptq/4/128_from_float32"), "cannot be loaded"),
        (lambda c: [c], "cannot be loaded"),
    ],
)
def test_a_configuration_of_anything_else_is_refused(file, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        loaded(rewritten(file, change), tmp_path)


@pytest.mark.parametrize("name", ["evil.py", "assets/../../evil", "/etc/evil", "assets/evil"])
def test_a_member_of_another_name_is_refused(file, tmp_path, name):
    with pytest.raises(ValueError, match="a translator's file holds no"):
        loaded(rewritten(file, members=[(name, b"")]), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.weights.h5", "assets/bytes.txt"])
def test_a_member_that_is_missing_is_missed(file, tmp_path, name):
    with pytest.raises(ValueError, match="cannot be loaded"):
        loaded(rewritten(file, leave_out=[name]), tmp_path)


def with_weights(file, change):
    """The file with weights that were changed by a function of the open HDF5 file."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        stream = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(stream, "r+") as h5:
        change(h5)
    members = [("model.weights.h5", stream.getvalue())]
    return rewritten(file, members=members, leave_out=["model.weights.h5"])


@pytest.mark.parametrize("at", ["", "layers/"])
def test_weights_in_another_file_are_not_read(file, tmp_path, at):
    """HDF5 can point to other files: one that is opened to be read never ends, if it is a pipe."""
    secret = tmp_path / "secret.h5"
    os.mkfifo(secret)

    def point_there(h5):
        for name in list(h5[at or "/"]):
            del h5[at + name]
            h5[at + name] = h5py.ExternalLink(str(secret), name)

    with pytest.raises(ValueError, match="its weights point to another place"):
        loaded(with_weights(file, point_there), tmp_path)


def claim_without_room(h5):
    h5.create_dataset("large", (1 << 30,), "float32")


def claim_by_a_filter(h5):
    h5.create_dataset("packed", data=np.zeros(1 << 16, "float32"), compression="gzip")


def hold_itself(h5):
    h5["layers/again"] = h5["layers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (claim_without_room, "do not hold what 'large' claims"),
        (claim_by_a_filter, "do not hold what 'packed' claims"),
        (hold_itself, "too deep"),
    ],
)
def test_weights_that_claim_more_than_they_hold_are_refused(file, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        loaded(with_weights(file, change), tmp_path)


@pytest.mark.parametrize("name", ["model.weights.h5", "assets/marian.json", "metadata.json"])
def test_a_bomb_is_refused_unopened(file, tmp_path, name):
    stream = io.BytesIO(rewritten(file, leave_out=[name]))
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(1 << 24))
    with pytest.raises(ValueError, match="parts are larger than the file"):
        loaded(stream.getvalue(), tmp_path)


def test_the_version_is_recorded(file):
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        config = json.loads(archive.read("config.json"))["config"]
    import keras_aiayn

    assert config["version"] == keras_aiayn.__version__ and config["format"] == 1


def test_keras_itself_loads_it_too(file, tmp_path):
    (tmp_path / "some.keras").write_bytes(file)
    assert isinstance(keras.saving.load_model(tmp_path / "some.keras"), Translator)


def test_the_tokenizers_are_read_alone_and_no_more_trusted(file, translator, tmp_path):
    path = tmp_path / "some.keras"
    path.write_bytes(file)
    source, target = load_tokenizers(path)
    assert source is target and source.fingerprint == translator.source_tokenizer.fingerprint
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("assets/../../outside.txt", "")
    with pytest.raises(ValueError, match=r"some\.keras .* holds no"):
        load_tokenizers(path)


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.keras")), ids=lambda path: path.stem)
def test_files_of_earlier_versions_translate_as_they_did(path):
    translator = load(path)
    expected = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    found = translator.translate([one["source"] for one in expected], details=True)
    assert [one.token_ids for one in found] == [one["token_ids"] for one in expected]
    np.testing.assert_allclose(
        [one.score for one in found], [one["score"] for one in expected], atol=1e-4
    )


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="it is the backend")
def test_translating_does_not_import_tensorflow_beside_another_backend():
    """Keras imports it, where it is installed, to serialise: seconds before the first word."""
    code = (
        "import sys\nfrom keras_aiayn.loading import load\n"
        "load(sys.argv[1]).translate(['red dogs'])\nassert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, GOLDEN / "format-1.keras"], check=True)
