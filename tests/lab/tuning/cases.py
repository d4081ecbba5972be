"""A tiny model with a tokenizer, and rows for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import moemerge
import zoo
from moemerge.runtime.progress import Silent

QUESTIONS = ("what is one plus two", "what is one", "how", "why is x equal to y plus one")


def make_base(built: Path, out: Path) -> Path:
    shutil.copytree(built, out)
    return zoo.tiny_tokenizer(out, chat_template=True)


def rows(count: int = 32) -> list[dict[str, Any]]:
    """Of unlike length; every third has a second turn."""
    made = []
    for n in range(count):
        turns = [
            {"role": "user", "content": QUESTIONS[n % len(QUESTIONS)]},
            {"role": "assistant", "content": f"three {n % 10} " + "and four " * (n % 3)},
        ]
        if n % 3 == 0:
            turns += [
                {"role": "user", "content": "why"},
                {"role": "assistant", "content": "the answer is five"},
            ]
        made.append({"messages": turns})
    return made


def tune(base: Path, out: Path, **settings: Any) -> Any:
    """A short training with steps that show."""
    given = {"data": rows(), "batch": 8, "steps": 4, "learning_rate": 1e-2, **settings}
    return moemerge.tune(base, out, **given)


class InterruptedAt(Silent):
    """Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def advance(self, amount: int) -> None:
        self._left -= amount
        if self._left <= 0:
            raise KeyboardInterrupt
