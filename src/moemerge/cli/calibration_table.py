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
    if "holdout" in total:
        rows.insert(1, ("held out", f"KL {', '.join(_held_out(total, list(report.sources)))}"))
    reasons = Counter(skipped.reason for skipped in report.skipped)
    rows += [("left alone", f"{count}: {reason}") for reason, count in reasons.items()]
    if verbose:
        rows += [("", f"layer {s.layer}: {s.router}") for s in report.skipped]
        rows += _timings(report)
    return Group(_table(report, verbose=verbose), "", facts(rows))


def _timings(report: CalibrationReport) -> list[tuple[str, str]]:
    """Where the time went: one after the other, and beside that."""
    timings = report.timings
    rows = [("solved", f"{timings.solved:.1f} s from the start to the last router")]
    rows += [("", f"{seconds:.2f} s {name}") for name, seconds in timings.seconds.items()]
    rows += [
        ("", f"{seconds:.2f} s {name} beside it ({nbytes / 1e9:.2f} GB)")
        for name, (seconds, nbytes) in timings.beside.items()
    ]
    if timings.peak_memory is not None:
        rows.append(("GPU memory", f"{timings.peak_memory / 1e9:.1f} GB at the most"))
    return rows


def _table(report: CalibrationReport, *, verbose: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    names = list(report.sources)
    repeated = len({row["layer"] for row in report.layers}) < len(report.layers)
    with_router = verbose or repeated
    columns = ["\nlayer", "\nsteps", "\nresidual"]
    columns += [f"KL\n{name}" for name in names] + [f"mismatch\n{name}" for name in names]
    for column in columns:  # two lines of header: two domains fit a terminal of 80 columns
        table.add_column(escape(column), justify="right", no_wrap=True)
    held_out = verbose and "holdout" in report.totals  # without, there is no room: a mean below
    if held_out:
        table.add_column("KL\nheld out", justify="right", no_wrap=True)
    if with_router:
        table.add_column("router", overflow="fold")
    for row in (*report.layers, {**report.totals, "layer": "mean", "router": ""}):
        held = [escape("\n".join(_held_out(row, names)))] if held_out else []
        table.add_row(*_cells(row, names), *held, *([escape(row["router"])] * with_router))
    return table


def _cells(row: Mapping[str, Any], names: list[str]) -> list[str]:
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
    return cells


def _held_out(row: Mapping[str, Any], names: list[str]) -> list[str]:
    """What became of the KL on each domain's held-out rows."""
    changes = {name: _change(row.get("holdout", {}), "kl", name, "{:.2g}") for name in names}
    return [f"{name} {text}" for name, text in changes.items() if text]


def _change(row: Mapping[str, Any], what: str, name: str, form: str) -> str:
    before = row.get(f"{what}_before", {}).get(name)
    after = row.get(f"{what}_after", {}).get(name)
    if before is None or after is None:
        return ""
    return f"{form.format(before)}→{form.format(after)}"
