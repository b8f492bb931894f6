"""Several devices translate a file as one does: the same lines, in order, whatever happens."""

import functools
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import keras
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


def test_a_function_is_called_in_the_process_of_a_device(pool):
    assert [pool.call_on(device, operator.attrgetter("beam_size")) for device in (0, 1)] == [4, 4]
    own = functools.partial(Translator.translate, texts=["ab"])
    assert pool.call_on(0, own) == pool.call_on(1, own)


def test_what_tells_all_of_a_group_to_stop_is_for_the_one_that_started_them(pool):
    for executor in pool._executors:
        for process in executor._processes:
            os.kill(process, signal.SIGTERM)
            os.kill(process, signal.SIGINT)
    time.sleep(0.2)
    calls = [{"texts": ["a"], "details": True}] * 2
    assert len(list(pool.map(calls))) == 2


def test_what_cannot_be_loaded_is_refused_at_the_start(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.keras"), Pool([tmp_path / "none.keras"], 1):
        pass


def test_fewer_accelerators_than_processes_are_refused_at_the_start(model):
    pool = Pool([model], 1)
    pool._first = [Future(), Future()]
    for first, accelerated in zip(pool._first, (True, False), strict=True):
        first.set_result(accelerated)
    with pytest.raises(ValueError, match=r"no accelerator .* Received: devices=2"), pool:
        pass


def is_alive(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_one_that_started_them(model, told):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from keras_aiayn.pool import Pool\n"
        "with Pool([Path(sys.argv[1])], 2) as pool:\n"
        "    print(*(next(iter(one._processes)) for one in pool._executors), flush=True)\n"
        "    time.sleep(600)\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program, model], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"KERAS_BACKEND": keras.backend.backend()}, start_new_session=True,
    )  # fmt: skip
    processes = running.stdout.readline().split()
    assert len(processes) == 2 and all(map(is_alive, processes))
    os.kill(running.pid, told) if told == signal.SIGKILL else os.killpg(running.pid, told)
    running.wait(60)
    running.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
