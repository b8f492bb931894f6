r"""Aligned plain text in, whole files out.

One rule of lines everywhere: only ``\n`` ends a record. Python's ``str.splitlines`` and universal
newlines also break at U+2028, U+0085, a lone ``\r`` and others, which real corpora contain inside
sentences; two files read that way fall out of step without an error.
"""

import contextlib
import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

PathLike = str | os.PathLike[str]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK = 1 << 20


def read_lines(source: PathLike | BinaryIO, on_bad_bytes: str = "error") -> Iterator[str]:
    r"""Yields the lines of a UTF-8 file, without their ends.

    Only ``\n`` ends a line, and the last line may lack it. One ``\r`` before it is dropped, and
    so is a byte order mark at the start of the file. Any other character is text.

    Args:
        source: A path, or a stream of bytes such as `sys.stdin.buffer`.
        on_bad_bytes: `"error"` stops at the first line that is not UTF-8; `"replace"` puts U+FFFD
            in the place of what cannot be read.

    Returns:
        An iterator of strings.

    Raises:
        ValueError: If a line is not UTF-8, naming the file and the line.

    Example:
    >>> import io
    >>> list(read_lines(io.BytesIO("one\u2028still one\r\ntwo".encode())))
    ['one\u2028still one', 'two']
    """
    if on_bad_bytes not in ("error", "replace"):
        raise ValueError(f"`on_bad_bytes` must be 'error' or 'replace'. Received: {on_bad_bytes!r}")
    if isinstance(source, (str, os.PathLike)):
        return _lines_of(source, on_bad_bytes)
    return _decoded(source, str(getattr(source, "name", "the input")), on_bad_bytes)


def _lines_of(path: PathLike, on_bad_bytes: str) -> Iterator[str]:
    with _open_to_read(path) as stream:
        yield from _decoded(stream, os.fspath(path), on_bad_bytes)


def _decoded(stream: Iterable[bytes], name: str, on_bad_bytes: str) -> Iterator[str]:
    errors = "strict" if on_bad_bytes == "error" else "replace"
    for number, record in enumerate(stream, start=1):  # a binary stream breaks at \n and only there
        if number == 1 and record.startswith(_BYTE_ORDER_MARK):
            record = record.removeprefix(_BYTE_ORDER_MARK)
            if not record:  # nothing but the mark: a file without lines
                return
        try:
            yield record.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}, is not UTF-8 (byte {error.start + 1} of the line): "
                "mend it, or turn the file into UTF-8, such as by iconv"
            ) from None


def check_readable(path: PathLike) -> None:
    """Refuses a file that is not there, before any work; one that is a pipe stays unread."""
    if not Path(path).exists() or Path(path).is_dir():
        _open_to_read(path).close()


def check_writable(path: PathLike) -> None:
    """Refuses a file that cannot be made, before any work."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}")


def check_apart(source: PathLike, output: PathLike) -> None:
    """Refuses to write over what is being read, or where its output stands until it is whole."""
    for written in (Path(output), part_of(output)):
        if written.is_file() and written.samefile(source):
            raise ValueError(
                f"{output} would be written over {source}, which is read: name another"
            )


def sha256(path: PathLike) -> str:
    """The hash of a file, in hexadecimal."""
    with _open_to_read(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def count_lines(path: PathLike) -> int:
    r"""Counts the lines that `read_lines` would yield, faster and without decoding.

    Args:
        path: The file.

    Returns:
        The number of lines; a last line without ``\n`` counts.
    """
    lines = 0
    with _open_to_read(path) as stream:
        block = last = stream.read(_BLOCK).removeprefix(_BYTE_ORDER_MARK)
        while block:
            lines += block.count(b"\n")
            last, block = block, stream.read(_BLOCK)
    return lines + (last != b"" and not last.endswith(b"\n"))


def read_pairs(
    source_paths: PathLike | Sequence[PathLike], target_paths: PathLike | Sequence[PathLike]
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) lines of aligned files, one pair of files after the other.

    Args and errors are those of `read_corpora`.

    Returns:
        An iterator of pairs of strings.
    """
    return itertools.chain.from_iterable(read_corpora(source_paths, target_paths))


def read_corpora(
    source_paths: PathLike | Sequence[PathLike], target_paths: PathLike | Sequence[PathLike]
) -> list[Iterator[tuple[str, str]]]:
    """The (source, target) lines of each corpus, which is a pair of aligned files.

    The lines are counted before anything else is done, when this function is called and not at
    the first pair: files of different length are not aligned, and no pair of theirs is to be
    trusted.

    Args:
        source_paths: A path, or several.
        target_paths: As many.

    Returns:
        For each pair of files an iterator of pairs of strings.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If two files that belong together differ in their number of lines, or one is a
            pipe.
    """
    sources, targets = path_list(source_paths), path_list(target_paths)
    if len(sources) != len(targets) or not sources:
        raise ValueError(
            "every source file needs one target file. "
            f"Received: {len(sources)} source and {len(targets)} target files"
        )
    for path in (*sources, *targets):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is no file on disk, and a corpus is read more than once")
    for source, target in zip(sources, targets, strict=True):
        source_lines, target_lines = count_lines(source), count_lines(target)
        if source_lines != target_lines:
            raise ValueError(
                "aligned files must have the same number of lines. "
                f"Received: {source} with {source_lines} lines and {target} with {target_lines}"
            )
    return [
        zip(read_lines(source), read_lines(target), strict=True)
        for source, target in zip(sources, targets, strict=True)
    ]


def path_list(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """The paths as a list, where one may stand for itself."""
    return [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(p) for p in paths]


def _open_to_read(path: PathLike) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {os.fspath(path)}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{os.fspath(path)} is a folder, not a file of text") from None


@contextlib.contextmanager
def whole_file(path: PathLike, mode: str = "wb", keep_part: bool = False) -> Iterator[IO]:
    r"""Opens a file to write that appears whole or not at all.

    The text goes to PATH.part, which takes the name PATH when the block ends without an error.
    Text is written as UTF-8 with ``\n`` as it stands.

    Args:
        path: The file to be. One that exists is replaced, at the end.
        mode: `"wb"` or `"w"`; `"ab"` or `"a"` go on from a part that an earlier run left.
        keep_part: Whether PATH.part stays after an error, to go on from.

    Yields:
        The open file.
    """
    if mode not in ("wb", "w", "ab", "a"):
        raise ValueError(f"`mode` must be 'wb', 'w', 'ab' or 'a'. Received: {mode!r}")
    part = part_of(path)
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
    try:
        with open(part, mode, encoding=encoding, newline=newline) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except BaseException:  # Ctrl-C too
        if not keep_part:
            part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_folder(path: PathLike) -> Iterator[Path]:
    """Makes a folder that appears whole or not at all.

    Args:
        path: The folder to be; it must not exist, or be empty.

    Yields:
        The folder to write in, PATH.part, which takes the name PATH when the block ends without
        an error; or PATH/.part where PATH exists, for it may be a mounted one or the present one
        and has to stay. What a killed run left there is removed first.

    Raises:
        FileExistsError: If `path` is a file, or a folder that holds something.
    """
    path = Path(path).resolve()
    inside = path / ".part"
    part = inside if path.is_dir() else part_of(path)
    if path.is_file() or (path.is_dir() and any(entry != inside for entry in path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty folder: name another output")
    for left in (inside, part_of(path)):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for file in part.rglob("*"):
            if file.is_file():
                with open(file, "r+b") as stream:
                    os.fsync(stream.fileno())
        if part == inside:
            # By the file of this kind a reader knows the folder: it comes last.
            for entry in sorted(part.iterdir(), key=lambda entry: entry.suffix == ".json"):
                os.replace(entry, path / entry.name)
            part.rmdir()
        else:
            os.replace(part, path)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(part, ignore_errors=True)
        raise


def part_of(path: PathLike) -> Path:
    """Where a file or folder stands until it is whole."""
    path = Path(path)
    return path.with_name(path.name + ".part")
