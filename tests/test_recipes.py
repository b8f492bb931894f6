"""The recipes from their downloads to BLEU, with a server on this machine and a cut-down corpus.

The archives have the names, the folders and the formats of the real ones.
"""

import gzip
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from keras_aiayn.data import tasks

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--steps", "12", "--config", "tiny", "--average", "1", "--tokens-per-batch", "2400",
         "--set", "num_layers=1", "--set", "hidden_dim=32", "--set", "warmup_steps=4",
         "--set", "max_shapes=1", "--set", "evaluate_every=0", "--set", "accumulation=2",
         "--set", "checkpoint_every=3", "--set", "dtype=float32"]  # fmt: skip


def lines(count: int, side: int, first: int = 0) -> bytes:
    pairs = tasks.written_dates_and_numbers(first + count, seed=1)[first:]
    return "".join(pair[side] + "\n" for pair in pairs).encode()


def sgml(count: int, side: int) -> bytes:
    body = b"".join(
        b'<seg id="%d">%s &amp; &quot;so&quot;</seg>\n' % (i, line)
        for i, line in enumerate(lines(count, side).splitlines(), 1)
    )
    return b'<refset setid="newstest2014"><doc>\n<p>\n' + body + b"</p></doc></refset>\n"


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def wmt(language: str, pair: str, newstest: str) -> dict[str, bytes]:
    """What the servers of WMT hold, by path."""

    def corpus(stem: str, first: int) -> dict[str, bytes]:
        return {f"{stem}.{side}": lines(60, i, first) for i, side in enumerate(("en", language))}

    return {
        "/wmt13/training-parallel-europarl-v7.tgz": tar(corpus(f"training/europarl-v7.{pair}", 0)),
        "/wmt13/training-parallel-commoncrawl.tgz": tar(corpus(f"commoncrawl.{pair}", 60)),
        "/wmt13/training-parallel-un.tgz": tar(corpus(f"un/undoc.2000.{pair}", 120)),
        "/wmt14/training-parallel-nc-v9.tgz": tar(
            corpus(f"training/news-commentary-v9.{pair}", 180)
        ),
        "/wmt10/training-giga-fren.tar": tar(
            {
                f"{name}.gz": gzip.compress(text)
                for name, text in corpus("giga-fren.release2.fixed", 240).items()
            },
            "w",
        ),
        "/wmt14/test-full.tgz": tar(
            {
                f"test-full/newstest2014-{newstest}-src.en.sgm": sgml(5, 0),
                f"test-full/newstest2014-{newstest}-ref.{language}.sgm": sgml(5, 1),
            }
        ),
        "/wmt17/translation-task/dev.tgz": tar(
            {f"dev/newstest2013.{side}": lines(4, i) for i, side in enumerate(("en", language))}
        ),
    }


MULTI30K = {
    f"/{split}.{language}.gz": gzip.compress(lines(count, side))
    for split, count in (("train", 200), ("val", 4), ("test_2016_flickr", 5))
    for side, language in enumerate(("en", "de"))
}
TATOEBA = {
    "/de-en.txt.zip": zipped(
        {
            f"Tatoeba.de-en.{language}": lines(300, side)
            for side, language in enumerate(["en", "de"])
        }
    )
}
RECIPES = {
    "multi30k": (MULTI30K, ("MULTI30K",)),
    "tatoeba": (TATOEBA, ("TATOEBA",)),
    "wmt14_en_de": (wmt("de", "de-en", "deen"), ("STATMT", "STATMT_DATA")),
    "wmt14_en_fr": (wmt("fr", "fr-en", "fren"), ("STATMT", "STATMT_DATA")),
}


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes by path, from any byte on; may break off each file in its middle, once."""

    def __init__(self, files: dict[str, bytes], break_off: bool = False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.break_off = files, break_off
        self.broken: set[str] = set()
        self.asked: list[tuple[str, int]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.server.asked.append((self.path, first))
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if self.server.break_off and self.path not in self.server.broken:
            self.server.broken.add(self.path)
            self.wfile.write(content[first : len(content) // 2])
        else:
            self.wfile.write(content[first:])
        self.close_connection = True

    def log_message(self, *_) -> None:
        pass


def start(name: str, server: Server, work: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {variable: server.address for variable in RECIPES[name][1]}
    environment |= {"WORK": str(work), "VOCABULARY": "330", "PATH": os.environ["PATH"]}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "AIAYN_DATA"}
    return subprocess.run(
        ["bash", EXAMPLES / name / "run.sh", *SMALL, *options],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_from_its_downloads_to_bleu_and_on_after_a_break(name, tmp_path):
    server = Server(RECIPES[name][0], break_off=True)
    work = tmp_path / "work"
    starts = 0
    while (done := start(name, server, work)).returncode and starts <= len(server.files):
        starts += 1
        assert "did not come whole" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert starts == len(server.broken) > 0  # a start for each file that broke off
    resumed = {path for path, first in server.asked if first > 0}
    assert resumed == server.broken
    assert "BLEU " in done.stdout and "nrefs:1" in done.stdout
    assert ("paper BLEU" in done.stdout) == (name != "tatoeba")
    sums = (work / "SHA256SUMS").read_text().splitlines()
    assert len(sums) == len(server.broken)

    asked = len(server.asked)
    again = start(name, server, work)  # all is there: only the scores are made again
    assert again.returncode == 0 and again.stdout == done.stdout
    assert len(server.asked) == asked and "trained" not in again.stderr


def test_segments_are_plain_text_again(tmp_path):
    server = Server(RECIPES["wmt14_en_de"][0])
    done = start("wmt14_en_de", server, tmp_path / "work", "--steps", "0")
    assert done.returncode == 2 and "`steps` must be positive" in done.stderr
    text = (tmp_path / "work" / "newstest2014.de").read_text(encoding="utf-8").splitlines()
    assert text == [line + ' & "so"' for line in lines(5, 1).decode().splitlines()]


def test_tatoeba_keeps_all_translations_of_a_sentence_on_one_side(tmp_path):
    server = Server(TATOEBA)
    start("tatoeba", server, tmp_path / "work", "--steps", "0")
    read = {
        name: (tmp_path / "work" / name).read_text(encoding="utf-8").splitlines()
        for name in ("train.en", "train.de", "dev.en", "dev.de")
    }
    assert len(read["train.en"]) == len(read["train.de"])
    assert len(read["dev.en"]) == len(read["dev.de"]) > 0
    assert not set(read["train.en"]) & set(read["dev.en"])
    pairs = set(zip(lines(300, 0).decode().splitlines(), lines(300, 1).decode().splitlines(),
                    strict=True))  # fmt: skip
    assert pairs == {
        pair
        for split in ("train", "dev")
        for pair in zip(read[f"{split}.en"], read[f"{split}.de"], strict=True)
    }


def test_another_file_than_the_first_download_is_refused(tmp_path):
    server = Server(dict(MULTI30K))
    work = tmp_path / "work"
    assert start("multi30k", server, work, "--steps", "0").returncode == 2
    (work / "val.en.gz").unlink()
    server.files["/val.en.gz"] = gzip.compress(b"other\n")
    done = start("multi30k", server, work)
    assert done.returncode == 1 and "val.en.gz is not what was downloaded first" in done.stderr
    assert not (work / "val.en.gz").exists() and (work / "val.en.gz.other").exists()
