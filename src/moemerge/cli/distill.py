"""`moemerge distill`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from moemerge.cli.repairs import add_repair
from moemerge.distilling.settings import DISTILLATION

if TYPE_CHECKING:
    from moemerge.distilling.report import DistillReport

ABOUT = "Train MERGED on the next-token distributions of its sources, each on its own text."
EXAMPLES = """
  moemerge distill merged/ out/ \\
      --source math=org/math --data math=math.jsonl \\
      --source code=org/code --data code=code.jsonl \\
      --source base=org/base --data base=general.jsonl
  moemerge distill merged/ out/ --source a=A --data a=a.jsonl \\
      --source b=B --data b=b.jsonl --steps 60 --learning-rate 1e-4
  moemerge distill merged/ out/ --source a=A --data a=a.jsonl \\
      --check a=b.jsonl
"""


def add_to(app: typer.Typer) -> None:
    add_repair(app, DISTILLATION, ABOUT, EXAMPLES)


def table(report: DistillReport, *, verbose: bool) -> Any:
    """Return the report as a table."""
    from moemerge.cli.routing_table import distill_report

    return distill_report(report, verbose=verbose)
