"""Several devices, in one process or in many, make of a batch what one device makes of it."""

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_aiayn.training import distribution, launch
from keras_aiayn.transformer import Transformer

BACKEND = keras.backend.backend()
SCRIPT = Path(__file__).with_name("on_devices.py")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def in_processes(command, processes):
    """Starts a command in several processes that find each other, as on so many machines."""
    ports = [free_port() for _ in range(processes)]
    if BACKEND == "torch":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        return [start([*torchrun, str(processes), "--master-port", str(ports[0]), *command[1:]])]
    running = []
    for rank in range(processes):
        workers = [f"127.0.0.1:{port}" for port in ports]
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        jax = {
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(rank),
            "JAX_COORDINATOR_ADDRESS": workers[0],
        }
        running.append(start(command, jax if BACKEND == "jax" else {"TF_CONFIG": json.dumps(task)}))
    return running


def start(command, env=None):
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, timeout=300):
    """What a process said. One that hangs is killed: it does not listen to less."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"hangs: {err[-2000:]}") from None
    return process.returncode, out, err


def results(folder, devices, processes=1, model_parallel=1):
    """Everything that `on_devices.py` found."""
    output = folder / f"{devices}-{processes}-{model_parallel}.npz"
    command = [sys.executable, str(SCRIPT), str(devices if processes == 1 else "all"), str(output),
               str(model_parallel)]  # fmt: skip
    if processes > 1:
        running = in_processes(command, processes)
    elif BACKEND == "torch" and devices > 1:
        own = "import sys; from keras_aiayn.training.launch import launch; "
        call = f"sys.exit(launch({devices}, {command!r}))"
        running = [start([sys.executable, "-c", own + call])]
    else:
        running = [start(command)]
    for process in running:
        status, _, err = end(process)
        assert status == 0, err[-3000:]
    with np.load(output) as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return results(tmp_path_factory.mktemp("one"), 1)


def assert_the_same(several, one, replicas):
    for name in ("whole", "clipped", "accumulated", "sgd", "adam"):
        if f"{name}/moved" not in several:
            assert (name, BACKEND) == ("accumulated", "tensorflow")
            continue
        distance = np.linalg.norm(one[f"{name}/moved"])
        assert np.linalg.norm(several[f"{name}/moved"] - one[f"{name}/moved"]) < 1e-5 * distance
        for metric in ("norm", "loss"):
            assert several[f"{name}/{metric}"] == pytest.approx(one[f"{name}/{metric}"], rel=1e-5)
    assert np.linalg.norm(several["clipped/moved"]) == pytest.approx(1, rel=1e-5)
    if BACKEND == "torch":
        # A scale that is a power of two rounds nothing.
        np.testing.assert_allclose(several["scaled/moved"], several["clipped/moved"], atol=1e-6)
        assert several["scaled/finite"] == [0]
    if "dropout/masks" not in several:
        return
    # A kept unit counts 2, a dropped one 0: were the masks of all replicas one, there would be
    # nothing between none and all of them. (On JAX rows of one global mask differ as well.)
    first, second = several["dropout/masks"]
    kept = set(np.unique(first))
    assert kept <= {2.0 * number for number in range(replicas + 1)}
    assert kept - {0.0, 2.0 * replicas}
    assert (first != second).any()


def test_one_device_does_what_was_asked(one_device):
    whole, parts = one_device["whole/moved"], one_device["accumulated/moved"]
    assert np.linalg.norm(whole) == pytest.approx(float(one_device["whole/norm"]), rel=1e-5)
    np.testing.assert_allclose(parts, one_device["clipped/moved"], atol=1e-6)
    cosine = whole @ parts / np.linalg.norm(whole) / np.linalg.norm(parts)
    assert cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.works("training on several devices")
def test_two_devices_are_as_one(one_device, tmp_path):
    two = results(tmp_path, 2)
    assert_the_same(two, one_device, 2)


@pytest.mark.slow
def test_two_runs_on_two_devices_are_the_same(tmp_path):
    (tmp_path / "again").mkdir()
    first, second = results(tmp_path, 2), results(tmp_path / "again", 2)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 8])
def test_more_devices_are_as_one(one_device, tmp_path, devices):
    if devices == 8 and BACKEND != "jax":
        pytest.skip("eight processes or graphs of them would be too much for a small machine")
    assert_the_same(results(tmp_path, devices), one_device, devices)


@pytest.mark.works("weights cut among devices")
@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "jax", reason="only JAX cuts weights")
@pytest.mark.parametrize(("devices", "model_parallel"), [(2, 2), (4, 2)])
def test_weights_that_are_cut_among_devices_are_as_whole(
    one_device, tmp_path, devices, model_parallel
):
    cut = results(tmp_path, devices, model_parallel=model_parallel)
    assert_the_same(cut, one_device, devices // model_parallel)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "jax", reason="only JAX cuts weights")
def test_the_command_cuts_weights_validates_and_translates(letters, tmp_path, run_cli):
    options = ("--model-parallel", "2")
    status, _, err = end(start(train_command(letters, tmp_path / "run", 4, 8, *options)))
    assert status == 0 and "2 devices" in err, err[-3000:]
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])["bleu"] >= 0
    assert run_cli("translate", tmp_path / "run" / "model.keras", stdin="abc\n").status == 0
    odd = train_command(letters, tmp_path / "odd", 3, 8, "--model-parallel", "3")
    status, _, err = end(start(odd))
    assert status == 2 and "must be divisible by model_parallel=3" in err
    assert not (tmp_path / "odd").exists()


@pytest.mark.works("training on several machines")
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_are_as_one_device(one_device, tmp_path, processes):
    if processes == 4 and BACKEND != "torch":
        pytest.skip("two show it")
    assert_the_same(results(tmp_path, "all", processes), one_device, processes)


@pytest.mark.parametrize(("devices", "message"), [(0, "must be at least 1"), (99, "99")])
def test_devices_that_are_not_there_are_refused(devices, message):
    keras.ops.convert_to_numpy(keras.ops.zeros(1))  # now it is too late for more CPU devices
    with pytest.raises(ValueError, match=message):
        distribution.start(devices)


@pytest.mark.parametrize("model_parallel", [0, 2])
def test_weights_are_cut_on_jax_only_and_among_devices_that_are_there(model_parallel):
    keras.ops.convert_to_numpy(keras.ops.zeros(1))
    message = "must be at least 1" if not model_parallel else "model_parallel=2"
    with pytest.raises(ValueError, match=message):
        distribution.start(1, model_parallel=model_parallel)


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX cuts weights")
def test_a_rule_of_the_layout_that_cuts_no_weight_is_refused(monkeypatch):
    model = Transformer(20, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=2)
    monkeypatch.setattr(distribution, "LAYOUT", {r".*/querry/kernel": (None, "model")})
    with pytest.raises(ValueError, match="no weight was laid out by .*querry"):
        distribution._Jax(0, 1, replicas=1, model_parallel=2).share(model)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="it is Keras's trainer on TensorFlow")
def test_keras_asks_a_strategy_of_processes_to_reduce_as_it_did_when_ours_was_mended():
    """`_join_tensorflow` leans on these calls: a Keras with others needs another look at it."""
    trainer = inspect.getsource(sys.modules["keras.src.backend.tensorflow.trainer"])
    asked = re.findall(r"strategy\.reduce\((.*?)\)", trainer, re.DOTALL)
    assert [" ".join(each.split()).rstrip(",") for each in asked] == [
        '"MEAN", maybe_distributed_data_batch, axis=None',
        '"SUM", v',
        '"MEAN", v, axis=0',
    ]


# The command, from end to end.

SETTINGS = ["num_layers=1", "hidden_dim=16", "intermediate_dim=16", "num_heads=2", "dropout=0.1",
            "warmup_steps=5", "max_shapes=2", "tokens_per_batch=300", "checkpoint_every=4",
            "evaluate_every=8", "evaluate_lines=4"]  # fmt: skip


def train_command(letters, output, devices, steps, *options):
    settings = [f"--set={setting}" for setting in SETTINGS]
    devices = [] if devices is None else ["--devices", str(devices)]
    return [sys.executable, "-m", "keras_aiayn", "train", "--data", str(letters), "--output",
            str(output), "--config", "tiny", "--steps", str(steps), *settings, *devices,
            *options]  # fmt: skip


def two_processes(letters, output, steps, *options):
    """Starts a run of two processes, on torch by the command itself, which watches over them."""
    if BACKEND == "torch":
        return [start(train_command(letters, output, 2, steps, *options))]
    return in_processes(train_command(letters, output, None, steps, *options), 2)


def state_of(output):
    """Every variable in the last checkpoint, and the position."""
    with np.load(sorted((output / "checkpoints").iterdir())[-1]) as archive:
        arrays = dict(archive)
    return arrays, json.loads(arrays.pop("position").tobytes())


def assert_same_variables(ours, theirs):
    for (name, array), (_, other) in zip(
        state_of(ours)[0].items(), state_of(theirs)[0].items(), strict=True
    ):
        np.testing.assert_array_equal(array, other, err_msg=name)


@pytest.mark.slow
def test_the_command_stops_and_goes_on_the_same(letters, tmp_path):
    def run(name, devices, steps, *options):
        command = train_command(letters, tmp_path / name, devices, steps, *options)
        status, out, err = end(start(command))
        assert status == 0, err[-3000:]
        assert out == "" and err.count("trained:") == 1 and err.count("parameters") == 1
        return err

    assert "2 devices" in run("whole", 2, 8)
    run("parts", 2, 4)
    assert "resuming from" in run("parts", 2, 8, "--resume")
    assert_same_variables(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_devices(letters, tmp_path, first, then):
    """Without dropout, and where no gradient is so small that Adam makes rounding large."""

    def run(name, devices, steps, *options):
        dense = ("--set", "dropout=0", "--set", "epsilon=1e-4")
        command = train_command(letters, tmp_path / name, devices, steps, *dense, *options)
        status, _, err = end(start(command))
        assert status == 0, err[-3000:]

    run("whole", first, 8)
    run("moved", first, 4)
    begun, _ = state_of(tmp_path / "moved")
    run("moved", then, 8, "--resume")
    (moved, there), (whole, position) = (state_of(tmp_path / name) for name in ("moved", "whole"))
    assert [there[key] for key in ("step", "batch")] == [position[key] for key in ("step", "batch")]
    for name, array in whole.items():
        distance = np.linalg.norm(array.astype("float64") - begun[name])
        off = np.linalg.norm(moved[name].astype("float64") - array)
        assert off <= 1e-4 * distance, name


@pytest.mark.slow
def test_processes_train_from_the_command_and_one_writes(letters, tmp_path):
    output = tmp_path / "run"
    running = in_processes(train_command(letters, output, None, 8), 2)
    said = [end(process) for process in running]
    assert [status for status, *_ in said] == [0] * len(running), said
    assert sum(err.count("trained:") for *_, err in said) == 1
    assert (output / "model.keras").exists() and len((output / "log.jsonl").read_text()) > 0


@pytest.mark.slow
def test_a_killed_process_ends_the_run_within_a_minute_and_it_goes_on(letters, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for process in two_processes(letters, whole, 8):
        status, _, err = end(process)
        assert status == 0, err[-3000:]
    running = two_processes(letters, killed, 2_000)
    deadline = time.monotonic() + 200
    while not list(killed.glob("checkpoints/step-*.npz")):
        assert time.monotonic() < deadline and all(one.poll() is None for one in running)
        time.sleep(0.2)
    os.kill(worker_of(running), signal.SIGKILL)
    died = time.monotonic()
    said = [end(process, timeout=90) for process in running]
    assert time.monotonic() - died < 60
    status, _, err = said[0]
    assert status == 2 and "--resume" in err.splitlines()[-1], said
    assert 0 not in [status for status, *_ in said]
    for path in list(killed.glob("checkpoints/step-*.npz"))[1:]:
        path.unlink()  # however far it came, go on from the first
    for process in two_processes(letters, killed, 8, "--resume"):
        status, _, err = end(process)
        assert status == 0, err[-3000:]
    assert_same_variables(killed, whole)


@pytest.mark.slow
def test_an_interrupt_of_any_process_stops_all_and_loses_nothing(letters, tmp_path):
    steps, whole, stopped = 80, tmp_path / "whole", tmp_path / "stopped"

    def started(output, *options):
        return two_processes(letters, output, steps, *options)

    for process in started(whole):
        assert end(process)[0] == 0
    running = started(stopped)
    while not list(stopped.glob("checkpoints/step-*.npz")):
        assert all(one.poll() is None for one in running)
        time.sleep(0.05)
    running[-1].send_signal(signal.SIGINT)
    said = [end(process) for process in running]
    assert [status for status, *_ in said] == [130] * len(running), said
    assert "go on with --resume" in said[0][2]
    assert 0 < state_of(stopped)[1]["step"] < steps
    for process in started(stopped, "--resume"):
        assert end(process)[0] == 0
    assert_same_variables(stopped, whole)


def worker_of(running):
    """A process that is not the first of a run."""
    if BACKEND != "torch":
        return running[1].pid
    children = Path(f"/proc/{running[0].pid}/task/{running[0].pid}/children").read_text().split()
    return int(children[-1])


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "torch", reason="only torch needs processes of ours")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_what_is_launched_ends_with_its_launcher(how, tmp_path):
    ticks = tmp_path / "ticks"
    code = ("import os, time; from keras_aiayn.training.launch import end_with_the_launcher; "
            "end_with_the_launcher(); "
            f"[(open({str(ticks)!r} + os.environ['RANK'], 'a').write('.'), time.sleep(0.1)) "
            "for _ in range(3000)]")  # fmt: skip
    own = "import sys; from keras_aiayn.training.launch import launch; "
    parent = start([sys.executable, "-c", own + f"launch(2, {[sys.executable, '-c', code]!r})"])
    while not all(Path(f"{ticks}{rank}").exists() for rank in (0, 1)):
        time.sleep(0.1)
    parent.send_signal(how)
    end(parent, timeout=30)
    deadline, before, now = time.monotonic() + 30, None, ()
    while now != before:
        assert time.monotonic() < deadline, "they go on"
        before = now
        time.sleep(1)
        now = [Path(f"{ticks}{rank}").stat().st_size for rank in (0, 1)]


@pytest.mark.backend_free
def test_a_process_that_fails_ends_the_others_and_says_why(capfd):
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('why'); time.sleep(9)"
    with pytest.raises(ChildProcessError, match="process 1 of 2 ended with status 1"):
        launch.launch(2, [sys.executable, "-c", code])
    assert "why" in capfd.readouterr().err
