"""What transformers' Marian generates from a folder, the imported translator translates."""

import io
import json

import keras
import numpy as np
import pytest
import sentencepiece
import torch

from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.interop import marian
from keras_aiayn.loading import load

transformers = pytest.importorskip("transformers")

WORDS = "one two three four five six seven eight nine ten dog cat man runs sleeps sings".split()
TEXTS = ["two dogs run", "the man sings", "x", "one two three four five six seven", "ünseen"]


def spm(seed):
    """A SentencePiece model, as Marian's: none of its special ids is ours."""
    generator = np.random.default_rng(seed)
    lines = [" ".join(generator.choice(WORDS, 6)) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=34 + seed, minloglevel=2
    )
    return model.getvalue()


def folder_of(path, seed=1, safe=True, **changes):
    """A model with made weights, as transformers saves it."""
    protos = {"source": spm(1), "target": spm(2)}
    pieces = {"</s>": 0, "<unk>": 1}
    for proto in protos.values():
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        for i in range(processor.vocab_size()):
            piece = processor.id_to_piece(i)
            if piece not in ("<s>", "</s>", "<unk>"):
                pieces.setdefault(piece, len(pieces))
    pieces["<pad>"] = len(pieces)
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24,
             "decoder_ffn_dim": 24, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4}  # fmt: skip
    config = transformers.MarianConfig(
        vocab_size=len(pieces), pad_token_id=pieces["<pad>"], eos_token_id=0,
        decoder_start_token_id=pieces["<pad>"], forced_eos_token_id=None, scale_embedding=True,
        max_position_embeddings=64, init_std=0.2,
        **sizes | {"activation_function": "swish"} | changes,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias") or "layer_norm" in name:
                tensor += 0.2 * torch.randn_like(tensor)
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] += 5  # outputs end
        model.model.shared.weight[pieces["<pad>"]] = 0
    path.mkdir()
    model.save_pretrained(path, safe_serialization=safe) if safe else torch.save(
        model.state_dict(), path / "pytorch_model.bin"
    )
    config.save_pretrained(path)
    (path / "vocab.json").write_text(json.dumps(pieces))
    for side, proto in protos.items():
        (path / f"{side}.spm").write_bytes(proto)
    return model, pieces


def generated(model, pieces, ids, **options):
    """Their output for one of our sources, as pieces."""
    names = {i: piece for piece, i in pieces.items()}
    (found,) = model.generate(
        input_ids=torch.tensor([[*(pieces[piece] for piece in ids), 0]]), do_sample=False,
        length_penalty=0.0, early_stopping="never", bad_words_ids=[[pieces["<pad>"]]],
        max_new_tokens=12, **options,
    )[:, 1:].tolist()  # fmt: skip
    return [names[i] for i in found if names[i] != "<pad>"]


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize(
    ("changes", "safe"),
    [({}, True), ({"activation_function": "relu", "d_model": 24}, False), ({"encoder_layers": 1,
     "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}, True)],
)  # fmt: skip
def test_the_ids_are_those_of_generate(tmp_path, changes, safe, beam_size):
    theirs, pieces = folder_of(tmp_path / "folder", safe=safe, **changes)
    ours = marian.load(tmp_path / "folder")
    found = ours.translate(
        TEXTS, beam_size=beam_size, length_penalty=0.0, max_length=12, details=True
    )
    compared = 0
    for text, translation in zip(TEXTS, found, strict=True):
        (ids,) = ours.source_tokenizer.encode([text])
        expected = generated(theirs, pieces, ours.source_tokenizer.pieces(ids), num_beams=beam_size)
        if translation.tokens == expected:
            compared += 1
        else:  # theirs ranks what was cut among what has ended
            assert beam_size > 1 and expected[-1] != "</s>" and translation.tokens[-1] == "</s>"
    assert compared >= 3


def test_it_is_saved_and_loaded_with_both_tokenizers(tmp_path):
    folder_of(tmp_path / "folder")
    ours = marian.load(tmp_path / "folder")
    ours.save(tmp_path / "model.keras")
    again = load(tmp_path / "model.keras")
    assert again.translate(TEXTS) == ours.translate(TEXTS)
    assert again.source_tokenizer.fingerprint == ours.source_tokenizer.fingerprint
    assert again.source_tokenizer.fingerprint != again.target_tokenizer.fingerprint
    assert tokenizers.one_vocabulary(again.source_tokenizer, again.target_tokenizer)


def test_the_tokenizer_is_transformers_own(tmp_path):
    _, pieces = folder_of(tmp_path / "folder")
    ours = marian.load(tmp_path / "folder").source_tokenizer
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm(1))
    for text in TEXTS:
        (ids,) = ours.encode([text])
        expected = [p if p in pieces else "<unk>" for p in processor.encode(text, out_type=str)]
        assert ours.pieces(ids) == expected
    assert ours.decode(ours.encode(["two dog runs"])) == ["two dog runs"]
    graph = ours.in_graph()
    ids = graph.tokenize(TEXTS)
    assert ids.to_list() == ours.encode(TEXTS)
    assert [text.decode() for text in graph.detokenize(ids).numpy()] == ours.decode(ids.to_list())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_layers": 1}, "decoder_layers=2 can be imported. Received: 1"),
        ({"scale_embedding": False}, "scale_embedding=True can be imported"),
    ],
)
def test_what_ours_has_not_is_refused(tmp_path, changes, message):
    folder_of(tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        marian.load(tmp_path / "folder")


def test_what_is_no_folder_of_marian_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        marian.load(tmp_path)
    folder_of(tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors"):
        marian.load(tmp_path / "folder")


def test_the_command_imports(tmp_path, run_cli):
    folder_of(tmp_path / "folder")
    done = run_cli("import", "marian", tmp_path / "folder", "--output", tmp_path / "m.keras")
    assert done.status == 0, done.err
    assert run_cli("translate", tmp_path / "m.keras", stdin="two dogs\n").out.count("\n") == 1
    assert keras.backend.backend() in ("tensorflow", "jax", "torch")
