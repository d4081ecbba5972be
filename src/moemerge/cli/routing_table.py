"""Tables of diagnoses for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moemerge.cli.render import NumberTable, facts
from moemerge.diagnosis.verdict import DAMAGED, INTACT, SLIGHT
from moemerge.routing.figures import FIGURES, Figure
from moemerge.runtime.formatting import Quantity, display_names, percent, with_error
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.diagnosis.results import Diagnosis, Swap


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
