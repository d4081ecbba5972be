"""Check answers to mathematical problems: find the answer in a text, and compare it.

Numbers are compared as exact fractions, formulas by math-verify. Answers with different units are
wrong, but only if both units are known here.
"""

from __future__ import annotations

import importlib.util
import re
from fractions import Fraction
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.lab.checkers import WorkerPool
from moemerge.lab.judgement import RIGHT, Fields, Grade, Judgement, Verifier

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
    """Return whether both texts name a known unit, and the units differ."""
    one, other = unit_of(gold), unit_of(answer)
    return one is not None and other is not None and one != other


def unit_of(text: str) -> tuple[str, int] | None:
    """Return the unit after a number, with its power; None if there is none or it is unknown."""
    number = re.search(r"\d", text)
    if number is None:
        return None
    # Unwrap words, so that \mbox{ cm}^2 reads like cm^2.
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
# A sign belongs to a number unless something precedes it: 10-5 contains 10 and 5.
NUMBER: Final = re.compile(
    rf"(?P<sign>(?<![\w.)])[-+])?[$€£]?(?P<inner>(?<=[$€£])-)?(?P<top>{_PLAIN})(?:/(?P<bottom>\d+))?"
    r"(?P<percent> ?%)?"
)
# LaTeX that changes a number's appearance but not its value.
_DECORATION: Final = re.compile(r"\\[!,;: ]|\\(?:left|right)\b|[{}]")
_SPACED_COMMA: Final = re.compile(r",\\!\s*")
_UNIT: Final = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
LONGEST_NUMBER: Final = 100  # characters


def simplify(text: str) -> str:
    """Replace Unicode minus signs, escaped signs and spacing commands by plain ones."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "$").replace("\\%", "%")
    return _DECORATION.sub("", _SPACED_COMMA.sub(",", text))


def plain_number(text: str) -> Fraction | None:
    """Return the value of a text that is a single number, with an optional currency or %."""
    text = simplify(text).strip().rstrip(".")
    match = NUMBER.fullmatch(text.replace(" ", "")) if len(text) <= LONGEST_NUMBER else None
    return None if match is None else value(match)


def numbers_in(text: str) -> list[re.Match[str]]:
    """Return all numbers of a text in order."""
    return [
        match for match in NUMBER.finditer(simplify(text)) if len(match.group()) <= LONGEST_NUMBER
    ]


def value(match: re.Match[str]) -> Fraction | None:
    """Return the exact value; None for a division by zero. A percent sign is ignored."""
    top = Fraction(match["top"].replace(",", ""))
    bottom = int(match["bottom"] or 1)
    if bottom == 0:
        return None
    negative = (match["sign"] == "-") != (match["inner"] is not None)
    return (-top if negative else top) / bottom


def without_units(text: str) -> str:
    r"""Remove units: `5.4 \\text{ cents}` becomes `5.4`. A text of words only is unchanged."""
    rest = _UNIT.sub("", text)
    return rest if re.search(r"\w", rest) else text


MATH_SECONDS: Final = 10.0  # per answer; the slowest of MATH-500 takes a tenth of it
LONGEST_RESPONSE: Final = 100_000  # characters; the answer is at the end
_ASSIGNED: Final = re.compile(r"^\s*[A-Za-z]\w{0,8}\s*=\s*")
_BASE: Final = re.compile(r"\d_\{?(\d+)\}?$")
_COMMAND: Final = re.compile(r"\\[A-Za-z]")


class MathVerifier(Verifier):
    """Compares the final answer of a response with the row's `answer`."""

    name = "math"

    def __init__(self, *, workers: int = 1, seconds: float = MATH_SECONDS) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "checking mathematical answers needs the package math-verify",
                hint='pip install "moemerge[eval]"',
            )
        self._pool = WorkerPool("math", size=workers, seconds=seconds)
        self._seconds = seconds

    def relevant(self, row: Fields) -> Any:
        return gold_of(row)

    def check(self, row: Fields, response: str) -> Judgement:
        gold, response = gold_of(row), response[-LONGEST_RESPONSE:]
        number = plain_number(gold)
        if number is not None:
            judgement = compare_numbers(number, response)
            if judgement is not None:
                return judgement
        judgement = self._compare_formulas(gold=gold, texts=_candidates(response))
        if judgement.right:
            given = last_box(response)[0] or stated(response) or ""
            if conflict(gold, given):
                return Judgement(Grade.WRONG, "another unit")
            return Judgement(Grade.WRONG, "another base") if _bases(gold, given) else RIGHT
        if judgement.grade is Grade.UNDECIDED:
            return Judgement(Grade.UNDECIDED, f"the row's answer cannot be read: {gold[:80]}")
        return judgement

    def _compare_formulas(self, **question: Any) -> Judgement:
        """Return the judgement of math-verify."""
        answer = self._pool.ask(question)
        if answer is None:
            return Judgement(Grade.TIMEOUT, f"math-verify took more than {self._seconds:g} s")
        return Judgement(Grade(answer["grade"]))

    def close(self) -> None:
        self._pool.close()


def text_answer(row: Fields) -> str:
    """Return the row's answer verbatim."""
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"'answer' is {type(answer).__name__}, expected a string or a number",
            hint='name the column that holds it: `map={"answer": COLUMN}`',
        )
    return str(answer)


def gold_of(row: Fields) -> str:
    """Return the row's answer: the text after `####`, the content of its last box, or all of it."""
    text = text_answer(row)
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    box, _count = last_box(text)
    text = (text if box is None else box).strip().strip("$").strip()
    if not text:
        raise DataError("'answer' is empty, expected what a right response ends with")
    return text


def compare_numbers(gold: Fraction, response: str) -> Judgement | None:
    """Compare with a number. Return None if the response's answer is a formula."""
    box, _count = last_box(response)
    if box is not None:
        number = plain_number(_ASSIGNED.sub("", without_units(box)))
        return None if number is None else _compared(gold, number, "%" in box)
    clause = stated(response)
    place = clause if clause is not None and numbers_in(clause) else last_line(response)
    if _COMMAND.search(place):
        return None
    numbers = numbers_in(place) or numbers_in(response)
    if not numbers:
        return Judgement(Grade.NO_ANSWER, "no number in the response")
    # After "the answer is" the number comes first, unless it is computed there.
    first = place is clause and "=" not in place
    match = numbers[0 if first else -1]
    number = value(match)
    return None if number is None else _compared(gold, number, match["percent"] is not None)


def _compared(gold: Fraction, number: Fraction, percent: bool) -> Judgement:
    if number == gold or (percent and number / 100 == gold):
        return RIGHT
    given, expected = _shown(number), _shown(gold)
    if given == expected:  # to the digits shown
        given, expected = str(number), str(gold)
    return Judgement(Grade.WRONG, f"{given} instead of {expected}")


def _bases(gold: str, given: str) -> bool:
    """Return whether two numbers have different bases: math-verify reads 52_8 and 52_5 as names."""
    bases = [_BASE.search(text.strip(" $.")) for text in (gold, given)]
    return bases[0] is not None and bases[1] is not None and bases[0][1] != bases[1][1]


def _shown(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):g}"


def _candidates(response: str) -> list[str]:
    """Return the texts to search for the answer, the most likely first."""
    (box, count), clause = last_box(response), stated(response)
    if box is not None:
        # Two boxes may be two roots, or a first attempt and its correction.
        return [response, f"\\boxed{{{box}}}"] if count > 1 else [response]
    if "$" in response or "\\(" in response or "\\[" in response:
        return [response]
    # A formula without delimiters is parsed as one.
    return [f"${clause or last_line(response)}$", response]


# --- where the answer is --------------------------------------------------------------------------

# Opening of a box, an escaped character, or a brace.
_BRACES: Final = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.S)
_MARK: Final = re.compile(r"####[ \t]*([^\n]*)")
_PHRASE: Final = re.compile(r"\banswer\s*(?:is|:|=)+\s*:?\s*", re.I)
# A clause ends at the end of its line or sentence. The point in 3.5 ends neither.
_END: Final = re.compile(r"\n|[.!?](?=\s|$)")


def last_box(text: str) -> tuple[str | None, int]:
    r"""Return the content of the last \\boxed{...} with balanced braces, and their number."""
    boxes: list[tuple[int, int]] = []
    opened: list[int | None] = []  # where a box's content starts; None for other braces
    for match in _BRACES.finditer(text):
        if match[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                boxes.append((start, match.start()))
        elif match[0] == "{" or match[1]:
            opened.append(match.end() if match[1] else None)
    if not boxes:
        return None, 0
    start, end = max(boxes)
    return text[start:end], len(boxes)


def stated(text: str) -> str | None:
    """Return the text after the last `####` or "the answer is"; None if there is neither."""
    marks = _MARK.findall(text)
    if marks and marks[-1].strip():
        return str(marks[-1]).strip()
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    rest = text[phrases[-1].end() :]
    end = _END.search(rest)
    clause = rest[: end.start()] if end else rest
    return clause.strip(" *_`") or None


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
