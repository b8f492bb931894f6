"""The benchmark of the service sees what is wrong, and nothing where all is well."""

import asyncio
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from stand_in import Upper, served

from keras_aiayn.serve.app import Limits
from keras_aiayn.serve.grid import Grid

pytestmark = pytest.mark.backend_free

TEXTS = ["a dog", "two men talk", "a", "the cat runs and runs"]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    return importlib.import_module("service")


def loaded(benchmark, upper, expected, clients, log, **options):
    offline = [benchmark.Offline(text, -1.0, 3) for text in expected]
    with served(upper, limits=Limits(bytes=1_000, seconds=1.0), **options) as (_, port):
        seen = asyncio.run(benchmark.load(port, TEXTS, offline, clients, bad=1, seconds=1.0))
        return seen, benchmark.faults(seen, port, log)


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").write_text("listening")
    return tmp_path / "log"


def test_where_all_is_well_it_finds_no_fault_and_counts_all(benchmark, log):
    upper = Upper(seconds=0.01)
    seen, faults = loaded(benchmark, upper, map(str.upper, TEXTS), 8, log)
    assert faults == [] and seen.wrong == []
    assert seen.statuses[200] == len(seen.seconds) >= seen.lines == seen.tokens / 3 > 8
    assert seen.bad["hung up"] and seen.bad["half a body"]
    assert sum(n for what, n in seen.bad.items() if what in ("10 MB: 413", "10 MB: cut off"))
    assert 0 < seen.cpu < 1.5


def test_a_wrong_answer_a_strange_status_and_a_traceback_are_faults(benchmark, log):
    log.write_text("Traceback (most recent call last):")
    upper = Upper(seconds=0.01)
    expected = ["A DOG", "TWO MEN TALK", "B", "THE CAT RUNS AND RUNS"]
    seen, faults = loaded(benchmark, upper, expected, 2, log)
    assert {text for text, *_ in seen.wrong} == {"a"} and len(faults) == 2
    late, faults = loaded(benchmark, Upper(seconds=1.5), expected, 1, log)
    assert late.statuses == {504: 1} and "504" in faults[0] and "nothing" in faults[1]


def test_refusals_are_no_fault(benchmark, log):
    upper = Upper(seconds=0.05)
    waiting = {"grid": Grid(40, 6), "tokens_waiting": 12}
    seen, faults = loaded(benchmark, upper, map(str.upper, TEXTS), 10, log, **waiting)
    assert faults == [] and set(seen.statuses) == {200, 429}


def test_texts_are_of_very_unequal_length(benchmark):
    texts = benchmark.unequal([f"w{number}" for number in range(100)], 1_000)
    counts = [len(text.split()) for text in texts]
    assert min(counts) == 1 and max(counts) == 32
    for power in range(5):
        assert 120 < sum(2**power <= count < 2 ** (power + 1) for count in counts) < 280
    assert texts == benchmark.unequal([f"w{number}" for number in range(100)], 1_000)
