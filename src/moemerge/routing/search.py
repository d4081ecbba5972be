"""Search for the best of a few numbers of which each is expensive to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=Any)


def lowest(
    values: Sequence[float], start: float, error: Callable[[float], E]
) -> tuple[float, dict[float, E]]:
    """Return the value with the lowest error, and the error of each value that was tried.

    The search walks downhill from the value nearest to `start`: the error has one minimum.
    """
    tried: dict[float, E] = {}

    def of(at: int) -> E:
        value = values[at]
        if value not in tried:
            tried[value] = error(value)
        return tried[value]

    at = min(range(len(values)), key=lambda n: abs(math.log(values[n] / start)))
    for direction in (1, -1):
        moved = False
        while 0 <= at + direction < len(values) and of(at + direction) < of(at):
            at, moved = at + direction, True
        if moved:
            break
    return values[at], tried
