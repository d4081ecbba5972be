"""`moemerge refit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from moemerge.cli.repairs import add_repair
from moemerge.refitting.settings import REFIT

if TYPE_CHECKING:
    from moemerge.refitting.report import RefitReport

ABOUT = "Refit every linear map of MERGED, in closed form, to the outputs of its sources."
EXAMPLES = """
  moemerge refit merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge refit merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --weight b=2 \\
      --parts attention,experts --ridge 0.01
  moemerge refit merged/ out/ --source a=A --data a=a.jsonl \\
      --check a=b.jsonl
"""


def add_to(app: typer.Typer) -> None:
    add_repair(app, REFIT, ABOUT, EXAMPLES)


def table(report: RefitReport, *, verbose: bool) -> Any:
    """Return the report as a table."""
    from moemerge.cli.routing_table import refit_report

    return refit_report(report, verbose=verbose)
