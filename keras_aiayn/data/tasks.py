"""Made data, for lessons and tests that need no files.

`copy_task` is the smallest thing a Transformer can learn. `written_dates_and_numbers` is a small
language pair with one right answer for each source, so that every error can be counted.
"""

import random
from collections.abc import Callable
from datetime import date, timedelta

import numpy as np

from keras_aiayn.special_ids import BOS, EOS, PAD

FIRST_SYMBOL = 1 + max(PAD, BOS, EOS)


def copy_task(
    num_pairs: int,
    *,
    num_symbols: int = 30,
    min_length: int = 4,
    max_length: int = 16,
    seed: int,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random symbols, to be given back as they are: ready for `model.fit(inputs, targets)`.

    Args:
        num_pairs: N.
        num_symbols: How many symbols there are; the vocabulary is 4 larger.
        min_length: The least number of symbols in a pair.
        max_length: The largest; T is one more, for EOS.
        seed: Equal seeds give equal data.

    Returns:
        (`{"encoder_token_ids": (N, T), "decoder_token_ids": (N, T)}`, targets (N, T)), int32. The
        source and the target are symbols + EOS, the decoder reads BOS + symbols, PAD fills.

    Example:

    ```python
    inputs, targets = copy_task(1000, seed=0)
    ```
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(
            "`min_length` must be from 1 to `max_length`. "
            f"Received: min_length={min_length}, max_length={max_length}"
        )
    generator = np.random.default_rng(seed)
    lengths = generator.integers(min_length, max_length, num_pairs, endpoint=True)[:, None]
    symbols = generator.integers(
        FIRST_SYMBOL, FIRST_SYMBOL + num_symbols, (num_pairs, max_length + 1)
    )
    column = np.arange(max_length + 1)
    symbols = np.where(column < lengths, symbols, PAD)
    sources = np.where(column == lengths, EOS, symbols).astype("int32")
    decoder = np.roll(symbols, 1, axis=1).astype("int32")
    decoder[:, 0] = BOS
    inputs = {"encoder_token_ids": sources, "decoder_token_ids": decoder}
    return inputs, sources.copy()


MOST_WRITTEN_PAIRS = 500_000


def written_dates_and_numbers(num_pairs: int, *, seed: int) -> list[tuple[str, str]]:
    """Dates, numbers, prices and times of day, in English and in German.

    Digits and words on either side: "Tuesday, 3 March 1998" is "Dienstag, 3. März 1998", "1205"
    is "eintausendzweihundertfünf" and "quarter past two" is "Viertel nach zwei". Two sources may
    share a target; no source has two.

    Args:
        num_pairs: How many pairs, with as many different sources.
        seed: Equal seeds give equal pairs, in the same order.

    Returns:
        A list of (English, German).

    Raises:
        ImportError: If Babel or num2words is missing.
        ValueError: If `num_pairs` is more than there is variety for.

    Example:

    ```python
    pairs = written_dates_and_numbers(10_000, seed=0)
    ```
    """
    if num_pairs > MOST_WRITTEN_PAIRS:
        raise ValueError(f"`num_pairs` can be at most {MOST_WRITTEN_PAIRS}. Received: {num_pairs}")
    try:
        import babel.dates  # noqa: F401
        import num2words  # noqa: F401
    except ImportError:
        raise ImportError(
            "written dates and numbers need Babel and num2words: pip install 'keras-aiayn[demo]'"
        ) from None
    generator = random.Random(seed)
    pairs: dict[str, str] = {}
    while len(pairs) < num_pairs:
        english, german = generator.choice(_KINDS)(generator)
        pairs[english] = german
    return list(pairs.items())


def _date(generator: random.Random) -> tuple[str, str]:
    from babel.dates import format_date

    day = _day(generator)
    english, locale, german = generator.choice(
        [
            ("full", "en_GB", "full"),  # Tuesday, 3 March 1998
            ("full", "en_US", "full"),  # Tuesday, March 3, 1998
            ("long", "en_GB", "long"),  # 3 March 1998
            ("long", "en_US", "long"),  # March 3, 1998
            ("dd/MM/y", "en_GB", "medium"),  # 03/03/1998, the day first
            ("y-MM-dd", "en_GB", "long"),  # 1998-03-03
        ]
    )
    return format_date(day, english, locale), format_date(day, german, "de")


def _date_in_words(generator: random.Random) -> tuple[str, str]:
    from babel.dates import format_date

    day = _day(generator)
    english = (
        f"the {_words(day.day, 'en', 'ordinal')} of {format_date(day, 'MMMM', 'en')}, "
        f"{_words(day.year, 'en', 'year')}"
    )
    in_words = (
        f"der {_words(day.day, 'de', 'ordinal')} {format_date(day, 'MMMM', 'de')} "
        f"{_words(day.year, 'de', 'year')}"
    )
    if generator.random() < 0.5:
        return english, in_words
    # Without "the", digits are asked for: else one source would have two answers.
    return english.removeprefix("the "), format_date(day, "long", "de")


def _number(generator: random.Random) -> tuple[str, str]:
    number = generator.randrange(10 ** generator.randint(1, 6))
    german = _words(number, "de")
    grouped = f"{number:,}"
    return generator.choice(
        [
            (_words(number, "en"), german),
            (str(number), german),
            (f"{_words(number, 'en')} in digits", grouped.replace(",", ".")),
        ]
    )


def _price(generator: random.Random) -> tuple[str, str]:
    euros, cents = generator.randrange(10 ** generator.randint(1, 5)), generator.randrange(100)
    english = f"{euros:,}.{cents:02d}"
    return f"€{english}", english.translate(str.maketrans(",.", ".,")) + " €"


def _time_of_day(generator: random.Random) -> tuple[str, str]:
    hour, minute = generator.randrange(24), generator.randrange(60)
    half = "am" if hour < 12 else "pm"
    if generator.random() < 0.5:
        return f"{hour % 12 or 12}:{minute:02d} {half}", f"{hour}:{minute:02d} Uhr"
    spoken, next_hour = hour % 12 or 12, hour % 12 + 1
    return generator.choice(
        [
            (f"quarter past {_words(spoken, 'en')}", f"Viertel nach {_words(spoken, 'de')}"),
            (f"half past {_words(spoken, 'en')}", f"halb {_words(next_hour, 'de')}"),
            (f"quarter to {_words(next_hour, 'en')}", f"Viertel vor {_words(next_hour, 'de')}"),
        ]
    )


_KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _date,
    _date,
    _date_in_words,
    _number,
    _number,
    _price,
    _time_of_day,
)


def _day(generator: random.Random) -> date:
    """A day of the years 1900 to 2099."""
    return date(1900, 1, 1) + timedelta(days=generator.randrange(73_049))


def _words(number: int, language: str, to: str = "cardinal") -> str:
    from num2words import num2words

    return num2words(number, lang=language, to=to)
