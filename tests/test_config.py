"""Table 3, the presets, and the settings of the command line."""

import dataclasses
import functools
import inspect

import pytest

from keras_aiayn.config import (
    TABLE_3,
    TrainingConfig,
    TransformerConfig,
    preset,
    table3,
    with_settings,
)
from keras_aiayn.transformer import Transformer

# Parameters without the embedding matrix, from the paper's sizes.
WITHOUT_EMBEDDING = {
    "base": 44_101_632,
    "A-h1": 44_101_632,
    "A-h4": 44_101_632,
    "A-h16": 44_101_632,
    "A-h32": 44_101_632,
    "B-dk16": 37_023_744,
    "B-dk32": 39_383_040,
    "C-N2": 14_700_544,
    "C-N4": 29_401_088,
    "C-N8": 58_802_176,
    "C-d256": 17_344_512,
    "C-d1024": 125_927_424,
    "C-ff1024": 31_506_432,
    "C-ff4096": 69_292_032,
    "D-drop0.0": 44_101_632,
    "D-drop0.2": 44_101_632,
    "D-ls0.0": 44_101_632,
    "D-ls0.2": 44_101_632,
    "E-learned": 44_101_632,
    "big": 176_283_648,
}
V = 37_000


def embedding_parameters(config):
    """The one matrix, and where positions are learned theirs."""
    return (config.vocabulary_size + (config.max_length or 0)) * config.hidden_dim


def test_every_row_of_table_3_is_there():
    assert list(TABLE_3) == list(WITHOUT_EMBEDDING)


@functools.cache
def parameters(config):
    return config.build().count_params()


@pytest.mark.backend_free
@pytest.mark.parametrize("row", TABLE_3)
def test_parameters_of_a_row_by_one_layer_of_its_stacks(row):
    # All layers of a stack are alike; the slow test below builds the whole models.
    config, _ = table3(row, V)
    changes = {"num_layers": 1, "vocabulary_size": 4, "positions": "sinusoidal"}
    one = dataclasses.replace(config, **changes, max_length=None, dropout=0.0)
    layer = parameters(one) - embedding_parameters(one)
    assert config.num_layers * layer == WITHOUT_EMBEDDING[row]


@pytest.mark.backend_free
def test_base_has_the_papers_parameters():
    assert TransformerConfig.base().build().count_params() == 63_045_632


@pytest.mark.slow
@pytest.mark.backend_free
@pytest.mark.parametrize(("row", "expected"), WITHOUT_EMBEDDING.items())
def test_parameters_of_a_row_by_the_whole_model(row, expected):
    config, _ = table3(row, V)
    assert config.build().count_params() == expected + embedding_parameters(config)


def test_rows_a_and_b_set_heads_apart_from_the_width():
    heads = {
        row: (config.num_heads, config.key_dim, config.value_dim)
        for row in TABLE_3
        for config, _ in [table3(row)]
    }
    assert heads["A-h1"] == (1, 512, 512) and heads["A-h32"] == (32, 16, 16)
    assert heads["B-dk16"] == (8, 16, 64) and heads["B-dk32"] == (8, 32, 64)
    assert heads["C-d256"] == (8, 32, 32) and heads["C-d1024"] == (8, 128, 128)


def test_rows_d_and_big_change_the_training():
    base = TrainingConfig()
    assert (base.steps, base.warmup_steps, base.label_smoothing) == (100_000, 4_000, 0.1)
    assert (base.beta_1, base.beta_2, base.epsilon) == (0.9, 0.98, 1e-9)
    assert table3("D-ls0.0")[1] == dataclasses.replace(base, label_smoothing=0.0)
    assert table3("D-ls0.2")[1] == dataclasses.replace(base, label_smoothing=0.2)
    assert table3("big")[1].steps == 300_000
    assert table3("D-drop0.2")[0].dropout == 0.2 and table3("D-drop0.0")[0].dropout == 0.0
    assert table3("E-learned")[0].positions == "learned"
    assert table3("big")[0] == TransformerConfig.big()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (TransformerConfig.base(), (37_000, 6, 512, 2048, 8, 0.1)),
        (TransformerConfig.big(), (37_000, 6, 1024, 4096, 16, 0.3)),
        (TransformerConfig.tiny(100), (100, 4, 128, 256, 4, 0.3)),
        (TransformerConfig.small(100), (100, 3, 256, 1024, 4, 0.1)),
    ],
)
def test_presets_have_the_sizes_they_are_known_by(config, sizes):
    names = "vocabulary_size num_layers hidden_dim intermediate_dim num_heads dropout".split()
    assert tuple(getattr(config, name) for name in names) == sizes
    assert (config.normalize_first, config.share_embeddings, config.tie_projection) == (
        False, True, True,
    )  # fmt: skip


def test_a_preset_takes_changes():
    config = TransformerConfig.tiny(100, dropout=0.0, num_layers=2)
    assert (config.dropout, config.num_layers, config.hidden_dim) == (0.0, 2, 128)
    assert preset("tiny", 100)[0] == TransformerConfig.tiny(100)
    assert preset("tiny", 100)[1].warmup_steps == 1_000
    assert preset("B-dk16", 100) == table3("B-dk16", 100)


def test_fields_are_the_arguments_of_the_model_with_the_same_defaults():
    arguments = {
        name: parameter.default
        for name, parameter in inspect.signature(Transformer.__init__).parameters.items()
        if name not in ("self", "seed", "name", "kwargs")
    }
    fields = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    assert fields.pop("vocabulary_size") is dataclasses.MISSING
    assert arguments.pop("vocabulary_size") is inspect.Parameter.empty
    assert fields == arguments


def test_build_hands_every_field_to_the_model():
    config = TransformerConfig(
        vocabulary_size=11, num_layers=1, hidden_dim=6, intermediate_dim=7, num_heads=2,
        key_dim=4, value_dim=5, dropout=0.2, attention_dropout=0.3, positions="learned",
        max_length=8, share_embeddings=False, target_vocabulary_size=12, tie_projection=False,
        use_logits_bias=True, activation="gelu", normalize_first=True, layer_norm_epsilon=1e-5,
        use_bias=True, dtype="mixed_bfloat16",
    )  # fmt: skip
    built = config.build(seed=7).get_config()
    assert built["seed"] == 7
    assert built.pop("dtype")["config"]["name"] == "mixed_bfloat16"
    expected = dataclasses.asdict(config)
    del expected["dtype"]
    assert built.items() >= expected.items()
    unchanged = dataclasses.asdict(TransformerConfig(vocabulary_size=1))
    assert not expected.items() & unchanged.items()


@pytest.mark.parametrize("config", [TransformerConfig.tiny(100), TrainingConfig()])
def test_configurations_are_frozen(config):
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (TransformerConfig, {"vocabulary_size": 0}, "Received: vocabulary_size=0"),
        (TransformerConfig, {"vocabulary_size": 9, "num_heads": -1}, "Received: num_heads=-1"),
        (TransformerConfig, {"vocabulary_size": 9, "dropout": 1.0}, "below 1.*dropout=1.0"),
        (TrainingConfig, {"steps": 0}, "`steps` must be positive"),
        (TrainingConfig, {"seed": -1}, "`seed` must not be negative"),
        (TrainingConfig, {"seed": 10**10}, "`seed` must be at most"),
        (TrainingConfig, {"beta_2": 1.0}, r"`beta_2` must be in \[0, 1\)"),
        (TrainingConfig, {"epsilon": 0.0}, "`epsilon` must be positive"),
        (TrainingConfig, {"learning_rate_scale": float("inf")}, "must be positive"),
        (TrainingConfig, {"checkpoint_every": 0}, "or `checkpoint_minutes`"),
        (TrainingConfig, {"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ],
)
def test_impossible_values_are_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_an_unknown_row_or_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="no row 'A-h3'.*A-h32, B-dk16"):
        table3("A-h3")
    with pytest.raises(ValueError, match="no configuration 'huge'.*tiny, small, base"):
        preset("huge", 100)


def test_settings_reach_either_configuration():
    settings = ["dropout=0.2", "steps=1_000", "share_embeddings=False", "key_dim=none",
                "target_vocabulary_size=12", "activation=gelu", "corpus_weights=1,2.5"]  # fmt: skip
    model, training = with_settings(preset("tiny", 100), settings)
    expected = TransformerConfig.tiny(
        100, dropout=0.2, share_embeddings=False, target_vocabulary_size=12, activation="gelu"
    )
    assert model == expected
    assert training == dataclasses.replace(
        preset("tiny", 100)[1], steps=1_000, corpus_weights=(1.0, 2.5)
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropuot=0.2", "'dropuot=0.2'.*Names: accumulation, activation"),
        ("dropout", "NAME=VALUE. Received: 'dropout'"),
        ("steps=many", "`steps` takes a value of type int. Received: 'many'"),
        ("steps=1.5", "`steps` takes a value of type int"),
        ("use_bias=yes", "`use_bias` takes a value of type bool"),
        ("dropout=2", "below 1"),
        ("corpus_weights=1;2", "`corpus_weights` takes a value of type tuple"),
        ("corpus_weights=1,0", "`corpus_weights` must be positive"),
    ],
)
def test_a_wrong_setting_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        with_settings(preset("tiny", 100), [setting])
