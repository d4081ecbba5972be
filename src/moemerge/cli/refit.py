"""`moemerge refit`."""

from __future__ import annotations

from typing import Annotated

import typer

from moemerge.cli.calibrate import what_is_left
from moemerge.cli.console import interruptible
from moemerge.cli.flags import Out, Reporting, Sources, Texts, Weights, add_verb, given, numbers
from moemerge.config.refit import RefitSettings
from moemerge.config.settings import OutputSettings

EXAMPLES = """
  moemerge refit merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge refit merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --weight b=2 \\
      --parts attention,experts --ridge 0.01
  moemerge refit merged/ out/ --source a=A --data a=a.jsonl --resume
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, refit, EXAMPLES, several=True)


def refit(
    merged: Annotated[str, typer.Argument(metavar="MERGED", help="The merged model.")],
    out_folder: Out,
    source: Sources,
    data: Texts,
    settings: RefitSettings,
    output: OutputSettings,
    reporting: Reporting,
    weight: Weights = None,
) -> None:
    """Refit every linear map of MERGED, in closed form, to what its sources give on their text."""
    from moemerge import api
    from moemerge.cli.routing_table import refit_report

    with interruptible(what_is_left(out_folder)), reporting.progress() as bar:
        done = api.refit(
            merged,
            out_folder,
            sources=source,
            data=data,
            weights=numbers("--weight", weight),
            settings=settings,
            progress=bar,
            **given(output),
        )
    table = refit_report(done, verbose=reporting.verbose)
    reporting.show(done.to_json(), table, page=output.report)
