"""What a merge did, as data: every input tensor accounted for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from moemerge.merging.plan import Fate, MergePlan
from moemerge.runtime.devices import dtype_name


@dataclass(frozen=True)
class ModelAccount:
    """One input model's tensors: how many were merged, and the rest by reason, by name."""

    name: str
    reference: str
    tensors: int
    merged: int
    copied: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class MergeReport:
    """The `merge` part of `moemerge_report.json`."""

    method: str
    router: str | None  # what the config's `router:` section did, in words
    models: tuple[ModelAccount, ...]
    output_tensors: int
    output_bytes: int
    output_parameters: int
    dtypes: tuple[str, ...]
    bytes_read: int
    peak_block_bytes: int
    seed: int
    notices: tuple[str, ...]
    statistics: dict[str, Any] = field(default_factory=dict)  # of each model, where they came from
    remarks: dict[str, Any] = field(default_factory=dict)  # what methods said of single units
    device: str | None = None  # None: planned, not run
    seconds: float | None = None
    output: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "router": self.router,
            "seed": self.seed,
            "device": self.device,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "output": {
                "folder": self.output,
                "tensors": self.output_tensors,
                "parameters": self.output_parameters,
                "bytes": self.output_bytes,
                "dtypes": list(self.dtypes),
            },
            "inputs": {
                m.name: {
                    "model": m.reference,
                    "tensors": m.tensors,
                    "merged": m.merged,
                    "copied": m.copied,
                    "dropped": m.dropped,
                }
                for m in self.models
            },
            **({"statistics": self.statistics} if self.statistics else {}),
            **({"remarks": self.remarks} if self.remarks else {}),
            "notices": list(self.notices),
        }


def describe_plan(plan: MergePlan, method: str, router: str | None) -> MergeReport:
    """The report of a plan before it is run."""
    return MergeReport(
        method=method,
        router=router,
        models=_accounts(plan),
        output_tensors=len(plan.tensors),
        output_bytes=plan.bytes_written,
        output_parameters=sum(t.nbytes // t.dtype.itemsize for t in plan.tensors),
        dtypes=tuple(sorted({dtype_name(t.dtype) for t in plan.tensors})),
        bytes_read=plan.bytes_read,
        peak_block_bytes=plan.peak_block_bytes,
        seed=plan.seed,
        notices=plan.notices,
    )


def _accounts(plan: MergePlan) -> tuple[ModelAccount, ...]:
    merged: dict[str, int] = defaultdict(int)
    rest: dict[tuple[str, Fate], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for account in plan.accounts:
        if account.fate is Fate.MERGED and not account.reason:
            merged[account.model] += 1
        else:
            rest[account.model, account.fate][account.reason].append(account.tensor)
    return tuple(
        ModelAccount(
            name=m.name,
            reference=m.checkpoint.label,
            tensors=len(m.checkpoint.tensors),
            merged=merged[m.name] + sum(map(len, rest[m.name, Fate.MERGED].values())),
            copied=dict(rest[m.name, Fate.COPIED]),
            dropped=dict(rest[m.name, Fate.DROPPED]),
        )
        for m in plan.models
    )
