"""Checkpoints that something happened to, and which of them are kept."""

import json

import numpy as np
import pytest

from keras_aiayn.training import checkpoint

pytestmark = pytest.mark.backend_free


def write(folder, step, **position):
    arrays = {f"model/{i:04d}": np.full((300, i + 1), step, "float32") for i in range(3)}
    text = json.dumps({"step": step, **position}).encode()
    path = folder / f"step-{step:08d}.npz"
    np.savez(path, **arrays, **{checkpoint.POSITION: np.frombuffer(text, "uint8")})
    return path


def test_whatever_happened_to_a_file_it_is_whole_or_damaged(tmp_path):
    path = write(tmp_path, 7)
    content = path.read_bytes()
    damaged = 0
    for seed in range(400):
        generator = np.random.default_rng(seed)
        changed = bytearray(content)
        place = int(generator.integers(len(content)))
        if seed % 4:
            changed[place] ^= 1 << int(generator.integers(8))
        else:
            del changed[place:]
        path.write_bytes(changed)
        damaged += not checkpoint.whole(path)  # which raises nothing
        assert checkpoint.read_position(path).get("step") in (7, None)
        assert checkpoint.find(tmp_path) == [path]
    assert damaged > 300  # what is left are bits that say nothing, as the time of a zip's member


def test_passing_checkpoints_stand_outside_the_count(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, passing=step in (2, 4), score=None)
        checkpoint.prune(tmp_path, keep_last=2)
    assert [path.stem[-1] for path in checkpoint.find(tmp_path)] == ["1", "3", "4"]
    write(tmp_path, 5)
    checkpoint.prune(tmp_path, keep_last=2)
    assert [path.stem[-1] for path in checkpoint.find(tmp_path)] == ["3", "5"]
