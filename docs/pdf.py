"""Prints the annotated paper of the built site into one file, site/keras-aiayn.pdf.

    make docs-pdf

Formulas on the site are MathML, which a browser draws, so a browser prints: Chromium, as
PyQt6-WebEngine brings it. It gets all chapters as one page, so that page numbers run on and links
from chapter to chapter work. It prints twice: the first time shows on which pages chapters begin.
"""

import os
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
CHAPTER = re.compile(r"\bpaper/(\w+)\.md")  # in mkdocs.yml, in their order
ARTICLE = re.compile(r"<article[^>]*>(.*?)</article>", re.DOTALL)
TITLE = re.compile(r"<h1[^>]*>(.*?)</h1>", re.DOTALL)
STYLES = re.compile(r'<link rel="stylesheet"[^>]*>')
ANCHOR = re.compile(r'(<\w[^>]*\bid=")')
LINK = re.compile(r'<a\b(?P<more>[^>]*?) ?\bhref="(?P<to>[^"]*)"[^>]*>(?P<text>.*?)</a>', re.DOTALL)


def chapter_names() -> list[str]:
    """Of the pages of the paper, in their order."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    return list(dict.fromkeys(CHAPTER.findall(navigation)))


def chapter(page: str, name: str, names: list[str]) -> str:
    """A page's article as a part of a larger page.

    Its anchors begin with its name. Links lead to anchors or into the web; what would lead to
    another page of the site is its text alone.

    Args:
        page: the page as the site has it, in HTML.
        name: its own.
        names: of all chapters.
    """

    def moved(found: re.Match) -> str:
        target, mark, anchor = found["to"].partition("#")
        linked = target.removesuffix(".html") if target else name
        if target.endswith(".ipynb") or "headerlink" in found[0]:
            return ""
        if ":" in target:
            return found[0]
        if linked in names:
            to = f"{linked}-{anchor}" if mark else linked
            return f'<a href="#{to}">{found["text"]}</a>'
        return f"<span{found['more']}>{found['text']}</span>"

    article = LINK.sub(moved, ANCHOR.sub(rf"\g<1>{name}-", _found(ARTICLE, page, name)))
    return f'<article id="{name}" class="md-typeset">{article}</article>'


def book(pages: dict[str, str], begins: dict[str, int]) -> str:
    """All chapters as one page in HTML, behind a title and a table of contents.

    Args:
        pages: the site's page for each name of a chapter.
        begins: the number of the page that a chapter begins on; not known before it is printed.
    """
    names = list(pages)
    rows = "".join(
        f'<li><a href="#{name}">{title}</a><span>{begins.get(name, "")}</span></li>'
        for name, title in titles(pages).items()
    )
    chapters = "".join(chapter(page, name, names) for name, page in pages.items())
    styles = "".join(STYLES.findall(pages[names[0]]))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Attention Is All You Need, annotated by code that runs</title>{styles}</head>"
        f'<body class="book" dir="ltr" data-md-color-scheme="default">'
        f'<header class="md-typeset"><h1>Attention Is All You Need</h1>'
        f"<p>annotated by code that runs: keras-aiayn</p><ol>{rows}</ol></header>"
        f"{chapters}</body></html>"
    )


def titles(pages: dict[str, str]) -> dict[str, str]:
    """The heading of each chapter, as text."""
    return {
        name: re.sub(r"<a\b.*?</a>|<[^>]+>", "", _found(TITLE, page, name)).strip()
        for name, page in pages.items()
    }


def _found(pattern: re.Pattern, page: str, name: str) -> str:
    match = pattern.search(page)
    if match is None:
        raise ValueError(f"the page of {name} has nothing like {pattern.pattern}")
    return match[1]


class Printer:
    """A browser that prints pages of HTML on A4."""

    def __init__(self) -> None:
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
        # Without these it complains of graphics and of a bus that printing does not need.
        os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu --log-level=3")
        os.environ.setdefault("QT_LOGGING_RULES", "*=false")
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # Chromium has none for root
        from PyQt6.QtCore import QEventLoop
        from PyQt6.QtWebEngineCore import QWebEnginePage
        from PyQt6.QtWidgets import QApplication

        self.application = QApplication(["pdf"])
        self.loop = QEventLoop()
        self.page = QWebEnginePage()
        self.page.loadFinished.connect(self._ended)
        self.page.pdfPrintingFinished.connect(lambda _, whole: self._ended(whole))

    def print(self, source: Path, output: Path) -> None:
        """Prints one page.

        Raises:
            OSError: where the browser could not load or print it.
        """
        from PyQt6.QtCore import QMarginsF, QUrl
        from PyQt6.QtGui import QPageLayout, QPageSize

        layout = QPageLayout(
            QPageSize(QPageSize.PageSizeId.A4),
            QPageLayout.Orientation.Portrait,
            QMarginsF(18, 18, 18, 20),
            QPageLayout.Unit.Millimeter,
        )
        self.page.load(QUrl.fromLocalFile(str(source)))
        self._wait(f"load {source}")
        self.page.printToPdf(str(output), layout)
        self._wait(f"print {output}")

    def close(self) -> None:
        """Ends the browser: Qt wants its page gone before the application is."""
        from PyQt6 import sip

        sip.delete(self.page)

    def _ended(self, whole: bool) -> None:
        self.loop.exit(0 if whole else 1)

    def _wait(self, what: str) -> None:
        if self.loop.exec():
            raise OSError(f"the browser could not {what}")


def begins_on(output: Path, names: list[str]) -> dict[str, int]:
    """The number of the page that each chapter of a printed file begins on, from 1."""
    from pypdf import PdfReader

    reader = PdfReader(output)
    places = reader.named_destinations
    numbers = {name: reader.get_destination_page_number(places[f"/{name}"]) for name in names}
    return {name: number + 1 for name, number in numbers.items() if number is not None}


def finish(output: Path, chapters: dict[str, str], begins: dict[str, int]) -> None:
    """Gives a printed file its bookmarks and its title."""
    from pypdf import PdfWriter

    writer = PdfWriter(output, incremental=True)
    for name, title in chapters.items():
        writer.add_outline_item(title=title, page_number=begins[name] - 1)
    writer.add_metadata({"/Title": "Attention Is All You Need, annotated by code that runs"})
    writer.write(output)
    output.chmod(0o644)  # the browser lets its user alone read it


def main() -> None:
    """Prints the site that `make docs` built."""
    site = REPOSITORY / "site"
    names = chapter_names()
    missing = [name for name in names if not (site / "paper" / f"{name}.html").is_file()]
    if missing:
        sys.exit(f"the site has no page {missing[0]}: run `make docs` first")
    pages = {name: (site / "paper" / f"{name}.html").read_text("utf-8") for name in names}
    source, output = site / "paper" / "whole.html", site / "keras-aiayn.pdf"
    printer, begins = Printer(), dict[str, int]()
    for _ in range(2):
        source.write_text(book(pages, begins), "utf-8")
        printer.print(source, output)
        begins = begins_on(output, names)
    printer.close()
    source.unlink()
    finish(output, titles(pages), begins)


if __name__ == "__main__":
    main()
