"""Makes notebooks of the quick start and of the annotated paper's chapters, from their pages.

    python docs/notebooks.py                all of them, into notebooks/

A page's programs become cells that run, with what the page says that they print; all else becomes
text, with the code of the package in it as the site shows it. The tests run every notebook, and
compare it with its page.
"""

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import hooks

DOCS = hooks.REPOSITORY / "docs"
FOLDER = hooks.REPOSITORY / hooks.NOTEBOOKS
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_LINK = re.compile(r"^\[[^]\n]+\]\(\S+\.ipynb\)\n+", re.MULTILINE)  # a notebook needs none
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)

# With what training needs, which brings a backend too.
INSTALL = """\
# Installs the package where it is missing: a wheel that lies beside this notebook, or PyPI's.
import subprocess
import sys
from importlib.util import find_spec

if find_spec("keras_aiayn") is None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--find-links", "."]
    subprocess.run([*pip, "keras-aiayn[train]"], check=True)
"""
WRITE = """\
# An example of the repository, which is imported below and does not come with the package.
with open("{name}.py", "w", encoding="utf-8") as file:
    file.write(r'''{text}''')
"""


class Program(NamedTuple):
    """A program of a page, and what the page says that it prints, if it says so."""

    code: str
    printed: str | None = None


def parts(markdown: str) -> Iterator[str | Program]:
    """A page as its texts and its programs, in order.

    Programs are its `python` blocks; a `text` block right after one is what that one prints.
    """
    start = 0
    blocks = list(FENCE.finditer(markdown))
    for block, after in zip_longest(blocks, blocks[1:]):
        if block[1] == "python":
            yield markdown[start : block.start()]
            start, printed = block.end(), None
            if after and after[1] == "text" and not markdown[start : after.start()].strip():
                start, printed = after.end(), after[2]
            yield Program(block[2], printed)
    yield markdown[start:]


def programs(markdown: str) -> list[Program]:
    """The programs of a page."""
    return [part for part in parts(markdown) if isinstance(part, Program)]


def made() -> dict[str, str]:
    """What the pages give: the name of each notebook's file, and what is in it."""
    found = {}
    for path in [DOCS / "quick-start.md", *sorted((DOCS / "paper").glob("*.md"))]:
        text = path.read_text("utf-8")
        if programs(text):
            name = f"{path.stem}.ipynb"
            found[name] = notebook(text, path.relative_to(DOCS).as_posix(), name)
    return found


def notebook(markdown: str, page: str, name: str) -> str:
    """A page as a notebook, in the format of Jupyter (nbformat 4).

    Args:
        markdown: what its author wrote.
        page: its path within `docs`.
        name: of the notebook's file.
    """
    cells = [_code(Program(INSTALL))]
    for part in parts(OWN_LINK.sub("", markdown)):
        if isinstance(part, Program):
            cells += [_code(Program(text), folded=True) for text in _examples(part.code)]
            cells.append(_code(part))
        elif part.strip():
            cells.append(_text(hooks.expand(part.strip(), page, f"{hooks.NOTEBOOKS}/{name}")))
    written = {
        "cells": [cell | {"id": f"cell-{number}"} for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(written, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _examples(code: str) -> Iterator[str]:
    """Programs that write what a program imports of the folder `examples`."""
    for name in IMPORTED.findall(code):
        path = hooks.REPOSITORY / "examples" / f"{name}.py"
        if path.is_file():
            text = path.read_text("utf-8")
            if "'''" in text:
                raise ValueError(f"{path.name} has ''' in it, which would end the cell's string")
            yield WRITE.format(name=name, text=text)


def _code(program: Program, folded: bool = False) -> dict[str, Any]:
    """A cell that runs; Colab and Jupyter each have a mark of their own to show it folded."""
    printed = {"name": "stdout", "output_type": "stream", "text": _lines(program.printed or "")}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {"cellView": "form", "jupyter": {"source_hidden": True}} if folded else {},
        "outputs": [printed] if program.printed else [],
        "source": _lines(program.code.strip("\n")),
    }


def _text(markdown: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(markdown)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def read(path: Path) -> list[Program]:
    """The cells of a notebook that run, in order, with what it says that they print."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [
        Program(
            "".join(cell["source"]),
            "".join("".join(output["text"]) for output in cell["outputs"]) or None,
        )
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def main() -> None:
    """Writes all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in made().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
