"""Tables of repairs and of pruning for the terminal: a function VERB_report for each repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from moemerge.cli.console import in_flags
from moemerge.cli.render import NumberTable, facts, requantised
from moemerge.config.settings import AUTO_HOLDOUT_ROWS
from moemerge.runtime.formatting import Quantity, percent, with_error
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.repairs.distill_report import DistillReport
    from moemerge.repairs.harc_report import CalibrationReport
    from moemerge.repairs.prune import PruneReport
    from moemerge.repairs.refit_report import RefitReport
    from moemerge.repairs.report import RepairReport


# --- a calibration --------------------------------------------------------------------------------

# Heading, section of the row, key, and description.
Column = tuple[str, str, str, Quantity]
COLUMNS: tuple[Column, ...] = (
    ("KL", "", "kl", Quantity.NATS),
    ("mismatch", "", "mismatch", Quantity.SHARE),
)
HELD_OUT: Column = ("KL, held out", "holdout", "kl", Quantity.NATS)


def calibrate_report(report: CalibrationReport, *, verbose: bool) -> RenderableType:
    """Return a row per router, then means; `verbose` adds routers that were skipped."""
    total = report.totals
    rows = [
        (
            "routers",
            f"{total['routers']} solved for in {counted(total['iterations'], 'step')}, "
            f"{total['converged']} converged",
        ),
        ("tokens", ", ".join(f"{name} {count}" for name, count in total["tokens"].items())),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    if "holdout" in total:
        names = [name for name in report.sources if name not in report.not_held_out]
        changes = (f"{name} {_change(total, HELD_OUT, name)}" for name in names)
        rows.insert(1, ("held out", f"KL {', '.join(changes)}"))
    rows[2:2] = held_out(report)
    rows += unequal(report.weights)
    reasons = Counter(skipped.reason for skipped in report.skipped)
    rows += [("left alone", f"{count}: {in_flags(reason)}") for reason, count in reasons.items()]
    if verbose:
        rows += [("", f"layer {s.layer}: {s.router}") for s in report.skipped]
        rows += timing(report, "solved", "router")
    return Group(_solves(report, verbose=verbose), "", facts(rows))


def held_out(report: RepairReport) -> list[tuple[str, str]]:
    """Return mismatch and loss on held-out rows if measured, and domains that have none."""
    rows = []
    figures = report.diagnosis
    if figures is not None and figures["tokens"]:
        before, after = figures["mismatch_before"], figures["mismatch_after"]
        changes = (f"{name} {percent(before[name])}→{percent(after[name])}" for name in before)
        on = f"({report.repair.card_holdout}; each model on its own features)"
        rows.append(("mismatch", f"{', '.join(changes)} {on}"))
        before, after = figures["loss_before"], figures["loss_after"]
        if None not in (*before.values(), *after.values()):
            losses = (f"{name} {before[name]:.3f}→{after[name]:.3f}" for name in before)
            rows.append(("loss", f"{', '.join(losses)} nats a token"))
    checked = {} if figures is None else figures["check"]
    for name, one in checked.items():
        if one is None:
            continue
        change = with_error(one["change"], one["change_error"])
        source = "" if one["loss_source"] is None else f"; the source {one['loss_source']:.3f}"
        ends = f"{one['loss_before']:.3f}→{one['loss_after']:.3f}"
        rows.append((f"check {name}", f"loss {ends} ({change}{source}), unused by any fit"))
    if report.not_held_out:
        names = ", ".join(report.not_held_out)
        auto = report.settings.get("holdout") == "auto"
        few = f" (holdout auto needs {AUTO_HOLDOUT_ROWS} rows or more)" if auto else ""
        rows.append(("not held out", f"{names}: every figure is of rows that were fitted{few}"))
    return rows


def unequal(weights: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return a row with the sources' weights if they differ."""
    if len(set(weights.values())) == 1:
        return []
    return [("weights", ", ".join(f"{name} {weight:.3g}" for name, weight in weights.items()))]


def timing(report: RepairReport, done: str, last: str) -> list[tuple[str, str]]:
    """Return the time per part: in sequence, and in the background."""
    timings = report.timings
    rows = [(done, f"{timings.solved:.1f} s from the start to the last {last}")]
    rows += [("", f"{seconds:.2f} s {name}") for name, seconds in timings.seconds.items()]
    rows += [
        ("", f"{seconds:.2f} s {name} in the background ({nbytes / 1e9:.2f} GB)")
        for name, (seconds, nbytes) in timings.beside.items()
    ]
    if timings.peak_memory is not None:
        rows.append(("GPU memory", f"{timings.peak_memory / 1e9:.1f} GB at the most"))
    return rows


def _solves(report: CalibrationReport, *, verbose: bool) -> NumberTable:
    """Return a row per router."""
    names = list(report.sources)
    columns = [*COLUMNS, HELD_OUT] if verbose and "holdout" in report.totals else [*COLUMNS]
    repeated = len({row["layer"] for row in report.layers}) < len(report.layers)
    solver = ["layer", "steps", "residual", *(["router"] if verbose or repeated else [])]
    words = [at for at, heading in enumerate(solver) if heading == "router"]
    alone = "routers alone: both on the merged model's features"
    own = report.settings["targets"] == "source-features"
    title = f"before → after; {'each model on its own features' if own else alone}"
    across = [f"{heading}\n{name}" for heading, *_ in columns for name in names]
    table = NumberTable(
        [f"\n{text}" for text in solver] + across, keys=len(solver), words=words, title=title
    )
    for row in (*report.layers, {**report.totals, "layer": "mean"}):
        changes = [_change(row, column, name) for column in columns for name in names]
        table.add(*_solve_cells(row)[: len(solver)], *changes)
    return table


def _solve_cells(row: Mapping[str, Any]) -> list[str | Text]:
    """Return layer, steps, residual and router; a row of means has only its name.

    With the exact objective, steps are those of CG and of Newton's method after it.
    """
    if "router" not in row:
        return [row["layer"], "", "", ""]
    residual, exact = row["residual"], row.get("exact")
    steps = Text(str(row["iterations"]) + (f" + {exact['steps']} Newton" if exact else ""))
    if row["status"] != "converged":
        why = "no further progress" if row["status"] == "stagnated" else "stopped early"
        steps = Text(f"{steps}, {why}", style="red")
    return [str(row["layer"]), steps, "" if residual is None else f"{residual:.1e}", row["router"]]


def _change(row: Mapping[str, Any], column: Column, name: str) -> str:
    _, part, figure, quantity = column
    values = row.get(part, {}) if part else row
    ends = [values.get(f"{figure}_{end}", {}).get(name) for end in ("before", "after")]
    return "" if None in ends else "→".join(map(quantity.text, ends))


# --- a refit --------------------------------------------------------------------------------------


def refit_report(report: RefitReport, *, verbose: bool) -> RenderableType:
    """Return a row per layer, then totals; `verbose` adds a row per map."""
    total = report.totals
    kept = f", {total['kept']} stay as merged" if total["kept"] else ""
    tokens = [
        f"{name} {count}" + (f" (+{held} held out)" if held else "")
        for (name, count), held in zip(
            report.tokens.items(), report.held_out_tokens.values(), strict=True
        )
    ]
    held = total["error_left"]["held_out"]
    left, on = (held, "held out") if held else (total["error_left"]["calibration"], "fitted")
    if report.settings.get("solver") == "gradient":
        fitted = f"{total['maps']} layers and heads, each in {report.settings['steps']} steps{kept}"
    else:
        fitted = f"{total['maps']} maps, {counted(total['routers'], 'router')}{kept}"
    rows = [
        ("refitted", fitted),
        ("error left", ", ".join(f"{k} {v:.0%}" for k, v in left.items()) + f" (rows {on})"),
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


def distill_report(report: DistillReport, *, verbose: bool) -> RenderableType:
    """Return the held-out divergence of each domain before and after, then totals."""
    table = NumberTable(
        ["domain", "tokens", "before", "after"],
        title="KL to the source on held-out rows",
    )
    before, after = report.totals["divergence_before"], report.totals["divergence_after"]
    for name, tokens in report.tokens.items():
        values = ["", ""] if before is None else [f"{before[name]:.4g}", f"{after[name]:.4g}"]
        table.add(name, str(tokens), *values)
    losses = report.held_out_losses
    ends = (losses[step] for step in (0, report.kept_step)) if losses else ()
    trained = [" ".join(f"{name} {value:.4g}" for name, value in end.items()) for end in ends]
    rows = [
        ("trained", f"{report.parameters:,} parameters with {report.optimiser}"),
        *([("held-out loss", " → ".join(trained))] if report.settings["next_token"] else []),
        ("learning rate", f"{report.learning_rate:.2g}"),
        ("steps", f"{report.steps}; the weights are those of step {report.kept_step}"),
        *held_out(report),
        *unequal(report.weights),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    rows += [("note", in_flags(notice)) for notice in report.notices] if verbose else []
    return Group(table, "", facts(rows))


def _table(report: RefitReport, *, verbose: bool) -> NumberTable:
    """Return drift per source and the residual error; `verbose` adds that of each map."""
    from moemerge.repairs.refit_report import kind_of, map_errors

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
    """Return the residual error of all maps; routers, measured by KL, count separately."""
    pairs = [errors(row) for row in rows if routers or "router" not in row]
    before = sum(b for b, _ in pairs)
    return "" if not before else f"{sum(a for _, a in pairs) / before:.0%}"


# --- pruning --------------------------------------------------------------------------------------


def prune_report(report: PruneReport, *, verbose: bool) -> RenderableType:
    """Return the removed experts of each layer, and the share of the gate weights they had."""
    table = NumberTable(["layer", "gate weight removed", "removed experts"], words=[2])
    for layer, kept in report.kept.items():
        removed = sorted({*range(report.experts_before)} - {*kept})
        table.add(layer, f"{report.removed[layer]:.1%}", " ".join(map(str, removed)))
    tokens = sum(report.tokens.values())
    experts = f"{report.experts_after} of {report.experts_before} experts kept"
    rows = [
        ("pruned", f"{experts}, by {report.settings['score']} on {tokens} tokens"),
        ("time", f"{report.seconds:.1f} s on {report.device}, {report.dtype}"),
        ("folder", report.output),
    ]
    rows += [("note", in_flags(notice)) for notice in report.notices] if verbose else []
    return Group(table, "", facts(rows))
