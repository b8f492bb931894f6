"""Keras's own export of the model, ids to logits: each format's runtime gives the model's numbers.

Where Keras cannot write a format, the test asserts what Keras says, and is skipped.
"""

import sys

import keras
import numpy as np
import pytest

from keras_aiayn import Transformer
from keras_aiayn.special_ids import BOS, PAD

# Of the exporters, about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

BACKEND = keras.backend.backend()
SIZES = {"num_layers": 1, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4}
VOCABULARY = 260


def make():
    """A model with weights as after training."""
    model = Transformer(VOCABULARY, **SIZES, seed=1)
    rng = np.random.default_rng(1)
    for weight in model.trainable_variables:  # the same on every backend
        weight.assign(rng.normal(scale=0.25, size=weight.shape) + ("gamma" in weight.path))
    return model


def batch(rows, source, target):
    """Inputs of that size; all rows but the first end in pads."""
    rng = np.random.default_rng(1)
    source_ids = rng.integers(4, VOCABULARY, (rows, source), dtype="int32")
    target_ids = rng.integers(4, VOCABULARY, (rows, target), dtype="int32")
    source_ids[1:, source - 2 :] = PAD
    target_ids[:, 0] = BOS
    target_ids[1:, target - 1 :] = PAD
    return {"encoder_token_ids": source_ids, "decoder_token_ids": target_ids}


# A file in the runtime of its format, as a function of the inputs.


def in_tensorflow(folder):
    tensorflow = pytest.importorskip("tensorflow")
    loaded = tensorflow.saved_model.load(folder)
    return lambda inputs: loaded.serve(inputs)


def in_onnxruntime(file):
    session = pytest.importorskip("onnxruntime").InferenceSession(file)
    return lambda inputs: session.run(None, inputs)[0]


def in_openvino(file):
    # It would compute in bfloat16 where the CPU can.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    model = pytest.importorskip("openvino").Core().compile_model(file, "CPU", settings)
    return lambda inputs: model(inputs)[0]


def in_litert(file):
    run = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(file).get_signature_runner()
    return lambda inputs: run(**inputs)["output_0"]


FORMATS = {
    "tf_saved_model": ("SavedModel", "folder", "tensorflow", in_tensorflow),
    "onnx": ("ONNX", "model.onnx", "onnxruntime", in_onnxruntime),
    "openvino": ("OpenVINO", "model.xml", "openvino", in_openvino),
    "litert": ("LiteRT", "model.tflite", "ai_edge_litert", in_litert),
}
# What Keras says where it cannot. Of LiteRT on PyTorch and ONNX on JAX that is first the name of a
# package that is none of ours; with it, sizes are fixed in the one and refused by the other.
REFUSALS = {
    ("tf_saved_model", "torch"): "'dict' object has no attribute 'shape'",
    ("onnx", "jax"): "requires the jax2onnx module|Incompatible shapes for broadcasting",
    ("onnx", "torch"): "Failed to export a node",  # of unknown size, in the layer normalisation
    ("openvino", "jax"): "No conversion rule found for operations: XlaCallModule",
    ("litert", "jax"): "LiteRT export requires TensorFlow or PyTorch backend",
    ("litert", "torch"): "you must install the `litert-torch` package",
}


@pytest.fixture(autouse=True)
def without_reports(monkeypatch):
    """OpenVINO would tell its makers of each import."""
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)


ROWS = [
    pytest.param(kind, marks=pytest.mark.works(f"Keras's {title} of the model", table="format"))
    for kind, (title, *_) in FORMATS.items()
]


@pytest.mark.parametrize("kind", ROWS)
def test_batches_and_lengths_of_any_size_give_the_logits_of_the_model(kind, tmp_path):
    _, name, runtime, load = FORMATS[kind]
    pytest.importorskip(runtime)
    model, file = make(), str(tmp_path / name)
    # Of a model that was never called, Keras wants to be told its inputs for ONNX.
    signature = [model.input] if kind == "onnx" else None
    if (kind, BACKEND) in REFUSALS:
        with pytest.raises(Exception, match=REFUSALS[kind, BACKEND]):
            model.export(file, format=kind, verbose=False, input_signature=signature)
        pytest.skip(f"Keras refuses: {REFUSALS[kind, BACKEND]}")
    model.export(file, format=kind, verbose=False, input_signature=signature)
    run = load(file)
    for inputs in (batch(3, 9, 7), batch(1, 4, 6)):
        logits = model.predict_on_batch(inputs)
        np.testing.assert_allclose(np.asarray(run(inputs)), logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.works("Keras's ONNX of the model, of one size", table="format")
def test_given_one_size_every_backend_writes_onnx(tmp_path):
    if BACKEND == "jax":
        pytest.importorskip("jax2onnx")
    model, file, inputs = make(), str(tmp_path / "model.onnx"), batch(2, 5, 4)
    signature = {
        name: keras.InputSpec(shape=ids.shape, dtype="int32", name=name)
        for name, ids in inputs.items()
    }
    model.export(file, format="onnx", verbose=False, input_signature=[signature])
    logits = model.predict_on_batch(inputs)
    np.testing.assert_allclose(in_onnxruntime(file)(inputs), logits, rtol=0, atol=1e-4)
