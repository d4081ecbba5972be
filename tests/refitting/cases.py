"""Tiny merges to refit: those of calibration, with text of which one domain needs no padding."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import moemerge
from calibration import cases
from moemerge.refitting.report import RefitReport

LENGTH = 12  # words of a row of the domain whose rows are all as long


class Case(cases.Case):
    def refit(self, out: Path, **options: Any) -> RefitReport:
        options = {"sources": self.sources, "data": self.data, "device": "cpu", **options}
        return moemerge.refit(self.merged, out, **options)


def make_case(base: Path, folder: Path, *, rows: int = 14, **options: Any) -> Case:
    case = cases.make_case(base, folder, rows=rows, **options)
    even = next(iter(case.data.values()))
    rng = random.Random(7)
    lines = [
        json.dumps({"text": " ".join(rng.choices(cases.WORDS, k=LENGTH))}) for _ in range(rows)
    ]
    even.write_text("\n".join(lines) + "\n")
    return Case(case.merged, case.sources, case.data)
