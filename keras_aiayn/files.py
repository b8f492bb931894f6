"""Files translated line for line: in order, with progress, and on from where they stopped."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from keras_aiayn.data import corpus
from keras_aiayn.decoding.alignment import pharaoh
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.pool import Pool
from keras_aiayn.translator import Translation, Translator

FORMATS = ("text", "jsonl")
SETTINGS = frozenset(field.name for field in dataclasses.fields(SearchSettings))
AS_IT_IS: dict[str, Any] = {
    "markup": False, "highlight": False, "emoji": False, "soft_wrap": True,
}  # fmt: skip
LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal to draw on


@dataclasses.dataclass
class Report:
    """What was done.

    Attributes:
        lines: translated now, without those of an earlier run.
        skipped: lines that an earlier run had translated.
        target_tokens: of the best translations, EOS counted.
        hit_limit: translations that were cut at their maximum length.
        seconds: from the first line read to the last one written.
    """

    lines: int = 0
    skipped: int = 0
    target_tokens: int = 0
    hit_limit: int = 0
    seconds: float = 0.0

    def count(self, translation: Translation) -> None:
        """Adds a line."""
        self.lines += 1
        self.target_tokens += len(translation.tokens)
        self.hit_limit += translation.hit_limit

    def __str__(self) -> str:
        rate = self.target_tokens / max(self.seconds, 1e-9)
        return (
            f"{self.lines:,} lines, {self.target_tokens:,} target tokens in {self.seconds:,.1f} s: "
            f"{rate:,.0f} target tokens/s, {self.lines / max(self.seconds, 1e-9):,.1f} lines/s"
        )


def translate_file(
    translator: Translator | Pool,
    source: corpus.PathLike | BinaryIO,
    output: corpus.PathLike | BinaryIO,
    *,
    prefixes: corpus.PathLike | None = None,
    file_format: str = "text",
    resume: bool = False,
    on_bad_bytes: str = "error",
    console: Console | None = None,
    chunk_size: int = 2048,
    begun_with: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Translates a file, or a stream, to another: N lines in, N lines out, in order.

    A file appears when it is whole. Until then it stands in FILE.part, where `resume` goes on
    after its last whole line.

    Args:
        translator: a translator, or a pool of processes that translate.
        source: of sentences, one a line.
        output: of translations; a file, or a stream, a device or a pipe, which has no part.
        prefixes: a file with what each translation begins with, line by line.
        file_format: `"text"`, or `"jsonl"` for an object a line with all that `Translation` says.
            Text with more than one hypothesis is `number ||| text ||| score`, with an alignment
            `text ||| 0-0 1-1`.
        resume: whether to go on from FILE.part.
        on_bad_bytes: `"error"` or `"replace"`.
        console: where to show progress; none by default.
        chunk_size: lines read ahead, so that sentences of like length meet.
        begun_with: what else decides the output, such as which model it is, in plain values; a
            resume with another is refused.
        **options: of `Translator.translate`.

    Returns:
        A `Report`.

    Raises:
        ValueError: where an option cannot be.
    """
    if file_format not in FORMATS:
        raise ValueError(f"`file_format` must be text or jsonl. Received: {file_format!r}")
    asked = translator.search_settings(
        **{name: value for name, value in options.items() if name in SETTINGS}
    )
    path = Path(output) if isinstance(output, (str, os.PathLike)) else None
    # A device or a pipe: nothing may take its place.
    special = path is not None and path.exists() and not path.is_file()
    if path is not None:
        for read in (one for one in (source, prefixes) if isinstance(one, (str, os.PathLike))):
            corpus.check_apart(read, path)
    if resume and (path is None or special):
        raise ValueError("only a file can be gone on with: name one by --output")
    if resume and file_format == "text" and asked.n_best > 1:
        raise ValueError("n-best text has no line for each line: resume takes --format jsonl")
    total = _count_lines(source)
    _check_prefixes(prefixes, source, total)
    begun = {
        "source": os.fspath(source) if isinstance(source, (str, os.PathLike)) else "-",
        "prefixes": None if prefixes is None else os.fspath(prefixes),
        "format": file_format,
        "alignments": bool(options.get("alignments")),
        "split_long": options.get("split_long"),
        "on_bad_bytes": on_bad_bytes,
        **dataclasses.asdict(asked),
        "suppress": list(asked.suppress),
        **(begun_with or {}),
    }
    report = Report()
    if resume and path is not None:
        if path.exists() and not corpus.part_of(path).exists():
            _check_whole(path, source, total)
            if console is not None:
                console.print(f"{path} is whole already: there is nothing to go on with")
            return report
        report.skipped = _lines_to_go_on_after(path, begun, total)
    lines: Iterator[Any] = corpus.read_lines(source, on_bad_bytes)
    if prefixes is not None:
        lines = _paired(lines, corpus.read_lines(prefixes, on_bad_bytes), prefixes)
    lines = islice(lines, report.skipped, None)
    write = _writer(file_format, asked.n_best, begun["alignments"])
    began = time.perf_counter()
    with _Shown(console, total, report.skipped) as shown:

        def calls() -> Iterator[dict[str, Any]]:
            """The arguments of `Translator.translate` for one chunk after another."""
            number = report.skipped
            while chunk := list(islice(lines, chunk_size)):
                call = options | {"texts": chunk, "details": True, "first": number}
                if prefixes is not None:
                    call["texts"], call["prefixes"] = map(list, zip(*chunk, strict=True))
                yield call
                number += len(chunk)

        def run(stream: Any) -> None:
            number = report.skipped
            for translations in _translated(translator, calls(), shown):
                for translation in translations:
                    stream.write(write(number, translation).encode())
                    report.count(translation)
                    number += 1
                stream.flush()

        if path is None:
            run(output)
        elif special:
            with open(path, "wb") as device:
                run(device)
        else:
            if not resume:  # an old part must not stand beside the new record of how it was begun
                corpus.part_of(path).unlink(missing_ok=True)
            with corpus.whole_file(_begun_path(path), "w") as stream:
                stream.write(json.dumps(begun))
            with corpus.whole_file(path, "ab" if resume else "wb", keep_part=True) as stream:
                run(stream)
            _begun_path(path).unlink()
    report.seconds = time.perf_counter() - began
    return report


def _translated(
    translator: Translator | Pool, calls: Iterable[dict[str, Any]], shown: Callable[[int], None]
) -> Iterator[list[Translation]]:
    """What is given for each call, in order, with progress."""
    if not isinstance(translator, Pool):
        yield from (translator.translate(**call, progress=shown) for call in calls)
        return
    for translations in translator.map(calls):
        shown(len(translations))
        yield translations


def _check_prefixes(
    prefixes: corpus.PathLike | None, source: corpus.PathLike | BinaryIO, total: int | None
) -> None:
    """Compares the lines of the two before any work, where both can be counted."""
    count = None if prefixes is None else _count_lines(prefixes)
    if count is not None and total is not None and count != total:
        raise ValueError(
            f"{prefixes} must have a line for each of the source's. "
            f"Received: {count} lines, where {source} has {total}"
        )


def _check_whole(path: Path, source: corpus.PathLike | BinaryIO, total: int | None) -> None:
    """Refuses a finished output that another source must have had."""
    lines = corpus.count_lines(path)
    if total is not None and lines != total:
        raise ValueError(
            f"{path} is whole and has {lines} lines, where {source} has {total}: it is the "
            "translation of something else"
        )


def _lines_to_go_on_after(path: Path, begun: dict[str, Any], total: int | None) -> int:
    """Cuts what was half written off a part, and counts the lines that are left of it."""
    _check_begun_alike(path, begun)
    lines = _cut_to_whole_lines(corpus.part_of(path))
    if total is not None and lines > total:
        raise ValueError(
            f"{corpus.part_of(path)} has {lines} lines and {begun['source']} {total}: "
            "it is the translation of something else"
        )
    return lines


def _begun_path(output: corpus.PathLike) -> Path:
    """Where it is written how a part was begun."""
    part = corpus.part_of(output)
    return part.with_name(part.name + ".json")


def _check_begun_alike(output: corpus.PathLike, now: dict[str, Any]) -> None:
    """Refuses to go on otherwise than a part was begun: half of it would be something else."""
    path = _begun_path(output)
    if not path.exists():
        return
    then = json.loads(path.read_text(encoding="utf-8"))
    differences = [f"{k} was {then.get(k)} and is {now[k]}" for k in now if then.get(k) != now[k]]
    if differences:
        raise ValueError(
            f"{corpus.part_of(output)} was begun otherwise, and cannot be gone on with so: "
            f"{'; '.join(differences)}"
        )


def _paired(
    lines: Iterator[str], starts: Iterator[str], prefixes: corpus.PathLike
) -> Iterator[tuple[str, str]]:
    """Each line with its prefix; their numbers show at the end, where a stream is read."""
    for line in lines:
        start = next(starts, None)
        if start is None:
            raise ValueError(f"{prefixes} has fewer lines than the source")
        yield line, start
    if next(starts, None) is not None:
        raise ValueError(f"{prefixes} has more lines than the source")


def _count_lines(source: corpus.PathLike | BinaryIO) -> int | None:
    """The lines of a file; None for what can be read only once."""
    if isinstance(source, (str, os.PathLike)) and Path(source).is_file():
        return corpus.count_lines(source)
    return None


def _cut_to_whole_lines(part: Path) -> int:
    """Cuts what was half written off a part, and counts the lines that are left."""
    if not part.exists():
        return 0
    with open(part, "r+b") as stream:
        lines = end = place = 0
        while block := stream.read(1 << 20):
            lines += block.count(b"\n")
            last = block.rfind(b"\n")
            end = place + last + 1 if last >= 0 else end
            place += len(block)
        stream.truncate(end)
    return lines


def _writer(file_format: str, n_best: int, alignments: bool) -> Callable[[int, Translation], str]:
    """What a line of the output says of a translation."""

    def as_json(number: int, translation: Translation) -> str:
        return json.dumps(_plain(translation), ensure_ascii=False, allow_nan=False) + "\n"

    def as_text(number: int, translation: Translation) -> str:
        lines = []
        hypotheses = [translation, *translation.alternatives] if n_best > 1 else [translation]
        for hypothesis in hypotheses:
            fields = [_one_line(hypothesis.text)]
            if n_best > 1:
                fields = [str(number), *fields, f"{hypothesis.score:.6f}"]
            if alignments:
                fields.append(pharaoh(hypothesis.alignment))
            lines.append(" ||| ".join(fields) + "\n")
        return "".join(lines)

    return as_json if file_format == "jsonl" else as_text


def _one_line(text: str) -> str:
    """What a model writes may hold a line break, and a line of a file may not."""
    return text.replace("\n", " ")


def _plain(translation: Translation) -> dict[str, Any]:
    fields = {
        name: getattr(translation, name)
        for name in ("text", "score", "raw_score", "hit_limit", "tokens", "alignment")
    }
    if not math.isfinite(translation.score):  # nothing satisfied what was asked
        fields["score"] = fields["raw_score"] = None
    if translation.alternatives:
        fields["alternatives"] = [_plain(one) for one in translation.alternatives]
    return fields


class _Shown:
    """Progress: a bar on a terminal, a line now and then elsewhere, nothing without a console."""

    def __init__(self, console: Console | None, total: int | None, done: int):
        self._console, self._total, self._done, self._first = console, total, done, done
        self._began = self._said = time.perf_counter()
        self._bar = None
        if console is not None and console.is_terminal:
            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("lines"),
                       TextColumn("{task.description}"), TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=console, transient=True, expand=True)
            self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "_Shown":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, lines: int) -> None:
        self._done += lines
        now = time.perf_counter()
        rate = (self._done - self._first) / max(now - self._began, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=f"{rate:,.1f}/s")
        elif self._console is not None and now - self._said >= LINE_SECONDS:
            self._said = now
            text = f"{self._done:,} lines, {rate:,.1f} a second"
            if self._total and rate:
                left = (self._total - self._done) / rate
                text = f"{text}, {left / 60:,.1f} min left of {self._total:,}"
            self._console.print(text)


def interact(
    translator: Translator,
    texts: Iterable[str],
    console: Console,
    *,
    show_attention: bool = False,
    **options: Any,
) -> None:
    """Translates each text as it comes, for someone at a terminal.

    Args:
        translator: a translator.
        texts: what is typed, as it is typed.
        console: where to write.
        show_attention: whether to show as a coloured table where the decoder looked.
        **options: of `Translator.translate`.
    """
    for text in texts:
        translation = translator.translate([text], details=True, **options)[0]
        console.print(translation.text, **AS_IT_IS)
        for other in translation.alternatives:
            console.print(f"  {other.score:.3f}  {other.text}", **AS_IT_IS)
        if show_attention and translation.token_ids:
            console.print(_attention_table(translator, text, translation))


def _attention_table(translator: Translator, text: str, translation: Translation) -> Table:
    """A row for each token written, a column for each token read, the darker the more."""
    sources, weights = translator.attention(text, translation)
    table = Table(box=None, pad_edge=False, padding=0)
    table.add_column("")
    for piece in sources:
        table.add_column(Text(piece), justify="center")
    for token, row in zip(translation.tokens, weights, strict=True):
        cells = [
            Text(f" {weight:.1f} "[:5], style=f"{'white' if weight > 0.5 else 'black'} "
                 f"on rgb({int(235 - 200 * weight)},{int(240 - 150 * weight)},255)")
            for weight in row
        ]  # fmt: skip
        table.add_row(Text(token + " "), *cells)
    return table


def typed(console: Console) -> Iterator[str]:
    """The lines that someone types, until the end of the input."""
    while True:
        try:
            yield console.input("> ")
        except EOFError:
            return
