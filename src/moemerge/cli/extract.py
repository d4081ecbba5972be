"""`moemerge extract` and `moemerge extract-lora`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moemerge.cli.flags import ModelArgument, Out, Overwrite, Reporting, add_verb
from moemerge.exporting.settings import ExtractLoraSettings
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.exporting.extract_lora import ExtractLoraReport

EXTRACT_EXAMPLES = """
  moemerge extract shared/ math math-again/
  moemerge extract shared/ code code-again/ --base ./base --json -
"""
LORA_EXAMPLES = """
  moemerge extract-lora org/math org/base math-lora/ --rank 16
  moemerge extract-lora ./math ./base lora/ --energy 0.9 --layout per-expert
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, extract, EXTRACT_EXAMPLES)
    add_verb(app, extract_lora, LORA_EXAMPLES, "extract-lora")


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
    overwrite: Overwrite = False,
) -> None:
    """Rebuild the model NAME from a merge that stored masks or low-rank residuals of its models."""
    from moemerge import api
    from moemerge.checkpoint import format_size
    from moemerge.cli.render import facts

    with reporting.progress() as bar:
        report = api.extract(shared, name, out_folder, base=base, overwrite=overwrite, progress=bar)
    rows = [
        ("model", f"{report.task} ({report.keep}, {counted(report.units, 'unit')})"),
        ("kept", f"{format_size(report.task_bytes)} beside the shared model"),
        ("output", format_size(report.output_bytes)),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), facts(rows))


def extract_lora(
    model: ModelArgument,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model it was trained from.")],
    out_folder: Out,
    settings: ExtractLoraSettings,
    reporting: Reporting,
    overwrite: Overwrite = False,
) -> None:
    """Write the difference of MODEL and BASE as a LoRA adapter in PEFT's format to OUT.

    BASE+OUT can be used as a model in every command.
    """
    from moemerge import api
    from moemerge.checkpoint import format_size
    from moemerge.cli.render import facts

    with reporting.progress() as bar:
        report = api.extract_lora(
            model, base, out_folder, settings=settings, overwrite=overwrite, progress=bar
        )
    rows = [
        ("error", f"{report.error():.3g} of the change's norm"),
        ("adapter", format_size(report.adapter_bytes)),
        ("folder", report.output),
    ]
    reporting.show(report.to_json(), _table(report), facts(rows), notices=report.notices)


def _table(report: ExtractLoraReport) -> Any:
    """Return ranks and errors by role."""
    from rich.table import Table

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
