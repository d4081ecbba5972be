"""Tables whose rows are paired over seeds, and the claims that they are counted for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from evidence.summary import (
    AS_MERGED,
    AVERAGED,
    EXACT,
    HARC,
    SOURCE,
    Comparison,
    RowSummary,
    Summary,
)
from moemerge.lab.significance import PairedTest
from moemerge.lab.study.tables import TextTable, p_value, percent, with_error

SIGNIFICANT = 0.05
LEGEND = (
    "Accuracy in percent of test problems solved; mean over domains ± standard error over seeds. "
    "Δ: against the first row of the same merge, paired over seeds. p, seeds: paired t-test. "
    "p, problems: McNemar's exact test over the problems of all seeds. mismatch: percent of each "
    "specialist's expert choices that the model does not make on the same held-out tokens. KL: "
    "between the routing distributions, specialist to model. untouched: percent solved of a domain "
    "that no specialist of the merge was made for, in no mean."
)


def main_table(summary: Summary) -> TextTable:
    """Return every row: accuracy, difference from the first row of its group, and routing."""
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
        "" if against is None else p_value(against.problems.p),
        "" if row.mismatch is None else with_error(row.mismatch),
        "" if row.kl is None else f"{row.kl.value:.3f}",
        *(with_error(row.untouched[d]) if d in row.untouched else "" for d in untouched),
    )


def comparison_table(summary: Summary) -> TextTable:
    """Return the paired comparisons of an experiment."""
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
        f"{c.accuracy.wins}/{c.accuracy.difference.count}",
        p_value(c.accuracy.p),
        f"{c.problems.gained} : {c.problems.lost}",
        p_value(c.problems.p),
        "" if c.mismatch is None else difference(c.mismatch),
    )


# --- counted claims ------------------------------------------------------------


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


def _settings(summary: Summary) -> str:
    seeds = ", ".join(map(str, summary.seeds))
    return (
        f"{', '.join(summary.form.shared.values())}; "
        f"seeds {seeds or 'none'}; {summary.problems} test problems a domain."
    )


def difference(test: PairedTest) -> str:
    """Format a difference with its error in points: `+1.2 ± 0.3`."""
    value = test.difference
    shown = f"{100 * value.value:+.1f}"
    return shown if value.error is None else f"{shown} ± {percent(value.error)}"


# --- files --------------------------------------------------------------------


def markdown(summary: Summary) -> str:
    """Return a table with its heading, verdicts and comparisons."""
    compared = comparison_table(summary)
    parts = [f"## {summary.form.heading}", summary.form.about, _settings(summary)]
    if summary.rows:
        parts.append("\n".join(f"* {line}" for line in verdicts(summary)))
        parts.append(main_table(summary).markdown())
    parts += [compared.markdown()] if compared.rows else []
    if summary.missing:
        parts.append(f"Not measured: {'; '.join(summary.missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def write_tables(folder: Path, summaries: Sequence[Summary]) -> list[Path]:
    """Write all tables as Markdown, and each as JSON; return the files, Markdown first."""
    files = {folder / "results.md": "\n\n".join([*map(markdown, summaries), LEGEND]) + "\n"}
    for summary in summaries:
        document = json.dumps(summary.to_json(), indent=1, ensure_ascii=False)
        files[folder / f"{summary.form.file}.json"] = document + "\n"
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
