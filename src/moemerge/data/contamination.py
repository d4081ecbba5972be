"""Prompts that a benchmark holds too: overlap of n words in a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from moemerge.data.selection import normal

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
