"""The tables of docs/evidence.md about refit, from measured cells.

    python benchmarks/evidence_refit.py docs/data/evidence-methods.jsonl.xz soft
    python benchmarks/evidence_refit.py CELLS three

`soft` and `plain`: everything that mends a weight average, and the paired comparisons. `two` and
`three`: refit after three merges of as many models; differences to refit are paired over seeds,
those whose t-test gives p < 0.05 are bold. `ridge`, `text`, `parts`: what is swept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import evidence_methods as methods
from evidence_methods import MERGES, Cells, Measured, measured, read_cells, tenths, unpacked
from moemerge.experiments.journal import CELLS, CellJournal
from moemerge.experiments.report import comparison_table, difference, main_table, with_error
from moemerge.experiments.summary import RowSummary, Summary
from moemerge.experiments.tables import REFERENCE
from moemerge.experiments.text_tables import TextTable
from moemerge.testbed.experiments.bench import Scale
from moemerge.testbed.experiments.merges import AVERAGE, EVERY
from moemerge.testbed.experiments.run import TableRequest, make_plan

METHODS = (AVERAGE, "wudi", "regmean")
REGIMES = ("soft", "plain")
SWEEPS = {"ridge": "λ", "text": "text of each domain", "parts": "refitted"}
REFIT = "refit"
VARIANTS = {
    "as merged": "",
    "routers averaged": " with routers of {average}",
    "HARC": " calibrated[]",
    "source targets, exact": " calibrated[objective=exact,targets=source-features]",
    "fine-tuned, best of four": " tuned[1x0.0002|1x0.001|4x0.0002|4x0.001]",
    REFIT: " refitted[]",
    "refit, with the base on general text": " refitted[base=64]",
    "refit, with the base on text of chat": " refitted[base=64,kept=chat]",
}
SEEDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cells", type=Path)
    parser.add_argument("table", choices=(*REGIMES, *MERGES, *SWEEPS))
    args = parser.parse_args()
    if args.table in REGIMES:
        print("\n\n".join(t.markdown() for t in mended(args.cells, args.table)))
    elif args.table in MERGES:
        print(after_merges(args.cells, args.table).markdown())
    else:
        print(swept(args.cells, args.table).markdown())


# --- one experiment of the testbed ----------------------------------------------------------------


def summary(cells: Path, experiment: str, regime: str) -> Summary:
    request = TableRequest((experiment,), Path(), regimes=(regime,), methods=(AVERAGE,))
    return make_plan(request).tables[0].summary(journal(cells))


@cache
def journal(cells: Path) -> CellJournal:
    """All of them, checked, as the testbed reads them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CELLS).write_text(unpacked(cells), encoding="utf-8")
        return CellJournal(Path(folder), asdict(Scale()))


def mended(cells: Path, regime: str) -> list[TextTable]:
    """All rows of a weight average, and what is compared."""
    found = summary(cells, "refit", regime)
    # What a specialist differs from the base by would look like a difference to the merge.
    rows = (
        row if row.group != REFERENCE else replace(row, against_first=None) for row in found.rows
    )
    found = replace(found, rows=tuple(rows))
    compared = comparison_table(found)
    assert compared is not None
    return [
        without(main_table(found), "merge", "seeds", "p, problems"),
        without(compared, "merge", "mismatch Δ"),
    ]


def without(table: TextTable, *headings: str) -> TextTable:
    kept = [n for n, heading in enumerate(table.headings) if heading not in headings]

    def cut(row: Sequence[str]) -> tuple[str, ...]:
        return tuple(row[n] for n in kept)

    return TextTable(cut(table.headings), tuple(map(cut, table.rows)), left=1)


def swept(cells: Path, name: str) -> TextTable:
    """A row for each value, soft and plain beside each other."""
    found = [summary(cells, f"refit-{name}", regime) for regime in REGIMES]
    rows = [
        (soft.label, *swept_cells(soft), *swept_cells(plain))
        for soft, plain in zip(*(one.rows for one in found), strict=True)
    ]
    return TextTable((SWEEPS[name], *beside("mean", "Δ", "chat")), tuple(rows), left=1)


def swept_cells(row: RowSummary) -> list[str]:
    change = row.against_first
    return [
        with_error(row.overall),
        "" if change is None else difference(change.accuracy),
        with_error(row.untouched["chat"]),
    ]


# --- after three merges ---------------------------------------------------------------------------


def after_merges(cells: Path, models: str) -> TextTable:
    both = [read_cells(cells, regime) for regime in REGIMES]
    rows = []
    for method in METHODS:
        title = EVERY[method].title
        for label in VARIANTS:
            soft, plain = (columns_of(one, MERGES[models], method, label) for one in both)
            if soft and plain:
                rows.append((title, label, *soft, *plain))
                title = ""
    chat = ("chat",) if models == "two" else ()
    return TextTable(("merge", "", *beside("mean", "against refit", *chat)), tuple(rows))


def columns_of(cells: Cells, merge: str, method: str, label: str) -> list[str]:
    """Mean, difference to refit, and what is left of chat if it is untouched; none where a seed
    lacks the row."""

    def found(variant: str) -> Measured | None:
        name = merge.format(method) + VARIANTS[variant].format(average=merge.format(AVERAGE))
        return measured(cells, range(SEEDS), name)

    own, refit = found(label), found(REFIT)
    if own is None or refit is None:
        return []
    columns = [tenths(own.mean), "" if label == REFIT else methods.difference(own, refit)]
    return columns if own.chat is None else [*columns, tenths(own.chat)]


def beside(first: str, *others: str) -> list[str]:
    """Headings of both regimes."""
    return [heading for regime in REGIMES for heading in (f"{regime}: {first}", *others)]


if __name__ == "__main__":
    main()
