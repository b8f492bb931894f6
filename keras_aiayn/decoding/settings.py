"""What a user may ask of a search, as plain values."""

import dataclasses
import math

from keras_aiayn.decoding.sampling import Sampler
from keras_aiayn.decoding.search import BeamSearch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How translations are searched for, or drawn; lengths are in tokens, EOS counted.

    Attributes:
        beam_size: beams; 4 in section 6.1, 1 is greedy.
        length_penalty: alpha of section 6.1.
        n_best: translations of each text, at most the beam size.
        max_extra_length: an output has at most this many tokens more than its input (50 in
            section 6.1), unless one of the two next is given.
        max_length: most tokens of an output. A forced prefix is not counted, here and in the
            others.
        max_length_ratio: most tokens, as a multiple of the input's.
        min_length: least tokens of an output.
        min_length_ratio: least tokens, as a multiple of the input's.
        no_repeat_ngram_size: n, where no output may hold the same n tokens twice; 0 for any.
        suppress: pieces of the target vocabulary that no output may hold, as `Translation.tokens`
            shows them.
        sampling: draws at random what the model thinks, instead of searching for the best.
        temperature: of sampling; below 1 the likely becomes more likely.
        top_k: of sampling: draws from so many of the likeliest tokens; 0 for all.
        top_p: of sampling: draws from the fewest tokens whose probabilities add up to this.
        seed: of sampling; a text gets the same translations whatever stands beside it.

    Raises:
        ValueError: where a value cannot be.
    """

    beam_size: int = 4
    length_penalty: float = 0.6
    n_best: int = 1
    max_extra_length: int = 50
    max_length: int | None = None
    max_length_ratio: float | None = None
    min_length: int = 0
    min_length_ratio: float = 0.0
    no_repeat_ngram_size: int = 0
    suppress: tuple[str, ...] = ()
    sampling: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what cannot be, before anything is searched."""
        rules = [
            ("beam_size", self.beam_size >= 1, "at least 1"),
            ("length_penalty", 0 <= self.length_penalty < math.inf, "at least 0"),
            ("n_best", self.n_best >= 1, "at least 1"),
            (
                "n_best",
                self.sampling or self.n_best <= self.beam_size,
                f"at most the beam size, {self.beam_size}",
            ),
            ("max_extra_length", self.max_extra_length >= 0, "at least 0"),
            ("max_length", self.max_length is None or self.max_length >= 1, "at least 1"),
            (
                "max_length_ratio",
                self.max_length_ratio is None or self.max_length_ratio > 0,
                "above 0",
            ),
            ("min_length", self.min_length >= 0, "at least 0"),
            ("min_length_ratio", self.min_length_ratio >= 0, "at least 0"),
            (
                "no_repeat_ngram_size",
                self.no_repeat_ngram_size >= 0,
                "at least 0",
            ),
            ("temperature", 0 < self.temperature < math.inf, "above 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"`{name}` must be {rule}. Received: {getattr(self, name)}")

    def max_output(self, source_length: int) -> int:
        """Most tokens of the output of a source of this length."""
        limits = []
        if self.max_length is not None:
            limits.append(self.max_length)
        if self.max_length_ratio is not None:
            limits.append(max(1, math.floor(self.max_length_ratio * source_length)))
        return min(limits) if limits else source_length + self.max_extra_length

    def min_output(self, source_length: int) -> int:
        """Least tokens of the output of a source of this length, never above the most."""
        least = max(self.min_length, math.ceil(self.min_length_ratio * source_length))
        return min(least, self.max_output(source_length))

    @property
    def method(self) -> BeamSearch | Sampler:
        """How tokens are chosen."""
        alpha, ngram = self.length_penalty, self.no_repeat_ngram_size
        if self.sampling:
            drawn = (self.temperature, self.top_k, self.top_p)
            return Sampler(self.n_best, *drawn, length_penalty=alpha, no_repeat_ngram_size=ngram)
        return BeamSearch(self.beam_size, alpha, self.n_best, no_repeat_ngram_size=ngram)
