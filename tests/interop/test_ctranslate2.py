"""The same weights in CTranslate2 give the same tokens: greedy, beam, in every kind of model."""

import json

import keras
import numpy as np
import pytest

from keras_aiayn import Transformer, Translator
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.decoding.compiled import score_function
from keras_aiayn.interop import ctranslate2 as ours

ctranslate2 = pytest.importorskip("ctranslate2")

LINES = ["a", "the dog runs", "où est-ce?", "x" * 40, "one two three four five six seven", "日本"]
SIZES = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4}


def make(seed=1, **options):
    """A translator whose outputs end now and then, with weights as after training."""
    tokenizer = tokenizers.ByteTokenizer()
    model = Transformer(tokenizer.vocabulary_size, **SIZES | options, seed=seed)
    rng = np.random.default_rng(seed)
    for weight in model.trainable_variables:  # the same on every backend
        weight.assign(rng.normal(scale=0.25, size=weight.shape) + ("gamma" in weight.path))
    return Translator(model, tokenizer)


def pieces_of(translator, text):
    tokenizer = translator.source_tokenizer
    return tokenizer.pieces(tokenizer.encode([text])[0])


def ids_of(translator):
    size = translator.target_tokenizer.vocabulary_size
    return {piece: i for i, piece in enumerate(translator.target_tokenizer.pieces(range(size)))}


def log_prob(translator, text, ids):
    source = [[*translator.source_tokenizer.encode([text])[0], 3]]
    score = score_function(translator.model)
    arrays = (np.array(rows, "int32") for rows in (source, [[2, *ids[:-1]]], [ids]))
    return float(score(*arrays)[0])


KINDS = [
    {},
    {"normalize_first": True},
    {"use_bias": True, "use_logits_bias": True, "activation": "swish"},
    {"positions": "learned", "max_length": 128},
    {"share_embeddings": False, "target_vocabulary_size": 260},
    {"share_embeddings": False, "target_vocabulary_size": 260, "tie_projection": False},
    {"key_dim": 4, "activation": "gelu"},
]


@pytest.mark.works("export to CTranslate2")
@pytest.mark.works("CTranslate2", table="format")
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("options", KINDS)
def test_the_tokens_are_ours(tmp_path, options, beam_size):
    translator = make(**options)
    ours.export(translator, tmp_path / "folder")
    engine = ctranslate2.Translator(str(tmp_path / "folder"), inter_threads=1, intra_threads=1)
    expected = translator.translate(
        LINES, beam_size=beam_size, length_penalty=0.0, max_length=12, details=True
    )
    differ = 0
    for text, translation in zip(LINES, expected, strict=True):
        (found,) = engine.translate_batch(
            [pieces_of(translator, text)],
            beam_size=beam_size,
            length_penalty=0,
            max_decoding_length=12,
            return_end_token=True,
            return_scores=True,
        )
        # What pad and BOS would have had is shared among the others there.
        if found.hypotheses[0] == translation.tokens:
            assert -1e-3 < found.scores[0] - translation.raw_score < 0.5
        else:  # its beams may end with fewer candidates
            numbers = [
                ids_of(translator)[piece] for hypothesis in found.hypotheses for piece in hypothesis
            ]
            assert beam_size > 1 and translation.raw_score > log_prob(translator, text, numbers)
            differ += 1
    assert differ <= 1


def test_the_folder_holds_what_is_needed_and_smaller_weights_when_asked(tmp_path):
    translator = make()
    sizes = {}
    for quantization in ("float32", "int8"):
        folder = tmp_path / quantization
        ours.export(translator, folder, quantization)
        assert tokenizers.load(folder)[0].encode(["dog"]) == pieces_ids(translator)
        sizes[quantization] = (folder / "model.bin").stat().st_size
        engine = ctranslate2.Translator(str(folder))
        assert engine.translate_batch([pieces_of(translator, "dog")])[0].hypotheses
    assert sizes["float32"] - sizes["int8"] > 100_000
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["add_source_eos"] and config["layer_norm_epsilon"] == 1e-6


def pieces_ids(translator):
    return translator.source_tokenizer.encode(["dog"])


@pytest.mark.parametrize(
    ("options", "quantization", "message"),
    [
        ({}, "int3", "`quantization` must be one of .* Received: 'int3'"),
        ({"value_dim": 4}, "int8", "heads of one size. Received: key_dim=8, value_dim=4"),
        ({"activation": "elu"}, "int8", "no activation elu"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path, options, quantization, message):
    with pytest.raises(ValueError, match=message):
        ours.export(make(**options), tmp_path / "folder", quantization)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        ours.export(make(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_mixed_precision_is_written_in_full(tmp_path):
    ours.export(make(dtype=keras.dtype_policies.DTypePolicy("mixed_bfloat16")), tmp_path / "folder")
    assert (tmp_path / "folder" / "model.bin").stat().st_size > 4 * 260 * 32
