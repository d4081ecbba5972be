"""The experiments of docs/evidence.md: the cells of each table, and which rows are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log10

from evidence.cells import (
    EXACT_SETTINGS,
    SWEEP,
    Cell,
    Merge,
    SetKey,
    averaged_routers,
    base,
    calibrated,
    distilled,
    forced_routing,
    merged,
    merged_routers,
    pruned,
    refitted,
    source_routers,
    specialists,
    tuned,
)
from evidence.methods import AVERAGE, EVERY
from evidence.summary import (
    AS_MERGED,
    AVERAGED,
    EXACT,
    HARC,
    REFERENCE,
    REFIT,
    REFIT_BASE,
    SOURCE,
    TUNED,
    Row,
    TableForm,
)
from moemerge.lab.testbed.tasks import DOMAINS

EXACT_BASE = "source targets, exact, with the base"
REFIT_FIXED = "refit, λ = 0.003"
REFIT_KEPT = "refit, with the base on text of what is untouched"
GRADIENT = "gradient refit"
GRADIENT_BASE = "gradient refit, with the base on general text"
DISTILL = "distill"
DISTILL_BASE = "distill, with the base on general text"
PRUNED = "pruned"
ROUTERS_DISTILLED = "routers distilled"

TWO = ("math", "code")
THREE = ("chat", "math", "code")
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
LEADING = (AVERAGE, "wudi", "regmean")  # the merges of the tables about refit
GENERAL = 64  # rows of general text for the base
RIDGES = (0.3, 0.03, 0.003, 0.0003)
ROWS = (10, 51, 128)  # rows per domain
PARTS = ("attention", "router", "experts", "head")


@dataclass(frozen=True)
class Scope:
    """What the rows of an experiment depend on."""

    methods: tuple[str, ...]
    layers: int
    every: tuple[str, ...] = ()  # methods of the tables about methods


@dataclass(frozen=True)
class Experiment:
    """A table."""

    name: str
    title: str
    about: str
    domains: tuple[str, ...]
    rows: Callable[[Scope], list[Row]]
    compare: tuple[tuple[str, str], ...] = ()  # pairs of labels, first against second
    arch: str | None = None  # overrides the requested architecture

    def form(self, key: SetKey) -> TableForm:
        """Return the table's form for sets like `key`."""
        return TableForm(
            name=self.name,
            title=self.title,
            about=self.about,
            domains=self.domains,
            compare=self.compare,
            variant=key.regime,
            shared={"arch": key.arch, "preset": key.preset, "regime": key.regime},
        )


# Cells by their label; in a sweep with the value on its axis.
Variants = Mapping[str, Cell | tuple[Cell, float]]


def _rows_of(merge: Merge, variants: Variants) -> list[Row]:
    rows = []
    for label, variant in variants.items():
        cell, x = variant if isinstance(variant, tuple) else (variant, None)
        rows.append(Row(EVERY[merge.method].title, label, cell, x))
    return rows


def _references(domains: tuple[str, ...]) -> list[Row]:
    return [
        Row(REFERENCE, "base", base(domains)),
        Row(REFERENCE, "specialists", specialists(domains)),
    ]


# --- main tables ----------------------------------------------------------------------------------


def _variants(merge: Merge, *, extended: bool) -> Variants:
    """Return a merge, its control and its calibrations; if `extended`, also bounds and refit."""
    cells = {AS_MERGED: merged(merge)}
    if merge.method != AVERAGE:
        cells[AVERAGED] = averaged_routers(merge)
    cells[HARC] = calibrated(merge)
    cells[SOURCE] = calibrated(merge, targets="source-features")
    if extended:
        cells[EXACT] = calibrated(merge, **EXACT_SETTINGS)
        cells["source routers"] = source_routers(merge)
        cells["source routing forced"] = forced_routing(merge)
        cells[REFIT] = refitted(merge)
    return cells


def _main(domains: tuple[str, ...], scope: Scope, *, extended: bool = False) -> list[Row]:
    rows = _references(domains)
    for method in scope.methods:
        merge = Merge(method, domains)
        rows += _rows_of(merge, _variants(merge, extended=extended))
    return rows


def _all_methods(domains: tuple[str, ...], scope: Scope) -> list[Row]:
    """Return every method that suits the number of models: as merged, calibrated, refitted."""
    rows = _references(domains)
    for method in scope.every or scope.methods:
        recipe, merge = EVERY[method], Merge(method, domains)
        if recipe.fewest <= len(domains) <= (recipe.most or len(domains)):
            cells = {AS_MERGED: merged(merge), HARC: calibrated(merge), REFIT: refitted(merge)}
            rows += _rows_of(merge, cells)
    return rows


def _layers(scope: Scope) -> list[Row]:
    merge = Merge(_leading(scope)[0], TWO)
    return _rows_of(merge, _variants(merge, extended=False))


# --- ablations of calibration ---------------------------------------------------------------------


def _ablation(
    variants: Callable[[Merge, Scope], Variants], scope: Scope, *, methods: int = 1
) -> list[Row]:
    """Return the variants of the leading methods, for two models."""
    merges = [Merge(method, TWO) for method in _leading(scope)[:methods]]
    return [row for merge in merges for row in _rows_of(merge, variants(merge, scope))]


def _leading(scope: Scope) -> Sequence[str]:
    """Return the paper's WUDI and RegMean first, if they are in scope, then the others."""
    order = [m for m in ("wudi", "regmean") if m in scope.methods]
    return order + [m for m in scope.methods if m not in order]


def _hessian(merge: Merge, scope: Scope) -> Variants:
    return {
        "none": merged(merge),
        "identity": calibrated(merge, curvature="identity"),
        "diagonal": calibrated(merge, curvature="diagonal"),
        "full": calibrated(merge),
    }


def _regularisation(merge: Merge, scope: Scope) -> Variants:
    # The default α is left out of the settings, so that its cell is shared with other tables.
    alphas = {a: calibrated(merge) if a == 0.9 else calibrated(merge, alpha=a) for a in ALPHAS}
    return {
        AS_MERGED: merged(merge),
        **{f"α = {alpha:g}": (cell, alpha) for alpha, cell in alphas.items()},
        **{f"γ = {g:g}": (calibrated(merge, gamma=g), 1 / (1 + g)) for g in GAMMAS},
    }


def _composition(merge: Merge, scope: Scope) -> Variants:
    texts = {label: calibrated(merge, text=text) for text, label in TEXTS.items()}
    return {AS_MERGED: merged(merge), **texts}


def _fraction(merge: Merge, scope: Scope) -> Variants:
    shares = {f"{share:.0%}": (calibrated(merge, share=share), share) for share in SHARES}
    return {AS_MERGED: (merged(merge), 0.0), **shares}


def _last_layers(merge: Merge, scope: Scope) -> Variants:
    counts = range(1, scope.layers)
    return {
        "0 (as merged)": (merged(merge), 0.0),
        **{f"last {n}": (calibrated(merge, layers=f"last:{n}"), n) for n in counts},
        f"all {scope.layers}": (calibrated(merge), scope.layers),
    }


def _router_swap(merge: Merge, scope: Scope) -> Variants:
    return {
        "specialists": specialists(TWO),
        "specialists, merged routers": merged_routers(merge),
        AS_MERGED: merged(merge),
        "merged, source routers": source_routers(merge),
        "merged, source routing forced": forced_routing(merge),
    }


def _fine_tuning(merge: Merge, scope: Scope) -> Variants:
    plain, harc = merged(merge), calibrated(merge)
    source = calibrated(merge, targets="source-features")
    return {
        AS_MERGED: plain,
        HARC: harc,
        SOURCE: source,
        "fine-tuned": tuned(plain),
        "HARC, fine-tuned": tuned(harc),
        "source targets, fine-tuned": tuned(source),
    }


# --- refit ----------------------------------------------------------------------------------------


def _repairs(domains: tuple[str, ...], scope: Scope) -> list[Row]:
    """Return everything that repairs a merge with the same text, for several merges."""
    methods = [m for m in LEADING if m in scope.methods] or scope.methods[:1]
    untouched = [domain for domain in DOMAINS if domain not in domains]
    rows = _references(domains)
    for method in methods:
        merge = Merge(method, domains)
        cells = {AS_MERGED: merged(merge)}
        if method != AVERAGE:
            cells[AVERAGED] = averaged_routers(merge)
        cells |= {
            HARC: calibrated(merge),
            EXACT: calibrated(merge, **EXACT_SETTINGS),
            EXACT_BASE: calibrated(merge, general=GENERAL, **EXACT_SETTINGS),
            REFIT: refitted(merge),
            REFIT_FIXED: refitted(merge, ridge=0.003),
            REFIT_BASE: refitted(merge, general=GENERAL),
        }
        if len(untouched) == 1:
            cells[REFIT_KEPT] = refitted(merge, general=GENERAL, kept=untouched[0])
        cells[TUNED] = tuned(merged(merge), SWEEP)
        rows += _rows_of(merge, cells)
    return rows


def _refit_ablation(variants: Callable[[Merge], Variants], scope: Scope) -> list[Row]:
    """Return variants of one refit, of the average if it is in scope."""
    merge = Merge(AVERAGE if AVERAGE in scope.methods else scope.methods[0], TWO)
    return _rows_of(merge, variants(merge))


def _ridges(merge: Merge) -> Variants:
    swept = {f"λ = {x:g}": (refitted(merge, ridge=x), log10(x)) for x in RIDGES}
    return {AS_MERGED: merged(merge), "λ auto": refitted(merge), **swept}


def _texts(merge: Merge) -> Variants:
    swept = {f"{rows} rows": (refitted(merge, rows=rows), float(rows)) for rows in ROWS}
    return {AS_MERGED: merged(merge), **swept, "all rows": refitted(merge)}


def _parts(merge: Merge) -> Variants:
    def all_but(part: str) -> Cell:
        return refitted(merge, parts=",".join(p for p in PARTS if p != part))

    return {
        AS_MERGED: merged(merge),
        "all parts": refitted(merge),
        "routers by HARC": refitted(merge, router="harc"),
        **{f"without {part}": all_but(part) for part in PARTS},
        "experts alone": refitted(merge, parts="experts"),
    }


def _distillation(merge: Merge) -> Variants:
    plain, refit = merged(merge), refitted(merge)
    return {
        AS_MERGED: plain,
        REFIT: refit,
        REFIT_BASE: refitted(merge, general=GENERAL),
        DISTILL: distilled(plain),
        DISTILL_BASE: distilled(plain, general=GENERAL),
        f"{REFIT}, then {DISTILL_BASE}": distilled(refit, general=GENERAL),
        TUNED: tuned(plain, SWEEP),
    }


def _gradient_steps(merge: Merge) -> Variants:
    refit = refitted(merge, solver="gradient")
    return {
        AS_MERGED: merged(merge),
        REFIT: refitted(merge),
        GRADIENT: refit,
        GRADIENT_BASE: refitted(merge, general=GENERAL, solver="gradient"),
        f"{GRADIENT}, then {DISTILL_BASE}": distilled(refit, general=GENERAL),
    }


# --- pruning --------------------------------------------------------------------------------------

KEPT = {"a quarter": 0.75, "a third": 0.667, "half": 0.5, "two thirds": 0.333}
SCORES = ("norm", "frequency", "similarity")
_PRUNED_REPAIRS = {
    "refitted": REFIT,
    "tuned": TUNED,
    "calibrated": EXACT,
    "routers distilled": ROUTERS_DISTILLED,
    "refitted, chat": REFIT_KEPT,
    "gradient": GRADIENT,
}


def _pruning(removed: Sequence[str], repairs: Sequence[str], scope: Scope) -> list[Row]:
    """Return pruned specialists and their repairs."""
    rows = [Row(REFERENCE, "specialists", specialists(TWO))]
    for share in removed:
        group, keep = f"{share} removed", KEPT[share]
        rows.append(Row(group, PRUNED, pruned(TWO, keep)))
        for repair in repairs:
            rows.append(Row(group, _PRUNED_REPAIRS[repair], pruned(TWO, keep, repair=repair)))
    return rows


def _scores(scope: Scope) -> list[Row]:
    group, keep = "a third removed", KEPT["a third"]
    return [Row(group, score, pruned(TWO, keep, score)) for score in ("reap", *SCORES)]


_MAIN = ((AS_MERGED, HARC), (AS_MERGED, AVERAGED), (AVERAGED, HARC), (HARC, SOURCE))
_REPAIRED = ((AS_MERGED, HARC), (AS_MERGED, REFIT), (HARC, REFIT))
_EXTENDED = (*_MAIN, (HARC, EXACT), (EXACT, REFIT))
COMPARED = (
    (AS_MERGED, REFIT),
    (HARC, REFIT),
    (EXACT, REFIT),
    (TUNED, REFIT),
    (TUNED, REFIT_BASE),
    (REFIT, REFIT_BASE),
)
COMPARED_OF_TWO = (*COMPARED, (REFIT, REFIT_KEPT))  # of three models no domain is untouched

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        Experiment(
            "two-model",
            "Two models merged (Table 1)",
            "Math and code specialists merged with every method; routers as merged, averaged and "
            "calibrated.",
            TWO,
            partial(_main, TWO, extended=True),
            compare=_EXTENDED,
        ),
        Experiment(
            "three-model",
            "Three models merged",
            "Chat, math and code specialists merged.",
            THREE,
            partial(_main, THREE),
            compare=_MAIN,
        ),
        Experiment(
            "qwen3",
            "Two models merged, Qwen3-MoE",
            "The first table with specialists of the Qwen3-MoE architecture.",
            TWO,
            partial(_main, TWO),
            compare=_MAIN,
            arch="qwen3_moe",
        ),
        Experiment(
            "methods",
            "Every merge method, two models",
            "Every method as merged, calibrated and refitted. Settings are the defaults; those of "
            "the first six methods are the paper's.",
            TWO,
            partial(_all_methods, TWO),
            compare=_REPAIRED,
        ),
        Experiment(
            "methods-three",
            "Every merge method, three models",
            "The same with chat, math and code specialists.",
            THREE,
            partial(_all_methods, THREE),
            compare=_REPAIRED,
        ),
        Experiment(
            "hessian",
            "How much curvature is needed (Figure 2a)",
            "The whole Hessian of the gate, its diagonal, the identity, or no calibration.",
            TWO,
            partial(_ablation, _hessian),
        ),
        Experiment(
            "alpha-gamma",
            "Regularisation: α against γ (Figure 2b)",
            "α Σ + (1 − α) diag Σ against Σ + γ diag Σ. The two are equal up to a factor if "
            "γ = (1 − α)/α; γ is drawn at its α.",
            TWO,
            partial(_ablation, _regularisation),
        ),
        Experiment(
            "data",
            "Kinds of calibration text (Figure 2c)",
            "The same prompts with the source's correct answers, all its answers, the ground "
            "truth, or no answer; and text of another domain.",
            TWO,
            partial(_ablation, _composition),
        ),
        Experiment(
            "fraction",
            "How much calibration text is needed (Figure 3b)",
            "From a tenth of the rows to all rows.",
            TWO,
            partial(_ablation, _fraction, methods=2),
        ),
        Experiment(
            "last-layers",
            "Calibrating the last layers only",
            "The last L layers.",
            TWO,
            partial(_ablation, _last_layers),
        ),
        Experiment(
            "router-swap",
            "Swapped routers (Figure 1)",
            "Specialists with the merged routers, and the merged model with the specialists'.",
            TWO,
            partial(_ablation, _router_swap),
        ),
        Experiment(
            "layers",
            "Divergence of the routing, layer by layer (Figure 3a)",
            "KL between each specialist's own routing and the model's, on the same tokens.",
            TWO,
            _layers,
        ),
        Experiment(
            "fine-tuning",
            "Fine-tuning after the merge",
            "The merge, calibrated or not, fine-tuned on the calibration text of both domains.",
            TWO,
            partial(_ablation, _fine_tuning, methods=2),
            compare=(
                ("fine-tuned", "HARC, fine-tuned"),
                ("fine-tuned", "source targets, fine-tuned"),
            ),
        ),
        Experiment(
            "refit",
            "Every map refitted",
            "Merges repaired with the same text: routers calibrated, all maps refitted, or all "
            "weights fine-tuned (the best of four on validation problems). With the base: one "
            "more source, on 64 rows of general text or of the domain without a source.",
            TWO,
            partial(_repairs, TWO),
            compare=COMPARED_OF_TWO,
        ),
        Experiment(
            "refit-qwen3",
            "Every map refitted, Qwen3-MoE",
            "The same with specialists of the Qwen3-MoE architecture.",
            TWO,
            partial(_repairs, TWO),
            compare=COMPARED_OF_TWO,
            arch="qwen3_moe",
        ),
        Experiment(
            "refit-three",
            "Every map refitted, three models",
            "The same with chat, math and code specialists.",
            THREE,
            partial(_repairs, THREE),
            compare=COMPARED,
        ),
        Experiment(
            "refit-ridge",
            "Refit: strength of the ridge",
            "λ chosen on held-out rows, and fixed values.",
            TWO,
            partial(_refit_ablation, _ridges),
        ),
        Experiment(
            "refit-text",
            "Refit: how much text is needed",
            "Rows of text per domain.",
            TWO,
            partial(_refit_ablation, _texts),
        ),
        Experiment(
            "distill",
            "Distillation",
            "A weight average repaired with the same text: maps refitted, or all weights trained "
            "on the specialists' distributions. With the base: one more source, on 64 rows of "
            "general text.",
            TWO,
            partial(_refit_ablation, _distillation),
            compare=((AS_MERGED, DISTILL), (REFIT, DISTILL), (TUNED, DISTILL)),
        ),
        Experiment(
            "gradient",
            "Refit by gradient steps",
            "The same weight average, refitted in closed form or by gradient steps.",
            TWO,
            partial(_refit_ablation, _gradient_steps),
            compare=((REFIT, GRADIENT),),
        ),
        Experiment(
            "prune",
            "Pruned specialists",
            "Each specialist without a third of its experts, repaired with its own text and "
            "itself as the source.",
            TWO,
            partial(_pruning, ["a third"], list(_PRUNED_REPAIRS)[:-1]),
            compare=((PRUNED, REFIT), (TUNED, REFIT)),
        ),
        Experiment(
            "prune-shares",
            "Pruned specialists: how many experts are removed",
            "Each specialist with fewer experts, repaired with its own text.",
            TWO,
            partial(_pruning, ["a quarter", "half", "two thirds"], ["refitted", "tuned"]),
            compare=((PRUNED, REFIT), (TUNED, REFIT)),
        ),
        Experiment(
            "prune-gradient",
            "Pruned specialists, refitted by gradient steps",
            "Refit in closed form, by gradient steps, and fine-tuning.",
            TWO,
            partial(_pruning, ["a third"], ["refitted", "gradient", "tuned"]),
            compare=((REFIT, GRADIENT), (TUNED, GRADIENT)),
        ),
        Experiment(
            "prune-scores",
            "Pruned specialists: which experts are removed",
            "Scores of experts, without a repair.",
            TWO,
            _scores,
        ),
        Experiment(
            "refit-parts",
            "Refit: contribution of each part",
            "All maps, all but one part, and experts alone.",
            TWO,
            partial(_refit_ablation, _parts),
        ),
    )
}
