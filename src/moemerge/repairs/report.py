"""The report that repairs share: their part of `moemerge_report.json`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from moemerge.config.repairs import Repair
from moemerge.forward.settings import StreamSettings
from moemerge.repairs.experts import EXPERTS, ExpertMaps, maps_json
from moemerge.repairs.inputs import RepairRequest, settings_data, source_weights
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.timing import Stopwatch, Timings, peak_memory
from moemerge.text.rows import source_names

if TYPE_CHECKING:
    from moemerge.repairs.layer import Job


@dataclass(frozen=True, kw_only=True)
class RepairReport(ABC):
    """The part of a repair in `moemerge_report.json`."""

    repair: ClassVar[Repair]

    merged: str
    output: str
    sources: Mapping[str, str]
    weights: Mapping[str, float]
    data: Mapping[str, tuple[str, ...]]
    check: Mapping[str, tuple[str, ...]]  # files of text that is only measured
    settings: Mapping[str, Any]
    device: str
    dtype: str
    offload: str
    memory: int  # bytes that the run was expected to need on its device
    resumed: int  # entries taken from the journal of a killed run
    layers: tuple[dict[str, Any], ...]
    notices: tuple[str, ...]
    seconds: float
    timings: Timings
    experts: ExpertMaps = field(default_factory=dict)  # of sources with more experts
    # Figures of `diagnose` on the held-out rows, for the merge and the result, each on its own
    # features. None if they were not measured.
    diagnosis: Mapping[str, Any] | None = None
    # Bytes of weights that the streams of all ranks read: of the files, and from the disk.
    bytes_read: Mapping[str, int | None] | None = None

    @classmethod
    def of(cls, job: Job[Any], seconds: float) -> Self:
        """Return the report of a job whose layers are finished."""
        rows = tuple(job.earlier)
        report = cls(
            **cls.run_fields(job.request, job.stream, job.stopwatch, seconds),
            experts=job.experts,
            resumed=job.output.resumed,
            layers=rows,
            notices=(*job.notices, *(text for row in rows for text in row.get("notices", ()))),
            **job.fields,
        )
        return replace(report, notices=(*report.notices, *report.closing_notices))

    @property
    def closing_notices(self) -> tuple[str, ...]:
        """Warnings that all rows together give."""
        return ()

    @staticmethod
    def run_fields(
        request: RepairRequest[Any], stream: StreamSettings, stopwatch: Stopwatch, seconds: float
    ) -> dict[str, Any]:
        """Return the fields that repeat the request, and those of the device and of time."""
        return {
            "merged": "this run's merge" if request.temporary else str(request.merged),
            "output": str(request.out),
            "sources": {name: request.shown(str(ref)) for name, ref in request.sources.items()},
            "weights": source_weights(request.weights, request.sources),
            "data": {name: source_names(request.data[name]) for name in request.sources},
            "check": {name: source_names(text) for name, text in request.check.items()},
            "settings": settings_data(request.settings),
            "device": str(stream.device),
            "dtype": dtype_name(stream.dtype),
            "seconds": seconds,
            "timings": Timings.of(stopwatch, seconds, peak_memory(stream.device)),
        }

    def with_rounding(self, errors: Mapping[str, Any]) -> Self:
        """Return the report with the errors of quantising the output, by format."""
        return self

    @property
    def not_held_out(self) -> tuple[str, ...]:
        """The domains without held-out rows: all their figures are of rows that were fitted."""
        return () if self.diagnosis is None else tuple(self.diagnosis["not_held_out"])

    @property
    @abstractmethod
    def totals(self) -> dict[str, Any]: ...

    @property
    @abstractmethod
    def card_section(self) -> str:
        """Markdown for the model card: what was done, and its figures."""

    @abstractmethod
    def own_json(self) -> dict[str, Any]:
        """Return the fields that only this kind of repair reports."""

    def to_json(self) -> dict[str, Any]:
        return {
            "merged": self.merged,
            "output": self.output,
            "sources": dict(self.sources),
            "weights": dict(self.weights),
            **({EXPERTS: maps_json(self.experts)} if self.experts else {}),
            "data": {name: list(files) for name, files in self.data.items()},
            "check": {name: list(files) for name, files in self.check.items()},
            "settings": dict(self.settings),
            "device": self.device,
            "dtype": self.dtype,
            "offload": self.offload,
            "memory_estimate": self.memory,
            **({} if self.bytes_read is None else {"bytes_read": dict(self.bytes_read)}),
            "resumed": self.resumed,
            **self.own_json(),
            "layers": list(self.layers),
            "totals": self.totals,
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
            "timings": self.timings.to_json(),
            "diagnosis": None if self.diagnosis is None else dict(self.diagnosis),
        }
