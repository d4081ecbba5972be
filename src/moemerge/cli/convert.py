"""Commands that write a model in another form, or put one together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from moemerge import api
from moemerge.checkpoint import format_size
from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.flags import Config, ModelArgument, Out, Reporting, verb
from moemerge.cli.render import Samples, facts, show_samples
from moemerge.config.job_settings import ComposeSettings, ExtractLoraSettings
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.conversion.compose import ComposeReport
    from moemerge.conversion.extract_lora import ExtractLoraReport

COMPOSE_EXAMPLES = """
  moemerge compose moe.yml composed/
  moemerge compose moe.yml composed/ --seed 1 --out-shard-size 2GB --overwrite
"""


@verb(COMPOSE_EXAMPLES)
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
    reporting.show(report.to_json(), _compose_table(report), notices=report.notices)
    experts = {f"expert {n}": model for n, model in enumerate(report.experts, report.added_to)}
    models = {"base": report.base, **experts}
    show_samples(sample, out_folder, models, settings.device, reporting)


def _compose_table(report: ComposeReport) -> Table:
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


CONVERT_EXAMPLES = """
  moemerge convert merged/ fused/ --layout fused
  moemerge convert ./model out/ --layout fused --json -
"""
SWAP_EXAMPLES = """
  moemerge swap-routers merged/ --from org/math swapped/
  moemerge swap-routers org/math --from merged/ swapped/ --layers last:4 --link
"""
EXTRACT_EXAMPLES = """
  moemerge extract shared/ math math-again/
  moemerge extract shared/ code code-again/ --base ./base --json -
"""
LORA_EXAMPLES = """
  moemerge extract-lora org/math org/base math-lora/ --rank 16
  moemerge extract-lora ./math ./base lora/ --energy 0.9 --layout per-expert
"""


@verb(CONVERT_EXAMPLES)
def convert(
    model: ModelArgument,
    out_folder: Out,
    reporting: Reporting,
    layout: Annotated[
        str, typer.Option(metavar="WORD", help="per-expert (as published) or fused (transformers).")
    ],
) -> None:
    """Write MODEL with its experts in another layout to OUT, bit for bit.

    Some engines read only one of the layouts and skip the tensors of the other.
    """
    chosen: Any = layout
    with reporting.progress() as bar:
        report = api.convert(
            model, out_folder, layout=chosen, overwrite=reporting.overwrite, progress=bar
        )
    rows = [
        ("layout", report.layout),
        ("tensors", f"{report.tensors_after:,}, before {report.tensors_before:,}"),
        ("output", format_size(report.output_bytes)),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), facts(rows), notices=report.notices)


@verb(SWAP_EXAMPLES, "swap-routers")
def swap_routers(
    model: ModelArgument,
    out_folder: Out,
    donor: Annotated[
        str, typer.Option("--from", metavar="OTHER", help="The model whose routers are taken.")
    ],
    reporting: Reporting,
    layers: Annotated[
        str, typer.Option(metavar="LAYERS", help="Which layers: all, last:4, 8-15 or 0,2,5-7.")
    ] = "all",
    # Copies by default: later changes to the original must not change OUT.
    link: Annotated[
        bool,
        typer.Option(
            "--link/--copy", help="Hard links of the shards without routers, or copies of them."
        ),
    ] = False,
) -> None:
    """Write MODEL with the routers of OTHER to OUT: weights, biases and selection biases.

    Evaluating the result shows how much of a merge's damage is routing.
    """
    with reporting.progress() as bar:
        report = api.swap_routers(
            model,
            donor,
            out_folder,
            layers=layers,
            link=link,
            overwrite=reporting.overwrite,
            progress=bar,
        )
    rows = [
        ("weights", report.model),
        ("routers", f"{report.routers_of} ({counted(len(report.tensors), 'tensor')})"),
        ("layers", ", ".join(map(str, report.layers))),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), facts(rows))


@verb(EXTRACT_EXAMPLES)
def extract(
    shared: Annotated[
        str, typer.Argument(metavar="SHARED", help="A merge whose config has `tasks:`.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a merged model.")],
    out_folder: Out,
    reporting: Reporting,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The base, if it is not where the merge found it."),
    ] = None,
) -> None:
    """Rebuild the model NAME from a merge that stored masks or low-rank residuals of its models."""
    with reporting.progress() as bar:
        report = api.extract(
            shared, name, out_folder, base=base, overwrite=reporting.overwrite, progress=bar
        )
    rows = [
        ("model", f"{report.task} ({report.keep}, {counted(report.units, 'unit')})"),
        ("kept", f"{format_size(report.task_bytes)} beside the shared model"),
        ("output", format_size(report.output_bytes)),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), facts(rows))


@verb(LORA_EXAMPLES, "extract-lora")
def extract_lora(
    model: ModelArgument,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model it was trained from.")],
    out_folder: Out,
    settings: ExtractLoraSettings,
    reporting: Reporting,
) -> None:
    """Write the difference of MODEL and BASE as a LoRA adapter in PEFT's format to OUT.

    BASE+OUT can be used as a model in every command.
    """
    with reporting.progress() as bar:
        report = api.extract_lora(
            model, base, out_folder, settings=settings, overwrite=reporting.overwrite, progress=bar
        )
    rows = [
        ("error", f"{report.error():.3g} of the change's norm"),
        ("adapter", format_size(report.adapter_bytes)),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), _table(report), facts(rows), notices=report.notices)


def _table(report: ExtractLoraReport) -> Table:
    """Return ranks and errors by role."""
    table = Table("role", "parameters", "rank", "change", "error")
    for role in dict.fromkeys(row.role for row in report.parameters):
        rows = [row for row in report.parameters if row.role == role]
        ranks = sorted({row.rank for row in rows if row.rank is not None})
        spread = "whole" if not ranks else str(ranks[0])
        if len(ranks) > 1:
            spread += f" to {ranks[-1]}"
        change = max(row.change for row in rows)
        table.add_row(role, str(len(rows)), spread, f"≤ {change:.2g}", f"{report.error(role):.2g}")
    return table
