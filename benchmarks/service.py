"""The service under many clients at once, beside the same texts translated offline.

    KERAS_BACKEND=jax python benchmarks/service.py run/model.keras --source test_2016_flickr.en
    KERAS_BACKEND=jax python benchmarks/service.py run/model.keras --source test_2016_flickr.en \
        --clients 64

`keras-aiayn serve` runs on a free port of this machine. Each client asks for a text, waits for the
answer and asks for the next one; a client that is told 429 waits as long as it is told. A text is 1
to 32 neighbouring lines of the source, as many of 1 as of 2 or 3, or of 16 to 31: lengths are very
unequal. With `--lines 1` each is a line. Every answer has to be what `Translator.translate` gives
for all texts at once. Among the clients are bad ones, so many of each kind: one asks and hangs up,
one sends half a body and then nothing, one sends 10 MB.

Speeds count what is answered within the time, outputs in tokens with EOS. Offline is timed once
before and once after. The clients are one thread on the machine that is to translate, so the speed
also stands for the seconds that they leave to it, which are less by their CPU time over the number
of cores.

The exit status is 2 where an answer is wrong, a client that is not bad is told anything but 200 or
429, or the service is not well afterwards.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import workers

START = 600  # seconds at most until the service listens
HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def unequal(lines: list[str], number: int, longest: int = 32, seed: int = 0) -> list[str]:
    """Texts of 1 to `longest` neighbouring lines, as many of each power of two."""
    draw = random.Random(seed)
    texts = []
    for _ in range(number):
        length = int(2 ** draw.uniform(0, math.log2(longest + 1)))
        start = draw.randrange(max(1, len(lines) - length + 1))
        texts.append(" ".join(lines[start : start + length]))
    return texts


@dataclasses.dataclass
class Offline:
    """What a text becomes."""

    text: str
    score: float
    tokens: int  # of the output, EOS included


@dataclasses.dataclass
class Seen:
    """What the clients saw.

    Attributes:
        statuses: of answers, or names of errors, of the clients that are not bad.
        bad: the same of the others.
        wrong: texts that were answered otherwise than offline, with the score there and here.
        seconds: until each answer of 200.
        lines: answered within the time.
        tokens: of their translations.
        cpu: seconds that the clients computed within the time.
    """

    statuses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    bad: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    lines: int = 0
    tokens: int = 0
    cpu: float = 0.0


class Connection:
    """A connection that is kept, and as little of HTTP as the service needs."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """Sends a request and gives status, fields and body of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        fields = dict(line.lower().split(b": ", 1) for line in rest)
        body = await reader.readexactly(int(fields[b"content-length"]))
        if fields.get(b"connection") == b"close":
            self.close()
        return int(first.split()[1]), fields, body

    def close(self) -> None:
        """Hangs up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request_of(text: str) -> bytes:
    """Asks for a translation."""
    body = json.dumps({"texts": text}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def client(
    port: int, todo: Iterator[tuple[bytes, str, Offline]], until: float, seen: Seen
) -> None:
    """Asks for one text after another."""
    connection = Connection(port)
    while (began := time.perf_counter()) < until:
        request, text, offline = next(todo)
        try:
            status, fields, body = await connection.ask(request)
        except (OSError, EOFError) as error:
            seen.statuses[type(error).__name__] += 1
            connection.close()
            await asyncio.sleep(1)
            continue
        now = time.perf_counter()
        seen.statuses[status] += 1
        if status == 200:
            seen.seconds.append(now - began)
            best = json.loads(body)["translations"][0][0]
            if best["text"] != offline.text:
                seen.wrong.append((text, offline.score, best["score"]))
            if now < until:
                seen.lines += 1
                seen.tokens += offline.tokens
        elif status == 429:
            await asyncio.sleep(float(fields[b"retry-after"]))
    connection.close()


async def hang_up(port: int, request: bytes) -> str:
    """Asks, and does not wait for the answer."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await asyncio.sleep(random.random())
    writer.transport.abort()
    return "hung up"


async def send_half(port: int, request: bytes) -> str:
    """Sends half a body, and hangs up after a while."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request[:-4])
    await asyncio.sleep(1)
    writer.close()
    return "half a body"


async def send_10_mb(port: int, request: bytes) -> str:
    """Sends 10 MB, and reads the answer where there is one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"Content-Length: 10000000\r\n\r\n")
    try:
        for _ in range(100):
            writer.write(b" " * 100_000)
            await writer.drain()
        status = (await reader.readline()).split()[1].decode()
    except (OSError, IndexError):
        status = "cut off"
    writer.close()
    return f"10 MB: {status}"


async def again_and_again(
    bad: Callable[[int, bytes], Awaitable[str]], port: int, request: bytes, until: float, seen: Seen
) -> None:
    """What a bad client does all the time."""
    while time.perf_counter() < until:
        try:
            seen.bad[await bad(port, request)] += 1
        except OSError as error:
            seen.bad[type(error).__name__] += 1
        await asyncio.sleep(0.5)


async def load(
    port: int, texts: list[str], offline: list[Offline], clients: int, bad: int, seconds: float
) -> Seen:
    """Lets all clients ask for a time, and waits for what they asked for then."""
    seen = Seen()
    requests = [request_of(text) for text in texts]
    todo = itertools.cycle(zip(requests, texts, offline, strict=True))
    until = time.perf_counter() + seconds
    cpu = time.process_time()
    tasks = [client(port, todo, until, seen) for _ in range(clients)] + [
        again_and_again(kind, port, requests[0], until, seen)
        for kind in (hang_up, send_half, send_10_mb)
        for _ in range(bad)
    ]
    running = asyncio.gather(*tasks)
    await asyncio.sleep(until - time.perf_counter())
    seen.cpu = time.process_time() - cpu
    await running
    return seen


@contextlib.contextmanager
def service(model: Path, log: Any) -> Iterator[int]:
    """The command in a process of its own: the port at which it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keras_aiayn", "serve", model, "--port", port]
    process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START
        while get(port, "/health") is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service does not start: {Path(log.name).read_text()}")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def get(port: int, path: str) -> str | None:
    """What a path of the service gives, or nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


def work(model: Path) -> None:
    """The life of the worker that translates offline."""
    from keras_aiayn.loading import load
    from keras_aiayn.memory import keep_freed_memory

    keep_freed_memory()  # as the commands do
    translator = load(model)

    def handle(texts: list[str]) -> dict[str, Any]:
        began = time.perf_counter()
        found = translator.translate(texts, details=True)
        seconds = time.perf_counter() - began
        answers = [[one.text, one.score, len(one.token_ids)] for one in found]
        return {"seconds": seconds, "answers": answers}

    workers.serve(handle)


def faults(seen: Seen, port: int, log: Path) -> list[str]:
    """What must not be."""
    found = [f"{len(seen.wrong)} answers differ from offline"] if seen.wrong else []
    others = {status: n for status, n in seen.statuses.items() if status not in (200, 429)}
    if others:
        found.append(f"answers beside 200 and 429: {others}")
    if not seen.seconds:
        found.append("nothing was translated")
    if get(port, "/health") is None:
        found.append("the service is not well afterwards")
    if "aiayn_waiting_tokens 0.0" not in (get(port, "/metrics") or ""):
        found.append("something still waits when no one asks any more")
    if "Traceback" in log.read_text():
        found.append("there is a traceback in its log")
    return found


def told(seen: Seen, offline_seconds: list[float], offline: list[Offline], seconds: float) -> str:
    """The section of the results."""
    mean = sum(offline_seconds) / len(offline_seconds)
    tokens = sum(one.tokens for one in offline)
    left = seconds - seen.cpu / len(os.sched_getaffinity(0))
    rows = [["offline", len(offline) / mean, tokens / mean]]
    for name, time_ in (("the service", seconds), ("the clients' CPU time taken out", left)):
        rows.append([name, seen.lines / time_, seen.tokens / time_])
    table = workers.table(
        ["", "texts/s", "output tokens/s", "of offline"],
        [[name, f"{a:,.1f}", f"{b:,.0f}", f"{b / rows[0][2]:.2f}"] for name, a, b in rows],
    )
    latencies = sorted(seen.seconds) or [math.nan]
    parts = ", ".join(
        f"{part} % within {latencies[min(len(latencies) - 1, len(latencies) * part // 100)]:.2f} s"
        for part in (50, 95, 99)
    )
    return (
        f"{table}\n\nOffline took {' and '.join(f'{one:.1f} s' for one in offline_seconds)}; the "
        f"clients computed {seen.cpu:.1f} s. Answers of 200: {parts}.\n\n"
        f"Answers by status: {counts(seen.statuses)}; other than offline: {len(seen.wrong)}. Bad "
        f"clients: {counts(seen.bad)}."
    )


def counts(counter: collections.Counter) -> str:
    """A counter in words."""
    return ", ".join(f"{n:,} × {what}" for what, n in sorted(counter.items(), key=str)) or "none"


def main() -> None:
    """Translates offline and asks the service, or as a worker translates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="A .keras file.")
    parser.add_argument("--source", type=Path, help="Sentences, one a line.")
    parser.add_argument("--texts", type=int, default=500, help="To be asked for in turn.")
    parser.add_argument("--lines", type=int, default=32, help="Of the longest text.")
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--bad", type=int, default=5, help="Bad clients of each kind.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.model)
        return
    backend = os.environ.get("KERAS_BACKEND")
    if options.source is None or backend is None:
        parser.error("name a --source, and a backend by KERAS_BACKEND")
    lines = options.source.read_text(encoding="utf-8").splitlines()
    texts = unequal([line for line in lines if line.strip()], options.texts, options.lines)
    worker = workers.Worker(__file__, options.model, "--worker", backend=backend)
    worker.ask(texts=texts)  # compiles
    before = worker.ask(texts=texts)
    offline = [Offline(*answer) for answer in before["answers"]]
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        service(options.model, log) as port,
    ):
        asked = (port, texts, offline, options.clients, options.bad, options.seconds)
        seen = asyncio.run(load(*asked))
        wrongs = faults(seen, port, Path(log.name))
    after = worker.ask(texts=texts)
    worker.close()
    sizes = sorted(map(len, texts))
    middle = sizes[len(sizes) // 2]
    kind = f"texts of up to {options.lines} lines" if options.lines > 1 else "lines"
    workers.write_section(
        f"The service, {options.clients:,} clients, {kind}, {backend}",
        f"{len(texts):,} texts of {sizes[0]} to {sizes[-1]:,} characters, half of them below "
        f"{middle}; {options.clients:,} clients and {options.bad} bad ones of each kind for "
        f"{options.seconds:g} s.\n\n"
        + told(seen, [before["seconds"], after["seconds"]], offline, options.seconds),
        keep=options.seconds >= 60,
    )
    for text, there, here in seen.wrong[:5]:
        print(f"score offline {there:.6f}, of the service {here:.6f}: {text!r}", file=sys.stderr)
    if wrongs:
        print(f"error: {'; '.join(wrongs)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
