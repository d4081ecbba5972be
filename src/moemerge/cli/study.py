"""`moemerge study`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from moemerge.cli.flags import Reporting, add_verb
from moemerge.cli.interrupts import interruptible
from moemerge.config.study import StudySettings
from moemerge.errors import NumericalError

if TYPE_CHECKING:
    from moemerge.cli.render import NumberTable
    from moemerge.experiments.study import StudyReport

EXAMPLES = """
  moemerge study examples/paper/small/study.yml results/
  moemerge study examples/paper/small/study.yml results/ --keep models \\
      --set evaluate.limit=20
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, study, EXAMPLES)


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY", help="A study (YAML).")],
    out_folder: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the results; finished cells are kept.")
    ],
    settings: StudySettings,
    reporting: Reporting,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Lay a value over the file. Repeat it."),
    ] = None,
) -> None:
    """Merge, repair and evaluate as a study file says, and write its tables into the folder OUT.

    A repeated run goes on where the last one ended, and only measures what is new.
    """
    from moemerge.config.study_load import load_study, parse_overrides
    from moemerge.experiments.plan import plan_study
    from moemerge.experiments.study import run_study

    plan = plan_study(load_study(file, parse_overrides(overrides or ())))
    left = "what is finished is kept, repeat it to go on"
    with interruptible(lambda: left), reporting.progress() as bar:
        report = run_study(plan, out_folder, settings, bar)
    reporting.show(report.to_json(), _shown(report))
    if report.failures:
        raise NumericalError(
            f"{len(report.failures)} parts of the study could not be made; the first: "
            f"{report.failures[0].what}: {report.failures[0].why}",
            hint="what was finished is kept; repeat the command to go on",
        )


def _shown(report: StudyReport) -> Group:
    from moemerge.cli.testbed_table import drawn
    from moemerge.experiments.report import heading, legend, main_table, verdicts

    parts: list[Text | NumberTable] = []
    for summary in report.summaries:
        parts.append(Text(heading(summary), style="bold"))
        parts.append(drawn(main_table(summary)))
        parts += [Text(line) for line in verdicts(summary)]
        parts.append(Text(""))
    parts.append(Text(legend(report.summaries), style="dim"))
    parts.append(Text(f"All tables and figures: {report.written[0]}"))
    return Group(*parts)
