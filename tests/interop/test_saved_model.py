"""A SavedModel, loaded where this package is not, translates as the translator it was made of."""

import io
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import keras
import numpy as np
import pytest
import sentencepiece

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import (
    ByteTokenizer,
    MarianTokenizer,
    SentencePieceTokenizer,
    WordPieceTokenizer,
)
from keras_aiayn.interop import saved_model
from keras_aiayn.special_ids import EOS

pytest.importorskip("tensorflow_text")

BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="only TensorFlow writes a SavedModel"
)

WORDS = "one two three four five six seven eight nine ten dog cat man runs sleeps sings".split()
TEXTS = [
    "", " ", "\t \u3000\x1c\u2028", "one", "x", "two dogs", "the man sings", "A dog runs.",
    "  two   dogs  ", "one\u2028two", "a\tb\rc", "a\x07b\x1bd\x7fe", "\ufeffone", "▁",
    "½ m² ﬁ e\u0301 é", "</s> <pad> <unk> <s> <0x0A>", "[PAD] [EOS] ##n", "🦉", "🇩🇪 dogs 🦉",
    "日本語テキスト", "שלום עולם — مرحبا", "Z̷̢̛͎a̸͉͝l̵̰͐", "\ufffd\ufffd", "don't, won't!", "3.14 + 2,000",
    ">>de<< two dogs", ">>de<<one", ">>xx<< two", "two >>de<< dogs", ">> two", "dog" * 25,
    "one two three four five six seven eight nine ten " * 3,
    *(" ".join(WORDS[i : i + 3 + i % 5]) for i in range(10)),
]  # fmt: skip
ALONE = ["", "🦉"]

# Loads each folder, and translates all texts together, some alone, none, and given ids.
PROGRAM = """
import json, sys
sys.modules["keras_aiayn"] = None  # as if it were not installed
import tensorflow as tf
import tensorflow_text

def plain(outputs):
    values = {name: value.numpy().tolist() for name, value in outputs.items()}
    for name in values.keys() & {"translations"}:
        values[name] = [text.decode() for text in values[name]]
    return values

def run(folder, texts, alone, ids):
    loaded = tf.saved_model.load(folder)
    translate, search = loaded.signatures["serving_default"], loaded.signatures["ids"]
    graph = translate.graph.as_graph_def()
    functions = [function.node_def for function in graph.library.function]
    return {
        "texts": plain(translate(texts=tf.constant(texts))),
        "alone": [plain(translate(texts=tf.constant([text])))["translations"][0] for text in alone],
        "none": plain(translate(texts=tf.zeros([0], tf.string))),
        "ids": plain(search(source_ids=tf.constant(ids))),
        "operations": sorted({node.op for nodes in [graph.node, *functions] for node in nodes}),
    }

asked = json.load(sys.stdin)
json.dump({name: run(**one) for name, one in asked.items()}, sys.stdout)
"""


def sentencepiece_model(seed, **options):
    generator = np.random.default_rng(seed)
    lines = [" ".join(generator.choice(WORDS, 6)) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **options
    )
    return model.getvalue()


def marian():
    """Two languages of one vocabulary, which has a language code."""
    protos = [sentencepiece_model(seed, vocab_size=34 + seed) for seed in (1, 2)]
    pieces = ["<pad>", "<unk>", "<s>", "</s>", ">>de<<"]
    for proto in protos:
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        pieces += map(processor.id_to_piece, range(3, processor.vocab_size()))
    pieces = list(dict.fromkeys(pieces))
    return [MarianTokenizer(proto, pieces) for proto in protos]


def wordpiece():
    pytest.importorskip("keras_hub")
    letters = [chr(code) for code in range(33, 127)]
    endings = [f"##{letter}" for letter in letters]
    return [WordPieceTokenizer(["[PAD]", "[UNK]", "[BOS]", "[EOS]", "dog", *letters, *endings])]


TOKENIZERS = {
    "sentencepiece": lambda: [SentencePieceTokenizer.learn(WORDS * 9, vocabulary_size=310)],
    "bytes": lambda: [ByteTokenizer()],
    "wordpiece": wordpiece,
    "marian": marian,
}
# A translator of each kind, and what else changes the graph.
MADE = {
    "sentencepiece": {"num_layers": 2},
    "bytes": {"share_embeddings": False, "tie_projection": False, "normalize_first": True},
    "wordpiece": {"use_bias": True, "use_logits_bias": True, "key_dim": 4},
    "marian": {"positions": "learned", "max_length": 12},
}
SETTINGS = {"bytes": {"beam_size": 3, "length_penalty": 1.5}, "marian": {"beam_size": 1}}


def make(name, seed=1):
    """A translator whose outputs end now and then, with weights as after training."""
    tokenizers = TOKENIZERS[name]()
    sizes = {"num_layers": 1, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4}
    model = Transformer(tokenizers[0].vocabulary_size, **sizes | MADE[name], seed=seed)
    rng = np.random.default_rng(seed)
    for weight in model.trainable_variables:  # the same on every backend
        weight.assign(rng.normal(scale=0.25, size=weight.shape) + ("gamma" in weight.path))
    return Translator(model, *tokenizers, max_extra_length=5)


def sources(translator):
    """The ids of all texts, EOS and pads behind; none for a blank text."""
    rows = [
        [*ids, EOS] if text.strip() and ids else []
        for text, ids in zip(TEXTS, translator.source_tokenizer.encode(TEXTS), strict=True)
    ]
    width = max(map(len, rows)) + 3
    return [row + [0] * (width - len(row)) for row in rows]


def load_elsewhere(folders):
    """What a process without this package makes of (folder, translator) of each name."""
    asked = {
        name: {"folder": str(folder), "texts": TEXTS, "alone": ALONE, "ids": sources(translator)}
        for name, (folder, translator) in folders.items()
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        input=json.dumps(asked).encode(),
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"},
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def check(translator, found, **settings):
    """Compares all that a process gave with what the translator gives."""
    expected = translator.translate(TEXTS, details=True, **settings)
    texts, ids = found["texts"], found["ids"]
    assert texts["translations"] == [one.text for one in expected]
    assert texts["hit_limit"] == ids["hit_limit"] == [one.hit_limit for one in expected]
    assert ids["lengths"] == [len(one.token_ids) for one in expected]
    for one, row in zip(expected, ids["output_ids"], strict=True):
        assert row == one.token_ids + [0] * (len(row) - len(one.token_ids))
    for scores in (texts["scores"], ids["scores"]):
        np.testing.assert_allclose(scores, [one.score for one in expected], atol=1e-4, rtol=0)
    assert found["alone"] == [texts["translations"][TEXTS.index(text)] for text in ALONE]
    assert found["none"] == {"translations": [], "scores": [], "hit_limit": []}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every kind: its folder and its translator."""
    folder = tmp_path_factory.mktemp("saved_models")
    if BACKEND != "tensorflow":
        with pytest.raises(ValueError, match="KERAS_BACKEND=tensorflow. Received: KERAS_BACKEND="):
            saved_model.export(make("bytes"), folder / "bytes")
        pytest.skip("only TensorFlow writes a SavedModel")
    made = {name: (folder / name, make(name)) for name in MADE}
    for name, (path, translator) in made.items():
        saved_model.export(translator, path, **SETTINGS.get(name, {}))
    return made


@pytest.fixture(scope="module")
def exported(folders):
    """Every kind: its translator, and what another process made of its folder."""
    found = load_elsewhere(folders)
    return {name: (translator, found[name]) for name, (_, translator) in folders.items()}


@pytest.mark.works("SavedModel: text and search", table="format")
@pytest.mark.parametrize("name", MADE)
def test_without_this_package_the_translations_are_the_same(exported, name):
    check(*exported[name], **SETTINGS.get(name, {}))


def test_outputs_end_some_sources_are_cut_and_no_operation_is_of_xla(exported):
    _, found = exported["sentencepiece"]
    assert 3 < sum(found["texts"]["hit_limit"]) < len(TEXTS) - 3
    translator, found = exported["marian"]
    longest = np.array([len(np.nonzero(row)[0]) for row in sources(translator)])
    assert longest.max() > 12 and np.array(found["texts"]["hit_limit"])[longest > 12].all()
    assert not [name for _, one in exported.values() for name in one["operations"] if "Xla" in name]


SERVER = Path(__file__).parents[2] / "examples" / "serve" / "saved_model.py"
SERVE = """
import runpy, sys
sys.modules["keras_aiayn"] = None  # as if it were not installed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def served(folders):
    """The example's process: where it answers, and the translator whose folder it serves."""
    folder, translator = folders["sentencepiece"]
    with subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            SERVE,
            SERVER,
            folder,
            "--name",
            "ours",
            "--port",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process.stdout.readline().strip(), translator
        process.terminate()


def post(address, body):
    """Status and content of an answer."""
    try:
        with urllib.request.urlopen(address, body, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@on_tensorflow
def test_without_this_package_the_example_serves_the_translations(served):
    address, translator = served
    assert address.endswith("/v1/models/ours:predict")
    expected = translator.translate(TEXTS, details=True)
    status, content = post(address, json.dumps({"instances": TEXTS}).encode())
    assert status == 200
    for one, found in zip(expected, content["predictions"], strict=True):
        assert (found["translations"], found["hit_limit"]) == (one.text, one.hit_limit)
        assert found["scores"] == pytest.approx(one.score, abs=1e-4)
    bad = [
        b"", b"no", b"[]", b"{}", b'{"instances": "one"}', b'{"instances": []}', b"[" * 9_999,
        b'{"instances": [1]}', b'{"instances": ["\\ud800"]}', b'{"instances": ["\xff"]}',
        json.dumps({"instances": ["x" * 1_001]}).encode(),
        json.dumps({"instances": ["one"] * 65}).encode(),
    ]  # fmt: skip
    for body in bad:
        status, content = post(address, body)
        assert (status, list(content)) == (400, ["error"]), body
    assert post(address + "s", b'{"instances": ["one"]}')[0] == 404
    assert post(address, b'{"instances": ["one"]}')[0] == 200


@pytest.mark.works("a SavedModel of its `.keras`")
def test_a_file_of_this_backend_is_exported_by_the_command(tmp_path, run_cli):
    translator = make("sentencepiece")
    translator.save(tmp_path / "model.keras")
    done = run_cli(
        *("export", "model.keras", "--format", "saved_model", "--output", "folder"),
        *("--beam", "2", "--length-penalty", "1"),
        env={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert (done.status, done.out) == (0, ""), done.err
    assert done.err.endswith("exported: folder\n")
    (found,) = load_elsewhere({"": (tmp_path / "folder", translator)}).values()
    check(translator, found, beam_size=2, length_penalty=1.0)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow can")
def test_another_backend_says_how_to_export(tmp_path, run_cli):
    make("bytes").save(tmp_path / "model.keras")
    done = run_cli("export", "model.keras", "--format", "saved_model", "--output", "folder")
    assert done.status == 2 and done.err.count("\n") == 1 and "KERAS_BACKEND=tensor" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


@on_tensorflow
def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    translator = make("sentencepiece")
    with pytest.raises(ValueError, match="`beam_size` must be at least 1. Received: 0"):
        saved_model.export(translator, tmp_path / "folder", beam_size=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not an empty folder"):
        saved_model.export(translator, tmp_path / "full")
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-aiayn\[hub\]'"):
        saved_model.export(translator, tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "tflite"), "must be ctranslate2, onnx or saved_model. Received: 'tflite'"),
        (("--format", "onnx", "--beam", "2"), "`--beam` is nothing that `--format onnx` takes"),
        (("--format", "saved_model", "--quantization", "int8"), "`--quantization` is nothing"),
        (("--beam", "2"), "`--beam` is nothing that `--format ctranslate2` takes"),
    ],
)
def test_options_of_another_format_are_refused(run_cli, options, message):
    done = run_cli("export", "model.keras", "--output", "folder", *options)
    assert done.status == 2 and message in done.err
