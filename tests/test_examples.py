"""The examples do what they say: trees there and back, evalb's counts, and models that learn."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keras_aiayn.special_ids import PAD

EXAMPLES = Path(__file__).parents[1] / "examples"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # its dataclasses look themselves up
    spec.loader.exec_module(loaded)
    return loaded


parsing = module("parsing")
language_model = module("language_model")
masked_model = module("masked_model")

# As it stands in a treebank: an outer bracket, function tags, traces, and lines.
WRITTEN = """
( (S (NP-SBJ=2 (DT The) (NN dog))
     (VP (VBD was)
         (VP (VBN seen) (NP-1 (-NONE- *)) (SBAR-ADV (-NONE- 0) (S (-NONE- *T*-1)))
             (PP-LGS (IN by) (NP (-LRB- -LRB-) (NNP Ann)))))
     (. .)) )
(TOP (NP (NN Rain)) (. .))
"""
TIDY = (
    ("S", ("NP", ("DT", "The"), ("NN", "dog")),
     ("VP", ("VBD", "was"),
      ("VP", ("VBN", "seen"), ("PP", ("IN", "by"), ("NP", ("-LRB-", "-LRB-"), ("NNP", "Ann"))))),
     (".", ".")),
    ("TOP", ("NP", ("NN", "Rain")), (".", ".")),
)  # fmt: skip
LINES = (
    "(S (NP XX XX )NP (VP XX (VP XX (PP XX (NP XX XX )NP )PP )VP )VP XX )S",
    "(TOP (NP XX )NP XX )TOP",
)

# Trees of any shape; a word is its own part of speech where only the shape matters.
leaf = st.tuples(st.sampled_from(["XX", ",", ".", "NN"]), st.sampled_from(["a", "b", ".", "-"]))
label = st.sampled_from(["S", "NP", "VP", "ADVP", "PRT", "X|Y", "WHNP"])
trees = st.recursive(
    leaf, lambda below: st.builds(lambda top, rest: (top, *rest), label, st.lists(below, min_size=1,
                                                                                   max_size=4))
)  # fmt: skip
lines = st.lists(
    st.sampled_from(["(S", ")S", "(NP", ")NP", "(VP", ")VP", "XX", "(", ")", "word"]), max_size=20
).map(" ".join)


def without_tags(tree):
    """The tree with XX for every part of speech: what a line tells."""
    if parsing.is_leaf(tree):
        return ("XX", tree[1])
    return (tree[0], *map(without_tags, tree[1:]))


# Trees as lines


@pytest.mark.backend_free
def test_a_treebank_is_read_without_traces_and_function_tags():
    assert tuple(parsing.read_trees(WRITTEN.splitlines())) == TIDY


@pytest.mark.backend_free
def test_a_tree_becomes_a_line_and_a_line_the_tree():
    for tree, line in zip(TIDY, LINES, strict=True):
        assert parsing.linearize(tree) == line
        assert parsing.delinearize(line, parsing.words(tree)) == without_tags(tree)


@pytest.mark.backend_free
@given(trees)
def test_any_tree_comes_back_from_its_line_and_from_its_brackets(tree):
    line = parsing.linearize(tree)
    assert parsing.delinearize(line, parsing.words(tree)) == without_tags(tree)
    assert parsing.read_trees([f"( {parsing.written(tree)})"]) == [tree]


@pytest.mark.backend_free
@given(lines, st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
@example("", ["a"])
@example("(S", ["a", "b"])
def test_any_line_gives_a_tree_of_the_words(line, sentence):
    tree = parsing.delinearize(line, sentence)
    assert parsing.words(tree) == sentence
    assert tree == parsing.delinearize(parsing.linearize(tree), sentence)


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "line, right",
    [
        ("(S (NP XX )NP (VP XX", "(S (NP (XX a)) (VP (XX b)))"),  # brackets stay open
        ("(S (NP XX )S )NP XX", "(TOP (S (NP (XX a))) (XX b))"),  # an outer one closes the inner
        ("(S XX )VP XX )S", "(S (XX a) (XX b))"),  # one closes nothing
        ("(S (NP )NP XX XX XX )S", "(S (XX a) (XX b))"),  # no words, and too many
        ("(S (NP XX )NP )S", "(S (NP (XX a)) (XX b))"),  # a word is missing
        ("", "(TOP (XX a) (XX b))"),
        ("(S )S", "(S (XX a) (XX b))"),
    ],
)
def test_a_malformed_line_is_mended(line, right):
    assert parsing.written(parsing.delinearize(line, ["a", "b"])) == right


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "text, message",
    [
        ("(S (NN a)", "ends within a tree"),
        ("(S (NN a)))", "line 1: '\\)' stands outside"),
        ("\n(S a b)", "line 2: a bracket holds .* Received: \\(S a b\\)"),
        ("(S ())", "Received: \\(\\)"),
        ("(S (NN a) b)", "Received: \\(S \\(...\\) b\\)"),
        ("(S (-NONE- *))", "without words"),
        ("", "no trees"),
    ],
)
def test_what_is_no_tree_is_refused_with_its_line(text, message):
    with pytest.raises(ValueError, match=message):
        parsing.read_trees(text.splitlines())


# evalb


def score_of(ours: str, right: str):
    return parsing.score(parsing.read_trees([ours]), parsing.read_trees([right]))


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "ours, right, counts",
    [
        # The object's PP is taken for the verb's: of 6 brackets each, NP 2-7 is not found.
        (
            "(S (NP (XX I)) (VP (XX saw) (NP (XX the) (XX man)) (PP (XX of) (NP (XX it)))))",
            "(S (NP (P I)) (VP (V saw) (NP (NP (D the) (N man)) (PP (I of) (NP (P it))))))",
            (6, 7, 6, 0),
        ),
        # Punctuation is in no span, so where it hangs is the same; a bracket of it alone is none.
        (
            "(S (NP (XX a) (XX ,)) (VP (XX b)) (X (XX .)))",
            "(S (NP (N a)) (, ,) (VP (V b) (. .)))",
            (3, 3, 3, 1),
        ),
        ("(TOP (S (XX a)))", "(S (N a))", (1, 1, 1, 1)),  # the outermost does not count
        ("(TOP (X (XX a)) (X (XX b)))", "(X (N a) (N b))", (0, 1, 2, 0)),
        ("(S (PRT (XX up)))", "(S (ADVP (RP up)))", (2, 2, 2, 1)),
        ("(S (NP (NP (XX a))))", "(S (NP (N a)))", (2, 2, 3, 0)),  # twice there, once right
        ("(S (NP (NP (XX a))))", "(S (NP (NP (N a))))", (3, 3, 3, 1)),
        ("(S (NP (XX a)))", "(S (VP (N a)))", (1, 2, 2, 0)),
    ],
)
def test_brackets_are_counted_as_evalb_does(ours, right, counts):
    scores = score_of(ours, right)
    assert (scores.matched, scores.right, scores.given, scores.complete) == counts
    assert (scores.sentences, scores.skipped) == (1, 0)


@pytest.mark.backend_free
def test_recall_precision_and_f1_are_percents_of_all_sentences():
    two = ["(S (NP (NP (N a))))", "(S (N a) (N b))"]
    scores = parsing.score(parsing.read_trees(two), parsing.read_trees(["(S (NP (N a)))", two[1]]))
    assert (scores.recall, scores.precision) == (100, 75)
    assert scores.f1 == pytest.approx(2 * 100 * 75 / 175)
    assert scores.complete_match == 50
    skipped = score_of("(S (N a))", "(S (N a) (N b))")
    assert (skipped.sentences, skipped.skipped, skipped.f1) == (0, 1, 0)


def evalb(ours, right):
    """The same counts another way: out of the written lines, pair by pair, as evalb does."""
    tags = [tag for tag, _ in parsing.leaves(right)]

    def spans(tree):
        found, open_, word, real = [], [], 0, 0
        for token in parsing.linearize(tree).split():
            if token == "XX":
                real += tags[word] not in (",", ":", "``", "''", ".")
                word += 1
            elif token.startswith("("):
                open_.append(real)
            else:
                start = open_.pop()
                name = "ADVP" if token == ")PRT" else token[1:]
                found += [(name, start, real)] * (start < real and name != "TOP")
        return found

    one, other = spans(ours), spans(right)
    unused, matched = list(one), 0
    for bracket in other:
        if bracket in unused:
            unused.remove(bracket)
            matched += 1
    return matched, len(other), len(one), matched == len(one) == len(other)


@pytest.mark.backend_free
@given(trees, lines)
def test_the_counts_are_those_of_a_second_computation(right, line):
    ours = parsing.delinearize(line, parsing.words(right))
    scores = parsing.score([ours], [right])
    assert evalb(ours, right) == (scores.matched, scores.right, scores.given, scores.complete)
    itself = parsing.score([right], [right])
    assert itself.matched == itself.right and itself.complete == 1


# The made grammar


@pytest.mark.backend_free
def test_the_made_grammar_has_what_a_parser_must_learn():
    made = parsing.made_trees(400, seed=1)
    assert made == parsing.made_trees(400, seed=1) != parsing.made_trees(400, seed=2)
    sentences = [" ".join(parsing.words(tree)) for tree in made]
    assert len(set(sentences)) == 400 and max(len(one.split()) for one in sentences) <= 30
    assert not any("-" in token for tree in made for token in parsing.linearize(tree).split())
    attached = Counter(
        (node[0], "with" in [child[1][1] for child in node[1:] if child[0] == "PP"])
        for tree in made
        for node in inner(tree)
    )
    assert attached["VP", True] > 20 and attached["NP", True] > 20
    assert {"SBAR", "WHNP", "PRT", "ADVP", "ADJP"} < {node for node, _ in attached}


def inner(tree):
    if not parsing.is_leaf(tree):
        yield tree
        for child in tree[1:]:
            yield from inner(child)


# The parser

SMALL = ["--steps", "4", "--vocabulary-size", "400", "--set", "hidden_dim=16",
         "--set", "num_layers=1", "--set", "intermediate_dim=16", "--set", "num_heads=2",
         "--set", "tokens_per_batch=600", "--set", "max_shapes=1",
         "--set", "checkpoint_every=2"]  # fmt: skip


@pytest.fixture
def treebank(tmp_path):
    """Files of trees, to train on and to judge by."""
    made = [parsing.written(tree) for tree in parsing.made_trees(130, seed=1, longest=12)]
    for name, part in (("train", made[2:]), ("dev", made[:2])):
        (tmp_path / f"{name}.mrg").write_text("\n".join(f"( {tree} )" for tree in part))
    return tmp_path


def test_a_parser_is_trained_on_files_of_trees_and_judged(treebank, capsys, monkeypatch):
    monkeypatch.setitem(parsing.SEARCH, "max_extra_length", 20)
    files = ["--train", str(treebank / "train.mrg"), "--dev", str(treebank / "dev.mrg")]
    output = treebank / "parser.keras"
    scores = parsing.main([*files, *SMALL, "--beam", "2", "--output", str(output)])
    assert scores.sentences == 2 and scores.skipped == 0 and scores.right > 0
    printed = capsys.readouterr().out
    assert "128 trees to train on, 2 held out" in printed and "complete match" in printed
    again = keras.saving.load_model(output)
    pieces = again.target_tokenizer.pieces(again.target_tokenizer.encode(["(NP XX )NP"])[0])
    assert pieces == ["▁(NP", "▁XX", "▁)NP"]


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train", "t.mrg"], "given together"),
        (["--train", "no.mrg", "--dev", "no.mrg"], "there is no file no.mrg"),
        (["--train", "bad.mrg", "--dev", "bad.mrg"], "bad.mrg ends within a tree"),
        (["--output", "no/folder/parser.keras"], "there is no folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parsing, "TRAINED", 10)
    monkeypatch.setattr(parsing, "HELD_OUT", 1)
    (tmp_path / "bad.mrg").write_text("(S (NN a)\n")
    with pytest.raises(SystemExit) as stopped:
        parsing.main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_made_grammar_is_learned(tmp_path):
    scores = parsing.main(["--output", str(tmp_path / "parser.keras")])
    assert scores.skipped == 0 and scores.sentences == parsing.HELD_OUT
    assert scores.f1 > 90


# The other two models

IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 5, 6, 3, 3, 7]], "int32")


def test_the_language_model_cannot_see_the_future():
    model = language_model.build(vocabulary_size=20)
    before = model.predict_on_batch(IDS)
    for place in range(1, IDS.shape[1]):
        changed = IDS.copy()
        changed[:, place:] = (IDS[:, place:] + 5) % 16 + 4
        after = model.predict_on_batch(changed)
        np.testing.assert_allclose(after[:, :place], before[:, :place], rtol=0, atol=1e-5)
        assert np.abs(after[:, place] - before[:, place]).max() > 1e-3


def test_pads_change_nothing_in_the_masked_model_and_all_else_does():
    model = masked_model.build(vocabulary_size=20)
    before = model.predict_on_batch(IDS)
    wide = np.pad(IDS, ((0, 0), (0, 5)), constant_values=PAD)
    after = model.predict_on_batch(wide)[:, : IDS.shape[1]]
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)
    wide[:, -1] = 4
    assert np.abs(model.predict_on_batch(wide)[:, 0] - before[:, 0]).max() > 1e-3


@pytest.mark.backend_free
def test_what_is_taken_out_is_the_target_and_nothing_else():
    ids = np.pad(np.arange(4, 1004).reshape(10, 100), ((0, 0), (0, 10)), constant_values=PAD)
    seen, targets = masked_model.take_out(ids, np.random.default_rng(1))
    out = targets != PAD
    assert abs(out.sum() / 1000 - masked_model.SHARE) < 0.05
    assert np.array_equal(np.where(out, targets, seen), ids)
    assert (seen[out] == masked_model.MASK).all() and (seen[~out] != masked_model.MASK).all()


@pytest.mark.parametrize("example", [language_model, masked_model])
def test_a_model_of_one_half_trains_and_shows_what_it_can(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(language_model.BLOCK, "intermediate_dim", 16)
    for script in {example, language_model}:
        monkeypatch.setattr(script, "WIDTH", 16)
        monkeypatch.setattr(script, "LENGTH", 12)
    made = parsing.made_trees(100, seed=1, longest=12)
    text = tmp_path / "text.en"
    text.write_text("".join(" ".join(parsing.words(tree)) + "\n" for tree in made))
    example.main(text, vocabulary_size=330, epochs=1)
    assert "perplexity" in capsys.readouterr().out


def nll(model, inputs, targets):
    """Nats of a real target, out of the logits by numpy, and as the model judges itself."""
    logits = model.predict(inputs, batch_size=32, verbose=0).astype("float64")
    largest = logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]
    own = normalizer - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    judged = model.evaluate(inputs, targets, batch_size=32, verbose=0, return_dict=True)
    assert own[targets != PAD].mean() == pytest.approx(judged["nll"], abs=1e-4)
    return judged["nll"]


def shares(counts):
    return counts / np.maximum(1e-9, counts.sum(-1, keepdims=True))


def best_mixture(*probabilities):
    """The least nats of any mixture, whose weights may look at the answers."""
    steps = np.linspace(0, 1, 11)
    grids = np.meshgrid(*[steps] * len(probabilities), indexing="ij")
    weights = np.stack([grid.ravel() for grid in grids], -1)
    weights = weights[np.isclose(weights.sum(-1), 1) & (weights[:, 0] > 0)]
    return min(-np.log(w @ np.stack(probabilities)).mean() for w in weights)


def pairs(first, second, size):
    """How often the second token was seen beside the first, (V, V)."""
    counts = np.zeros((size, size))
    np.add.at(counts, (first.ravel(), second.ravel()), 1)
    return counts


@pytest.mark.slow
@pytest.mark.corpus
def test_the_language_model_knows_more_than_counts_of_one_and_two_tokens(corpora):
    text = corpora / "multi30k" / "train.en"
    model, tokenizer, rows, unseen = language_model.main(text, vocabulary_size=1000, epochs=2)
    size = tokenizer.vocabulary_size
    counts = pairs(rows[:, :-1], rows[:, 1:], size)
    last, following = unseen[:, :-1].ravel(), unseen[:, 1:].ravel()
    one = shares(counts.sum(0) + 1)[following]
    two = shares(counts)[last, following]
    learned = nll(model, unseen[:, :-1], unseen[:, 1:])
    assert learned < best_mixture(one, two) - 0.2 < best_mixture(one) - 0.2


@pytest.mark.slow
@pytest.mark.corpus
def test_the_masked_model_knows_more_than_counts_of_both_neighbours(corpora):
    text = corpora / "multi30k" / "train.en"
    model, tokenizer, rows, unseen = masked_model.main(text, vocabulary_size=1000, epochs=10)
    size = tokenizer.vocabulary_size
    seen, targets = masked_model.take_out(unseen, np.random.default_rng(0))
    # Judged where both neighbours are shown: counts have no more to go by than the model.
    shown = targets == PAD
    out = ~shown[:, 1:-1] & shown[:, :-2] & shown[:, 2:]
    targets = np.pad(np.where(out, targets[:, 1:-1], PAD), ((0, 0), (1, 1)), constant_values=PAD)
    counts = pairs(rows[:, :-1], rows[:, 1:], size)
    left, asked, right = unseen[:, :-2][out], unseen[:, 1:-1][out], unseen[:, 2:][out]
    one = shares(counts.sum(0) + 1)[asked]
    after, before = shares(counts)[left, asked], shares(counts.T)[right, asked]
    # Both neighbours, each as if the other were not there.
    both = shares(shares(counts + 0.1)[left] * shares(counts + 0.1)[:, right].T)
    both = both[np.arange(len(asked)), asked]
    learned = nll(model, seen, targets)
    assert learned < best_mixture(one, after, before, both) - 0.1 < best_mixture(one) - 0.1
