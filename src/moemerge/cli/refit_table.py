"""A refit's result for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from moemerge.cli.render import facts, requantised
from moemerge.cli.routing_table import unequal
from moemerge.cli.wording import in_flags

if TYPE_CHECKING:
    from moemerge.refitting import RefitReport


def refit_report(report: RefitReport, *, verbose: bool) -> RenderableType:
    """A row for each layer, totals below; with `verbose` a row for each map as well."""
    total = report.totals
    kept = f", {total['kept']} stay as merged" if total["kept"] else ""
    tokens = [
        f"{name} {count}" + (f" (+{held} held out)" if held else "")
        for (name, count), held in zip(
            report.tokens.items(), report.held_out_tokens.values(), strict=True
        )
    ]
    left = total["error_left"]["held_out"] or total["error_left"]["calibration"]
    rows = [
        ("maps", f"{total['maps']} refitted, {total['routers']} routers{kept}"),
        ("error left", ", ".join(f"{k} {v:.0%}" for k, v in left.items())),
        ("tokens", ", ".join(tokens)),
        *unequal(report.weights),
        *requantised(report.requantised),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    rows += [("note", in_flags(notice)) for notice in report.notices] if verbose else []
    rows += _timings(report) if verbose else []
    return Group(_table(report, verbose=verbose), "", facts(rows))


def _timings(report: RefitReport) -> list[tuple[str, str]]:
    timings = report.timings
    rows = [("fitted", f"{timings.solved:.1f} s from the start to the last map")]
    rows += [("", f"{seconds:.2f} s {name}") for name, seconds in timings.seconds.items()]
    rows += [
        ("", f"{seconds:.2f} s {name} in the background ({nbytes / 1e9:.2f} GB)")
        for name, (seconds, nbytes) in timings.beside.items()
    ]
    if timings.peak_memory is not None:
        rows.append(("GPU memory", f"{timings.peak_memory / 1e9:.1f} GB at the most"))
    return rows


def _table(report: RefitReport, *, verbose: bool) -> Table:
    from moemerge.refitting.report import kind_of, map_errors

    table = Table(box=None, pad_edge=False)
    names = list(report.sources)
    columns = ["\nlayer", *(f"drift\n{name}" for name in names), "error\nleft"]
    for column in columns:
        table.add_column(escape(column), justify="right", no_wrap=True)
    for column in ("ridge", "map") if verbose else ():
        table.add_column(f"\n{column}", overflow="fold")
    for layer in report.layers:
        empty = ["", ""] if verbose else []
        table.add_row(
            "head" if layer["layer"] is None else str(layer["layer"]),
            *(_drift(layer, name) for name in names),
            _left(layer["maps"], map_errors),
            *empty,
        )
        for row in layer["maps"] if verbose else ():
            before, after = map_errors(row)
            left = "" if not before else f"{after / before:.0%}"
            ridge = "" if row.get("ridge") is None else f"{row['ridge']:.2g}"
            shown = f"[dim]{escape(kind_of(row))}[/]"
            table.add_row("", *([""] * len(names)), left, ridge, shown)
    return table


def _drift(layer: Mapping[str, Any], name: str) -> str:
    before, after = (layer[key].get(name) for key in ("drift_before", "drift_after"))
    if after is None:
        return ""
    return f"{after:.2g}" if before is None else f"{before:.2g}→{after:.2g}"


def _left(rows: Sequence[Mapping[str, Any]], errors: Any) -> str:
    """What is left of the linear maps' errors, all together."""
    pairs = [errors(row) for row in rows if "router" not in row]
    before = sum(b for b, _ in pairs)
    return "" if not before else f"{sum(a for _, a in pairs) / before:.0%}"
