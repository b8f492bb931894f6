"""The command serves a model: what it answers is what `translate` gives."""

import os
import signal
import socket
import subprocess
import sys
import time

import keras
import pytest

pytest.importorskip("fastapi")

import httpx

from keras_aiayn import Transformer, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer

TEXTS = ["a dog", "", "two\nlines", "x" * 60, "où?", "a cat runs"] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.keras"
    sizes = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8, "num_heads": 2}
    tokenizer = ByteTokenizer()
    Translator(Transformer(tokenizer.vocabulary_size, **sizes), tokenizer, max_extra_length=3).save(
        path
    )
    return path


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_answers_as_translate_does_and_stops_when_told(model, devices):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keras_aiayn", "serve", str(model), "--port", str(port),
               "--devices", str(devices)]  # fmt: skip
    running = subprocess.Popen(
        command,
        env=os.environ | {"KERAS_BACKEND": keras.backend.backend()},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        deadline = time.monotonic() + 120
        while True:
            assert running.poll() is None and time.monotonic() < deadline
            try:
                assert client.get("/health").json() == {"status": "ok"}
                break
            except httpx.TransportError:
                time.sleep(0.1)
        body = {"texts": TEXTS, "n_best": 2, "alignments": True}
        answer = client.post("/translate", json=body)
        expected = keras.saving.load_model(model).translate(
            TEXTS, n_best=2, alignments=True, details=True
        )
        assert [
            [(one["text"], [tuple(pair) for pair in one["alignment"]]) for one in each]
            for each in answer.json()["translations"]
        ] == [
            [(one.text, one.alignment) for one in (each, *each.alternatives)] for each in expected
        ]
        client.close()
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "listening on http://127.0.0.1" in err and "Traceback" not in err, err
    assert running.returncode in (0, -signal.SIGTERM)  # uvicorn raises it again when it is done
