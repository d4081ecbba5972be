"""Numbers and units in text: numbers as exact fractions, and whether two answers name unlike units.

Only units that are known to differ count as different.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_NAMES: Final = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb lbs pound",
    "oz": "oz ounce",
    "l": "l liter litre",
    "ml": "ml milliliter millilitre",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hrs hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "dollar": "dollar",
    "cent": "cent",
    "degree": "degree deg",
    "radian": "radian rad",
    "percent": "percent",
    "mph": "mph",
}
_UNITS: Final = {word: unit for unit, words in _NAMES.items() for word in words.split()}
_SIGNS: Final = {r"\\circ|°": "degree", r"\\?\$": "dollar", r"\\?%": "percent", "¢": "cent"}
_POWERS: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_WRAPPED: Final = re.compile(r"\\(?:text|mathrm|mbox|textrm)\s*\{([^{}]*)\}")
_WORD: Final = re.compile(r"(?<![\\A-Za-z])([A-Za-z]+)\.?(?:\s*\^\s*\{?\s*(\d)\s*\}?)?")


def conflict(gold: str, answer: str) -> bool:
    """Whether both name a unit that is known here, and not the same one."""
    one, other = unit_of(gold), unit_of(answer)
    return one is not None and other is not None and one != other


def unit_of(text: str) -> tuple[str, int] | None:
    """The unit after a number, with its power; None where none or an unknown one is named."""
    number = re.search(r"\d", text)
    if number is None:
        return None
    # Wrapped words lose their wrapping, so that \mbox{ cm}^2 reads like cm^2.
    rest = _WRAPPED.sub(r" \1 ", text[number.start() :]).replace(" ^", "^")
    rest = re.sub(r"\s+\^", "^", rest)
    power = 1
    for word, exponent in _WORD.findall(rest):
        lower = word.lower()
        if lower in _POWERS:
            power = _POWERS[lower]
            continue
        unit = _UNITS.get(lower) or _UNITS.get(lower.removesuffix("s"))
        if unit is None:
            return None
        return unit, int(exponent) if exponent else power
    for sign, unit in _SIGNS.items():
        if re.search(sign, text):
            return unit, 1
    return None


# --- numbers --------------------------------------------------------------------------------------

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
