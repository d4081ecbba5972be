"""The result of a diagnosis, as typed data and as one JSON document."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Final

from moemerge.errors import UsageError
from moemerge.routing.figures import FIGURES, Figure, Measured, total_figures
from moemerge.runtime.formatting import Quantity, perplexity

KIND: Final = "diagnosis"
# The diagnosed model's name in the rows; compared models go by their labels.
MODEL: Final = "model"


@dataclass(frozen=True)
class ModelFacts:
    """The diagnosed model, from its headers."""

    label: str
    architecture: str
    layers: int  # decoder layers
    experts: int  # experts per router
    top_k: int
    gate: str  # a description: "softmax, top 8 of 64"
    routers: int


@dataclass(frozen=True)
class NamedModel:
    """A diagnosed model or a source, and its name in this document."""

    name: str
    label: str


@dataclass(frozen=True)
class DomainFacts:
    """The text of one domain."""

    tokens: int
    rows: int
    files: tuple[str, ...]
    reference: str = "source"  # the reference: its source, or the `base`


@dataclass(frozen=True, kw_only=True)
class LayerDiagnosis(Measured):
    """One router of one model, compared with its domain's source over all tokens.

    Its figures are attributes, such as `row.mismatch`; `routing.figures` declares them.
    """

    model: str
    domain: str
    layer: int
    router: str

    def to_json(self) -> dict[str, Any]:
        names = ("model", "domain", "layer", "router", "tokens")
        return {**{name: getattr(self, name) for name in names}, **_plain(self.figures)}


@dataclass(frozen=True, kw_only=True)
class DomainTotal(Measured):
    """One model on one domain, over all its routers; figures as in `LayerDiagnosis`."""

    model: str
    domain: str

    @classmethod
    def of(cls, rows: Sequence[LayerDiagnosis], **measured: float | None) -> DomainTotal:
        """Summarise the rows of one model on one domain; `measured` are figures that rows do not
        have.
        """
        first = rows[0]
        return cls(
            model=first.model,
            domain=first.domain,
            tokens=first.tokens,
            choices=sum(row.choices for row in rows),
            figures=total_figures(rows, **measured),
        )

    def to_json(self) -> dict[str, Any]:
        names = ("model", "domain", "tokens")
        return {**{name: getattr(self, name) for name in names}, **_plain(self.figures)}


@dataclass(frozen=True)
class Swap:
    """The weights of one model with the routers of another, measured on one domain.

    The names are `model` and the domain's source. `mismatch` is against the unchanged source.
    """

    domain: str
    weights_of: str
    routers_of: str
    mismatch: float
    loss: float | None


@dataclass(frozen=True)
class CheckLoss:
    """The next-token loss of one model on one check text, in nats a token.

    Errors are standard errors, clustered by document. `change` is the difference to the diagnosed
    model on the same documents; None for that model.
    """

    name: str
    model: str  # a subject, or the source of that name
    rows: int
    documents: int
    tokens: int  # predicted tokens
    loss: float
    error: float | None
    change: float | None = None
    change_error: float | None = None

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass(frozen=True)
class KeyNumber:
    """A number of the verdict: a value for programs, a text for people."""

    label: str
    value: float
    text: str


@dataclass(frozen=True)
class Verdict:
    """The verdict: a sentence and three numbers."""

    words: str
    numbers: tuple[KeyNumber, ...]
    recommended: tuple[str, ...]  # the recommended model, or two candidates
    theory: str  # whether the quadratic model that calibration solves holds here


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The whole result. `to_json` is the document that pages and programs read."""

    version: str
    command: str
    created: str
    model: ModelFacts
    models: tuple[NamedModel, ...]  # the diagnosed model first
    sources: Mapping[str, NamedModel]
    domains: Mapping[str, DomainFacts]
    figures: tuple[Figure, ...]
    layers: tuple[LayerDiagnosis, ...]
    totals: tuple[DomainTotal, ...]
    swaps: tuple[Swap, ...]
    calibration: Mapping[str, Any] | None  # the report of the first model that was calibrated ...
    calibration_of: str | None  # ... and its name
    refit: Mapping[str, Any] | None  # likewise of the first that was refitted
    refit_of: str | None
    check: tuple[CheckLoss, ...]  # of every model on every check text
    verdict: Verdict
    advice: tuple[str, ...]
    settings: Mapping[str, Any]
    device: str
    dtype: str
    notices: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; NaN and infinity are null."""
        own = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {
            "kind": KIND,
            **own,
            "sources": {name: {"label": source.label} for name, source in self.sources.items()},
            "check": [_plain(one) | {"perplexity": one.perplexity} for one in self.check],
            "seconds": round(self.seconds, 3),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dictionary for each model, domain and router, as for a table."""
        flat = []
        for row in self.layers:
            data = row.to_json()
            for name in row.figures:
                quantity = FIGURES[name].quantity
                if quantity is Quantity.DATA:
                    del data[name]
                elif quantity is Quantity.EXPERTS:
                    data[name] = len(data[name])
            flat.append(data)
        return flat

    def to_dataframe(self) -> Any:
        """Return `rows` as a pandas DataFrame, if pandas is installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UsageError(
                "to_dataframe needs pandas, which is not installed",
                hint="pip install pandas, or use rows(), which needs nothing",
            ) from error
        return pandas.DataFrame(self.rows())

    def layers_of(self, model: str = MODEL, domain: str | None = None) -> list[LayerDiagnosis]:
        """Return the rows of one model (and domain), in the order of its routers."""
        return [r for r in self.layers if r.model == model and domain in (None, r.domain)]

    def check_of(self, name: str, model: str = MODEL) -> CheckLoss | None:
        """Return one model's loss on one check text, or None if it was not measured."""
        found = (one for one in self.check if one.name == name and one.model == model)
        return next(found, None)

    def total(self, domain: str, model: str = MODEL) -> DomainTotal:
        """Return one model's total on one domain."""
        for total in self.totals:
            if total.model == model and total.domain == domain:
                return total
        have = ", ".join(f"{t.model}/{t.domain}" for t in self.totals)
        raise UsageError(f"no figures of {model!r} on {domain!r}; there are {have}")


def _plain(value: Any) -> Any:
    """Convert dataclasses, tuples, NaN and infinity, which JSON does not have."""
    if is_dataclass(value) and not isinstance(value, type):
        return value.to_json() if hasattr(value, "to_json") else _plain(asdict(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
