"""A calibration's result for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from moemerge.cli.render import facts

if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport


def calibration_report(report: CalibrationReport, *, verbose: bool) -> RenderableType:
    """A row for each router, means below; with `verbose` also what was left alone."""
    total = report.totals
    rows = [
        ("routers", f"{total['routers']} solved for, {total['converged']} converged"),
        ("tokens", ", ".join(f"{name} {count}" for name, count in total["tokens"].items())),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    reasons = Counter(skipped.reason for skipped in report.skipped)
    rows += [("left alone", f"{count}: {reason}") for reason, count in reasons.items()]
    if verbose:
        rows += [("", f"layer {s.layer}: {s.router}") for s in report.skipped]
    return Group(_table(report, verbose=verbose), "", facts(rows))


def _table(report: CalibrationReport, *, verbose: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    names = list(report.sources)
    repeated = len({row["layer"] for row in report.layers}) < len(report.layers)
    with_router = verbose or repeated
    columns = ["\nlayer", "\nsteps", "\nresidual"]
    columns += [f"KL\n{name}" for name in names] + [f"mismatch\n{name}" for name in names]
    for column in columns:  # two lines of header: two domains fit a terminal of 80 columns
        table.add_column(escape(column), justify="right", no_wrap=True)
    if any("holdout" in row for row in report.layers):
        table.add_column("KL\nheld out", justify="right")
    if with_router:
        table.add_column("router", overflow="fold")
    for row in (*report.layers, {**report.totals, "layer": "mean", "router": ""}):
        table.add_row(*_cells(row, names, with_router=with_router))
    return table


def _cells(row: Mapping[str, Any], names: list[str], *, with_router: bool) -> list[str]:
    residual = row.get("residual")
    steps = str(row["iterations"])
    if row.get("status") not in (None, "converged"):
        steps = f"[red]{steps} {escape(str(row['status']))}[/]"
    cells = [
        str(row["layer"]),
        steps,
        "" if residual is None else f"{residual:.1e}",
    ]
    cells += [_change(row, "kl", name, "{:.2g}") for name in names]
    cells += [_change(row, "mismatch", name, "{:.1%}") for name in names]
    if "holdout" in row:
        held = [_change(row["holdout"], "kl", name, "{:.2g}") for name in names]
        cells.append(", ".join(text for text in held if text))
    if with_router:
        cells.append(escape(row["router"]))
    return cells


def _change(row: Mapping[str, Any], what: str, name: str, form: str) -> str:
    before, after = row[f"{what}_before"].get(name), row[f"{what}_after"].get(name)
    if before is None or after is None:
        return ""
    return f"{form.format(before)}→{form.format(after)}"
