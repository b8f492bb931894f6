"""Imports go only left, backends are imported where they are used, and the package is light.

The order, from left to right, is that of the paper's walk through the model and out of it again.
`data` stands beside the model: it imports none of it, and serves the translator and all after it.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import keras_aiayn

PACKAGE = Path(keras_aiayn.__file__).parent

# A part imports from its own folder and from the parts that stand before it in its row.
ORDER = [
    {"special_ids", "memory"},
    {"masking"},
    {"layers"},
    {"transformer"},
    {"config"},
    {"decoding"},
    {"translator"},
    {"loading"},
    {"pool"},
    {"files"},
    {"interop", "evaluation"},
    {"training"},
    {"plots", "quantization", "serve"},
    {"ablation"},
    {"cli"},
    {"__main__"},
]
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
# What the order alone would allow, or forbid.
DATA_IMPORTS = {"special_ids"}
DATA_SERVES_FROM = RANK["translator"]
NEVER = {("decoding", "config")}  # layers, model and search see plain arguments

BACKENDS = {"tensorflow", "jax", "torch"}
MAY_IMPORT_BACKENDS = {
    "data.batching",
    "decoding.compiled",
    "memory",
    "training.checkpoint",
    "training.distribution",
}


def name_of(path: Path) -> str:
    """The module's name inside the package; the package itself is ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement, with the full name of each module it may load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["keras_aiayn", *module.split(".")] if module else ["keras_aiayn"]
                up = node.level - is_package
                base = ".".join([*here[: len(here) - up], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("keras_aiayn.")
                is_module = base.split(".")[0] == "keras_aiayn" and inner in MODULES
                yield node, f"keras_aiayn.{inner}" if is_module else base


def parsed(module: str) -> list[tuple[ast.stmt, str]]:
    path = MODULES[module]
    return list(imports(ast.parse(path.read_text()), module, path.name == "__init__.py"))


def part(module: str) -> str:
    return module.split(".")[0]


def may_import(importer: str, imported: str) -> bool:
    """Whether one part of the package may import from another."""
    if importer == imported:
        return True
    if importer == "data":
        return imported in DATA_IMPORTS
    if imported == "data":
        return RANK[importer] >= DATA_SERVES_FROM
    return RANK[imported] < RANK[importer] and (importer, imported) not in NEVER


@pytest.mark.backend_free
def test_every_module_has_its_place_in_the_order():
    assert {part(module) for module in MODULES} - {""} <= RANK.keys() | {"data"}


@pytest.mark.backend_free
@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_imports_only_go_left(module):
    for node, name in parsed(module):
        if name.split(".")[0] != "keras_aiayn":
            continue
        imported = name.removeprefix("keras_aiayn").removeprefix(".")
        assert imported, f"{module}, line {node.lineno}: import from the module, not the package"
        assert may_import(part(module), part(imported)), (
            f"{module}, line {node.lineno}: {part(imported)} does not stand left of {part(module)}"
        )


@pytest.mark.backend_free
@pytest.mark.parametrize("importer", ["layers", "decoding", "training", "data"])
def test_the_order_forbids_what_stands_right(importer):
    assert not may_import(importer, "cli")
    assert may_import(importer, "special_ids")
    assert may_import(importer, "data") == (importer in {"training", "data"})


@pytest.mark.backend_free
@pytest.mark.parametrize("module", MODULES)
def test_backends_are_imported_where_allowed_and_inside_functions(module):
    tree = ast.parse(MODULES[module].read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node, name in imports(tree, module, MODULES[module].name == "__init__.py"):
        top = name.split(".")[0]
        allowed = module in MAY_IMPORT_BACKENDS or part(module) == "interop"
        if top == "tensorflow_text":
            allowed = allowed or module == "data.tokenizer"
        elif top not in BACKENDS:
            continue
        assert allowed, f"{module}, line {node.lineno}: no place to import {top}"
        assert id(node) in inside, f"{module}, line {node.lineno}: import {top} in a function"


def test_importing_the_package_loads_no_more_than_keras_does():
    program = (
        "import sys, keras\n"
        "before = set(sys.modules)\n"
        "import keras_aiayn\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "keras_aiayn" in loaded
    heavy = {"matplotlib", "rich", "sacrebleu", "sacremoses", "sentencepiece", "typer"}
    assert not loaded & (heavy | BACKENDS | {"keras_hub", "tensorboard", "tensorflow_text"})
    # Keras brings numpy; all else would be an import that belongs into the function that needs it.
    assert loaded - {"keras", "keras_aiayn", "numpy"} <= set(sys.stdlib_module_names)
