"""Starts a process for each device, which is what torch needs, and watches over them."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any

from keras_aiayn.training.interrupts import interrupts_to

LAUNCHED = "KERAS_AIAYN_LAUNCHED"
# When a process has failed, the others are given so long to say something of it themselves.
LAST_WORDS_SECONDS = 5.0


def launch(number: int, command: list[str]) -> int:
    """Runs a command in several processes, which find each other as those of torchrun do.

    The first one has this process's outputs. What the others say is shown where they fail.

    Args:
        number: of processes.
        command: to run in each.

    Returns:
        The exit status: 0, or what the first process ended with after it said why.

    Raises:
        ChildProcessError: where a process was killed, or another than the first one failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // number)),
        **os.environ,
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: "1"},
        **{"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)},
    }
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(number)]
        running = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,  # it closes when this process ends, however it ends
                    stdout=subprocess.DEVNULL if rank else None,
                    stderr=said[rank] if rank else None,
                    start_new_session=True,  # a Ctrl-C comes by way of this process, and once
                )
            )
            for rank in range(number)
        ]
        try:
            return _watch(running, said)
        finally:
            for process in running:
                process.kill()


def end_with_the_launcher() -> None:
    """Lets this process end when the one that launched it is gone, if one did."""

    def wait() -> None:
        os.read(0, 1)  # not `sys.stdin`, which Python locks when it ends
        os._exit(1)

    if LAUNCHED in os.environ:
        threading.Thread(target=wait, daemon=True).start()


def _watch(running: Sequence[subprocess.Popen], said: Sequence[IO[bytes]]) -> int:
    """Waits until all have ended well, or one has not. They act on a Ctrl-C, not this process."""

    def pass_on(number: int, frame: Any) -> None:
        for process in running:
            process.send_signal(number)

    with interrupts_to(pass_on):
        while not (failed := [rank for rank, process in enumerate(running) if process.poll()]):
            if all(process.returncode == 0 for process in running):
                return 0
            time.sleep(0.1)
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.1)
    status = running[0].poll()
    if status in (2, 130):
        return status  # it has said why
    rank = failed[0]
    said[rank].seek(0)
    print(said[rank].read().decode(errors="replace")[-2000:], end="", file=sys.stderr)
    code = running[rank].returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    raise ChildProcessError(
        f"process {rank} of {len(running)} {how}, and with it the run: go on with --resume"
    )
