"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from moemerge.architectures.describe import Description
    from moemerge.merging.report import MergeReport

SHOWN_NAMES = 3  # of each reason, without --verbose


def size(nbytes: float) -> str:
    """1234567890 -> `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def count(number: float) -> str:
    """646_000_000 -> `646 M`."""
    for unit in ("", " k", " M"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g} B"


def facts(rows: list[tuple[str, str]]) -> Table:
    """Two plain columns: a word and what is true of it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, escape(value))
    return table


def merge_report(report: MergeReport, *, verbose: bool) -> RenderableType:
    rows = [
        ("method", report.method + (f"; {report.router}" if report.router else "")),
        (
            "output",
            f"{report.output_tensors} tensors, {count(report.output_parameters)} parameters, "
            f"{size(report.output_bytes)}, {' and '.join(report.dtypes)}",
        ),
        ("reads", size(report.bytes_read)),
        ("largest step", f"{size(report.peak_block_bytes)} of memory"),
    ]
    if report.seconds is not None:
        speed = report.output_bytes / max(report.seconds, 1e-9)
        rows.append(("time", f"{report.seconds:.1f} s on {report.device} ({size(speed)}/s)"))
        rows.append(("folder", report.output or ""))
    else:
        rows.append(("status", "ready to run; nothing was written"))
    return Group(facts(rows), "", _inputs(report, verbose=verbose))


def _inputs(report: MergeReport, *, verbose: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("input", "tensors", "merged", "copied", "dropped"):
        table.add_column(column, justify="left" if column == "input" else "right")
    table.add_column("why", overflow="fold")
    for m in report.models:
        copied, dropped = (sum(map(len, group.values())) for group in (m.copied, m.dropped))
        why = [
            _names(reason, names, verbose=verbose)
            for group in (m.copied, m.dropped)
            for reason, names in group.items()
        ]
        table.add_row(
            escape(m.name),
            str(m.tensors),
            str(m.merged),
            str(copied),
            str(dropped),
            escape("\n".join(why)),
        )
    return table


def _names(reason: str, names: list[str], *, verbose: bool) -> str:
    shown = names if verbose else names[:SHOWN_NAMES]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{reason}: {', '.join(shown)}{more}"


def description_table(description: Description) -> RenderableType:
    """What `inspect` shows; a line that does not apply is left out."""
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
        ("bytes", f"{size(d.total_bytes)}: {_shares(d)}"),
        ("dtypes", ", ".join(f"{k} ({count(v)})" for k, v in d.parameters_by_dtype.items())),
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
    return ", ".join(f"{role} {size(nbytes)}" for role, nbytes in order if nbytes)


def _calibration(d: Description) -> str:
    if not d.experts:
        return ""
    if d.calibratable:
        return "possible" + (f" ({d.reason})" if d.reason else "")
    return f"not possible: {d.reason}"


def methods_table(methods: list[dict[str, Any]]) -> RenderableType:
    """A paragraph for each method: what it does, then its parameters with their defaults."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for method in methods:
        base = {"required": "needs base_model", "optional": "base_model optional"}
        words = [
            base.get(method["base_model"], ""),
            f"needs {method['statistics']} statistics" if method["statistics"] else "",
            _parameter_words("per model", method["per_model"]),
            _parameter_words("options", method["options"]),
        ]
        second = "; ".join(word for word in words if word)
        table.add_row(
            method["method"], f"{escape(method['what_it_does'])}\n[dim]{escape(second)}[/]"
        )
    return table


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
