"""What the benchmarks share: systems side by side in processes of their own, timed in turn.

A worker is a process that answers requests, one line of JSON each. In every round each worker is
timed once, while the others sleep, so that what a machine does to one it does to all. Results go
into RESULTS.md, a section for each benchmark.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")


class Worker:
    """A process of a benchmark script that serves requests.

    Args:
        script: the file.
        arguments: of its command line.
        backend: of Keras.
        python: the interpreter, of another environment where it is not this one's.
    """

    def __init__(
        self, script: str, *arguments: Any, backend: str = "torch", python: str = sys.executable
    ):
        environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._process = subprocess.Popen(
            [python, script, *map(str, arguments)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Sends a request and waits for its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        while line := stdout.readline():
            if line.startswith("answer: "):
                return json.loads(line.removeprefix("answer: "))
        raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve(handle: Callable[..., Any]) -> None:
    """In a worker: answers requests until there are no more."""
    for line in sys.stdin:
        print("answer: " + json.dumps(handle(**json.loads(line))), flush=True)


def rounds(workers: dict[str, Worker], number: int, **request: Any) -> dict[str, list[Any]]:
    """Asks all workers the same in turn, once to warm up and so many times more.

    Returns:
        The answers of each after the first.
    """
    answers: dict[str, list[Any]] = {name: [] for name in workers}
    for turn in range(number + 1):
        for name, worker in workers.items():
            time.sleep(0.3)  # threads of the last one may still spin
            answer = worker.ask(**request)
            if turn:
                answers[name].append(answer)
    return answers


def anonymous_mb() -> float:
    """The memory that this process holds beside files, in MB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of the pairs."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def evenly(items: list[Any], number: int) -> list[Any]:
    """So many of them, or all that there are, drawn at even distances."""
    return items[:: max(1, len(items) // number)][:number]


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine() -> str:
    """The kind of machine, and the day."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind = platform.machine().replace("x86_64", "x86")
    return f"{cores} {kind} cores, {datetime.date.today()}"


def write_section(title: str, text: str, keep: bool = True) -> None:
    """Prints a section and puts it in RESULTS.md, in place of an earlier one of that title.

    Args:
        title: of the section.
        text: below it.
        keep: whether it is a result; a trial at toy sizes is printed only.
    """
    body = f"## {title}\n\n`{command()}`; {machine()}\n\n{text.strip()}\n"
    print(body)
    if not keep:
        return
    before = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Results\n"
    head, *sections = before.split("\n## ")
    kept = [section for section in sections if section.split("\n", 1)[0] != title]
    whole = "\n## ".join([head.rstrip() + "\n", *sorted([*kept, body.removeprefix("## ")])])
    RESULTS.write_text(whole, encoding="utf-8")


def command() -> str:
    """The command line of this process, with the names of its files only."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
