"""The report of a calibration: figures of each router before and after, totals, the card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moemerge.checkpoint.model_card import in_markdown
from moemerge.config.repair_settings import CALIBRATION
from moemerge.repairs.report import RepairReport
from moemerge.repairs.routers import SkippedRouter
from moemerge.routing import DomainFeatures, Measured, RouterProblem, Status
from moemerge.routing.measure import measure_routers
from moemerge.runtime.progress import counted
from moemerge.runtime.timing import Stopwatch

if TYPE_CHECKING:
    from moemerge.repairs.harc import SolvedRouter

Row = dict[str, Any]
PER_DOMAIN = ("kl_before", "kl_after", "mismatch_before", "mismatch_after")


@dataclass(frozen=True)
class Agreement:
    """Routing figures by domain, for the merged router and for the new one."""

    before: Mapping[str, Measured]
    after: Mapping[str, Measured]

    def to_json(self) -> dict[str, dict[str, float | None]]:
        return {
            f"{figure}_{end}": {name: _number(getattr(m, figure)) for name, m in side.items()}
            for figure in ("kl", "mismatch")
            for end, side in (("before", self.before), ("after", self.after))
        }


@dataclass(frozen=True)
class RouterFigures:
    """How a router agrees with its sources: on the text, and on held-out rows."""

    fitted: Agreement
    holdout: Agreement | None
    on_features: Agreement | None  # the paper's figure, if the target is another


def measure(
    problem: RouterProblem, new: Tensor, stopwatch: Stopwatch | None = None
) -> RouterFigures:
    """Measure the merged and the new router, (K, d) or (K, d + 1) as it is stored."""

    def agreement(domains: Sequence[DomainFeatures]) -> Agreement | None:
        pairs = {
            domain.name: measure_routers(
                problem.gate,
                domain,
                [problem.merged, new],
                bias=problem.selection_bias,
                target_bias=problem.source_biases.get(domain.name),
            )
            for domain in domains
        }
        if not pairs:
            return None
        return Agreement(
            before={name: before for name, (before, _) in pairs.items()},
            after={name: after for name, (_, after) in pairs.items()},
        )

    with (stopwatch or Stopwatch(new.device)).span("measure"):
        fitted = agreement(problem.domains)
        assert fitted is not None
        on_features = [replace(d, targets=None) for d in problem.domains if d.targets is not None]
        return RouterFigures(fitted, agreement(problem.holdout), agreement(on_features))


def router_row(
    layer: int,
    router: str,
    problem: RouterProblem,
    solved: SolvedRouter,
    figures: RouterFigures,
    seconds: float,
) -> Row:
    """Return a router's row of the report, as plain JSON data."""
    solution, fitted = solved.solution, figures.fitted
    row: Row = {
        "layer": layer,
        "router": router,
        "tokens": {name: m.tokens for name, m in fitted.before.items()},
        "status": str(solved.status),
        "iterations": solution.steps,
        "residual": _number(solution.true_residual),
        **fitted.to_json(),
        "seconds": round(seconds, 3),
        "preconditioner": solution.preconditioner,
        "refinements": solution.refinements,
        # Residuals of the recurrence, step by step, for a convergence plot.
        "residuals": [_number(float(f"{value:.3g}")) for value in solution.residuals],
        "top1_before": {n: _number(m.top1_agreement) for n, m in fitted.before.items()},
        "top1_after": {n: _number(m.top1_agreement) for n, m in fitted.after.items()},
        "notices": [f"layer {layer}: {text}" for text in _notices(router, problem, solved, fitted)],
    }
    if len(solution.trials) > 1:  # the first broke down
        row["trials"] = [
            {"preconditioner": t.preconditioner, "steps": t.steps, "status": str(t.status)}
            for t in solution.trials
        ]
    if solution.jitter:
        row["jitter"] = solution.jitter
    if figures.holdout is not None:
        tokens = {name: m.tokens for name, m in figures.holdout.before.items()}
        row["holdout"] = {"tokens": tokens, **figures.holdout.to_json()}
    if figures.on_features is not None:
        row["router_on_features"] = figures.on_features.to_json()
    if solved.newton is not None:
        row["exact"] = {
            "status": str(solved.newton.status),
            "steps": solved.newton.steps,
            "inner_steps": solved.newton.inner_steps,
            "kl": {
                "merged": _number(_total(problem, "kl", fitted.before)),
                "quadratic": _number(solved.newton.kl[0]),
                "exact": _number(solved.newton.kl[-1]),
            },
        }
    return row


def router_line(row: Row) -> str:
    """Describe a solve in one line."""
    before, after = (_mean_of(row[key]) for key in ("kl_before", "kl_after"))
    residual = "?" if row["residual"] is None else f"{row['residual']:.1e}"
    newton = counted(row["exact"]["steps"], "Newton step") + ", " if "exact" in row else ""
    return (
        f"layer {row['layer']}: {counted(row['iterations'], 'step')}, residual {residual}, "
        f"{newton}KL {before:.3g} → {after:.3g}"
    )


def strict(row: Row) -> tuple[str, str] | None:
    """Return the fault of a solve that did not converge, and advice."""
    if row["status"] == Status.CONVERGED:
        return None
    return row["notices"][0], "allow more `max_steps`, a larger `rtol`, or leave `strict` out"


def _notices(
    router: str, problem: RouterProblem, solved: SolvedRouter, fitted: Agreement
) -> list[str]:
    """Return warnings about a solve, non-convergence first."""
    notices = []
    newton = solved.newton
    if newton is not None and not newton.converged:
        last = newton.kl[-2] - newton.kl[-1] if len(newton.kl) > 1 else 0.0
        notices.append(
            f"{router} did not converge ({newton.status}: Newton's method ended after "
            f"{counted(newton.steps, 'step')}, divergence {newton.kl[0]:.3g} → "
            f"{newton.kl[-1]:.3g}; the last step lowered it by {last:.1g})"
        )
    elif solved.status is not Status.CONVERGED:
        notices.append(f"{router} did not converge ({solved.solution.message})")
    if len(solved.solution.trials) > 1:
        notices.append(solved.solution.detour)
    kl = tuple(_total(problem, "kl", side) for side in (fitted.before, fitted.after))
    if kl[1] > kl[0]:
        if newton is not None:  # it starts no higher than the merged router
            why = "rounding to the stored dtype took more than there was to gain"
        elif _total(problem, "quadratic", fitted.after) > _total(
            problem, "quadratic", fitted.before
        ):
            # The objective also has a diagonal part, which fell at the expense of this one.
            why = "damping outweighs these tokens; give more text, or take `alpha` nearer to 1"
        else:
            why = 'the routers are too far apart for its quadratic model; try `objective="exact"`'
        notices.append(f"the routing divergence rose from {kl[0]:.3g} to {kl[1]:.3g}: {why}")
    return notices


def _total(problem: RouterProblem, figure: str, by_domain: Mapping[str, Measured]) -> float:
    """Return the weighted sum of a figure over the domains, which is what is minimised."""
    return math.fsum(d.weight * getattr(by_domain[d.name], figure) for d in problem.domains)


def _mean_of(values: Mapping[str, float | None]) -> float:
    known = [value for value in values.values() if value is not None]
    return sum(known) / len(known) if known else math.nan


def _number(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over the routers and sums of steps, also of held-out rows if there are any."""
    total: dict[str, Any] = {
        "routers": len(rows),
        "converged": sum(row["status"] == Status.CONVERGED for row in rows),
        "iterations": sum(row["iterations"] for row in rows),
        "tokens": dict(rows[0]["tokens"]) if rows else {},
        **{key: _mean([row[key] for row in rows]) for key in PER_DOMAIN},
    }
    held = [row["holdout"] for row in rows if "holdout" in row]
    if held:
        total["holdout"] = {
            "tokens": dict(held[0]["tokens"]),
            **{key: _mean([row[key] for row in held]) for key in PER_DOMAIN},
        }
    return total


def holdout_notices(totals: Mapping[str, Any]) -> list[str]:
    """Return warnings about domains whose routing got worse on held-out rows."""
    held = totals.get("holdout", {})
    before, after = held.get("kl_before", {}), held.get("kl_after", {})
    return [
        f"{name}: on the rows held out the routing divergence rose from {before[name]:.3g} to "
        f"{after[name]:.3g}: the new routers fit the text, not the domain; give more text, or take "
        "a smaller `alpha`"
        for name in before
        if after.get(name, 0.0) > before[name]
    ]


def _mean(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    values = {n: [v for row in rows if (v := row.get(n)) is not None] for n in names}
    return {name: math.fsum(known) / len(known) for name, known in values.items() if known}


@dataclass(frozen=True, kw_only=True)
class CalibrationReport(RepairReport):
    """The `calibration` part of `moemerge_report.json`."""

    repair = CALIBRATION

    skipped: tuple[SkippedRouter, ...]

    @property
    def totals(self) -> dict[str, Any]:
        return totals(self.layers)

    @property
    def closing_notices(self) -> tuple[str, ...]:
        return tuple(holdout_notices(self.totals))

    @property
    def not_held_out(self) -> tuple[str, ...]:
        held = self.totals.get("holdout", {}).get("tokens", {})
        return tuple(name for name in self.sources if not held.get(name))

    def own_json(self) -> dict[str, Any]:
        return {"skipped": [asdict(router) for router in self.skipped]}

    @property
    def card_section(self) -> str:
        """What was solved, and tables of the routing agreement with each source."""
        total, settings = self.totals, self.settings
        damping = (
            f"gamma {settings['gamma']}"
            if settings.get("gamma") is not None
            else f"alpha {settings['alpha']}"
        )
        on, mismatch = "both routers on this model's features", "mismatch, routers alone"
        if settings["targets"] == "source-features":
            on, mismatch = "each model on its own features", "mismatch"
        lines = [
            f"{counted(total['routers'], 'router')} solved for ({damping}, {settings['curvature']} "
            f"curvature, {settings['objective']} objective, targets: {settings['targets']}); "
            f"{counted(total['converged'], 'solve')} converged. All other tensors are unchanged. "
            "Routing agreement with each source on the rows that were fitted, as means over the "
            f"routers, {on}:",
            *_agreement_table(total, mismatch),
        ]
        if "holdout" in total:
            lines += ["", "The same on held-out rows:"]
            lines += _agreement_table(total["holdout"], mismatch)
        return "\n".join(lines)


def _agreement_table(total: Mapping[str, Any], mismatch: str) -> list[str]:
    """Return a Markdown table. `mismatch` is the name of that figure, of which there are two."""
    lines = [
        "",
        f"| domain | tokens | KL before | KL after | {mismatch} before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, tokens in total["tokens"].items():
        kl_before, kl_after, before, after = (total[key].get(name, 0) for key in PER_DOMAIN)
        lines.append(
            f"| {in_markdown(name)} | {tokens} | {kl_before:.4g} | {kl_after:.4g} | {before:.1%} | "
            f"{after:.1%} |"
        )
    return lines
