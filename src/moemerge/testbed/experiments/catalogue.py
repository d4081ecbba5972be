"""The paper's experiments in miniature: which cells each has, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moemerge.errors import UsageError
from moemerge.experiments.tables import (
    AS_MERGED,
    AVERAGED,
    EXACT,
    HARC,
    REFERENCE,
    REFIT,
    SOURCE,
    Row,
    TableForm,
)
from moemerge.registry import did_you_mean
from moemerge.testbed.experiments import ablations
from moemerge.testbed.experiments.ablations import (
    FORCED,
    SOURCE_ROUTERS,
    TWO,
    Scope,
    Variant,
)
from moemerge.testbed.experiments.merges import AVERAGE, EVERY
from moemerge.testbed.experiments.recipes import (
    BASE,
    Cell,
    Grafted,
    Merged,
    SetKey,
    Trained,
    calibrated,
    forced_routing,
    individual,
    measured,
    refitted,
    with_source_routers,
)

THREE = ("chat", "math", "code")


@dataclass(frozen=True)
class Experiment:
    """A table, and how it is drawn."""

    name: str
    title: str
    about: str
    domains: tuple[str, ...]
    rows: Callable[[Scope], list[Row[Cell]]]
    figure: str  # bars, groups, lines, swap or layers
    axis: str = ""
    compare: tuple[tuple[str, str], ...] = ()  # pairs of labels, first against second
    arch: str | None = None  # instead of the one asked for

    def form(self, key: SetKey) -> TableForm:
        """The table of this experiment over sets like `key`."""
        return TableForm(
            name=self.name,
            title=self.title,
            about=self.about,
            domains=self.domains,
            figure=self.figure,
            axis=self.axis,
            compare=self.compare,
            variant=key.regime,
            shared={"arch": key.arch, "preset": key.preset, "regime": key.regime},
        )


def variants(method: str, domains: tuple[str, ...], *, extended: bool) -> list[Row[Cell]]:
    """One method's rows of a main table: plain, control, HARC and source targets.

    `extended`: the exact objective as well, which takes its time, what bounds all routers, and the
    whole model refitted.
    """
    merged = Merged(method, domains)
    models: dict[str, Variant] = {AS_MERGED: merged}
    if method != AVERAGE:
        models[AVERAGED] = Grafted(merged, Merged(AVERAGE, domains))
    models[HARC] = calibrated(merged)
    models[SOURCE] = calibrated(merged, targets="source-features")
    if extended:
        models[EXACT] = calibrated(merged, targets="source-features", objective="exact")
        models[SOURCE_ROUTERS] = with_source_routers(merged)
        models[FORCED] = forced_routing(merged)
        models[REFIT] = refitted(merged)
    return _rows_of(merged, models)


def _main(domains: tuple[str, ...], *, extended: bool) -> Callable[[Scope], list[Row[Cell]]]:
    def rows(scope: Scope) -> list[Row[Cell]]:
        own = [row for m in scope.methods for row in variants(m, domains, extended=extended)]
        return [*_references(domains), *own]

    return rows


def _all_methods(domains: tuple[str, ...]) -> Callable[[Scope], list[Row[Cell]]]:
    """Every method that is one for so many models: as merged, calibrated, refitted."""

    def rows(scope: Scope) -> list[Row[Cell]]:
        own = []
        for method in scope.every or scope.methods:
            recipe, merged = EVERY[method], Merged(method, domains)
            if recipe.fewest <= len(domains) <= (recipe.most or len(domains)):
                models = {AS_MERGED: merged, HARC: calibrated(merged), REFIT: refitted(merged)}
                own += _rows_of(merged, models)
        return [*_references(domains), *own]

    return rows


def _references(domains: tuple[str, ...]) -> list[Row[Cell]]:
    return [
        Row(REFERENCE, "base", measured(Trained(BASE), domains)),
        Row(REFERENCE, "specialists", individual(domains)),
    ]


def _repairs(domains: tuple[str, ...]) -> Callable[[Scope], list[Row[Cell]]]:
    """What mends a merge, from several merges."""

    def rows(scope: Scope) -> list[Row[Cell]]:
        methods = [m for m in ablations.LEADING if m in scope.methods] or scope.methods[:1]
        merges = [Merged(method, domains) for method in methods]
        own = [row for merged in merges for row in _rows_of(merged, ablations.repairs(merged))]
        return [*_references(domains), *own]

    return rows


def _refit_ablation(of: Callable[[Merged], ablations.Swept]) -> Callable[[Scope], list[Row[Cell]]]:
    """Variants of one refit, where refit matters most: of the average where it is in scope."""

    def rows(scope: Scope) -> list[Row[Cell]]:
        merged = Merged(AVERAGE if AVERAGE in scope.methods else scope.methods[0], TWO)
        return _rows_of(merged, of(merged))

    return rows


def _ablation(
    of: Callable[[Merged, Scope], Mapping[str, Variant]], methods: int = 1
) -> Callable[[Scope], list[Row[Cell]]]:
    """The variants of the leading methods, merged of two models, by their labels."""

    def rows(scope: Scope) -> list[Row[Cell]]:
        merges = [Merged(method, TWO) for method in _leading(scope, methods)]
        return [row for merged in merges for row in _rows_of(merged, of(merged, scope))]

    return rows


def _rows_of(merged: Merged, variants: Mapping[str, Variant]) -> list[Row[Cell]]:
    rows = []
    for label, variant in variants.items():
        what, x = variant if isinstance(variant, tuple) else (variant, None)
        cell = what if isinstance(what, Cell) else measured(what, merged.domains)
        rows.append(Row(EVERY[merged.method].title, label, cell, x))
    return rows


def _leading(scope: Scope, count: int) -> Sequence[str]:
    """The methods of an ablation: the paper's WUDI and RegMean where they are in scope."""
    order = [m for m in ("wudi", "regmean") if m in scope.methods]
    return (order + [m for m in scope.methods if m not in order])[:count]


def _layers(scope: Scope) -> list[Row[Cell]]:
    return [row for m in _leading(scope, 1) for row in variants(m, TWO, extended=False)]


_MAIN = ((AS_MERGED, HARC), (AS_MERGED, AVERAGED), (AVERAGED, HARC), (HARC, SOURCE))
_REPAIRED = ((AS_MERGED, HARC), (AS_MERGED, REFIT), (HARC, REFIT))
_EXTENDED = (*_MAIN, (HARC, EXACT), (EXACT, REFIT))

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        Experiment(
            "two-model",
            "Two models merged (Table 1)",
            "Math and code specialists merged by every method, with the routers as merged, "
            "plainly averaged, and calibrated.",
            TWO,
            _main(TWO, extended=True),
            figure="groups",
            compare=_EXTENDED,
        ),
        Experiment(
            "three-model",
            "Three models merged",
            "Chat, math and code specialists merged.",
            THREE,
            _main(THREE, extended=False),
            figure="groups",
            compare=_MAIN,
        ),
        Experiment(
            "qwen3",
            "Two models merged, Qwen3-MoE",
            "The first table with specialists of the Qwen3-MoE architecture.",
            TWO,
            _main(TWO, extended=False),
            figure="groups",
            compare=_MAIN,
            arch="qwen3_moe",
        ),
        Experiment(
            "methods",
            "Every merge method, two models",
            "Every method as it is merged, with routers calibrated, and wholly refitted. Settings "
            "are the defaults of each; those of the first six are the paper's.",
            TWO,
            _all_methods(TWO),
            figure="groups",
            compare=_REPAIRED,
        ),
        Experiment(
            "methods-three",
            "Every merge method, three models",
            "The same with chat, math and code specialists.",
            THREE,
            _all_methods(THREE),
            figure="groups",
            compare=_REPAIRED,
        ),
        Experiment(
            "hessian",
            "How much curvature is needed (Figure 2a)",
            "The whole Hessian of the gate, its diagonal, the identity, or no calibration.",
            TWO,
            _ablation(ablations.hessian),
            figure="bars",
        ),
        Experiment(
            "alpha-gamma",
            "Regularisation: α against γ (Figure 2b)",
            "α Σ + (1 − α) diag Σ against Σ + γ diag Σ. The two are the same problem up to a "
            "factor when γ = (1 − α)/α; γ is drawn at its α.",
            TWO,
            _ablation(ablations.regularisation),
            figure="lines",
            axis="α, or 1/(1 + γ)",
        ),
        Experiment(
            "data",
            "What the calibration text is made of (Figure 2c)",
            "The same prompts with the source's correct answers, all its answers, the ground "
            "truth, or nothing; and text of another domain.",
            TWO,
            _ablation(ablations.composition),
            figure="bars",
        ),
        Experiment(
            "fraction",
            "How much calibration text is needed (Figure 3b)",
            "A tenth of the rows to all of them.",
            TWO,
            _ablation(ablations.fraction, methods=2),
            figure="lines",
            axis="share of the calibration text",
        ),
        Experiment(
            "last-layers",
            "Calibrating the last layers only",
            "The last L layers of all.",
            TWO,
            _ablation(ablations.last_layers),
            figure="lines",
            axis="calibrated layers, from the last",
        ),
        Experiment(
            "router-swap",
            "Swapped routers (Figure 1)",
            "Specialists with the merged routers, and the merged model with the specialists'.",
            TWO,
            _ablation(ablations.router_swap),
            figure="swap",
        ),
        Experiment(
            "layers",
            "Divergence of the routing, layer by layer (Figure 3a)",
            "KL between each specialist's own routing and the model's, on the same tokens.",
            TWO,
            _layers,
            figure="layers",
        ),
        Experiment(
            "fine-tuning",
            "Fine-tuning after the merge",
            "The merge, calibrated or not, fine-tuned on the calibration text of both domains.",
            TWO,
            _ablation(ablations.fine_tuning, methods=2),
            figure="bars",
            compare=(
                ("fine-tuned", "HARC, fine-tuned"),
                ("fine-tuned", "source targets, fine-tuned"),
            ),
        ),
        Experiment(
            "refit",
            "Every map refitted",
            "Merges mended with the same text: routers calibrated, all maps refitted, or "
            "everything fine-tuned (four courses, the best on validation problems); with the "
            "base: one more source, on 64 rows of general text, or of the domain that is "
            "untouched.",
            TWO,
            _repairs(TWO),
            figure="groups",
            compare=ablations.COMPARED_OF_TWO,
        ),
        Experiment(
            "refit-qwen3",
            "Every map refitted, Qwen3-MoE",
            "The same with specialists of the Qwen3-MoE architecture.",
            TWO,
            _repairs(TWO),
            figure="groups",
            compare=ablations.COMPARED_OF_TWO,
            arch="qwen3_moe",
        ),
        Experiment(
            "refit-three",
            "Every map refitted, three models",
            "The same with chat, math and code specialists.",
            THREE,
            _repairs(THREE),
            figure="groups",
            compare=ablations.COMPARED,
        ),
        Experiment(
            "refit-ridge",
            "Refit: how strongly maps are held",
            "λ as held-out rows want it, and fixed ones.",
            TWO,
            _refit_ablation(ablations.ridges),
            figure="lines",
            axis="log10 λ",
        ),
        Experiment(
            "refit-text",
            "Refit: how much text is needed",
            "Rows of each domain's text.",
            TWO,
            _refit_ablation(ablations.texts),
            figure="lines",
            axis="rows of text a domain",
        ),
        Experiment(
            "refit-parts",
            "Refit: what each part brings",
            "All maps, all but those of one part, and experts alone.",
            TWO,
            _refit_ablation(ablations.parts),
            figure="bars",
        ),
    )
}


def experiment(name: str) -> Experiment:
    """By name, with help for a misspelt one."""
    if name not in EXPERIMENTS:
        raise UsageError(
            f"unknown experiment {name!r}{did_you_mean(name, EXPERIMENTS)}",
            hint=f"known: {', '.join(EXPERIMENTS)}, or all",
        )
    return EXPERIMENTS[name]
