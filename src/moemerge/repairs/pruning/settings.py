"""Settings of pruning, and its declaration as a step after a merge."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.faults import FaultsError
from moemerge.config.repairs import Repair, StepKeywords, StepSettings
from moemerge.config.settings import Flag, Share

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
        """Refuse keys of a config block that pruning does not use."""
        for key in ("weights", "experts", "check"):
            if data.get(key):
                raise FaultsError.one("is not used by pruning: remove it", key)
        return data


class PruningKeywords(StepKeywords, total=False):
    """The fields of `PruningSettings` as keywords."""

    keep: float
    score: ExpertScore


class PruneSettings(PruningSettings):
    """Which experts are kept, and how the model is repaired afterwards."""

    common = "repair"

    repair: RepairAfter = Field(
        "none", description="repair the pruned model with the original as its source"
    )
    measure: Flag = Field(
        True, description="diagnose the model before and after a repair, on the held-out rows"
    )


class PruneKeywords(PruningKeywords, total=False):
    """The fields of `PruneSettings` as keywords."""

    repair: RepairAfter
    measure: bool


PRUNE = Repair(
    key="prune",
    verb="prune",
    settings=PruningSettings,
    runner="moemerge.repairs.pruning.run:run_prune",
    block_help="remove experts of the merge before its repairs; left empty, by its defaults",
    text_use="scores the experts on",
    needs_routers=True,
    card_title="Pruned experts",
    card_done="Pruned",
    card_summary="then pruned",
    card_holdout="rows held out from the scores",
)
