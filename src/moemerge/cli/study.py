"""`moemerge study`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from moemerge.cli.console import interruptible
from moemerge.cli.flags import Reporting, add_verb
from moemerge.experiments.settings import StudySettings

if TYPE_CHECKING:
    from moemerge.cli.render import NumberTable
    from moemerge.experiments.estimate import StudyEstimate

EXAMPLES = """
  moemerge study examples/paper/small/study.yml results/
  moemerge study examples/paper/small/study.yml results/ --dry-run
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be made and measured, and stop.")
    ] = False,
) -> None:
    """Merge, repair and evaluate as a study file says, and write its tables into the folder OUT.

    A repeated run goes on where the last one ended, and only measures what is new.
    """
    from moemerge.cli.testbed_table import refuse_failures, shown_tables
    from moemerge.experiments.plan import plan_study
    from moemerge.experiments.report import legend
    from moemerge.experiments.study import expect, run_study
    from moemerge.experiments.study_file import load_study, parse_overrides

    plan = plan_study(load_study(file, parse_overrides(overrides or ())))
    if dry_run:
        expected = expect(plan, out_folder, settings)
        reporting.show(expected.to_json(), *_expected(expected), notices=expected.notices)
        return
    left = "what is finished is kept, repeat it to go on"
    with interruptible(lambda: left), reporting.progress() as bar:
        report = run_study(plan, out_folder, settings, bar)
    reporting.show(report.to_json(), shown_tables(report, legend(report.summaries)))
    refuse_failures(report.failures, "study")


def _expected(expected: StudyEstimate) -> list[Text | NumberTable]:
    from moemerge.cli.render import NumberTable
    from moemerge.experiments.estimate import shown_bytes

    def count(number: int | None) -> str:
        return "" if number is None else f"{number:,}"

    models = NumberTable(
        ["model or text", "how", "bytes", "tokens", "", "made of"], words=(1, 4, 5)
    )
    for node in expected.nodes:
        size = "" if node.bytes is None else shown_bytes(node.bytes)
        there = "done" if node.there else ""
        made_of = ", ".join(node.made_of)
        models.add(node.name, node.kind, size, count(node.tokens), there, made_of)
    cells = NumberTable(["cell", "completions", "tokens at most", ""], words=(0, 3))
    for cell in expected.cells:
        done = "measured" if cell.measured else ""
        cells.add(cell.name, count(cell.completions), count(cell.tokens), done)
    parts: list[Text | NumberTable] = [Text(expected.title, style="bold"), models, Text("")]
    parts += [cells, Text("")]
    if expected.missing:
        missing = NumberTable(["not here", "", "needed for"], words=(0, 1, 2))
        for one in expected.missing:
            missing.add(one.what, one.where, one.needed_for)
        parts += [missing, Text("")]
    return [*parts, Text(str(expected))]
