"""Quantised translators: smaller, loaded to the bit, on every backend, and never trained.

Run as a program, this file is a process of another backend: `python test_quantization.py FOLDER`
answers for the files in the folder, and leaves what it found there.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_aiayn as ka
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.interop import ctranslate2
from keras_aiayn.loading import load
from keras_aiayn.quantization import quantize_file

SIZES = {"num_layers": 1, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4}
# All layers that have matrices, and all that have not.
KINDS = {
    "paper": {},
    "untied": {"share_embeddings": False, "tie_projection": False, "normalize_first": True},
    "learned": {"positions": "learned", "max_length": 60, "use_bias": True,
                "use_logits_bias": True},
    "mixed": {"dtype": "mixed_bfloat16"},
}  # fmt: skip
TEXTS = ["a", "", "dog", "où?", "日"]  # of one width, for JAX compiles each
INPUTS = {
    "encoder_token_ids": np.array([[40, 50, 50, 60, 50, 3], [50, 41, 3, 0, 0, 0]], "int32"),
    "decoder_token_ids": np.array([[2, 70, 70, 80, 70], [2, 70, 90, 0, 0]], "int32"),
}


def make(name="paper", **options):
    """A translator with weights as after training."""
    tokenizer = ByteTokenizer()
    model = ka.Transformer(tokenizer.vocabulary_size, **SIZES | KINDS[name] | options, seed=1)
    rng = np.random.default_rng(1)
    for weight in model.trainable_variables:  # the same on every backend
        weight.assign(rng.normal(scale=0.25, size=weight.shape) + ("gamma" in weight.path))
    return ka.Translator(model, tokenizer, beam_size=2, max_extra_length=5)


def outputs(translator):
    return keras.ops.convert_to_numpy(translator.model(INPUTS))


def matrices(model):
    return [weight for weight in model.weights if len(weight.shape) == 2]


@pytest.mark.works("a quantised `.keras`")
@pytest.mark.parametrize("name", KINDS)
def test_a_quantised_translator_is_loaded_as_it_was_saved(tmp_path, name):
    small = make(name).quantized()
    small.save(tmp_path / "small.keras")
    for loaded in (
        load(tmp_path / "small.keras"),
        keras.saving.load_model(tmp_path / "small.keras"),
    ):
        np.testing.assert_array_equal(outputs(loaded), outputs(small))
        assert loaded.model.quantized_to == "int8"
        assert [weight.dtype for weight in loaded.weights] == [w.dtype for w in small.weights]


@pytest.mark.parametrize("name", KINDS)
def test_matrices_become_integers_and_the_outputs_stay_close(name):
    translator = make(name)
    before = outputs(translator)
    small = translator.quantized("int8")
    kept = 1 if name == "learned" else 0  # the table of positions
    assert sum(weight.dtype != "int8" for weight in matrices(small.model)) == kept
    assert small.model.count_params() > translator.model.count_params()  # scales
    assert 0 < np.abs(outputs(small) - before).max() < 0.1 * np.abs(before).max()
    np.testing.assert_array_equal(outputs(translator), before)  # what it was made of is as it was


def test_its_translations_are_loaded_too_and_do_not_depend_on_each_other(tmp_path):
    small = make().quantized()
    small.save(tmp_path / "small.keras")
    together = small.translate(TEXTS, details=True)
    assert load(tmp_path / "small.keras").translate(TEXTS, details=True) == together
    for text, expected in zip(TEXTS, together, strict=True):
        (alone,) = small.translate([text], details=True)
        assert alone.token_ids == expected.token_ids
        assert alone.score == pytest.approx(expected.score, abs=1e-4)


def test_in_place_as_keras_does_what_was_compiled_is_forgotten():
    translator = make()
    expected = translator.quantized()
    translator.translate(TEXTS)
    translator.quantize("int8")
    assert translator.translate(TEXTS, details=True) == expected.translate(TEXTS, details=True)


def test_a_quantised_translator_works_together_with_others():
    one, other = make(), make().quantized()
    found = one.translate(TEXTS, together_with=[other])
    assert len(found) == len(TEXTS) and found[1] == ""


def test_what_was_compiled_to_be_evaluated_is_saved_without(tmp_path):
    small = make().quantized()
    small.model.compile(loss=ka.LabelSmoothedCrossentropy(0.1))
    assert small.model.evaluate(INPUTS, INPUTS["decoder_token_ids"], verbose=0)
    small.save(tmp_path / "small.keras")
    np.testing.assert_array_equal(outputs(load(tmp_path / "small.keras")), outputs(small))


def test_what_cannot_be_quantised_says_why():
    translator = make()
    with pytest.raises(ValueError, match="`mode` must be one of int8. Received: 'int3'"):
        translator.quantized("int3")
    with pytest.raises(ValueError, match="`mode` must be one of int8. Received: 'int4'"):
        translator.quantize("int4")
    with pytest.raises(ValueError, match="as a whole"):
        translator.quantize("int8", filters="query")
    config = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    with pytest.raises(ValueError, match="as Keras does by default"):
        translator.quantize("int8", config=config)
    with pytest.raises(ValueError, match="float16"):
        translator.as_dtype("float16").quantized()


def test_what_a_quantised_translator_cannot_do_says_why(tmp_path):
    small = make().quantized()
    with pytest.raises(ValueError, match="quantised already, to int8"):
        small.quantized()
    with pytest.raises(ValueError, match="computes in the precision .* Received: dtype='bfloat16'"):
        small.as_dtype("bfloat16")
    with pytest.raises(ValueError, match="choose CTranslate2's own quantization"):
        ctranslate2.export(small, tmp_path / "folder")
    small.model.compile("sgd", ka.LabelSmoothedCrossentropy(0.1))
    with pytest.raises(ValueError, match="a model of int8 cannot be trained"):
        small.model.train_on_batch(INPUTS, INPUTS["decoder_token_ids"])


def test_a_file_is_quantised_and_measured(tmp_path):
    translator = make(hidden_dim=64, intermediate_dim=2048)
    translator.save(tmp_path / "model.keras")
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("\n".join(TEXTS) + "\n")
    reference.write_text("\n".join(reversed(TEXTS)) + "\n")
    said = []
    files = (tmp_path / "model.keras", tmp_path / "small.keras")
    quantize_file(*files, source=source, reference=reference, say=said.append)
    sizes = [file.stat().st_size for file in files]
    assert sizes[1] < 0.4 * sizes[0]
    assert said[0] == f"size: {sizes[0] / 1e6:.1f} MB before, {sizes[1] / 1e6:.1f} MB after"
    assert [line.split(":")[0] for line in said] == [
        "size", "speed", "BLEU", "translations that are the same"]  # fmt: skip


def test_the_command_quantises_and_refuses_in_one_line(tmp_path, run_cli):
    make().save(tmp_path / "model.keras")
    arguments = ("quantize", "model.keras", "--output")
    done = run_cli(*arguments, "small.keras")
    assert (done.status, done.err.splitlines()[-1]) == (0, "quantised: small.keras")
    assert done.out.startswith("size: 0.")
    loaded = load(tmp_path / "small.keras")
    np.testing.assert_array_equal(outputs(loaded), outputs(make().quantized()))


@pytest.mark.works("`.keras` in int8", table="format")
def test_another_backend_computes_the_same_from_our_file(tmp_path, on_another_backend):
    names = [name for name in KINDS if name != "mixed"]
    for name in names:
        make(name).quantized().save(tmp_path / f"{name}.keras")
    on_another_backend(__file__, tmp_path)
    with np.load(tmp_path / "found.npz") as found:
        for name in names:
            own = load(tmp_path / f"{name}.keras")
            for i, weight in enumerate(own.get_weights()):
                np.testing.assert_array_equal(found[f"{name} {i}"], weight)
            expected = outputs(own)
            # Inputs are rounded to 8 bits: what differs in the last bit may be one step apart.
            atol = 0.03 * np.abs(expected).max()
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=atol)


if __name__ == "__main__":
    found = {}
    for path in Path(sys.argv[1]).glob("*.keras"):
        loaded = load(path)
        found[path.stem] = outputs(loaded)
        found |= {f"{path.stem} {i}": weight for i, weight in enumerate(loaded.get_weights())}
    np.savez(Path(sys.argv[1]) / "found.npz", **found)
