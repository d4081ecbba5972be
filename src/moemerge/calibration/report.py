"""What a calibration did, as data: a row for each router, totals, what was left alone and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moemerge.calibration.layer import Agreement, LayerResult
from moemerge.linalg.cg import Status
from moemerge.lockstep.models import SkippedRouter
from moemerge.lockstep.repairs import RepairReport
from moemerge.report.files import in_markdown
from moemerge.routing import Preconditioner
from moemerge.runtime.progress import counted

PER_DOMAIN = ("kl_before", "kl_after", "mismatch_before", "mismatch_after")


def layer_row(layer: int, router: str, result: LayerResult, seconds: float) -> dict[str, Any]:
    """A router's row of the report: plain JSON data."""
    cg = result.solution.cg
    row: dict[str, Any] = {
        "layer": layer,
        "router": router,
        "tokens": {name: m.tokens for name, m in result.agreement.before.items()},
        "status": str(result.status),
        "iterations": cg.steps,
        "residual": _number(cg.true_residual),
        **_agreement(result.agreement),
        "seconds": round(seconds, 3),
        "preconditioner": str(result.solution.preconditioner),
        "refinements": cg.refinements,
        # The recurrence's, step by step: what a curve of the convergence shows.
        "residuals": [_number(float(f"{value:.3g}")) for value in cg.residuals],
        "top1_before": {n: _number(m.top1_agreement) for n, m in result.agreement.before.items()},
        "top1_after": {n: _number(m.top1_agreement) for n, m in result.agreement.after.items()},
        "notices": _notices(layer, router, result),
    }
    if len(result.solution.trials) > 1:  # `auto` gave some up
        row["trials"] = [
            {"preconditioner": str(t.preconditioner), "steps": t.steps, "status": str(t.status)}
            for t in result.solution.trials
        ]
    if result.solution.jitter:
        row["jitter"] = result.solution.jitter
    if result.holdout is not None:
        tokens = {name: m.tokens for name, m in result.holdout.before.items()}
        row["holdout"] = {"tokens": tokens, **_agreement(result.holdout)}
    if result.router_on_features is not None:
        row["router_on_features"] = _agreement(result.router_on_features)
    if result.exact is not None:
        row["exact"] = {
            "status": str(result.exact.status),
            "steps": result.exact.steps,
            "inner_steps": result.exact.inner_steps,
            "kl": {
                "merged": _number(result.total("kl", result.agreement.before)),
                "quadratic": _number(result.exact.kl[0]),
                "exact": _number(result.exact.kl[-1]),
            },
        }
    return row


def _notices(layer: int, router: str, result: LayerResult) -> list[str]:
    """What a user should look at; of a solve that did not converge first of all."""
    notices = []
    if result.status is not Status.CONVERGED:
        notices.append(f"layer {layer}: {router} did not converge ({result.message})")
    if Preconditioner.TWO_LEVEL in [t.preconditioner for t in result.solution.trials[:-1]]:
        notices.append(f"layer {layer}: {result.solution.detour}")
    if result.rise is not None:
        notices.append(f"layer {layer}: {result.rise}")
    return notices


def _agreement(agreement: Agreement) -> dict[str, dict[str, float | None]]:
    before, after = agreement.before, agreement.after
    return {
        "kl_before": {name: _number(m.kl) for name, m in before.items()},
        "kl_after": {name: _number(m.kl) for name, m in after.items()},
        "mismatch_before": {name: _number(m.mismatch) for name, m in before.items()},
        "mismatch_after": {name: _number(m.mismatch) for name, m in after.items()},
    }


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the routers, sums of steps; the holdout's means where there is one."""
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
    """Domains whose routing got worse on the rows that no solve has seen."""
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

    part = "calibration"
    section = "Router calibration"
    done = "Routers calibrated"
    summary = "its routers calibrated with HARC (Hessian-aware router calibration)"

    skipped: tuple[SkippedRouter, ...]

    @property
    def totals(self) -> dict[str, Any]:
        return totals(self.layers)

    def own_json(self) -> dict[str, Any]:
        return {"skipped": [asdict(router) for router in self.skipped]}

    @property
    def words(self) -> str:
        """What was done, and tables of how the routing agrees with the sources'."""
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
            f"{counted(total['converged'], 'solve')} converged. All other tensors are as merged. "
            f"Routing agreement with each source, as means over the routers, {on}:",
            *_agreement_table(total, mismatch),
        ]
        if "holdout" in total:
            lines += ["", "The same on rows that no solve has seen:"]
            lines += _agreement_table(total["holdout"], mismatch)
        return "\n".join(lines)


def _agreement_table(total: Mapping[str, Any], mismatch: str) -> list[str]:
    """`mismatch` is what the figure is called: routing has two of them."""
    lines = [
        "",
        f"| domain | tokens | KL before | KL after | {mismatch} before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, tokens in total["tokens"].items():
        numbers = (
            f"{total['kl_before'].get(name, 0):.4g} | {total['kl_after'].get(name, 0):.4g} | "
            f"{total['mismatch_before'].get(name, 0):.1%} | "
            f"{total['mismatch_after'].get(name, 0):.1%}"
        )
        lines.append(f"| {in_markdown(name)} | {tokens} | {numbers} |")
    return lines
