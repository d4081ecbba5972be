"""A diagnosis for the terminal: a bar for each layer and domain, totals, verdict and advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moemerge.cli.render import facts
from moemerge.diagnosis.verdict import DAMAGED, INTACT, SLIGHT
from moemerge.report.words import display_names, short

if TYPE_CHECKING:
    from moemerge.diagnosis.results import Diagnosis, DomainTotal, LayerDiagnosis, Swap

BAR, NARROW_BAR = 8, 5  # characters of a full bar
WIDE = 3  # models times domains up to which a terminal has room for the wide one
ABREAST = 3  # domains in one table
LABEL = 18  # characters of a model's name
PARTS = " ▏▎▍▌▋▊▉█"
# A bar's colour says what the verdict would say of its share alone.
COLOURS = ((INTACT, "green"), (SLIGHT, "yellow"), (DAMAGED, "dark_orange"), (1.0, "red"))


def diagnosis_report(found: Diagnosis, *, verbose: bool) -> RenderableType:
    """The whole answer; `verbose` adds the figures behind it."""
    parts: list[RenderableType] = [Text(found.verdict.words, style="bold"), ""]
    parts += [facts([(f.text, f.label) for f in found.verdict.numbers]), ""]
    domains = list(found.domains)
    if verbose:
        parts += [part for domain in domains for part in (_figures(found, domain), "")]
    else:
        for first in range(0, len(domains), ABREAST):
            parts += [_bars(found, domains[first : first + ABREAST]), ""]
    parts.append(_totals(found))
    if found.swaps:
        parts += ["", _swaps(found.swaps)]
    if found.advice:
        parts += ["", *(_advice(text) for text in found.advice)]
    if verbose:
        parts += ["", facts(_background(found))]
    return Group(*parts)


def bar(share: float, width: int = BAR) -> str:
    """A share of 1 as a bar of eighths; what is not nothing is seen."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    return ("█" * full + (PARTS[part] if part else "")).ljust(width)


def _colour(share: float) -> str:
    return next((colour for bound, colour in COLOURS if share <= bound), COLOURS[-1][1])


def _routers(found: Diagnosis) -> list[tuple[str, str]]:
    """(how it is called, its weight's name): by layer, and by name where a layer has several."""
    routers = list(dict.fromkeys((row.layer, row.router) for row in found.layers))
    layers = [layer for layer, _ in routers]
    return [
        (f"{layer} {router}" if layers.count(layer) > 1 else str(layer), router)
        for layer, router in routers
    ]


def _bars(found: Diagnosis, domains: Sequence[str]) -> Table:
    """A row for each router, with each domain's mismatch; the KL where there is room."""
    table = Table(box=None, pad_edge=False)
    models = [model.name for model in found.models]
    alone = len(models) == 1
    table.add_column("\nlayer", justify="right", overflow="fold")
    for domain in domains:  # two lines of header: a terminal of 80 columns is enough
        table.add_column(f"{escape(domain)}\nmismatch", no_wrap=True)
        if alone:
            table.add_column("\nKL", justify="right", no_wrap=True)
    rows = {(row.router, row.model, row.domain): row for row in found.layers}
    width = BAR if len(models) * len(domains) <= WIDE else NARROW_BAR
    for name, router in _routers(found):
        cells: list[str | Text] = [escape(name)]
        for domain in domains:
            of = [rows[router, model, domain] for model in models]
            cells.append(_share([row.mismatch for row in of], width))
            if alone:
                cells.append(f"{of[0].kl:.2g}")
        table.add_row(*cells)
    return table


def _share(shares: Sequence[float], width: int) -> Text:
    """The diagnosed model's share as a bar and a number, an arrow, and those beside it."""
    text = Text(bar(shares[0], width), style=_colour(shares[0]))
    text.append(f" {shares[0]:6.1%}", style="default")
    for share in shares[1:]:
        text.append(" → ", style="dim")
        text.append(f"{share:5.1%}", style=_colour(share))
    return text


def _figures(found: Diagnosis, domain: str) -> Table:
    """One domain with all figures that have a name; a row for each router and model."""
    table = Table(box=None, pad_edge=False, title=escape(domain), title_justify="left")
    table.add_column("\nlayer", justify="right", overflow="fold")
    heads = ("\nmismatch", "\nKL", "same\nfeatures", "KL\nthere", "\ntop 1", "over-\nlap")
    for head in (*heads, "\ndrift", "logit\nshift", "dead\nover"):
        left = head == "\nmismatch"
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    rows = [row for row in found.layers if row.domain == domain]
    for name, router in _routers(found):
        for at, row in enumerate(row for row in rows if row.router == router):
            table.add_row(escape(name) if at == 0 else "→", *_figure_cells(row))
    return table


def _figure_cells(row: LayerDiagnosis) -> list[str | Text]:
    return [
        _share([row.mismatch], NARROW_BAR),
        f"{row.kl:.2g}",
        f"{row.mismatch_on_features:.1%}",
        f"{row.kl_on_features:.2g}",
        f"{row.top1_agreement:.1%}",
        f"{row.weighted_overlap:.2f}",
        f"{row.drift:.1%}",
        f"{row.logit_shift:.2f}",
        f"{len(row.dead)}/{len(row.overloaded)}",
    ]


def _totals(found: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False)
    several = len(found.models) > 1
    # Beside a model's label there is no room for the tokens, which are the domain's in any case.
    heads = [
        "\ndomain",
        *([] if several else ["\ntokens"]),
        "\nmismatch",
        "any\nlayer",
        "\nper token",
        "\nKL",
    ]
    heads += ["\nloss", "source's\nloss"]
    if several:
        table.add_column("\nmodel", no_wrap=True)
    for head in heads:
        left = head == "\ndomain"
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    shown = display_names([model.label for model in found.models])
    labels = {m.name: short(name, LABEL) for m, name in zip(found.models, shown, strict=True)}
    for domain in found.domains:
        for total in (t for t in found.totals if t.domain == domain):
            name = [escape(labels[total.model]), escape(domain)]
            table.add_row(
                *(name if several else [escape(domain), str(total.tokens)]), *_cells(total)
            )
    return table


def _cells(total: DomainTotal) -> list[str]:
    return [
        f"{total.mismatch:.1%}",
        f"{total.any_mismatch:.1%}",
        f"{total.mismatched_per_token:.1f}/{total.choices_per_token}",
        f"{total.kl:.2g}",
        _loss(total.loss),
        _loss(total.loss_source),
    ]


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.3f}"


def _swaps(swaps: Sequence[Swap]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("domain", "weights of", "routers of", "mismatch", "loss"):
        table.add_column(head, justify="right" if head in ("mismatch", "loss") else "left")
    for swap in swaps:
        table.add_row(
            escape(swap.domain),
            escape(swap.weights_of),
            escape(swap.routers_of),
            f"{swap.mismatch:.1%}",
            _loss(swap.loss),
        )
    return table


def _advice(text: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(Text("•", style="cyan"), Text(text))
    return Padding(row, 0)


def _background(found: Diagnosis) -> list[tuple[str, str]]:
    model = found.model
    return [
        ("model", f"{model.label}: {model.architecture}, {model.layers} layers"),
        ("gate", f"{model.gate}, {model.experts} experts, {model.routers} routers compared"),
        *((f"source {name}", source.label) for name, source in found.sources.items()),
        ("time", f"{found.seconds:.1f} s on {found.device}, {found.dtype}"),
        ("repeat", found.command),
    ]
