"""The report of a refit: a row for each map, the drift of each layer, totals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from moemerge.checkpoint.model_card import in_markdown
from moemerge.checkpoint.quantised.tensor import Rounding
from moemerge.config.repair_settings import REFIT
from moemerge.repairs.least_squares import Fit
from moemerge.repairs.refit_router import RouterFit
from moemerge.repairs.report import RepairReport
from moemerge.routing.cg import Status
from moemerge.runtime.progress import counted

MOST_NAMED = 5  # maps that a warning names
ENOUGH_TOKENS = 4  # for each input, of the middle map: with fewer, random models got worse


def number(value: float | None) -> float | None:
    """Round to six digits; JSON has no NaN and no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


Row = dict[str, Any]  # a row of the report, as plain JSON data


def map_row(name: str, target: str, fit: Fit) -> Row:
    """Return the row of one linear map.

    `name` is its weight, by the name in memory. `target` is the source's `output`, or its `hidden
    state`.
    """
    return {
        "map": name,
        "target": target,
        "ridge": number(fit.ridge),
        "tokens": fit.tokens,
        "inputs": fit.inputs,
        "error_before": number(fit.before),
        "error_after": number(fit.after),
        "held_out": {
            "tokens": fit.held_tokens,
            "error_before": number(fit.held_before),
            "error_after": number(fit.held_after),
        },
        "kept": fit.kept,
        **quantised_json([fit]),
    }


def trained_row(name: str, target: str, fit: Fit, rate: float) -> Row:
    """Return the row of all maps of a layer, or of the head, that were trained together."""
    row = map_row(name, target, fit)
    del row["ridge"]
    return {**row, "rate": rate}


def experts_row(name: str, target: str, fits: Sequence[Fit]) -> Row:
    """Return the row of one projection of all experts of a layer."""
    return {
        "map": name,
        "target": target,
        "ridge": number(fits[0].ridge),
        "inputs": fits[0].inputs,
        "experts": {
            "tokens": [fit.tokens for fit in fits],
            "error_before": [number(fit.before) for fit in fits],
            "error_after": [number(fit.after) for fit in fits],
            "held_out": {
                "tokens": [fit.held_tokens for fit in fits],
                "error_before": [number(fit.held_before) for fit in fits],
                "error_after": [number(fit.held_after) for fit in fits],
            },
        },
        "kept": [expert for expert, fit in enumerate(fits) if fit.kept],
        **quantised_json(fits),
    }


def quantised_json(fits: Sequence[Fit]) -> dict[str, Any]:
    """Return the cost of rounding maps to a quantised format, if any was rounded.

    `error_before`, `unrounded` and `error_after` are of the same maps and rows.
    """
    rounded = [(fit, fit.quantised) for fit in fits if fit.quantised is not None]
    if not rounded:
        return {}
    both = [
        (fit.before, fit.after)
        if fit.held_before is None or fit.held_after is None
        else (fit.held_before, fit.held_after)
        for fit, _ in rounded
    ]
    return {
        "quantised": {
            "format": rounded[0][1].format,
            "squared_error": math.fsum(own.error for _, own in rounded),
            "error_before": number(math.fsum(before for before, _ in both)),
            "unrounded": number(math.fsum(own.unrounded for _, own in rounded)),
            "error_after": number(math.fsum(after for _, after in both)),
        }
    }


def with_fits(sums: Mapping[str, Rounding], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the errors of quantising, by format: of weights, and of the maps' outputs.

    `sums` are those of writing, of which most tensors were already rounded after their fit.
    """
    rows = [row["quantised"] for layer in layers for row in layer["maps"] if "quantised" in row]
    found: dict[str, Any] = {}
    for name, written in sums.items():
        own = [row for row in rows if row["format"] == name]
        error = written.error + math.fsum(row["squared_error"] for row in own)
        relative = math.sqrt(error / written.size) if written.size else 0
        found[name] = {"tensors": written.tensors, "relative_error": relative}
        before = math.fsum(row["error_before"] for row in own)
        if before:
            found[name]["error_left"] = {
                end: number(math.fsum(row[key] for row in own) / before)
                for end, key in (("unrounded", "unrounded"), ("rounded", "error_after"))
            }
    return found


def router_row(name: str, fit: RouterFit) -> Row:
    """Return the row of one router; `name` is its weight on disk."""
    return {
        "router": name,
        "status": str(fit.status),
        "steps": fit.steps,
        "tokens": dict(fit.tokens),
        "kl_before": _numbers(fit.before),
        "kl_after": _numbers(fit.after),
        "held_out": {
            "kl_before": _numbers(fit.held_before),
            "kl_after": _numbers(fit.held_after),
        },
        "kept": fit.kept,
        "share": fit.share,
    }


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: number(value) for name, value in values.items()}


def layer_row(
    layer: int | None,
    maps: Sequence[Row],
    drift_before: Mapping[str, float],
    drift_after: Mapping[str, float],
    notices: Sequence[str],
) -> Row:
    """Return the row of a layer, or of the head (None). Drift is by domain, {} if unknown."""
    return {
        "layer": layer,
        "maps": list(maps),
        "error_left": both_left([{"maps": maps}]),
        "drift_before": _numbers(drift_before),
        "drift_after": _numbers(drift_after),
        "notices": [*notices, *_warnings("the head" if layer is None else f"layer {layer}", maps)],
    }


def _warnings(where: str, maps: Sequence[Row]) -> list[str]:
    """Return warnings about kept maps, and about routers that did not converge."""
    warnings = []
    complete = [row for row in maps if matches_sources(row)]
    for row in maps:
        if "router" in row and row["status"] != Status.CONVERGED:
            warnings.append(f"{where}: {row['router']} did not converge ({row['status']})")
        if row in complete:
            continue
        if "experts" in row:
            if len(row["kept"]) == len(row["experts"]["tokens"]):
                warnings.append(
                    f"{where}: no expert of {row['map']} is changed: held-out rows would lose"
                )
        elif row["kept"]:
            name = row.get("router") or row["map"]
            warnings.append(f"{where}: {name} keeps its merged weights: held-out rows would lose")
    if complete:
        warnings.append(
            f"{where}: {len(complete)} of {counted(len(maps), 'map')} match their "
            "sources within rounding and keep their merged weights"
        )
    return warnings


def progress_of(row: Row) -> str:
    """Return what a finished layer reports after its name: maps, remaining error and drift."""
    errors = [map_errors(m) for m in row["maps"] if "router" not in m]
    before, after = sum(b for b, _ in errors), sum(a for _, a in errors)
    left = f", {after / before:.0%} of the error left" if before else ""
    drift = ""
    if row["drift_before"] and row["drift_after"]:
        old, new = (statistics.fmean(row[f"drift_{end}"].values()) for end in ("before", "after"))
        drift = f", drift {old:.3g} → {new:.3g}"
    trained = any("rate" in m for m in row["maps"])
    maps = "" if trained else f": {counted(len(row['maps']), 'map')}"
    return f"{maps}{left}{drift}"


def matches_sources(row: Mapping[str, Any]) -> bool:
    """Return whether a map, all experts, or a router already matches its sources on every row."""
    sides = (errors_on(row, held_out=held) for held in (False, True))
    return all(side is None or side[0] == 0.0 for side in sides)


def few_tokens(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return warnings about maps that few tokens reach, and about text too short for the model."""
    reached = _tokens_and_inputs(layers)
    scarce = {name: pair for name, pair in reached.items() if pair[0] < pair[1]}
    warnings = []
    if scarce:
        fewest = sorted(scarce.items(), key=lambda item: item[1])
        named = ", ".join(f"{name} ({t} of {inputs})" for name, (t, inputs) in fewest[:MOST_NAMED])
        more = f" and {len(scarce) - MOST_NAMED} more" if len(scarce) > MOST_NAMED else ""
        warnings.append(
            f"{len(scarce)} of {counted(len(reached), 'map')} and experts reached by fewer tokens "
            f"than inputs, which cannot determine them: {named}{more}; more text helps"
        )
    shares = [tokens / inputs for tokens, inputs in reached.values() if inputs]
    middle = statistics.median(shares) if shares else math.inf
    if middle < ENOUGH_TOKENS:
        factor = math.ceil(ENOUGH_TOKENS / middle) if middle else 0
        times = f"at least {factor} times as much" if factor else "far more"
        warnings.append(
            "the text is short for most of the model, and the result may be worse than the merge: "
            f"give {times}, or compare the two on problems of your own"
        )
    return warnings


def _tokens_and_inputs(layers: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return tokens and inputs of every linear map and expert (of its wider projection)."""
    reached: dict[str, tuple[int, int]] = {}
    for layer in layers:
        for row in layer["maps"]:
            if "experts" in row:
                for expert, tokens in enumerate(row["experts"]["tokens"]):
                    name = f"layer {layer['layer']} expert {expert}"
                    inputs = max(row["inputs"], reached.get(name, (0, 0))[1])
                    reached[name] = (tokens, inputs)
            elif "router" not in row:
                reached[row["map"]] = (row["tokens"], row["inputs"])
    return reached


# --- totals -------------------------------------------------------------------------------------


def map_errors(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return a map's error before and after, on held-out rows if there are any; a router's KL."""
    return errors_on(row, held_out=True) or errors_on(row, held_out=False) or (0.0, 0.0)


def errors_on(row: Mapping[str, Any], *, held_out: bool) -> tuple[float, float] | None:
    """Return the same on held-out rows or on calibration rows; None if there are none."""
    side = row.get("experts", row)
    side = side["held_out"] if held_out else side
    figure = "kl" if "router" in row else "error"
    pairs = list(
        zip(*(_values(side[f"{figure}_{end}"]) for end in ("before", "after")), strict=True)
    )
    known = [(before, after or 0.0) for before, after in pairs if before is not None]
    if not known:
        return None
    return math.fsum(before for before, _ in known), math.fsum(after for _, after in known)


def _values(given: Any) -> list[float | None]:
    """Return one number, the numbers of all experts, or those of all domains as a list."""
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, list) else [given]


def errors_left(layers: Sequence[Mapping[str, Any]], *, held_out: bool) -> dict[str, float]:
    """Return the remaining error of each kind of map: the mean over maps of after / before."""
    by_kind: dict[str, list[float]] = {}
    for layer in layers:
        for row in layer["maps"]:
            before, after = errors_on(row, held_out=held_out) or (0.0, 0.0)
            if before:
                by_kind.setdefault(kind_of(row), []).append(after / before)
    return {kind: math.fsum(shares) / len(shares) for kind, shares in by_kind.items()}


def both_left(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return the same on calibration rows and on held-out rows ({} if there are none)."""
    return {
        name: _numbers(errors_left(layers, held_out=held))
        for name, held in (("calibration", False), ("held_out", True))
    }


def kind_of(row: Mapping[str, Any]) -> str:
    """Return the kind of map of a row: q_proj, experts.down_proj, router, ..."""
    return "router" if "router" in row else kind_of_map(row["map"])


def kind_of_map(name: str) -> str:
    """Return the last word of a map's name, or the last two of an expert's."""
    words = [word for word in name.split(".") if word != "weight" and not word.isdigit()]
    return ".".join(words[-2:]) if "expert" in name else words[-1]


@dataclass(frozen=True, kw_only=True)
class RefitReport(RepairReport):
    """The `refit` part of `moemerge_report.json`."""

    repair = REFIT

    tokens: Mapping[str, int]
    held_out_tokens: Mapping[str, int]
    requantised: Mapping[str, Any] = field(default_factory=dict)  # the error of rounding, by format

    @property
    def totals(self) -> dict[str, Any]:
        maps = [row for layer in self.layers for row in layer["maps"]]
        fits = [row for row in maps if "router" not in row]
        experts = sum(len(row["experts"]["tokens"]) for row in fits if "experts" in row)
        last = [layer for layer in self.layers if layer["drift_after"]]
        return {
            "maps": sum("experts" not in row for row in fits) + experts,
            "kept": sum(
                len(row["kept"]) if isinstance(row["kept"], list) else int(row["kept"])
                for row in fits
            ),
            "complete": sum(map(_complete, fits)),
            "routers": sum("router" in row for row in maps),
            "error_left": both_left(self.layers),
            "drift_before": dict(last[-1]["drift_before"]) if last else {},
            "drift_after": dict(last[-1]["drift_after"]) if last else {},
        }

    @property
    def closing_notices(self) -> tuple[str, ...]:
        return tuple(few_tokens(self.layers))

    @property
    def not_held_out(self) -> tuple[str, ...]:
        return tuple(name for name, tokens in self.held_out_tokens.items() if not tokens)

    def with_rounding(self, errors: Mapping[str, Any]) -> Self:
        return replace(self, requantised=with_fits(errors, self.layers))

    def own_json(self) -> dict[str, Any]:
        return {
            "tokens": dict(self.tokens),
            "held_out_tokens": dict(self.held_out_tokens),
            **({"requantised": dict(self.requantised)} if self.requantised else {}),
        }

    @property
    def card_section(self) -> str:
        """What was fitted, and tables of the remaining error and drift."""
        total, settings = self.totals, self.settings
        texts = ", ".join(
            f"{name} ({counted(tokens, 'token')})" for name, tokens in self.tokens.items()
        )
        complete = ""
        if total["complete"]:
            complete = f", and {total['complete']}, since they matched on this text"
        how = f"Ridge {settings['ridge']}"
        fitted = f"{counted(total['maps'], 'linear map')} and {counted(total['routers'], 'router')}"
        if settings.get("solver") == "gradient":
            how = f"{settings['steps']} gradient steps each"
            fitted = f"All maps of a layer together ({total['maps']} fits, with the head)"
        lines = [
            f"{fitted} fitted to each source's outputs on its own text: {texts}. {how}, "
            f"parts {', '.join(settings['parts'])}; "
            f"{counted(total['kept'] - total['complete'], 'map')} kept their merged weights, since "
            f"held-out rows would have lost{complete}. "
            "Remaining error of each kind of map, as means over maps:",
            "",
            "| map | remaining error, calibration rows | held-out rows |",
            "|---|---|---|",
            *(
                f"| {kind} | {left:.1%} | {_share(total['error_left']['held_out'].get(kind))} |"
                for kind, left in total["error_left"]["calibration"].items()
            ),
        ]
        if total["drift_after"]:
            lines += ["", "| domain | drift as merged | drift refitted |", "|---|---|---|"]
            for name, after in total["drift_after"].items():
                before = total["drift_before"].get(name)
                shown = "" if before is None else f"{before:.3g}"
                lines.append(f"| {in_markdown(name)} | {shown} | {after:.3g} |")
        return "\n".join(lines)


def _complete(row: Mapping[str, Any]) -> int:
    """Return how many of a row's maps keep their weights because they already match."""
    if "experts" not in row:
        return int(row["kept"] and matches_sources(row))
    side = row["experts"]
    errors = list(zip(side["error_before"], side["held_out"]["error_before"], strict=True))
    return sum(not any(errors[expert]) for expert in row["kept"])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
