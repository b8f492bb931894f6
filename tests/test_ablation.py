"""Table 3 as one command: sizes by formula and built, rows trained once, stopped, gone on with."""

import json
import os
import random
import signal
import sys

import keras
import numpy as np
import pytest
from rich.console import Console

from keras_aiayn import ablation, cli
from keras_aiayn.config import TABLE_3, TransformerConfig, table3
from keras_aiayn.data import prepared
from keras_aiayn.training import train, validation

WORDS = [("red", "rot"), ("dog", "Hund"), ("runs", "läuft"), ("here", "hier")]
SETTINGS = ["tokens_per_batch=300", "warmup_steps=2", "max_shapes=1", "evaluate_lines=2"]
SCALE = 0.0625


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(1)
    pairs = [
        tuple(map(" ".join, zip(*generator.choices(WORDS, k=generator.randint(1, 3)), strict=True)))
        for _ in range(40)
    ]
    files = []
    for name, part in (("train", pairs[:-4]), ("valid", pairs[-4:])):
        for side, texts in zip(("en", "de"), zip(*part, strict=True), strict=True):
            files.append(folder / f"{name}.{side}")
            files[-1].write_text("\n".join(texts) + "\n", encoding="utf-8")
    return prepared.write(*files, folder / "prepared", tokenizer="bytes")


@pytest.fixture
def trained(monkeypatch):
    """The folders of the runs that are trained, in order; two rows have one layer, to be quick."""
    for row in ("base", "C-ff1024"):
        monkeypatch.setitem(TABLE_3, row, (TABLE_3[row][0] | {"num_layers": 1}, {}))
    folders = []
    run = train.run

    def noted(data, output, *arguments, **options):
        folders.append(output.name)
        return run(data, output, *arguments, **options)

    monkeypatch.setattr(train, "run", noted)
    return folders


def run(data, output, rows=("C-ff1024",), steps=2, settings=SETTINGS, scale=SCALE, seeds=1):
    with open(output.parent / "said.txt", "a") as said:
        return ablation.run(
            data, output, steps=steps, rows=rows, seeds=seeds, scale=scale, settings=settings,
            console=Console(file=said, width=200),
        )  # fmt: skip


def result_of(output, name):
    return json.loads((output / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("row", ["base", "A-h32", "B-dk16", "C-d256", "E-learned", "big"])
def test_parameters_by_formula_are_those_of_the_built_model(row):
    config = ablation.scaled(table3(row, vocabulary_size=50)[0], SCALE)
    assert ablation.parameters(config) == config.build().count_params()


@pytest.mark.backend_free
def test_every_row_has_the_papers_figures():
    assert list(ablation.PAPER) == list(TABLE_3)
    counted = {row: ablation.parameters(table3(row)[0]) / 1e6 for row in TABLE_3}
    printed = {row: millions for row, (*_, millions) in ablation.PAPER.items() if millions}
    assert all(abs(counted[row] - millions) < 5 for row, millions in printed.items())
    assert ablation.parameters(TransformerConfig.base()) == 63_045_632


@pytest.mark.backend_free
def test_a_scale_keeps_heads_layers_and_what_rows_have_in_common():
    rows = {row: ablation.scaled(table3(row)[0], 0.25) for row in TABLE_3}
    base = rows["base"]
    assert (base.hidden_dim, base.intermediate_dim, base.key_dim, base.value_dim) == (
        128, 512, 16, 16,
    )  # fmt: skip
    assert (base.num_layers, base.num_heads) == (6, 8)
    for row in ("A-h1", "A-h4", "A-h16", "A-h32"):
        assert ablation.parameters(rows[row]) == ablation.parameters(base)
    assert (rows["B-dk16"].key_dim, rows["B-dk16"].value_dim) == (4, 16)
    assert ablation.scaled(base, 1.0) == base


@pytest.mark.backend_free
@pytest.mark.parametrize("scale", [0.0, -0.25, 0.3, 1 / 32, float("nan"), float("inf")])
def test_a_scale_that_leaves_no_whole_width_is_refused(scale):
    with pytest.raises(ValueError, match="whole number of sixteenths.*Received"):
        ablation.scaled(TransformerConfig.base(), scale)


@pytest.mark.backend_free
def test_differences_are_in_the_papers_letters():
    assert ablation.difference("A-h1") == "h 1, d_k 512, d_v 512"
    assert ablation.difference("E-learned") == "positions learned"
    assert ablation.difference("D-ls0.2") == "ε_ls 0.2"
    assert ablation.difference("base").startswith("N 6, d_model 512, d_ff 2048, h 8, d_k 64")


@pytest.fixture
def quickly_judged(monkeypatch):
    """No validation is translated."""
    judged = {"bleu": 1.0, "bleu_signature": "none"}
    monkeypatch.setattr(validation, "_judge_translations", lambda *_: judged)


def test_rows_are_trained_once_and_the_command_prints_the_table(
    data, tmp_path, trained, monkeypatch, capsys
):
    output = tmp_path / "out"
    arguments = [f"--data={data.folder}", f"--output={output}", "--steps=2", "--rows=C-ff1024"]
    settings = [f"--set={setting}" for setting in SETTINGS[1:]]
    monkeypatch.setattr(sys, "argv", ["keras-aiayn", "ablate", *arguments, *settings,
                                      f"--scale={SCALE}", "--tokens-per-batch=300"])  # fmt: skip
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    assert trained == ["base-1", "C-ff1024-1"]
    written = (output / "table.md").read_text()
    assert capsys.readouterr().out == written and "| C-ff1024 | N 1, d_ff 1024 " in written
    assert "BLEU: nrefs:1|" in written

    rows = run(data, output, rows=["base"], seeds=2)  # another seed, of base alone
    assert trained == ["base-1", "C-ff1024-1", "base-2"]
    base, other = rows
    values = [result_of(output, f"base-{seed}")["perplexity"] for seed in (1, 2)]
    assert base["seeds"] == [1, 2] and other["seeds"] == [1] and values[0] != values[1]
    assert base["perplexity"]["mean"] == pytest.approx(np.mean(values))
    assert base["perplexity"]["spread"] == pytest.approx(np.std(values, ddof=1))
    assert other["perplexity"]["spread"] is None
    assert json.loads((output / "table.json").read_text())["rows"] == rows
    assert f"{np.mean(values):.2f} ± " in (output / "table.md").read_text()
    pytest.importorskip("matplotlib")
    assert (output / "table.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_after_another_is_the_one_that_train_makes_alone(
    data, tmp_path, trained, quickly_judged
):
    run(data, tmp_path / "out")
    configs = ablation.configure(data, "C-ff1024", SCALE, [*SETTINGS, "steps=2"], seed=1)
    with open(tmp_path / "alone.txt", "w") as said:
        train.run(data, tmp_path / "alone", configs, console=Console(file=said))
    ours, theirs = (
        keras.saving.load_model(tmp_path / folder / "model.keras").model.get_weights()
        for folder in ("out/runs/C-ff1024-1", "alone")
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stopped_row_goes_on(
    data, tmp_path, trained, quickly_judged, monkeypatch, interrupting_at
):
    output = tmp_path / "out"
    with interrupting_at(1), pytest.raises(KeyboardInterrupt):
        run(data, output, rows=["base"])
    assert not (output / "results").exists()
    assert "the same command goes on with this row" in (tmp_path / "said.txt").read_text()
    run(data, output, rows=["base"])
    assert trained == ["base-1"] * 2 and result_of(output, "base-1")["step"] == 2
    assert "resuming from" in (tmp_path / "said.txt").read_text()

    # Ctrl-C as the last validation goes on: the row is whole, and no other begins.
    judge = validation.validate

    def interrupt(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return judge(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(validation, "validate", interrupt)
        run(data, output)
    assert trained == ["base-1"] * 2 + ["C-ff1024-1"]
    assert (output / "runs/C-ff1024-1/model.keras").exists()
    run(data, output, rows=["base", "C-ff1024"])
    assert result_of(output, "C-ff1024-1")["step"] == 2


@pytest.mark.backend_free
def test_what_cannot_be_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "_train", lambda *_: None)
    monkeypatch.setattr(ablation, "_write_table", lambda *_: [])
    output = tmp_path / "out"
    for options, message in (
        ({"rows": ["A-h3"]}, "Table 3 has no row 'A-h3'. Rows: base, A-h1"),
        ({"seeds": 0}, "`seeds` must be positive"),
        ({"steps": 0}, "`steps` must be positive"),
        ({"scale": 0.3}, "sixteenths"),
        ({"settings": ["dropout=0.3"]}, "`dropout` is what rows differ by"),
        ({"settings": ["seed=3"]}, "cannot be set. Received: 'seed=3'"),
        ({"settings": ["warm=3"]}, "A setting is NAME=VALUE"),
    ):
        with pytest.raises(ValueError, match=message):
            run(data, output, **options)
        assert not output.exists()
    run(data, output)
    for options, message in (
        ({"steps": 3}, "training.steps was 2 and is 3$"),
        ({"scale": 0.125}, "so: scale was 0.0625 and is 0.125$"),
        ({"settings": [*SETTINGS, "beta_2=0.9"]}, "so: training.beta_2 was 0.98 and is 0.9$"),
    ):
        with pytest.raises(ValueError, match=message):
            run(data, output, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        run(data, tmp_path / "full")


@pytest.mark.backend_free
def test_a_corpus_without_validation_is_refused(tmp_path):
    for side in "ab":
        (tmp_path / side).write_text("a b\nb a\n")
    files = tmp_path / "a", tmp_path / "b"
    data = prepared.write(*files, None, None, tmp_path / "prepared", tokenizer="bytes")
    with pytest.raises(ValueError, match="without validation texts"):
        run(data, tmp_path / "out")


@pytest.mark.backend_free
def test_an_unknown_row_is_one_line_and_status_2(data, tmp_path, monkeypatch, capfd):
    arguments = [f"--data={data.folder}", f"--output={tmp_path / 'out'}", "--steps=1"]
    monkeypatch.setattr(sys, "argv", ["keras-aiayn", "ablate", *arguments, "--rows=base,A-h3"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2 and len(errors) == 1
    assert "no row 'A-h3'" in errors[0] and "D-ls0.2, E-learned, big" in errors[0]
