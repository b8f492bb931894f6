"""The graphs for ONNX give the numbers of the model, and a search over them its translations."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_aiayn import Transformer, Translator
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.interop import onnx as ours
from keras_aiayn.special_ids import EOS, PAD

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_search.py"
spec = importlib.util.spec_from_file_location("onnx_search", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

BACKEND = keras.backend.backend()
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch writes ONNX")

LINES = ["a", "the dog runs", "où est-ce?", "x" * 40, "one two three four five six seven", "日本"]
SIZES = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4}
KINDS = [
    {},
    {"normalize_first": True, "dtype": "mixed_bfloat16"},
    {"use_bias": True, "use_logits_bias": True, "activation": "swish"},
    {"positions": "learned", "max_length": 128, "key_dim": 4, "value_dim": 6},
    {"share_embeddings": False, "target_vocabulary_size": 260, "tie_projection": False},
]


def make(seed=1, tokenizer=None, **options):
    """A translator whose outputs end now and then, with weights as after training."""
    tokenizer = tokenizer or tokenizers.ByteTokenizer()
    model = Transformer(tokenizer.vocabulary_size, **SIZES | options, seed=seed)
    rng = np.random.default_rng(seed)
    for weight in model.trainable_variables:  # the same on every backend
        values = rng.normal(scale=0.25, size=weight.shape) + ("gamma" in weight.path)
        if "embedding" in weight.path:  # EOS is the best token often enough
            values[(slice(None), EOS) if "reverse" in weight.path else EOS] *= 4
        weight.assign(values)
    return Translator(model, tokenizer)


@pytest.fixture(
    scope="module", params=[0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3, 4))]
)
def exported(request, tmp_path_factory):
    """A translator of each kind, in float32, and its folder in ONNX Runtime."""
    folder = tmp_path_factory.mktemp("onnx") / "folder"
    translator = make(**KINDS[request.param])
    if BACKEND != "torch":
        with pytest.raises(ValueError, match="set KERAS_BACKEND=torch. Received: KERAS_BACKEND="):
            ours.export(translator, folder)
        pytest.skip("only PyTorch writes ONNX")
    ours.export(translator, folder)
    assert {path.name for path in folder.iterdir()} > {"encoder.onnx", "decoder.onnx"}
    return translator.as_dtype("float32"), example.Engine(folder, threads=1)


@on_torch
def test_of_the_outputs_that_are_compared_some_end():
    found = make().translate(LINES, length_penalty=0.6, max_length=30, details=True)
    assert {one.hit_limit for one in found} == {False, True}


@pytest.mark.parametrize(
    ("batch", "source", "steps"), [(1, 1, [1]), (1, 4, [1, 1, 1]), (3, 9, [4, 1, 2, 1])]
)
def test_batches_lengths_and_steps_of_any_size_give_the_logits_of_the_model(
    exported, batch, source, steps
):
    translator, engine = exported
    rng = np.random.default_rng(1)
    source_ids = rng.integers(4, 250, (batch, source))
    source_ids[1:, source - 2 :] = PAD
    token_ids = rng.integers(4, 250, (batch, sum(steps)))
    expected = translator.model.predict_on_batch(
        {
            "encoder_token_ids": source_ids.astype("int32"),
            "decoder_token_ids": token_ids.astype("int32"),
        }
    )
    given, cache = engine.begin(source_ids)
    found = []
    for ids in np.split(token_ids, np.cumsum(steps)[:-1], axis=1):
        logits, cache = engine.step(ids, given, cache)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-4)


@pytest.mark.works("ONNX: encoder, and step of the decoder", table="format")
@pytest.mark.parametrize("beams", [1, 4])
def test_a_search_over_the_graphs_gives_our_translations(exported, beams):
    translator, engine = exported
    expected = translator.translate(
        LINES, beam_size=beams, length_penalty=0.6, max_length=30, details=True
    )
    for ids, one in zip(translator.source_tokenizer.encode(LINES), expected, strict=True):
        found = example.search(engine, [*ids, EOS], beams, alpha=0.6, longest=30)
        assert found == one.token_ids


@on_torch
def test_where_keras_is_not_the_example_translates_lines(tmp_path):
    words = "one two three four five six seven dogs run".split()
    translator = make(tokenizer=tokenizers.SentencePieceTokenizer.learn(words * 9, 300))
    ours.export(translator, tmp_path / "folder")
    lines = ["two dogs run", "", "one\u2028two ", " ", "five"]
    program = (
        "import runpy, sys; sys.modules |= dict.fromkeys(['keras', 'keras_aiayn', 'torch']); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, EXAMPLE, tmp_path / "folder", "--beam", "2"],
        input="\n".join(lines).encode() + b"\r\n",
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    expected = translator.translate(lines, beam_size=2)
    assert done.stdout.decode() == "".join(text + "\n" for text in expected)
    assert sum(map(bool, expected)) == 3


@pytest.mark.works("export of its `.keras` to ONNX")
def test_a_file_of_this_backend_is_exported_by_the_command(tmp_path, run_cli):
    translator = make()
    translator.save(tmp_path / "model.keras")
    done = run_cli(
        *("export", "model.keras", "--format", "onnx", "--output", "folder"),
        env={"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert (done.status, done.out) == (0, ""), done.err
    assert done.err.endswith("exported: folder\n")
    ids = [*translator.source_tokenizer.encode(LINES[1:2])[0], EOS]
    (expected,) = translator.translate(LINES[1:2], beam_size=1, max_length=9, details=True)
    engine = example.Engine(tmp_path / "folder", threads=1)
    assert example.search(engine, ids, 1, 0, 9) == expected.token_ids


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch can")
def test_another_backend_says_how_to_export(tmp_path, run_cli):
    make().save(tmp_path / "model.keras")
    done = run_cli("export", "model.keras", "--format", "onnx", "--output", "folder")
    assert done.status == 2 and "set KERAS_BACKEND=torch." in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


@on_torch
def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    translator = make()
    with pytest.raises(ValueError, match="quantised, to int8: export the one"):
        ours.export(translator.quantized("int8"), tmp_path / "folder")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not an empty folder"):
        ours.export(translator, tmp_path / "full")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-aiayn\[onnx\]'"):
        ours.export(translator, tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
