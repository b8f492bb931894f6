"""What the benchmarks compute rather than time: operations, exponents, paths, formats, a layer."""

import importlib
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_aiayn import LabelSmoothedCrossentropy, Transformer, TransformerConfig, Translator
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.layers import attention

BACKEND = keras.backend.backend()
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROWS, SOURCE, TARGET = 3, 5, 4


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by its name, as it finds its neighbours."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module


@pytest.fixture
def small():
    sizes = {"num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12, "num_heads": 2}
    return TransformerConfig.base(vocabulary_size=30, **sizes)


def test_operations_are_those_of_weights_times_tokens_and_of_attention(benchmark, small):
    forward = 0
    for weight in small.build(seed=1).trainable_variables:
        if len(weight.shape) == 2:  # a matrix meets the tokens of its side
            reads_source = "encoder_block" in weight.path or any(
                f"cross_attention/{name}/" in weight.path for name in ("key", "value")
            )
            tokens = ROWS * (SOURCE if reads_source else TARGET)
            forward += 2 * tokens * int(np.prod(weight.shape))
    for queries, keys in ((SOURCE, SOURCE), (TARGET, TARGET), (TARGET, SOURCE)):
        forward += small.num_layers * 2 * 2 * ROWS * queries * keys * small.hidden_dim
    counted = benchmark("accelerator").flops(small, ROWS, SOURCE, TARGET)
    assert counted == 3 * forward


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="only torch counts its operations")
def test_operations_are_those_that_torch_counts(benchmark, small):
    from torch.utils.flop_counter import FlopCounterMode

    model = small.build(seed=1)
    model.compile(keras.optimizers.Adam(1e-4), LabelSmoothedCrossentropy())
    source, target = np.full((ROWS, SOURCE), 4), np.full((ROWS, TARGET), 4)
    inputs = {"encoder_token_ids": source, "decoder_token_ids": target}
    with FlopCounterMode(display=False) as counter:
        model.train_step((inputs, target))
    counted = benchmark("accelerator").flops(small, ROWS, SOURCE, TARGET)
    assert counter.get_total_flops() == counted


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="only torch has a kernel on a CPU")
def test_attentions_of_the_kernel_are_counted(benchmark, monkeypatch, small):
    accelerator = benchmark("accelerator")
    model = small.build(seed=1)
    model.compile(keras.optimizers.Adam(1e-4), LabelSmoothedCrossentropy())
    model.optimizer.build(model.trainable_variables)
    batch = accelerator.made_batch(30, 8, 4, seed=0)
    assert accelerator.fused_attentions(model, batch) == {}
    monkeypatch.setattr(attention, "prefers_fused_attention", lambda query, value: True)
    (count,) = accelerator.fused_attentions(model, batch).values()
    assert count == 3 * small.num_layers


@pytest.mark.backend_free
@pytest.mark.parametrize(("tokens", "longest"), [(100, 8), (1_000, 32), (7, 7)])
def test_a_made_batch_holds_the_tokens_that_were_asked_for(benchmark, tokens, longest):
    inputs, targets, weights = benchmark("accelerator").made_batch(50, tokens, longest, seed=0)
    for ids in (*inputs.values(), targets):
        assert np.count_nonzero(ids) == tokens and ids.shape[1] == longest
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_array_equal(weights > 0, targets != 0)


def test_only_the_steps_of_a_fit_are_timed(benchmark, small):
    model = small.build(seed=1)
    model.compile(keras.optimizers.SGD(0.1), LabelSmoothedCrossentropy())
    batches = [benchmark("accelerator").made_batch(30, 8, 4, seed) for seed in range(2)]
    seconds = benchmark("curves").step_seconds(model, batches, steps=2, groups=3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert int(model.optimizer.iterations) == 8


@pytest.mark.backend_free
def test_the_fit_finds_the_exponent_of_the_upper_half(benchmark):
    sizes = [1, 2, 4, 8, 16, 32, 64]
    fit = benchmark("curves").fit(sizes, [3.0 * max(size, 8) ** 1.5 for size in sizes])
    assert fit.exponent == pytest.approx(1.5)
    assert fit.factor == pytest.approx(3)
    assert fit.start == 8


@pytest.mark.backend_free
def test_paths_and_chains_are_those_of_the_papers_table(benchmark):
    table1 = benchmark("table1")
    radius = 4
    for length in (27, 64, 81):
        paths = {
            name: table1.path_length(row.readers, length)
            for name, row in table1.table_1(radius).items()
        }
        by_threes = next(layers for layers in range(9) if table1.KERNEL**layers >= length)
        assert paths == {
            "self-attention": 1,
            "recurrent": length,
            "convolution": by_threes,
            "restricted": -(-(length - 1) // radius),
        }
        plain = table1.readers_of_convolution(dilated=False)
        assert table1.path_length(plain, length) == -(-(length - 1) // (table1.KERNEL - 1))
        for name, row in table1.table_1(radius).items():
            chain = table1.sequential_operations(row.readers, length)
            assert chain == (length if name == "recurrent" else 1)


@pytest.mark.parametrize(("length", "radius"), [(12, 3), (4, 4)])
def test_restricted_attention_is_full_attention_in_a_band(benchmark, monkeypatch, length, radius):
    table1 = benchmark("table1")
    table1.check_restricted(length, 6, radius)
    monkeypatch.setattr(table1, "band", lambda n, r: np.ones((1, n, n), bool))
    if radius < length - 1:  # someone is out of reach
        with pytest.raises(AssertionError, match="Not equal"):
            table1.check_restricted(length, 6, radius)


@pytest.mark.backend_free
def test_what_is_drawn_lies_at_even_distances(benchmark):
    evenly = benchmark("workers").evenly
    assert evenly(list(range(10)), 3) == [0, 3, 6]
    assert evenly(list(range(10)), 10) == evenly(list(range(10)), 99) == list(range(10))


# Formats

# Of one length, so that one limit is that of each.
LINES = ["one dog sings", "dog one sings", "dog sings one", "sings one dog"]


@pytest.fixture
def translator():
    """With weights as after training, and the settings of the comparison."""
    tokenizer = SentencePieceTokenizer.learn(LINES * 9, 275)
    sizes = {"num_layers": 1, "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4}
    model = Transformer(tokenizer.vocabulary_size, **sizes, use_logits_bias=True, seed=1)
    rng = np.random.default_rng(1)
    for weight in model.trainable_variables:  # the same on every backend
        weight.assign(rng.normal(scale=0.25, size=weight.shape) + ("gamma" in weight.path))
    bias = np.zeros(tokenizer.vocabulary_size)
    bias[:260] = -9  # neither an empty text, which CTranslate2 would not give, nor bytes
    model.target_embedding.logits_bias.assign(bias)
    return Translator(model, tokenizer, length_penalty=0.0)


def write(name, translator, path):
    """What a worker of the comparison loads."""
    if name == "SavedModel":
        pytest.importorskip("tensorflow_text")
        importlib.import_module("keras_aiayn.interop.saved_model").export(translator, path)
    elif name == "ONNX":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
        importlib.import_module("keras_aiayn.interop.onnx").export(translator, path)
    elif name.startswith("CTranslate2"):
        pytest.importorskip("ctranslate2")
        importlib.import_module("keras_aiayn.interop.ctranslate2").export(translator, path)
    else:
        translator.save(path)


NAMES = {
    "tensorflow": [".keras, TensorFlow", "CTranslate2 float32", "SavedModel"],
    "jax": [".keras, JAX", "CTranslate2 float32"],
    "torch": [
        ".keras, PyTorch",
        "CTranslate2 float32",
        pytest.param("ONNX", marks=pytest.mark.slow),
    ],
}[BACKEND]


@pytest.mark.parametrize("name", NAMES)
def test_each_format_gives_our_translations_in_a_process_of_its_own(
    benchmark, translator, tmp_path, name
):
    formats, workers = benchmark("formats"), benchmark("workers")
    path = tmp_path / formats.FORMATS[name].file
    write(name, translator, path)
    arguments = (formats.__file__, path, "--worker", name)
    worker = workers.Worker(*arguments, backend=formats.FORMATS[name].backend)
    together = worker.ask(batches=[LINES])
    alone = worker.ask(batches=[[line] for line in LINES])
    worker.close()
    expected = translator.translate(LINES)
    assert together["texts"] == alone["texts"] == expected and all(expected)
    assert (len(together["seconds"]), len(alone["seconds"])) == (1, len(LINES))


@pytest.mark.backend_free
def test_the_formats_are_those_that_are_written_and_their_sizes_are_of_all_files(
    benchmark, tmp_path
):
    formats = benchmark("formats")
    files = {one.file for one in formats.FORMATS.values()}
    assert files == {"model.keras", *formats.COMMANDS}
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name, number in (("a", 3), ("folder/b", 5), ("folder/inner/c", 7)):
        (tmp_path / name).write_bytes(bytes(number))
    assert [formats.size(tmp_path / name) for name in ("a", "folder")] == [3, 12]


class Scores:
    """Stands in for a translator that scores."""

    def __init__(self, scores):
        self.scores = scores

    def score(self, sources, targets):
        pairs = zip(sources, targets, strict=True)
        return [types.SimpleNamespace(raw_score=self.scores[pair]) for pair in pairs]


@pytest.mark.backend_free
def test_texts_are_the_same_or_tie_by_the_model_or_differ(benchmark):
    compare = benchmark("formats").compare
    scores = Scores({("2", "b"): -1, ("2", "x"): -1.00005, ("3", "c"): -2, ("3", "y"): -2.1})
    assert compare(scores, ["1", "2", "3"], ["a", "b", "c"], ["a", "x", "y"]) == (1, 1, 1)
    assert compare(scores, ["1"], ["a"], ["a"]) == (1, 0, 0)


@pytest.mark.backend_free
def test_what_is_told_of_a_format_is_computed_from_its_row(benchmark):
    formats = benchmark("formats")
    rows = {
        ".keras, TensorFlow": formats.Measured(8_000_000, 5, 0.05, [9, 10, 11], 38, 1000, 0, 0),
        ".keras, JAX": formats.Measured(8_000_000, 5, 0.04, [20, 20, 20], 38, 1000, 0, 0),
        "int8 .keras, JAX": formats.Measured(2_000_000, 6, 0.1, [10, 9, 8], 38.5, 900, 0, 100),
        "SavedModel": formats.Measured(9_000_000, 3, 0.0345, [18, 5, 22], 37.9, 998, 1, 1),
    }
    text = formats.told(rows)
    assert "| SavedModel | 9.0 | 3.0 | 34.5 | 18 | 37.90 | -0.10 | 998 | 1 | 1 |" in text
    assert text.splitlines()[-2:] == [
        "- int8 .keras, JAX: 900 of 1,000 sentences (90.0 %) the same as by .keras, TensorFlow, "
        "and BLEU +0.50; 0.45 of the tokens/s and 0.25 of the size of .keras, JAX.",
        "- SavedModel: 998 of 1,000 sentences (99.8 %) the same as by .keras, TensorFlow, and "
        "BLEU -0.10; 2.00 of the tokens/s and 1.12 of the size of .keras, TensorFlow.",
    ]
