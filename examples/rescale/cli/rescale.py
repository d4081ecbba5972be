"""`moemerge rescale`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.flags import ModelArgument, Out, Reporting, Sources, Texts, verb
from moemerge.rescaling.settings import RescaleSettings

EXAMPLES = """
  moemerge rescale merged/ out/ --source math=org/math --data math=math.jsonl
  moemerge rescale merged/ out2/ --source a=A --data a=a.jsonl --layers last:4
"""


@verb(EXAMPLES)
def rescale(
    model: ModelArgument,
    out_folder: Out,
    source: Sources,
    data: Texts,
    settings: RescaleSettings,
    reporting: Reporting,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a killed run.")] = False,
) -> None:
    """Scale the routers of MODEL so that their logits spread as in its sources."""
    from moemerge.rescaling import run  # imports torch

    request = run.RescaleRequest(
        model, out_folder, source, data, settings, overwrite=reporting.overwrite, resume=resume
    )
    with interruptible(remaining_work(out_folder)), reporting.progress() as bar:
        rows = run.rescale(request, bar)
    table = Table("router", "factor")
    for row in rows:
        table.add_row(row["router"], f"{row['factor']:.3f}")
    reporting.show({"routers": rows}, table)
