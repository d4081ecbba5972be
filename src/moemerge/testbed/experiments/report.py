"""What a run leaves behind: a JSON and a Markdown file a table, figures, and one page of all."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from moemerge.testbed.experiments.plots import draw
from moemerge.testbed.experiments.summary import Summary
from moemerge.testbed.experiments.tables import (
    TextTable,
    comparison_table,
    main_table,
    verdicts,
)

PAGE = "index.html"
ALL_TABLES = "results.md"
LEGEND = (
    "Accuracy in percent of test problems solved; mean over domains ± standard error over seeds. "
    "Δ: against the first row of the same merge, paired over seeds. p, seeds: paired t-test. "
    "p, problems: McNemar's exact test over the problems of all seeds. mismatch: percent of each "
    "specialist's expert choices that the model does not make on the same held-out tokens. KL: "
    "between the routing distributions, specialist to model."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1em 0; }
th, td { padding: .15em .7em; text-align: right; white-space: nowrap; }
th.word, td.word { text-align: left; }
th { border-bottom: 1.5px solid; } tr.first td { border-top: 1px solid #ccc; }
.scroll { overflow-x: auto; } .legend { color: #555; } img { max-width: 100%; }
"""


def write_report(folder: Path, summaries: Sequence[Summary], *, figures: bool) -> list[Path]:
    """Write everything; the files, the page first."""
    written: list[Path] = []
    drawn: dict[str, Path] = {}
    for summary in summaries:
        written.append(_write(folder / f"{summary.name}.json", _json(summary)))
        if figures and summary.rows:
            files = draw(summary, folder / summary.name)
            drawn[summary.name] = files[0]
            written += files
        written.append(_write(folder / f"{summary.name}.md", markdown(summary)))
    pages = "\n\n".join(markdown(s, drawn.get(s.name)) for s in summaries)
    page = _page(summaries, drawn)
    written.insert(0, _write(folder / ALL_TABLES, f"# Results\n\n{LEGEND}\n\n{pages}"))
    written.insert(0, _write(folder / PAGE, page))
    return written


def markdown(summary: Summary, figure: Path | None = None) -> str:
    """A table with its heading, what it says, and its comparisons."""
    parts = [f"## {title(summary)}", summary.experiment.about, settings(summary)]
    if summary.rows:
        parts.append(main_table(summary).markdown())
        parts.append("\n".join(f"* {line}" for line in verdicts(summary)))
    compared = comparison_table(summary)
    if compared is not None:
        parts.append(compared.markdown())
    if figure is not None:
        parts.append(f"![{title(summary)}]({figure.name})")
    if summary.missing:
        parts.append(f"Not measured: {'; '.join(summary.missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def title(summary: Summary) -> str:
    return f"{summary.experiment.title}, {summary.regime} specialists"


def settings(summary: Summary) -> str:
    seeds = ", ".join(map(str, summary.seeds))
    return (
        f"{summary.arch}, {summary.preset}, {summary.regime}; "
        f"seeds {seeds or 'none'}; {summary.problems} test problems a domain."
    )


def _page(summaries: Sequence[Summary], drawn: dict[str, Path]) -> str:
    body = [f'<h1>Results</h1><p class="legend">{html.escape(LEGEND)}</p>']
    for summary in summaries:
        body.append(f"<h2>{html.escape(title(summary))}</h2>")
        body.append(f"<p>{html.escape(summary.experiment.about)}</p>")
        body.append(f'<p class="legend">{html.escape(settings(summary))}</p>')
        if summary.name in drawn:
            # Inside the page, so that it can be passed on as one file.
            body.append(drawn[summary.name].with_suffix(".svg").read_text(encoding="utf-8"))
        body.append(_html(main_table(summary)))
        body.append("".join(f"<p>{html.escape(line)}</p>" for line in verdicts(summary)))
        compared = comparison_table(summary)
        body.append("" if compared is None else _html(compared))
        if summary.missing:
            body.append(f"<p>Not measured: {html.escape('; '.join(summary.missing))}.</p>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>moemerge testbed</title><style>{_STYLE}</style></head><body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _html(table: TextTable) -> str:
    def cell(tag: str, number: int, text: str) -> str:
        kind = ' class="word"' if number < table.left else ""
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", n, text) for n, text in enumerate(table.headings))
    lines, group = [], None
    for row in table.rows:
        first = ' class="first"' if row[0] != group else ""
        group = row[0]
        lines.append(
            f"<tr{first}>{''.join(cell('td', n, text) for n, text in enumerate(row))}</tr>"
        )
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _json(summary: Summary) -> str:
    return json.dumps(summary.to_json(), indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> Path:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path
