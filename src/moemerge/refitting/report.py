"""What a refit did, as data: a row for each map, each layer's drift, totals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moemerge.linalg.cg import Status
from moemerge.lockstep.repairs import RepairReport
from moemerge.refitting.ridge import Fit
from moemerge.refitting.routers import RouterFit
from moemerge.report.files import in_markdown
from moemerge.runtime.progress import counted

SHOWN = 5  # experts that a notice names


def number(value: float | None) -> float | None:
    """Six digits; JSON has no NaN and no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class MapRow:
    """One linear map."""

    name: str  # its weight, by the name in memory
    target: str  # what it aims at: the source's `output`, or its `hidden state`
    fit: Fit

    @property
    def fits(self) -> tuple[Fit, ...]:
        return (self.fit,)

    def to_json(self) -> dict[str, Any]:
        fit = self.fit
        return {
            "map": self.name,
            "target": self.target,
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
        }


@dataclass(frozen=True)
class ExpertsRow:
    """One projection of all experts of a layer."""

    name: str
    target: str
    fits: tuple[Fit, ...]

    def to_json(self) -> dict[str, Any]:
        fits = self.fits
        return {
            "map": self.name,
            "target": self.target,
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
        }


@dataclass(frozen=True)
class RouterRow:
    """One router."""

    name: str  # its weight on disk
    fit: RouterFit

    def to_json(self) -> dict[str, Any]:
        fit = self.fit

        def numbers(values: Mapping[str, float]) -> dict[str, float | None]:
            return {name: number(value) for name, value in values.items()}

        return {
            "router": self.name,
            "status": str(fit.status),
            "steps": fit.steps,
            "tokens": dict(fit.tokens),
            "kl_before": numbers(fit.before),
            "kl_after": numbers(fit.after),
            "held_out": {
                "kl_before": numbers(fit.held_before),
                "kl_after": numbers(fit.held_after),
            },
            "kept": fit.kept,
            "share": fit.share,
        }


Row = MapRow | ExpertsRow | RouterRow


@dataclass(frozen=True)
class LayerRow:
    """A layer, or the head (None)."""

    layer: int | None
    rows: tuple[Row, ...]
    drift_before: Mapping[str, float]  # by domain; empty where it is not known
    drift_after: Mapping[str, float]
    notices: tuple[str, ...]

    @property
    def where(self) -> str:
        return "the head" if self.layer is None else f"layer {self.layer}"

    def to_json(self) -> dict[str, Any]:
        maps = [row.to_json() for row in self.rows]
        return {
            "layer": self.layer,
            "maps": maps,
            "error_left": both_left([{"maps": maps}]),
            "drift_before": {name: number(v) for name, v in self.drift_before.items()},
            "drift_after": {name: number(v) for name, v in self.drift_after.items()},
            "notices": [*self.notices, *self.warnings()],
        }

    def warnings(self) -> list[str]:
        """What a user should look at: maps that stay as merged, and routers without an end."""
        warnings = []
        complete = [row for row in self.rows if lacks_nothing(row.to_json())]
        for row in self.rows:
            if isinstance(row, RouterRow) and row.fit.status is not Status.CONVERGED:
                warnings.append(f"{self.where}: {row.name} did not converge ({row.fit.status})")
            if row in complete:
                continue
            if not isinstance(row, ExpertsRow) and row.fit.kept:
                warnings.append(
                    f"{self.where}: {row.name} stays as merged, held-out rows would lose"
                )
            if isinstance(row, ExpertsRow) and all(fit.kept for fit in row.fits):
                warnings.append(
                    f"{self.where}: all of {row.name} stays as merged, held-out rows lose"
                )
        if complete:
            warnings.append(
                f"{self.where}: nothing is missing beyond rounding in {len(complete)} of "
                f"{counted(len(self.rows), 'map')}, which stay as merged"
            )
        return warnings


def lacks_nothing(row: Mapping[str, Any]) -> bool:
    """Whether a map, all experts of one, or a router gives what its sources give, on every row."""
    sides = (errors_on(row, held_out=held) for held in (False, True))
    return all(side is None or side[0] == 0.0 for side in sides)


def few_tokens(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """By name and count, the maps that fewer tokens reach than they have inputs; and where that is
    most of them, what it may cost."""
    reached = _tokens_and_inputs(layers)
    scarce = {name: pair for name, pair in reached.items() if pair[0] < pair[1]}
    if not scarce:
        return []
    fewest = sorted(scarce.items(), key=lambda item: item[1])
    named = ", ".join(f"{name} ({t} of {inputs})" for name, (t, inputs) in fewest[:SHOWN])
    more = f" and {len(scarce) - SHOWN} more" if len(scarce) > SHOWN else ""
    told = (
        f"{len(scarce)} of {counted(len(reached), 'map')} and experts reached by fewer tokens than "
        f"inputs, which cannot determine them: {named}{more}"
    )
    if 2 * len(scarce) <= len(reached):
        return [f"{told}; more text helps"]
    shares = sorted(tokens / inputs for tokens, inputs in reached.values())
    middle = shares[len(shares) // 2]
    times = f"at least {math.ceil(1 / middle)} times as much" if middle else "far more"
    return [
        f"{told}. The text is too short for most of the model, and the result may be worse than "
        f"the merge: give {times}, or compare the two on problems of your own"
    ]


def _tokens_and_inputs(layers: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Of every linear map, and of every expert (for its wider projection)."""
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
    """A map's error before and after, on held-out rows where there are any; a router's KL."""
    return errors_on(row, held_out=True) or errors_on(row, held_out=False) or (0.0, 0.0)


def errors_on(row: Mapping[str, Any], *, held_out: bool) -> tuple[float, float] | None:
    """The same on held-out rows, or on those of the calibration; None where there are none."""
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
    """One number, one for each expert, or one for each domain."""
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, list) else [given]


def errors_left(layers: Sequence[Mapping[str, Any]], *, held_out: bool) -> dict[str, float]:
    """What is left of each kind of map's error: the mean over maps of after / before."""
    by_kind: dict[str, list[float]] = {}
    for layer in layers:
        for row in layer["maps"]:
            before, after = errors_on(row, held_out=held_out) or (0.0, 0.0)
            if before:
                by_kind.setdefault(kind_of(row), []).append(after / before)
    return {kind: math.fsum(shares) / len(shares) for kind, shares in by_kind.items()}


def both_left(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The same on the calibration's rows and on those held out (empty where there are none)."""
    return {
        name: {kind: number(v) for kind, v in errors_left(layers, held_out=held).items()}
        for name, held in (("calibration", False), ("held_out", True))
    }


def kind_of(row: Mapping[str, Any]) -> str:
    """What a row of the report is of: q_proj, experts.down_proj, router, ..."""
    return "router" if "router" in row else kind_of_map(row["map"])


def kind_of_map(name: str) -> str:
    """The last word of a map's name, or the last two of an expert's."""
    words = [word for word in name.split(".") if word != "weight" and not word.isdigit()]
    return ".".join(words[-2:]) if "expert" in name else words[-1]


@dataclass(frozen=True, kw_only=True)
class RefitReport(RepairReport):
    """The `refit` part of `moemerge_report.json`."""

    part = "refit"
    section = "Refit"
    done = "Refitted"
    summary = "its linear maps refitted in closed form to what the sources give"
    held_out = "the rows held out (no weight was fitted to them, but they chose λ)"

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

    def own_json(self) -> dict[str, Any]:
        return {
            "tokens": dict(self.tokens),
            "held_out_tokens": dict(self.held_out_tokens),
            **({"requantised": dict(self.requantised)} if self.requantised else {}),
        }

    @property
    def words(self) -> str:
        """What was done, and a table of what is left of each kind of map's error."""
        total, settings = self.totals, self.settings
        texts = ", ".join(
            f"{name} ({counted(tokens, 'token')})" for name, tokens in self.tokens.items()
        )
        complete = ""
        if total["complete"]:
            complete = f", and {total['complete']}, since nothing was missing on this text"
        lines = [
            f"{counted(total['maps'], 'linear map')} and {counted(total['routers'], 'router')} "
            f"fitted to what each source gives on its own text: {texts}. Ridge "
            f"{settings['ridge']}, parts {', '.join(settings['parts'])}; "
            f"{counted(total['kept'] - total['complete'], 'map')} left as merged, since rows held "
            f"out would have lost{complete}. "
            "What is left of each kind of map's error, as means over maps:",
            "",
            "| map | error left, calibration rows | rows held out |",
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
    """How many maps of a row stay as merged for want of anything missing."""
    if "experts" not in row:
        return int(row["kept"] and lacks_nothing(row))
    side = row["experts"]
    errors = list(zip(side["error_before"], side["held_out"]["error_before"], strict=True))
    return sum(not any(errors[expert]) for expert in row["kept"])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
