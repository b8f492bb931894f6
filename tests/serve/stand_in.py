"""A translator's stand-in, and the service before it at an address of this machine."""

import contextlib
import socket
import threading
import time

import uvicorn

from keras_aiayn.serve.app import Limits, make_app
from keras_aiayn.translator import Translation

LIMITS = Limits(bytes=5_000, texts=8, tokens=40, characters=300, n_best=3, seconds=2.0)


class Upper:
    """Stands in for a translator: upper case, after a while, and when the gate is open."""

    def __init__(self, seconds=0.0):
        self.seconds, self.began, self.texts = seconds, False, []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, new, asked):
        self.began = True
        self.gate.wait()
        time.sleep(self.seconds)
        self.texts += new.values()
        if "fail" in new.values():
            raise RuntimeError("it broke")
        others = [Translation("other", score=-2.0)] * (asked.n_best - 1)
        return {
            number: Translation(text.upper(), score=-1.0, alternatives=others, alignment=[(0, 0)])
            for number, text in new.items()
        }


def words(text):
    return len(text.split()) + 1


@contextlib.contextmanager
def served(upper, **options):
    """The application behind a real server: the server, and its port."""
    app = make_app(
        [upper],
        **{
            "count_tokens": words,
            "count_target_tokens": words,
            "limits": LIMITS,
            "wait_seconds": 0.005,
        }
        | options,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, port
    finally:
        server.should_exit = True
        thread.join()
