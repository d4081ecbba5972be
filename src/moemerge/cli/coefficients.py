"""`moemerge coefficients`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from moemerge import api
from moemerge.cli.flags import Config, Reporting, verb
from moemerge.cli.render import NumberTable
from moemerge.config.job_settings import CoefficientMethod, CoefficientSettings

if TYPE_CHECKING:
    from moemerge.statistics.coefficients.run import CoefficientsReport

EXAMPLES = """
  moemerge coefficients acm ties.yml acm.yml \\
      --data math=math.jsonl --data code=code.jsonl
  moemerge coefficients sens ties.yml sens.yml --temperature 0.05 --limit 4 \\
      --data math=math.jsonl --data code=code.jsonl
"""


@verb(EXAMPLES)
def coefficients(
    method: Annotated[
        CoefficientMethod,
        typer.Argument(metavar="METHOD", help=f"{', '.join(get_args(CoefficientMethod))}."),
    ],
    config: Config,
    out_file: Annotated[
        Path, typer.Argument(metavar="OUT.yml", help="File to write; appears whole or not.")
    ],
    settings: CoefficientSettings,
    reporting: Reporting,
    data: Annotated[
        dict[str, list[str]] | None,
        typer.Option(
            "--data",
            metavar="NAME=FILE",
            help="Text of that model (default: the config's `data`). Repeat it.",
        ),
    ] = None,
) -> None:
    """Compute merge coefficients per model and layer from each model's text.

    A config with `coefficients: OUT.yml` multiplies its weights by them.
    """
    with reporting.progress() as bar:
        report = api.find_coefficients(
            method,
            config,
            out_file,
            data=data,
            settings=settings,
            overwrite=reporting.overwrite,
            progress=bar,
        )
    reporting.show(report.to_json(), _table(report), notices=report.notices)


def _table(report: CoefficientsReport) -> NumberTable:
    names = list(report.coefficients)
    table = NumberTable(("place", *names), title=f"{report.method}: {report.output}")
    for place in report.coefficients[names[0]]:
        table.add(place, *(f"{report.coefficients[name][place]:.4f}" for name in names))
    return table
