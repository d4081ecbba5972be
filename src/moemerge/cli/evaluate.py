"""`moemerge evaluate`, and its tables of scores for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from moemerge.cli.console import interruptible, waiting
from moemerge.cli.flags import Reporting, verb
from moemerge.cli.render import NumberTable, facts
from moemerge.lab import api as lab_api
from moemerge.lab.settings import EvaluationOutputSettings, EvaluationSettings
from moemerge.runtime.formatting import short, with_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moemerge.lab.scores import (
        EvaluationReport,
        MeanScore,
        PairedDifference,
        ResultRow,
    )
    from moemerge.lab.text_losses import LossDifference, TextPerplexity

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


@verb(EXAMPLES)
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
    with interruptible(waiting(output.out / "completions")), reporting.progress() as bar:
        report = lab_api.evaluate(
            models or (),
            task or (),
            data=data or {},
            settings=settings,
            progress=bar,
            **output.model_dump(),
        )
    table = evaluation_report(report, verbose=reporting.verbose)
    reporting.show(report.to_json(), table, notices=report.notices, page=output.report)


FEW_PAIRS: Final = 3  # with more pairs, tasks are shown only with --verbose
STYLES: Final = {"task": "", "domain": "italic", "overall": "bold"}


def evaluation_report(report: EvaluationReport, *, verbose: bool) -> RenderableType:
    parts: list[RenderableType] = []
    if len(report.models) > 1:
        parts += [Text(report.headline, "bold"), *map(Text, report.other_verdicts), ""]
    if report.rows:
        parts.append(_scores(report))
    count = len(report.models) * (len(report.models) - 1) // 2
    if count and report.rows:
        everything = verbose or count <= FEW_PAIRS
        rows = report.rows if everything else report.rows[-1:]
        parts += ["", _pairs(rows)]
    if report.perplexity:
        parts += [*([""] if report.rows else []), _losses(report.perplexity)]
        compared = [text for text in report.perplexity if text.pairs]
        parts += ["", _loss_pairs(compared)] if compared else []
    parts += ["", facts(_background(report))]
    return Group(*parts)


def _scores(report: EvaluationReport) -> NumberTable:
    table = NumberTable(["%", *(short(model) for model in report.models), "problems"])
    sizes = {task.name: len(task.problems) for task in report.tasks}
    for row in report.rows:
        problems = str(sum(sizes[name] for name in row.tasks)) if row.kind == "task" else ""
        cells = [Text(score_text(score), STYLES[row.kind]) for score in row.scores.values()]
        table.add(Text(row.title, STYLES[row.kind]), *cells, problems)
    return table


def _pairs(rows: tuple[ResultRow, ...]) -> NumberTable:
    headings = ["", "difference", "95% interval", "p", "won", "lost", ""]
    table = NumberTable(headings, words=(0, 6))
    for number in range(len(rows[0].pairs)):
        first, second = rows[0].pairs[number].first, rows[0].pairs[number].second
        table.add(Text(f"{short(second)} − {short(first)}", "bold"), "", "", "", "", "", "")
        for row in rows:
            table.add(f"  {row.title}", *_pair_cells(row.pairs[number]))
    return table


def _pair_cells(pair: PairedDifference) -> list[str | Text]:
    low, high = (f"{100 * end:+.1f}" for end in pair.interval)
    better = pair.difference > 0
    return [f"{100 * pair.difference:+.1f}", f"{low} to {high}", *_test_cells(pair, better)]


def _test_cells(pair: PairedDifference | LossDifference, better: bool) -> list[str | Text]:
    sure = Text("significant", "bold green" if better else "bold red")
    return [pair.p_text, str(pair.won), str(pair.lost), sure if pair.significant else ""]


def _losses(texts: Sequence[TextPerplexity]) -> NumberTable:
    headings = ["text", "model", "documents", "tokens", "loss", "95% interval", "perplexity"]
    table = NumberTable(headings, keys=2, words=(0, 1), title="nats a token")
    for text in texts:
        for model, score in text.scores.items():
            counts = str(text.size), str(text.documents[model].total_tokens)
            loss = with_error(score.loss, score.error, signed=False)
            ends = "" if score.interval is None else "{:.3f} to {:.3f}".format(*score.interval)
            table.add(text.name, short(model), *counts, loss, ends, f"{score.perplexity:.4g}")
    return table


def _loss_pairs(texts: Sequence[TextPerplexity]) -> NumberTable:
    headings = ["loss, nats a token", "difference", "95% interval", "p", "won", "lost", ""]
    table = NumberTable(headings, words=(0, 6))
    for text in texts:
        for pair in text.pairs:
            ends = "" if pair.interval is None else "{:+.3f} to {:+.3f}".format(*pair.interval)
            name = f"{text.name}: {short(pair.second)} − {short(pair.first)}"
            difference = with_error(pair.difference, pair.error)
            table.add(name, difference, ends, *_test_cells(pair, pair.difference < 0))
    return table


def score_text(score: MeanScore) -> str:
    error = "" if score.error is None else f" ± {100 * score.error:.1f}"
    return f"{100 * score.mean:.1f}{error}"


def _background(report: EvaluationReport) -> list[tuple[str, str]]:
    settings = report.settings
    documents = ("±", "standard error over documents; differences are paired by documents")
    if not report.rows:
        return [documents]
    samples = f"{settings['samples']} a problem at temperature {settings['temperature']:g}"
    return [
        ("protocol", report.protocol),
        ("samples", samples if settings["samples"] > 1 or settings["temperature"] else "greedy"),
        ("±", "standard error over problems; differences are paired problem by problem"),
    ]
