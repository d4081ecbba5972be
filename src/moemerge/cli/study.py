"""`moemerge study`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from moemerge.cli.console import interruptible
from moemerge.cli.flags import Reporting, verb
from moemerge.cli.render import NumberTable
from moemerge.errors import NumericalError
from moemerge.lab.experiments.settings import StudySettings

if TYPE_CHECKING:
    from moemerge.lab.experiments.estimate import StudyEstimate
    from moemerge.lab.experiments.study import StudyReport
    from moemerge.lab.experiments.tables import TextTable

EXAMPLES = """
  moemerge study examples/paper/small/study.yml results/
  moemerge study examples/paper/small/study.yml results/ --dry-run
  moemerge study examples/paper/small/study.yml results/ --keep models \\
      --set evaluate.limit=20
"""


@verb(EXAMPLES)
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
    """Merge, repair and evaluate as a study file states, and write its tables into the folder OUT.

    A repeated run resumes, and measures only new cells.
    """
    from moemerge.lab.experiments.plan import plan_study
    from moemerge.lab.experiments.report import legend
    from moemerge.lab.experiments.study import expect, run_study
    from moemerge.lab.experiments.study_file import load_study, parse_overrides

    plan = plan_study(load_study(file, parse_overrides(overrides or ())))
    if dry_run:
        expected = expect(plan, out_folder, settings)
        reporting.show(expected.to_json(), *_expected(expected), notices=expected.notices)
        return
    left = "what is finished is kept, repeat it to go on"
    with interruptible(lambda: left), reporting.progress() as bar:
        report = run_study(plan, out_folder, settings, bar)
    reporting.show(report.to_json(), _shown_tables(report, legend(report.summaries)))
    if report.failures:
        first = report.failures[0]
        raise NumericalError(
            f"{len(report.failures)} parts of the study could not be made; the first: "
            f"{first.what}: {first.why}",
            hint="finished parts are kept; repeat the command to resume",
        )


def _expected(expected: StudyEstimate) -> list[Text | NumberTable]:
    from moemerge.lab.experiments.estimate import shown_bytes

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


def _shown_tables(report: StudyReport, legend: str) -> Group:
    """Return the verdicts and the main table of every experiment with its heading."""
    from moemerge.lab.experiments.report import main_table, perplexity_table, verdicts

    parts: list[Text | NumberTable] = []
    for summary in report.summaries:
        parts.append(Text(summary.form.heading, style="bold"))
        parts += [Text(line) for line in verdicts(summary)]
        parts.append(_drawn(main_table(summary)))
        if (losses := perplexity_table(summary)).rows:
            parts += [Text(""), _drawn(losses)]
        parts.append(Text(""))
    parts.append(Text(legend, style="dim"))
    parts.append(Text(f"All tables and figures: {report.written[0]}"))
    return Group(*parts)


def _drawn(text: TextTable) -> NumberTable:
    table = NumberTable(text.headings, keys=text.left, words=range(text.left))
    group = None
    for row in text.rows:
        table.add("" if row[0] == group else row[0], *row[1:])
        group = row[0]
    return table
