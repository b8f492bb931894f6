"""Scores against sacreBLEU called otherwise."""

import pytest
import sacrebleu

from keras_aiayn.evaluation import corpus_scores, paper_bleu

pytestmark = pytest.mark.backend_free
OURS = ["The cat sat on the mat .", "A dog runs in the park", "two men"]
RIGHT = ["The cat sits on the mat.", "a dog runs in the park", "Two men"]


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_are_those_of_sacrebleu(lowercase):
    scores = corpus_scores(OURS, RIGHT, lowercase=lowercase)
    bleu = sacrebleu.corpus_bleu(OURS, [RIGHT], lowercase=lowercase)
    assert scores.bleu == bleu.score and scores.length_ratio == bleu.sys_len / bleu.ref_len
    assert ("case:lc" if lowercase else "case:mixed") in scores.bleu_signature
    assert "chrF" in scores.chrf_signature or "nc:" in scores.chrf_signature


def test_case_counts_unless_it_is_ignored():
    assert corpus_scores(OURS, RIGHT).bleu < corpus_scores(OURS, RIGHT, lowercase=True).bleu


def test_unequal_line_counts_are_refused():
    with pytest.raises(ValueError, match="3 translations and 2 references"):
        corpus_scores(OURS, RIGHT[:2])


# Worked out by hand: what fraction of the n-grams, n 1 to 4, the reference has too. The lengths
# are equal, so there is no brevity penalty.
BY_HAND = [
    # The second "the" has no match: 5 of 6, 3 of 5, 2 of 4, 1 of 3.
    ("the cat sat on the mat", "the cat sat on a mat", [5 / 6, 3 / 5, 2 / 4, 1 / 3]),
    # The compound is three tokens, so 6 in all: 5 of 6, 4 of 5, 3 of 4, 2 of 3.
    ("eine gut-bürgerliche Küche hier", "eine gut-bürgerliche Küche dort",
     [5 / 6, 4 / 5, 3 / 4, 2 / 3]),
    # A full stop is a token of its own, that of an abbreviation is not:
    # "Er", "kam", "z.B.", "nie", "." against "Er", "kam", "z.B.", "oft", ".".
    ("Er kam z.B. nie.", "Er kam z.B. oft.", [4 / 5, 2 / 4, 1 / 3, 0]),
    # In a row of hyphens each letter belongs to one of them only: "a", "##AT##-##AT##", "b-c".
    ("x y a-b-c", "x y a-b-d", [4 / 5, 3 / 4, 2 / 3, 1 / 2]),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "right", "precisions"), BY_HAND)
def test_the_papers_bleu_is_what_the_hand_finds(ours, right, precisions):
    expected = 100 * (precisions[0] * precisions[1] * precisions[2] * precisions[3]) ** (1 / 4)
    assert paper_bleu([ours], [right]) == pytest.approx(expected, abs=1e-6)


def test_compounds_can_stay_whole():
    ours, right = ["hier da ist eine gut-bürgerlich"], ["hier da ist eine gut-bürgerliche"]
    expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert paper_bleu(ours, right, split_compounds=False) == pytest.approx(expected)
    assert paper_bleu(ours, right) > expected  # "gut" and the hyphen are right


def test_the_papers_bleu_has_a_brevity_penalty_and_may_ignore_case():
    # All n-grams match, four tokens for five.
    assert paper_bleu(["a b c d"], ["a b c d e"]) == pytest.approx(100 * 2.718281828 ** (1 - 5 / 4))
    assert paper_bleu(["A B C D"], ["a b c d"], lowercase=True) == pytest.approx(100)
    assert paper_bleu(["A B C D"], ["a b c d"]) == 0


def test_the_papers_bleu_refuses_unequal_line_counts():
    with pytest.raises(ValueError, match="3 translations and 2 references"):
        paper_bleu(OURS, RIGHT[:2])
