"""Several devices translate a file as one does: the same lines, in order, whatever happens."""

import os
import signal
import threading
import time

import pytest

from keras_aiayn import Transformer, Translator, files
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.loading import load
from keras_aiayn.pool import Pool

LINES = [("abcdefgh "[: i % 9] + "xyz"[i % 3]) * (i % 4) for i in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.keras"
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 2}
    tokenizer = ByteTokenizer()
    Translator(Transformer(tokenizer.vocabulary_size, **sizes), tokenizer, max_extra_length=3).save(
        path
    )
    return path


@pytest.fixture(scope="module")
def pool(model):
    with Pool([model, model], 2) as pool:
        yield pool


def in_chunks(translator, source, output, **options):
    return files.translate_file(
        translator, source, output, chunk_size=6, file_format="jsonl", n_best=2, **options
    )


def test_the_file_is_that_of_one_device(model, pool, tmp_path):
    (tmp_path / "in").write_text("\n".join(LINES) + "\n")
    one = in_chunks(load(model), tmp_path / "in", tmp_path / "one", together_with=[load(model)])
    two = in_chunks(pool, tmp_path / "in", tmp_path / "two")
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    assert one.lines == two.lines == len(LINES)
    assert one.target_tokens == two.target_tokens


def test_lines_are_read_a_bounded_number_ahead(pool):
    read = []

    def calls():
        for number in range(40):
            read.append(number)
            yield {"texts": [f"{number}"], "details": True}

    for number, (translation,) in enumerate(pool.map(calls())):
        assert translation.text is not None and len(read) <= number + 4


def test_what_a_process_refuses_is_an_error_here(pool):
    with pytest.raises(ValueError, match="beam"):
        pool.search_settings(beam_size=0)
    with pytest.raises(ValueError, match="list of strings"):
        list(pool.map([{"texts": "one"}]))


def test_the_command_takes_devices(model, tmp_path, run_cli):
    text = "\n".join(LINES) + "\n"
    one = run_cli("translate", model, stdin=text)
    two = run_cli("translate", model, "--devices", 2, stdin=text)
    assert one.status == two.status == 0, two.err
    assert one.out == two.out and one.out.count("\n") == len(LINES)
    wrong = run_cli("translate", tmp_path / "none.keras", "--devices", 2, stdin=text)
    errors = [line for line in wrong.err.splitlines() if line.startswith("error: ")]
    assert wrong.status == 2 and wrong.out == "" and len(errors) == 1, wrong.err
    assert "none.keras" in errors[0] and "Traceback" not in wrong.err


@pytest.mark.slow
def test_a_process_that_dies_ends_the_file_and_it_goes_on(model, tmp_path):
    (tmp_path / "in").write_text("\n".join(LINES * 20) + "\n")
    with Pool([model], 2) as pool:
        in_chunks(pool, tmp_path / "in", tmp_path / "whole")
    with Pool([model], 2) as pool:
        (victim,) = pool._executors[1]._processes

        def kill():
            while not (tmp_path / "out.part").exists():
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(victim, signal.SIGKILL)

        threading.Thread(target=kill).start()
        with pytest.raises(ChildProcessError, match="has died"):
            in_chunks(pool, tmp_path / "in", tmp_path / "out")
    with Pool([model], 2) as pool:
        report = in_chunks(pool, tmp_path / "in", tmp_path / "out", resume=True)
    assert report.skipped > 0
    assert (tmp_path / "out").read_text() == (tmp_path / "whole").read_text()
