"""`moemerge tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from moemerge.cli.console import interruptible, waiting
from moemerge.cli.flags import ModelArgument, Out, Reporting, given, verb
from moemerge.cli.render import facts
from moemerge.lab import api as lab_api
from moemerge.lab.tuning.settings import TuningOutputSettings, TuningSettings
from moemerge.runtime.journals import saved_path
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.lab.tuning.output import TuningReport

EXAMPLES = """
  moemerge tune org/base math/ --data math.jsonl --preset paper
  moemerge tune org/base math/ --data math.jsonl --lora 16 --epochs 1
  moemerge tune merged/ out/ --data math.jsonl --data code.jsonl --only routers
"""

Files = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="FILE",
        help="Rows with answers to learn (.jsonl, .jsonl.gz, .parquet). Repeat it.",
    ),
]


@verb(EXAMPLES, several=True)
def tune(
    model: ModelArgument,
    out_folder: Out,
    *,
    data: Files,
    settings: TuningSettings,
    output: TuningOutputSettings,
    reporting: Reporting,
) -> None:
    """Fine-tune MODEL on the answers of rows, by trl, and write it to OUT in its own layout."""
    with interruptible(waiting(saved_path(out_folder))), reporting.progress() as bar:
        report = lab_api.tune(
            model, out_folder, data=data, settings=settings, progress=bar, **given(output)
        )
    reporting.show(report.to_json(), _summary(report), notices=report.notices)


def _summary(report: TuningReport) -> Table:
    settings = report.settings
    what = settings["only"] or "all weights"
    if settings["lora"] is not None:
        what = f"a LoRA of rank {settings['lora']} on {what}"
    speed = report.steps - report.resumed
    loss = f"{report.first_loss:.4g}, the mean over the run"
    if not report.one_pass:
        loss = f"{report.first_loss:.4g} in the first epoch, {report.last_loss:.4g} in the last"
    rows = [
        ("trained", f"{what}: {report.parameters:,} parameters"),
        ("rows", f"{report.rows:,}; {report.learnt:,} of {counted(report.tokens, 'token')} learnt"),
        ("steps", f"{report.steps:,} ({report.epochs:.3g} epochs)"),
        ("loss", loss),
        ("time", f"{report.training_seconds:.1f} s for {counted(speed, 'step')}"),
        (report.kind, report.output),
    ]
    return facts(rows)
