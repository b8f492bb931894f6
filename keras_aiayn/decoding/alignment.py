"""Which word was translated to which, by where the decoder looked."""

import numpy as np

Pairs = list[tuple[int, int]]


def word_alignment(weights: np.ndarray, source_words: list[int], target_words: list[int]) -> Pairs:
    """Aligns each target word to the source word that its tokens looked at most.

    Args:
        weights: (T, S), the attention of each written token to each source token, mean of heads.
        source_words: for each source token the number of its word, -1 for one of no word (EOS).
        target_words: the same of the target.

    Returns:
        (source word, target word) pairs by target word, from 0; none for an empty side.
    """
    words = max(source_words, default=-1) + 1
    if not words:
        return []
    belongs = np.equal.outer(np.asarray(source_words), np.arange(words))  # (S, words)
    by_word = weights @ belongs
    target = np.asarray(target_words)
    return [
        (int(by_word[target == word].sum(axis=0).argmax()), word)
        for word in range(max(target_words, default=-1) + 1)
    ]


def pharaoh(pairs: Pairs) -> str:
    """The format of Moses and fast_align: `0-0 1-2`, source before target, counted from 0."""
    return " ".join(f"{source}-{target}" for source, target in pairs)
