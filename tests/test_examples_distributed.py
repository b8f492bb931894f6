"""The files to copy start what they say, here with CPU devices in place of GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples" / "distributed"
BACKEND = keras.backend.backend()
TINY = ["--steps", "4", "--average", "1", "--tokens-per-batch", "300", "--set", "dtype=float32",
        "--set", "num_layers=1", "--set", "hidden_dim=16", "--set", "intermediate_dim=16",
        "--set", "num_heads=2", "--set", "max_shapes=2", "--set", "warmup_steps=2"]  # fmt: skip


def start(script, *arguments, **environment):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(EXAMPLES / script), *map(str, arguments), *TINY],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said_by(*running):
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said[0][-3000:]
    return "".join(said)


def hosts():
    import socket

    sockets = [socket.socket() for _ in range(2)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    names = [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
    for free in sockets:
        free.close()
    return ",".join(names)


def test_one_machine_goes_on_by_itself(letters, tmp_path):
    assert "2 devices" in said_by(
        start("one_machine.sh", letters, tmp_path / "run", "--devices", "2")
    )
    again = start("one_machine.sh", letters, tmp_path / "run", "--devices", "2")
    assert "resuming from" in said_by(again)


def machines(letters, run):
    names = hosts()
    return said_by(
        *(start("machines.sh", letters, run, HOSTS=names, RANK=str(rank)) for rank in range(2))
    )


def test_two_machines(letters, tmp_path):
    said = machines(letters, tmp_path / "run")
    assert "2 devices in 2 processes" in said and said.count("trained:") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())
    assert "resuming from" in machines(letters, tmp_path / "run")


def test_a_slurm_job(letters, tmp_path):
    # What Slurm would do: tell the machines, and start a task on each.
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f"#!/bin/sh\necho {hosts()} | tr , '\\n'\n")
    (tools / "srun").write_text(
        '#!/bin/bash\nfor n in 0 1; do SLURM_PROCID=$n "$@" & pids+=($!); done\n'
        'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_SUBMIT_DIR": str(EXAMPLES.parents[1])}
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = start("slurm.sh", letters, tmp_path / "run", **environment | {"PATH": path})
    assert "2 devices in 2 processes" in said_by(job)
    assert (tmp_path / "run" / "model.keras").exists()
