"""`moemerge stats` and `moemerge coefficients`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.text import Text

from moemerge import api
from moemerge.checkpoint import format_size
from moemerge.cli.flags import Config, ModelArgument, Reporting, verb
from moemerge.cli.render import NumberTable
from moemerge.config.job_settings import CoefficientMethod, CoefficientSettings, CollectingSettings
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.statistics.coefficients.run import CoefficientsReport
    from moemerge.statistics.collecting.run import CollectReport

STATS_EXAMPLES = """
  moemerge stats org/math math.stats --data math.jsonl
  moemerge stats org/code code.fisher --data code.jsonl --kind fisher
  moemerge stats ./model a.stats --data a.jsonl --data b.jsonl --json a.json
"""
SHOWN = 5  # unvisited experts listed without --verbose


@verb(STATS_EXAMPLES, several=True)
def stats(
    model: ModelArgument,
    out_file: Annotated[
        Path, typer.Argument(metavar="OUT.stats", help="File to write; appears whole or not.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE", help="The model's text (.jsonl, .jsonl.gz, .parquet). Repeat it."
        ),
    ],
    settings: CollectingSettings,
    reporting: Reporting,
) -> None:
    """Collect the statistics that `regmean` and `fisher` need, over text of MODEL's domain.

    Every later merge of that model can use the file, whatever its layout.
    """
    with reporting.progress() as bar:
        report = api.collect_statistics(
            model,
            out_file,
            data=data,
            settings=settings,
            overwrite=reporting.overwrite,
            progress=bar,
        )
    summary = _summary(report, verbose=reporting.verbose)
    reporting.show(report.to_json(), summary, notices=report.notices)


def _summary(report: CollectReport, *, verbose: bool) -> Text:
    source = report.provenance
    lines = [
        f"{report.kind} statistics of {source.model}: {counted(report.units, 'unit')}, "
        f"{counted(source.tokens, 'token')} in {counted(source.sequences, 'sequence')}, "
        f"{report.seconds:.1f} s",
        f"written to {report.output} ({format_size(report.nbytes)})",
    ]
    missed = report.unvisited_experts
    if missed:
        lines.append(f"no token came to {counted(len(missed), 'unit')} of experts:")
        lines += [f"  {key}" for key in (missed if verbose else missed[:SHOWN])]
        if not verbose and len(missed) > SHOWN:
            lines.append(f"  and {len(missed) - SHOWN} more (-v names them)")
    return Text("\n".join(lines))


COEFFICIENT_EXAMPLES = """
  moemerge coefficients acm ties.yml acm.yml \\
      --data math=math.jsonl --data code=code.jsonl
  moemerge coefficients sens ties.yml sens.yml --temperature 0.05 --limit 4 \\
      --data math=math.jsonl --data code=code.jsonl
"""


@verb(COEFFICIENT_EXAMPLES)
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
    reporting.show(report.to_json(), _coefficient_table(report), notices=report.notices)


def _coefficient_table(report: CoefficientsReport) -> NumberTable:
    names = list(report.coefficients)
    table = NumberTable(("place", *names), title=f"{report.method}: {report.output}")
    for place in report.coefficients[names[0]]:
        table.add(place, *(f"{report.coefficients[name][place]:.4f}" for name in names))
    return table
