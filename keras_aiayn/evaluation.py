"""Scores of translations, by sacreBLEU."""

import dataclasses
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
    if len(translations) != len(references) or not references:
        raise ValueError(
            "every translation needs one reference. "
            f"Received: {len(translations)} translations and {len(references)} references"
        )
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
