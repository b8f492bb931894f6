"""The table in README.md of what works on which backend, whose cells are what tests come to.

A test that is marked `works("something")` makes a row. Where one is skipped on a backend, the thing
cannot be done there. A run that comes to something else than the table says fails;
`KERAS_AIAYN_WRITE_TABLE=1 make test-all` writes the cells, and adds rows that are missing.
"""

import os
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
HEADER = "| what works | TensorFlow | JAX | PyTorch |\n|---|---|---|---|\n"
COLUMNS = ["tensorflow", "jax", "torch"]
CELLS = {"passed": "yes", "skipped": "no"}


def read() -> tuple[str, dict[str, list[str]], str]:
    """What stands before the table, its rows by what they are of, and what stands behind it."""
    before, header, rest = README.read_text(encoding="utf-8").partition(HEADER)
    rows, end, after = rest.partition("\n\n")
    cells = [row.strip("| ").split(" | ") for row in rows.splitlines()]
    return before + header, {what: each for what, *each in cells}, end + after


def write(before: str, rows: dict[str, list[str]], after: str) -> None:
    lines = [f"| {' | '.join([what, *cells])} |" for what, cells in rows.items()]
    README.write_text(before + "\n".join(lines) + after, encoding="utf-8")


class Table:
    """A plugin of pytest, for the process that gathers the reports."""

    def __init__(self, backend: str):
        self.column = COLUMNS.index(backend)
        self.outcomes: dict[str, set[str]] = {}
        self.wrong: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("works"):
                item.user_properties.append(("works", mark.args[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, what in report.user_properties:
            if name == "works" and (report.when == "call" or report.skipped):
                self.outcomes.setdefault(what, set()).add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A part of the cases of a test says nothing of the others.
        if hasattr(session.config, "workerinput") or session.config.option.keyword:
            return
        before, rows, after = read()
        for what, outcomes in self.outcomes.items():
            if "failed" in outcomes:
                continue
            found = CELLS["passed" if "passed" in outcomes else "skipped"]
            said = rows.setdefault(what, ["?"] * len(COLUMNS))
            if said[self.column] != found:
                self.wrong.append(f"{what}: {found}, and not {said[self.column]}")
                said[self.column] = found
        if self.wrong and os.environ.get("KERAS_AIAYN_WRITE_TABLE") == "1":
            write(before, rows, after)
        elif self.wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.wrong:
            terminalreporter.write_line(f"the table in README.md is wrong: {line}", red=True)
