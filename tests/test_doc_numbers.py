"""Numbers that docs/choosing.md takes over from the tables of docs/evidence.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
EVIDENCE = (DOCS / "evidence.md").read_text(encoding="utf-8")
CHOOSING = (DOCS / "choosing.md").read_text(encoding="utf-8")
Table = list[list[str]]


def table(text: str, after: str) -> Table:
    """The first table after a phrase: its rows below the head, cell by cell."""
    lines = text.partition(after)[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def means(regime: str) -> dict[str, dict[str, str]]:
    """Mean accuracy by merge and variant, five seeds."""
    found: dict[str, dict[str, str]] = {}
    name = ""
    for merge, variant, _, _, mean, *_ in table(EVIDENCE, f"## Two models, {regime} specialists"):
        name = merge or name
        found.setdefault(name, {})[variant] = mean.partition(" ±")[0]
    return found


def test_five_seeds_are_those_of_the_evidence() -> None:
    soft, plain = means("soft"), means("plain")
    merges = {
        "RegMean": "RegMean", "WUDI": "WUDI", "Fisher": "Fisher", "TIES": "TIES", "DARE": "DARE",
        "weight averaging": "Weight averaging",
    }  # fmt: skip
    rows = table(CHOOSING, "**Five seeds, six methods.**")
    assert len(rows) == len(merges)
    for label, _, *numbers in rows:
        merge = merges[label.partition(" (")[0]]
        assert numbers == [
            regime[merge][variant] for regime in (soft, plain) for variant in ("as merged", "HARC")
        ], label
    ends = [soft["reference"]["specialists"], plain["reference"]["specialists"]]
    base = soft["reference"]["base"]
    assert f"{ends[0]} (soft) and {ends[1]} (plain); base {base}" in CHOOSING


ROWS = {row[0]: row for row in table(EVIDENCE, "## Every merge method")}
# How the one-seed table of choosing.md calls a row of the evidence.
NAMES = {
    "`regmean`": "RegMean", "`lot`": "LOT", "`fisher`": "Fisher", "`doge`": "DOGE",
    "`acm` on a sum": "Sum by ACM", "`neuron`": "NeuronMerge", "`ram`": "RAM", "`slta`": "SLTA",
    "`sens`": "Average by Sens", "`aim` around a sum": "Sum in AIM", "`pcb`": "PCB",
    "`iso_c`": "Iso-C", "`iso_cts`": "Iso-CTS", "`knots` around TIES": "TIES in KnOTS",
    "`svc` around a sum": "Sum in SVC", "`emr`": "EMR, its united model", "`tsv`": "TSV-M",
    "`wudi`": "WUDI", "ASWUDI": "ASWUDI", "SWUDI": "SWUDI", "`cat`": "CAT", "`awd`": "AWD",
    "a plain sum": "Sum of task vectors", "OptMerge (`targets: leading`)": "OptMerge, leading",
    "OptMerge (`leading`)": "OptMerge, leading", "OptMerge (`centred`)": "OptMerge, centred",
    "OptMerge (`targets: centred`)": "OptMerge, centred",
}  # fmt: skip


@pytest.mark.parametrize(("column", "place"), [(1, 1), (2, 3)], ids=["as merged", "HARC"])
def test_one_seed_is_that_of_the_evidence(column: int, place: int) -> None:
    seen = set()
    for row in table(CHOOSING, "**One seed, two dozen methods.**"):
        for names, number in re.findall(
            r"([^,]+?) (\d+\.\d)", row[column].partition("all others")[0]
        ):
            for name in names.split(" and "):
                assert ROWS[NAMES[name.strip()]][place] == number, name
                seen.add(NAMES[name.strip()])
    if column == 1:  # nobody is left out
        assert seen == set(ROWS) - {"Weight averaging"}
    average = ROWS["Weight averaging"]
    assert f"Averaging gives {average[1]} as merged and {average[3]} after HARC" in CHOOSING


def test_groups_as_merged_follow_the_intervals() -> None:
    rows = table(CHOOSING, "**One seed, two dozen methods.**")
    for row, sign in zip(rows, (1, 0, -1), strict=True):
        for name in re.findall(r"([^,]+?) \d+\.\d", row[1]):
            change, spread = (
                float(part.replace("−", "-")) for part in ROWS[NAMES[name.strip()]][2].split(" ± ")
            )
            assert (change > spread) - (change < -spread) == sign, name


def test_refit_brings_all_to_one_place() -> None:
    fitted = {name: float(row[5]) for name, row in ROWS.items() if row[5]}
    merged = [float(ROWS[name][1]) for name in fitted]
    assert len(fitted) == 12
    assert f"from {min(merged)} to {max(merged)} as merged" in CHOOSING
    assert f"all came to between {min(fitted.values())} and {max(fitted.values())}" in CHOOSING
