"""`moemerge stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from moemerge import api
from moemerge.checkpoint import format_size
from moemerge.cli.flags import ModelArgument, Reporting, verb
from moemerge.config.job_settings import CollectingSettings
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.statistics.collecting.run import CollectReport

EXAMPLES = """
  moemerge stats org/math math.stats --data math.jsonl
  moemerge stats org/code code.fisher --data code.jsonl --kind fisher
  moemerge stats ./model a.stats --data a.jsonl --data b.jsonl --json a.json
"""
SHOWN = 5  # unvisited experts listed without --verbose


@verb(EXAMPLES, several=True)
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
