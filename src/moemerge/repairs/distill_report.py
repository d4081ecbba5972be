"""The report of a distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from moemerge.checkpoint.model_card import in_markdown
from moemerge.config.repair_settings import DISTILLATION
from moemerge.repairs.report import RepairReport

if TYPE_CHECKING:
    from moemerge.repairs.layer import Job


@dataclass(frozen=True, kw_only=True)
class DistillReport(RepairReport):
    """The part `distill` of `moemerge_report.json`."""

    repair = DISTILLATION

    parameters: int  # that were trained
    optimiser: str
    learning_rate: float
    tried_rates: Mapping[float, float]  # held-out loss after the trial of each rate
    steps: int  # that were taken
    kept_step: int  # whose weights are in OUT; 0: the merged weights
    losses: tuple[float, ...]  # of every step, on its own rows
    # Mean divergence from the teacher on held-out rows, by step and domain.
    held_out: Mapping[int, Mapping[str, float]]
    # Mean loss that was trained, on the same rows: with `next_token` not only the divergence.
    held_out_losses: Mapping[int, Mapping[str, float]]
    tokens: Mapping[str, int]  # trained on, by domain

    @classmethod
    def of(cls, job: Job[Any], seconds: float) -> Self:
        return replace(super().of(job, seconds), layers=())

    @property
    def totals(self) -> dict[str, Any]:
        """Return the held-out divergence of each domain before and after."""
        if not self.held_out:
            return {"divergence_before": None, "divergence_after": None}
        return {
            "divergence_before": dict(self.held_out[0]),
            "divergence_after": dict(self.held_out[self.kept_step]),
        }

    @property
    def card_section(self) -> str:
        lines = [
            f"{self.parameters:,} parameters were trained for {self.steps} steps on the next-token "
            f"distributions of {', '.join(map(in_markdown, self.sources))} (learning rate "
            f"{self.learning_rate:g}, {self.optimiser}). The weights are those of step "
            f"{self.kept_step}."
        ]
        if self.held_out:
            lines += [
                "",
                "| domain | tokens | KL to the source on held-out rows, before | after |",
                "|---|---|---|---|",
            ]
            before, after = self.held_out[0], self.held_out[self.kept_step]
            lines += [
                f"| {in_markdown(name)} | {tokens} | {before[name]:.4g} | {after[name]:.4g} |"
                for name, tokens in self.tokens.items()
            ]
        return "\n".join(lines)

    def own_json(self) -> dict[str, Any]:
        mixed = self.settings["next_token"] > 0
        return {
            "parameters": self.parameters,
            "optimiser": self.optimiser,
            "learning_rate": self.learning_rate,
            "tried_rates": [
                {"learning_rate": rate, "loss" if mixed else "divergence": value}
                for rate, value in self.tried_rates.items()
            ],
            "steps": self.steps,
            "kept_step": self.kept_step,
            "losses": [float(f"{loss:.6g}") for loss in self.losses],
            "held_out": [
                {
                    "step": step,
                    "divergence": dict(values),
                    **({"loss": dict(self.held_out_losses[step])} if mixed else {}),
                }
                for step, values in self.held_out.items()
            ],
            "tokens": dict(self.tokens),
        }
