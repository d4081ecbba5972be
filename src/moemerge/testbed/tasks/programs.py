"""The domain `code`: what expressions give, step by step, and programs written from examples."""

from __future__ import annotations

import random
from collections.abc import Callable

from moemerge.testbed.tasks.problem import ProblemKind

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Each is written behind a string in Python, alone or after another of them.
OPERATIONS: dict[str, Callable[[str], str]] = {
    "[::-1]": lambda s: s[::-1],
    ".upper()": str.upper,
    "[1:]": lambda s: s[1:],
    "[:-1]": lambda s: s[:-1],
    "[::2]": lambda s: s[::2],
    "[2:]": lambda s: s[2:],
    "[:2]": lambda s: s[:2],
}
SYNTHESIS = "synthesis"
# What a synthesised program is run on, beside nothing that its examples show.
HIDDEN_INPUTS = ("orange", "kiwi", "melons", "abcdefg", "zyxwv")


def _word(rng: random.Random, shortest: int, longest: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(shortest, longest)))


def _operation(rng: random.Random) -> tuple[str, str]:
    """`abcd[::-1]=` -> `dcba`."""
    word, name = _word(rng, 3, 6), rng.choice(tuple(OPERATIONS))
    return f"{word}{name}=", OPERATIONS[name](word)


def _list_operation(rng: random.Random) -> tuple[str, str]:
    """`sorted([7,2,5])=` -> `[2,5,7]`."""
    values = [rng.randrange(10) for _ in range(rng.randint(2, 4))]
    functions: dict[str, Callable[[list[int]], object]] = {
        "sorted": sorted,
        "max": max,
        "min": min,
        "len": len,
        "sum": sum,
    }
    name = rng.choice(tuple(functions))
    return f"{name}({_shown(values)})=", _shown(functions[name](values))


def _trace(rng: random.Random) -> tuple[str, str]:
    """`abcd[1:].upper()=` -> `bcd;BCD`: the value after each operation."""
    word, names = _word(rng, 4, 6), rng.sample(tuple(OPERATIONS), 2)
    first = OPERATIONS[names[0]](word)
    return f"{word}{''.join(names)}=", f"{first};{OPERATIONS[names[1]](first)}"


def _list_expression(rng: random.Random) -> tuple[str, str]:
    """`[x+3 for x in [7,2,5]][1:]=` -> `[5,8]`."""
    values = [rng.randrange(10) for _ in range(3)]
    amount, sign = rng.randrange(2, 6), rng.choice("+*")
    inner = [v + amount if sign == "+" else v * amount for v in values]
    steps: dict[str, Callable[[list[int]], object]] = {
        "[1:]": lambda v: v[1:],
        "[:2]": lambda v: v[:2],
        "[::-1]": lambda v: v[::-1],
        "[0]": lambda v: v[0],
        "[-1]": lambda v: v[-1],
    }
    name = rng.choice(tuple(steps))
    prompt = f"[x{sign}{amount} for x in {_shown(values)}]{name}="
    return prompt, _shown(steps[name](inner))


def _synthesis(rng: random.Random) -> tuple[str, str]:
    """`abcd>DCBA efghi>IHGFE s` -> `[::-1].upper()`: an expression that goes on from `s`."""
    names = rng.sample(tuple(OPERATIONS), 2)
    examples = []
    for word in (_word(rng, 4, 5), _word(rng, 4, 5)):
        examples.append(f"{word}>{OPERATIONS[names[1]](OPERATIONS[names[0]](word))}")
    return f"{' '.join(examples)} s", "".join(names)


def program_of(completion: str) -> str:
    """The whole expression of `s` that a completion of a synthesis problem writes."""
    return f"s{completion}"


def _shown(value: object) -> str:
    return str(value).replace(" ", "")


KINDS = (
    ProblemKind("operation", False, _operation),
    ProblemKind("list-operation", False, _list_operation),
    ProblemKind("trace", True, _trace),
    ProblemKind("list-expression", True, _list_expression),
    ProblemKind(SYNTHESIS, True, _synthesis),
)
