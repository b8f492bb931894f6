"""What the README tells its reader to type, typed: the same commands, on a small corpus."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO

import keras
import pytest

from keras_aiayn.data import tasks

pytestmark = pytest.mark.slow
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

# Options come after the README's own, and the last one counts.
SMALLER = {
    "prepare": ["--vocabulary-size", "330"],
    "train": ["--steps", "12", "--tokens-per-batch", "400", "--set", "num_layers=1",
              "--set", "hidden_dim=32", "--set", "intermediate_dim=32", "--set", "warmup_steps=4",
              "--set", "evaluate_every=6", "--set", "evaluate_lines=2",
              "--set", "checkpoint_every=1"],
}  # fmt: skip
# What the README's examples take as given.
GIVEN = """
import numpy as np
import tensorflow as tf
sources, targets = ["one dog", "two dogs"] * 8, ["ein Hund", "zwei Hunde"] * 8
source_ids = target_ids = np.array([[4, 5, 3, 0], [6, 7, 8, 3]])
"""


def commands() -> list[list[list[str]]]:
    """The indented blocks that call the command, each a list of its command lines."""
    blocks = re.findall(r"(?:^    .*\n)+", README, re.MULTILINE)
    joined = [block.replace("\\\n", " ").splitlines() for block in blocks]
    found = [[shlex.split(line) for line in block] for block in joined]
    return [block for block in found if all(line[0] == "keras-aiayn" for line in block)]


def run(command: list[str], folder: Path) -> None:
    """One line of the README, with `<` and `>` as a shell reads them."""
    words = iter([*command[1:], *SMALLER.get(command[1], [])])
    arguments, names = [], {"<": os.devnull, ">": os.devnull}
    for word in words:
        if word in names:
            names[word] = next(words)
        else:
            arguments.append(word)
    with open(folder / names["<"]) as stdin, open(folder / names[">"], "w") as stdout:
        done = python(["-m", "keras_aiayn", *arguments], folder, stdin=stdin, stdout=stdout)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


def python(arguments: list[str], folder: Path, **streams: IO[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"KERAS_BACKEND": keras.backend.backend()},
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )


def give_files(block: list[list[str]], folder: Path) -> None:
    """Makes the files that a block reads: pairs by the ends of their names."""
    pairs = tasks.written_dates_and_numbers(300, seed=1)
    written = {word for line in block for before, word in zip(line, line[1:], strict=False)
               if before in (">", "--output")}  # fmt: skip
    for word in {word for line in block for word in line} - written:
        if match := re.fullmatch(r"(\w+)\.(en|de|es)", word):
            part = pairs[:240] if match[1] == "train" else pairs[240:244]
            text = "".join(pair[match[2] != "en"] + "\n" for pair in part)
            (folder / word).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder in which the commands of the first block ran."""
    folder = tmp_path_factory.mktemp("own")
    block = commands()[0]
    assert [line[1] for line in block] == ["prepare", "train", "translate", "evaluate"]
    give_files(block, folder)
    for command in block:
        run(command, folder)
    return folder


def test_own_sentences_are_translated_line_for_line(trained):
    new, out = ((trained / name).read_text(encoding="utf-8") for name in ("new.en", "new.de"))
    assert out.count("\n") == new.count("\n") == 4


@pytest.mark.parametrize("number", range(1, len(commands())))
def test_the_commands_of_a_block_run(number, tmp_path):
    block = commands()[number]
    give_files(block, tmp_path)
    for command in block:
        run(command, tmp_path)


def test_the_examples_in_python_run_one_after_another(trained):
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    done = python(["-c", GIVEN + "\n".join(blocks)], trained)
    assert done.returncode == 0, done.stderr
