"""Models that are merged with coefficients, and text of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zoo

NAMES = ("math", "code")
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


def make_models(path: Path, base: Path, lengths: Sequence[int], *, unlike: bool = False) -> Path:
    """A base, two models and their text, rows of so many words; `unlike` texts share no word."""
    base = zoo.tiny_tokenizer(zoo.perturb(base, path / "base", 7, scale=0.0))
    for seed, name in enumerate(NAMES, 1):
        zoo.tiny_tokenizer(zoo.perturb(base, path / name, seed, scale=0.2 * seed))
        chance = random.Random(seed)
        words = zoo._WORDS.split()[seed::2] if unlike else zoo._WORDS.split()
        rows = [{"text": " ".join(chance.choices(words, k=n))} for n in lengths]
        zoo.write_rows(path / f"{name}.jsonl", rows)
    return path


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "merge_method": "task_arithmetic",
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / n), "name": n} for n in NAMES],
        "parameters": {"weight": 1.0},
        **more,
    }


def texts(folder: Path) -> dict[str, str]:
    return {name: str(folder / f"{name}.jsonl") for name in NAMES}
