"""Whether two answers name unlike units. Only what is known to differ counts as different."""

from __future__ import annotations

import re
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
