"""What the tables about refit compare: variants of one merge, by their labels."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

from moemerge.experiments.tables import (
    AS_MERGED,
    AVERAGED,
    EXACT,
    EXACT_BASE,
    HARC,
    REFIT,
    REFIT_BASE,
    REFIT_FIXED,
    TUNED,
)
from moemerge.testbed.experiments.merges import AVERAGE
from moemerge.testbed.experiments.recipes import (
    SWEEP,
    Grafted,
    Merged,
    Model,
    Tuned,
    calibrated,
    refitted,
)

# Averaging is where refit starts as well as anywhere; the others show that.
LEADING = ("average", "wudi", "regmean")
GENERAL = 64  # rows of general text for the base
FIXED = 0.003
RIDGES = (0.3, 0.03, 0.003, 0.0003)
ROWS = (10, 51, 128)  # of each domain, beside all of them
PARTS = ("attention", "router", "experts", "head")
COMPARED = (
    (AS_MERGED, REFIT),
    (HARC, REFIT),
    (EXACT, REFIT),
    (TUNED, REFIT),
    (TUNED, REFIT_BASE),
    (REFIT, REFIT_BASE),
)

Swept = Mapping[str, Model | tuple[Model, float]]


def repairs(merged: Merged) -> Mapping[str, Model]:
    """Everything that mends a merge with the same text."""
    exact: dict[str, Any] = {"targets": "source-features", "objective": "exact"}
    models: dict[str, Model] = {AS_MERGED: merged}
    if merged.method != AVERAGE:
        models[AVERAGED] = Grafted(merged, Merged(AVERAGE, merged.domains))
    return {
        **models,
        HARC: calibrated(merged),
        EXACT: calibrated(merged, **exact),
        EXACT_BASE: calibrated(merged, general=GENERAL, **exact),
        REFIT: refitted(merged),
        REFIT_FIXED: refitted(merged, ridge=FIXED),
        REFIT_BASE: refitted(merged, general=GENERAL),
        TUNED: Tuned(merged, merged.domains, SWEEP),
    }


def ridges(merged: Merged) -> Swept:
    swept = {f"λ = {x:g}": (refitted(merged, ridge=x), log10(x)) for x in RIDGES}
    return {AS_MERGED: merged, "λ auto": refitted(merged), **swept}


def texts(merged: Merged) -> Swept:
    swept = {f"{rows} rows": (refitted(merged, rows=rows), float(rows)) for rows in ROWS}
    return {AS_MERGED: merged, **swept, "all rows": refitted(merged)}


def parts(merged: Merged) -> Swept:
    def but(part: str) -> Model:
        return refitted(merged, parts=",".join(p for p in PARTS if p != part))

    return {
        AS_MERGED: merged,
        "all parts": refitted(merged),
        "routers by HARC": refitted(merged, router="harc"),
        **{f"without {part}": but(part) for part in PARTS},
        "experts alone": refitted(merged, parts="experts"),
    }
