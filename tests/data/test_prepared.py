"""A corpus on disk holds what the text said, whole or not at all, and says what it dropped."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from keras_aiayn.data import prepared
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.tokenizer import ByteTokenizer, SentencePieceTokenizer

pytestmark = pytest.mark.backend_free

WHO = [("a man", "ein Mann"), ("the girl", "das Mädchen"), ("an old woman", "eine alte Frau")]
DOES = [("paints", "malt"), ("looks for", "sucht"), ("follows", "verfolgt")]
WHAT = [("a dog", "einen Hund"), ("the bicycle", "das Fahrrad"), ("a ball", "einen Ball")]
PAIRS = [
    tuple(f"{who[side]} {does[side]} {what[side]}." for side in (0, 1))
    for who in WHO
    for does in DOES
    for what in WHAT
]


def write_text(folder: Path, name: str, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for path, side in zip(paths, zip(*pairs, strict=True) if pairs else ((), ()), strict=True):
        path.write_bytes("".join(line + "\n" for line in side).encode())
    return paths


@pytest.fixture
def train(tmp_path) -> tuple[Path, Path]:
    return write_text(tmp_path, "train", PAIRS)


NO_VALID = (None, None)
SMALL = {"vocabulary_size": 330}


def ids_of(split: prepared.Split, side: str) -> list[list[int]]:
    tokens, offsets = getattr(split, f"{side}_tokens"), getattr(split, f"{side}_offsets")
    return [tokens[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]


def texts(data: prepared.Prepared) -> list[tuple[str, str]]:
    sources = data.source_tokenizer.decode(ids_of(data.train, "source"))
    targets = data.target_tokenizer.decode(ids_of(data.train, "target"))
    return list(zip(sources, targets, strict=True))


def test_each_corpus_keeps_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "_CHUNK", 4)
    parts = [PAIRS[:5], [("", "leer"), *PAIRS[5:7]], PAIRS[7:]]
    files = [write_text(tmp_path, f"train{i}", part) for i, part in enumerate(parts)]
    data = prepared.write(*zip(*files, strict=True), *NO_VALID, tmp_path / "data", **SMALL)
    assert data.corpus_sizes == [5, 2, len(PAIRS) - 7]
    assert texts(data) == PAIRS


@pytest.mark.parametrize("chunk", [1, 4, 8192])
def test_what_is_written_is_what_was_read(tmp_path, train, chunk, monkeypatch):
    monkeypatch.setattr(prepared, "_CHUNK", chunk)
    valid = write_text(tmp_path, "valid", PAIRS[:5])
    data = prepared.write(*train, *valid, tmp_path / "data", **SMALL)
    assert data.folder == tmp_path / "data"
    assert texts(data) == PAIRS
    assert len(data.train) == len(PAIRS)
    assert len(data.valid) == 5
    assert data.source_tokenizer is data.target_tokenizer
    assert data.source_tokenizer.vocabulary_size == 330
    assert data.train.source_tokens.dtype == np.uint16
    assert isinstance(data.train.source_tokens, np.memmap)
    for side in ("source", "target"):
        lengths = getattr(data.train, f"{side}_lengths")()
        assert lengths.dtype == np.int32
        assert lengths.tolist() == [len(ids) + 1 for ids in ids_of(data.train, side)]
    assert list(zip(data.valid.source_texts(), data.valid.target_texts(), strict=True)) == PAIRS[:5]
    with pytest.raises(ValueError, match="the texts of the split 'train' were not kept"):
        data.train.source_texts()


def test_equal_text_gives_equal_fingerprints(tmp_path, train):
    one = prepared.write(*train, *NO_VALID, tmp_path / "one", **SMALL, num_threads=1)
    same = prepared.write(*train, *NO_VALID, tmp_path / "same", **SMALL, num_threads=3)
    assert one.fingerprint == same.fingerprint == prepared.open(tmp_path / "one").fingerprint
    assert one.meta == same.meta
    shorter = prepared.write(*train, *NO_VALID, tmp_path / "x", vocabulary_size=329)
    assert shorter.fingerprint != one.fingerprint


def test_training_pairs_are_dropped_by_rule_and_counted_by_reason(tmp_path):
    bad = [
        ("", "leer"),
        ("blank", " \u3000"),
        ("word " * 40, "Wort " * 40),  # too long on both sides
        ("short", "lang " * 30),  # too long on one
        ("a", "xxxxxxxxxxxxxxxxxx"),  # 2 and 19 tokens with EOS
    ]
    source, target = write_text(tmp_path, "train", [*bad[:3], *PAIRS, *bad[3:]])
    lines = []
    data = prepared.write(
        source,
        target,
        *NO_VALID,
        tmp_path / "data",
        tokenizer="bytes",
        max_length=60,
        progress=lines.append,
    )
    assert texts(data) == PAIRS
    split = data.meta["splits"]["train"]
    assert split["dropped"] == {"empty": 2, "too_long": 2, "length_ratio": 1}
    assert (split["read"], split["pairs"]) == (len(PAIRS) + 5, len(PAIRS))
    assert "27 of 32 pairs kept; dropped: empty 2, too_long 2, length_ratio 1" in lines[-1]


@pytest.mark.parametrize(("longest", "kept"), [(6, 2), (5, 1)])
def test_the_limit_of_length_counts_eos(tmp_path, longest, kept):
    text = write_text(tmp_path, "train", [("abcd", "abcd"), ("abcd", "abcde")])
    data = prepared.write(
        *text, *NO_VALID, tmp_path / "data", tokenizer="bytes", max_length=longest
    )
    assert len(data.train) == kept


@pytest.mark.parametrize(("ratio", "kept"), [(2.0, 2), (1.99, 1)])
def test_the_limit_of_the_ratio_is_inclusive(tmp_path, ratio, kept):
    text = write_text(tmp_path, "train", [("ab", "ab"), ("ab", "abcde")])  # 3 and 6 with EOS
    data = prepared.write(
        *text, *NO_VALID, tmp_path / "data", tokenizer="bytes", max_length_ratio=ratio
    )
    assert len(data.train) == kept


def test_no_validation_pair_is_dropped(tmp_path, train):
    lines = [("", "leer"), ("x " * 400, "y"), ("a\u2028b  c", "  d\re "), ("last", "")]
    valid = write_text(tmp_path, "valid", lines)
    data = prepared.write(*train, *valid, tmp_path / "data", **SMALL)
    assert list(zip(data.valid.source_texts(), data.valid.target_texts(), strict=True)) == lines
    assert data.valid.source_lengths()[0] == data.valid.target_lengths()[3] == 1
    assert data.meta["splits"]["valid"]["pairs"] == 4


def test_vocabularies_can_be_separate(tmp_path, train):
    data = prepared.write(
        *train, *NO_VALID, tmp_path / "data", separate_vocabularies=True, vocabulary_size=310
    )
    assert data.source_tokenizer is not data.target_tokenizer
    assert data.source_tokenizer.fingerprint != data.target_tokenizer.fingerprint
    assert texts(data) == PAIRS
    assert data.meta["vocabulary_sizes"] == [310, 310]


def test_tokens_of_large_vocabularies_take_four_bytes(tmp_path, train, monkeypatch):
    class LargeTokenizer(ByteTokenizer):
        vocabulary_size = 70_000

        def encode(self, texts, num_threads=1):
            return [[69_000 + i for i in ids] for ids in super().encode(texts)]

    monkeypatch.setitem(tokenizers.KINDS, "bytes", LargeTokenizer)
    data = prepared.write(*train, *NO_VALID, tmp_path / "data", tokenizer="bytes")
    assert data.train.target_tokens.dtype == np.uint32
    first = LargeTokenizer().encode([PAIRS[0][1]])[0]
    assert ids_of(data.train, "target")[0] == first


@pytest.mark.parametrize("wrong", [0, 2, 3, 260, -1])
def test_a_tokenizer_with_wrong_ids_is_found_out(tmp_path, train, monkeypatch, wrong):
    class WrongTokenizer(ByteTokenizer):
        def encode(self, texts, num_threads=1):
            return [[5, wrong] for _ in texts]

    monkeypatch.setitem(tokenizers.KINDS, "bytes", WrongTokenizer)
    with pytest.raises(ValueError, match=f"an id that no text may have.* Received: {wrong}"):
        prepared.write(*train, *NO_VALID, tmp_path / "data", tokenizer="bytes")
    assert not (tmp_path / "data").exists()


def pair_of_tokenizers(separate: bool) -> tuple[SentencePieceTokenizer, SentencePieceTokenizer]:
    source = SentencePieceTokenizer.learn([pair[0] for pair in PAIRS], 300)
    if not separate:
        return source, source
    return source, SentencePieceTokenizer.learn([pair[1] for pair in PAIRS], 300)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("home", ["assets", "assets/tokenizers"])
def test_tokenizers_are_taken_from_a_keras_file(tmp_path, train, separate, home):
    both = pair_of_tokenizers(separate)
    (tmp_path / "saved").mkdir()
    tokenizers.save(*both, tmp_path / "saved")
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        for path in (tmp_path / "saved").rglob("*.model"):
            archive.write(path, f"{home}/{path.relative_to(tmp_path / 'saved')}")
    data = prepared.write(*train, *NO_VALID, tmp_path / "data", tokenizer_from=tmp_path / "m.keras")
    assert data.source_tokenizer.fingerprint == both[0].fingerprint
    assert data.target_tokenizer.fingerprint == both[1].fingerprint
    assert (data.source_tokenizer is data.target_tokenizer) == (not separate)


def test_tokenizers_are_taken_from_a_prepared_folder_and_from_a_model(tmp_path, train):
    first = prepared.write(*train, *NO_VALID, tmp_path / "first", **SMALL)
    for path in (tmp_path / "first", tmp_path / "first" / "tokenizer.model"):
        again = prepared.write(
            *train, *NO_VALID, tmp_path / f"from {path.name}", tokenizer_from=path
        )
        assert again.fingerprint == first.fingerprint


def test_tokenizers_that_are_not_there_are_missed(tmp_path, train):
    (tmp_path / "text.keras").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "bare.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with zipfile.ZipFile(tmp_path / "bomb.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("assets/marian.json", bytes(1 << 24))
    for name, error, message in [
        ("nowhere", FileNotFoundError, "there is no file or folder"),
        ("text.keras", ValueError, "is damaged, or no Keras file"),
        ("bare.keras", ValueError, "there is no tokenizer in"),
        ("bomb.keras", ValueError, "its tokenizer is larger than the file"),
        ("train.en", ValueError, "is not a SentencePiece model"),
    ]:
        with pytest.raises(error, match=message):
            prepared.write(*train, *NO_VALID, tmp_path / "data", tokenizer_from=tmp_path / name)
    assert not list(tmp_path.glob("data*"))


@pytest.mark.parametrize("pairs", [[], [("", "")], [("a", "")]])
def test_an_empty_corpus_is_an_error_and_leaves_nothing(tmp_path, pairs):
    text = write_text(tmp_path, "train", pairs)
    for tokenizer, message in (("sentencepiece", "."), ("bytes", "nothing is left of the corpus")):
        with pytest.raises(ValueError, match=message) as error:
            prepared.write(*text, *NO_VALID, tmp_path / "data", tokenizer=tokenizer)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("data*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "words"}, "`tokenizer` must be one of sentencepiece, .* Received: 'words'"),
        ({"max_length": 1}, "`max_length` must be at least 2.* Received: 1"),
        ({"max_length_ratio": 0.5}, "`max_length_ratio` must be at least 1. Received: 0.5"),
        ({"vocabulary_size": 9000}, "`vocabulary_size` can be at most"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, train, options, message):
    with pytest.raises(ValueError, match=message):
        prepared.write(*train, *NO_VALID, tmp_path / "data", **options)
    assert not list(tmp_path.glob("data*"))


def test_files_that_do_not_fit_are_refused_before_any_work(tmp_path, train):
    valid = write_text(tmp_path, "valid", PAIRS[:3])
    valid[1].write_text("nur eine Zeile\n")
    lines = []
    with pytest.raises(ValueError, match=r"valid\.en with 3 lines and .*valid\.de with 1"):
        prepared.write(*train, *valid, tmp_path / "data", progress=lines.append)
    with pytest.raises(ValueError, match="must be given together"):
        prepared.write(*train, valid[0], None, tmp_path / "data", progress=lines.append)
    assert not lines and not list(tmp_path.glob("data*"))


def test_an_output_that_holds_something_is_left_alone(tmp_path, train):
    with pytest.raises(FileExistsError, match="name another output"):
        prepared.write(*train, *NO_VALID, tmp_path, **SMALL)


def damage_size(folder: Path) -> None:
    path = folder / "train.target.tokens"
    path.write_bytes(path.read_bytes()[:-2])


def damage_offsets(folder: Path) -> None:
    path = folder / "train.source.offsets"
    offsets = np.fromfile(path, "int64")
    offsets[-1] += 1
    offsets.tofile(path)


def damage_meta(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": "another"}))


def damage_tokenizer(folder: Path) -> None:
    size = (folder / "tokenizer.model").stat().st_size
    (folder / "tokenizer.model").write_bytes(b"x" * size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, r"train\.target\.tokens is damaged.* Received: \d+ bytes, where"),
        (lambda folder: (folder / "train.source.offsets").unlink(), "Received: no file"),
        (damage_offsets, r"offsets does not fit .*tokens: prepare the corpus again"),
        (damage_meta, "is not a prepared corpus"),
        (damage_tokenizer, "is not a SentencePiece model"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is not a prepared corpus"),
        (lambda folder: (folder / "meta.json").unlink(), "is not a prepared corpus"),
    ],
)
def test_a_damaged_folder_is_one_line_of_error(tmp_path, train, damage, message):
    data = prepared.write(*train, *NO_VALID, tmp_path / "data", **SMALL)
    del data
    damage(tmp_path / "data")
    with pytest.raises(ValueError, match=message) as error:
        prepared.open(tmp_path / "data")
    assert "\n" not in str(error.value)


def test_another_folder_is_not_a_corpus(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="make one with `keras-aiayn prepare`"):
            prepared.open(folder)


def test_validation_lines_without_a_token_are_refused(tmp_path, train):
    valid = write_text(tmp_path, "valid", [("", ""), (" ", "x")])
    with pytest.raises(ValueError, match="nothing is left of the corpus. valid"):
        prepared.write(*train, *valid, tmp_path / "data", **SMALL)


@pytest.mark.corpus
@pytest.mark.slow
def test_a_real_corpus_comes_back(tmp_path, corpora):
    folder = corpora / "eutrans_esen"
    sides = ("es", "en")
    data = prepared.write(
        *(folder / f"train.{side}" for side in sides),
        *(folder / f"dev.{side}" for side in sides),
        tmp_path / "data",
        vocabulary_size=1000,
    )
    assert data.meta["splits"]["train"]["pairs"] == 9_900
    lines = (folder / "train.es").read_text(encoding="utf-8").split("\n")[:-1]
    decoded = data.source_tokenizer.decode(ids_of(data.train, "source"))
    assert decoded == [" ".join(line.split()) for line in lines]
    assert data.train.source_tokens.max() < 1000
