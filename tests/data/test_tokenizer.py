"""Text comes back as it was, and no text yields a special id."""

import hashlib
import io
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, WordPieceTokenizer
from keras_aiayn.special_ids import BOS, EOS, PAD, UNK

pytestmark = pytest.mark.backend_free

LINES = [
    f"{who} {does} {what} {where}."
    for who in ("A man", "Ein Mann", "The girl", "Zwei Mädchen", "An old woman")
    for does in ("plays with", "spielt mit", "is looking at", "springt über", "paints")
    for what in ("a ball", "dem Hund", "einen Zaun", "the bicycle", "seine Gitarre")
    for where in ("in the park", "auf der Straße", "near the water", "im Schnee")
]
CONTROL_LIKE = ["</s>", "<s>", "<pad>", "<unk>", "<0x41>", "[PAD]", "[UNK]", "[EOS]", "##", "\x00"]


@pytest.fixture(scope="module")
def subwords() -> SentencePieceTokenizer:
    return SentencePieceTokenizer.learn(LINES, vocabulary_size=400)


# Text without the two things that SentencePiece changes: runs of blanks, and its mark for one.
word = st.one_of(
    st.sampled_from(CONTROL_LIKE),
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters=" \u2581"),
        min_size=1,
        max_size=8,
    ),
)
text = st.lists(word).map(" ".join)


@given(text)
@example("a\u2028b\tc\u00a0d\ne\u200d\ufeff")
@example("👨‍👩‍👧 ½ m² ﬁ e\u0301 é")
def test_any_text_comes_back_and_gives_no_special_id(subwords, text):
    (ids,) = subwords.encode([text])
    assert not {PAD, UNK, BOS, EOS} & set(ids)
    assert subwords.decode([ids]) == [text]
    assert subwords.decode([[BOS, *ids, EOS, PAD, PAD]]) == [text]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_give_any_text_back(text):
    (ids,) = ByteTokenizer().encode([text])
    assert all(max(PAD, UNK, BOS, EOS) < i < 260 for i in ids)
    assert ByteTokenizer().decode([[BOS, *ids, EOS, PAD]]) == [text]


@pytest.mark.parametrize("control", CONTROL_LIKE)
def test_text_like_a_control_symbol_is_text(subwords, control):
    # The text learned from holds it too: still it is not to become the symbol.
    learned = SentencePieceTokenizer.learn([*LINES, f"x {control} y"] * 3, vocabulary_size=420)
    for tokenizer in (subwords, learned, ByteTokenizer()):
        (ids,) = tokenizer.encode([f"x {control} y"])
        assert not {PAD, UNK, BOS, EOS} & set(ids)
        assert tokenizer.decode([ids]) == [f"x {control} y"]


def test_blanks_are_the_one_thing_that_is_tidied(subwords):
    ids = subwords.encode(["  a   man ", " ", ""])
    assert subwords.decode(ids) == ["a man", "", ""]
    assert ids[1] == ids[2] == []


def test_frequent_words_are_single_pieces(subwords):
    larger = SentencePieceTokenizer.learn(LINES, vocabulary_size=500)
    assert larger.pieces(larger.encode(["spielt mit"])[0]) == ["▁spielt", "▁mit"]
    assert subwords.pieces([PAD, UNK, BOS, EOS, 4]) == ["<pad>", "<unk>", "<s>", "</s>", "<0x00>"]


def test_symbols_are_single_pieces_whatever_their_letters():
    symbols = ["(NP", ")NP", "(NP|,", "XX"]
    tokenizer = SentencePieceTokenizer.learn(LINES, 400, symbols=symbols)
    (ids,) = tokenizer.encode(["(NP (NP|, XX )NP )NP XXa"])
    assert tokenizer.pieces(ids) == ["▁(NP", "▁(NP|,", "▁XX", "▁)NP", "▁)NP", "▁XX", "a"]
    assert tokenizer.decode([ids]) == ["(NP (NP|, XX )NP )NP XXa"]
    assert tokenizer.vocabulary_size == 400
    assert tokenizer.encode(LINES) != SentencePieceTokenizer.learn(LINES, 400).encode(LINES)
    for wrong in ("", "a b", " a"):
        with pytest.raises(ValueError, match="without blanks"):
            SentencePieceTokenizer.learn(LINES, 400, symbols=[wrong])


def test_numbers_are_written_digit_by_digit():
    """Also those that are frequent enough to be a piece of their own."""
    tokenizer = SentencePieceTokenizer.learn(["in 1998 and in 1998"] * 50, 277)
    (ids,) = tokenizer.encode(["1998"])
    assert [tokenizer.decode([[one]])[0] for one in ids[-4:]] == list("1998")


def test_threads_change_nothing(subwords):
    assert subwords.encode(LINES, num_threads=3) == subwords.encode(LINES)


def test_the_same_text_gives_the_same_tokenizer(subwords):
    again = SentencePieceTokenizer.learn(iter(LINES), vocabulary_size=400)
    assert again.proto == subwords.proto
    assert again.fingerprint == hashlib.sha256(subwords.proto).hexdigest()


@pytest.mark.slow
def test_another_process_draws_the_same_sample_and_learns_the_same():
    program = (
        "import sys\n"
        "from keras_aiayn.data.tokenizer import SentencePieceTokenizer\n"
        "lines = sys.stdin.buffer.read().decode().split('\\n')\n"
        "made = SentencePieceTokenizer.learn(lines, vocabulary_size=400, max_lines=300)\n"
        "print(made.fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(LINES).encode(), capture_output=True
    )
    sampled = SentencePieceTokenizer.learn(LINES, vocabulary_size=400, max_lines=300)
    assert done.stdout.decode().strip() == sampled.fingerprint
    assert sampled.fingerprint != SentencePieceTokenizer.learn(LINES, 400).fingerprint


def test_learning_says_nothing(capfd):
    SentencePieceTokenizer.learn(["x" * 5000, "tab\there", *LINES], vocabulary_size=400)
    with pytest.raises(ValueError):
        SentencePieceTokenizer.learn(LINES, vocabulary_size=40_000)
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_too_large_for_the_text_is_an_error_with_the_largest(subwords):
    with pytest.raises(ValueError, match="`vocabulary_size` can be at most [0-9]+$") as error:
        SentencePieceTokenizer.learn(LINES, vocabulary_size=40_000)
    largest = int(str(error.value).split()[-1])
    assert SentencePieceTokenizer.learn(LINES, largest).vocabulary_size == largest
    with pytest.raises(ValueError, match="at most"):
        SentencePieceTokenizer.learn(LINES, largest + 1)


def test_a_vocabulary_too_small_for_the_text_is_an_error_with_the_smallest():
    with pytest.raises(ValueError, match="`vocabulary_size` must be at least ([0-9]+)") as error:
        SentencePieceTokenizer.learn(LINES, vocabulary_size=100)
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    assert SentencePieceTokenizer.learn(LINES, smallest).vocabulary_size == smallest
    with pytest.raises(ValueError, match="at least"):
        SentencePieceTokenizer.learn(LINES, smallest - 1)


@pytest.mark.parametrize("lines", [[], ["", "  ", "\u3000"]])
def test_nothing_is_learned_from_blank_text(lines):
    with pytest.raises(ValueError, match="every line is blank"):
        SentencePieceTokenizer.learn(lines, vocabulary_size=400)


@given(st.integers(0, 200), st.integers(1, 50))
def test_a_sample_holds_as_many_lines_as_it_may(count, max_lines):
    lines = [str(i) for i in range(count)]
    sample = tokenizers.sample_lines(iter(lines), max_lines)
    assert len(set(sample)) == len(sample) == min(count, max_lines)
    assert set(sample) <= set(lines)
    if count <= max_lines:
        assert sample == lines


def test_a_sample_is_uniform():
    sample = [int(line) for line in tokenizers.sample_lines(map(str, range(100_000)), 2_000)]
    quarters = np.bincount(np.array(sample) // 25_000)
    assert quarters.min() > 400  # 500 are due, with a standard deviation of 19


def test_other_special_ids_are_refused():
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="bpe",
        vocab_size=60,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="must be {'pad': 0, 'unk': 1.* Received: {'pad': -1"):
        SentencePieceTokenizer(model.getvalue())


@pytest.mark.parametrize("proto", [b"", b"no model at all"])
def test_other_bytes_are_no_model(proto):
    with pytest.raises(ValueError, match="`proto` is not a SentencePiece model"):
        SentencePieceTokenizer(proto)


@pytest.mark.parametrize("wrong", [-1, 400])
def test_ids_of_another_vocabulary_are_refused(subwords, wrong):
    with pytest.raises(ValueError, match=f"from 0 to 399.* Received: {wrong}"):
        subwords.decode([[5, wrong]])


def test_one_text_for_a_list_of_texts_is_refused(subwords):
    for tokenizer in (subwords, ByteTokenizer()):
        with pytest.raises(ValueError, match="`texts` must be a list of strings"):
            tokenizer.encode("a man")


@pytest.mark.parametrize("wrong", ["a\ud800", None])
def test_what_is_no_text_is_refused(subwords, wrong):
    with pytest.raises(ValueError, match="`texts` must be strings, without lone surrogates"):
        subwords.encode(["a man", wrong])


def test_nothing_decodes_to_nothing(subwords):
    for tokenizer in (subwords, ByteTokenizer()):
        assert tokenizer.encode([]) == tokenizer.decode([]) == []
        assert tokenizer.decode([[], [BOS, EOS, PAD]]) == ["", ""]


def test_arrays_of_ids_are_decoded_too(subwords):
    ids = np.zeros((2, 40), "int32")
    for row, one in zip(ids, subwords.encode(LINES[:2]), strict=True):
        row[: len(one)] = one
    assert subwords.decode(ids) == LINES[:2]


def wordpiece() -> WordPieceTokenizer:
    """A WordPiece vocabulary that spells LINES; KerasHub's learner is tested by itself."""
    letters = sorted(set("".join(LINES)) - {" "})
    return WordPieceTokenizer(
        ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "Mann", *letters, *(f"##{one}" for one in letters)]
    )


@pytest.fixture(params=["sentencepiece", "bytes", "wordpiece"])
def any_tokenizer(request, subwords):
    if request.param == "wordpiece":
        pytest.importorskip("keras_hub")
    return {"sentencepiece": lambda: subwords, "bytes": ByteTokenizer, "wordpiece": wordpiece}[
        request.param
    ]()


def test_saving_and_loading_give_the_same_tokenizer(any_tokenizer, tmp_path):
    any_tokenizer.save_assets(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [any_tokenizer.asset_name]
    config = keras.saving.serialize_keras_object(any_tokenizer)
    loaded = keras.saving.deserialize_keras_object(config)
    loaded.load_assets(tmp_path)
    for other in (loaded, tokenizers.load(tmp_path)[0], pickle.loads(pickle.dumps(any_tokenizer))):
        assert type(other) is type(any_tokenizer)
        assert other.fingerprint == any_tokenizer.fingerprint
        assert other.vocabulary_size == any_tokenizer.vocabulary_size
        assert other.encode(LINES) == any_tokenizer.encode(LINES)


def test_two_tokenizers_are_saved_in_folders_and_one_is_saved_once(subwords, tmp_path):
    other = SentencePieceTokenizer.learn(LINES, vocabulary_size=380)
    for name, pair in (("shared", (subwords, subwords)), ("separate", (subwords, other))):
        (tmp_path / name).mkdir()
        tokenizers.save(*pair, tmp_path / name)
        loaded = tokenizers.load(tmp_path / name)
        assert [one.fingerprint for one in loaded] == [one.fingerprint for one in pair]
        assert (loaded[0] is loaded[1]) == (name == "shared")


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no tokenizer in"):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize("kind", [SentencePieceTokenizer, WordPieceTokenizer])
def test_an_empty_tokenizer_says_so(kind):
    for use in (lambda one: one.encode(["a"]), lambda one: one.vocabulary_size):
        with pytest.raises(ValueError, match="is empty: call `load_assets` first"):
            use(kind())


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_the_graph_gives_the_same_ids_and_texts(kind, subwords):
    tf = pytest.importorskip("tensorflow")
    if kind == "sentencepiece":
        pytest.importorskip("tensorflow_text")
    tokenizer = {"sentencepiece": subwords, "bytes": ByteTokenizer()}[kind]
    texts = [*LINES[:3], *CONTROL_LIKE[:5], "", "Grüße 👋"]
    twin = tokenizer.in_graph()

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])
    def there_and_back(strings):
        ids = twin.tokenize(strings)
        return ids, twin.detokenize(ids)

    ids, back = there_and_back(tf.constant(texts))
    assert ids.dtype == tf.int32
    assert ids.to_list() == tokenizer.encode(texts)
    assert [one.decode() for one in back.numpy()] == texts
    framed = tf.ragged.constant([[BOS, *tokenizer.encode(texts[:1])[0], EOS, PAD]], dtype=tf.int32)
    assert twin.detokenize(framed).numpy()[0].decode() == texts[0]


def test_bytes_that_are_no_text_are_marked():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([[4 + 0xC3, UNK, 4 + 65]]) == ["\ufffd\ufffdA"]
    assert tokenizer.pieces([PAD, EOS, 4 + 65, 4 + 10]) == ["<pad>", "</s>", "A", "<0x0A>"]
    assert ByteTokenizer.learn(LINES, 8000).vocabulary_size == 260


def test_wordpiece_splits_words_and_joins_them():
    pytest.importorskip("keras_hub")
    tokenizer = wordpiece()
    (ids,) = tokenizer.encode(["Ein Mann ."])
    assert tokenizer.pieces(ids) == ["E", "##i", "##n", "Mann", "."]
    assert tokenizer.decode([[BOS, *ids, EOS, PAD]]) == ["Ein Mann ."]
    assert tokenizer.encode([]) == []
    for control in ("[PAD]", "[BOS]", "[EOS]", "</s>"):
        assert not {PAD, BOS, EOS} & set(tokenizer.encode([f"Mann {control}"])[0])
    with pytest.raises(ValueError, match="`vocabulary` must begin with"):
        WordPieceTokenizer(["a", "b"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wordpiece_is_learned_by_keras_hub():
    pytest.importorskip("keras_hub")
    tokenizer = WordPieceTokenizer.learn(LINES, vocabulary_size=300)
    assert tokenizer.vocabulary_size <= 300
    ids = tokenizer.encode(LINES)
    assert not {PAD, UNK, BOS, EOS} & {i for one in ids for i in one}
    assert tokenizer.decode(ids) == [line.replace(".", " .") for line in LINES]
