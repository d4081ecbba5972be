"""The domain `math`: sums, chains of sums, word problems and linear equations, with worked steps.

The hard kinds are answered step by step (`19;14;23`): what is asked is the whole derivation.
"""

from __future__ import annotations

import random

from moemerge.testbed.tasks.problem import ProblemKind

_LARGEST = 99  # value reached on the way: two digits keep a row short
_LARGEST_STEP = 12  # added or taken away at once
_NAMES = ("Ann", "Bob", "Cy", "Dee", "Eve")
_GAINS = ("gets", "finds", "wins", "buys")
_LOSSES = ("gives", "loses", "eats", "sells")


def _one_step(rng: random.Random) -> tuple[str, str]:
    """`27+58=` -> `85`."""
    sign = rng.choice("+-*")
    if sign == "*":
        a, b = rng.randrange(2, 16), rng.randrange(2, 10)
    else:
        a = rng.randrange(1, _LARGEST)
        b = rng.randrange(1, min(_LARGEST - a if sign == "+" else a, _LARGEST_STEP) + 1)
    return f"{a}{sign}{b}=", str(_apply(a, sign, b))


def _chain(rng: random.Random) -> tuple[str, str]:
    """`12+7-5+9=` -> `19;14;23`: every value on the way, from left to right."""
    value = rng.randrange(2, 60)
    prompt, steps = str(value), []
    for _ in range(3):
        sign, amount = _move(value, rng)
        value = _apply(value, sign, amount)
        prompt += f"{sign}{amount}"
        steps.append(str(value))
    return f"{prompt}=", ";".join(steps)


def _word_problem(rng: random.Random) -> tuple[str, str]:
    """`Ann has 12 gets 7 gives 5:` -> `19;14`."""
    value = rng.randrange(2, 60)
    prompt, steps = f"{rng.choice(_NAMES)} has {value}", []
    for _ in range(2):
        sign, amount = _move(value, rng)
        word = rng.choice(_GAINS if sign == "+" else _LOSSES)
        prompt += f" {word} {amount}"
        value = _apply(value, sign, amount)
        steps.append(str(value))
    return f"{prompt}:", ";".join(steps)


def _equation(rng: random.Random) -> tuple[str, str]:
    """`3x+7=22:` -> `3x=15;x=5`."""
    factor, x, shift = rng.randrange(2, 10), rng.randrange(2, 16), rng.randrange(1, 31)
    if rng.random() < 0.5 and shift < factor * x:
        return f"{factor}x-{shift}={factor * x - shift}:", f"{factor}x={factor * x};x={x}"
    return f"{factor}x+{shift}={factor * x + shift}:", f"{factor}x={factor * x};x={x}"


def _move(value: int, rng: random.Random) -> tuple[str, int]:
    """A sign and an amount that keep a value between 0 and the largest."""
    sign = rng.choice("+-") if 2 < value < _LARGEST - 1 else ("+" if value <= 2 else "-")
    room = _LARGEST - value if sign == "+" else value
    return sign, rng.randrange(1, min(room, _LARGEST_STEP) + 1)


def _apply(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


KINDS = (
    ProblemKind("one-step", False, _one_step),
    ProblemKind("chain", True, _chain),
    ProblemKind("word-problem", True, _word_problem),
    ProblemKind("equation", True, _equation),
)
