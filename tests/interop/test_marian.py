"""What transformers' Marian generates from a folder, the imported translator translates."""

import functools
import io
import json
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import torch
from rich.console import Console

from keras_aiayn.data import prepared
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.interop import marian
from keras_aiayn.loading import load
from keras_aiayn.training import train

transformers = pytest.importorskip("transformers")

WORDS = "one two three four five six seven eight nine ten dog cat man runs sleeps sings".split()
TEXTS = ["two dogs run", "the man sings", "x", "one two three four five six seven", "ünseen"]
LONGEST = 30


@functools.cache
def spm(seed, words=tuple(WORDS), size=34):
    """A SentencePiece model, as Marian's: none of its special ids is ours."""
    generator = np.random.default_rng(seed)
    lines = [" ".join(generator.choice(words, 6)) for _ in range(400)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size + seed, minloglevel=2
    )
    return model.getvalue()


def teach(model, pieces, protos, steps):
    """Teaches it to write words backwards: it ends then, and writes something else for each.

    In float64: what a processor rounds in its own way would grow, in 400 steps, to other weights.
    """
    model.double()
    processors = [sentencepiece.SentencePieceProcessor(model_proto=proto) for proto in protos]
    pad = pieces["<pad>"]

    def ids(processor, lines):
        rows = [[*(pieces[p] for p in processor.encode(line, out_type=str)), 0] for line in lines]
        return torch.nn.utils.rnn.pad_sequence(
            list(map(torch.tensor, rows)), batch_first=True, padding_value=pad
        )

    generator = np.random.default_rng(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        words = [generator.choice(WORDS, generator.integers(1, 7)) for _ in range(16)]
        source = ids(processors[0], [" ".join(line) for line in words])
        target = ids(processors[1], [" ".join(line[::-1]) for line in words])
        labels = target.masked_fill(target == pad, -100)
        optimizer.zero_grad()
        model(input_ids=source, attention_mask=source != pad, labels=labels).loss.backward()
        model.model.shared.weight.grad[pad] = 0
        optimizer.step()
    model.float()


def folder_of(path, seed=1, safe=True, steps=0, **changes):
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
        model.model.shared.weight[pieces["<pad>"]] = 0
    teach(model, pieces, protos.values(), steps)
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
        max_new_tokens=LONGEST, **options,
    )[:, 1:].tolist()  # fmt: skip
    return [names[i] for i in found if names[i] != "<pad>"]


@pytest.fixture(
    scope="module",
    params=[
        {"seed": 2},
        {"seed": 6, "activation_function": "relu", "d_model": 24, "safe": False},
        {"seed": 2, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2},
    ],
)  # fmt: skip
def taught(request, tmp_path_factory):
    """Theirs, its pieces, and ours."""
    folder = tmp_path_factory.mktemp("taught") / "folder"
    theirs, pieces = folder_of(folder, steps=400, **request.param)
    return theirs, pieces, marian.load(folder)


@pytest.mark.works("import of Marian and OPUS-MT")
@pytest.mark.parametrize("beam_size", [1, 4])
def test_the_ids_are_those_of_generate(taught, beam_size):
    """Theirs takes an ending among the best K candidates only, ours among 2K: these weights are
    such that nothing better is missed by it."""
    theirs, pieces, ours = taught
    found = ours.translate(
        TEXTS, beam_size=beam_size, length_penalty=0.0, max_length=LONGEST, details=True
    )
    for text, translation in zip(TEXTS, found, strict=True):
        (ids,) = ours.source_tokenizer.encode([text])
        expected = generated(theirs, pieces, ours.source_tokenizer.pieces(ids), num_beams=beam_size)
        assert translation.tokens == expected
    # What is cut they rank among what has ended, and where all is alike there is little to see.
    assert not any(translation.hit_limit for translation in found)
    assert len({translation.text for translation in found}) >= 4


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


def test_an_output_projection_of_its_own_is_refused(tmp_path):
    folder_of(tmp_path / "folder", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"another lm_head\.weight"):
        marian.load(tmp_path / "folder")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "folder"
    folder_of(folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "vocab.json", "source.spm", "model.safetensors"])
def test_a_file_that_is_missing_is_named(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "folder")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"folder .*{re.escape(name)}"):
        marian.load(folder)


def without(name):
    return lambda content: json.dumps({k: v for k, v in json.loads(content).items() if k != name})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda _: "{}", "it has no 'encoder_layers'"),
        ("config.json", lambda _: "[]", "config.json holds no names and values"),
        ("config.json", lambda content: content[:-9], "config.json is no JSON"),
        ("config.json", without("d_model"), "it has no 'd_model'"),
        ("config.json", lambda content: content.replace('"d_model": 16', '"d_model": 32'),
         "rows of 16; config.json has d_model=32"),
        ("vocab.json", lambda _: "[1, 2]", "vocab.json holds no names and values"),
        ("vocab.json", without("<unk>"), "it has no '<unk>'"),
        ("vocab.json", lambda content: content[:-1] + ', "more": 999}', "numbers up to 999"),
        ("vocab.json", lambda content: content[:-1] + ', "more": 1}', "a number of its own"),
        ("vocab.json", lambda content: content[:-1] + ', "more": -1}', "a number of its own"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_one_line(whole, tmp_path, name, change, message):
    path = shutil.copytree(whole, tmp_path / "folder") / name
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message) as refused:
        marian.load(tmp_path / "folder")
    assert str(refused.value).startswith(f"{tmp_path / 'folder'} cannot be imported: ")
    assert "\n" not in str(refused.value)


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1_000])


def incomplete(folder):
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    del weights["model.decoder.layers.1.fc1.bias"]
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def broken(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no weights")


def no_pieces(folder):
    (folder / "target.spm").write_bytes(b"no pieces")


@pytest.mark.parametrize("damage", [truncated, incomplete, broken, no_pieces])
def test_a_file_that_is_damaged_is_one_line(whole, tmp_path, damage):
    folder = shutil.copytree(whole, tmp_path / "folder")
    damage(folder)
    named = "it has no 'model.decoder.layers.1.fc1.bias'" if damage is incomplete else ""
    with pytest.raises(ValueError, match=f"folder cannot be imported: {named}") as refused:
        marian.load(folder)
    assert "\n" not in str(refused.value)


def test_what_only_looks_like_a_code_or_a_mark_is_text():
    proto = spm(1, words=("one", "ten", "three", "two", "nine"), size=14)
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
    own = [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]
    vocabulary = ["<pad>", "<unk>", "<s>", "</s>", ">>fr<<", ">", *own]
    ours = tokenizers.MarianTokenizer(proto, vocabulary)
    code, one = 4, ours.encode(["one"])[0]
    assert ours.encode([">>fr<<one"]) == [[code, *one]]
    texts = [">>one", ">one", ">>xx<< one", "</s>", "one</s>", "<pad> <s>", "<unk>", ">>", ""]
    encoded = ours.encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        cut = processor.encode(text, out_type=str)
        assert ids == [vocabulary.index(p) if p in vocabulary[4:] else 1 for p in cut]
        assert not {0, 2, 3} & set(ids)
    assert ours.in_graph().tokenize(texts).to_list() == encoded


def test_it_is_trained_further(whole, tmp_path):
    imported = marian.load(whole)
    imported.save(tmp_path / "imported.keras")
    generator = np.random.default_rng(1)
    sources = [" ".join(generator.choice(WORDS, generator.integers(2, 8))) for _ in range(60)]
    targets = [" ".join(reversed(source.split())) for source in sources]
    files = [tmp_path / name for name in ("a", "b", "valid.a", "valid.b")]
    for file, lines in zip(files, (sources, targets, sources[:4], targets[:4]), strict=True):
        file.write_text("\n".join(lines) + "\n")
    corpus = prepared.write(
        *files, tmp_path / "prepared", tokenizer_from=tmp_path / "imported.keras"
    )
    configs = train.configure(
        corpus, str(tmp_path / "imported.keras"),
        ["steps=6", "warmup_steps=3", "learning_rate_scale=0.1", "tokens_per_batch=400",
         "max_shapes=2"],
    )  # fmt: skip
    trained = train.run(
        corpus, tmp_path / "run", configs, init=tmp_path / "imported.keras",
        console=Console(file=io.StringIO()),
    )  # fmt: skip
    for side in ("source_tokenizer", "target_tokenizer"):
        assert getattr(trained, side).fingerprint == getattr(imported, side).fingerprint
    before, after = (
        np.mean([one.raw_score for one in translator.score(sources, targets)])
        for translator in (imported, load(tmp_path / "run" / "model.keras"))
    )
    assert after > before + 1


def test_the_command_imports(whole, tmp_path, run_cli):
    wrong = run_cli("import", "marian", tmp_path, "--output", tmp_path / "m.keras")
    assert wrong.status == 2 and "no config.json" in wrong.err and "Traceback" not in wrong.err
    done = run_cli("import", "marian", whole, "--output", tmp_path / "m.keras")
    assert done.status == 0, done.err
    expected = marian.load(whole).translate(["two dogs"])
    assert run_cli("translate", tmp_path / "m.keras", stdin="two dogs\n").out == expected[0] + "\n"
