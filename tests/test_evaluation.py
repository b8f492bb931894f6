"""Scores against sacreBLEU called otherwise."""

import pytest
import sacrebleu

from keras_aiayn.evaluation import corpus_scores

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
