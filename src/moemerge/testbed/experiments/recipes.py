"""How the models of a table come about, and what is measured of them. Names only, no work.

A model is a small tree: trained, merged from trained ones, with another model's routers, with
calibrated routers, with every map refitted, fine-tuned further. Equal trees make equal models, so
that experiments share them; `name` is the tree in words, and the key under which results are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moemerge.testbed.tasks import DOMAINS

BASE = "base"


@dataclass(frozen=True)
class Trained:
    """The base, or the specialist of a domain."""

    which: str

    @property
    def name(self) -> str:
        return self.which

    @property
    def parents(self) -> tuple[Model, ...]:
        return ()


@dataclass(frozen=True)
class Merged:
    """Specialists merged by one of `merges.EVERY`."""

    method: str
    domains: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.method}({','.join(self.domains)})"

    @property
    def parents(self) -> tuple[Model, ...]:
        return tuple(Trained(which) for which in (BASE, *self.domains))


@dataclass(frozen=True)
class Grafted:
    """All weights of one model, but another's routers."""

    weights: Model
    routers: Model

    @property
    def name(self) -> str:
        return f"{self.weights.name} with routers of {self.routers.name}"

    @property
    def parents(self) -> tuple[Model, ...]:
        return (self.weights, self.routers)


@dataclass(frozen=True)
class Calibrated:
    """`api.calibrate` with the sources' text of one kind; `settings` differ from its defaults."""

    model: Model
    domains: tuple[str, ...]
    text: str = "correct"
    share: float = 1.0  # of the text's rows
    settings: tuple[tuple[str, Any], ...] = ()
    general: int = 0  # rows of general text on which the base is one more source

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.settings]
        words += [f"text={self.text}"] if self.text != "correct" else []
        words += [f"share={self.share:g}"] if self.share != 1.0 else []
        words += [f"base={self.general}"] if self.general else []
        return f"{self.model.name} calibrated[{','.join(words)}]"

    @property
    def parents(self) -> tuple[Model, ...]:
        return (self.model, *(Trained(which) for which in (BASE, *self.domains)))


@dataclass(frozen=True)
class Refitted:
    """`api.refit` with the sources' correct answers; `settings` differ from its defaults."""

    model: Model
    domains: tuple[str, ...]
    rows: int | None = None  # of each domain's text; None: all
    general: int = 0  # rows of general text on which the base is one more source
    settings: tuple[tuple[str, Any], ...] = ()
    kept: str = ""  # the domain of the base's rows, where they are not of all

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.settings]
        words += [f"rows={self.rows}"] if self.rows is not None else []
        words += [f"base={self.general}"] if self.general else []
        words += [f"kept={self.kept}"] if self.kept else []
        return f"{self.model.name} refitted[{','.join(words)}]"

    @property
    def parents(self) -> tuple[Model, ...]:
        return (self.model, *(Trained(which) for which in (BASE, *self.domains)))


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning: so many times the usual steps, at a learning rate."""

    times: int
    lr: float


# A fifth of the rate that made the specialists.
USUAL = Tuning(1, 2e-4)
SWEEP = (USUAL, Tuning(1, 1e-3), Tuning(4, 2e-4), Tuning(4, 1e-3))


@dataclass(frozen=True)
class Tuned:
    """Fine-tuned after the merge on the calibration text of all its domains.

    Of several tunings the one is taken that solves most validation problems, which are neither
    trained on nor tested with.
    """

    model: Model
    domains: tuple[str, ...]
    tunings: tuple[Tuning, ...] = (USUAL,)

    @property
    def name(self) -> str:
        swept = "|".join(f"{tuning.times}x{tuning.lr:g}" for tuning in self.tunings)
        return f"{self.model.name} tuned" + (f"[{swept}]" if self.tunings != (USUAL,) else "")

    @property
    def parents(self) -> tuple[Model, ...]:
        return (self.model,)


Model = Trained | Merged | Grafted | Calibrated | Refitted | Tuned


def calibrated(
    merged: Merged, text: str = "correct", share: float = 1.0, general: int = 0, **settings: Any
) -> Model:
    """The paper's calibration of a merge, or a variation of it."""
    given = tuple(sorted(settings.items()))
    return Calibrated(merged, merged.domains, text, share, given, general)


def refitted(
    merged: Merged, rows: int | None = None, general: int = 0, kept: str = "", **settings: Any
) -> Model:
    """Every map of a merge refitted."""
    given = tuple(sorted(settings.items()))
    return Refitted(merged, merged.domains, rows, general, given, kept)


@dataclass(frozen=True)
class Cell:
    """A measurement: every domain's problems, answered by the model that `runs` names for it.

    With `forced`, the model's routing is taken away: each token goes where the domain's specialist
    would send it. `untouched` are domains that nobody specialised in or calibrated for: what the
    model still solves of them stands beside its mean, not in it.
    """

    name: str
    runs: tuple[tuple[str, Model], ...]
    forced: bool = False
    untouched: tuple[tuple[str, Model], ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(domain for domain, _ in self.runs)

    @property
    def models(self) -> tuple[Model, ...]:
        """Everything that must exist, the specialists compared with included."""
        models = [model for _, model in self.runs] + [Trained(domain) for domain in self.domains]
        return tuple(dict.fromkeys(models))


def measured(model: Model, domains: tuple[str, ...]) -> Cell:
    """One model for all domains, those that are none of its own included."""
    suffix = "" if set(domains) == set(_domains_of(model)) else f" on {','.join(domains)}"
    untouched = tuple((domain, model) for domain in DOMAINS if domain not in domains)
    runs = tuple((domain, model) for domain in domains)
    return Cell(model.name + suffix, runs, untouched=untouched)


def individual(domains: tuple[str, ...]) -> Cell:
    """Every specialist on its own domain."""
    return Cell(f"specialists({','.join(domains)})", tuple((d, Trained(d)) for d in domains))


def with_source_routers(model: Merged) -> Cell:
    """The merged model, on each domain with that specialist's routers."""
    return _swapped(model, "with source routers", lambda source: Grafted(model, source))


def sources_with_merged_routers(model: Merged) -> Cell:
    """Every specialist on its own domain, with the merged model's routers."""
    return _swapped(model, "routers in the sources", lambda source: Grafted(source, model))


def forced_routing(model: Merged) -> Cell:
    """The merged model, each token routed as the domain's specialist routes it."""
    runs = tuple((domain, model) for domain in model.domains)
    return Cell(f"{model.name} with forced routing", runs, forced=True)


def _swapped(model: Merged, words: str, graft: Callable[[Trained], Model]) -> Cell:
    runs = tuple((domain, graft(Trained(domain))) for domain in model.domains)
    return Cell(f"{model.name} {words}", runs)


def _domains_of(model: Model) -> tuple[str, ...]:
    if isinstance(model, Trained):
        return ()
    if isinstance(model, Grafted):
        return _domains_of(model.weights) or _domains_of(model.routers)
    return model.domains


@dataclass(frozen=True)
class SetKey:
    """Which trained set: a table's rows are repeated over those that differ by seed alone."""

    arch: str
    preset: str
    regime: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.preset}-{self.regime}-{self.seed}"

    def to_json(self) -> Mapping[str, Any]:
        return {"arch": self.arch, "preset": self.preset, "regime": self.regime, "seed": self.seed}
