"""`moemerge compose`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from moemerge import api
from moemerge.checkpoint import format_size
from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.flags import Config, Out, Reporting, verb
from moemerge.cli.render import Samples, show_samples
from moemerge.config.job_settings import ComposeSettings

if TYPE_CHECKING:
    from moemerge.conversion.compose import ComposeReport

EXAMPLES = """
  moemerge compose moe.yml composed/
  moemerge compose moe.yml composed/ --seed 1 --out-shard-size 2GB --overwrite
"""


@verb(EXAMPLES)
def compose(
    config: Config,
    out_folder: Out,
    settings: ComposeSettings,
    reporting: Reporting,
    sample: Samples = None,
) -> None:
    """Compose a MoE of dense models, or add experts to one; CONFIG is as for mergekit-moe."""
    with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
        report = api.compose(config, out_folder, settings=settings, progress=bar)
    reporting.show(report.to_json(), _table(report), notices=report.notices)
    experts = {f"expert {n}": model for n, model in enumerate(report.experts, report.added_to)}
    models = {"base": report.base, **experts}
    show_samples(sample, out_folder, models, settings.device, reporting)


def _table(report: ComposeReport) -> Table:
    share = report.own_share
    fitted = "" if share is None else f", {share:.1%} of the tokens to the expert of their domain"
    table = Table(
        title=f"{report.architecture}, {report.output_parameters / 1e9:.2f} billion parameters, "
        f"{format_size(report.output_bytes)}; routers: {report.gate_mode}{fitted}",
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
