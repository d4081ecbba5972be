"""`moemerge study`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from moemerge.cli.console import interruptible
from moemerge.cli.flags import Reporting, verb
from moemerge.cli.render import NumberTable
from moemerge.errors import NumericalError
from moemerge.lab.study.settings import StudySettings

if TYPE_CHECKING:
    from moemerge.lab.study.plan import Study
    from moemerge.lab.study.run import Bench, StudyReport
    from moemerge.lab.study.tables import TextTable

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
    from moemerge.lab.study.plan import parse_overrides, plan_study
    from moemerge.lab.study.run import Bench, run_study

    plan = plan_study(file, parse_overrides(overrides or ()))
    if dry_run:
        commands = planned(plan, Bench(plan, out_folder, settings))
        reporting.show({"title": plan.config.title, "commands": commands}, _listed(commands))
        return
    left = "what is finished is kept, repeat it to go on"
    with interruptible(lambda: left), reporting.progress() as bar:
        report = run_study(plan, out_folder, settings, bar)
    reporting.show(report.to_json(), _shown_tables(report))
    if report.failures:
        first = report.failures[0]
        raise NumericalError(
            f"{len(report.failures)} commands of the study failed; the first: "
            f"{first.what}: {first.why}",
            hint="finished parts are kept; repeat the command to resume",
        )


def planned(plan: Study, bench: Bench) -> list[dict[str, Any]]:
    """Return the commands of a study as plain data, in the order in which they run."""
    from moemerge.lab.study.plan import in_order

    commands = [one for one in in_order(plan.cells) if one.verb != "files"]
    return [
        {
            "verb": one.verb,
            "name": one.name,
            "key": one.key,
            "inputs": [needed.name for needed in one.inputs if needed.verb != "files"],
            "done": bench.path(one).exists(),
        }
        for one in commands
    ]


def _listed(commands: Sequence[Mapping[str, Any]]) -> NumberTable:
    table = NumberTable(["command", "of", "", "made of"], words=(1, 2, 3))
    for one in commands:
        done = "done" if one["done"] and one["verb"] != "model" else ""
        table.add(one["verb"], one["name"], done, ", ".join(one["inputs"]))
    return table


def _shown_tables(report: StudyReport) -> Group:
    """Return the main table of every part of the study with its heading."""
    from moemerge.lab.study.tables import legend, main_table, perplexity_table

    parts: list[Text | NumberTable] = []
    for summary in report.summaries:
        parts.append(Text(summary.table.title, style="bold"))
        parts.append(_drawn(main_table(summary)))
        if (losses := perplexity_table(summary)).rows:
            parts += [Text(""), _drawn(losses)]
        parts.append(Text(""))
    parts.append(Text(legend(report.summaries), style="dim"))
    parts.append(Text(f"All tables and figures: {report.written[0]}"))
    return Group(*parts)


def _drawn(text: TextTable) -> NumberTable:
    table = NumberTable(text.headings, keys=text.left, words=range(text.left))
    group = None
    for row in text.rows:
        table.add("" if row[0] == group else row[0], *row[1:])
        group = row[0]
    return table
