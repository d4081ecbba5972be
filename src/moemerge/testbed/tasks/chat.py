"""The domain `chat`: say a thing exactly as it was asked for."""

from __future__ import annotations

import json
import random

from moemerge.testbed.tasks.problem import Family

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SEPARATORS = ";-+/_"
_ORDERS = ("sorted", "reversed", "as is")


def _word(chance: random.Random, shortest: int = 2, longest: int = 4) -> str:
    return "".join(chance.choices(_LETTERS, k=chance.randint(shortest, longest)))


def _simple(chance: random.Random) -> tuple[str, str]:
    """`spell cat:` -> `c-a-t`."""
    order, word = chance.choice(("repeat", "spell", "upper")), _word(chance, 3, 7)
    answers = {"repeat": word, "spell": "-".join(word), "upper": word.upper()}
    return f"{order} {word}:", answers[order]


def _json(chance: random.Random) -> tuple[str, str]:
    """`json k=bob n=31:` -> `{"k":"bob","n":31}`."""
    keys = chance.sample(_LETTERS, 2)
    values: list[object] = [_word(chance, 2, 4), chance.randrange(10, 100)]
    chance.shuffle(values)
    pairs = dict(zip(keys, values, strict=True))
    shown = " ".join(f"{key}={value}" for key, value in pairs.items())
    return f"json {shown}:", json.dumps(pairs, separators=(",", ":"))


def _join(chance: random.Random) -> tuple[str, str]:
    """`sorted by ; dog cat ox:` -> `cat;dog;ox`."""
    order, separator = chance.choice(_ORDERS), chance.choice(_SEPARATORS)
    words = [_word(chance, 2, 3) for _ in range(3)]
    return f"{order} by {separator} {' '.join(words)}:", separator.join(_put(words, order))


def _count(chance: random.Random) -> tuple[str, str]:
    """`2 upper dog cat ox:` -> `1 DOG 2 CAT`: so many, numbered, in the asked case."""
    count, case = chance.randint(1, 3), chance.choice(("upper", "lower", "title"))
    words = [_word(chance, 2, 3) for _ in range(3)]
    taken = [getattr(str, case)(word) for word in words[:count]]
    answer = " ".join(f"{number} {word}" for number, word in enumerate(taken, 1))
    return f"{count} {case} {' '.join(words)}:", answer


def _put(words: list[str], order: str) -> list[str]:
    if order == "sorted":
        return sorted(words)
    return words[::-1] if order == "reversed" else words


FAMILIES = (
    Family("simple", False, _simple),
    Family("json", True, _json),
    Family("join", True, _join),
    Family("count", True, _count),
)
