"""Settings of a calibration, and its declaration as a repair."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.faults import FaultsError
from moemerge.config.fields import Fraction, PositiveInt
from moemerge.config.repairs import Repair, RepairKeywords, RepairSettings
from moemerge.config.settings import AUTO_HOLDOUT_HELP, Share

Curvature = Literal["full", "diagonal", "identity"]
Objective = Literal["quadratic", "exact"]
Targets = Literal["merged-features", "source-features"]
Preconditioner = Literal["auto", "none", "jacobi", "block", "kronecker", "two-level"]
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
        "auto", description="preconditioner of the solver; auto takes the fastest"
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


class CalibrationKeywords(RepairKeywords, total=False):
    """The fields of `CalibrationSettings` as keywords."""

    alpha: float | None
    gamma: float | None
    curvature: Curvature
    objective: Objective
    targets: Targets
    preconditioner: Preconditioner
    rtol: float
    max_steps: int
    init: Init


CALIBRATION = Repair(
    key="calibration",
    verb="calibrate",
    settings=CalibrationSettings,
    runner="moemerge.repairs.calibration.run:run_calibration",
    block_help="how `moemerge run` calibrates the routers; left empty, by its defaults",
    text_use="calibrates",
    needs_routers=True,
    card_title="Router calibration",
    card_done="Routers calibrated",
    card_summary="its routers calibrated with HARC (Hessian-aware router calibration)",
)
