"""What the paper's ablations compare: variants of one merge, by their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moemerge.experiments.tables import AS_MERGED, HARC, SOURCE
from moemerge.testbed.experiments.recipes import (
    Cell,
    Merged,
    Model,
    Tuned,
    calibrated,
    forced_routing,
    individual,
    sources_with_merged_routers,
    with_source_routers,
)

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
