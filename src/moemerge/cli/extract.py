"""`moemerge extract`."""

from __future__ import annotations

from typing import Annotated

import typer

from moemerge.cli.flags import Out, Overwrite, Reporting, add_verb
from moemerge.runtime.progress import counted

EXAMPLES = """
  moemerge extract shared/ math math-again/
  moemerge extract shared/ code code-again/ --base ./base --json -
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, extract, EXAMPLES)


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
