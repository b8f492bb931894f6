"""What the benchmarks compute rather than time: operations, exponents, paths, and a layer."""

import importlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_aiayn import LabelSmoothedCrossentropy, TransformerConfig
from keras_aiayn.layers import attention

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
