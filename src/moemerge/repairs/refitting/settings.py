"""Settings of a refit, and its declaration as a repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from moemerge.config.faults import FaultsError, listed, shown
from moemerge.config.fields import AutoOrPositive, LayerSelection, read_by
from moemerge.config.repairs import Repair, RepairKeywords, RepairSettings, always_held_out
from moemerge.config.settings import AUTO_HOLDOUT, REQUANTIZE, Flag, LayersField, Requantize, Share
from moemerge.registry import did_you_mean

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


class RefitKeywords(RepairKeywords, total=False):
    """The fields of `RefitSettings` as keywords."""

    solver: Solver
    steps: int
    ridge: float | Literal["auto"]
    parts: str | Sequence[str] | tuple[Part, ...]
    router: RouterBy
    requantize: Requantize


REFIT = Repair(
    key="refit",
    verb="refit",
    settings=RefitSettings,
    runner="moemerge.repairs.refitting.run:run_refit",
    block_help="how `moemerge run` refits the merged model; left empty, by its defaults",
    text_use="refits to",
    needs_routers=False,
    card_title="Refit",
    card_done="Refitted",
    card_summary="its linear maps refitted to the sources' outputs",
    card_holdout="rows held out from the fit, used to choose its settings and the maps that change",
)
