"""The tables of a study: means, paired tests, one figure, and the files that show them.

Rows of a merge are compared problem by problem with the merge whose routers are averaged (the
control), or without one with the plain merge. Over seeds, a problem's score is its mean.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moemerge.errors import UsageError
from moemerge.lab.scores import PairedDifference, ResultRow, TaskScores, compare_models
from moemerge.lab.settings import EvaluationSettings
from moemerge.lab.significance import Mean, PairedTest, mean, paired_t
from moemerge.lab.study.plan import REFERENCE, Command, Row, Table
from moemerge.lab.study.settings import BASE
from moemerge.lab.text_losses import LossDifference, compare_losses
from moemerge.runtime.files import write_whole
from moemerge.runtime.formatting import perplexity
from moemerge.runtime.formatting import with_error as in_nats

DRAWS: Final[int] = EvaluationSettings.model_fields["draws"].default
SEED: Final = 0
LEAST_P: Final = 1e-20  # p values over seeds are shown down to this
Entry = Mapping[str, Any]  # the measurements of a cell


@dataclass(frozen=True)
class Comparison:
    """The second row minus the first: over the problems, and over seeds if there are several."""

    group: str
    first: str
    second: str
    paired: PairedDifference
    seeds: PairedTest
    mismatch: float | None


@dataclass(frozen=True)
class RowSummary:
    """The numbers of a row; scores and mismatches are shares, not percentages."""

    group: str
    label: str
    x: float | None
    overall: Mean  # the mean of the domains' averages; the error is over problems, or over seeds
    accuracy: Mapping[str, float]  # by domain
    tasks: Mapping[str, Mapping[str, float]]  # by domain and task
    mismatch: float | None
    kl: float | None
    kl_layers: Mapping[str, Sequence[float]]  # by domain
    by_seed: Mapping[int, float]
    against: Comparison | None  # with the control; without one, with the first row of the group
    perplexity: Mapping[str, tuple[Mean, LossDifference | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """A table with its means and comparisons."""

    table: Table
    seeds: tuple[int, ...]
    rows: tuple[RowSummary, ...]
    comparisons: tuple[Comparison, ...]
    missing: tuple[str, ...]  # rows without a result

    def to_json(self) -> dict[str, Any]:
        about = {"name": self.table.name, "title": self.table.title}
        values = {key: value for key, value in vars(self).items() if key != "table"}
        return {**about, "about": self.table.entry.about, **_plain(values)}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return _plain(asdict(value)) if hasattr(value, "__dataclass_fields__") else value


# --- means and paired tests -----------------------------------------------------------------------


def summarise(table: Table, find: Callable[[Command], Entry | None]) -> Summary:
    """Return the table of all cells that `find` finds."""
    found = {
        row: {seed: entry for seed, cell in row.cells.items() if (entry := find(cell)) is not None}
        for row in table.rows
    }
    rows = [row for row in table.rows if found[row]]

    def compare(first: Row | None, second: Row | None) -> Comparison | None:
        if first is None or second is None or first == second:
            return None
        seeds = [seed for seed in found[first] if seed in found[second]]
        both = [[found[row][seed] for seed in seeds] for row in (first, second)]
        whole = _compared(table, *map(_pooled, both)) if seeds else None
        if whole is None:
            return None
        routed = [[_mean_of(entry, "mismatch") for entry in own] for own in both]
        known = [value for own in routed for value in own if value is not None]
        half = len(known) // 2
        return Comparison(
            group=second.group,
            first=first.label,
            second=second.label,
            paired=whole.pairs[0],
            seeds=paired_t(*([_overall(entry) for entry in own] for own in both)),
            mismatch=mean(known[half:]).value - mean(known[:half]).value
            if len(known) == 2 * len(seeds)
            else None,
        )

    by_name = {(row.group, row.label): row for row in rows}
    firsts = {row.group: row for row in reversed(table.rows)}
    # A plain average has no row with averaged routers: it is its own control.
    controls = {g: by_name.get((g, table.control), r) for g, r in firsts.items() if g != REFERENCE}
    references = controls if table.control else firsts
    comparisons = []
    for other in _bests(table, rows, found):
        comparisons += [compare(other, row) for row in rows if row.group != REFERENCE]
    if table.control:
        comparisons += [compare(firsts[row.group], row) for row in rows]
    for group in dict.fromkeys(row.group for row in rows):
        for pair in table.compare:
            comparisons.append(compare(*(by_name.get((group, label)) for label in pair)))
    summaries = []
    for row in rows:
        reference = references.get(row.group, row)
        against = compare(reference, row)
        losses = _losses(list(found[row].values()), list(found.get(reference, found[row]).values()))
        summaries.append(
            replace(_summary(table, row, found[row]), against=against, perplexity=losses)
        )
    # The main table has these already, in one direction or the other.
    shown = {(s.group, s.against.first, s.label) for s in summaries if s.against is not None}
    shown |= {(group, second, first) for group, first, second in shown}
    unique = {(c.group, c.first, c.second): c for c in comparisons if c is not None}
    return Summary(
        table,
        tuple(sorted({seed for own in found.values() for seed in own})),
        tuple(summaries),
        tuple(c for names, c in unique.items() if names not in shown),
        tuple(f"{row.group}, {row.label}" for row in table.rows if not found[row]),
    )


def _bests(
    table: Table, rows: Sequence[Row], found: Mapping[Row, Mapping[int, Entry]]
) -> list[Row]:
    """Return the base and the best single source, as far as they are reference rows."""
    singles = [row for row in rows if row.group == REFERENCE and row.label in table.singles]
    base = [row for row in singles if row.label == BASE]
    others = [row for row in singles if row.label != BASE]
    score = {row: mean([_overall(entry) for entry in found[row].values()]).value for row in others}
    return [*base, *([max(others, key=lambda row: score[row])] if others else [])]


def _summary(table: Table, row: Row, entries: Mapping[int, Entry]) -> RowSummary:
    every = list(entries.values())
    pooled = _pooled(every)
    whole = _compared(table, pooled, pooled)
    assert whole is not None  # a model compared with itself shares all its domains
    own = whole.scores["second"]
    by_seed = {seed: _overall(entry) for seed, entry in entries.items()}
    several = len(every) > 1
    tasks = {
        domain: {task: float(np.mean(scores)) for task, scores in of_domain["tasks"].items()}
        for domain, of_domain in pooled["domains"].items()
    }
    curves = {
        domain: [entry["domains"][domain].get("kl_layers", []) for entry in every]
        for domain in tasks
    }

    def over_seeds(what: str) -> float | None:
        values = [_mean_of(entry, what) for entry in every]
        known = [value for value in values if value is not None]
        return mean(known).value if len(known) == len(values) else None

    return RowSummary(
        group=row.group,
        label=row.label,
        x=row.x,
        overall=mean(list(by_seed.values())) if several else Mean(own.mean, own.error, 1),
        accuracy={domain: mean(list(scores.values())).value for domain, scores in tasks.items()},
        tasks=tasks,
        mismatch=over_seeds("mismatch"),
        kl=over_seeds("kl"),
        kl_layers={d: np.mean(of, axis=0).tolist() for d, of in curves.items()},
        by_seed=by_seed,
        against=None,
    )


def _pooled(entries: Sequence[Entry]) -> Entry:
    """Combine the entries of several seeds: a problem's score is its mean over seeds."""
    first = entries[0]["domains"]
    shared = [domain for domain in first if all(domain in e["domains"] for e in entries)]
    domains = {
        domain: {
            "tasks": {
                task: np.mean([e["domains"][domain]["tasks"][task] for e in entries], axis=0)
                for task in first[domain]["tasks"]
            }
        }
        for domain in shared
    }
    return {"domains": domains}


def _compared(table: Table, first: Entry, second: Entry) -> ResultRow | None:
    """Return the most general comparison over the domains that both have, if there are any."""
    tasks = []
    for domain, titles in table.tasks.items():
        if domain in first["domains"] and domain in second["domains"]:
            for task, title in titles.items():
                scores = np.array([e["domains"][domain]["tasks"][task] for e in (first, second)])
                single = bool(np.isin(scores, (0.0, 1.0)).all())
                places = tuple(map(str, range(scores.shape[1])))
                tasks.append(TaskScores(task, title, domain, places, scores, single))
    if not tasks:
        return None
    rows = compare_models(tasks, ["first", "second"], draws=DRAWS, seed=SEED)
    kinds = {row.kind: row for row in rows}
    return kinds.get("overall") or kinds.get("domain") or kinds["task"]


def _overall(entry: Entry) -> float:
    """Return the mean of the domains' averages."""
    domains = [[np.mean(t) for t in own["tasks"].values()] for own in entry["domains"].values()]
    return float(np.mean([np.mean(tasks) for tasks in domains]))


def _mean_of(entry: Entry, what: str) -> float | None:
    """Return a figure of the routing, as the mean of the domains that have it."""
    values = [own[what] for own in entry["domains"].values() if what in own]
    return float(np.mean(values)) if values else None


def _losses(
    own: Sequence[Entry], reference: Sequence[Entry]
) -> dict[str, tuple[Mean, LossDifference | None]]:
    """Return the loss on each text, compared with that of a reference on the same documents."""
    from moemerge.forward.losses import DocumentLosses  # imports torch

    def documents(entries: Sequence[Entry]) -> dict[str, DocumentLosses]:
        found = {}
        for name, first in entries[0]["perplexity"].items() if entries else ():
            sums = np.mean([e["perplexity"][name]["sums"] for e in entries], axis=0)
            found[name] = DocumentLosses(tuple(sums.tolist()), tuple(first["tokens"]))
        return found

    others, found = documents(reference), {}
    for name, losses in documents(own).items():
        other, pair = others.get(name), None
        if other is not None and other.tokens == losses.tokens and other.sums != losses.sums:
            both, rng = {"reference": other, "row": losses}, np.random.default_rng(SEED)
            (pair,) = compare_losses(name, both, list(both), DRAWS, rng).pairs
        average = losses.mean
        found[name] = (Mean(average.value, average.error, len(losses.sums)), pair)
    return found


# --- tables as text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """Headings and rows of plain text; the first `left` columns are text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 2

    def without_empty_columns(self) -> TextTable:
        """Return the table without columns that no row has a value for."""
        kept = [n for n in range(len(self.headings)) if any(row[n] for row in self.rows)]
        kept = kept or list(range(len(self.headings)))
        rows = tuple(tuple(row[n] for n in kept) for row in self.rows)
        return TextTable(tuple(self.headings[n] for n in kept), rows, self.left)

    def markdown(self) -> str:
        bars = ["---" if n < self.left else "---:" for n in range(len(self.headings))]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.headings, *self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [rows[0], bars, *rows[1:]])

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *self.rows])
        return text.getvalue()


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def with_error(value: Mean) -> str:
    """Format a share with its error in percent: `41.8 ± 0.5`."""
    error = "" if value.error is None else f" ± {percent(value.error)}"
    return percent(value.value) + error


def points(share: float) -> str:
    """Format a difference in points, without a negative zero."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    if p < LEAST_P:
        return f"< {LEAST_P:.0e}"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def main_table(summary: Summary) -> TextTable:
    """Return every row: overall score, difference from the control, scores by task, and routing.

    Empty columns are left out.
    """
    several = len(summary.seeds) > 1
    tasks = summary.table.tasks
    headings = ["merge", "variant", "overall", "Δ", "p", "95 %", "won : lost"]
    headings += ["seeds", "p, seeds"] if several else []
    for domain, titles in tasks.items():
        headings += [*titles.values(), *([f"{domain} average"] if len(titles) > 1 else [])]
    rows = []
    for row in summary.rows:
        cells = [row.group, row.label, with_error(row.overall), *_difference(row.against)]
        if several:
            cells += [str(len(row.by_seed)), p_value(row.against.seeds.p) if row.against else ""]
        for domain, titles in tasks.items():
            own = row.tasks.get(domain)
            cells += ["" if own is None else percent(own[task]) for task in titles]
            if len(titles) > 1:
                cells.append("" if own is None else percent(row.accuracy[domain]))
        cells.append("" if row.mismatch is None else percent(row.mismatch))
        cells.append("" if row.kl is None else f"{row.kl:.4f}")
        rows.append(tuple(cells))
    return TextTable((*headings, "mismatch", "KL"), tuple(rows)).without_empty_columns()


def _difference(compared: Comparison | None) -> list[str]:
    if compared is None:
        return [""] * 4
    pair = compared.paired
    low, high = map(points, pair.interval)
    won = f"{pair.won} : {pair.lost}"
    return [points(pair.difference), pair.p_text, f"{low} to {high}", won]


def comparison_table(summary: Summary) -> TextTable:
    """Return the paired comparisons that the main table does not show."""
    several = len(summary.seeds) > 1
    headings = ["merge", "compared", "overall Δ", "p", "95 %", "won : lost"]
    headings += ["seeds won", "p, seeds"] if several else []
    rows = []
    for c in summary.comparisons:
        cells = [c.group, f"{c.second} − {c.first}", *_difference(c)]
        cells += [f"{c.seeds.wins}/{c.seeds.difference.count}", p_value(c.seeds.p)] * several
        rows.append((*cells, "" if c.mismatch is None else f"{100 * c.mismatch:+.1f}"))
    return TextTable((*headings, "mismatch Δ"), tuple(rows)).without_empty_columns()


def perplexity_table(summary: Summary) -> TextTable:
    """Return the loss of every row on plain texts, and its difference from the control."""
    names = list(dict.fromkeys(name for row in summary.rows for name in row.perplexity))
    parts = ("loss", "perplexity", "Δ loss", "p")
    headings = ["merge", "variant", *(f"{name}: {part}" for name in names for part in parts)]
    rows = []
    for row in summary.rows if names else ():
        cells = [row.group, row.label]
        for name in names:
            if name not in row.perplexity:
                cells += [""] * 4
                continue
            loss, pair = row.perplexity[name]
            change = (
                ["", ""] if pair is None else [in_nats(pair.difference, pair.error), pair.p_text]
            )
            shown = in_nats(loss.value, loss.error, signed=False)
            cells += [shown, f"{perplexity(loss.value):.4g}", *change]
        rows.append(tuple(cells))
    return TextTable(tuple(headings), tuple(rows)).without_empty_columns()


LEGEND: Final = (
    "Scores in percent, means over problems; overall: the mean of the domains' averages, ± its "
    "standard error over problems. Δ: overall against {reference}, problem by problem, with the "
    "95 % interval from drawing the problems again. p: the two models exchanged at random on each "
    "problem; for one task with one sample, McNemar's exact test. won : lost: problems on which "
    "the row is better, and worse."
)
CONTROL: Final = "the control, the same merge with averaged routers"
FIRST: Final = "the first row of the same merge"
BY_ROUTING: Final = (
    " mismatch: percent of each source's expert choices that the model does not make on the same "
    "tokens. KL: between the routing distributions, source to model."
)
BY_DOCUMENTS: Final = (
    " Loss of plain text: nats a token, ± its standard error over documents; Δ loss: against the "
    "same row as Δ, document by document. A lower loss is better."
)
BY_SEEDS: Final = (
    " Everything is repeated over seeds: a problem's score is its mean over them, and the error "
    "after ± is over seeds. p, seeds: paired t-test over seeds of the overall scores."
)


def legend(summaries: Sequence[Summary]) -> str:
    """Explain the columns that these tables have."""
    text = LEGEND.format(reference=CONTROL if any(s.table.control for s in summaries) else FIRST)
    rows = [row for summary in summaries for row in summary.rows]
    text += BY_ROUTING if any(row.mismatch is not None for row in rows) else ""
    text += BY_DOCUMENTS if any(row.perplexity for row in rows) else ""
    return text + (BY_SEEDS if any(len(s.seeds) > 1 for s in summaries) else "")


# --- files ----------------------------------------------------------------------------------------


def write_report(
    folder: Path, summaries: Sequence[Summary], *, figures: bool, title: str, about: str
) -> list[Path]:
    """Write a page, Markdown and JSON of all tables, and CSV and a figure of each."""
    from moemerge.lab.pages import tables_page  # needs jinja2

    files: dict[Path, str] = {}
    sections, parts = [], []
    for summary in summaries:
        heading, name = summary.table.title, summary.table.name
        drawn = figures and bool(summary.rows) and summary.table.entry.figure != "none"
        figure = draw_figure(summary) if drawn else None
        tables = [main_table(summary), comparison_table(summary), perplexity_table(summary)]
        section = [
            f"## {heading}",
            summary.table.entry.about,
            *(t.markdown() for t in tables if t.rows),
        ]
        if figure is not None:
            files[folder / f"{name}.svg"] = figure
            section.append(f"![{heading}]({name}.svg)")
        if summary.missing:
            section.append(f"Not measured: {'; '.join(summary.missing)}.")
        sections.append("\n\n".join(part for part in section if part))
        files[folder / f"{name}.csv"] = tables[0].csv()
        parts.append((summary, tables, figure))
    below = legend(summaries)
    text = "\n\n".join(part for part in (f"# {title}", about, *sections, below) if part)
    document = json.dumps([s.to_json() for s in summaries], indent=1, ensure_ascii=False)
    files = {
        folder / "index.html": tables_page(title, about, parts, below),
        folder / "results.md": text + "\n",
        folder / "results.json": document + "\n",
        **files,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_whole(path, content.encode())
    return list(files)


def require_matplotlib() -> None:
    """Refuse before any work if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "figures need matplotlib, which is not installed",
            hint="pip install 'moemerge[report]', or leave them out with `figures=False`",
        )


def draw_figure(summary: Summary) -> str:
    """Return an SVG of the overall scores: lines over `x` if repairs have one, otherwise bars."""
    import matplotlib

    matplotlib.use("Agg")  # files only: no display is needed
    from matplotlib import pyplot

    def error(rows: Sequence[RowSummary]) -> list[float]:
        return [100 * (row.overall.error or 0.0) for row in rows]

    by_group: dict[str, list[RowSummary]] = {}
    for row in summary.rows:
        by_group.setdefault(row.group, []).append(row)
    # Without a date and with fixed ids, the same numbers produce the same file.
    with pyplot.rc_context({"svg.hashsalt": "moemerge", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
        if any(row.x is not None for row in summary.rows):
            for group, rows in by_group.items():
                swept = sorted((r for r in rows if r.x is not None), key=lambda r: r.x or 0.0)
                values = [100 * r.overall.value for r in swept]
                axes.errorbar(
                    [r.x or 0.0 for r in swept],
                    values,
                    error(swept),
                    marker="o",
                    capsize=2,
                    label=group,
                )
                for row in rows:
                    if row.x is None:
                        axes.axhline(100 * row.overall.value, linestyle=":", color="#999999")
            axes.set_xlabel(summary.table.entry.axis)
            axes.legend(frameon=False)
        else:
            names: list[str] = []
            for group, rows in by_group.items():
                places = [len(names) + n for n in range(len(rows))]
                axes.bar(places, [100 * r.overall.value for r in rows], yerr=error(rows), capsize=2)
                names += [f"{group}\n{row.label}" for row in rows]
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_ylabel("percent, overall")
        axes.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return text.getvalue()
