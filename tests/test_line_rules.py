"""Any text in, as many lines out, with a real model and its real tokenizer on each backend."""

import io

import keras
import pytest

from keras_aiayn import Transformer, Translator, files
from keras_aiayn.data import sentences
from keras_aiayn.data.tokenizer import SentencePieceTokenizer

LINES = [f"{color} {animal} {verb}" for color in ("red", "blue", "grün") for animal in
         ("dogs", "cats", "owls") for verb in ("run", "sleep", "sing loudly")]  # fmt: skip
TEXTS = {
    "nothing": "",
    "blanks": "  \t ",
    "one character": "x",
    "emoji": "👩‍👩‍👧‍👦 dogs 🦉🇩🇪",
    "right to left": "שלום עולם — مرحبا بالعالم",
    "combining marks": "Z̷̢̛͎a̸͉͝l̵̰͐g̴̮̈́o̶̫͒ é é",
    "control characters": "a\x00b\x07c\x1bd\x7fe",
    "breaks that are none": "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj",
    "control symbols": "</s> <pad> <unk> <s> <0x0A>",
    "no word is known": "漢字かな交じり文 ༄༅། ꧁꧂",
    "halves of surrogates, replaced": "\ufffd\ufffd",
    "twenty thousand characters": "red dogs run. " * 1429,
}


@pytest.fixture(scope="module")
def translator():
    tokenizer = SentencePieceTokenizer.learn(LINES, vocabulary_size=300)
    keras.utils.set_random_seed(3)
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=1
    )
    return Translator(model, tokenizer)


def test_every_line_gets_its_line_whatever_is_in_it(translator):
    # A model that has learned nothing would write on to its limit, some thousand tokens.
    settings = {"max_length": 6, "beam_size": 2}
    data = "\n".join(TEXTS.values()).encode()
    output = io.BytesIO()
    report = files.translate_file(translator, io.BytesIO(data), output, **settings)
    lines = output.getvalue().decode().split("\n")
    assert lines.pop() == "" and len(lines) == len(TEXTS) == report.lines
    alone = [translator.translate([text], **settings)[0] for text in TEXTS.values()]
    assert lines == [text.replace("\n", " ") for text in alone]
    found = dict(zip(TEXTS, translator.translate(TEXTS.values(), details=True, **settings),
                     strict=True))  # fmt: skip
    for name, one in found.items():
        assert bool(one.tokens) == (name not in ("nothing", "blanks"))
        assert one.hit_limit == (bool(one.tokens) and one.tokens[-1] != "</s>")


def test_a_long_line_is_cut_where_that_is_asked(translator):
    text = TEXTS["twenty thousand characters"]
    settings = {"max_length": 6, "beam_size": 1}

    def length(part):
        return len(translator.source_tokenizer.encode([part])[0]) + 1

    assert length(text) > 4000
    parts = sentences.cut(text, 64, length)
    assert len(parts) > 60 and max(length(part) for part, _ in parts) <= 64
    found = translator.translate([part for part, _ in parts], **settings)
    blanks = [blank for _, blank in parts]
    expected = sentences.join(list(zip(found, blanks, strict=True)))
    assert translator.translate([text], split_long=64, **settings) == [expected]
