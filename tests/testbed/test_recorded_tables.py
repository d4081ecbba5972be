"""Tables as they were before the engine served studies too, of cells drawn at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moemerge.experiments.journal import CellJournal
from moemerge.experiments.report import markdown
from moemerge.experiments.summary import summarise
from moemerge.testbed.experiments.ablations import Scope
from moemerge.testbed.experiments.catalogue import EXPERIMENTS
from moemerge.testbed.experiments.recipes import SetKey

RECORDED = Path(__file__).parent / "recorded"
KEYS = [SetKey("olmoe", "tiny", "soft", seed) for seed in (0, 1, 2)]


@pytest.mark.parametrize("name", ["hessian", "fine-tuning", "router-swap"])
def test_recorded_cells_give_the_recorded_table(name, tmp_path):
    shutil.copy(RECORDED / "cells.jsonl", tmp_path)
    scale = json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0])["scale"]
    one = EXPERIMENTS[name]
    rows = one.rows(Scope(("average", "wudi", "regmean"), layers=3))
    summary = summarise(one.form(KEYS[0]), rows, KEYS, CellJournal(tmp_path, scale))
    assert markdown(summary) == (RECORDED / f"{name}-soft.md").read_text(encoding="utf-8")
