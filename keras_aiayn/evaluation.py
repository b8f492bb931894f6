"""Scores of translations: sacreBLEU and chrF, and the tokenised BLEU that the paper reports."""

import dataclasses
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a corpus of translations.

    Attributes:
        bleu: sacreBLEU, 0 to 100.
        bleu_signature: how it was computed.
        chrf: chrF, 0 to 100.
        chrf_signature: how it was computed.
        length_ratio: tokens of the translations over tokens of the references, as BLEU counts.
    """

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    length_ratio: float


def corpus_scores(
    translations: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> Scores:
    """BLEU and chrF of translations against one reference each.

    Args:
        translations: the lines to judge.
        references: the right answers, as many.
        lowercase: whether case is ignored.

    Raises:
        ImportError: where sacreBLEU is missing.
        ValueError: where the numbers of lines differ.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ImportError("scores need sacreBLEU: pip install 'keras-aiayn[train]'") from None
    _check_pairs(translations, references)
    bleu, chrf = BLEU(lowercase=lowercase), CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(translations, [references])
    chrf_score = chrf.corpus_score(translations, [references])
    return Scores(
        bleu=bleu_score.score,
        bleu_signature=str(bleu.get_signature()),
        chrf=chrf_score.score,
        chrf_signature=str(chrf.get_signature()),
        length_ratio=bleu_score.ratio,
    )


def paper_bleu(
    translations: Sequence[str],
    references: Sequence[str],
    *,
    language: str = "de",
    lowercase: bool = False,
    split_compounds: bool = True,
) -> float:
    """Tokenised BLEU with compounds split at hyphens, as in Table 2 (section 6.1).

    Both sides are tokenised by the rules of Moses, a word such as "gut-bürgerlich" becomes three
    tokens, and BLEU is taken without smoothing. It comes out 0.7 to 1.0 higher than sacreBLEU and
    can be compared only with scores made in the same way.

    Args:
        translations: the lines to judge.
        references: the right answers, as many.
        language: of both, two letters, for the tokeniser's list of abbreviations.
        lowercase: whether case is ignored.
        split_compounds: whether a hyphen ends a token; plain tokenised BLEU, which many papers
            report, leaves it.

    Returns:
        0 to 100.

    Raises:
        ImportError: where sacremoses or sacreBLEU is missing.
        ValueError: where the numbers of lines differ.
    """
    try:
        from sacrebleu.metrics import BLEU
        from sacremoses import MosesTokenizer
    except ImportError:
        raise ImportError(
            "the paper's BLEU needs sacremoses and sacreBLEU: pip install 'keras-aiayn[train]'"
        ) from None
    _check_pairs(translations, references)
    moses = MosesTokenizer(lang=language)

    def tokenised(lines: Sequence[str]) -> list[str]:
        joined = (moses.tokenize(line, return_str=True, escape=False) for line in lines)
        if not split_compounds:
            return list(joined)
        return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in joined]

    # `force`: that the text is tokenised already is meant here.
    bleu = BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(tokenised(translations), [tokenised(references)]).score


def _check_pairs(translations: Sequence[str], references: Sequence[str]) -> None:
    if len(translations) != len(references) or not references:
        raise ValueError(
            "every translation needs one reference. "
            f"Received: {len(translations)} translations and {len(references)} references"
        )
