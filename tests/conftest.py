"""What every test gets: seeds, one thread, the corpora, and the command line."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
import what_works
from hypothesis import settings

import keras_aiayn

PACKAGE = Path(keras_aiayn.__file__).parent
BACKEND = keras.backend.backend()
# The suite runs on all three: each takes the next of them, which makes all pairs.
NEXT, LAST = {
    "tensorflow": ("jax", "torch"),
    "jax": ("torch", "tensorflow"),
    "torch": ("tensorflow", "jax"),
}[BACKEND]

# A slow machine is no failure, and the same commit gives the same verdict twice.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_report_header(config: pytest.Config) -> str:
    return f"keras {keras.__version__} on {BACKEND}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(what_works.Tables(BACKEND))
    # A suite that runs in the background ignores Ctrl-C, and so would what its tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers run side by side, one a core; torch would take every core in each of them.
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a test that is the same on every backend to one of them."""
    if BACKEND == "tensorflow" or os.environ.get("KERAS_AIAYN_ALL") == "1":
        return
    elsewhere = [item for item in items if item.get_closest_marker("backend_free")]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts from the same seeds and leaves Keras's dtype policy as it found it."""
    if request.node.get_closest_marker("corpus"):
        request.getfixturevalue("corpora")
    policy = keras.config.dtype_policy()
    keras.utils.set_random_seed(1706_03762)
    yield
    keras.config.set_dtype_policy(policy)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of the corpora, a folder for each."""
    folder = os.environ.get("AIAYN_DATA")
    if not folder:
        pytest.skip("AIAYN_DATA does not name the folder of the corpora")
    return Path(folder)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of 80 short and long lines of letters, in bytes."""
    from keras_aiayn.data import prepared

    folder = tmp_path_factory.mktemp("letters")
    generator = np.random.default_rng(1)
    lines = ["".join(generator.choice(list("abcd "), n)) + "x" for n in range(3, 23)] * 4
    files = [folder / name for name in ("train.a", "train.b", "valid.a", "valid.b")]
    for file, part in zip(files, (lines, lines[::-1], lines[:8], lines[-8:][::-1]), strict=True):
        file.write_text("\n".join(part) + "\n")
    prepared.write(*files, folder / "prepared", tokenizer="bytes", max_length_ratio=99)
    return folder / "prepared"


class Ran(NamedTuple):
    """A finished command: its exit status and both its outputs, line ends untouched."""

    status: int
    out: str
    err: str


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., Ran]:
    """Runs `keras-aiayn ARGUMENTS` in a process of its own, in the test's empty folder."""

    def run(
        *arguments: str | Path,
        stdin: str | bytes = b"",
        env: dict[str, str] | None = None,
        cwd: Path = tmp_path,
        timeout: float = 300,
    ) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "keras_aiayn", *map(str, arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            cwd=cwd,
            env=os.environ | {"KERAS_BACKEND": BACKEND} | (env or {}),
            timeout=timeout,
        )
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def interrupting_at() -> Callable[[int], AbstractContextManager]:
    """`with interrupting_at(step)`: Ctrl-C comes in an update of whatever is trained."""
    from keras_aiayn.training.progress import StepProgress

    end = StepProgress.on_train_batch_end

    @contextmanager
    def patched(step: int) -> Iterator[None]:
        def interrupt(self: StepProgress, batch: int, logs: dict | None = None) -> None:
            if self.step == step - 1:
                os.kill(os.getpid(), signal.SIGINT)
            end(self, batch, logs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepProgress, "on_train_batch_end", interrupt)
            yield

    return patched


@pytest.fixture(params=[NEXT, pytest.param(LAST, marks=pytest.mark.slow)])
def on_another_backend(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Runs a file of Python in a process of another backend, and gives the backend's name."""

    def run(script: str, *arguments: str | Path, **settings: str) -> str:
        environment = {"KERAS_BACKEND": request.param, "PYTHONPATH": str(PACKAGE.parent)}
        done = subprocess.run(
            [sys.executable, script, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=os.environ | environment | settings,
        )
        assert done.returncode == 0, done.stderr
        return request.param

    return run
