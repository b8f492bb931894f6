"""The command: the whole line on a made corpus, and every bad input as one line and status 2."""

import gc
import json
import os
import pty
import re
import select
import subprocess
import sys

import pytest

from keras_aiayn import cli
from keras_aiayn.loading import load

LETTERS = "abcdefgh"
SETTINGS = ["--set=num_layers=1", "--set=hidden_dim=16", "--set=intermediate_dim=16",
            "--set=num_heads=2", "--set=warmup_steps=2", "--set=max_shapes=2",
            "--set=evaluate_lines=3", "--steps=4", "--tokens-per-batch=200"]  # fmt: skip


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def texts(tmp_path):
    lines = [" ".join(LETTERS[(i * j) % 8] for j in range(1, 2 + i % 5)) for i in range(40)]
    return (
        write(tmp_path / "train.a", lines),
        write(tmp_path / "train.b", [line.upper() for line in lines]),
    )


def corpus_arguments(texts, *more):
    source, target = texts
    return ("prepare", "--train-source", source, "--train-target", target, *more)


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Runs the command here, and checks for one line that names what is wrong and status 2."""
    monkeypatch.chdir(tmp_path)

    def check(arguments, *words):
        monkeypatch.setattr(sys, "argv", ["keras-aiayn", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capfd.readouterr().err
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert end.value.code == 2, said
        assert len(errors) == 1 and "Traceback" not in said, said
        for word in words:
            assert str(word) in errors[0], errors[0]

    return check


@pytest.fixture
def data(texts, tmp_path, monkeypatch):
    """A prepared folder `data`."""
    monkeypatch.chdir(tmp_path)
    arguments = corpus_arguments(texts, "--tokenizer", "bytes", "--output", "data")
    monkeypatch.setattr(sys, "argv", ["keras-aiayn", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    return tmp_path / "data"


def test_the_whole_line(texts, tmp_path, run_cli):
    source, target = texts
    valid = ("--valid-source", source, "--valid-target", target)
    prepared = run_cli(*corpus_arguments(texts, *valid, "--tokenizer", "bytes", "--output", "data"))
    assert prepared.status == 0, prepared.err
    assert "40 of 40 pairs kept" in prepared.err
    trained = run_cli("train", "--data", "data", "--output", "run", "--config", "tiny", *SETTINGS)
    assert trained.status == 0, trained.err
    assert "% real tokens" in trained.err and "BLEU" in trained.err

    lines = b"a b\n\nc\xe2\x80\xa8d\r\nlast"
    translated = run_cli("translate", "run/model.keras", stdin=lines)
    assert translated.status == 0, translated.err
    out = translated.out.split("\n")
    assert len(out) == 5 and out[1] == "" and out[4] == ""
    (tmp_path / "in.txt").write_bytes(lines)
    to_file = run_cli("translate", "run/model.keras", "--input", "in.txt", "--output", "out.txt")
    assert to_file.status == 0, to_file.err
    assert (tmp_path / "out.txt").read_bytes().decode() == translated.out

    judged = run_cli("evaluate", "run/model.keras", "--source", source, "--target", target)
    assert judged.status == 0, judged.err
    assert "BLEU" in judged.out and "version:" in judged.out and "length ratio" in judged.out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from keras_aiayn import Transformer, Translator
    from keras_aiayn.data.tokenizer import ByteTokenizer

    path = tmp_path_factory.mktemp("model") / "model.keras"
    tokenizer = ByteTokenizer()
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 2}
    Translator(Transformer(tokenizer.vocabulary_size, **sizes), tokenizer, max_extra_length=3).save(
        path
    )
    return path


def test_translate_gives_what_it_is_asked_for(model, tmp_path, run_cli):
    write(tmp_path / "in.txt", ["a b", "", "c"])
    done = run_cli(
        "translate", model, model, "--input", "in.txt", "--output", "out.jsonl", "--report",
        "--format", "jsonl", "--n-best", "2", "--alignments", "--max-length", "4",
        "--no-repeat-ngram-size", "2", "--dtype", "bfloat16",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "3 lines" in done.err and "target tokens/s" in done.err
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(records) == 3 and records[1]["text"] == ""
    for record in (records[0], records[2]):
        assert len(record["alternatives"]) == 1 and record["score"] < 0
        assert 1 <= len(record["tokens"]) <= 4
    again = run_cli(
        "translate", model, "--input", "in.txt", "--sampling", "--seed", "4", "--top-k", "9",
        "--temperature", "0.7", "--top-p", "0.9", "--min-length", "3",
    )  # fmt: skip
    assert again.status == 0 and again.out.count("\n") == 3, again.err


def test_on_a_terminal_what_is_typed_is_translated(model):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "keras_aiayn", "translate", model, "--show-attention"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "COLORTERM": "truecolor"}
    running = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
    )
    os.close(theirs)

    def until(sign):
        said = b""
        while sign not in said:
            ready, _, _ = select.select([ours], [], [], 240)
            assert ready, (said, running.poll())
            said += os.read(ours, 1 << 16)
        return said.decode()

    try:
        until(b"> ")
        os.write(ours, b"a b\n")
        said = until(b"\r\n> ")
        # A row for each token written, a column for each one read, the darker the more.
        assert "</s>" in said and re.search(r"\x1b\[\d+;48;2;\d+;\d+;255m 0\.\d ", said), said
        os.write(ours, b"\x04")  # Ctrl-D
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        running.communicate()
        os.close(ours)


def test_score_prints_a_line_for_each_pair(model, tmp_path, run_cli):
    write(tmp_path / "a", ["a b", "c"])
    write(tmp_path / "b", ["x", "y z"])
    done = run_cli("score", model, "--source", "a", "--target", "b")
    assert done.status == 0, done.err
    rows = [[float(field) for field in line.split("\t")] for line in done.out.splitlines()]
    assert len(rows) == 2
    for (score, raw), length in zip(rows, (2, 4), strict=True):
        assert score == pytest.approx(raw / ((5 + length) / 6) ** 0.6, rel=1e-4)


def test_options_that_cannot_be_are_refused(model, tmp_path, refused):
    write(tmp_path / "in", ["a"])
    arguments = ("translate", model, "--input", "in")
    refused((*arguments, "--beam", "0"), "`beam_size` must be at least 1")
    refused((*arguments, "--n-best", "9"), "`n_best` must be at most the beam size")
    refused((*arguments, "--format", "xml"), "text or jsonl")
    refused((*arguments, "--resume"), "name one by --output")
    refused((*arguments, "--show-attention"), "for what is typed on a terminal")
    refused((*arguments, "--top-p", "0", "--sampling"), "`top_p` must be above 0")


def test_help_version_and_usage_errors_come_without_keras():
    code = (
        "import sys; sys.argv = ['keras-aiayn', *sys.argv[1:]]\n"
        "from keras_aiayn.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print('status', end.code, 'keras' in sys.modules)"
    )
    for arguments, status in ((["--help"], 0), (["--version"], 0), (["train", "--wrong"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
        )
        assert f"status {status} False" in done.stdout, done.stdout + done.stderr


def test_bad_corpora_are_refused_and_leave_nothing(texts, tmp_path, refused):
    source, target = texts
    short = write(tmp_path / "short.b", ["A"])
    empty = write(tmp_path / "empty", [])
    bad = tmp_path / "bad.a"
    bad.write_bytes(source.read_bytes().replace(b"b", b"\xff", 1))
    cases = [
        (("missing.a", target), (), ["missing.a"]),
        ((source, short), (), [source, "40 lines", short]),
        ((bad, target), (), [bad, "line", "UTF-8"]),
        ((empty, empty), (), ["blank"]),
        ((source, target), ("--vocabulary-size", "5000"), ["5000", "at most"]),
        ((source, target), ("--max-length", "1"), ["max_length"]),
        ((source, target), ("--tokenizer", "words"), ["words", "sentencepiece"]),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for pair, options, words in cases:
        refused(corpus_arguments(pair, *options, "--output", "data"), *words)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_disk_is_said_and_leaves_nothing(texts, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments = corpus_arguments(texts, "--tokenizer", "bytes", "--output", "data")

    code = (  # every file ends at 100 bytes, as on a disk with so much room
        "import resource, runpy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "runpy.run_module('keras_aiayn', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr and "File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_is_no_prepared_folder_is_refused(tmp_path, refused):
    (tmp_path / "data").mkdir()
    refused(["train", "--data", "data", "--output", "run"], "data", "prepare")
    assert not (tmp_path / "run").exists()


def test_a_prepared_folder_that_lost_a_part_is_refused(data, tmp_path, refused):
    tokens = data / "train.source.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-3])
    refused(["train", "--data", "data", "--output", "run"], tokens.name, "damaged")
    assert not (tmp_path / "run").exists()


def test_unknown_settings_and_configurations_are_refused(data, tmp_path, refused):
    train = ("train", "--data", "data", "--output", "run")
    refused([*train, "--config", "huge"], "huge", "tiny")
    refused([*train, "--set", "layers=3"], "layers=3", "num_layers")
    refused([*train, "--set", "steps=many"], "steps", "many")
    refused([*train, "--set", "vocabulary_size=17"], "260", "17")
    refused([*train, "--config", "tiny", "--average", "90", "--steps", "10"], "90")
    assert not (tmp_path / "run").exists()


def test_models_that_are_none_are_refused(tmp_path, refused):
    (tmp_path / "foreign.keras").write_bytes(b"hello")
    (tmp_path / "in.txt").write_text("a\n")
    (tmp_path / "out.txt").write_text("old\n")
    refused(["translate", "missing.keras", "--input", "in.txt"], "missing.keras")
    foreign = ["translate", "foreign.keras", "--input", "in.txt", "--output", "out.txt"]
    refused(foreign, "foreign.keras")
    refused(["translate", "foreign.keras", "--input", "none.txt"], "none.txt")
    assert (tmp_path / "out.txt").read_text() == "old\n"


def test_what_a_quantised_file_is_not_for_is_refused(model, data, tmp_path, refused):
    quantize = ["quantize", model, "--output"]
    refused([*quantize, "small.keras", "--mode", "int3"], "`mode` must be one of int8", "'int3'")
    refused([*quantize, model], "would be written over")
    refused([*quantize, "small.keras", "--reference", "x"], "`reference` needs the `source`")
    refused([*quantize, "small.keras", "--source", "none.txt"], "there is no file none.txt")
    assert not (tmp_path / "small.keras").exists()
    load(model).quantized().save(tmp_path / "small.keras")
    refused(["quantize", "small.keras", "--output", "b.keras"], "is quantised already, to int8")
    (tmp_path / "in.txt").write_text("a\n")
    refused(["translate", "small.keras", "--input", "in.txt", "--dtype", "bfloat16"], "int8")
    train = ["train", "--data", data, "--output", "run", *SETTINGS]
    refused([*train, "--init", "small.keras"], "cannot be trained: take the one")
    refused([*train, "--config", "tiny", "--set", "dtype=int8_from_float32"], "cannot be trained")
    assert not (tmp_path / "run").exists()


def test_an_unknown_backend_is_refused(refused):
    refused(["translate", "m.keras", "--backend", "caffe"], "caffe", "torch")


def test_what_tensorflow_says_as_it_is_imported_is_kept_back(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-m", "keras_aiayn", "train", "--data", "nowhere", "--output", "run"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nowhere is not a prepared corpus")


def test_what_is_said_by_an_import_that_fails_is_shown(monkeypatch, capfd):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    with pytest.raises(ImportError), cli._without_noise():
        os.write(2, b"why it failed\n")
        raise ImportError
    os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
    with cli._without_noise():
        os.write(2, b"noise\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "why it failed\nafter\n"


def test_a_full_standard_output_is_one_line_and_status_2(model, run_cli):
    command = f"{sys.executable} -m keras_aiayn translate {model} > /dev/full"
    done = subprocess.run(
        ["bash", "-c", command], input=b"red dog\n" * 3, capture_output=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1:] == ["error: [Errno 28] No space left on device"]


def test_outputs_that_cannot_be_are_refused_before_anything_is_loaded(tmp_path, refused):
    (tmp_path / "in").write_text("one\n")
    for output, message in (
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "no" / "out", "there is no folder"),
        (tmp_path / "in", "would be written over"),
    ):
        refused(["translate", "no.keras", "--input", "in", "--output", output], message)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes",
            "--tokens-per-batch",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "--tokens-per-batch"),
        ("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer", "--resume"),
        ("a fault of our own", None),
    ],
)
def test_what_befell_the_machine_is_one_line(monkeypatch, capsys, said, meant):
    def fails(**_):
        raise RuntimeError(said)

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setattr(os, "_exit", sys.exit)  # it ends at once, waiting for nothing
    with pytest.raises(RuntimeError if meant is None else SystemExit) as end:
        cli.main()
    if meant:
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and meant in line and said.lower()[:20] in line


def test_unequal_files_are_not_evaluated(texts, tmp_path, refused):
    short = write(tmp_path / "short.b", ["A"])
    refused(
        ["evaluate", "model.keras", "--source", texts[0], "--target", short], "40 lines", "short.b"
    )


@pytest.mark.backend_free
def test_garbage_is_collected_again_after_the_imports():
    with pytest.raises(ImportError), cli._without_collection():
        assert not gc.isenabled()
        raise ImportError
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.isenabled() and frozen > 0
