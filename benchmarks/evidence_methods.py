"""The tables of docs/evidence.md about every merge method, from measured cells.

    python benchmarks/evidence_methods.py docs/data/evidence-methods.jsonl.xz soft 0-4
    python benchmarks/evidence_methods.py CELLS plain 0-4 --models three

A method is shown if it was measured with all these seeds: as merged, with HARC and refitted.
Differences are paired over seeds; those whose t-test gives p < 0.05 are bold.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemerge.evaluation.significance import paired_t
from moemerge.testbed.experiments.merges import AVERAGE, EVERY

MERGES = {"two": "{}(math,code)", "three": "{}(chat,math,code)"}
VARIANTS = ("{}", "{} calibrated[]", "{} refitted[]")
HEAD = (
    "| method | as merged | against averaging | HARC | by HARC | against averaging with HARC | "
    "refit | mismatch: as merged, HARC |"
)
RULE = "|---|---:|---:|---:|---:|---:|---:|---:|"
CHAT = " chat: as merged, HARC, refit |", "---:|"  # where it was not merged
SURE = 0.05

Cell = dict[str, Any]
Cells = dict[int, dict[str, Cell]]  # by seed and name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cells", type=Path)
    parser.add_argument("regime", choices=("soft", "plain"))
    parser.add_argument("seeds")
    parser.add_argument("--models", choices=MERGES, default="two", help="that were merged")
    args = parser.parse_args()
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    cells = read_cells(args.cells, args.regime)
    print("\n".join(lines(cells, seeds, MERGES[args.models])))


def unpacked(path: Path) -> str:
    whole = path.read_bytes()
    return (lzma.decompress(whole) if path.suffix == ".xz" else whole).decode()


def read_cells(path: Path, regime: str) -> Cells:
    cells: Cells = {}
    for cell in map(json.loads, unpacked(path).splitlines()):
        if cell["set"]["regime"] == regime and cell["set"]["arch"] == "olmoe":
            cells.setdefault(cell["set"]["seed"], {})[cell["cell"]] = cell
    return cells


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One variant of one method: a value for each seed."""

    mean: tuple[float, ...]
    mismatch: tuple[float, ...]
    chat: tuple[float, ...] | None


def measured(cells: Cells, seeds: Sequence[int], name: str) -> Measured | None:
    """None where it lacks a seed."""
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


def lines(cells: Cells, seeds: Sequence[int], merge: str) -> list[str]:
    """The table, the best with HARC first."""

    def variants(method: str) -> list[Measured | None]:
        names = (variant.format(merge.format(method)) for variant in VARIANTS)
        return [measured(cells, seeds, name) for name in names]

    average, has_chat = variants(AVERAGE), False
    rows: list[tuple[float, str]] = []
    for method, recipe in EVERY.items():
        merged, harc, refit = variants(method)
        if merged is None or harc is None or refit is None:
            continue
        beside = ["", ""]
        if method != AVERAGE and average[0] is not None and average[1] is not None:
            beside = [difference(merged, average[0]), difference(harc, average[1])]
        mismatches = ", ".join(whole(one.mismatch) for one in (merged, harc))
        row = [
            recipe.title,
            tenths(merged.mean),
            beside[0],
            tenths(harc.mean),
            difference(harc, merged),
            beside[1],
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
    return [*heads, *(text for _, text in rows)]


# --- numbers ------------------------------------------------------------------------------------


def tenths(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}"


def whole(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.0f}"


def difference(one: Measured, other: Measured) -> str:
    """Mean ± standard error over seeds."""
    test = paired_t(other.mean, one.mean)
    change = test.difference
    text = f"{'−' if change.value < 0 else '+'}{abs(change.value):.1f} ± {change.error or 0.0:.1f}"
    return f"**{text}**" if test.p is not None and test.p < SURE else text


if __name__ == "__main__":
    main()
