"""Tiny merges to refit: those of calibration, with text of which one domain needs no padding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import moemerge
import zoo
from moemerge.repairs.layer import Layer
from moemerge.repairs.refit_report import RefitReport
from repairs.calibration import cases

LENGTH = 12  # words of a row of the domain whose rows are all as long


class Case(cases.Case):
    def refit(self, out: Path, **options: Any) -> RefitReport:
        options = {"sources": self.sources, "data": self.data, "device": "cpu", **options}
        return moemerge.refit(self.merged, out, **options)


class Killed(BaseException):
    """Nothing of ours catches it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    """Let the next refit die when it has finished so many layers."""
    save, left = Layer.save, [layers]

    def dying(self: Layer) -> None:
        if not left[0]:
            raise Killed
        save(self)
        left[0] -= 1

    monkeypatch.setattr(Layer, "save", dying)


def make_case(base: Path, folder: Path, *, rows: int = 14, **options: Any) -> Case:
    case = cases.make_case(base, folder, rows=rows, **options)
    even = next(iter(case.data.values()))
    rng = random.Random(7)
    texts = (" ".join(rng.choices(cases.WORDS, k=LENGTH)) for _ in range(rows))
    zoo.write_rows(even, ({"text": text} for text in texts))
    return Case(case.merged, case.sources, case.data)
