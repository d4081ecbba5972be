"""A refit's result for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from moemerge.cli.render import NumberTable, facts, requantised
from moemerge.cli.routing_table import held_out, timing, unequal
from moemerge.cli.wording import in_flags
from moemerge.report.words import Quantity
from moemerge.runtime.progress import counted

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
        ("maps", f"{total['maps']} refitted, {counted(total['routers'], 'router')}{kept}"),
        ("error left", ", ".join(f"{k} {v:.0%}" for k, v in left.items())),
        ("tokens", ", ".join(tokens)),
        *held_out(report),
        *unequal(report.weights),
        *requantised(report.requantised),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    rows += [("note", in_flags(notice)) for notice in report.notices] if verbose else []
    rows += timing(report, "fitted", "map") if verbose else []
    return Group(_table(report, verbose=verbose), "", facts(rows))


def _table(report: RefitReport, *, verbose: bool) -> NumberTable:
    """Drift of every source and what is left of the error; with `verbose` that of each map too."""
    from moemerge.refitting.report import kind_of, map_errors

    names = list(report.sources)
    keys = ["layer", "map"] if verbose else ["layer"]
    last = ["error\nleft", *(["ridge"] if verbose else [])]
    headings = [*(f"drift\n{name}" for name in names), *last]
    table = NumberTable(
        [*(f"\n{key}" for key in keys), *headings],
        keys=len(keys),
        words=range(1, len(keys)),
        title="drift from the source, merged → refitted",
    )
    for layer in report.layers:
        name = "head" if layer["layer"] is None else str(layer["layer"])
        drifts = [_drift(layer, name) for name in names]
        left = _left(layer["maps"], map_errors)
        table.add(*[name, ""][: len(keys)], *drifts, *[left, ""][: len(last)])
        for row in layer["maps"] if verbose else ():
            ridge = "" if row.get("ridge") is None else f"{row['ridge']:.2g}"
            blank = [""] * len(names)
            table.add("", kind_of(row), *blank, _left([row], map_errors, routers=True), ridge)
    return table


def _drift(layer: Mapping[str, Any], name: str) -> str:
    ends = (layer[key].get(name) for key in ("drift_before", "drift_after"))
    return "→".join(Quantity.RATIO.text(end) for end in ends if end is not None)


def _left(rows: Sequence[Mapping[str, Any]], errors: Any, *, routers: bool = False) -> str:
    """What is left of the maps' errors, all together; a router's is a KL, and counts alone."""
    pairs = [errors(row) for row in rows if routers or "router" not in row]
    before = sum(b for b, _ in pairs)
    return "" if not before else f"{sum(a for _, a in pairs) / before:.0%}"
