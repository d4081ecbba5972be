"""What a diagnosis found, as typed data and as one JSON document."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from moemerge.errors import UsageError

KIND: Final = "diagnosis"
# What the diagnosed model is called in the rows; those it is compared with go by their labels.
MODEL: Final = "model"


@dataclass(frozen=True)
class ModelFacts:
    """The diagnosed model, from its headers."""

    label: str
    architecture: str
    layers: int  # decoder layers
    experts: int  # that a router chooses among
    top_k: int
    gate: str  # in words: "softmax, top 8 of 64"
    routers: int


@dataclass(frozen=True)
class NamedModel:
    """A diagnosed model, or a source, by its name in this document."""

    name: str
    label: str


@dataclass(frozen=True)
class DomainFacts:
    """The text of one domain."""

    tokens: int
    rows: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class LayerDiagnosis:
    """One router of one model against the same router of its domain's source, over the tokens.

    Unless a name says otherwise, the source routes on its own features and the model on its own:
    what really happens to a token. `..._on_features` puts both routers on the model's features, so
    that only the routers differ.
    """

    model: str
    domain: str
    layer: int
    router: str
    tokens: int
    mismatch: float  # share of the source's Top-k choices that the model does not make
    any_mismatch: float  # share of tokens with at least one such choice
    top1_agreement: float  # share of tokens whose highest-scored expert is the same
    weighted_overlap: float  # mean of Σ min(w, w'), the chosen experts' weights summing to 1
    kl: float  # mean KL(source ‖ model) of the routing distributions
    kl_on_features: float
    mismatch_on_features: float
    quadratic: float  # second-order approximation of `kl_on_features`
    logit_shift: float  # mean ‖z_m − z_i‖ / ‖z_i‖ on the model's features
    shift_small: float  # share of tokens where that is below 0.1
    shift_moderate: float  # ... below 0.2
    load_source: tuple[float, ...]  # share of the source's choices that each expert gets
    load: tuple[float, ...]  # ... of the model's
    entropy_source: float  # of the load, as a share of its largest value, log K
    entropy: float
    dead: tuple[int, ...]  # experts that the source uses and the model hardly does
    overloaded: tuple[int, ...]  # experts with many times their share of the source's load
    drift: float  # mean ‖x_m − x_i‖ / ‖x_i‖ of the router's inputs
    # [expert that lost tokens, expert that took them, share of all choices]; largest first.
    flow: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True)
class DomainTotal:
    """One model on one domain, over all its routers."""

    model: str
    domain: str
    tokens: int
    mismatch: float  # mean over the routers, as are the others below
    any_mismatch: float  # share of tokens with a mismatch at any router
    mismatched_per_token: float  # choices of a token, over all routers, that are not made
    choices_per_token: int  # ... out of so many
    mismatched_layers_per_token: float  # routers at which a token's choice differs at all
    top1_agreement: float
    weighted_overlap: float
    kl: float
    kl_on_features: float
    mismatch_on_features: float
    quadratic: float
    logit_shift: float
    shift_small: float
    shift_moderate: float
    drift: float
    loss: float | None  # next-token loss in nats; None where the text has no next token
    loss_source: float | None


@dataclass(frozen=True)
class Swap:
    """Weights of one model with the routers of another, measured on one domain.

    Names are `model` and the domain's source. `mismatch` is against the source as it is.
    """

    domain: str
    weights_of: str
    routers_of: str
    mismatch: float
    loss: float | None


@dataclass(frozen=True)
class Figure:
    """A number of the verdict: a value for programs, a text for people."""

    label: str
    value: float
    text: str


@dataclass(frozen=True)
class Verdict:
    """What the figures amount to, in a sentence and three numbers."""

    words: str
    numbers: tuple[Figure, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Everything a diagnosis found. `to_json` is the document that pages and programs read."""

    version: str
    command: str
    created: str
    model: ModelFacts
    models: tuple[NamedModel, ...]  # the diagnosed model first
    sources: Mapping[str, NamedModel]
    domains: Mapping[str, DomainFacts]
    layers: tuple[LayerDiagnosis, ...]
    totals: tuple[DomainTotal, ...]
    swaps: tuple[Swap, ...]
    calibration: Mapping[str, Any] | None  # the report of the first model that was calibrated ...
    calibration_of: str | None  # ... and its name
    verdict: Verdict
    advice: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    notices: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; a figure that is no number is null."""
        return {
            "kind": KIND,
            "version": self.version,
            "command": self.command,
            "created": self.created,
            "model": _plain(self.model),
            "models": [_plain(model) for model in self.models],
            "sources": {name: {"label": found.label} for name, found in self.sources.items()},
            "domains": {name: _plain(domain) for name, domain in self.domains.items()},
            "layers": [_plain(row) for row in self.layers],
            "totals": [_plain(total) for total in self.totals],
            "swaps": [_plain(swap) for swap in self.swaps],
            "calibration": None if self.calibration is None else dict(self.calibration),
            "calibration_of": self.calibration_of,
            "verdict": {
                "words": self.verdict.words,
                "numbers": [_plain(figure) for figure in self.verdict.numbers],
            },
            "advice": list(self.advice),
            "settings": dict(self.settings),
            "device": self.device,
            "dtype": self.dtype,
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for each model, domain and router: what a table wants."""
        nested = ("load_source", "load", "flow")
        return [
            {name: value for name, value in _plain(row).items() if name not in nested}
            | {"dead": len(row.dead), "overloaded": len(row.overloaded)}
            for row in self.layers
        ]

    def to_dataframe(self) -> Any:
        """`rows` as a pandas DataFrame, where pandas is installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UsageError(
                "to_dataframe needs pandas, which is not installed",
                hint="pip install pandas, or use rows(), which needs nothing",
            ) from error
        return pandas.DataFrame(self.rows())

    def layers_of(self, model: str = MODEL, domain: str | None = None) -> list[LayerDiagnosis]:
        """The rows of one model (and domain), in the order the model runs its routers."""
        return [r for r in self.layers if r.model == model and domain in (None, r.domain)]

    def total(self, domain: str, model: str = MODEL) -> DomainTotal:
        """One model's total on one domain."""
        for found in self.totals:
            if found.model == model and found.domain == domain:
                return found
        have = ", ".join(f"{t.model}/{t.domain}" for t in self.totals)
        raise UsageError(f"no figures of {model!r} on {domain!r}; there are {have}")


def _plain(item: Any) -> dict[str, Any]:
    return {f.name: _value(getattr(item, f.name)) for f in fields(item)}


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_value(one) for one in value]
    return value
