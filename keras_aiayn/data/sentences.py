"""Long texts cut at sentence ends, and joined again."""

import re
from collections.abc import Callable

# The end of a sentence: its mark, what closes quotes and brackets, and the blanks behind. Chinese
# and Japanese marks need no blank. A run of marks is tried once, from its beginning, and never
# given back: a line of 100,000 dots would take hours.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+\s++|[。！？]++[”’」』）]*+\s*+")
_ENDS_IN_A_MARK = re.compile(r"[.!?…][\"'”’»)\]]*$")


def cut(text: str, longest: int, length: Callable[[str], int]) -> list[tuple[str, str]]:
    """Cuts a text into the fewest parts of whole sentences that are at most so long.

    A sentence that is longer alone is a part of its own: words are never torn apart.

    Args:
        text: any text.
        longest: the length that a part should not exceed.
        length: of a text, in the same unit.

    Returns:
        (part, blanks behind it) for each part; `join` of them is the text.
    """
    if length(text) <= longest:
        return [(text, "")]
    ends = [match.end() for match in _END.finditer(text)]
    if not ends or ends[-1] < len(text):
        ends.append(len(text))
    parts, start, end = [], 0, ends[0]
    for next_end in ends[1:]:
        if length(text[start:next_end].rstrip()) > longest:
            parts.append(text[start:end])
            start = end
        end = next_end
    parts.append(text[start:])
    return [(part.rstrip(), part[len(part.rstrip()) :]) for part in parts]


def join(parts: list[tuple[str, str]]) -> str:
    """The parts with the blanks between them.

    Behind a mark that wants a blank there is one: Chinese has none to hand on to English.
    """
    text = ""
    for part, blanks in parts:
        if text and not text[-1].isspace() and _ENDS_IN_A_MARK.search(text):
            text += " "
        text += part + blanks
    return text
