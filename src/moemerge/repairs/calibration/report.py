"""The report of a calibration: a row for each router, totals, and skipped routers with reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moemerge.checkpoint.model_card import in_markdown
from moemerge.config.repair_settings import CALIBRATION
from moemerge.repairs.calibration.layer import Agreement, LayerResult
from moemerge.repairs.lockstep.models import SkippedRouter
from moemerge.repairs.lockstep.report import RepairReport
from moemerge.routing import Preconditioner
from moemerge.routing.cg import Status
from moemerge.runtime.progress import counted

PER_DOMAIN = ("kl_before", "kl_after", "mismatch_before", "mismatch_after")


def layer_row(layer: int, router: str, result: LayerResult, seconds: float) -> dict[str, Any]:
    """Return a router's row of the report, as plain JSON data."""
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
        # Residuals of the recurrence, step by step, for a convergence plot.
        "residuals": [_number(float(f"{value:.3g}")) for value in cg.residuals],
        "top1_before": {n: _number(m.top1_agreement) for n, m in result.agreement.before.items()},
        "top1_after": {n: _number(m.top1_agreement) for n, m in result.agreement.after.items()},
        "notices": _notices(layer, router, result),
    }
    if len(result.solution.trials) > 1:  # `auto` abandoned some
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
    """Return warnings about a solve, non-convergence first."""
    notices = []
    if result.status is not Status.CONVERGED:
        notices.append(f"layer {layer}: {router} did not converge ({result.message})")
    if Preconditioner.TWO_LEVEL in [t.preconditioner for t in result.solution.trials[:-1]]:
        notices.append(f"layer {layer}: {result.solution.detour}")
    if result.rise is not None:
        notices.append(f"layer {layer}: {result.rise}")
    return notices


def _agreement(agreement: Agreement) -> dict[str, dict[str, float | None]]:
    return {
        f"{figure}_{end}": {name: _number(getattr(m, figure)) for name, m in side.items()}
        for figure in ("kl", "mismatch")
        for end, side in (("before", agreement.before), ("after", agreement.after))
    }


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
