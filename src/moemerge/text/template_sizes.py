"""Check how large the values of a chat template are, before and after each operation on them.

An operation makes a value from values within the limits. A list may contain another list twice, so
forty steps are enough for a value that is printed for ever: the size counts everything inside a
value as often as it appears.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MOST_CHARACTERS: Final = 2**25  # of one value, and of the whole output
MOST_ITEMS: Final = 10**6  # inside one value
MOST_WIDTH: Final = 10**4  # width of padding and indents
MOST_BITS: Final = 2**17  # of a whole number
_WIDE: Final = ("center", "ljust", "rjust", "zfill", "expandtabs")
_REPEATED: Final = ("do_indent", "do_wordwrap", "do_urlize")  # insert an argument many times
_COLLECTIONS: Final[tuple[type[Collection[Any]], ...]] = (
    *(list, tuple, set, frozenset, dict),
    *map(type, ({}.keys(), {}.values(), {}.items())),
)


def bound(size: int, most: int) -> None:
    if size > most:
        raise SecurityError("it makes something too large")


def size_of(value: Any) -> int:
    """Return the characters inside a value. Refuse too many of them, and too many items."""
    characters, items, waiting = 0, 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Namespace):
            one = one._Namespace__attrs
        if isinstance(one, str | bytes):
            characters += len(one)
        elif isinstance(one, int):
            bound(one.bit_length(), MOST_BITS)
        elif isinstance(one, _COLLECTIONS):
            items += len(one)
            waiting.extend(one)
            if isinstance(one, dict):
                waiting.extend(one.values())
        bound(characters, MOST_CHARACTERS)
        bound(items, MOST_ITEMS)
    return characters


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation on two values whose result is too large."""
    if operator == "%" and isinstance(left, str):
        check_format(left, "%", right)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        bound(len(left) + len(right), MOST_CHARACTERS)
    elif operator == "**":
        bound(max(abs(left), abs(right)), MOST_WIDTH)
    elif operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
        text, count = (left, right) if hasattr(left, "__len__") else (right, left)
        bound(len(text) * int(count), MOST_ITEMS)
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        bound(left.bit_length() + right.bit_length(), MOST_BITS)


def check_method(method: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuse a call of a string's method whose result is too large."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    size_of(list(args))
    if name == "encode":
        raise SecurityError("it encodes a text, and some codecs never end")
    if name in _WIDE:
        width = max((value for value in args if isinstance(value, int)), default=0)
        bound(width, MOST_WIDTH)
        bound(text.count("\t") * width if name == "expandtabs" else 0, MOST_CHARACTERS)
    elif name == "translate" and args and isinstance(args[0], Mapping):
        longest = max((len(new) for new in args[0].values() if isinstance(new, str)), default=1)
        bound(len(text) * longest, MOST_CHARACTERS)
    elif name == "replace" and len(args) >= 2:
        _check_replacement(text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        bound(size_of(args[0]) + len(args[0]) * len(text), MOST_CHARACTERS)


def check_filter(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse a filter whose result is too large. `args` begin with the filtered value."""
    first, *others = args
    others += named.values()
    for value in others:
        if isinstance(value, int):
            bound(abs(value), MOST_WIDTH)
    for value in (first, *others):
        size_of(value)
    if name == "do_sum" and any(isinstance(value, list | tuple | str) for value in others[-1:]):
        raise SecurityError("it sums lists")
    if isinstance(first, str):
        if name == "do_replace" and len(others) >= 2:
            _check_replacement(first, str(others[0]), str(others[1]))
        elif name == "do_format":
            check_format(first, "%", others)
        elif name in _REPEATED:
            widths = [
                len(v) if isinstance(v, str) else v for v in others if isinstance(v, str | int)
            ]
            places = first.count("\n") + 1 if name == "do_indent" else len(first)
            bound(places * max(widths, default=1), MOST_CHARACTERS)
    elif name == "do_join":
        between = str(others[0]) if others else ""
        bound(size_of(first) + len(first) * len(between), MOST_CHARACTERS)


def check_format(text: str, mark: str, values: Any) -> None:
    """Refuse long numbers in a format string, which may be widths, and large values."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        bound(digits, len(str(MOST_WIDTH)))
    bound(text.count(mark) * size_of(values), MOST_CHARACTERS)


def _check_replacement(text: str, old: str, new: str) -> None:
    bound(len(text) + text.count(old) * len(new), MOST_CHARACTERS)
