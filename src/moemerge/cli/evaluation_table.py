"""Tables of evaluation scores for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from moemerge.cli.render import NumberTable, facts
from moemerge.report.words import short

if TYPE_CHECKING:
    from moemerge.evaluation.report import EvaluationReport, MeanScore, PairedDifference, ResultRow

FEW_PAIRS: Final = 3  # with more pairs, tasks are shown only with --verbose
STYLES: Final = {"task": "", "domain": "italic", "overall": "bold"}


def evaluation_report(report: EvaluationReport, *, verbose: bool) -> RenderableType:
    parts: list[RenderableType] = []
    if len(report.models) > 1:
        others = [text for text in report.verdicts if text != report.headline]
        parts += [Text(report.headline, "bold"), *map(Text, others), ""]
    parts.append(_scores(report))
    count = len(report.models) * (len(report.models) - 1) // 2
    if count:
        everything = verbose or count <= FEW_PAIRS
        rows = report.rows if everything else report.rows[-1:]
        parts += ["", _pairs(rows)]
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
    sure = Text("significant", "bold green" if pair.difference > 0 else "bold red")
    return [
        f"{100 * pair.difference:+.1f}",
        f"{low} to {high}",
        pair.p_text,
        str(pair.won),
        str(pair.lost),
        sure if pair.significant else "",
    ]


def score_text(score: MeanScore) -> str:
    error = "" if score.error is None else f" ± {100 * score.error:.1f}"
    return f"{100 * score.mean:.1f}{error}"


def _background(report: EvaluationReport) -> list[tuple[str, str]]:
    settings = report.settings
    samples = f"{settings['samples']} a problem at temperature {settings['temperature']:g}"
    return [
        ("protocol", report.protocol),
        ("samples", samples if settings["samples"] > 1 or settings["temperature"] else "greedy"),
        ("±", "standard error over problems; differences are paired problem by problem"),
    ]
