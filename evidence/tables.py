"""The tables of docs/evidence.md from recorded cells.

A method or variant is shown if it was measured with all seeds. Differences are paired over seeds;
those with p < 0.05 in a t-test are bold.
"""

from __future__ import annotations

import json
import lzma
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evidence.cells import Scale
from evidence.experiments import LEADING
from evidence.journal import CELLS, CellJournal
from evidence.methods import AVERAGE, EVERY
from evidence.run import TableRequest, plan_tables
from evidence.seed_tables import comparison_table, main_table
from evidence.seed_tables import difference as seed_difference
from evidence.summary import REFERENCE, RowSummary, Summary
from moemerge.lab.significance import paired_t
from moemerge.lab.study.tables import TextTable, with_error

MERGES = {"two": "{}(math,code)", "three": "{}(chat,math,code)"}
VARIANTS = ("{}", "{} calibrated[]", "{} refitted[]")
HEAD = (
    "| method | as merged | against averaging | HARC | by HARC | against averaging with HARC | "
    "refit | mismatch: as merged, HARC |"
)
RULE = "|---|---:|---:|---:|---:|---:|---:|---:|"
CHAT = " chat: as merged, HARC, refit |", "---:|"  # if chat was not merged
SIGNIFICANT = 0.05
SEEDS = range(5)
REGIMES = ("soft", "plain")
SWEEPS = {"ridge": "λ", "text": "text of each domain", "parts": "refitted"}
REFIT = "refit"
REPAIRS = {
    "as merged": "",
    "routers averaged": " with routers of {average}",
    "HARC": " calibrated[]",
    "source targets, exact": " calibrated[objective=exact,targets=source-features]",
    "fine-tuned, best of four": " tuned[1x0.0002|1x0.001|4x0.0002|4x0.001]",
    REFIT: " refitted[]",
    "refit, with the base on general text": " refitted[base=64]",
    "refit, with the base on text of chat": " refitted[base=64,kept=chat]",
}

Cell = dict[str, Any]
Cells = dict[int, dict[str, Cell]]  # by seed and name


def unpacked(path: Path) -> str:
    """Return the text of a file, which may be compressed."""
    whole = path.read_bytes()
    return (lzma.decompress(whole) if path.suffix == ".xz" else whole).decode()


@cache
def read_cells(path: Path, regime: str) -> Cells:
    """Return the OLMoE cells of a regime."""
    cells: Cells = {}
    for cell in map(json.loads, unpacked(path).splitlines()):
        if cell["set"]["regime"] == regime and cell["set"]["arch"] == "olmoe":
            cells.setdefault(cell["set"]["seed"], {})[cell["cell"]] = cell
    return cells


# --- methods ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One variant of one method: percentages by seed."""

    mean: tuple[float, ...]
    mismatch: tuple[float, ...]
    chat: tuple[float, ...] | None


def measured(cells: Cells, seeds: Sequence[int], name: str) -> Measured | None:
    """Return a cell's values, or None if a seed is missing."""
    found = [cells.get(seed, {}).get(name) for seed in seeds]
    if any(cell is None for cell in found):
        return None

    def each(value: Callable[[Cell], float]) -> tuple[float, ...]:
        return tuple(100.0 * value(cell) for cell in found if cell is not None)

    def over_domains(key: str) -> Callable[[Cell], float]:
        return lambda cell: statistics.fmean(row[key] for row in cell["domains"].values())

    chat = None
    if all(cell is not None and "untouched" in cell for cell in found):
        chat = each(lambda cell: cell["untouched"]["chat"]["accuracy"])
    return Measured(each(over_domains("accuracy")), each(over_domains("mismatch")), chat)


def methods_table(path: Path, regime: str, models: str) -> str:
    """Return the table of every merge method, the best with HARC first."""
    cells, merge = read_cells(path, regime), MERGES[models]

    def variants(method: str) -> list[Measured | None]:
        names = (variant.format(merge.format(method)) for variant in VARIANTS)
        return [measured(cells, SEEDS, name) for name in names]

    average, has_chat = variants(AVERAGE), False
    rows: list[tuple[float, str]] = []
    for method, recipe in EVERY.items():
        merged, harc, refit = variants(method)
        if merged is None or harc is None or refit is None:
            continue
        changes = ["", ""]
        if method != AVERAGE and average[0] is not None and average[1] is not None:
            changes = [difference(merged, average[0]), difference(harc, average[1])]
        mismatches = ", ".join(whole(one.mismatch) for one in (merged, harc))
        row = [
            recipe.title,
            tenths(merged.mean),
            changes[0],
            tenths(harc.mean),
            difference(harc, merged),
            changes[1],
            tenths(refit.mean),
            mismatches,
        ]
        chats = [whole(one.chat) for one in (merged, harc, refit) if one.chat is not None]
        if chats:
            has_chat = True
            row.append(", ".join(chats))
        rows.append((statistics.fmean(harc.mean), f"| {' | '.join(row)} |"))
    rows.sort(key=lambda row: -row[0])
    heads = [HEAD + CHAT[0], RULE + CHAT[1]] if has_chat else [HEAD, RULE]
    return "\n".join([*heads, *(text for _, text in rows)])


# --- numbers ------------------------------------------------------------------------------------


def tenths(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}"


def whole(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.0f}"


def difference(one: Measured, other: Measured) -> str:
    """Return the mean difference ± its standard error over seeds."""
    test = paired_t(other.mean, one.mean)
    change = test.difference
    text = f"{'−' if change.value < 0 else '+'}{abs(change.value):.1f} ± {change.error or 0.0:.1f}"
    return f"**{text}**" if test.p is not None and test.p < SIGNIFICANT else text


# --- refit --------------------------------------------------------------------------------------


def summary(cells: Path, experiment: str, regime: str) -> Summary:
    request = TableRequest((experiment,), Path(), regimes=(regime,), methods=(AVERAGE,))
    return plan_tables(request)[0].summary(journal(cells))


@cache
def journal(cells: Path) -> CellJournal:
    """Return the journal of the recorded cells."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CELLS).write_text(unpacked(cells), encoding="utf-8")
        return CellJournal(Path(folder), asdict(Scale()))


def repairs_table(cells: Path, regime: str) -> str:
    """Return the repairs of a weight average, and their paired comparisons."""
    found = summary(cells, "refit", regime)
    # The specialists' difference to the base would look like a difference to the merge.
    rows = (
        row if row.group != REFERENCE else replace(row, against_first=None) for row in found.rows
    )
    found = replace(found, rows=tuple(rows))
    compared = comparison_table(found)
    tables = (
        without(main_table(found), "merge", "seeds", "p, problems"),
        without(compared, "merge", "mismatch Δ"),
    )
    return "\n\n".join(table.markdown() for table in tables)


def without(table: TextTable, *headings: str) -> TextTable:
    kept = [n for n, heading in enumerate(table.headings) if heading not in headings]

    def cut(row: Sequence[str]) -> tuple[str, ...]:
        return tuple(row[n] for n in kept)

    return TextTable(cut(table.headings), tuple(map(cut, table.rows)), left=1)


def sweep_table(cells: Path, name: str) -> str:
    """Return a row for each value of a sweep, with columns for soft and plain sets."""
    found = [summary(cells, f"refit-{name}", regime) for regime in REGIMES]
    rows = [
        (soft.label, *sweep_cells(soft), *sweep_cells(plain))
        for soft, plain in zip(*(one.rows for one in found), strict=True)
    ]
    headings = (SWEEPS[name], *both_regimes("mean", "Δ", "chat"))
    return TextTable(headings, tuple(rows), left=1).markdown()


def sweep_cells(row: RowSummary) -> list[str]:
    change = row.against_first
    return [
        with_error(row.overall),
        "" if change is None else seed_difference(change.accuracy),
        with_error(row.untouched["chat"]),
    ]


def merges_table(cells: Path, models: str) -> str:
    """Return the repairs after three merges of two or three models."""
    both = [read_cells(cells, regime) for regime in REGIMES]
    rows = []
    for method in LEADING:
        title = EVERY[method].title
        for label in REPAIRS:
            soft, plain = (columns_of(one, MERGES[models], method, label) for one in both)
            if soft and plain:
                rows.append((title, label, *soft, *plain))
                title = ""
    chat = ("chat",) if models == "two" else ()
    headings = ("merge", "", *both_regimes("mean", "against refit", *chat))
    return TextTable(headings, tuple(rows)).markdown()


def columns_of(cells: Cells, merge: str, method: str, label: str) -> list[str]:
    """Return the mean, the difference to refit, and the accuracy on chat if it was not merged.

    The result is empty if a seed is missing.
    """

    def found(variant: str) -> Measured | None:
        name = merge.format(method) + REPAIRS[variant].format(average=merge.format(AVERAGE))
        return measured(cells, SEEDS, name)

    own, refit = found(label), found(REFIT)
    if own is None or refit is None:
        return []
    columns = [tenths(own.mean), "" if label == REFIT else difference(own, refit)]
    return columns if own.chat is None else [*columns, tenths(own.chat)]


def both_regimes(first: str, *others: str) -> list[str]:
    """Return the headings for both regimes."""
    return [heading for regime in REGIMES for heading in (f"{regime}: {first}", *others)]


def table(cells: Path, name: str) -> str:
    """Return a table of docs/evidence.md by name."""
    kind, _, which = name.partition("-")
    makers: dict[str, Callable[[], str]] = {
        "methods": lambda: methods_table(cells, *which.split("-")),
        "repairs": lambda: repairs_table(cells, which),
        "merges": lambda: merges_table(cells, which),
        "sweep": lambda: sweep_table(cells, which),
    }
    return makers[kind]()


TABLES = (
    *(f"methods-{regime}-{models}" for models in MERGES for regime in REGIMES),
    *(f"repairs-{regime}" for regime in REGIMES),
    *(f"merges-{models}" for models in MERGES),
    *(f"sweep-{name}" for name in SWEEPS),
)
