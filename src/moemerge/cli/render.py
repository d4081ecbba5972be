"""What commands print: tables whose numbers are never truncated, and samples of models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from moemerge.checkpoint.tensors import format_size
from moemerge.cli.console import STDOUT, UNLIMITED, out
from moemerge.cli.flags import ADVANCED, Reporting
from moemerge.errors import UsageError
from moemerge.lab import api as lab_api
from moemerge.runtime import ranks
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from moemerge.families.describe import Description
    from moemerge.merging.report import MergeReport
    from moemerge.repairs.report import RepairReport

SHOWN_NAMES = 3  # names per reason without --verbose


class NumberTable:
    """A table whose numbers are never truncated.

    If it is wider than the terminal, it is split into parts below each other. The first `keys`
    columns identify a row and are repeated in every part. Columns in `words` are left-aligned and
    may wrap; the others hold numbers.
    """

    def __init__(
        self,
        headings: Sequence[str],
        *,
        keys: int = 1,
        words: Collection[int] = (0,),
        title: str = "",
    ) -> None:
        self._headings = headings
        self._keys = keys
        self._words = words
        self._title = title
        self._rows: list[tuple[str | Text, ...]] = []

    def add(self, *cells: str | Text) -> None:
        """Add a row; strings are printed verbatim, without markup."""
        self._rows.append(cells)

    def _part(self, columns: Sequence[int]) -> Table:
        title = escape(self._title) or None
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        for column in columns:
            heading = self._headings[column]
            if column in self._words:
                table.add_column(Text(heading), overflow="fold")
            else:
                texts = [heading, *(str(row[column]) for row in self._rows)]
                width = max(cell_len(line) for text in texts for line in text.split("\n"))
                table.add_column(Text(heading), justify="right", no_wrap=True, min_width=width)
        for row in self._rows:
            cells = (row[column] for column in columns)
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
        return table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._part(range(len(self._headings))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        keys, rest = range(self._keys), range(self._keys, len(self._headings))
        while rest:
            for count in range(len(rest), 0, -1):
                part = self._part([*keys, *rest[:count]])
                least = _least(console, part)
                if least <= options.max_width:
                    break
            rest = rest[count:]
            # A column that is too wide stays whole; the terminal wraps it.
            yield from console.render(part, options.update(width=max(options.max_width, least)))
            if rest:
                yield ""


def _least(console: Console, table: RenderableType) -> int:
    """Return the least width at which no number is truncated."""
    options = console.options.update(width=UNLIMITED)
    return Measurement.get(console, options, table).minimum


def count(number: float) -> str:
    """Return a short form of a count: 646_000_000 -> `646 M`."""
    for unit in ("", " k", " M"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g} B"


def facts(rows: list[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, escape(value))
    return table


def requantised(errors: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a line for each quantised format that was written."""
    return [
        (
            "requantised",
            f"{counted(one['tensors'], 'tensor')} as {words}, relative error of rounding "
            f"{one['relative_error']:.2%}" + _left(one.get("error_left")),
        )
        for words, one in errors.items()
    ]


def _left(error: Mapping[str, float] | None) -> str:
    """Return what rounding cost the fitted maps, if they were rounded one by one."""
    if error is None:
        return ""
    return f"; {error['rounded']:.1%} of the maps' error left, {error['unrounded']:.1%} unrounded"


def merge_report(report: MergeReport, *, verbose: bool) -> RenderableType:
    rows = [("method", report.method)]
    if report.wraps:
        rows.append(("wrapped by", ", ".join(report.wraps)))
    if report.coefficients:
        rows.append(("coefficients", report.coefficients["file"]))
    if report.router:
        rows.append(("routers", report.router))
    rows += requantised(report.requantised)
    if report.tasks:
        parts = [f"{n} {format_size(t['bytes'])}" for n, t in report.tasks["tasks"].items()]
        rows.append(("kept", f"{report.tasks['keep']} of {', '.join(parts)}"))
    rows += [
        (
            "output",
            f"{counted(report.output_tensors, 'tensor')}, {count(report.output_parameters)} "
            f"parameters, {format_size(report.output_bytes)}, {' and '.join(report.dtypes)}",
        ),
        ("reads", format_size(report.bytes_read) + _from_disk(report.disk_bytes_read)),
        ("largest step", f"{format_size(report.peak_block_bytes)} of memory"),
    ]
    if report.seconds is not None:
        merging = report.seconds - (report.statistics_seconds or 0.0)
        speed = format_size(round(report.output_bytes / max(merging, 1e-9)))
        rows.append(("time", f"{merging:.1f} s on {report.device} ({speed}/s)"))
        if report.statistics_seconds is not None:
            rows.append(("statistics", f"{report.statistics_seconds:.1f} s before that"))
        rows.append(("folder", report.output or ""))
    else:
        rows.append(("status", "ready to run; nothing was written"))
    return Group(facts(rows), "", _inputs(report, verbose=verbose))


def _from_disk(nbytes: int | None) -> str:
    return "" if nbytes is None else f" of files, {format_size(nbytes)} from the disk"


def _inputs(report: MergeReport, *, verbose: bool) -> NumberTable:
    headings = ("input", "tensors", "merged", "copied", "dropped", "why")
    table = NumberTable(headings, words=(0, headings.index("why")))
    for m in report.models:
        groups = (m.copied, m.dropped)
        # A reason for the whole model needs no names.
        why = [
            reason if len(names) == m.tensors else _names(reason, names, verbose=verbose)
            for group in groups
            for reason, names in group.items()
        ]
        copied, dropped = (sum(map(len, group.values())) for group in groups)
        table.add(m.name, *map(str, (m.tensors, m.merged, copied, dropped)), "\n".join(why))
    return table


def _names(reason: str, names: list[str], *, verbose: bool) -> str:
    shown = names if verbose else names[:SHOWN_NAMES]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{reason}: {', '.join(shown)}{more}"


def description_table(description: Description) -> RenderableType:
    """Return the table of `inspect`; lines that do not apply are left out."""
    d = description
    layers = f"{d.layers}"
    if d.moe_layers:
        layers += f", {d.moe_layers} with experts" if d.dense_layers else ", all with experts"
    if d.extra_layers:
        layers += f"; {d.extra_layers} more for multi-token prediction"
    rows = [
        ("family", d.family or f"{d.model_type or 'unknown'} (not in the table of MoE families)"),
        ("layers", layers),
        ("experts", _experts(d)),
        ("gate", d.gate or ""),
        ("layout", d.layout if d.experts else ""),
        (
            "parameters",
            f"{count(d.parameters)}, {count(d.active_parameters)} active, "
            f"{count(d.router_parameters)} in routers",
        ),
        ("bytes", f"{format_size(d.total_bytes)}: {_shares(d)}"),
        ("dtypes", ", ".join(f"{k} ({count(v)})" for k, v in d.parameters_by_dtype.items())),
        ("stored as", _stored_as(d) if d.quantised else ""),
        ("embeddings", "tied to the head" if d.tied else "not tied"),
        ("quantised", d.quantised or ""),
        ("calibration", _calibration(d)),
        ("note", d.notice or ""),
    ]
    return facts([(key, value) for key, value in rows if value])


def _experts(d: Description) -> str:
    if not d.experts:
        return "none (dense)"
    shared = ", and shared experts" if d.shared_experts else ""
    return f"{d.experts} a layer, {d.top_k} for each token{shared}"


def _shares(d: Description) -> str:
    order = sorted(d.bytes_by_role.items(), key=lambda item: -item[1])
    return ", ".join(f"{role} {format_size(nbytes)}" for role, nbytes in order if nbytes)


def _stored_as(d: Description) -> str:
    """Return the storage format of each role: `float8_e4m3fn in 128 x 128 blocks: expert`."""
    roles: dict[str, list[str]] = {}
    for role, kinds in d.stored_by_role.items():
        for kind in kinds:
            roles.setdefault(kind, []).append(role)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in roles.items())


def _calibration(d: Description) -> str:
    if not d.experts:
        return ""
    if d.calibratable:
        return "possible" + (f" ({d.reason})" if d.reason else "")
    return f"not possible: {d.reason}"


def methods_table(methods: list[dict[str, Any]]) -> RenderableType:
    """Return a paragraph for each method: summary, requirements, parameters with defaults."""
    table = facts([])
    group = None
    memory = {"units": "a whole matrix in memory", "runs": ""}
    time = {"decompositions": "decomposes every matrix", "steps": "hundreds of steps a matrix"}
    for method in methods:
        if method["group"] != group:
            before = "" if group is None else "\n"
            table.add_row("", f"{before}[bold]{escape(method['group'])}[/]")
            group = method["group"]
        base = {"required": "needs base_model", "optional": "base_model optional"}
        words = [
            base.get(method["base_model"], ""),
            f"needs {method['statistics']} statistics" if method["statistics"] else "",
            memory[method["memory"]],
            time.get(method["time"], ""),
            _parameter_words("per model", method["per_model"]),
            _parameter_words("options", method["options"]),
        ]
        table.add_row(method["method"], _paragraph(method, words))
    return table


def wrappers_table(wrappers: list[dict[str, Any]]) -> RenderableType:
    """Return a paragraph for each wrapper, as for methods."""
    table = facts([])
    for wrapper in wrappers:
        kind = wrapper["statistics"]
        words = [
            f"needs {kind} statistics of the base" if kind else "",
            _parameter_words("options", wrapper["options"]),
        ]
        table.add_row(wrapper["wrapper"], _paragraph(wrapper, words))
    return table


def _paragraph(entry: Mapping[str, Any], words: list[str]) -> str:
    second = "; ".join(filter(None, words))
    dim = f"\n[dim]{escape(second)}[/]" if second else ""
    return f"{escape(entry['what_it_does'])}{dim}"


def _parameter_words(kind: str, parameters: list[dict[str, Any]]) -> str:
    def word(p: dict[str, Any]) -> str:
        default = p["default"]
        if default == "required":
            return f"{p['name']} (required)"
        if default is None:
            return str(p["name"])
        return f"{p['name']}={str(default).lower() if isinstance(default, bool) else default}"

    return f"{kind}: {', '.join(map(word, parameters))}" if parameters else ""


def families_table(families: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for column in ("family", "routers can be calibrated", "also known as"):
        table.add_column(column, overflow="fold")
    for f in families:
        served = f["calibration"] + (f": {f['why']}" if f["why"] else "")
        table.add_row(f["family"], escape(served), ", ".join(f["also"]))
    return table


def repair_table(report: RepairReport, *, verbose: bool) -> Any:
    """Return the report of a repair as a table."""
    from moemerge.cli import repair_tables

    return getattr(repair_tables, f"{report.repair.verb}_report")(report, verbose=verbose)


BUILT_IN = ["The capital of France is", "2 + 2 ="]  # with -v and without --sample


def _not_empty(prompts: list[str] | None) -> list[str] | None:
    """Refuse an empty prompt before the work starts."""
    if prompts and not all(prompt.strip() for prompt in prompts):
        raise UsageError("--sample: the prompt is empty", hint="write some text after it")
    return prompts


Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        metavar="PROMPT",
        callback=_not_empty,
        help="Finally print a short completion by each model (-v: of two built-in prompts). "
        "Repeat it.",
        rich_help_panel=ADVANCED,
    ),
]


def show_samples(
    prompts: list[str] | None,
    result: Path,
    others: Mapping[str, str],
    device: str,
    reporting: Reporting,
) -> None:
    """Print a short greedy completion of each prompt by the result and each other model."""
    prompts = prompts or (BUILT_IN if reporting.verbose else None)
    if not prompts or reporting.quiet or reporting.json == STDOUT or not ranks.leads():
        return
    with reporting.progress() as bar:
        models = {"OUT": str(result), **others}
        made = lab_api.sample(models, prompts, device=device, progress=bar)
    for name, texts in made.items():
        for prompt, text in zip(prompts, texts, strict=False):
            out.print(f"{name}: {prompt!r} -> {text!r}", markup=False, soft_wrap=True)
