"""`moemerge testbed table`: the paper's experiments in miniature."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from moemerge.cli import options
from moemerge.cli.console import STDOUT, deliver_json, err, out, progress
from moemerge.cli.interrupts import interruptible
from moemerge.errors import NumericalError, UsageError

if TYPE_CHECKING:
    from moemerge.testbed.experiments import TablesResult
    from moemerge.testbed.experiments.tables import TextTable

EXAMPLES = """
Examples:

    moemerge testbed table two-model results/ --seeds 0-4 --device cuda

    moemerge testbed table two-model hessian results/ --regime soft --regime plain --seeds 0-2

    moemerge testbed table all results/ --preset tiny --seeds 0,1 --steps-scale 0.2 --jobs 2
"""
EXPERIMENT_HELP = (
    "two-model, three-model, qwen3, hessian, alpha-gamma, data, fraction, last-layers, "
    "router-swap, layers, fine-tuning, or all."
)


def add_to(app: typer.Typer) -> None:
    app.command("table", epilog=EXAMPLES)(table)


def table(
    experiments: Annotated[
        list[str], typer.Argument(metavar="EXPERIMENT...", help=EXPERIMENT_HELP)
    ],
    out_folder: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder of the results; finished cells are kept."),
    ],
    preset: Annotated[str, typer.Option(help="Size of the models: tiny, small, demo.")] = "small",
    regime: Annotated[
        list[str] | None, typer.Option(help="soft or plain; may be repeated (default: soft).")
    ] = None,
    arch: Annotated[str, typer.Option(help="olmoe or qwen3_moe.")] = "olmoe",
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-4 or 0,2,5.")] = "0-4",
    sets: Annotated[
        Path | None,
        typer.Option(help="Folder of trained sets; missing ones are trained (default: OUT/sets)."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder of models that are only measured, such as /dev/shm (default: OUT/work)."
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Merge methods, comma-separated (default: all).")
    ] = "",
    device: options.Device = "auto",
    jobs: Annotated[
        int | None, typer.Option(help="Worker processes (default: one for each core).")
    ] = None,
    problems: Annotated[
        int | None, typer.Option(help="Test problems of each domain (default: 1500).")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of calibration text of each domain (default: 512).")
    ] = None,
    steps_scale: Annotated[
        float, typer.Option(help="Train so many times the preset's steps.")
    ] = 1.0,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw them; needs matplotlib.")
    ] = True,
    json: options.JsonFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Repeat the paper's experiments on small models, over several seeds, into the folder OUT.

    Models are trained where they are missing, merged, calibrated and measured, several at once.
    A repeated run goes on where the last one ended, and only measures what is new.
    """
    from dataclasses import replace

    from moemerge.testbed.experiments import Scale, TableRequest, run_tables

    scale = Scale()
    if steps_scale != 1:
        scale = replace(scale, tuning_steps=max(1, round(steps_scale * scale.tuning_steps)))
    if problems is not None:
        scale = replace(scale, problems=problems, held_out=min(scale.held_out, problems))
    if rows is not None:
        scale = replace(scale, rows=rows)
    request = TableRequest(
        experiments=tuple(experiments),
        out=out_folder,
        preset=preset,
        regimes=tuple(dict.fromkeys(regime or ["soft"])),
        arch=arch,
        seeds=parse_seeds(seeds),
        sets=sets,
        work=work,
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        device=device,
        jobs=jobs,
        scale=scale,
        steps_scale=steps_scale,
    )
    left = "what is finished is kept, repeat it to go on"
    with interruptible(lambda: left), progress(quiet=quiet) as bar:
        result = run_tables(request, bar, figures=figures)
    if json is not None:
        deliver_json(result.to_json(), json)
    if json != STDOUT:
        _show(result)
    if result.failures:
        raise NumericalError(
            f"{len(result.failures)} parts of the tables could not be made; the first: "
            f"{result.failures[0].what}: {result.failures[0].why}",
            hint="what was finished is kept; repeat the command to go on",
        )


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5)."""
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
            raise UsageError(f"--seeds {text}: expected numbers", hint="such as 0-4 or 0,2,5")
        found.update(dict.fromkeys(range(int(numbers[0]), int(numbers[1]) + 1)))
    return tuple(found)


def _show(result: TablesResult) -> None:
    from moemerge.testbed.experiments.report import LEGEND, title
    from moemerge.testbed.experiments.tables import SPARED, main_table, verdicts

    for summary in result.summaries:
        out.print(f"[bold]{escape(title(summary))}[/]")
        spared = (*SPARED, *summary.experiment.domains)
        out.print(_drawn(main_table(summary).within(out.width, spared)))
        for line in verdicts(summary):
            out.print(line, markup=False)
        out.print()
    err.print(LEGEND, style="dim")
    out.print(f"All tables and figures: {result.written[0]}", markup=False, soft_wrap=True)


def _drawn(text: TextTable) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False)
    for number, heading in enumerate(text.headings):
        left = number < text.left
        drawn.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    group = None
    for row in text.rows:
        name = "" if row[0] == group else row[0]
        group = row[0]
        drawn.add_row(escape(name), *map(escape, row[1:]))
    return drawn
