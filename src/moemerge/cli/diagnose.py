"""`moemerge diagnose`."""

from __future__ import annotations

from typing import Annotated

import typer

from moemerge import api
from moemerge.cli.flags import (
    Checks,
    Experts,
    ModelArgument,
    Page,
    Reporting,
    Sources,
    Texts,
    verb,
)
from moemerge.config.job_settings import DiagnosisSettings

EXAMPLES = """
  moemerge diagnose merged/ \\
      --source math=org/math --data math=math-test.jsonl \\
      --source code=org/code --data code=code-test.jsonl --report routing.html
  moemerge diagnose merged/ --against calibrated/ --swaps \\
      --source a=A --data a=a.jsonl --source b=B --data b=b.jsonl
  moemerge diagnose calibrated/ --source a=A --data a=a.jsonl \\
      --base org/base --data general=general.jsonl --json figures.json
"""


@verb(EXAMPLES, several=True)
def diagnose(
    model: ModelArgument,
    source: Sources,
    data: Texts,
    settings: DiagnosisSettings,
    reporting: Reporting,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Measure this model too. Repeat it."),
    ] = None,
    check: Checks = None,
    experts: Experts = None,
    report: Page = None,
) -> None:
    """Measure how a merge changed the routing of MODEL, layer by layer.

    MODEL and each source process the same tokens, best held out from any calibration. The report
    compares which experts their routers choose. MODEL may be merged by any tool.
    """
    from moemerge.cli.routing_table import diagnosis_report

    with reporting.progress() as bar:
        diagnosis = api.diagnose(
            model,
            sources=source,
            data=data,
            against=against or (),
            check=check,
            experts=experts,
            settings=settings,
            report=report,
            overwrite=reporting.overwrite,
            progress=bar,
        )
    table = diagnosis_report(diagnosis, verbose=reporting.verbose)
    reporting.show(diagnosis.to_json(), table, page=report)
