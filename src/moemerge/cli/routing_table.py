"""Tables of calibrations, refits and diagnoses for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moemerge.cli.render import NumberTable, facts, requantised
from moemerge.cli.wording import in_flags
from moemerge.diagnosis.verdict import DAMAGED, INTACT, SLIGHT
from moemerge.report.words import Quantity, display_names, percent, with_error
from moemerge.routing.figures import FIGURES, Figure
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.calibration.report import CalibrationReport
    from moemerge.diagnosis.results import Diagnosis, Swap
    from moemerge.distilling.report import DistillReport
    from moemerge.lockstep.report import RepairReport
    from moemerge.refitting.report import RefitReport


# --- a diagnosis ----------------------------------------------------------------------------------

BAR, NARROW_BAR = 8, 5  # characters of a full bar
WIDE = 3  # models times domains up to which the wide bar fits
BAR_PARTS = " ▏▎▍▌▋▊▉█"
# The colour of a bar is that of the verdict on its share alone.
COLOURS = ((INTACT, "green"), (SLIGHT, "yellow"), (DAMAGED, "dark_orange"), (1.0, "red"))


def diagnosis_report(diagnosis: Diagnosis, *, verbose: bool) -> RenderableType:
    """Return the whole diagnosis; `verbose` adds all figures."""
    parts: list[RenderableType] = [Text(diagnosis.verdict.words, style="bold"), ""]
    parts += [facts([(n.text, n.label) for n in diagnosis.verdict.numbers]), ""]
    if verbose:
        parts += [part for name in diagnosis.domains for part in (_figures(diagnosis, name), "")]
    else:
        parts += [_bars(diagnosis), ""]
    parts.append(_totals(diagnosis, verbose=verbose))
    if diagnosis.check:
        parts += ["", _check(diagnosis)]
    if diagnosis.swaps:
        parts += ["", _swaps(diagnosis.swaps)]
    if diagnosis.advice:
        parts += ["", _advice(diagnosis.advice)]
    if verbose:
        parts += ["", facts(_background(diagnosis))]
    return Group(*parts)


def bar(share: float, width: int = BAR) -> str:
    """Return a share of 1 as a bar in eighths; any share above 0 is visible."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    return ("█" * full + (BAR_PARTS[part] if part else "")).ljust(width)


def _colour(share: float) -> str:
    return next((colour for bound, colour in COLOURS if share <= bound), COLOURS[-1][1])


def _names(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the display name of each model."""
    models = diagnosis.models
    shown = display_names([model.label for model in models])
    return {model.name: name for model, name in zip(models, shown, strict=True)}


def _domains(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the display name of each domain, marked if it has no source."""
    return {
        name: f"{name} (base)" if facts.reference == "base" else name
        for name, facts in diagnosis.domains.items()
    }


def _routers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return (display name, weight name) per router; with several per layer, the name is added."""
    routers = list(dict.fromkeys((row.layer, row.router) for row in diagnosis.layers))
    layers = [layer for layer, _ in routers]
    return [
        (f"{layer} {router}" if layers.count(layer) > 1 else str(layer), router)
        for layer, router in routers
    ]


def _bars(diagnosis: Diagnosis) -> NumberTable:
    """Return a row per router with each domain's mismatch; for one model also the KL."""
    models = [model.name for model in diagnosis.models]
    domains = _domains(diagnosis)
    figures = ("mismatch", "KL") if len(models) == 1 else ("mismatch",)
    headings = [f"{called}\n{figure}" for called in domains.values() for figure in figures]
    table = NumberTable(["\nlayer", *headings], words=())
    rows = {(row.router, row.model, row.domain): row for row in diagnosis.layers}
    width = BAR if len(models) * len(domains) <= WIDE else NARROW_BAR
    for name, router in _routers(diagnosis):
        cells: list[str | Text] = [name]
        for domain in domains:
            of = [rows[router, model, domain] for model in models]
            cells.append(_share([row.mismatch for row in of], width))
            if len(models) == 1:
                cells.append(Quantity.NATS.text(of[0].kl))
        table.add(*cells)
    return table


def _share(shares: Sequence[float], width: int) -> Text:
    """Return the model's share as a bar and a number, then those of the compared models."""
    text = Text(bar(shares[0], width), style=_colour(shares[0]))
    text.append(f" {percent(shares[0]):>6}", style="default")
    for share in shares[1:]:
        text.append(" → ", style="dim")
        text.append(f"{percent(share):>5}", style=_colour(share))
    return text


def _heading(figure: Figure) -> str:
    return figure.heading.replace(" ", "\n")


def _figures(diagnosis: Diagnosis, domain: str) -> NumberTable:
    """Return all figures of one domain, a row per router and model."""
    rows = [row for row in diagnosis.layers if row.domain == domain]
    main = [f for f in FIGURES.values() if not f.minor and f.quantity is not Quantity.DATA]
    shown = [figure for figure in main if figure.name in rows[0].figures]
    names, several = _names(diagnosis), len(diagnosis.models) > 1
    keys = ["layer", *(["model"] if several else [])]
    headings = [*keys, *map(_heading, shown)]
    table = NumberTable(
        headings, keys=len(keys), words=range(1, len(keys)), title=_domains(diagnosis)[domain]
    )
    for name, router in _routers(diagnosis):
        for row in (row for row in rows if row.router == router):
            model = [names[row.model]] if several else []
            table.add(name, *model, *(figure.text(row.figures) for figure in shown))
            name = ""
    return table


def _totals(diagnosis: Diagnosis, *, verbose: bool) -> NumberTable:
    """Return a row per domain and model: the figures of the summary, or all."""
    have = diagnosis.totals[0].figures
    shown = [f for n, f in FIGURES.items() if n in have and (verbose or f.summary)]
    names, several = _names(diagnosis), len(diagnosis.models) > 1
    keys = ["domain", "model" if several else "tokens"]
    table = NumberTable([*keys, *map(_heading, shown)], keys=2, words=[0, 1] if several else [0])
    for domain, called in _domains(diagnosis).items():
        for total in (total for total in diagnosis.totals if total.domain == domain):
            second = names[total.model] if several else str(total.tokens)
            table.add(called, second, *(figure.text(total.figures) for figure in shown))
    return table


def _check(diagnosis: Diagnosis) -> NumberTable:
    """Return a row per check text and model."""
    names = _names(diagnosis)
    table = NumberTable(
        ["check text", "model", "documents", "tokens", "loss", "perplexity", "change"],
        keys=2,
        words=[0, 1],
        title="nats a token ± standard error over documents",
    )
    for one in diagnosis.check:
        change = "" if one.change is None else with_error(one.change, one.change_error)
        model = names.get(one.model, f"source {one.model}")
        counts = (str(one.documents), str(one.tokens))
        loss = with_error(one.loss, one.error, signed=False)
        table.add(one.name, model, *counts, loss, f"{one.perplexity:.4g}", change)
    return table


def _swaps(swaps: Sequence[Swap]) -> NumberTable:
    table = NumberTable(
        ["domain", "weights of", "routers of", "mismatch", "loss"], keys=3, words=range(3)
    )
    for swap in swaps:
        numbers = percent(swap.mismatch), Quantity.LOSS.text(swap.loss)
        table.add(swap.domain, swap.weights_of, swap.routers_of, *numbers)
    return table


def _advice(advice: Sequence[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for text in advice:
        table.add_row(Text("•", style="cyan"), Text(text))
    return table


def _background(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    model = diagnosis.model
    return [
        ("model", f"{model.label}: {model.architecture}, {counted(model.layers, 'layer')}"),
        (
            "gate",
            f"{model.gate}, {counted(model.experts, 'expert')}, {counted(model.routers, 'router')} "
            "compared",
        ),
        *(
            (f"{diagnosis.domains[name].reference} {name}", source.label)
            for name, source in diagnosis.sources.items()
        ),
        ("time", f"{diagnosis.seconds:.1f} s on {diagnosis.device}, {diagnosis.dtype}"),
        ("repeat", diagnosis.command),
    ]


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
        rows.append(("not held out", f"{names}: every figure is of rows that were fitted"))
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
        title="KL to the source on held-out rows, which chose rate and step",
    )
    before, after = report.totals["divergence_before"], report.totals["divergence_after"]
    for name, tokens in report.tokens.items():
        values = ["", ""] if before is None else [f"{before[name]:.4g}", f"{after[name]:.4g}"]
        table.add(name, str(tokens), *values)
    rows = [
        ("trained", f"{report.parameters:,} parameters with {report.optimiser}"),
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
    """Return the residual error of all maps; routers, measured by KL, count separately."""
    pairs = [errors(row) for row in rows if routers or "router" not in row]
    before = sum(b for b, _ in pairs)
    return "" if not before else f"{sum(a for _, a in pairs) / before:.0%}"
