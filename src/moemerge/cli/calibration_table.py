"""A calibration's result for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from moemerge.cli.render import FirstThatFits, NumberTable, facts
from moemerge.report.words import Quantity

if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport

# Heading, part of the row, name there, and what it is.
Column = tuple[str, str, str, Quantity]
COLUMNS: tuple[Column, ...] = (
    ("KL", "", "kl", Quantity.NATS),
    ("mismatch", "", "mismatch", Quantity.SHARE),
)
HELD_OUT: Column = ("KL, held out", "holdout", "kl", Quantity.NATS)


def calibration_report(report: CalibrationReport, *, verbose: bool) -> RenderableType:
    """A row for each router, means below; with `verbose` also what was left alone."""
    total = report.totals
    rows = [
        (
            "routers",
            f"{total['routers']} solved for in {total['iterations']} steps, "
            f"{total['converged']} converged",
        ),
        ("tokens", ", ".join(f"{name} {count}" for name, count in total["tokens"].items())),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    if "holdout" in total:
        changes = (f"{name} {_change(total, HELD_OUT, name)}" for name in report.sources)
        rows.insert(1, ("held out", f"KL {', '.join(changes)}"))
    reasons = Counter(skipped.reason for skipped in report.skipped)
    rows += [("left alone", f"{count}: {reason}") for reason, count in reasons.items()]
    if verbose:
        rows += [("", f"layer {s.layer}: {s.router}") for s in report.skipped]
        rows += _timings(report)
    return Group(_table(report, verbose=verbose), "", facts(rows))


def _timings(report: CalibrationReport) -> list[tuple[str, str]]:
    """Where the time went: one after the other, and in the background."""
    timings = report.timings
    rows = [("solved", f"{timings.solved:.1f} s from the start to the last router")]
    rows += [("", f"{seconds:.2f} s {name}") for name, seconds in timings.seconds.items()]
    rows += [
        ("", f"{seconds:.2f} s {name} in the background ({nbytes / 1e9:.2f} GB)")
        for name, (seconds, nbytes) in timings.beside.items()
    ]
    if timings.peak_memory is not None:
        rows.append(("GPU memory", f"{timings.peak_memory / 1e9:.1f} GB at the most"))
    return rows


def _table(report: CalibrationReport, *, verbose: bool) -> RenderableType:
    """A row for each router; where that is too wide, a row for each of its domains."""
    names = list(report.sources)
    columns = [*COLUMNS, HELD_OUT] if verbose and "holdout" in report.totals else [*COLUMNS]
    repeated = len({row["layer"] for row in report.layers}) < len(report.layers)
    solver = ["layer", "steps", "residual", *(["router"] if verbose or repeated else [])]
    words = [at for at, heading in enumerate(solver) if heading == "router"]
    alone = "routers alone: both on the merged model's features"
    own = report.settings["targets"] == "source-features"
    title = f"before → after; {'each model on its own features' if own else alone}"
    across = [f"{heading}\n{name}" for heading, *_ in columns for name in names]
    wide = NumberTable(
        [f"\n{text}" for text in solver] + across, keys=len(solver), words=words, title=title
    )
    solves = NumberTable(solver, words=words)
    domains = NumberTable(
        ["layer", "domain", *(column[0] for column in columns)], keys=2, words=[1]
    )
    for row in (*report.layers, {**report.totals, "layer": "mean"}):
        of_solver = _solve_cells(row)[: len(solver)]
        changes = {name: [_change(row, column, name) for column in columns] for name in names}
        by_column = zip(*changes.values(), strict=True)
        wide.add(*of_solver, *(cell for column in by_column for cell in column))
        if "router" in row:
            solves.add(*of_solver)
        for at, name in enumerate(names):
            domains.add(of_solver[0] if at == 0 else "", name, *changes[name])
    return FirstThatFits(wide, Group(domains, "", solves))


def _solve_cells(row: Mapping[str, Any]) -> list[str | Text]:
    """Layer, steps, residual and router; of the means, only what they are."""
    if "router" not in row:
        return [row["layer"], "", "", ""]
    residual, status = row["residual"], row["status"]
    steps = Text(str(row["iterations"]))
    if status != "converged":
        steps = Text(f"{steps} {status}", style="red")
    return [str(row["layer"]), steps, "" if residual is None else f"{residual:.1e}", row["router"]]


def _change(row: Mapping[str, Any], column: Column, name: str) -> str:
    _, part, figure, quantity = column
    values = row.get(part, {}) if part else row
    ends = [values.get(f"{figure}_{end}", {}).get(name) for end in ("before", "after")]
    return "" if None in ends else "→".join(map(quantity.text, ends))
