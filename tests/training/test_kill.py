"""A run that is killed, by SIGKILL and in whatever it does, ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from keras_aiayn.training import checkpoint

STEPS = 12

# Runs training in a process of its own, which kills itself at a chosen moment.
DRIVER = """
import os, signal, sys
from keras_aiayn.data import prepared
from keras_aiayn.training import checkpoint, progress, train, validation

corpus, output, moment, *settings = sys.argv[1:]

def die(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(stream, **arrays):
    savez(stream, **arrays)
    stream.flush()
    os.ftruncate(stream.fileno(), stream.tell() // 2)
    die()

savez = checkpoint.np.savez
if moment == "writing":
    checkpoint.np.savez = write_half
elif moment == "validating":
    validation.corpus_scores = die
elif moment != "never":
    end = progress.StepProgress.on_train_batch_end
    def end_or_die(self, batch, logs=None):
        end(self, batch, logs)
        if self.step == int(moment):
            die()
    progress.StepProgress.on_train_batch_end = end_or_die

data = prepared.open(corpus)
train.run(data, train.Path(output), train.configure(data, "tiny", settings),
          resume=os.path.exists(output))
"""

SETTINGS = ["num_layers=1", "hidden_dim=16", "intermediate_dim=16", "num_heads=2", "dropout=0.1",
            "warmup_steps=5", "max_shapes=2", "tokens_per_batch=200", "accumulation=2",
            f"steps={STEPS}", "checkpoint_every=2", "evaluate_every=6", "keep_last=2",
            "keep_best=1"]  # fmt: skip
TIMES = ("seconds", "source_tokens_per_second", "target_tokens_per_second", "peak_memory_mb")


def run(letters, output, moment="never"):
    """Runs on from the last checkpoint; what it said, and whether it was killed."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(letters), str(output), moment, *SETTINGS],
        env=os.environ | {"COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if moment == "never" else -signal.SIGKILL), done.stderr[-2000:]
    return done.stderr


def last_state(output):
    with np.load(checkpoint.find(output / "checkpoints")[-1]) as archive:
        arrays = dict(archive)
    position = json.loads(arrays.pop(checkpoint.POSITION).tobytes())
    return arrays, {k: v for k, v in position.items() if k not in TIMES}


def log(output):
    lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(letters, tmp_path):
    began = time.monotonic()
    run(letters, tmp_path / "whole")
    longest = time.monotonic() - began
    seed = random.SystemRandom().randrange(10**6)
    generator = random.Random(seed)
    moments = [generator.uniform(0.2, 0.9) * longest for _ in range(3)]
    command = [sys.executable, "-c", DRIVER, str(letters), str(tmp_path / "killed"), "never"]
    for moment in moments:
        running = subprocess.Popen([*command, *SETTINGS], stderr=subprocess.DEVNULL)
        time.sleep(moment)
        running.kill()
        running.wait()
    run(letters, tmp_path / "killed")
    assert_same(tmp_path / "killed", tmp_path / "whole", f"seed {seed}, killed after {moments} s")


def assert_same(output, whole, where=""):
    """Weights, optimizer, random states, position and log are the same, times aside."""
    arrays, position = last_state(output)
    expected, expected_position = last_state(whole)
    assert position == expected_position and position["step"] == STEPS, where
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=f"{name}, {where}")
    assert log(output) == log(whole), where
    assert [line["step"] for line in log(whole)] == [6, STEPS]
    names = [sorted(path.name for path in (o / "checkpoints").iterdir()) for o in (whole, output)]
    assert names[0] == names[1], where


@pytest.mark.slow
def test_three_kills_and_more_change_nothing(letters, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(letters, whole)

    run(letters, killed, "1")  # before there is a checkpoint
    assert "no whole checkpoint yet: starting at step 0" in run(letters, killed, "5")
    assert "step-00000004.npz" in run(letters, killed, "validating")  # at step 6
    said = run(letters, killed, "writing")  # the checkpoint of step 6
    assert "step-00000004.npz" in said and [line["step"] for line in log(killed)] == [6]
    # The line of step 6 stood in the log already: it is written again, and once.
    said = run(letters, killed, "9")
    assert "step-00000006.npz.part was not finished" in said and "step-00000004.npz" in said
    assert "step-00000008.npz" in run(letters, killed)

    assert_same(killed, whole)
