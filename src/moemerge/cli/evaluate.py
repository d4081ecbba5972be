"""`moemerge evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from moemerge.cli.console import GOES_ON, interruptible, waiting
from moemerge.cli.flags import Reporting, add_verb
from moemerge.evaluation.settings import EvaluationOutputSettings, EvaluationSettings

EXAMPLES = """
  moemerge evaluate merged/ calibrated/ --task gsm8k --task math500 \\
      --report scores.html
  moemerge evaluate merged/ --task gsm8k --data gsm8k=gsm8k_test.jsonl.gz \\
      --samples 1 --temperature 0 --limit 200
  moemerge evaluate merged/ calibrated/ --task humaneval+ --allow-code
  moemerge evaluate merged/ --lm-eval arc_challenge --lm-eval hellaswag
  moemerge evaluate merged/ refit/ --task perplexity --data web=web.jsonl
  moemerge evaluate --rescore --task gsm8k --protocol paper
"""


def add_to(app: typer.Typer) -> None:
    add_verb(app, evaluate, EXAMPLES)


def evaluate(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Folders, or hub ids.")
    ] = None,
    *,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="gsm8k, math500, humaneval+, mbpp+, ifeval, commonsense_qa, perplexity, or a "
            "FILE.yml. Repeat it.",
        ),
    ] = None,
    data: Annotated[
        dict[str, list[str]] | None,
        typer.Option(
            metavar="TASK=FILE",
            help="A task's problems, or a text of the task perplexity by name. Repeat it.",
        ),
    ] = None,
    settings: EvaluationSettings,
    output: EvaluationOutputSettings,
    reporting: Reporting,
) -> None:
    """Evaluate models on benchmarks and test whether their scores differ."""
    from moemerge import api
    from moemerge.cli.evaluation_table import evaluation_report

    left = waiting(output.out / "completions", GOES_ON)
    with interruptible(left), reporting.progress() as bar:
        report = api.evaluate(
            models or (),
            task or (),
            data=data or {},
            settings=settings,
            progress=bar,
            **output.model_dump(),
        )
    table = evaluation_report(report, verbose=reporting.verbose)
    reporting.show(report.to_json(), table, notices=report.notices, page=output.report)
