"""Settings of a distillation, and its declaration as a repair."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.faults import FaultsError, shown
from moemerge.config.fields import AutoOrPositive, PositiveInt, read_by
from moemerge.config.repairs import Repair, RepairKeywords, RepairSettings, always_held_out
from moemerge.config.settings import AUTO_HOLDOUT, Flag, Share

Only = Literal["routers", "experts", "attention"]
OptimiserChoice = Literal["auto", "adamw", "adafactor"]
StepCount = int | Literal["auto"]
UnitShare = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


def read_steps(raw: object) -> StepCount:
    """Read `auto`, or a whole number above zero."""
    if raw == "auto":
        return "auto"
    if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
        return raw
    raise FaultsError.one(f"expected auto, or a whole number above 0, not {shown(raw)}")


class DistillSettings(RepairSettings):
    """How a model is trained on the distributions of its sources."""

    common = "steps learning_rate"

    steps: Annotated[StepCount, read_by(read_steps, StepCount)] = Field(
        "auto",
        description="optimiser steps (auto: two epochs, at least 100 steps, at most 16 epochs)",
    )
    learning_rate: AutoOrPositive = Field(
        "auto",
        description="highest learning rate (auto: chosen by the held-out divergence after short "
        "trials)",
    )
    batch: PositiveInt = Field(32, description="rows of a step, over all processes")
    only: Only | None = Field(
        None, description="train only the routers, the experts or the attention (default: all)"
    )
    lora: PositiveInt | None = Field(
        None,
        description="train low-rank adapters of this rank on all matrices of the layers, and merge "
        "them into the weights (default: train the weights themselves)",
    )
    next_token: UnitShare = Field(
        0.0, description="share of the next-token loss in the loss; the rest is the divergence"
    )
    top_tokens: PositiveInt = Field(
        64, description="most probable next tokens of a teacher that are stored per position"
    )
    optimiser: OptimiserChoice = Field(
        "auto",
        description="adamw, or adafactor with a small state and no float32 copies of the weights "
        "(auto: adamw if the device holds it)",
    )
    recompute: Flag | None = Field(
        None,
        description="recompute activations in the backward pass, which is slower and takes less "
        "memory (default: with lora, or if memory is short)",
    )
    holdout: Share = Field(
        AUTO_HOLDOUT,
        description="share of the rows kept out of training: they choose the rate and the step "
        "whose weights are kept (auto: a tenth)",
    )
    strict: Flag = Field(False, description="fail if the held-out divergence does not fall")

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Refuse `auto` without held-out rows, which choose the rate."""
        data = always_held_out(data)
        if data.get("holdout") == 0 and data.get("learning_rate", "auto") == "auto":
            raise FaultsError.one(
                "held-out rows choose the learning rate: give a holdout above 0, or a rate",
                "holdout",
            )
        return data


class DistillKeywords(RepairKeywords, total=False):
    """The fields of `DistillSettings` as keywords."""

    steps: StepCount
    learning_rate: float | Literal["auto"]
    batch: int
    only: Only | None
    lora: int | None
    next_token: float
    top_tokens: int
    optimiser: OptimiserChoice
    recompute: bool | None


DISTILLATION = Repair(
    key="distill",
    verb="distill",
    settings=DistillSettings,
    runner="moemerge.repairs.distilling.run:run_distillation",
    block_help="train the merge on its sources' next-token distributions",
    text_use="distils from",
    needs_routers=False,
    card_title="Distillation",
    card_done="Distilled from its sources",
    card_summary="then distilled from them",
    card_holdout="the held-out rows, which chose the learning rate and the step",
)
