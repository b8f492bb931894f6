"""The tables of what works on which backend, whose cells are what tests come to.

A test that is marked `works("something")` makes a row of the one in README.md, and one marked
`works("something", table="format")` a row of that in docs/production.md. Where such a test is
skipped on a backend, the thing cannot be done there; one that is skipped because something is not
installed says nothing. A run that comes to something else than a table says fails;
`KERAS_AIAYN_WRITE_TABLE=1 make test-all` writes the cells, and adds rows that are missing.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The page of each table, which is named by the first cell of its header.
PAGES = {"what works": "README.md", "format": "docs/production.md"}
HEADER = "| {} | TensorFlow | JAX | PyTorch |\n|---|---|---|---|\n"
COLUMNS = ["tensorflow", "jax", "torch"]
CELLS = {"passed": "yes", "skipped": "no"}
NOT_INSTALLED = "Skipped: could not import"  # as `pytest.importorskip` says it


def read(table: str) -> tuple[str, dict[str, list[str]], str]:
    """What stands before a table, its rows by what they are of, and what stands behind it."""
    text = (ROOT / PAGES[table]).read_text(encoding="utf-8")
    before, header, rest = text.partition(HEADER.format(table))
    rows, end, after = rest.partition("\n\n")
    cells = [row.strip("| ").split(" | ") for row in rows.splitlines()]
    return before + header, {what: each for what, *each in cells}, end + after


def write(table: str, before: str, rows: dict[str, list[str]], after: str) -> None:
    lines = [f"| {' | '.join([what, *cells])} |" for what, cells in rows.items()]
    (ROOT / PAGES[table]).write_text(before + "\n".join(lines) + after, encoding="utf-8")


class Tables:
    """A plugin of pytest, for the process that gathers the reports."""

    def __init__(self, backend: str):
        self.column = COLUMNS.index(backend)
        self.outcomes: dict[str, dict[str, set[str]]] = {table: {} for table in PAGES}
        self.wrong: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("works"):
                table = mark.kwargs.get("table", "what works")
                item.user_properties.append(("works", (table, mark.args[0])))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and NOT_INSTALLED in str(report.longrepr):
            return
        for name, value in report.user_properties:
            if name == "works" and (report.when == "call" or report.skipped):
                table, what = value
                self.outcomes[table].setdefault(what, set()).add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A part of the cases of a test says nothing of the others.
        if hasattr(session.config, "workerinput") or session.config.option.keyword:
            return
        writes = os.environ.get("KERAS_AIAYN_WRITE_TABLE") == "1"
        for table in PAGES:
            self.wrong += self.compare(table, writes)
        if self.wrong and not writes and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def compare(self, table: str, writes: bool) -> list[str]:
        """Where a table says something else than this run came to, which may be written."""
        before, rows, after = read(table)
        wrong = []
        for what, outcomes in self.outcomes[table].items():
            if "failed" in outcomes:
                continue
            found = CELLS["passed" if "passed" in outcomes else "skipped"]
            said = rows.setdefault(what, ["?"] * len(COLUMNS))
            if said[self.column] != found:
                wrong.append(f"{PAGES[table]}: {what}: {found}, and not {said[self.column]}")
                said[self.column] = found
        if wrong and writes:
            write(table, before, rows, after)
        return wrong

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.wrong:
            terminalreporter.write_line(f"the table is wrong in {line}", red=True)
