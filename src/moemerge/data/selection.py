"""Which rows are taken: none twice, none that a benchmark holds too, and every group its share."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
_SPACE: Final = re.compile(r"\s+")


def normal(text: str) -> str:
    """What makes two texts the same: letters and digits, whatever their case and spacing."""
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", text)).strip().casefold()


def distinct(items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """The first of each, in order."""
    first: dict[Hashable, T] = {}
    for item in items:
        first.setdefault(key(item), item)
    return list(first.values())


def balanced(
    items: Sequence[T], group: Callable[[T], str], limit: int | None, rng: random.Random
) -> list[T]:
    """At most `limit` items, drawn at random: groups get equal shares, and what a small group
    leaves goes to the others. In the order of the input."""
    if limit is None or limit >= len(items):
        return list(items)
    places: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(group(item), []).append(place)
    for waiting in places.values():
        rng.shuffle(waiting)
    taken: list[int] = []
    left = limit
    # Smallest groups first: what they cannot use is known before the others' share is fixed.
    smallest_first = sorted(places.values(), key=len)
    for number, waiting in enumerate(smallest_first):
        share = left // (len(smallest_first) - number)
        taken += waiting[:share]
        left -= min(share, len(waiting))
    return [items[place] for place in sorted(taken)]


_WORD: Final = re.compile(r"\w+")


class Benchmark:
    """What must not be trained or calibrated on, as sequences of n words."""

    def __init__(self, name: str, texts: Iterable[str], n: int) -> None:
        self.name = name
        self._n = n
        self._grams: set[tuple[str, ...]] = set()
        # A question shorter than n words is compared as a whole.
        self._short: set[tuple[str, ...]] = set()
        for text in texts:
            words = words_of(text)
            if len(words) < n:
                self._short.add(words)
            self._grams.update(grams(words, n))

    def overlaps(self, text: str) -> bool:
        words = words_of(text)
        if words in self._short:
            return True
        return any(gram in self._grams for gram in grams(words, self._n))


def words_of(text: str) -> tuple[str, ...]:
    """Words and numbers, without case and punctuation."""
    return tuple(_WORD.findall(normal(text)))


def grams(words: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[at : at + n]) for at in range(len(words) - n + 1))
