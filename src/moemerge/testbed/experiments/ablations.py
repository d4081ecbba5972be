"""What ablations and the tables about refit compare: variants of one merge, by their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    REFIT_KEPT,
    SOURCE,
    TUNED,
)
from moemerge.testbed.experiments.merges import AVERAGE
from moemerge.testbed.experiments.recipes import (
    SWEEP,
    Cell,
    Grafted,
    Merged,
    Model,
    Tuned,
    calibrated,
    forced_routing,
    individual,
    refitted,
    sources_with_merged_routers,
    with_source_routers,
)
from moemerge.testbed.tasks import DOMAINS

TWO = ("math", "code")
SOURCE_ROUTERS = "source routers"
FORCED = "source routing forced"

ALPHAS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
GAMMAS = (0.01, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
TEXTS = {
    "correct": "the source's correct answers",
    "answers": "the source's answers, unfiltered",
    "truth": "ground truth",
    "prompts": "prompts only",
    "unrelated": "unrelated text",
}


@dataclass(frozen=True)
class Scope:
    """What the rows of an experiment depend on."""

    methods: tuple[str, ...]
    layers: int
    every: tuple[str, ...] = ()  # of the tables that are about methods


# What an ablation compares: a model, or a measurement of its own; with its place on a sweep's axis.
Variant = Model | Cell | tuple[Model, float]


def hessian(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    return {
        "none": merged,
        "identity": calibrated(merged, curvature="identity"),
        "diagonal": calibrated(merged, curvature="diagonal"),
        "full": calibrated(merged),
    }


def regularisation(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    usual = {"α = 0.9": (calibrated(merged), 0.9)}  # the default: no setting, and a shared model
    return {
        AS_MERGED: merged,
        **{f"α = {alpha:g}": (calibrated(merged, alpha=alpha), alpha) for alpha in ALPHAS},
        **usual,
        **{f"γ = {g:g}": (calibrated(merged, gamma=g), 1 / (1 + g)) for g in GAMMAS},
    }


def composition(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    texts = {words: calibrated(merged, text=text) for text, words in TEXTS.items()}
    return {AS_MERGED: merged, **texts}


def fraction(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    shares = {f"{share:.0%}": (calibrated(merged, share=share), share) for share in SHARES}
    return {AS_MERGED: (merged, 0.0), **shares}


def last_layers(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    counts = range(1, scope.layers)
    return {
        "0 (as merged)": (merged, 0.0),
        **{f"last {n}": (calibrated(merged, layers=f"last:{n}"), n) for n in counts},
        f"all {scope.layers}": (calibrated(merged), scope.layers),
    }


def router_swap(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    return {
        "specialists": individual(TWO),
        "specialists, merged routers": sources_with_merged_routers(merged),
        AS_MERGED: merged,
        "merged, source routers": with_source_routers(merged),
        "merged, source routing forced": forced_routing(merged),
    }


def fine_tuning(merged: Merged, scope: Scope) -> Mapping[str, Variant]:
    harc, source = calibrated(merged), calibrated(merged, targets="source-features")
    return {
        AS_MERGED: merged,
        HARC: harc,
        SOURCE: source,
        "fine-tuned": Tuned(merged, TWO),
        "HARC, fine-tuned": Tuned(harc, TWO),
        "source targets, fine-tuned": Tuned(source, TWO),
    }


# --- refit ----------------------------------------------------------------------------------------

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
COMPARED_OF_TWO = (*COMPARED, (REFIT, REFIT_KEPT))  # three models leave no domain untouched

Swept = Mapping[str, Model | tuple[Model, float]]


def repairs(merged: Merged) -> Mapping[str, Model]:
    """Everything that mends a merge with the same text."""
    exact: dict[str, Any] = {"targets": "source-features", "objective": "exact"}
    models: dict[str, Model] = {AS_MERGED: merged}
    kept: dict[str, Model] = {}
    untouched = [domain for domain in DOMAINS if domain not in merged.domains]
    if len(untouched) == 1:
        kept[REFIT_KEPT] = refitted(merged, general=GENERAL, kept=untouched[0])
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
        **kept,
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
