"""Numbers that docs/choosing.md takes over from docs/evidence.md, and that from measured cells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evidence.tables import methods_table
from evidence.tables import table as recorded_table

DOCS = Path(__file__).parents[1] / "docs"
EVIDENCE = (DOCS / "evidence.md").read_text(encoding="utf-8")
CHOOSING = (DOCS / "choosing.md").read_text(encoding="utf-8")
EVERY = EVIDENCE.partition("## Every merge method")[2]
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


# Columns: as merged, against averaging, HARC, by HARC, against averaging with HARC, refit,
# mismatches, chat.
SOFT = {row[0]: row[1:] for row in table(EVERY, "**Soft specialists, five seeds.**")}
PLAIN = {row[0]: row[1:] for row in table(EVERY, "**Plain specialists, five seeds.**")}
MERGED, HARC, WITH_HARC, REFIT, CHAT = 0, 2, 4, 5, 7
# How choosing.md calls a row of the evidence.
NAMES = {
    "`lot`": "LOT", "`regmean`": "RegMean", "`wudi`": "WUDI", "`tsv`": "TSV-M", "`slta`": "SLTA",
    "`wudi` with `solver: spectral`": "SWUDI", "`wudi` with `solver: adaptive`": "ASWUDI",
    "`wudi` with `solver: exact`": "WUDI, exact",
    "`wudi` with `targets: centred`": "OptMerge, centred",
    "`wudi` with `targets: leading`": "OptMerge, leading", "`cat`": "CAT", "`sce`": "SCE",
    "a sum by `neuron`": "NeuronMerge", "a sum in `svc`": "Sum in SVC", "`fisher`": "Fisher",
    "`ties` in `knots`": "TIES in KnOTS", "a sum in `aim`": "Sum in AIM", "`pcb`": "PCB",
    "`emr`": "EMR, its united model", "an average by `sens`": "Average by Sens", "`ram`": "RAM",
    "`ramplus_tl`": "RAM+", "`nuslerp`": "NuSLERP", "`multislerp`": "Multi-SLERP",
    "`karcher`": "Karcher mean", "`della_linear`": "DELLA, linear", "`della`": "DELLA",
    "`dare_linear`": "DARE, linear", "`breadcrumbs_ties`": "Breadcrumbs, TIES", "`awd`": "AWD",
    "`breadcrumbs`": "Breadcrumbs", "`ties`": "TIES", "a sum (`task_arithmetic`)":
    "Sum of task vectors", "`iso_c`": "Iso-C", "`iso_cts`": "Iso-CTS", "`doge`": "DOGE",
    "`dare_ties`": "DARE", "a sum by `acm`": "Sum by ACM", "`model_stock`": "Model Stock",
    "`linear`": "Weight averaging", "coefficients by `neuron`": "NeuronMerge",
    "`wudi`, `targets: leading`": "OptMerge, leading", "coefficients by `adamerging`": "AdaMerging",
}  # fmt: skip


CELLS = DOCS / "data" / "evidence-methods.jsonl.xz"


@pytest.mark.parametrize("regime", ["soft", "plain"])
@pytest.mark.parametrize(("models", "methods"), [("two", 41), ("three", 43)])
def test_tables_of_every_method_are_those_of_the_cells(
    regime: str, models: str, methods: int
) -> None:
    table = methods_table(CELLS, regime, models)
    assert table.count("\n") == methods + 1
    assert table in EVERY


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("repairs-soft", 11),
        ("repairs-plain", 11),
        ("merges-two", 23),
        ("merges-three", 20),
        ("sweep-ridge", 6),
        ("sweep-text", 5),
        ("sweep-parts", 8),
    ],
)
def test_tables_about_refit_are_those_of_the_cells(name: str, rows: int) -> None:
    tables = recorded_table(CELLS, name)
    assert tables in EVIDENCE
    assert tables.partition("\n\n")[0].strip().count("\n") == rows + 1


def test_both_regimes_have_every_method() -> None:
    assert len(SOFT) == 41
    assert SOFT.keys() == PLAIN.keys()


def test_the_six_methods_with_five_seeds_are_those_of_the_first_table() -> None:
    found: dict[str, dict[str, str]] = {}
    name = ""
    for merge, variant, _, _, mean, *_ in table(EVIDENCE, "## Two models, soft specialists"):
        name = merge or name
        found.setdefault(name, {})[variant] = mean.partition(" ±")[0]
    merges = found.keys() - {"reference"}
    assert len(merges) == 6
    for merge in merges:
        assert [SOFT[merge][MERGED], SOFT[merge][HARC]] == [
            found[merge]["as merged"],
            found[merge]["HARC"],
        ], merge


@pytest.mark.parametrize("row", table(CHOOSING, "41 methods, our own"), ids=lambda row: row[0])
def test_the_best_are_as_measured(row: list[str]) -> None:
    label, _, *numbers, chat = row
    names = [NAMES.get(label, "")]
    if label == "`wudi`, `solver: spectral` or `adaptive`":
        names = ["SWUDI", "ASWUDI"]
    columns = [(rows, column) for rows in (SOFT, PLAIN) for column in (MERGED, HARC)]
    assert numbers == [", ".join(rows[name][column] for name in names) for rows, column in columns]
    assert chat == "; ".join(", ".join(SOFT[name][CHAT].split(", ")[:2]) for name in names)


def test_groups_with_harc_follow_the_tests_over_seeds() -> None:
    seen = []
    for (_, methods), sign in zip(
        table(CHOOSING, "All of them with HARC"), (1, 0, -1), strict=True
    ):
        for label, change in re.findall(r"([^,]+?) ([+−]?\d+\.\d)(?:, |$)", methods):
            row = SOFT[NAMES[label.strip()]]
            value = row[WITH_HARC].strip("*").partition(" ±")[0]
            assert float(change.replace("−", "-")) == float(value.replace("−", "-")), label
            beyond_chance = row[WITH_HARC].startswith("**")
            assert sign == beyond_chance * (1 if value.startswith("+") else -1), label
            seen.append(NAMES[label.strip()])
    assert sorted(seen) == sorted(SOFT.keys() - {"Weight averaging"})


def test_refit_brings_all_to_one_place() -> None:
    ends = [
        f"between {min(fitted)} and {max(fitted)} ({regime})"
        for regime, rows in (("soft", SOFT), ("plain", PLAIN))
        for fitted in [[float(row[REFIT]) for row in rows.values()]]
    ]
    assert f"all 41 came to {ends[0]} and {ends[1]}" in CHOOSING
