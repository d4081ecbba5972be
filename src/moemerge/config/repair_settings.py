"""Settings of pruning and of every repair, and their declarations."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from moemerge.config.faults import FaultsError, listed, shown
from moemerge.config.fields import AutoOrPositive, Fraction, LayerSelection, PositiveInt, read_by
from moemerge.config.repairs import (
    Repair,
    RepairSettings,
    StepSettings,
    always_held_out,
)
from moemerge.config.settings import (
    AUTO_HOLDOUT,
    AUTO_HOLDOUT_HELP,
    REQUANTIZE,
    Flag,
    LayersField,
    Requantize,
    Share,
)
from moemerge.registry import did_you_mean

ExpertScore = Literal["reap", "norm", "frequency", "similarity"]
RepairAfter = Literal["none", "calibrate", "refit", "gradient"]


class PruningSettings(StepSettings):
    """Which experts are kept."""

    common = "keep"

    keep: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = Field(
        0.75, description="share of every layer's experts that is kept, such as 0.75"
    )
    score: ExpertScore = Field(
        "reap",
        description="reap: mean of gate weight times output norm over an expert's tokens; norm: "
        "the sum of it; frequency: how many tokens are routed to it; similarity: gate weight times "
        "the distance to the output of the most similar expert with a higher reap score",
    )
    holdout: Share = Field(
        "auto",
        description="share of the rows kept out of the scores and of every fit "
        "(auto: a tenth with a refit; else of a domain with 100 rows or more, otherwise none)",
    )

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Refuse keys of a config block that pruning does not use, and percentages."""
        keep = data.get("keep")
        if isinstance(keep, int | float) and 1 < keep < 100:
            raise FaultsError.one(f"is a share: for {keep:g} percent give {keep / 100:g}", "keep")
        for key in ("weights", "experts", "check"):
            if data.get(key):
                raise FaultsError.one("is not used by pruning: remove it", key)
        return data


class PruneSettings(PruningSettings):
    """Which experts are kept, and how the model is repaired afterwards."""

    common = "repair"

    repair: RepairAfter = Field(
        "none", description="repair the pruned model with the original as its source"
    )
    measure: Flag = Field(
        True, description="diagnose the model before and after a repair, on the held-out rows"
    )


PRUNE = Repair(
    key="prune",
    verb="prune",
    settings=PruningSettings,
    block_help="remove experts of the merge before its repairs; left empty, by its defaults",
    text_use="scores the experts on",
    needs_routers=True,
    card_title="Pruned experts",
    card_done="Pruned",
    card_summary="then pruned",
    card_holdout="rows held out from the scores",
)


Curvature = Literal["full", "diagonal", "identity"]
Objective = Literal["quadratic", "exact"]
Targets = Literal["merged-features", "source-features"]
Preconditioner = Literal["auto", "none", "jacobi", "two-level"]
Init = Literal["merged", "average", "zero"]


class CalibrationSettings(RepairSettings):
    """How routers are calibrated."""

    exclusive = ("alpha", "gamma")
    common = "alpha"

    alpha: Fraction | None = Field(
        0.9, description="share of the full curvature; the rest is its diagonal (not with gamma)"
    )
    gamma: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = Field(
        None, description="add gamma times the curvature's diagonal instead of blending by alpha"
    )
    curvature: Curvature = Field("full", description="how much of the gate's curvature is kept")
    objective: Objective = Field(
        "quadratic", description="the quadratic model of the KL, or the KL itself (Newton)"
    )
    targets: Targets = Field(
        "merged-features",
        description="source routers on the merged model's features, or each source's own routing",
    )
    preconditioner: Preconditioner = Field(
        "auto",
        description="preconditioner of the solver; auto: two-level, or Jacobi if it breaks down",
    )
    rtol: Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)] = Field(
        1e-6, description="relative residual at which a solve has converged"
    )
    max_steps: PositiveInt = Field(1000, description="most solver steps per layer")
    init: Init = Field("merged", description="router the solver starts from")
    holdout: Share = Field(
        "auto",
        description="share of the rows kept out of every solve and measured separately "
        + AUTO_HOLDOUT_HELP,
    )

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Unset `alpha` if `gamma` is given."""
        if "gamma" not in data:
            return data
        if "alpha" in data:
            raise FaultsError.one("alpha and gamma exclude each other: give one", "gamma")
        return {**data, "alpha": None}


CALIBRATION = Repair(
    key="calibration",
    verb="calibrate",
    settings=CalibrationSettings,
    block_help="how `moemerge run` calibrates the routers; left empty, by its defaults",
    text_use="calibrates",
    needs_routers=True,
    card_title="Router calibration",
    card_done="Routers calibrated",
    card_summary="its routers calibrated with HARC (Hessian-aware router calibration)",
)


Part = Literal["attention", "router", "experts", "head"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
RouterBy = Literal["exact", "harc", "keep"]
Solver = Literal["closed-form", "gradient"]


def chosen_parts(raw: object) -> tuple[Part, ...]:
    """Read `all`, or names of parts: `router,attention`, or a list of them."""
    given = raw if isinstance(raw, list | tuple) else [raw]
    if not given or not all(isinstance(word, str) for word in given):
        raise FaultsError.one(f"expected all, or some of {listed(PARTS)}, not {shown(raw)}")
    names = [name.strip() for word in given for name in str(word).split(",")]
    for name in names:
        if name not in ("all", *PARTS):
            close = did_you_mean(name, PARTS) or f"; known: all, {listed(PARTS)}"
            raise FaultsError.one(f"unknown part {name!r}{close}")
    return tuple(part for part in PARTS if part in names or "all" in names)


class RefitSettings(RepairSettings):
    """How the linear maps of a merged model are refitted."""

    common = "solver ridge parts"

    solver: Solver = Field(
        "closed-form",
        description="closed-form: each map by least squares; gradient: all maps of a layer "
        "together, by gradient steps towards the source's hidden states",
    )
    steps: Annotated[int, Field(ge=1)] = Field(
        150, description="gradient steps of each layer (solver gradient)"
    )
    ridge: AutoOrPositive = Field(
        "auto",
        description="how strongly maps are held to their merged weights: auto: chosen on "
        "held-out rows, or a number λ",
    )
    parts: Annotated[tuple[Part, ...], read_by(chosen_parts, str | list[str])] = Field(
        PARTS, description="what is refitted: all, or some of attention, router, experts, head"
    )
    router: RouterBy = Field(
        "exact",
        description="routers by the KL itself on each source's own routing (exact), by HARC "
        "(harc), or unchanged (keep)",
    )
    layers: LayersField = Field(
        LayerSelection(), description="which decoder layers: all, last:4, 8-15 or 0,2,5-7"
    )
    holdout: Share = Field(
        AUTO_HOLDOUT,
        description="share of the rows kept out of every fit: they choose λ, and a map that loses "
        "on them keeps its merged weights (auto: a tenth)",
    )
    requantize: Requantize = REQUANTIZE
    strict: Flag = Field(
        False, description="fail when a router does not converge, or a map keeps its merged weights"
    )

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Refuse to choose λ on held-out rows if there are none, and settings of other solvers."""
        data = always_held_out(data)
        if data.get("solver") == "gradient" and data.get("requantize") == "same":
            raise FaultsError.one(
                "solver gradient trains floats: leave requantize out, and quantise the result",
                "requantize",
            )
        if data.get("solver") == "gradient":
            return data
        if data.get("holdout") == 0 and data.get("ridge", "auto") == "auto":
            raise FaultsError.one(
                "ridge auto is chosen on held-out rows: give a holdout above 0, or a ridge",
                "holdout",
            )
        return data


REFIT = Repair(
    key="refit",
    verb="refit",
    settings=RefitSettings,
    block_help="how `moemerge run` refits the merged model; left empty, by its defaults",
    text_use="refits to",
    needs_routers=False,
    card_title="Refit",
    card_done="Refitted",
    card_summary="its linear maps refitted to the sources' outputs",
    card_holdout="rows held out from the fit, used to choose its settings and the maps that change",
)


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
        description="highest learning rate (auto: chosen by the held-out loss after short trials)",
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
    strict: Flag = Field(False, description="fail if the held-out loss does not fall")

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


DISTILLATION = Repair(
    key="distill",
    verb="distill",
    settings=DistillSettings,
    block_help="train the merge on its sources' next-token distributions",
    text_use="distils from",
    needs_routers=False,
    card_title="Distillation",
    card_done="Distilled from its sources",
    card_summary="then distilled from them",
    card_holdout="the held-out rows, which chose the learning rate and the step",
)
