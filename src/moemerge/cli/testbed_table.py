"""`moemerge testbed table`: the paper's experiments in miniature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from moemerge.cli.console import interruptible
from moemerge.cli.flags import Device, Reporting, add_verb
from moemerge.errors import NumericalError, UsageError

if TYPE_CHECKING:
    from moemerge.cli.render import NumberTable
    from moemerge.experiments.cells import Failure
    from moemerge.experiments.study import StudyReport
    from moemerge.experiments.text_tables import TextTable
    from moemerge.testbed.experiments import TableRequest, TablesResult

EXAMPLES = """
  moemerge testbed table two-model results/ --seeds 0-4 --device cuda
  moemerge testbed table two-model hessian results/ --regime soft --regime plain
  moemerge testbed table all results/ --preset tiny --steps-scale 0.2 --jobs 2
"""
EXPERIMENT_HELP = (
    "two-model, three-model, qwen3, methods, methods-three, hessian, alpha-gamma, data, fraction, "
    "last-layers, router-swap, layers, fine-tuning, refit, refit-qwen3, refit-three, refit-ridge, "
    "refit-text, refit-parts, or all."
)


def add_to(app: typer.Typer) -> None:
    add_verb(app, table, EXAMPLES)


@dataclass(frozen=True)
class Tables:
    """What is measured, on which models, and with how much of everything."""

    preset: Annotated[
        str, typer.Option(metavar="WORD", help="Size of the models: tiny, small or demo.")
    ] = "small"
    regime: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="soft or plain; may be repeated (default: soft)."),
    ] = None
    arch: Annotated[str, typer.Option(metavar="WORD", help="olmoe or qwen3_moe.")] = "olmoe"
    seeds: Annotated[str, typer.Option(metavar="SEEDS", help="Such as 0-4 or 0,2,5.")] = "0-4"
    sets: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of trained sets; missing ones are trained (default: OUT/sets).",
        ),
    ] = None
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of models that are only measured, such as /dev/shm (default: OUT/work).",
        ),
    ] = None
    methods: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="Merge methods, comma-separated (default: the paper's, or "
            "all where a table is about methods).",
        ),
    ] = ""
    device: Device = "auto"
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes (default: one a core).")
    ] = None
    problems: Annotated[
        int | None,
        typer.Option(metavar="N", help="Test problems of each domain (default: 1500)."),
    ] = None
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Rows of calibration text of each domain (default: 512)."),
    ] = None
    steps_scale: Annotated[
        float, typer.Option(metavar="X", help="Train so many times the preset's steps.")
    ] = 1.0

    def request(self, experiments: list[str], out_folder: Path) -> TableRequest:
        from dataclasses import replace

        from moemerge.testbed.experiments import Scale, TableRequest

        scale = Scale()
        if self.steps_scale != 1:
            steps = max(1, round(self.steps_scale * scale.tuning_steps))
            scale = replace(scale, tuning_steps=steps)
        if self.problems is not None:
            held_out = min(scale.held_out, self.problems)
            scale = replace(scale, problems=self.problems, held_out=held_out)
        if self.rows is not None:
            scale = replace(scale, rows=self.rows)
        return TableRequest(
            experiments=tuple(experiments),
            out=out_folder,
            preset=self.preset,
            regimes=tuple(dict.fromkeys(self.regime or ["soft"])),
            arch=self.arch,
            seeds=parse_seeds(self.seeds),
            sets=self.sets,
            work=self.work,
            methods=tuple(name.strip() for name in self.methods.split(",") if name.strip()),
            device=self.device,
            jobs=self.jobs,
            scale=scale,
            steps_scale=self.steps_scale,
        )


def table(
    experiments: Annotated[
        list[str], typer.Argument(metavar="EXPERIMENT...", help=EXPERIMENT_HELP)
    ],
    out_folder: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder of the results; finished cells are kept."),
    ],
    tables: Tables,
    reporting: Reporting,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw them; needs matplotlib.")
    ] = True,
) -> None:
    """Repeat the paper's experiments on small models, over several seeds, into the folder OUT.

    Models are trained where they are missing, merged, calibrated and measured, several at once.
    A repeated run goes on where the last one ended, and only measures what is new.
    """
    from moemerge.experiments.report import LEGEND
    from moemerge.testbed.experiments import run_tables

    request = tables.request(experiments, out_folder)
    left = "what is finished is kept, repeat it to go on"
    with interruptible(lambda: left), reporting.progress() as bar:
        result = run_tables(request, bar, figures=figures)
    reporting.show(result.to_json(), shown_tables(result, LEGEND))
    refuse_failures(result.failures, "tables")


def refuse_failures(failures: Sequence[Failure], of: str) -> None:
    """What could not be made is an error once all the rest is shown."""
    if failures:
        raise NumericalError(
            f"{len(failures)} parts of the {of} could not be made; the first: "
            f"{failures[0].what}: {failures[0].why}",
            hint="what was finished is kept; repeat the command to go on",
        )


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5)."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
            raise UsageError(f"--seeds {text}: expected numbers", hint="such as 0-4 or 0,2,5")
        seeds.update(dict.fromkeys(range(int(numbers[0]), int(numbers[1]) + 1)))
    return tuple(seeds)


def shown_tables(result: TablesResult | StudyReport, legend: str) -> Group:
    """The main table of every experiment, and what it says."""
    from moemerge.experiments.report import heading, main_table, verdicts

    parts: list[Text | NumberTable] = []
    for summary in result.summaries:
        parts.append(Text(heading(summary), style="bold"))
        parts.append(drawn(main_table(summary)))
        parts += [Text(line) for line in verdicts(summary)]
        parts.append(Text(""))
    parts.append(Text(legend, style="dim"))
    parts.append(Text(f"All tables and figures: {result.written[0]}"))
    return Group(*parts)


def drawn(text: TextTable) -> NumberTable:
    from moemerge.cli.render import NumberTable

    table = NumberTable(text.headings, keys=text.left, words=range(text.left))
    group = None
    for row in text.rows:
        table.add("" if row[0] == group else row[0], *row[1:])
        group = row[0]
    return table
