"""Write the results of a study: JSON and Markdown per table, figures, and one page of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from moemerge.evaluation.report import PairedDifference
from moemerge.evaluation.significance import Mean, PairedTest
from moemerge.experiments.plots import draw_figure
from moemerge.experiments.summary import Comparison, RowSummary, Summary
from moemerge.experiments.tables import AS_MERGED, AVERAGED, EXACT, HARC, SOURCE
from moemerge.experiments.text_tables import TextTable
from moemerge.report.frame import render_in_frame
from moemerge.runtime.files import write_whole
from moemerge.version import __version__

SIGNIFICANT = 0.05
LEAST_P = 1e-20  # p values are shown down to this


def main_table(summary: Summary) -> TextTable:
    """Return every row: accuracy, difference from the first row of its group, and routing."""
    if summary.form.paired_by == "problems":
        return _task_table(summary)
    domains = summary.form.domains
    untouched = list(dict.fromkeys(d for row in summary.rows for d in row.untouched))
    headings = (
        "merge",
        "variant",
        "seeds",
        *domains,
        "mean",
        "Δ",
        "p, seeds",
        "p, problems",
        "mismatch",
        "KL",
        *(f"{domain}, untouched" for domain in untouched),
    )
    rows = (_cells(row, domains, untouched) for row in summary.rows)
    return TextTable(headings, tuple(rows))


def _cells(row: RowSummary, domains: Sequence[str], untouched: Sequence[str]) -> tuple[str, ...]:
    against = row.against_first
    return (
        row.group,
        row.label,
        str(row.overall.count),
        *(percent(row.accuracy[d].value) for d in domains),
        with_error(row.overall),
        "" if against is None else difference(against.accuracy),
        "" if against is None else p_value(against.accuracy.p),
        "" if against is None or against.problems is None else p_value(against.problems.p),
        "" if row.mismatch is None else with_error(row.mismatch),
        "" if row.kl is None else f"{row.kl.value:.3f}",
        *(with_error(row.untouched[d]) if d in row.untouched else "" for d in untouched),
    )


def _task_table(summary: Summary) -> TextTable:
    """Return the main table of a study with tasks; differences are over problems."""
    form = summary.form
    routing = any(row.mismatch is not None for row in summary.rows)
    headings = ["merge", "variant"]
    for domain, tasks in form.tasks.items():
        headings += tasks.values()
        headings += [f"{domain} average"] if len(tasks) > 1 else []
    headings += ["overall", "Δ", "95 %", "p", "won : lost"]
    headings += ["seeds", "p, seeds"] if len(summary.seeds) > 1 else []
    headings += ["mismatch", "KL"] if routing else []
    rows = [_task_cells(summary, row)[: len(headings)] for row in summary.rows]
    return TextTable(tuple(headings), tuple(rows))


def _task_cells(summary: Summary, row: RowSummary) -> tuple[str, ...]:
    cells = [row.group, row.label]
    for domain, tasks in summary.form.tasks.items():
        own = row.tasks.get(domain)
        cells += ["" if own is None else percent(own[task]) for task in tasks]
        if len(tasks) > 1:
            cells.append("" if own is None else percent(row.accuracy[domain].value))
    cells.append(with_error(row.overall))
    against = row.against_first
    cells += _difference_cells(None if against is None else against.paired)
    if len(summary.seeds) > 1:
        cells.append(str(len(row.by_seed)))
        cells.append("" if against is None else p_value(against.accuracy.p))
    cells.append("" if row.mismatch is None else percent(row.mismatch.value))
    cells.append("" if row.kl is None else f"{row.kl.value:.4f}")
    return tuple(cells)


def _difference_cells(pair: PairedDifference | None) -> list[str]:
    if pair is None:
        return [""] * 4
    low, high = map(_points, pair.interval)
    p = pair.p if pair.mcnemar is None else pair.mcnemar.p
    return [
        _points(pair.difference),
        f"{low} to {high}",
        p_value(p),
        f"{pair.won} : {pair.lost}",
    ]


def _points(share: float) -> str:
    """Format a difference in points, without a negative zero."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def _compared_by_problems(summary: Summary) -> TextTable:
    headings = ["merge", "compared", "overall Δ", "95 %", "p", "won : lost"]
    repeated = len(summary.seeds) > 1
    headings += ["seeds won", "p, seeds"] if repeated else []
    rows = []
    for c in summary.comparisons:
        cells = [c.group, f"{c.second} − {c.first}", *_difference_cells(c.paired)]
        cells += _seed_cells(c) if repeated else []
        rows.append((*cells, "" if c.mismatch is None else difference(c.mismatch)))
    return TextTable((*headings, "mismatch Δ"), tuple(rows))


def _seed_cells(c: Comparison) -> list[str]:
    return [f"{c.accuracy.wins}/{c.accuracy.difference.count}", p_value(c.accuracy.p)]


def comparison_table(summary: Summary) -> TextTable | None:
    """Return the paired comparisons of an experiment, if it has any."""
    if not summary.comparisons:
        return None
    if summary.form.paired_by == "problems":
        return _compared_by_problems(summary)
    headings = (
        "merge",
        "compared",
        "accuracy Δ",
        "seeds won",
        "p, seeds",
        "problems won : lost",
        "p, problems",
        "mismatch Δ",
    )
    return TextTable(headings, tuple(map(_compared, summary.comparisons)))


def _compared(c: Comparison) -> tuple[str, ...]:
    return (
        c.group,
        f"{c.second} − {c.first}",
        difference(c.accuracy),
        *_seed_cells(c),
        "" if c.problems is None else f"{c.problems.gained} : {c.problems.lost}",
        "" if c.problems is None else p_value(c.problems.p),
        "" if c.mismatch is None else difference(c.mismatch),
    )


# --- what a main table says, counted ------------------------------------------------------------


def verdicts(summary: Summary) -> list[str]:
    """Count for how many methods of a main table each claim holds. Empty for other tables."""
    if (AS_MERGED, HARC) not in summary.form.compare:
        return []
    sentences = []
    harc = _against(summary, AS_MERGED, HARC)
    if harc:
        lowers = sum(c.mismatch is not None and _value(c.mismatch) < 0 for c in harc)
        sentences.append(f"HARC lowers the mismatch for {lowers} of {len(harc)} methods.")
        sentences.append(f"HARC against the plain merge: {_raises(harc)}")
    averaged = _against(summary, AS_MERGED, AVERAGED)
    if averaged:
        sentences.append(f"Averaged routers against the plain merge: {_raises(averaged)}")
        sentences.append(
            f"HARC against averaged routers: {_raises(_against(summary, AVERAGED, HARC))}"
        )
    for label in (SOURCE, EXACT):
        against = _against(summary, HARC, label)
        if against:
            name = label[0].upper() + label[1:]
            sentences.append(f"{name} against HARC: {_raises(against)}")
    return sentences


def _against(summary: Summary, first: str, second: str) -> list[Comparison]:
    return [c for c in summary.comparisons if (c.first, c.second) == (first, second)]


def _raises(comparisons: Sequence[Comparison]) -> str:
    up = [c for c in comparisons if _value(c.accuracy) > 0]
    down = [c for c in comparisons if _value(c.accuracy) < 0]
    gain = 100 * sum(_value(c.accuracy) for c in comparisons) / max(1, len(comparisons))
    sure_up = sure_down = ""
    if any(c.accuracy.p is not None for c in comparisons):  # one seed allows no test over seeds
        sure_up = f" ({sum(_sure(c.accuracy) for c in up)} with p < {SIGNIFICANT:g} over seeds)"
        sure_down = f" ({sum(_sure(c.accuracy) for c in down)})"
    return (
        f"higher accuracy for {len(up)} of {len(comparisons)} methods{sure_up}, lower for "
        f"{len(down)}{sure_down}; {gain:+.1f} points on average."
    )


def _value(test: PairedTest) -> float:
    return test.difference.value


def _sure(test: PairedTest) -> bool:
    return test.p is not None and test.p < SIGNIFICANT


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
    "Accuracy in percent of test problems solved; mean over domains ± standard error over seeds. "
    "Δ: against the first row of the same merge, paired over seeds. p, seeds: paired t-test. "
    "p, problems: McNemar's exact test over the problems of all seeds. mismatch: percent of each "
    "specialist's expert choices that the model does not make on the same held-out tokens. KL: "
    "between the routing distributions, specialist to model. untouched: percent solved of a domain "
    "that no specialist of the merge was made for, in no mean."
)
BY_PROBLEMS = (
    "Scores in percent, means over problems; overall: the mean of the domains' averages, ± its "
    "standard error over problems. Δ: overall against the first row of the same merge, problem by "
    "problem, with the 95 % interval from drawing the problems again. p: the two models exchanged "
    "at random on each problem. won : lost: problems on which the row is better, and worse. "
    "mismatch: percent of each source's expert choices that the model does not make on the same "
    "tokens. KL: between the routing distributions, source to model."
)
BY_SEEDS = (
    " Everything is repeated over seeds: a problem's score is its mean over them, and the error "
    "after ± is over seeds. p, seeds: paired t-test over seeds of the overall scores."
)


def write_report(
    folder: Path,
    summaries: Sequence[Summary],
    *,
    figures: bool,
    title: str = "Results",
    about: str = "",
) -> list[Path]:
    """Write all files and return their paths, the page first."""
    written: list[Path] = []
    drawn: dict[str, Path] = {}
    for summary in summaries:
        written.append(_write(folder / f"{summary.name}.json", _json(summary)))
        if figures and summary.rows and summary.form.figure != "none":
            files = draw_figure(summary, folder / summary.name)
            drawn[summary.name] = files[0]
            written += files
        written.append(_write(folder / f"{summary.name}.md", markdown(summary)))
        if summary.rows:
            table = main_table(summary)
            written.append(_write(folder / f"{summary.name}.tex", table.latex()))
            written.append(_write(folder / f"{summary.name}.csv", table.csv()))
    pages = "\n\n".join(markdown(s, drawn.get(s.name)) for s in summaries)
    page = _page((title, about), summaries, drawn)
    words = "\n\n".join(part for part in (f"# {title}", about, legend(summaries), pages) if part)
    written.insert(0, _write(folder / ALL_TABLES, words))
    written.insert(0, _write(folder / PAGE, page))
    return written


def markdown(summary: Summary, figure: Path | None = None) -> str:
    """Return a table with its heading, verdicts and comparisons."""
    parts = [f"## {heading(summary)}", summary.form.about, settings(summary)]
    if summary.rows:
        parts.append(main_table(summary).markdown())
        parts.append("\n".join(f"* {line}" for line in verdicts(summary)))
    compared = comparison_table(summary)
    if compared is not None:
        parts.append(compared.markdown())
    if figure is not None:
        parts.append(f"![{heading(summary)}]({figure.name})")
    if summary.missing:
        parts.append(f"Not measured: {'; '.join(summary.missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(summary: Summary) -> str:
    return summary.form.heading


def legend(summaries: Sequence[Summary]) -> str:
    if not any(s.form.paired_by == "problems" for s in summaries):
        return LEGEND
    return BY_PROBLEMS + (BY_SEEDS if any(len(s.seeds) > 1 for s in summaries) else "")


def settings(summary: Summary) -> str:
    seeds = ", ".join(map(str, summary.seeds))
    if summary.form.paired_by == "problems":
        return f"Seeds {seeds}." if len(summary.seeds) > 1 else ""
    return (
        f"{', '.join(summary.form.shared.values())}; "
        f"seeds {seeds or 'none'}; {summary.problems} test problems a domain."
    )


def _page(words: tuple[str, str], summaries: Sequence[Summary], drawn: dict[str, Path]) -> str:
    """Return the page of all tables, with a title and a description."""
    name, about = words
    return render_in_frame(
        __package__,
        "tables",
        title=f"{name} · study",
        top="beginning",
        version=__version__,
        filters={},
        heading=name,
        about=about,
        legend=legend(summaries),
        parts=[_part(summary, drawn.get(summary.name)) for summary in summaries],
    )


def _part(summary: Summary, drawn: Path | None) -> dict[str, Any]:
    """Return a table's section of the page."""
    # The figure is embedded, so that the page is a single file. The SVG is our own, hence safe.
    figure = drawn and Markup(drawn.with_suffix(".svg").read_text(encoding="utf-8"))
    return {
        "name": summary.name,
        "heading": heading(summary),
        "about": summary.form.about,
        "settings": settings(summary),
        "figure": figure,
        "table": main_table(summary),
        "verdicts": verdicts(summary),
        "compared": comparison_table(summary),
        "missing": summary.missing,
    }


def _json(summary: Summary) -> str:
    return json.dumps(summary.to_json(), indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> Path:
    write_whole(path, text.encode())
    return path
