"""The report of a merge; it accounts for every input tensor."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from moemerge.merging.plan import Fate, MergePlan
from moemerge.methods.method import Facts, Remark
from moemerge.runtime.progress import counted, first_few


@dataclass(frozen=True)
class ModelAccount:
    """One input model's tensors: the number merged, and the names of all others by reason."""

    name: str
    reference: str
    tensors: int
    merged: int
    copied: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    base: bool = False  # whether it is the base of the others, and not merged itself


# Keys of the report's JSON that are left out if there is nothing to report.
OPTIONAL = {
    *("wrap", "coefficients", "settings", "statistics_seconds"),
    *("statistics", "tasks", "remarks", "requantised"),
}


@dataclass(frozen=True)
class MergeReport:
    """The `merge` part of `moemerge_report.json`."""

    method: str
    router: str | None  # description of the config's `router:` section
    models: tuple[ModelAccount, ...]
    output_tensors: int
    output_bytes: int
    output_parameters: int
    dtypes: tuple[str, ...]
    bytes_read: int  # size of all input files
    peak_block_bytes: int
    seed: int
    notices: tuple[str, ...]
    # Settings that change the result and are not in the config.
    settings: dict[str, Any] = field(default_factory=dict)
    wraps: tuple[str, ...] = ()  # innermost first
    coefficients: dict[str, Any] = field(default_factory=dict)  # the file and how it was made
    statistics: dict[str, Any] = field(default_factory=dict)  # provenance by model
    tasks: dict[str, Any] = field(default_factory=dict)  # manifest of the kept models
    remarks: dict[str, Any] = field(default_factory=dict)  # remarks of methods on single units
    requantised: dict[str, Any] = field(default_factory=dict)  # rounding error by format
    device: str | None = None  # None: planned, not run
    disk_bytes_read: int | None = None  # what was not in the page cache; None: not counted
    seconds: float | None = None  # total, including the computation of statistics
    statistics_seconds: float | None = None
    output: str | None = None

    def to_json(self) -> dict[str, Any]:
        seconds, before = (
            None if s is None else round(s, 3) for s in (self.seconds, self.statistics_seconds)
        )
        document = {
            "method": self.method,
            "router": self.router,
            "wrap": list(self.wraps),
            "coefficients": self.coefficients,
            "seed": self.seed,
            "settings": self.settings,
            "device": self.device,
            "seconds": seconds,
            "statistics_seconds": before,
            "output": {
                "folder": self.output,
                "tensors": self.output_tensors,
                "parameters": self.output_parameters,
                "bytes": self.output_bytes,
                "dtypes": list(self.dtypes),
            },
            "bytes_read": {"files": self.bytes_read, "disk": self.disk_bytes_read},
            "inputs": {
                m.name: {
                    "model": m.reference,
                    "tensors": m.tensors,
                    "merged": m.merged,
                    "copied": m.copied,
                    "dropped": m.dropped,
                    **({"base": True} if m.base else {}),
                }
                for m in self.models
            },
            "statistics": self.statistics,
            "tasks": self.tasks,
            "remarks": self.remarks,
            "requantised": self.requantised,
            "notices": list(self.notices),
        }
        return {k: v for k, v in document.items() if k not in OPTIONAL or v not in (None, {}, [])}


def account_for_inputs(
    plan: MergePlan, bases: Collection[str], shown: Callable[[str], str]
) -> tuple[ModelAccount, ...]:
    """Return every model's account; `bases` are models that are bases alone.

    `shown` maps a model's label to that in the report.
    """
    rest: dict[tuple[str, Fate], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for model, accounts in plan.accounts.items():
        for tensor, (fate, reason) in accounts.items():
            rest[model, fate][reason].append(tensor)
    return tuple(
        ModelAccount(
            name=name,
            reference=shown(model.checkpoint.label),
            tensors=len(model.checkpoint.tensors),
            merged=sum(map(len, rest[name, Fate.MERGED].values())),
            copied=dict(rest[name, Fate.COPIED]),
            dropped=dict(rest[name, Fate.DROPPED]),
            base=name in bases,
        )
        for name, model in plan.models.items()
    )


# --- what a run finds -----------------------------------------------------------------------------

NAMED = 3  # units or tensors in one notice; the report names all units
_SENTENCES = {
    Remark.FEW_TOKENS: "drawn towards the average, as a model sent few tokens or none",
    Remark.NEAR_BASE: "drawn towards the base, as a model sent few tokens or none",
    Remark.UNVISITED: "taken from the other models, as no gradient of a model came there",
    Remark.AVERAGED: "averaged, though the rest is not",
    Remark.JITTER: "solved with jitter",
}


class Findings:
    """Remarks of methods on single units, and tensors that are not finite. Thread-safe."""

    def __init__(self) -> None:
        self.units: dict[Remark, dict[str, Facts]] = defaultdict(dict)
        self.nonfinite: dict[str, set[str]] = defaultdict(set)  # model -> tensors
        self._lock = threading.Lock()

    def remark(self, unit: str, remark: Remark, facts: Facts) -> None:
        with self._lock:
            self.units[remark][unit] = facts

    def note_nonfinite(self, whose: str, tensor: str) -> None:
        with self._lock:
            self.nonfinite[whose].add(tensor)

    def remarks_json(self) -> dict[str, Any]:
        """Return, by kind, the number of units and the facts of each."""
        return {
            str(remark): {"count": len(units), "units": {n: dict(units[n]) for n in sorted(units)}}
            for remark, units in sorted(self.units.items())
        }

    def notices(self) -> Iterator[str]:
        """Yield one notice for each kind of remark, and for each model that is not finite."""
        for remark, units in sorted(self.units.items()):
            named = first_few([f"{n} ({_text(units[n])})" for n in sorted(units)], NAMED)
            yield f"{counted(len(units), 'unit')} {_SENTENCES[remark]}: {named}"
        for whose, tensors in sorted(self.nonfinite.items()):
            count = counted(len(tensors), "tensor holds", "tensors hold")
            yield f"{whose}: {count} NaN or infinity ({first_few(sorted(tensors), NAMED)})"


def _text(facts: Facts) -> str:
    return ", ".join(
        f"{value}" if key == "why" else f"{key}: {value}" for key, value in facts.items()
    )
