"""Random problems of three domains (math, code, chat), reproducible by seed.

Answers to the hard kinds of math and code have all intermediate steps (`19;14;23`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from moemerge.errors import UsageError
from moemerge.registry import did_you_mean

Split = Literal["train", "test"]
# A kind counts as exhausted after this number of draws without a new problem.
_PATIENCE = 2000
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# One prompt in five is a test problem. The prompt's hash decides, so that no seed, count or order
# can move a test problem into training.
TEST_SHARE = 5


@dataclass(frozen=True)
class Problem:
    """A prompt, and the answer that a model must generate before the end token."""

    domain: str
    kind: str
    hard: bool
    prompt: str
    answer: str


@dataclass(frozen=True)
class ProblemKind:
    """One kind of problem; `draw` returns a prompt and its answer."""

    name: str
    hard: bool
    draw: Callable[[random.Random], tuple[str, str]]


def is_test(prompt: str) -> bool:
    """Return whether a prompt belongs to the test split."""
    digest = blake2b(prompt.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % TEST_SHARE == 0


def _word(rng: random.Random, shortest: int, longest: int) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(shortest, longest)))


# --- math: sums, chains of sums, word problems and linear equations -------------------------------

_LARGEST = 99  # of all values; two digits keep rows short
_LARGEST_STEP = 12  # added or subtracted
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
    """`12+7-5+9=` -> `19;14;23`: all intermediate values."""
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
    """Return a sign and an amount that keep the value between 0 and the largest."""
    sign = rng.choice("+-") if 2 < value < _LARGEST - 1 else ("+" if value <= 2 else "-")
    room = _LARGEST - value if sign == "+" else value
    return sign, rng.randrange(1, min(room, _LARGEST_STEP) + 1)


def _apply(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


# --- code: results of expressions, and programs from examples -------------------------------------

# Python operations on a string; they can be chained.
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
# Inputs on which a synthesised program is tested.
HIDDEN_INPUTS = ("orange", "kiwi", "melons", "abcdefg", "zyxwv")


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
    """`abcd>DCBA efghi>IHGFE s` -> `[::-1].upper()`: an expression that continues `s`."""
    names = rng.sample(tuple(OPERATIONS), 2)
    examples = []
    for word in (_word(rng, 4, 5), _word(rng, 4, 5)):
        examples.append(f"{word}>{OPERATIONS[names[1]](OPERATIONS[names[0]](word))}")
    return f"{' '.join(examples)} s", "".join(names)


def program_of(completion: str) -> str:
    """Return the whole expression of a completion of a synthesis problem."""
    return f"s{completion}"


def _shown(value: object) -> str:
    return str(value).replace(" ", "")


# --- chat: follow formatting instructions exactly -------------------------------------------------

_SEPARATORS = ";-+/_"
_ORDERS = ("sorted", "reversed", "as is")


def _simple(rng: random.Random) -> tuple[str, str]:
    """`spell cat:` -> `c-a-t`."""
    order, word = rng.choice(("repeat", "spell", "upper")), _word(rng, 3, 7)
    answers = {"repeat": word, "spell": "-".join(word), "upper": word.upper()}
    return f"{order} {word}:", answers[order]


def _json_object(rng: random.Random) -> tuple[str, str]:
    """`json k=bob n=31:` -> `{"k":"bob","n":31}`."""
    keys = rng.sample(_LETTERS, 2)
    values: list[object] = [_word(rng, 2, 4), rng.randrange(10, 100)]
    rng.shuffle(values)
    pairs = dict(zip(keys, values, strict=True))
    shown = " ".join(f"{key}={value}" for key, value in pairs.items())
    return f"json {shown}:", json.dumps(pairs, separators=(",", ":"))


def _join(rng: random.Random) -> tuple[str, str]:
    """`sorted by ; dog cat ox:` -> `cat;dog;ox`."""
    order, separator = rng.choice(_ORDERS), rng.choice(_SEPARATORS)
    words = [_word(rng, 2, 3) for _ in range(3)]
    ordered = {"sorted": sorted(words), "reversed": words[::-1], "as is": words}[order]
    return f"{order} by {separator} {' '.join(words)}:", separator.join(ordered)


def _count(rng: random.Random) -> tuple[str, str]:
    """`2 upper dog cat ox:` -> `1 DOG 2 CAT`: the first two words, numbered, in upper case."""
    count, case = rng.randint(1, 3), rng.choice(("upper", "lower", "title"))
    words = [_word(rng, 2, 3) for _ in range(3)]
    taken = [getattr(str, case)(word) for word in words[:count]]
    answer = " ".join(f"{number} {word}" for number, word in enumerate(taken, 1))
    return f"{count} {case} {' '.join(words)}:", answer


# --- drawing --------------------------------------------------------------------------------------

KINDS: dict[str, tuple[ProblemKind, ...]] = {
    "math": (
        ProblemKind("one-step", False, _one_step),
        ProblemKind("chain", True, _chain),
        ProblemKind("word-problem", True, _word_problem),
        ProblemKind("equation", True, _equation),
    ),
    "code": (
        ProblemKind("operation", False, _operation),
        ProblemKind("list-operation", False, _list_operation),
        ProblemKind("trace", True, _trace),
        ProblemKind("list-expression", True, _list_expression),
        ProblemKind(SYNTHESIS, True, _synthesis),
    ),
    "chat": (
        ProblemKind("simple", False, _simple),
        ProblemKind("json", True, _json_object),
        ProblemKind("join", True, _join),
        ProblemKind("count", True, _count),
    ),
}
DOMAINS = tuple(KINDS)


def problems(
    domain: str, *, split: Split, count: int, seed: int, hard: bool = True
) -> list[Problem]:
    """Return `count` different problems of the domain's hard or easy kinds, in rotation."""
    if domain not in KINDS:
        raise UsageError(
            f"unknown domain {domain!r}{did_you_mean(domain, DOMAINS)}",
            hint=f"known: {', '.join(DOMAINS)}",
        )
    kinds = [kind for kind in KINDS[domain] if kind.hard == hard]
    sources = [draw(domain, kind, split=split, seed=seed) for kind in kinds]
    drawn: list[Problem] = []
    while sources and len(drawn) < count:
        source = sources[len(drawn) % len(sources)]
        problem = next(source, None)
        if problem is None:
            sources.remove(source)
        else:
            drawn.append(problem)
    if len(drawn) < count:
        raise UsageError(
            f"{domain} has only {len(drawn)} {split} problems of this kind, {count} were requested"
        )
    return drawn


def draw(domain: str, kind: ProblemKind, *, split: Split, seed: int) -> Iterator[Problem]:
    """Yield different problems of one kind until it is exhausted."""
    rng = random.Random(f"{domain}/{kind.name}/{split}/{seed}")
    seen: set[str] = set()
    idle = 0
    while idle < _PATIENCE:
        prompt, answer = kind.draw(rng)
        idle += 1
        if prompt in seen or is_test(prompt) != (split == "test"):
            continue
        seen.add(prompt)
        idle = 0
        yield Problem(domain, kind.name, kind.hard, prompt, answer)
