"""`moemerge compose`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from moemerge.cli.console import interruptible
from moemerge.cli.flags import Config, Out, Reporting, add_verb
from moemerge.cli.repairs import Samples, remaining_work, show_samples
from moemerge.composing.settings import ComposeSettings

if TYPE_CHECKING:
    from moemerge.composing.run import ComposeReport

EXAMPLES = """
  moemerge compose moe.yml composed/
  moemerge compose moe.yml composed/ --seed 1 --out-shard-size 2GB --overwrite
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, compose, EXAMPLES)


def compose(
    config: Config,
    out_folder: Out,
    settings: ComposeSettings,
    reporting: Reporting,
    sample: Samples = None,
) -> None:
    """Compose a MoE of dense models, or add experts to one; CONFIG is as for mergekit-moe."""
    from moemerge import api

    with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
        report = api.compose(config, out_folder, settings=settings, progress=bar)
    reporting.show(report.to_json(), _table(report), notices=report.notices)
    experts = {f"expert {n}": model for n, model in enumerate(report.experts, report.added_to)}
    models = {"base": report.base, **experts}
    show_samples(sample, out_folder, models, settings.device, reporting)


def _table(report: ComposeReport) -> Any:
    from rich.table import Table

    from moemerge.checkpoint import format_size

    table = Table(
        title=f"{report.architecture}, {report.output_parameters / 1e9:.2f} billion parameters, "
        f"{format_size(report.output_bytes)}; routers: {report.gate_mode}{_fitted(report)}",
        title_justify="left",
    )
    table.add_column("part")
    table.add_column("model")
    method = f" (merged with {report.attention})" if report.attention else ""
    table.add_row("base", report.base + method)
    for number, expert in enumerate(report.experts, report.added_to):
        table.add_row(f"expert {number}", expert)
    if report.shared_expert is not None:
        table.add_row("shared expert", report.shared_expert)
    return table


def _fitted(report: ComposeReport) -> str:
    share = report.own_share
    return "" if share is None else f", {share:.1%} of the tokens to the expert of their domain"
