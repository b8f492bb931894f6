"""What the pictures show is what was computed; that they look well was seen by eye."""

import json

import numpy as np
import pytest
from keras import ops

from keras_aiayn import NoamSchedule, TransformerConfig, plots
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.layers.position import SinusoidalPositionEncoding
from keras_aiayn.translator import Translator

matplotlib = pytest.importorskip("matplotlib")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def translator():
    tokenizer = ByteTokenizer()
    sizes = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 16, "num_heads": 2}
    model = TransformerConfig.tiny(tokenizer.vocabulary_size, **sizes).build(seed=1)
    return Translator(model, tokenizer, tokenizer)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, in order."""
    figures = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda *both: (figures.append(both[0]), save(*both)))
    return figures


# What a model that has learned nothing says is in no font.
@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("kind", plots.KINDS)
def test_attention_shows_each_head_of_the_layer(translator, drawn, tmp_path, kind):
    plots.plot_attention(translator, "ab", tmp_path / "a.png", layer=0, kind=kind)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    heads = [axis for axis in drawn[0].axes if axis.get_title().startswith("head")]
    assert len(heads) == 2
    for head in heads:
        weights = head.images[0].get_array()
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        rows = [label.get_text() for label in heads[0].get_yticklabels()]
        columns = [label.get_text() for label in head.get_xticklabels()]
        assert weights.shape == (len(rows), len(columns))
        if kind != "decoder":
            assert columns == ["a", "b", "</s>"]
        else:
            assert columns[0] == "<s>" and columns[1:] == rows[:-1]


@pytest.mark.backend_free
@pytest.mark.parametrize(("heads", "rows", "columns"), [(1, 1, 1), (3, 1, 3), (5, 2, 3), (8, 2, 4)])
def test_heads_stand_in_rows_and_no_place_is_drawn_without_one(
    drawn, tmp_path, heads, rows, columns
):
    weights = np.full((heads, 2, 3), 1 / 3)
    plots._draw_heads(weights, list("abc"), list("de"), "title", "writes", tmp_path / "a.png")
    *places, colorbar = drawn[0].axes
    assert [place.get_title() for place in places] == [f"head {i + 1}" for i in range(heads)]
    grid = places[-1].get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == (rows, columns)
    assert colorbar.get_ylabel() == "attention"


def test_positions_are_those_of_the_layer(drawn, tmp_path):
    plots.plot_positions(tmp_path / "p.svg", hidden_dim=8, length=12)
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()
    shown = drawn[0].axes[0].images[0].get_array()
    expected = ops.convert_to_numpy(SinusoidalPositionEncoding.encode(np.arange(12), 8))
    np.testing.assert_array_equal(shown, expected)
    likeness = drawn[0].axes[1].lines[0].get_ydata()
    assert likeness.argmax() == 6 and likeness[6] == pytest.approx(1)


def test_schedules_are_drawn_from_the_first_update(drawn, tmp_path):
    plots.plot_schedule({"d": NoamSchedule(64, 10)}, tmp_path / "s.pdf", steps=30)
    line = drawn[0].axes[0].lines[0]
    rates = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert rates[1] == pytest.approx(64**-0.5 * 10**-1.5)
    assert max(rates, key=rates.get) == 10 and max(rates) == 30


def test_runs_are_drawn_from_their_logs(drawn, tmp_path):
    names = ("step", "seconds", "bleu", "valid_perplexity", "perplexity", "learning_rate")
    rows = [(10, 60, 3.0, 50, 40, 1e-3), (20, 120, 7.0, 30, 20, 2e-3)]
    log = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(log)
    plots.plot_run([tmp_path / "one", tmp_path / "two"], tmp_path / "r.png")
    by_time, by_update, perplexity, rate = drawn[0].axes
    assert by_time.lines[1].get_xydata().tolist() == [[1, 3], [2, 7]]
    assert by_update.lines[1].get_xydata().tolist() == [[10, 3], [20, 7]]
    assert perplexity.lines[1].get_xydata().tolist() == [[10, 40], [20, 20]]
    assert rate.lines[0].get_xydata().tolist() == [[10, 1e-3], [20, 2e-3]]
    assert [text.get_text() for text in by_time.get_legend().get_texts()] == ["one", "two"]


def row_of_table_3(name, perplexity, bleu, paper, spread=None):
    return {
        "row": name,
        "seeds": [1] if spread is None else [1, 2],
        "perplexity": {"mean": perplexity, "spread": spread},
        "bleu": {"mean": bleu, "spread": spread},
        "paper": dict(zip(("perplexity", "bleu"), paper, strict=True)),
    }


def test_rows_of_table_3_are_drawn_as_changes_from_base(drawn, tmp_path):
    rows = [
        row_of_table_3("base", 10.0, 20.0, (5.0, 25.0), spread=0.5),
        row_of_table_3("A-h1", 12.0, 18.0, (5.5, 24.0), spread=1.0),
        row_of_table_3("C-N2", 9.0, 21.5, (4.0, 26.0)),
    ]
    plots.plot_ablation(rows, tmp_path / "t.png")
    left, right = drawn[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["A-h1", "C-N2"]
    for axis, ours, paper, band in (
        (left, [20, -10], [10, -20], (-5, 5)),
        (right, [-2, 1.5], [-1, 1], (-0.5, 0.5)),
    ):
        assert list(axis.containers[0].lines[0].get_xdata()) == pytest.approx(ours)
        assert list(axis.lines[-1].get_xdata()) == pytest.approx(paper)
        box = axis.patches[0].get_extents().transformed(axis.transData.inverted())
        assert (box.x0, box.x1) == pytest.approx(band)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda to: plots.plot_positions(to, hidden_dim=7), "even and positive.*hidden_dim=7"),
        (lambda to: plots.plot_positions(to, hidden_dim=0), "even and positive.*hidden_dim=0"),
        (lambda to: plots.plot_positions(to, length=0), "length=0"),
        (lambda to: plots.plot_schedule({}, to, steps=0), "`steps` must be positive. Received: 0"),
        (lambda to: plots.plot_run([to.parent], to), "no log of a run"),
        (lambda to: plots.plot_ablation([], to), "from base to another row. Received: no row"),
        (lambda to: plots.plot_positions(to.with_suffix(".doc")), "'doc' is not supported"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_nothing(tmp_path, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "both"}, "`kind` must be one of encoder"),
        ({"layer": 2}, "from 0 to 1. Received"),
        ({"text": " "}, "no translation to look at. Received: ' '"),
    ],
)
def test_attention_that_is_not_there_is_refused(translator, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_attention(translator, output=tmp_path / "a.png", **{"text": "ab"} | options)
