r"""The line rules: only \n ends a record, files are aligned, outputs are whole."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_aiayn.data import corpus

pytestmark = pytest.mark.backend_free

# Every character that some reader of lines takes for a line's end, and \n does not.
NOT_BREAKS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"

line = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(NOT_BREAKS + "\ufeff"))
).map(lambda text: text.replace("\n", " "))
# What reading takes away: a mark before the first line, one \r before the end of any.
kept_whole = line.filter(lambda text: not text.endswith("\r") and not text.startswith("\ufeff"))


def read(data: bytes, **options) -> list[str]:
    return list(corpus.read_lines(io.BytesIO(data), **options))


@given(st.lists(kept_whole))
def test_lines_come_back_as_they_were_written(lines):
    assert read("".join(text + "\n" for text in lines).encode()) == lines


@given(st.lists(kept_whole, min_size=1), kept_whole.filter(bool))
def test_the_last_line_needs_no_end(lines, last):
    assert read("".join(text + "\n" for text in lines).encode() + last.encode()) == [*lines, last]


@given(st.lists(kept_whole))
def test_windows_line_ends_and_a_byte_order_mark_are_dropped(lines):
    assert read("\ufeff".encode() + "".join(text + "\r\n" for text in lines).encode()) == lines


def test_one_carriage_return_is_dropped_and_no_more():
    assert read(b"a\r\r\nb\rc\n\r\n") == ["a\r", "b\rc", ""]


def test_a_byte_order_mark_elsewhere_is_text():
    mark = "\ufeff".encode()
    assert read(b"a" + mark + b"\n" + mark + b"b\n") == ["a\ufeff", "\ufeffb"]


@given(st.binary(max_size=60))
def test_counting_agrees_with_reading(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    assert corpus.count_lines(path) == len(list(corpus.read_lines(path, "replace")))


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\n", b"\xef\xbb\xbf\n", b"a", b"a\n\n"])
def test_counting_agrees_with_reading_at_the_edges(tmp_path, data):
    path = tmp_path / "edge"
    path.write_bytes(data)
    assert corpus.count_lines(path) == len(list(corpus.read_lines(path)))


def test_counting_sees_lines_across_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_BLOCK", 4)
    path = tmp_path / "long"
    for text in (b"abc\ndef\n", b"abcd", b"abcdefgh\n", b"abc\ndefgh"):
        path.write_bytes(text)
        assert corpus.count_lines(path) == len(list(corpus.read_lines(path)))


def test_bad_bytes_are_an_error_that_names_file_and_line(tmp_path):
    path = tmp_path / "latin1.de"
    path.write_bytes("gut\nschön\n".encode("latin-1"))
    lines = corpus.read_lines(path)
    assert next(lines) == "gut"
    with pytest.raises(ValueError, match=r"latin1\.de, line 2, is not UTF-8") as error:
        next(lines)
    assert "\n" not in str(error.value)
    assert list(corpus.read_lines(path, on_bad_bytes="replace")) == ["gut", "sch\ufffdn"]


def test_an_unknown_way_with_bad_bytes_is_refused():
    with pytest.raises(ValueError, match="`on_bad_bytes` must be .* Received: 'ignore'"):
        read(b"", on_bad_bytes="ignore")


def test_pairs_are_read_in_order_from_several_files(tmp_path):
    for name, text in {"a.en": "1\n2\n", "a.de": "eins\nzwei", "b.en": "3", "b.de": "drei"}.items():
        (tmp_path / name).write_text(text)
    pairs = corpus.read_pairs(
        [tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.de", tmp_path / "b.de"]
    )
    assert list(pairs) == [("1", "eins"), ("2", "zwei"), ("3", "drei")]
    assert list(corpus.read_pairs(tmp_path / "b.en", str(tmp_path / "b.de"))) == [("3", "drei")]


def test_files_of_unequal_length_are_refused_before_a_pair_is_read(tmp_path):
    (tmp_path / "a.en").write_text("1\n2\n3\n")
    (tmp_path / "a.de").write_text("eins\nzwei\u2028drei\n")
    with pytest.raises(ValueError, match=r"a\.en with 3 lines and .*a\.de with 2"):
        corpus.read_pairs(tmp_path / "a.en", tmp_path / "a.de")


def test_every_source_file_needs_a_target_file(tmp_path):
    with pytest.raises(ValueError, match="Received: 2 source and 1 target files"):
        corpus.read_pairs([tmp_path / "a", tmp_path / "b"], [tmp_path / "c"])


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*nowhere"):
        corpus.read_pairs(tmp_path / "nowhere", tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        corpus.count_lines(tmp_path)


@given(st.lists(kept_whole))
def test_a_written_file_of_text_reads_back(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "written"
    with corpus.whole_file(path, "w") as stream:
        stream.writelines(text + "\n" for text in lines)
    assert list(corpus.read_lines(path)) == lines


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        with corpus.whole_file(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with corpus.whole_file(path) as stream:
        stream.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_can_be_kept_and_gone_on_from(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(RuntimeError):
        with corpus.whole_file(path, "w", keep_part=True) as stream:
            stream.write("one\n")
            raise RuntimeError
    assert (tmp_path / "out.part").read_text() == "one\n"
    with corpus.whole_file(path, "a", keep_part=True) as stream:
        stream.write("two\n")
    assert path.read_text() == "one\ntwo\n"


def test_a_file_is_opened_to_write_only(tmp_path):
    with pytest.raises(ValueError, match="`mode` must be .* Received: 'r'"):
        with corpus.whole_file(tmp_path / "x", "r"):
            pass


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "out"
    with pytest.raises(KeyboardInterrupt):
        with corpus.whole_folder(path) as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    (path.parent / "out.part").mkdir()  # as a killed run leaves it
    (path.parent / "out.part" / "old").write_text("old")
    path.mkdir()
    with corpus.whole_folder(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("whole")
    assert [file.name for file in path.iterdir()] == ["inner"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("way", ["link", "here"])
def test_an_empty_folder_is_filled_where_it_stands(tmp_path, monkeypatch, way):
    home = tmp_path / "home"
    home.mkdir()
    inode = home.stat().st_ino
    (home / ".part").mkdir()  # as a killed run leaves it
    (home / ".part" / "old").write_text("old")
    if way == "link":
        path = tmp_path / "link"
        path.symlink_to(home)
    else:
        monkeypatch.chdir(home)
        path = Path(".")
    with pytest.raises(KeyboardInterrupt):
        with corpus.whole_folder(path) as folder:
            (folder / "meta.json").write_text("half")
            raise KeyboardInterrupt
    assert not list(home.iterdir())
    with corpus.whole_folder(path) as folder:
        (folder / "meta.json").write_text("{}")
        (folder / "inner").mkdir()
    assert sorted(entry.name for entry in home.iterdir()) == ["inner", "meta.json"]
    assert home.stat().st_ino == inode  # a mounted folder can be neither moved nor removed


def test_a_pipe_is_no_corpus(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no file on disk"):
        corpus.read_corpora(tmp_path / "pipe", tmp_path / "pipe")


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(FileExistsError, match="is not an empty folder"):
            with corpus.whole_folder(taken):
                pass
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.corpus
def test_the_corpora_are_aligned(corpora):
    for folder, split, sides, pairs in [
        ("multi30k", "train", ("en", "de"), 29_000),
        ("multi30k", "val", ("en", "fr"), 1_014),
        ("tatoeba_ende", "train", ("en", "de"), 165_378),
    ]:
        paths = [corpora / folder / f"{split}.{side}" for side in sides]
        assert sum(1 for _ in corpus.read_pairs(*paths)) == pairs
