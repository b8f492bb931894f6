"""Figure 1: what reaches a logit and what must not, and how the model is made and kept."""

import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import ops

from keras_aiayn.layers.decoder import TransformerDecoderBlock
from keras_aiayn.layers.encoder import TransformerEncoderBlock
from keras_aiayn.special_ids import PAD
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.schedule import NoamSchedule
from keras_aiayn.transformer import Transformer

V, D, N = 17, 16, 2
SOURCE = np.array([[4, 5, 6, 7, 8, 3], [9, 10, 3, 0, 0, 0]], "int32")
TARGET = np.array([[2, 11, 12, 13, 14], [2, 15, 16, 0, 0]], "int32")
INPUTS = {"encoder_token_ids": SOURCE, "decoder_token_ids": TARGET}


def make(seed=0, **options):
    """A small model with weights as after training, where no gain is 1 and no bias 0."""
    sizes = {"num_layers": N, "hidden_dim": D, "intermediate_dim": 32, "num_heads": 2, "seed": 1}
    model = Transformer(V, **(sizes | options))
    rng = np.random.default_rng(seed)
    for weight in model.trainable_variables:
        weight.assign(weight + rng.normal(scale=0.2, size=weight.shape))
    return model


@pytest.fixture(scope="module")
def model():
    return make(dropout=0.0)


@pytest.fixture(scope="module")
def states(model):
    """A model of the same weights that gives what leaves every block, and the logits."""
    blocks = [*model.encoder_blocks, *model.decoder_blocks]
    return keras.Model(model.inputs, [*(block.output for block in blocks), model.output])


def as_numpy(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))


def assert_close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(as_numpy(actual), as_numpy(expected), rtol=0, atol=atol)


def at_real_positions(outputs):
    """Of each block the vectors, and at last the logits, where a token stands."""
    real = [SOURCE != PAD] * N + [TARGET != PAD] * (N + 1)
    # Pads that a test appends stand behind all others.
    return [x[:, : m.shape[1]][m] for x, m in zip(outputs, real, strict=True)]


def assert_all_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


# What moves a logit.


@pytest.mark.parametrize("position", range(1, TARGET.shape[1]))
def test_later_tokens_move_no_earlier_output_at_any_depth(states, position):
    later = TARGET.copy()
    later[:, position:] = np.random.default_rng(0).integers(4, V, later[:, position:].shape)
    before, after = (
        states.predict_on_batch({**INPUTS, "decoder_token_ids": ids})[N:] for ids in (TARGET, later)
    )
    for old, new in zip(before, after, strict=True):
        assert_close(new[:, :position], old[:, :position], atol=1e-6)
        assert np.abs(new - old)[:, position:].max() > 0.01


def test_every_earlier_token_and_every_source_token_moves_the_last_logits(model):
    last = as_numpy(model(INPUTS))[0, -1]
    for name, ids in INPUTS.items():
        for position in range(ids.shape[1]):
            other = ids.copy()
            other[0, position] = 15 if ids[0, position] != 15 else 4
            changed = as_numpy(model({**INPUTS, name: other}))[0, -1]
            assert np.abs(changed - last).max() > 1e-3, (name, position)


def test_the_embedding_of_the_pad_moves_nothing_at_any_depth(model, states):
    before = at_real_positions(states.predict_on_batch(INPUTS))
    matrix = model.target_embedding.table.embeddings
    old = as_numpy(matrix)
    matrix.assign(old + 100.0 * (np.arange(V) == PAD)[:, np.newaxis])
    after = at_real_positions(states.predict_on_batch(INPUTS))
    matrix.assign(old)
    # The matrix is that of the projection too: the pad's own logit does move.
    before[-1], after[-1] = before[-1][..., PAD + 1 :], after[-1][..., PAD + 1 :]
    assert_all_close(after, before)


def test_a_hundred_more_pads_move_nothing_at_any_depth(states):
    expected = at_real_positions(states.predict_on_batch(INPUTS))
    wide = {name: np.pad(ids, ((0, 0), (0, 100))) for name, ids in INPUTS.items()}
    assert_all_close(at_real_positions(states.predict_on_batch(wide)), expected)


def test_random_tokens_in_place_of_source_pads_move_nothing_under_the_same_mask(model):
    encoder_mask, decoder_mask, memory_mask = model.build_masks(SOURCE, TARGET)
    noisy = np.where(SOURCE == PAD, np.random.default_rng(0).integers(4, V, SOURCE.shape), SOURCE)
    hidden, expected = (
        model.decode(TARGET, model.encode(ids, encoder_mask), decoder_mask, memory_mask)
        for ids in (noisy.astype("int32"), SOURCE)
    )
    assert_close(hidden, expected)


def test_an_empty_source_gives_finite_logits_the_same_in_training(model):
    empty = {**INPUTS, "encoder_token_ids": SOURCE * 0}
    logits = as_numpy(model(empty, training=False))
    assert np.isfinite(logits).all()
    assert_close(model(empty, training=True), logits)


def test_an_additive_mask_is_refused(model):
    mask = ops.convert_to_tensor(np.where(SOURCE == PAD, -1e9, 0.0)[:, np.newaxis], "float32")
    with pytest.raises(ValueError, match="must be boolean"):
        model.encode(SOURCE, mask)


# A cache, the weights of attention.


def test_decoding_with_a_cache_gives_the_logits_of_the_whole_target(model):
    length, capacity = TARGET.shape[1], 7
    encoder_mask, decoder_mask, memory_mask = model.build_masks(SOURCE, TARGET)
    memory = model.encode(SOURCE, encoder_mask)
    cache = model.init_cache(memory, capacity)
    own = np.pad(as_numpy(decoder_mask) > 0, ((0, 0), (0, 0), (0, capacity - length)))
    whole = model(INPUTS)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)):  # a prefill of two tokens
        hidden, cache = model.decode(
            TARGET[:, rows],
            None,
            ops.convert_to_tensor(own[:, rows]),
            memory_mask,
            cache=cache,
            cache_index=rows.start,
            positions=ops.arange(rows.start, rows.stop),
        )
        assert_close(model.output_projection(hidden), whole[:, rows])


def test_attention_scores_are_those_of_the_model(model):
    scores = model.attention_scores(SOURCE, TARGET)
    assert {name: len(layers) for name, layers in scores.items()} == {
        "encoder": N, "decoder": N, "cross": N,
    }  # fmt: skip
    source, own, cross = (as_numpy(mask) > 0 for mask in model.build_masks(SOURCE, TARGET))
    for name, mask in (("encoder", source), ("decoder", own), ("cross", cross)):
        for weights in map(as_numpy, scores[name]):
            hidden = np.broadcast_to(~mask[:, np.newaxis], weights.shape)
            assert not weights[hidden].any()
            np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)


# Dropout.


def dropouts(model):
    return [part for part in model._flatten_layers() if isinstance(part, keras.layers.Dropout)]


def test_dropout_is_on_every_sublayer_and_both_sums_of_embedding_and_position():
    rates = [drop.rate for drop in dropouts(make(dropout=0.25, attention_dropout=0.125))]
    assert rates.count(0.25) == 2 + 2 * N + 3 * N
    assert rates.count(0.125) == N + 2 * N
    assert len(rates) == 2 + 5 * N + 3 * N


def test_the_paper_drops_no_attention_weight_and_seeds_are_set_and_far_apart_unasked():
    drops = dropouts(Transformer(V, 6, 4, 4, 1))
    assert sorted({drop.rate for drop in drops}) == [0.0, 0.1]
    # On torch, seeds n apart would give the same masks n steps apart.
    seeds = sorted(drop.seed for drop in drops)
    assert len(seeds) == 2 + 5 * 6 + 3 * 6
    assert np.diff(seeds).min() >= 1_000_000
    assert seeds[-1] < 2**31


def test_dropout_acts_in_training_only():
    model = make(dropout=0.5, num_layers=1)
    still = as_numpy(model(INPUTS))
    assert_close(model(INPUTS, training=False), still, atol=0)
    first, second = (as_numpy(model(INPUTS, training=True)) for _ in range(2))
    assert min(np.abs(first - still).max(), np.abs(first - second).max()) > 0.01


def test_the_seed_of_the_process_governs_dropout_and_weights():
    logits = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        logits.append(as_numpy(Transformer(V, 1, D, 32, 2)(INPUTS, training=True)))
    np.testing.assert_array_equal(*logits)


# Options.


def test_one_matrix_serves_source_target_and_projection(model):
    matrices = [weight for weight in model.weights if V in weight.shape]
    assert [weight.shape for weight in matrices] == [(V, D)]
    assert model.source_embedding is model.target_embedding


def test_two_vocabularies_and_an_untied_projection_have_matrices_of_their_own():
    model = make(
        share_embeddings=False,
        target_vocabulary_size=23,
        tie_projection=False,
        use_logits_bias=True,
        num_layers=1,
    )
    assert model(INPUTS).shape == (*TARGET.shape, 23)
    shapes = [weight.shape for weight in model.weights if {V, 23} & set(weight.shape)]
    assert sorted(shapes, key=str) == sorted([(V, D), (23, D), (D, 23), (23,)], key=str)


def test_pre_norm_normalises_the_end_of_each_stack():
    post, pre = make(num_layers=1), make(num_layers=1, normalize_first=True)
    assert len(pre.weights) == len(post.weights) + 2 * 2
    encoder_mask = pre.build_masks(SOURCE, TARGET)[0]
    memory = pre.encode(SOURCE, encoder_mask)
    gain, bias = pre.encoder_norm.get_weights()
    normed = (as_numpy(memory) - bias) / gain
    np.testing.assert_allclose(normed.mean(axis=-1), 0, atol=1e-4)
    np.testing.assert_allclose(normed.std(axis=-1), 1, atol=1e-3)


def test_learned_positions_have_one_row_for_each_position():
    model = make(num_layers=1, positions="learned", max_length=6)
    assert [weight.shape for weight in model.position.weights] == [(6, D)]
    with pytest.raises(ValueError, match="max_length=6, a sequence of 7 tokens"):
        model({**INPUTS, "encoder_token_ids": np.ones((2, 7), "int32")})


def test_every_block_is_a_row_of_the_summary(model):
    lines = []
    model.summary(print_fn=lines.append)
    table = "\n".join(lines)
    for i in range(N):
        assert f"encoder_block_{i}" in table and f"decoder_block_{i}" in table
    kinds = [type(layer) for layer in model.layers]
    assert kinds.count(TransformerEncoderBlock) == kinds.count(TransformerDecoderBlock) == N


def test_lengths_are_free_and_logits_float32(model):
    assert model.output.shape == (None, None, V)
    assert model.output.dtype == "float32"
    one = {"encoder_token_ids": [[3]], "decoder_token_ids": [[2]]}
    assert model({name: np.array(ids) for name, ids in one.items()}).shape == (1, 1, V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_vocabulary_size": 23}, "share_embeddings=False.*target_vocabulary_size=23"),
        ({"num_heads": 3}, "multiple of `num_heads`.*num_heads=3"),
        ({"positions": "rotary"}, "Received: positions='rotary'"),
        ({"positions": "learned"}, "max_length=None"),
        ({"max_length": 9}, "max_length=9"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


# Keeping.


OPTIONS = {
    "paper": {},
    "learned": {"positions": "learned", "max_length": 6, "value_dim": 3, "key_dim": 5},
    "others": {
        "share_embeddings": False,
        "target_vocabulary_size": 23,
        "tie_projection": False,
        "use_logits_bias": True,
        "normalize_first": True,
        "use_bias": True,
        "activation": "silu",
        "layer_norm_epsilon": 1e-5,
        "attention_dropout": 0.1,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_saved_model_is_the_same_when_loaded(options, tmp_path):
    model = make(**options, num_layers=1, name="mine")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is Transformer
    assert loaded.get_config() == model.get_config()
    assert loaded.get_config().items() >= options.items()
    assert_close(loaded(INPUTS), model(INPUTS), atol=1e-6)


def test_the_tie_survives_saving(tmp_path):
    path = tmp_path / "model.keras"
    make(num_layers=1).save(path)
    shapes = []
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
        h5py.File(file).visititems(lambda _, item: shapes.append(getattr(item, "shape", None)))
    assert shapes.count((V, D)) == 1 and not shapes.count((D, V))
    loaded = keras.saving.load_model(path)
    (matrix,) = (weight for weight in loaded.weights if V in weight.shape)
    hidden = np.random.default_rng(0).normal(size=(1, 3, D)).astype("float32")
    matrix.assign(as_numpy(matrix) * 2)
    assert_close(loaded.output_projection(hidden), hidden @ as_numpy(matrix).T)
    embedded = loaded.source_embedding(SOURCE)
    assert_close(embedded, as_numpy(matrix)[SOURCE] * np.sqrt(D))


def test_mixed_precision_stays_near_float32_and_survives_saving(model, tmp_path):
    mixed = make(dtype="mixed_bfloat16")
    mixed.set_weights(model.get_weights())
    assert all(weight.dtype == "float32" for weight in mixed.trainable_variables)
    logits = mixed(INPUTS)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    expected = as_numpy(model(INPUTS))
    assert np.abs(as_numpy(logits) - expected).max() < 0.05 * np.abs(expected).max()
    mixed.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.encoder_blocks[0].self_attention.compute_dtype == "bfloat16"
    assert_close(loaded(INPUTS), logits, atol=1e-6)


def test_what_is_saved_of_compiling_suits_every_backend(model):
    assert not model.get_compile_config()
    compiled = Transformer.from_config(model.get_config())
    compiled.compile(keras.optimizers.Adam(NoamSchedule(D)), LabelSmoothedCrossentropy())
    config = compiled.get_compile_config()
    assert config["jit_compile"] == "auto"
    assert config["optimizer"]["module"] == "keras.optimizers"
    again = Transformer.from_config(model.get_config())
    again.compile_from_config(config)
    assert isinstance(again.optimizer, keras.optimizers.Adam)
    assert again.jit_compile == compiled.jit_compile
    assert again.loss.get_config() == compiled.loss.get_config()
