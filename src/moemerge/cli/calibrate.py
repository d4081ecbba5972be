"""`moemerge calibrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from moemerge.calibration.settings import CALIBRATION
from moemerge.cli.repairs import add_repair

if TYPE_CHECKING:
    from moemerge.calibration.report import CalibrationReport

ABOUT = "Solve for the routers of MERGED so that they agree with its sources' routing."
EXAMPLES = """
  moemerge calibrate merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --weight b=2 --layers last:4
  moemerge calibrate merged/ out/ --source a=A --data a=a.jsonl \\
      --check a=b.jsonl
"""


def add_to(app: typer.Typer) -> None:
    add_repair(app, CALIBRATION, ABOUT, EXAMPLES)


def table(report: CalibrationReport, *, verbose: bool) -> Any:
    """Return the report as a table."""
    from moemerge.cli.routing_table import calibration_report

    return calibration_report(report, verbose=verbose)
