"""Tables, comparisons, pages and figures from cells with known numbers, and recorded tables."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from evidence.cells import Scale, SetKey
from evidence.experiments import EXPERIMENTS, Scope
from evidence.journal import CellJournal
from evidence.packing import pack
from evidence.seed_tables import markdown
from evidence.summary import AS_MERGED, AVERAGED, HARC, SOURCE, summarise
from moemerge.lab.testbed.tasks import DOMAINS

SCALE = asdict(Scale(problems=10, held_out=4, rows=4, tuning_steps=1))
KEYS = [SetKey("olmoe", "tiny", "soft", seed) for seed in (0, 1)]
SCOPE = Scope(("average", "wudi"), layers=3)
# Problems solved of ten, in each domain, by seed; and the mismatch.
SOLVED = {AS_MERGED: (4, 5), AVERAGED: (5, 5), HARC: (6, 7), SOURCE: (7, 9)}
MISMATCH = {AS_MERGED: 0.4, AVERAGED: 0.3, HARC: 0.2, SOURCE: 0.1}


def untouched_of(cell):
    """Return the domains without a source, if one model is measured on all domains."""
    separate = "specialists(", "routers in the sources", "source routers", "forced"
    return [
        d for d in DOMAINS if d not in cell.domains and not any(w in cell.name for w in separate)
    ]


def result(cell, solved, mismatch):
    one = {
        "problems": 10,
        "accuracy": solved / 10,
        "solved": pack([n < solved for n in range(10)]),
        "mismatch": mismatch,
        "any_mismatch": 1.0,
        "kl": mismatch / 10,
        "kl_layers": [0.0, mismatch / 10, mismatch / 5],
        "mismatch_layers": [mismatch] * 3,
        "tokens": 40,
    }
    found = {"trained": "0", "domains": dict.fromkeys(cell.domains, one), "seconds": 1.0}
    untouched = {name: {**one, "accuracy": 1 - mismatch} for name in untouched_of(cell)}
    return {**found, "untouched": untouched} if untouched else found


@pytest.fixture
def journal(tmp_path):
    return CellJournal(tmp_path, SCALE)


def fill(journal, name, keys=KEYS):
    rows = EXPERIMENTS[name].rows(SCOPE)
    for row in rows:
        for at, key in enumerate(keys):
            solved = SOLVED.get(row.label, (5, 6))[at]
            mismatch = MISMATCH.get(row.label, 0.25)
            if journal.get(key, row.cell) is None:
                journal.add(key, row.cell, result(row.cell, solved, mismatch))
    return rows


def summary_of(journal, name, keys=KEYS):
    return summarise(EXPERIMENTS[name].form(keys[0]), fill(journal, name, keys), keys, journal.get)


def test_means_errors_and_differences(journal):
    summary = summary_of(journal, "two-model")
    harc = summary.row("WUDI", HARC)
    assert harc.overall.value == pytest.approx(0.65)
    assert harc.overall.error == pytest.approx(0.05)
    # Seed by seed it solves two more of ten: certain, with no spread to test.
    assert harc.against_first.accuracy.difference.value == pytest.approx(0.2)
    assert harc.against_first.accuracy.wins == 2
    # Two domains, two seeds, two problems each that the plain merge misses.
    assert (harc.against_first.problems.gained, harc.against_first.problems.lost) == (8, 0)
    assert harc.against_first.problems.p == pytest.approx(2 / 2**8)
    assert harc.kl_layers["math"] == pytest.approx([0.0, 0.02, 0.04])
    assert summary.row("WUDI", AS_MERGED).against_first is None


def test_an_unfinished_table_is_shown_as_far_as_it_is(journal):
    rows = EXPERIMENTS["two-model"].rows(SCOPE)
    journal.add(KEYS[1], rows[0].cell, result(rows[0].cell, 3, 0.5))
    summary = summarise(EXPERIMENTS["two-model"].form(KEYS[0]), rows, KEYS, journal.get)
    assert summary.seeds == (1,)
    assert len(summary.rows) == 1
    assert len(summary.missing) == len(rows) - 1
    assert "Not measured: reference, specialists;" in markdown(summary)


def test_pairs_are_those_that_both_were_measured_on(journal):
    rows = fill(journal, "two-model", KEYS[:1])
    journal.add(KEYS[1], rows[2].cell, result(rows[2].cell, 9, 0.4))
    summary = summarise(EXPERIMENTS["two-model"].form(KEYS[0]), rows, KEYS, journal.get)
    by = {row.label: row for row in summary.rows if row.group == "Weight averaging"}
    assert by[AS_MERGED].overall.count == 2
    assert by[HARC].against_first.accuracy.difference.count == 1


RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", ["hessian", "fine-tuning", "router-swap"])
def test_recorded_cells_give_the_recorded_table(name, tmp_path):
    shutil.copy(RECORDED / "cells.jsonl", tmp_path)
    scale = json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0])["scale"]
    one = EXPERIMENTS[name]
    rows = one.rows(Scope(("average", "wudi", "regmean"), layers=3))
    keys = [SetKey("olmoe", "tiny", "soft", seed) for seed in (0, 1, 2)]
    summary = summarise(one.form(keys[0]), rows, keys, CellJournal(tmp_path, scale).get)
    assert markdown(summary) == (RECORDED / f"{name}-soft.md").read_text(encoding="utf-8")
