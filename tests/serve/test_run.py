"""The command serves a model: what it answers is what `translate` gives."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

pytest.importorskip("fastapi")

import httpx

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.decoding.compiled import takes_any_shape
from keras_aiayn.serve import run

TEXTS = ["a dog", "", "two\nlines", "x" * 60, "où?", "a cat runs"] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.keras"
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 2}
    positions = {"positions": "learned", "max_length": 64}  # few shapes, soon compiled
    tokenizer = ByteTokenizer()
    Translator(
        Transformer(tokenizer.vocabulary_size, **sizes, **positions), tokenizer, max_extra_length=3
    ).save(path)
    return path


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def serving(model, devices):
    """The command in a group of processes of its own, and a client of it."""
    port = free_port()
    command = [sys.executable, "-m", "keras_aiayn", "serve", str(model), "--port", str(port),
               "--devices", str(devices), "--tokens-per-batch", "64"]  # fmt: skip
    running = subprocess.Popen(
        command,
        env=os.environ | {"KERAS_BACKEND": keras.backend.backend()},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 240
            while True:
                assert running.poll() is None and time.monotonic() < deadline
                try:
                    assert client.get("/health").json() == {"status": "ok"}
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield running, client
    finally:
        running.kill()


@pytest.mark.works("the service")
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_answers_as_translate_does_and_stops_when_told(model, devices):
    with serving(model, devices) as (running, client):
        body = {"texts": TEXTS, "n_best": 5, "alignments": True}  # more than its beam
        answer = client.post("/translate", json=body)
        expected = keras.saving.load_model(model).translate(
            TEXTS, n_best=5, beam_size=5, alignments=True, details=True
        )
        assert [
            [(one["text"], [tuple(pair) for pair in one["alignment"]]) for one in each]
            for each in answer.json()["translations"]
        ] == [
            [(one.text, one.alignment) for one in (each, *each.alternatives)] for each in expected
        ]
        body = {"text": "a dog", "translation": "où?"}
        found = client.post("/attention", json=body).json()
        read, written, weights = keras.saving.load_model(model).attention_by_head(*body.values())
        assert (found["source"], found["target"]) == (read, written)
        np.testing.assert_allclose(found["weights"], weights, atol=1e-4)
        client.close()
        os.killpg(running.pid, signal.SIGTERM)  # as systemd does
        _, err = running.communicate(timeout=60)
    assert "listening on http://127.0.0.1" in err and "Traceback" not in err, err
    assert ("compiling: texts of up to" in err) == (not takes_any_shape())
    assert running.returncode in (0, -signal.SIGTERM)  # uvicorn raises it again when it is done


@pytest.mark.slow
def test_a_service_whose_processes_are_gone_ends_with_one_line(model):
    with serving(model, 2) as (running, client):
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        for child in children:
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        assert client.post("/translate", json={"texts": "a"}).status_code in (500, 503)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 2 and "Traceback" not in err, err
    assert err.splitlines()[-1] == "error: all processes that translate have died: start again"


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(tmp_path, run_cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_cli("serve", tmp_path / "none.keras", "--port", port)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.status == 2 and f"port {port}" in error and "Traceback" not in done.err


@pytest.mark.slow
def test_what_the_processes_cannot_load_is_one_line(tmp_path, run_cli):
    done = run_cli("serve", tmp_path / "none.keras", "--port", free_port(), "--devices", 2)
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.status == 2 and "none.keras" in error and "Traceback" not in done.err, done.err


def test_with_several_devices_the_model_is_in_their_processes_only(model, monkeypatch):
    class Processes:
        def call_on(self, device, function):
            return device

    monkeypatch.setattr(run, "Pool", lambda *arguments: contextlib.nullcontext(Processes()))
    monkeypatch.setattr(run, "load", None)
    with run._on_devices(model, 2) as (tokenizers, call_on):
        assert tokenizers[0].fingerprint == tokenizers[1].fingerprint == ByteTokenizer().fingerprint
        assert call_on(1, None) == 1
