"""Plain numbers in text, as exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_PLAIN: Final = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
# A sign belongs to a number unless something stands before it: 10-5 holds 10 and 5.
NUMBER: Final = re.compile(
    rf"(?P<sign>(?<![\w.)])[-+])?[$€£]?(?P<inner>(?<=[$€£])-)?(?P<top>{_PLAIN})(?:/(?P<bottom>\d+))?"
    r"(?P<percent> ?%)?"
)
# LaTeX that changes how a number looks and not what it is.
_DECORATION: Final = re.compile(r"\\[!,;: ]|\\(?:left|right)\b|[{}]")
_SPACED_COMMA: Final = re.compile(r",\\!\s*")
_UNIT: Final = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
LONGEST: Final = 100  # characters; what is longer is no answer that a problem asks for


def simplify(text: str) -> str:
    """Unicode minus signs, escaped signs and spacing commands, written plainly."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "$").replace("\\%", "%")
    return _DECORATION.sub("", _SPACED_COMMA.sub(",", text))


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else (a currency or % may stand by)."""
    text = simplify(text).strip().rstrip(".")
    match = NUMBER.fullmatch(text.replace(" ", "")) if len(text) <= LONGEST else None
    return None if match is None else value(match)


def numbers_in(text: str) -> list[re.Match[str]]:
    """Every number of a text, in its order."""
    return [match for match in NUMBER.finditer(simplify(text)) if len(match.group()) <= LONGEST]


def value(match: re.Match[str]) -> Fraction | None:
    """Exact; None for a division by zero. A percent sign is not computed with."""
    top = Fraction(match["top"].replace(",", ""))
    bottom = int(match["bottom"] or 1)
    if bottom == 0:
        return None
    negative = (match["sign"] == "-") != (match["inner"] is not None)
    return (-top if negative else top) / bottom


def without_units(text: str) -> str:
    """`5.4 \\text{ cents}` as `5.4`; words in \\text alone stay."""
    rest = _UNIT.sub("", text)
    return rest if re.search(r"\w", rest) else text
