"""What the site says is so: its programs run, its commands parse, its links lead somewhere."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import shlex
import sys
import unicodedata
from pathlib import Path
from types import ModuleType

import keras
import pytest
import typer

from keras_aiayn import TransformerConfig, ablation, cli, table3
from keras_aiayn.config import TABLE_3, preset, with_settings
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.translator import Translator

BACKEND = keras.backend.backend()
REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
# What a page may tell its reader to type beside the package's own commands; nobody runs it here.
OTHERS = {"cd", "curl", "echo", "git", "pip", "tensorflow_model_server"}


def module(path: str) -> ModuleType:
    """A program of the repository, which finds those beside it, as it does when it is run."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    loaded = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend((REPOSITORY / path).parent)
        spec.loader.exec_module(loaded)
    return loaded


hooks = module("docs/hooks.py")
notebooks = module("docs/notebooks.py")
FENCE = notebooks.FENCE


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: their language, and what is in them."""
    return FENCE.findall(text_of(page))


# Programs


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The folder in which a page's programs run, and what they take as given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    tokenizer = ByteTokenizer()
    sizes = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 16, "num_heads": 2}
    model = TransformerConfig.tiny(tokenizer.vocabulary_size, **sizes).build(seed=1)
    translator = Translator(model, tokenizer, tokenizer, beam_size=2, max_extra_length=4)
    (tmp_path / "run").mkdir()
    translator.save(tmp_path / "run" / "model.keras")
    return translator


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "python" in dict(blocks(page)) and page != "production.md"]
)
def test_the_programs_of_a_page_run_and_print_what_it_says(page, given):
    run_programs(notebooks.programs(text_of(page)), page)


def run_programs(programs, name):
    """One after another, with the names that those before it left."""
    names = {"__name__": "page"}
    for code, expected in programs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{name}: {code.splitlines()[0]}", "exec"), names)
        if expected is not None:
            assert printed.getvalue() == expected


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow writes these formats")
@pytest.mark.filterwarnings("ignore")  # of Keras's exporter, about itself
def test_the_programs_for_other_formats_run(given, tmp_path):
    pytest.importorskip("tensorflow_text")
    pytest.importorskip("ai_edge_litert")
    from keras_aiayn.interop import saved_model

    saved_model.export(given, tmp_path / "folder")
    run_programs(notebooks.programs(text_of("production.md")), "production.md")


# Notebooks

NOTEBOOKS = sorted(path.name for path in (REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.backend_free
def test_the_notebooks_are_what_their_pages_give():
    """`make notebooks` makes them so."""
    made = notebooks.made()
    assert NOTEBOOKS == sorted(made)
    for name, text in made.items():
        assert (REPOSITORY / "notebooks" / name).read_text(encoding="utf-8") == text, name


@pytest.mark.backend_free
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_programs_of_its_page_which_links_to_it(name):
    (page,) = [page for page in PAGES if f"/notebooks/{name})" in text_of(page)]
    own = [(code.strip("\n"), out) for code, out in notebooks.programs(text_of(page))]
    assert len(own) == [kind for kind, _ in blocks(page)].count("python")
    cells = notebooks.read(REPOSITORY / "notebooks" / name)
    assert [cell for cell in cells if cell in own] == own


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    """In an empty folder: it brings what it needs beside the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "parsing", raising=False)
    run_programs(notebooks.read(REPOSITORY / "notebooks" / name), name)


# The PDF


@pytest.mark.backend_free
def test_chapters_become_one_page_whose_links_stay_in_it():
    pdf = module("docs/pdf.py")
    assert [f"paper/{name}.md" for name in sorted(pdf.chapter_names())] == [
        page for page in PAGES if page.startswith("paper/")
    ]
    text = (
        '<article class="a"><h1 id="t">T<a class="headerlink" href="#t">&para;</a></h1>'
        '<p><a href="../notebooks/a.ipynb">Open as a notebook</a><a href="#t">1</a>'
        '<a href="b.html">2</a><a href="b.html#t">3</a><a href="https://c.d">4</a>'
        '<a class="source" href="../source/e.html">5</a></p></article>'
    )
    assert pdf.chapter(text, "a", ["a", "b"]) == (
        '<article id="a" class="md-typeset"><h1 id="a-t">T</h1>'
        '<p><a href="#a-t">1</a><a href="#b">2</a><a href="#b-t">3</a><a href="https://c.d">4</a>'
        '<span class="source">5</span></p></article>'
    )
    assert '<a href="#b">T</a><span>7</span>' in pdf.book({"a": text, "b": text}, {"b": 7})


# Commands


def commands(page: str) -> list[list[str]]:
    """The commands in a page's blocks for a shell, each as its words."""
    text = text_of(page)
    written = [code for kind, code in FENCE.findall(text) if kind in ("shell", "bash")]
    written += INDENTED.findall(FENCE.sub("", text))
    joined = "".join(written).replace("\\\n", " ")
    lines = [part for line in joined.splitlines() for part in re.split(r" && | \| ", line)]
    found = [shlex.split(re.sub(r"\s[<>]\s+\S+", "", line)) for line in lines if line.strip()]
    return [[word for i, word in enumerate(words) if not is_setting(words, i)] for words in found]


def is_setting(words: list[str], index: int) -> bool:
    """Whether a word is one of those before a command that set its environment."""
    return all(re.fullmatch(r"[A-Z_]+=.*", word) for word in words[: index + 1])


def check_own(words: list[str]) -> None:
    """Parses a `keras-aiayn` command as it does itself, without running it."""
    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context(command.name, words)
    with_settings(preset("base", 100), list(context.params.get("set_") or []))


@pytest.mark.backend_free
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_are_there_with_their_options(page):
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for name, *words in commands(page):
        program = Path(name).name
        if program == "keras-aiayn":
            check_own(words)
        elif program == "make":
            assert {word for word in words if "=" not in word} <= set(targets)
        elif program == "python":
            script = (REPOSITORY / words[0]).read_text(encoding="utf-8")
            assert all(word in script for word in words if word.startswith("--"))
        else:
            assert program in OTHERS


@pytest.mark.backend_free
def test_an_option_that_is_not_there_is_found():
    with pytest.raises(Exception, match="--beams"):
        check_own(["translate", "model.keras", "--beams", "4"])
    with pytest.raises(ValueError, match="no_such_setting"):
        check_own("train --data d --output r --set no_such_setting=1".split())


# Links, sources and pictures


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as Python-Markdown makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        plain = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        name = next(n for n in [plain, *(f"{plain}_{i}" for i in range(1, 99))] if n not in found)
        found.add(name)
    return found


def links(page: str) -> list[str]:
    found = [match["target"] for match in hooks.LINK.finditer(text_of(page))]
    return [target for target in found if target and ":" not in target]


@pytest.mark.backend_free
@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = ((DOCS / page).parent / name).resolve() if name else DOCS / page
        assert path.is_file(), target
        assert path.is_relative_to(REPOSITORY)
        if anchor:
            assert anchor in anchors(path), target


@pytest.mark.backend_free
@pytest.mark.parametrize("page", [page for page in PAGES if hooks.DIRECTIVE.search(text_of(page))])
def test_what_a_page_shows_of_the_repository_is_there(page):
    assert not hooks.DIRECTIVE.search(hooks.expand(text_of(page), page))


@pytest.mark.backend_free
def test_a_source_is_the_objects_code_without_its_docstring():
    path, code = hooks.source("keras_aiayn.masking.causal_mask")
    assert path == "keras_aiayn/masking.py"
    assert code.startswith("def causal_mask(token_ids):\n    positions = ops.cumsum(")
    with pytest.raises(LookupError, match="no_such_mask"):
        hooks.source("keras_aiayn.masking.no_such_mask")


@pytest.mark.backend_free
def test_links_are_made_to_work_where_a_text_is_shown():
    text = "[a](docs/production.md) [b](Makefile) `[c](d.md)` [e](https://example.org) [f](#g)"
    assert hooks.relink(text, "", "paper/index.md") == (
        "[a](../production.md) [b](../source/Makefile.md) `[c](d.md)` "
        "[e](https://example.org) [f](#g)"
    )


@pytest.mark.backend_free
def test_what_would_be_fetched_from_elsewhere_is_found():
    fetched = ('<script src="https://a.b/c.js">', '<link rel="stylesheet" href="//a.b/c.css">',
               '<img alt="x" src="http://a.b/c.png">', "src: url(https://a.b/c.woff)")  # fmt: skip
    assert all(hooks.OUTSIDE.search(one) for one in fetched)
    own = '<a href="https://a.b"> <img src="../x.png"> <link rel="stylesheet" href="style.css">'
    assert not hooks.OUTSIDE.search(own)


@pytest.mark.backend_free
def test_every_page_is_in_the_navigation_and_every_picture_on_a_page():
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    assert {page for page in PAGES if page not in navigation} == set()
    shown = {Path(target).name for page in PAGES for target in links(page)}
    assert {path.name for path in (DOCS / "pictures").iterdir()} <= shown


def test_the_pictures_can_be_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pictures = module("docs/pictures.py")
    drawn = [name for name in pictures.DRAWN if name != "model"]
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--output", str(tmp_path), *drawn])
    pictures.main()
    assert {path.stem for path in tmp_path.iterdir()} == set(drawn)


@pytest.mark.backend_free
def test_the_diagram_is_that_of_the_model_as_it_is(tmp_path):
    module("docs/pictures.py").draw_model(tmp_path)
    drawn = (tmp_path / "model.svg").read_text(encoding="utf-8")
    assert drawn == text_of("pictures/model.svg")


# Numbers


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table whose first heading is `first`."""
    pattern = rf"^\| *{re.escape(first)} *\|.*\n\|[-| ]+\n((?:\|.*\n)+)"
    rows = re.search(pattern, text_of(page), re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


@pytest.mark.backend_free
def test_table_3_is_that_of_the_package():
    rows = table("paper/results.md", "row")
    assert [row[0] for row in rows] == list(TABLE_3) == list(ablation.PAPER)
    for name, _, perplexity, bleu, printed, counted in rows:
        assert (float(perplexity), float(bleu), int(printed or 0) or None) == ablation.PAPER[name]
        assert f"{ablation.parameters(table3(name)[0]) / 1e6:.1f}" == counted, name


@pytest.mark.backend_free
def test_the_sizes_to_choose_from_are_those_of_their_configurations():
    for name, sizes, weights, _ in table("guides/own-text.md", "`--config`"):
        config = getattr(TransformerConfig, name.strip("`"))(8_000)
        values = dataclasses.asdict(config)
        names = ("num_layers", "hidden_dim", "intermediate_dim", "num_heads")
        assert sizes == ", ".join(str(values[size]) for size in names)
        assert weights == f"{ablation.parameters(config) / 1e6:.1f} M"


@pytest.mark.backend_free
def test_the_table_of_all_settings_is_that_of_the_code():
    for column, name in ((1, "base"), (2, "big")):
        model, training = table3(name)
        known = dataclasses.asdict(model) | dataclasses.asdict(training)
        known["key_dim"] = model.hidden_dim // model.num_heads
        for row in table("paper/after.md", ""):
            setting = row[3].partition(",")[0].strip("`")
            if setting in known:
                assert float(row[column].replace(",", "")) == known[setting], setting
            else:
                assert row[column] == f"{ablation.parameters(model) / 1e6:.1f} M"
