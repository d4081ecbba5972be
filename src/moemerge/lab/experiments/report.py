"""Write the results of a study: JSON and Markdown per table, figures, and one page of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from moemerge.lab.evaluation.report import PairedDifference
from moemerge.lab.evaluation.significance import Mean, PairedTest
from moemerge.lab.experiments.plots import draw_figure
from moemerge.lab.experiments.settings import BASE
from moemerge.lab.experiments.summary import Comparison, RowSummary, Summary, TextSummary
from moemerge.lab.experiments.tables import AS_MERGED, REFERENCE, TextTable
from moemerge.report.frame import render_in_frame
from moemerge.runtime.files import write_whole
from moemerge.runtime.formatting import perplexity
from moemerge.runtime.formatting import with_error as in_nats
from moemerge.runtime.progress import counted
from moemerge.version import __version__

LEAST_P = 1e-20  # p values are shown down to this


def main_table(summary: Summary) -> TextTable:
    """Return every row: overall score, difference from the control, scores by task, and routing.

    Without a control, differences are from the first row of the group. Empty columns are left out.
    """
    form = summary.form
    headings = ["merge", "variant", "overall", "Δ", "p", "95 %", "won : lost"]
    headings += ["seeds", "p, seeds"] if len(summary.seeds) > 1 else []
    for domain, tasks in form.tasks.items():
        headings += tasks.values()
        headings += [f"{domain} average"] if len(tasks) > 1 else []
    rows = [_task_cells(summary, row) for row in summary.rows]
    return TextTable((*headings, "mismatch", "KL"), tuple(rows)).without_empty_columns()


def _task_cells(summary: Summary, row: RowSummary) -> tuple[str, ...]:
    against = row.against_control if summary.form.control else row.against_first
    cells = [row.group, row.label, with_error(row.overall)]
    cells += _difference_cells(None if against is None else against.paired)
    if len(summary.seeds) > 1:
        cells.append(str(len(row.by_seed)))
        cells.append("" if against is None else p_value(against.accuracy.p))
    for domain, tasks in summary.form.tasks.items():
        own = row.tasks.get(domain)
        cells += ["" if own is None else percent(own[task]) for task in tasks]
        if len(tasks) > 1:
            cells.append("" if own is None else percent(row.accuracy[domain].value))
    cells.append("" if row.mismatch is None else percent(row.mismatch.value))
    cells.append("" if row.kl is None else f"{row.kl.value:.4f}")
    return tuple(cells)


def _difference_cells(pair: PairedDifference | None) -> list[str]:
    if pair is None:
        return [""] * 4
    low, high = map(_points, pair.interval)
    return [
        _points(pair.difference),
        pair.p_text,
        f"{low} to {high}",
        f"{pair.won} : {pair.lost}",
    ]


def _points(share: float) -> str:
    """Format a difference in points, without a negative zero."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def perplexity_table(summary: Summary) -> TextTable:
    """Return the loss of every row on plain texts, and its difference from the control."""
    names = list(dict.fromkeys(name for row in summary.rows for name in row.perplexity))
    parts = ("loss", "perplexity", "Δ loss", "p")
    headings = ["merge", "variant", *(f"{name}: {part}" for name in names for part in parts)]
    rows = []
    for row in summary.rows if names else ():
        cells = [row.group, row.label]
        for name in names:
            cells += _loss_cells(row.perplexity.get(name))
        rows.append(tuple(cells))
    return TextTable(tuple(headings), tuple(rows)).without_empty_columns()


def _loss_cells(text: TextSummary | None) -> list[str]:
    if text is None:
        return [""] * 4
    loss, pair = text.loss, text.difference
    change = ["", ""] if pair is None else [in_nats(pair.difference, pair.error), pair.p_text]
    shown = in_nats(loss.value, loss.error, signed=False)
    return [shown, f"{perplexity(loss.value):.4g}", *change]


def comparison_table(summary: Summary) -> TextTable:
    """Return the paired comparisons that the main table does not show."""
    headings = ["merge", "compared", "overall Δ", "p", "95 %", "won : lost"]
    repeated = len(summary.seeds) > 1
    headings += ["seeds won", "p, seeds"] if repeated else []
    rows = []
    for c in _further(summary):
        cells = [c.group, f"{c.second} − {c.first}", *_difference_cells(c.paired)]
        cells += seed_cells(c) if repeated else []
        rows.append((*cells, "" if c.mismatch is None else difference(c.mismatch)))
    return TextTable((*headings, "mismatch Δ"), tuple(rows)).without_empty_columns()


def _further(summary: Summary) -> list[Comparison]:
    """Return comparisons with the base, the best source and the merge, and those requested."""
    shown = [row.against_control for row in summary.rows if summary.form.control]
    firsts = [row.against_first for row in summary.rows if summary.form.control]
    done = {(c.group, c.first, c.second) for c in shown if c is not None}
    done |= {(c.group, c.second, c.first) for c in shown if c is not None}
    further: dict[tuple[str, str, str], Comparison] = {}
    for c in (*summary.references, *firsts, *summary.comparisons):
        if c is not None and (key := (c.group, c.first, c.second)) not in done:
            further.setdefault(key, c)
    return list(further.values())


# --- verdicts -----------------------------------------------------------------------------------


def verdicts(summary: Summary) -> list[str]:
    """Return what the paired tests decide: against the base, the best source and the control."""
    return [*_against_references(summary), *_against_control(summary)]


def _against_references(summary: Summary) -> Iterator[str]:
    """State for each reference whether any row is better, beginning with the highest row."""
    for label in dict.fromkeys(c.first for c in summary.references):
        reference = summary.row(REFERENCE, label)
        found = [(c, c.paired) for c in summary.references if c.first == label and c.paired]
        if reference is None or not found:
            continue
        several = len([one for one in summary.form.singles if one != BASE]) > 1
        source = f"the best single source, {label}" if several else f"the source {label}"
        name = "the base" if label == BASE else source
        words = f"{name} ({percent(reference.overall.value)} %)"
        best, pair = max(found, key=lambda one: one[1].difference)
        better = [f"{c.group}, {c.second}" for c, p in found if p.significant and p.difference > 0]
        worse = sum(p.significant and p.difference < 0 for _, p in found)
        others = f"Worse than {name}: {worse} of {counted(len(found), 'row')}."
        if better:
            yield f"Better than {words}: {'; '.join(better)}. {others}"
        else:
            place = f"{best.group}, {best.second}, the highest row"
            yield (
                f"{pair.standing.capitalize()} {words}: {place} ({_points(pair.difference)} "
                f"points, p {pair.p_text}). {others}"
            )


def _against_control(summary: Summary) -> Iterator[str]:
    """State for each repair for which merges it beats the control."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in summary.rows:
        against = row.against_control
        if against is not None and against.paired is not None and row.label != AS_MERGED:
            by_standing = found.setdefault(row.label, {})
            by_standing.setdefault(against.paired.standing, []).append(row.group)
    for label, by_standing in found.items():
        parts = [f"{words} it for {', '.join(rows)}" for words, rows in by_standing.items()]
        yield f"{label} against the control ({summary.form.control}): {'; '.join(parts)}."


def seed_cells(c: Comparison) -> list[str]:
    return [f"{c.accuracy.wins}/{c.accuracy.difference.count}", p_value(c.accuracy.p)]


# --- numbers ------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def with_error(value: Mean) -> str:
    """Format a share with its error in percent: `41.8 ± 0.5`."""
    if value.error is None:
        return percent(value.value)
    return f"{percent(value.value)} ± {percent(value.error)}"


def difference(test: PairedTest) -> str:
    """Format a difference with its error in points: `+1.2 ± 0.3`."""
    value = test.difference
    shown = f"{100 * value.value:+.1f}"
    return shown if value.error is None else f"{shown} ± {percent(value.error)}"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    if p < LEAST_P:
        return f"< {LEAST_P:.0e}"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


PAGE = "index.html"
ALL_TABLES = "results.md"
LEGEND = (
    "Scores in percent, means over problems; overall: the mean of the domains' averages, ± its "
    "standard error over problems. Δ: overall against {reference}, problem by problem, with the "
    "95 % interval from drawing the problems again. p: the two models exchanged at random on each "
    "problem; for one task with one sample, McNemar's exact test. won : lost: problems on which "
    "the row is better, and worse."
)
CONTROL = "the control, the same merge with averaged routers"
FIRST = "the first row of the same merge"
BY_ROUTING = (
    " mismatch: percent of each source's expert choices that the model does not make on the same "
    "tokens. KL: between the routing distributions, source to model."
)
BY_DOCUMENTS = (
    " Loss of plain text: nats a token, ± its standard error over documents; Δ loss: against the "
    "same row as Δ, document by document. A lower loss is better."
)
BY_SEEDS = (
    " Everything is repeated over seeds: a problem's score is its mean over them, and the error "
    "after ± is over seeds. p, seeds: paired t-test over seeds of the overall scores."
)


def legend(summaries: Sequence[Summary]) -> str:
    """Explain the columns that these tables have."""
    text = LEGEND.format(reference=CONTROL if any(s.form.control for s in summaries) else FIRST)
    rows = [row for summary in summaries for row in summary.rows]
    text += BY_ROUTING if any(row.mismatch is not None for row in rows) else ""
    text += BY_DOCUMENTS if any(row.perplexity for row in rows) else ""
    return text + (BY_SEEDS if any(len(s.seeds) > 1 for s in summaries) else "")


def settings(summary: Summary) -> str:
    return f"Seeds {', '.join(map(str, summary.seeds))}." if len(summary.seeds) > 1 else ""


@dataclass(frozen=True)
class TableStyle:
    """How tables are written."""

    main: Callable[[Summary], TextTable]
    compared: Callable[[Summary], TextTable]
    legend: Callable[[Sequence[Summary]], str]
    settings: Callable[[Summary], str]
    verdicts: Callable[[Summary], list[str]]  # sentences above a main table


BY_PROBLEMS = TableStyle(main_table, comparison_table, legend, settings, verdicts)


def write_report(
    folder: Path,
    summaries: Sequence[Summary],
    *,
    figures: bool,
    title: str = "Results",
    about: str = "",
    style: TableStyle = BY_PROBLEMS,
) -> list[Path]:
    """Write all files and return their paths, the page first."""
    written: list[Path] = []
    drawn: dict[str, Path] = {}
    for summary in summaries:
        text = json.dumps(summary.to_json(), indent=1, ensure_ascii=False) + "\n"
        written.append(_write(folder / f"{summary.name}.json", text))
        if figures and summary.rows and summary.form.figure != "none":
            files = draw_figure(summary, folder / summary.name)
            drawn[summary.name] = files[0]
            written += files
        written.append(_write(folder / f"{summary.name}.md", markdown(summary, style=style)))
        if summary.rows:
            table = style.main(summary)
            written.append(_write(folder / f"{summary.name}.tex", table.latex()))
            written.append(_write(folder / f"{summary.name}.csv", table.csv()))
    below = style.legend(summaries)
    page = render_in_frame(
        __package__,
        "tables",
        title=f"{title} · study",
        top="beginning",
        version=__version__,
        filters={},
        heading=title,
        about=about,
        legend=below,
        parts=[_part(summary, drawn.get(summary.name), style) for summary in summaries],
    )
    texts = [f"# {title}", about, *(markdown(s, drawn.get(s.name), style) for s in summaries)]
    words = "\n\n".join(text for text in (*texts, below) if text)
    return [_write(folder / PAGE, page), _write(folder / ALL_TABLES, words), *written]


def markdown(summary: Summary, figure: Path | None = None, style: TableStyle = BY_PROBLEMS) -> str:
    """Return a table with its heading, verdicts and comparisons."""
    parts = [f"## {summary.form.heading}", summary.form.about, style.settings(summary)]
    if summary.rows:
        parts.append("\n".join(f"* {line}" for line in style.verdicts(summary)))
        parts.append(style.main(summary).markdown())
    for further in (style.compared(summary), perplexity_table(summary)):
        if further.rows:
            parts.append(further.markdown())
    if figure is not None:
        parts.append(f"![{summary.form.heading}]({figure.name})")
    if summary.missing:
        parts.append(f"Not measured: {'; '.join(summary.missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _part(summary: Summary, drawn: Path | None, style: TableStyle) -> dict[str, Any]:
    """Return a table's section of the page."""
    # The figure is embedded, so that the page is a single file. The SVG is our own, hence safe.
    figure = drawn and Markup(drawn.with_suffix(".svg").read_text(encoding="utf-8"))
    return {
        "name": summary.name,
        "heading": summary.form.heading,
        "about": summary.form.about,
        "settings": style.settings(summary),
        "figure": figure,
        "table": style.main(summary),
        "verdicts": style.verdicts(summary),
        "compared": style.compared(summary),
        "perplexity": perplexity_table(summary),
        "missing": summary.missing,
    }


def _write(path: Path, text: str) -> Path:
    write_whole(path, text.encode())
    return path
