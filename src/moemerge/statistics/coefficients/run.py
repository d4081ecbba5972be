"""Run a request for coefficients and write the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moemerge.config.coefficients import dump_coefficients
from moemerge.repairs.inputs import settings_data
from moemerge.runtime.files import write_whole
from moemerge.runtime.progress import Progress
from moemerge.statistics.coefficients.adamerging import adamerging, expertmerging
from moemerge.statistics.coefficients.job import (
    CoefficientsJob,
    CoefficientsRequest,
    FoundCoefficients,
    prepare,
)
from moemerge.statistics.coefficients.measured import acm, neuron, sens
from moemerge.version import __version__

Maker = Callable[[CoefficientsJob, Progress], FoundCoefficients]
MAKERS: Mapping[str, Maker] = {
    make.__name__: make for make in (acm, sens, neuron, adamerging, expertmerging)
}


@dataclass(frozen=True)
class CoefficientsReport:
    """The report: the file, its coefficients and their origin."""

    method: str
    output: str
    coefficients: Mapping[str, Mapping[str, float]]  # by model and place
    measured: Mapping[str, Any]
    tokens: Mapping[str, int]  # of each model's text
    seconds: float
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def run_coefficients(request: CoefficientsRequest, progress: Progress) -> CoefficientsReport:
    """Compute the coefficients. The file appears complete or not at all."""
    begin = time.perf_counter()
    job = prepare(request)
    found = MAKERS[request.method](job, progress)
    tokens = {name: domain.tokens for name, domain in job.domains.items()}
    made_by = {
        "version": __version__,
        "method": request.method,
        "base": str(request.base),
        "models": {name: str(ref) for name, ref in request.models.items()},
        "tokens": tokens,
        "settings": settings_data(request.settings),
        **found.measured,
    }
    write_whole(request.out, dump_coefficients(found.coefficients, made_by, found.neurons))
    seconds = time.perf_counter() - begin
    return CoefficientsReport(
        request.method,
        str(request.out),
        found.coefficients,
        found.measured,
        tokens,
        seconds,
        job.notices,
    )
