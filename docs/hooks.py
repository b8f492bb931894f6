"""What the site's build does to its pages. MkDocs calls the `on_` functions; tests the others.

In a page

    ::: source keras_aiayn.layers.attention.scaled_dot_product_attention
    ::: docstring keras_aiayn.transformer
    ::: include README.md#Results

stand for that object's code without its docstring, for the docstring alone, and for the section
of that file. All are read when the site is built, so they cannot drift from what they show.
A link to a file outside of `docs` leads to a page that shows it, one to a notebook to the notebook.
Formulas become MathML, which browsers draw by themselves.
"""

import ast
import html
import os
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
# Written by the programs that measure, so it may not be there yet.
MAY_BE_MISSING = ("benchmarks/RESULTS.md",)
SHOWN = "source"  # the folder of the pages that show files of the repository
NOTEBOOKS = "notebooks"  # their folder, in the repository and in the site
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml"}

# What a browser would fetch from elsewhere as it shows a page.
OUTSIDE = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|object)\b[^>]*\b(?:src|data)=["']?(?:https?:)?//"""
    r"""|<link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)

DIRECTIVE = re.compile(r"^::: (source|docstring|include) (\S+)$", re.MULTILINE)
# What looks like a link inside code is none, so code is found first.
LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)$|`[^`\n]+`|(?<=\]\()(?P<target>[^)\s]+)(?=[)\s])",
    re.MULTILINE | re.DOTALL,
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Adds the notebooks, and a page for every file that a page links to, and theirs in turn."""
    from mkdocs.structure.files import File

    for notebook in sorted((REPOSITORY / NOTEBOOKS).glob("*.ipynb")):
        uri, content = f"{NOTEBOOKS}/{notebook.name}", notebook.read_text("utf-8")
        files.append(File.generated(config, uri, content=content))
    pages = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    texts = [expand((Path(config.docs_dir) / page).read_text("utf-8"), page) for page in pages]
    added = set()
    while texts:
        text = texts.pop()
        for name in sorted(set(re.findall(rf"\]\((?:\.\./)*{SHOWN}/([^)#\s]+)\.md", text)) - added):
            added.add(name)
            page = f"{SHOWN}/{name}.md"
            texts.append(shown(name))
            files.append(File.generated(config, page, content=texts[-1]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts in what a page's directives ask for."""
    uri = page.file.src_uri
    return markdown if uri.startswith(f"{SHOWN}/") else expand(markdown, uri)


def on_page_content(content: str, **_: Any) -> str:
    """Turns LaTeX into MathML."""
    return FORMULA.sub(_mathml, content)


def on_post_build(config: Any) -> None:
    """Fails the build if a page would ask another server for something."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := OUTSIDE.search(path.read_text("utf-8"))):
            raise PluginError(f"{path} asks another server: {found[0]}")


def _mathml(found: re.Match) -> str:
    from latex2mathml.converter import convert

    formula = html.unescape(found[2]).strip()
    if found[1] == "span":
        return convert(formula, display="inline")
    # Its box scrolls where a screen is narrower than it.
    return f'<div class="formula">{convert(formula, display="block")}</div>'


def expand(markdown: str, page: str, notebook: str = "") -> str:
    """A page as it is built: its directives carried out, its links made to work in the site.

    Args:
        markdown: what its author wrote.
        page: its path within `docs`.
        notebook: that it goes into instead, a path in the repository, where links shall work.
    """
    onto = notebook or page
    relinked = relink(markdown, f"docs/{posixpath.dirname(page)}", onto)

    def directive(found: re.Match) -> str:
        kind, target = found.groups()
        if kind == "include":
            return included(target, onto)
        if kind == "docstring":
            return docstring(target)
        path, code = source(target)
        style = "" if notebook else "{ .source }"
        return f"[{path}]({_to_repository(path, onto)}){style}\n\n```python\n{code}\n```"

    return DIRECTIVE.sub(directive, relinked)


def source(name: str) -> tuple[str, str]:
    """The file of an object, as a path in the repository, and its code without its docstring.

    Args:
        name: dotted, of a function, a class, a method or a constant of a module.

    Raises:
        LookupError: where there is no such object.
    """
    path, node, text = _find(name)
    lines = text.splitlines()
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    kept = set(range(first, node.end_lineno + 1))
    if _docstring_node(node):
        written = node.body[0]
        kept -= set(range(written.lineno, written.end_lineno + 1))
    code = "\n".join(lines[number - 1] for number in sorted(kept))
    return path, textwrap.dedent(code)


def docstring(name: str) -> str:
    """The docstring of a module or of an object in one, without its first line."""
    path = REPOSITORY / (name.replace(".", "/") + ".py")
    node = ast.parse(path.read_text("utf-8")) if path.is_file() else _find(name)[1]
    written = ast.get_docstring(node)
    if not written:
        raise LookupError(f"{name} has no docstring")
    return written.partition("\n")[2].strip()


def _find(name: str) -> tuple[str, Any, str]:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (REPOSITORY / path).is_file():
            break
    else:
        raise LookupError(f"no module of the repository holds {name}")
    text = (REPOSITORY / path).read_text("utf-8")
    node: Any = ast.parse(text)
    for part in parts[length:]:
        node = next((child for child in node.body if part in _names(child)), None)
        if node is None:
            raise LookupError(f"{path} has no {'.'.join(parts[length:])}")
    return path.as_posix(), node, text


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return [getattr(node, "name", "")]


def _docstring_node(node: Any) -> bool:
    documented = (ast.FunctionDef, ast.ClassDef)
    return isinstance(node, documented) and ast.get_docstring(node) is not None


def included(target: str, page: str) -> str:
    """A Markdown file of the repository, or one section of it without its heading.

    Args:
        target: `PATH`, or `PATH#Heading` as it is written, `_` for a space.
        page: that it goes into, a path within `docs`.

    Raises:
        LookupError: where there is no such file or heading.
    """
    path, _, heading = target.partition("#")
    if not (REPOSITORY / path).is_file():
        if path not in MAY_BE_MISSING:
            raise LookupError(f"there is no {path}")
        return f"There is no `{path}` yet: the programs beside it write it."
    text = (REPOSITORY / path).read_text("utf-8")
    if heading:
        text = _section(text, heading.replace("_", " "), path)
    else:
        text = re.sub(r"\A# .*\n+", "", text)  # the page has a title of its own
    return relink(text, posixpath.dirname(path), page)


def _section(text: str, heading: str, path: str) -> str:
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"{path} has no heading {heading!r}")
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def relink(markdown: str, folder: str, page: str) -> str:
    """Makes the relative links of a text work on a page.

    Args:
        markdown: the text.
        folder: within the repository, that its links start from.
        page: that shows it, a path within `docs`, or a notebook of the repository.
    """

    def moved(found: re.Match) -> str:
        target, mark, anchor = (found["target"] or "").partition("#")
        if not target or ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return _to_repository(path, page) + mark + anchor

    return LINK.sub(moved, markdown)


def _to_repository(path: str, page: str) -> str:
    """The link from a page to a file of the repository, or to the page that shows it."""
    if page.endswith(".ipynb"):  # stands in the repository itself
        return posixpath.relpath(path, posixpath.dirname(page))
    if path.startswith("docs/"):
        within = posixpath.relpath(path, "docs")
    else:
        within = path if path.endswith(".ipynb") else f"{SHOWN}/{path}.md"
    return posixpath.relpath(within, posixpath.dirname(page) or ".")


def shown(name: str) -> str:
    """A page that shows a file of the repository."""
    path, page = REPOSITORY / name, f"{SHOWN}/{name}.md"
    header = f"---\ntitle: {posixpath.basename(name)}\nsearch:\n  exclude: true\n---\n\n"
    if path.suffix == ".md" or name in MAY_BE_MISSING:
        return f"{header}# {name}\n\n{included(name, page)}"
    language = LANGUAGES.get(os.path.splitext(name)[1], "text")
    return f"{header}# {name}\n\n````{language}\n{path.read_text('utf-8')}````\n"
