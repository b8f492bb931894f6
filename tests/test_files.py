"""N lines in, N lines out, whatever happens on the way; with a stand-in for the translator."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from keras_aiayn import files
from keras_aiayn.decoding.settings import SearchSettings
from keras_aiayn.translator import Translation

pytestmark = pytest.mark.backend_free


class Backwards:
    """Stands in for a translator: every line backwards, blank ones empty."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.read = []

    def search_settings(self, **settings):
        return SearchSettings(**{k: v for k, v in settings.items() if v is not None})

    def translate(self, texts, *, progress=None, prefixes=None, n_best=1, **options):
        self.read += texts
        if progress:
            progress(len(texts))
        time.sleep(self.seconds)
        starts = prefixes or [""] * len(texts)
        return [
            Translation(start + text[::-1] if text.strip() else "", tokens=["x"] * len(text),
                        score=-1.5, alignment=[(0, 0)], hit_limit=text == "long",
                        alternatives=[Translation("other", score=-2.0)] * (n_best - 1))
            for start, text in zip(starts, texts, strict=True)
        ]  # fmt: skip


def translated(data: bytes, **options) -> bytes:
    output = io.BytesIO()
    files.translate_file(Backwards(), io.BytesIO(data), output, **options)
    return output.getvalue()


@given(st.binary(max_size=200), st.integers(1, 5))
def test_any_bytes_give_as_many_lines(data, chunk_size):
    output = translated(data, on_bad_bytes="replace", chunk_size=chunk_size)
    lines = data.count(b"\n") + (not data.endswith(b"\n") and data not in (b"", b"\xef\xbb\xbf"))
    assert output.count(b"\n") == lines and (output.endswith(b"\n") or not output)


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))))
def test_any_text_comes_back_in_its_line(lines):
    data = "".join(line + "\n" for line in lines).encode()
    output = translated(data).decode().split("\n")[:-1]
    expected = [line.removesuffix("\r").removeprefix("\ufeff" if not i else "") for i, line in
                enumerate(lines)]  # fmt: skip
    assert output == [line[::-1] if line.strip() else "" for line in expected]


def test_a_line_break_that_the_model_writes_is_none():
    class Breaking(Backwards):
        def translate(self, texts, **options):
            return [Translation("a\nb") for _ in texts]

    output = io.BytesIO()
    files.translate_file(Breaking(), io.BytesIO(b"1\n2\n"), output)
    assert output.getvalue() == b"a b\na b\n"


def test_formats_say_what_there_is(tmp_path):
    assert translated(b"ab\ncd\n", n_best=2) == (
        b"0 ||| ba ||| -1.500000\n0 ||| other ||| -2.000000\n"
        b"1 ||| dc ||| -1.500000\n1 ||| other ||| -2.000000\n"
    )
    assert translated(b"ab\n", alignments=True) == b"ba ||| 0-0\n"
    first, second = translated(b"ab\n\n", file_format="jsonl", n_best=2).decode().splitlines()
    assert json.loads(first)["text"] == "ba" and json.loads(first)["alternatives"][0]["score"] == -2
    assert json.loads(second)["text"] == ""


def test_prefixes_come_line_by_line(tmp_path):
    (tmp_path / "starts").write_text("x\n\nz\n")
    assert translated(b"ab\ncd\nef\n", prefixes=tmp_path / "starts") == b"xba\ndc\nzfe\n"
    for starts, message in (("x\n", "fewer lines"), ("x\n" * 4, "more lines")):
        (tmp_path / "starts").write_text(starts)
        with pytest.raises(ValueError, match=f"starts has {message} than the source"):
            translated(b"ab\ncd\nef\n", prefixes=tmp_path / "starts")
    (tmp_path / "in").write_text("ab\ncd\n")
    with pytest.raises(ValueError, match="Received: 4 lines, where .*in has 2"):
        files.translate_file(
            Backwards(), tmp_path / "in", tmp_path / "out", prefixes=tmp_path / "starts"
        )
    assert not (tmp_path / "out.part").exists()


def test_a_part_is_gone_on_with_after_its_last_whole_line(tmp_path):
    source, output, part = (tmp_path / name for name in ("in", "out", "out.part"))
    source.write_text("ab\ncd\nef\ngh\n")
    part.write_text("ba\ndc\nf")
    translator = Backwards()
    report = files.translate_file(translator, source, output, resume=True)
    assert output.read_text() == "ba\ndc\nfe\nhg\n" and not part.exists()
    assert translator.read == ["ef", "gh"]
    assert (report.skipped, report.lines) == (2, 2)
    assert files.translate_file(translator, source, output, resume=True).lines == 0  # it is whole
    assert translator.read == ["ef", "gh"]


def test_a_part_of_something_else_is_not_gone_on_with(tmp_path):
    source, output, part = (tmp_path / name for name in ("in", "out", "out.part"))
    source.write_text("ab\n")
    part.write_text("1\n2\n")
    with pytest.raises(ValueError, match="has 2 lines and .*in 1"):
        files.translate_file(Backwards(), source, output, resume=True)
    assert part.read_text() == "1\n2\n"
    part.write_text("")
    (tmp_path / "out.part.json").write_text(json.dumps({"source": str(source), "beam_size": 9}))
    with pytest.raises(ValueError, match="beam_size was 9 and is 4"):
        files.translate_file(Backwards(), source, output, resume=True)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"begun_with": {"models": ["a"]}}, {"begun_with": {"models": ["b"]}}, "models was"),
        ({}, {"split_long": 9}, "split_long was None and is 9"),
        ({}, {"prefixes": "in"}, "prefixes was None"),
        ({}, {"on_bad_bytes": "replace"}, "on_bad_bytes was error"),
    ],
)
def test_a_part_is_gone_on_with_only_as_it_was_begun(tmp_path, monkeypatch, before, now, message):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("one\ntwo\n")
    with pytest.raises(OSError):
        files.translate_file(Failing(after=1), "in", "out", chunk_size=1, **before)
    part = Path("out.part").read_bytes()
    with pytest.raises(ValueError, match=message):
        files.translate_file(Backwards(), "in", "out", resume=True, **{**before, **now})
    assert Path("out.part").read_bytes() == part == b"eno\n"
    files.translate_file(Backwards(), "in", "out", resume=True, **before)
    assert Path("out").read_text() == "eno\nowt\n"


class Failing(Backwards):
    """Fails as a full disk does."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def translate(self, texts, **options):
        if not self.left:
            raise OSError(28, "No space left on device")
        self.left -= 1
        return super().translate(texts, **options)


def test_what_is_read_is_not_written_over(tmp_path):
    for name in ("in", "out.part"):
        (tmp_path / name).write_text("one\n")
    for source, output in (("in", "in"), ("out.part", "out")):
        with pytest.raises(ValueError, match="would be written over"):
            files.translate_file(Backwards(), tmp_path / source, tmp_path / output)
        assert (tmp_path / source).read_text() == "one\n"


def test_a_whole_output_of_another_source_is_said(tmp_path):
    (tmp_path / "in").write_text("one\ntwo\n")
    (tmp_path / "out").write_text("eno\n")
    with pytest.raises(ValueError, match="is whole and has 1 lines, where .* has 2"):
        files.translate_file(Backwards(), tmp_path / "in", tmp_path / "out", resume=True)


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    (tmp_path / "in").write_text("one\ntwo\n")
    os.mkfifo(tmp_path / "out")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "out").read_bytes()))
    reader.start()
    files.translate_file(Backwards(), tmp_path / "in", tmp_path / "out")
    reader.join(timeout=30)
    assert read == [b"eno\nowt\n"] and (tmp_path / "out").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_what_can_be_read_once_is_translated(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("ab\ncd\n"))
    writer.start()
    files.translate_file(Backwards(), tmp_path / "pipe", tmp_path / "out")
    writer.join()
    assert (tmp_path / "out").read_text() == "ba\ndc\n"


def test_without_resume_a_part_is_begun_anew(tmp_path):
    (tmp_path / "in").write_text("ab\n")
    (tmp_path / "out.part").write_text("left from before\n")
    files.translate_file(Backwards(), tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "ba\n"


def test_a_failure_keeps_what_was_done_and_no_output(tmp_path):
    class Failing(Backwards):
        def translate(self, texts, **options):
            if "cd" in texts:
                raise ValueError("no more")
            return super().translate(texts, **options)

    (tmp_path / "in").write_text("ab\ncd\n")
    with pytest.raises(ValueError, match="no more"):
        files.translate_file(Failing(), tmp_path / "in", tmp_path / "out", chunk_size=1)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.part").read_text() == "ba\n"


def killed_run(folder):
    """Translates slowly, in a process that is killed."""
    translator = Backwards(0.02)
    files.translate_file(translator, f"{folder}/in", f"{folder}/out", chunk_size=3, resume=True)


def test_killed_at_any_moment_it_goes_on_and_loses_nothing(tmp_path):
    lines = [f"line {i}" for i in range(300)]
    (tmp_path / "in").write_text("".join(line + "\n" for line in lines))
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['killed_run'](sys.argv[2])"
    command = [sys.executable, "-c", code, __file__, str(tmp_path)]
    seen = []
    for _ in range(3):
        process = subprocess.Popen(command)
        before = seen[-1] if seen else 0
        while process.poll() is None:
            part = tmp_path / "out.part"
            done = part.read_bytes().count(b"\n") if part.exists() else 0
            if done >= before + 30:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        process.wait()
        seen.append((tmp_path / "out.part").read_bytes().count(b"\n"))
    assert 0 < seen[0] < seen[1] < seen[2] < 300
    subprocess.run(command, check=True)
    assert (tmp_path / "out").read_text().splitlines() == [line[::-1] for line in lines]


def test_progress_is_said_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_SECONDS", 0.0)
    (tmp_path / "in").write_text("ab\n" * 10)
    said = io.StringIO()
    files.translate_file(
        Backwards(0.01), tmp_path / "in", tmp_path / "out", chunk_size=5, console=Console(file=said)
    )
    assert "5 lines" in said.getvalue() and "min left of 10" in said.getvalue()


def test_a_terminal_gets_a_bar(tmp_path):
    (tmp_path / "in").write_text("ab\n" * 10)
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=80)
    files.translate_file(Backwards(0.01), tmp_path / "in", tmp_path / "out", console=console)
    assert "10/10" in said.getvalue()


def test_the_report_counts(tmp_path):
    output = io.BytesIO()
    report = files.translate_file(Backwards(), io.BytesIO(b"ab\nlong\n\n"), output)
    assert (report.lines, report.target_tokens, report.hit_limit) == (3, 6, 1)
    assert "3 lines, 6 target tokens" in str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file_format": "xml"}, "text or jsonl. Received: 'xml'"),
        ({"resume": True}, "only a file can be gone on with"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        translated(b"", **options)


def test_n_best_text_is_not_gone_on_with(tmp_path):
    with pytest.raises(ValueError, match="resume takes --format jsonl"):
        files.translate_file(Backwards(), io.BytesIO(b""), tmp_path / "out", resume=True, n_best=2)


def test_what_is_typed_is_translated_as_it_comes():
    said = io.StringIO()
    files.interact(Backwards(), iter(["ab", "cd"]), Console(file=said))
    assert said.getvalue() == "ba\ndc\n"
