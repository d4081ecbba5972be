"""Settings of pruning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moemerge.config.fields import Name
from moemerge.config.settings import GROUP, Flag, ForwardKeywords, ForwardSettings, Share

ExpertScore = Literal["reap", "norm", "frequency"]
RepairAfter = Literal["none", "calibrate", "refit"]


class PruneSettings(ForwardSettings):
    """Which experts are kept, and how the model is repaired afterwards."""

    keep: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = Field(
        0.75, description="share of every layer's experts that is kept, such as 0.75"
    )
    score: ExpertScore = Field(
        "reap",
        description="reap: mean of gate weight times output norm over an expert's tokens; norm: "
        "the sum of it; frequency: how many tokens are routed to it",
    )
    repair: RepairAfter = Field(
        "none", description="repair the pruned model with the original as its source"
    )
    holdout: Share = Field(
        "auto", description="share of the rows kept out of the scores and of every fit"
    )
    group: Name | None = GROUP
    measure: Flag = Field(
        True, description="diagnose the model before and after a repair, on the held-out rows"
    )


class PruneKeywords(ForwardKeywords, total=False):
    """`PruneSettings` one by one."""

    keep: float
    score: ExpertScore
    repair: RepairAfter
    holdout: float | Literal["auto"]
    group: str | None
    measure: bool
