"""`moemerge data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from moemerge.cli.console import interruptible, waiting
from moemerge.cli.flags import ModelArgument, Reporting, verb
from moemerge.cli.render import facts
from moemerge.config.text_settings import DataSettings
from moemerge.lab import api as lab_api
from moemerge.runtime.journals import completions_path
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.lab.data.run import DataReport
    from moemerge.lab.generate import Counts

EXAMPLES = """
  moemerge data org/math math.jsonl --prompts gsm8k_train.jsonl --verify math \\
      --template "{prompt} Let's think step by step." --limit 2000
  moemerge data org/code code.jsonl --prompts tasks.jsonl --verify code \\
      --allow-code --samples 4 --temperature 0.7 --per-prompt 1
  moemerge data org/math math.jsonl --prompts problems.parquet --keep all \\
      --map prompt=problem --engine server --url http://localhost:8000/v1
  moemerge data org/base general.jsonl --text c4.jsonl.gz --limit 1000
"""

Files = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE", help="Prompts for MODEL (.jsonl, .jsonl.gz, .parquet). Repeat it."
    ),
]
Plain = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Plain text to use unchanged, instead. Repeat it."),
]


@verb(EXAMPLES)
def data(
    model: ModelArgument,
    out_file: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="File to write; appears whole or not.")
    ],
    *,
    prompts: Files = None,
    text: Plain = None,
    settings: DataSettings,
    reporting: Reporting,
) -> None:
    """Generate calibration text: sample answers of MODEL, verify them, keep the correct ones."""
    with interruptible(waiting(completions_path(out_file))), reporting.progress() as bar:
        report = lab_api.make_data(
            model,
            out_file,
            prompts=prompts or (),
            text=text or (),
            settings=settings,
            overwrite=reporting.overwrite,
            progress=bar,
        )
    assert report is not None
    reporting.show(report.to_json(), _summary(report), notices=report.notices)


def _summary(report: DataReport) -> Table:
    rows = [("read", _read(report))]
    if report.answers.asked:
        rows.append(("answers", _answers(report.answers)))
        rows += [("", f"{number} {grade}") for grade, number in report.answers.grades.items()]
        if report.tokens:
            speed = report.tokens / max(report.generating_seconds, 1e-9)
            rows.append(("speed", f"{counted(report.tokens, 'token')}, {speed:.0f} a second"))
    shares = [f"{number} of {group}" for group, number in report.kept_by_group.items()]
    several = f" ({', '.join(shares)})" if len(shares) > 1 else ""
    rows.append(("kept", f"{counted(report.kept, 'row')}{several}"))
    rows.append(("file", report.output))
    return facts(rows)


def _read(report: DataReport) -> str:
    parts = [f"{counted(report.read, 'row')}"]
    if report.repeated:
        parts.append(f"{counted(report.repeated, 'repeats others', 'repeat others')}")
    parts += [
        f"{counted(number, 'overlaps', 'overlap')} with {name}"
        for name, number in report.contaminated.items()
    ]
    if report.prompts:
        parts.append(f"{counted(report.prompts, 'prompt')} taken")
    return ", ".join(parts)


def _answers(counts: Counts) -> str:
    parts = [f"{counts.asked} asked for", f"{counts.answered} ended"]
    parts += [f"{n} {what}" for n, what in ((counts.cut, "cut"), (counts.failed, "failed")) if n]
    return ", ".join(parts)
