"""Section 6.1: checkpoints of a run. Save, resume, average.

A checkpoint is one `.npz` file: all variables of the model, the random state of dropout among
them, all of the optimizer, and the position of the run. So what follows a resume is the same to
the bit as if nothing had stopped. A zip file checks each of its arrays by a CRC; the file is
written beside its place and moved there when whole.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_aiayn.data import corpus

POSITION = "position"


def save(folder: Path, model: keras.Model, position: dict[str, Any]) -> Path:
    """Writes `step-NNNNNNNN.npz` into a folder, whole or not at all.

    Args:
        folder: of the checkpoints.
        model: compiled, with a built optimizer.
        position: where the run is; `position["step"]` names the file.

    Returns:
        The file.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # within `fit` JAX's trainer holds the values
    arrays = {name: ops.convert_to_numpy(value) for name, value in _state(model).items()}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(
                f"step {position['step']:,} is not saved: {name} is no longer finite. The "
                f"checkpoints before it stay in {folder}"
            )
    arrays[POSITION] = np.frombuffer(json.dumps(position).encode(), "uint8")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{position['step']:08d}.npz"
    with corpus.whole_file(path) as stream:
        np.savez(stream, **arrays)
    return path


def load(path: Path, model: keras.Model) -> dict[str, Any]:
    """Puts a checkpoint into a compiled model and its optimizer, which must be built.

    Returns:
        The position that was saved.

    Raises:
        ValueError: where the file is damaged, or of another model or optimizer.
    """
    arrays = _read(path)
    position = json.loads(arrays.pop(POSITION).tobytes())
    state = _state(model)
    expected = {name: tuple(value.shape) for name, value in state.items()}
    received = {name: array.shape for name, array in arrays.items()}
    if expected != received:
        raise ValueError(
            f"{path} is of another model or optimizer: it has {len(received)} variables, this "
            f"run {len(expected)}, or their shapes differ"
        )
    for name, value in state.items():
        value.assign(arrays[name])
    return position


def find(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first. Unfinished ones have another name."""
    return sorted(folder.glob("step-*.npz"))


def whole(path: Path) -> bool:
    """Whether a checkpoint can be read and all its checksums hold."""
    try:
        arrays = _read(path)
    except ValueError:
        return False
    return POSITION in arrays


def best(folder: Path, number: int) -> list[Path]:
    """The checkpoints with the best validations, at most `number`, oldest first.

    Of equal ones the earlier counts as better. `position["score"]` is what is compared.
    """
    scores = {path: read_position(path).get("score") for path in find(folder) if number}
    judged = [(-score, path) for path, score in scores.items() if score is not None]
    return sorted(path for _, path in sorted(judged)[:number])


def prune(folder: Path, keep_last: int, keep_best: int = 0) -> None:
    """Removes all checkpoints but the last and the best ones.

    Passing ones (`position["passing"]`: an interrupt made them) are no part of the count, and all
    of them go but the newest of all checkpoints, to go on from.
    """
    paths = find(folder)
    lasting = [path for path in paths if not read_position(path).get("passing")]
    kept = {*lasting[-keep_last:], *best(folder, keep_best), *paths[-1:]}
    for path in paths:
        if path not in kept:
            path.unlink()


def read_position(path: Path) -> dict[str, Any]:
    """The position in a checkpoint; empty where that cannot be read."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return json.loads(archive[POSITION].tobytes())
    except Exception:  # see `_read`
        return {}


def average(paths: Sequence[Path], model: keras.Model) -> None:
    """Sets a model's weights to their mean over checkpoints (section 6.1).

    Only the weights: neither the optimizer nor the random state of dropout. The sum is in float64
    and the result float32; tied weights are one variable and stay tied.

    Args:
        paths: checkpoints of one run.
        model: to be changed.
    """
    if not paths:
        raise ValueError("there is no checkpoint to average")
    weights = _weights(model)
    sums = {name: np.zeros(value.shape, "float64") for name, value in weights.items()}
    for path in paths:
        arrays = _read(path)
        for name in sums:
            if name not in arrays or arrays[name].shape != sums[name].shape:
                raise ValueError(f"{path} is of another model: its {name} differs")
            sums[name] += arrays[name]
    for name, value in weights.items():
        value.assign((sums[name] / len(paths)).astype("float32"))


def _state(model: keras.Model) -> dict[str, Any]:
    """Every variable, by its place: names carry counters of the whole process."""
    model_variables = {f"model/{i:04d}": value for i, value in enumerate(model.variables)}
    variables = enumerate(model.optimizer.variables)
    return model_variables | {f"optimizer/{i:04d}": value for i, value in variables}


def _weights(model: keras.Model) -> dict[str, Any]:
    weights = {id(value) for value in model.weights}
    return {
        f"model/{i:04d}": value for i, value in enumerate(model.variables) if id(value) in weights
    }


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:
        # One wrong bit in a zip file or in the header of an array may raise almost anything.
        raise ValueError(f"{path} is damaged and cannot be read ({error})") from None
