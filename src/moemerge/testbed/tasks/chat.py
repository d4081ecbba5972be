"""The domain `chat`: say a thing exactly as it was asked for."""

from __future__ import annotations

import json
import random

from moemerge.testbed.tasks.problem import ProblemKind

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SEPARATORS = ";-+/_"
_ORDERS = ("sorted", "reversed", "as is")


def _word(rng: random.Random, shortest: int = 2, longest: int = 4) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(shortest, longest)))


def _simple(rng: random.Random) -> tuple[str, str]:
    """`spell cat:` -> `c-a-t`."""
    order, word = rng.choice(("repeat", "spell", "upper")), _word(rng, 3, 7)
    answers = {"repeat": word, "spell": "-".join(word), "upper": word.upper()}
    return f"{order} {word}:", answers[order]


def _json(rng: random.Random) -> tuple[str, str]:
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
    return f"{order} by {separator} {' '.join(words)}:", separator.join(_put(words, order))


def _count(rng: random.Random) -> tuple[str, str]:
    """`2 upper dog cat ox:` -> `1 DOG 2 CAT`: so many, numbered, in the asked case."""
    count, case = rng.randint(1, 3), rng.choice(("upper", "lower", "title"))
    words = [_word(rng, 2, 3) for _ in range(3)]
    taken = [getattr(str, case)(word) for word in words[:count]]
    answer = " ".join(f"{number} {word}" for number, word in enumerate(taken, 1))
    return f"{count} {case} {' '.join(words)}:", answer


def _put(words: list[str], order: str) -> list[str]:
    if order == "sorted":
        return sorted(words)
    return words[::-1] if order == "reversed" else words


KINDS = (
    ProblemKind("simple", False, _simple),
    ProblemKind("json", True, _json),
    ProblemKind("join", True, _join),
    ProblemKind("count", True, _count),
)
