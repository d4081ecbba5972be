"""Every setting of a calibration, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.data import NamedTexts
from moemerge.config.faults import FaultsError, shown
from moemerge.config.fields import (
    Fraction,
    LayerSelection,
    ModelForm,
    PositiveInt,
    Strict,
    model_ref,
    read_by,
)
from moemerge.config.models import ModelRef
from moemerge.config.settings import (
    DEVICE,
    DTYPE,
    LAYERS,
    LIMIT,
    MAX_LENGTH,
    MAX_TOKENS,
    MEASURE,
    OFFLOAD,
    SEED,
    DeviceField,
    Dtype,
    Flag,
    ForwardKeywords,
    LayersField,
    Offload,
    Seed,
    Share,
)

Curvature = Literal["full", "diagonal", "identity"]
Objective = Literal["quadratic", "exact"]
Targets = Literal["merged-features", "source-features"]
Preconditioner = Literal["auto", "none", "jacobi", "block", "kronecker", "two-level"]
Init = Literal["merged", "average", "zero"]


class CalibrationSettings(Strict):
    """How routers are calibrated. `alpha` and `gamma` exclude each other: one unsets the other."""

    alpha: Fraction | None = Field(
        0.9, description="share of the full curvature; the rest is its diagonal (not with gamma)"
    )
    gamma: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = Field(
        None, description="add gamma times the curvature's diagonal instead of blending by alpha"
    )
    layers: LayersField = LAYERS
    curvature: Curvature = Field("full", description="how much of the gate's curvature is kept")
    objective: Objective = Field(
        "quadratic", description="the quadratic model of the KL, or the KL itself (Newton)"
    )
    targets: Targets = Field(
        "merged-features",
        description="source routers on the merged model's features, or each source's own routing",
    )
    preconditioner: Preconditioner = Field(
        "auto", description="what speeds the solver up; auto takes the fastest"
    )
    rtol: Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)] = Field(
        1e-6, description="relative residual at which a solve has converged"
    )
    max_steps: PositiveInt = Field(1000, description="most solver steps per layer")
    init: Init = Field("merged", description="router the solver starts from")
    max_tokens: PositiveInt | None = MAX_TOKENS
    max_length: PositiveInt = MAX_LENGTH
    limit: PositiveInt | None = LIMIT
    seed: Seed = SEED
    holdout: Share = Field(
        "auto",
        description="share of the rows kept out of every solve and measured separately (auto: a "
        "tenth of a domain with 100 rows or more)",
    )
    offload: Offload = OFFLOAD
    device: DeviceField = DEVICE
    dtype: Dtype = DTYPE
    strict: Flag = Field(False, description="fail when a layer does not converge")
    measure: Flag = MEASURE

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """`gamma` alone unsets `alpha`."""
        if "gamma" not in data:
            return data
        if "alpha" in data:
            raise FaultsError.one("alpha and gamma exclude each other: give one", "gamma")
        return {**data, "alpha": None}


class CalibrationKeywords(ForwardKeywords, total=False):
    """`CalibrationSettings` one by one."""

    alpha: float | None
    gamma: float | None
    layers: LayerSelection | str | int | Sequence[str | int]
    curvature: Curvature
    objective: Objective
    targets: Targets
    preconditioner: Preconditioner
    rtol: float
    max_steps: int
    init: Init
    holdout: float | Literal["auto"]
    strict: bool
    measure: bool


NamedSources = dict[str, ModelRef] | tuple[str, ...]
SourcesForm = dict[str, ModelForm] | list[str]


def named_sources(raw: object) -> NamedSources:
    """`name: model`, or names of merged models."""
    if isinstance(raw, Mapping) and raw:
        return {str(name): _named(name, model) for name, model in raw.items()}
    names = raw if isinstance(raw, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise FaultsError.one(f"expected name: model, or a list of model names, not {shown(raw)}")
    return tuple(names)


def _named(name: object, model: object) -> ModelRef:
    try:
        return model_ref(model)
    except FaultsError as error:
        raise FaultsError([p.under((str(name),)) for p in error.faults]) from None


Weight = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class RepairBlock(Strict):
    """What a merge is repaired with, as its config says.

    `data` falls back to the config's own `data:`; `sources` to the merged models.
    """

    data: NamedTexts | None = Field(
        None, description="text of each source, by name: files, or how to make one"
    )
    sources: Annotated[NamedSources, read_by(named_sources, SourcesForm)] | None = Field(
        None, description="name: model, or names of merged models; default: all but the base"
    )
    weights: dict[str, Weight] | None = Field(
        None, description="how much each source counts, by name (default: 1)"
    )


class CalibrationBlock(CalibrationSettings, RepairBlock):
    """The `calibration:` block of a config: the settings, and what to calibrate with."""

    @property
    def settings(self) -> CalibrationSettings:
        """The settings alone."""
        return self.narrowed(CalibrationSettings)
