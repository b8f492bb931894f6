"""What the search is compared with: the same rules in plain Python, one sentence at a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from keras_aiayn.special_ids import BOS, EOS, PAD

Prefix = tuple[int, ...]


class Hypothesis(NamedTuple):
    score: float
    raw_score: float
    token_ids: Prefix
    hit_limit: bool


def hypothesis(
    raw_score: float, token_ids: Prefix, length_penalty: float, free: int = 0
) -> Hypothesis:
    score = raw_score / ((5 + max(len(token_ids) - free, 0)) / 6) ** length_penalty
    return Hypothesis(score, raw_score, token_ids, hit_limit=token_ids[-1] != EOS)


def search_slowly(
    log_probs: Callable[[Sequence[Prefix]], np.ndarray],
    *,
    beam_size: int,
    max_length: int,
    length_penalty: float,
    num_return: int,
    free: int = 0,
) -> list[Hypothesis]:
    """Beam search without arrays, and without an early stop.

    `log_probs` gives the log-probabilities (P, V) of what may follow each of P prefixes (which
    do not hold the BOS). The length penalty does not count the first `free` tokens.
    """
    alive: list[tuple[float, Prefix]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for _ in range(max_length):
        follow = log_probs([prefix for _, prefix in alive]) if alive else []
        candidates = [
            (raw + following[token], (*prefix, token))
            for (raw, prefix), following in zip(alive, follow, strict=True)
            for token in range(len(following))
            if token not in (PAD, BOS) and following[token] > -np.inf
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        candidates = candidates[: 1 if beam_size == 1 else 2 * beam_size]
        alive = [candidate for candidate in candidates if candidate[1][-1] != EOS][:beam_size]
        finished += [
            hypothesis(raw, token_ids, length_penalty, free)
            for raw, token_ids in candidates
            if token_ids[-1] == EOS
        ]
    finished.sort(key=lambda found: -found.score)
    cut = [hypothesis(raw, token_ids, length_penalty, free) for raw, token_ids in alive]
    return [*finished, *cut][:num_return]


@pytest.fixture(scope="session")
def slow_search() -> Callable[..., list[Hypothesis]]:
    return search_slowly
