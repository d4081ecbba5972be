"""Run a diagnosis from models and text to its figures.

Check text, which no fit has used, shows the loss, and whether a source has memorised its text.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from moemerge.checkpoint.model_card import REPORT_NAME
from moemerge.config.documents import CalibrationDocument, RefitDocument, parse_document
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.settings import as_flags, plugin_flags
from moemerge.diagnosis.advice import Measurements, advise
from moemerge.diagnosis.job import (
    DiagnosisJob,
    DiagnosisRequest,
    Side,
    extra_bytes,
    memory_hints,
    prepare,
    sides_of,
)
from moemerge.diagnosis.results import (
    MODEL,
    CheckLoss,
    Diagnosis,
    DomainFacts,
    DomainTotal,
    LayerDiagnosis,
    ModelFacts,
    NamedModel,
    Swap,
)
from moemerge.diagnosis.verdict import NOTICEABLE, verdict_of
from moemerge.errors import ArchitectureError, MoeMergeError
from moemerge.families.architecture import RouterInfo
from moemerge.families.describe import describe_gate
from moemerge.families.opened import OpenModel
from moemerge.forward.losses import DocumentLosses, MeanLoss
from moemerge.forward.stops import ModuleStop
from moemerge.forward.walk import open_walk
from moemerge.repairs.experts import ExpertMap
from moemerge.repairs.inputs import settings_data
from moemerge.repairs.routers import PairedRouter, paired_stops
from moemerge.routing.figures import FIGURES
from moemerge.routing.measure import FigureSums, RouterView, compare
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.files import read_object
from moemerge.runtime.formatting import display_names
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import Ranks
from moemerge.text.rows import source_names
from moemerge.version import __version__


def run_diagnosis(request: DiagnosisRequest, progress: Progress) -> Diagnosis:
    """Stream all models over the text, and compare their routing."""
    ranks = Ranks.join(resolve_device(request.settings.device))
    return diagnose(prepare(request, ranks), ranks.progress(progress))


def diagnose(job: DiagnosisJob, progress: Progress, seen: Collection[str] = ()) -> Diagnosis:
    """Run a checked diagnosis; `seen` are notices that the user has already seen."""
    start = time.perf_counter()
    for notice in job.notices:
        if notice not in seen:
            progress.note(notice)
    sides = sides_of(job)
    comparison = RoutingComparison(job, sides)
    with open_walk(
        {name: side.member for name, side in sides.items()},
        job.batches,
        job.stream,
        job=f"diagnosis of {len(sides)} models in parallel",
        extra=lambda walk: extra_bytes(job),
        hints=memory_hints(job),
        progress=progress,
    ) as walk:
        for number in walk:
            pairs = [pair for pair in job.routers.pairs if pair.info.layer == number]
            for pair, stops in paired_stops(walk, pairs):
                comparison.visit(pair, stops)
    for model in (*job.subjects, *job.sources.values()):
        model.checkpoint.require_unchanged()
    checked, memorised = check_losses(job, sides)
    for notice in memorised:
        progress.note(notice)
    seconds = job.text.seconds + time.perf_counter() - start
    return _diagnosis(job, sides, comparison, checked, memorised, seconds)


class RoutingComparison:
    """Compares every subject with every source, on the same tokens."""

    def __init__(self, job: DiagnosisJob, sides: Mapping[str, Side]) -> None:
        self.job = job
        self.swapped = {name: side for name, side in sides.items() if side.routers_of}
        self.rows: list[LayerDiagnosis] = []
        # Tokens with a mismatch at some router: a (tokens,) bool per batch.
        self._missed: dict[tuple[str, str], list[Tensor]] = {}
        self._swap_sums: dict[str, FigureSums] = {}

    def visit(self, pair: PairedRouter, waiting: Mapping[str, ModuleStop]) -> None:
        """Compare all models, which wait at a router."""
        for name, source in self.job.sources.items():
            experts = pair.experts.get(name)
            wanted = router_view(source, pair.sources[name], waiting[name], experts)
            own = waiting[name].by_batch(name)
            for subject in self.job.subjects:
                info = pair.info if subject.name == MODEL else pair.sources[subject.name]
                view = router_view(subject, info, waiting[subject.name])
                sums = FigureSums(ranks=self.job.ranks)
                missed = []
                for (batch, x), (same, y) in zip(
                    waiting[subject.name].by_batch(name), own, strict=True
                ):
                    assert batch is same
                    tokens = compare(wanted, view, y, x)
                    sums.add(tokens)
                    missed.append(tokens.lost.any(dim=-1))
                self._note_missed((subject.name, name), missed)
                self.rows.append(
                    LayerDiagnosis(
                        model=subject.name,
                        domain=name,
                        layer=pair.info.layer,
                        router=pair.info.weight,
                        **vars(sums.result()),
                    )
                )
            self._compare_swapped(name, wanted, pair, waiting)

    def _note_missed(self, key: tuple[str, str], missed: list[Tensor]) -> None:
        before = self._missed.get(key)
        self._missed[key] = (
            missed if before is None else [a | b for a, b in zip(before, missed, strict=True)]
        )

    def _compare_swapped(
        self, name: str, wanted: RouterView, pair: PairedRouter, stops: Mapping[str, ModuleStop]
    ) -> None:
        own = stops[name].by_batch(name)
        for key, side in self.swapped.items():
            if name not in (side.domains or ()):
                continue
            info = pair.info if side.weights_of == MODEL else pair.sources[name]
            view = router_view(side.model, info, stops[key])
            sums = self._swap_sums.setdefault(key, FigureSums(["mismatch"], self.job.ranks))
            for (_, x), (_, y) in zip(stops[key].by_batch(name), own, strict=True):
                sums.add(compare(wanted, view, y, x))

    def any_mismatch(self, subject: str, domain: str) -> float:
        """Return the share of tokens with a mismatch at any router."""
        missed = torch.cat(self._missed[subject, domain])
        counts = [int(missed.sum()), len(missed)]
        count, tokens = self.job.ranks.totals(counts, missed.device)
        return count / tokens

    def swap_mismatch(self, key: str) -> float:
        """Return a swapped model's mean mismatch over tokens and routers."""
        return float(self._swap_sums[key].result().mismatch)


def router_view(
    model: OpenModel, info: RouterInfo, stop: ModuleStop, experts: ExpertMap | None = None
) -> RouterView:
    """Return a stopped model's router with its gate and selection bias.

    `experts` restricts a source's router to the experts of the diagnosed model.
    """
    if info.gate is None:
        raise ArchitectureError(f"layer {info.layer}: no gate is known for {info.weight}")
    selection = None
    if info.selection_bias is not None:
        stored = model.checkpoint.read(info.selection_bias)
        selection = stored.reshape(-1)[: info.rows].to(stop.weight.device)
    bias = None if stop.bias is None else stop.bias[: info.rows]
    if experts is None:
        return RouterView(info.gate, stop.weight[: info.rows], bias, selection)
    selection = None if selection is None else experts.mean(selection)
    combine = partial(experts.combine, info.gate)
    return RouterView(info.gate, stop.weight[: info.rows], bias, selection, combine)


# --- the end ------------------------------------------------------------------------------------


def _total(
    comparison: RoutingComparison, sides: Mapping[str, Side], subject: str, domain: str
) -> DomainTotal:
    return DomainTotal.of(
        [row for row in comparison.rows if row.model == subject and row.domain == domain],
        any_mismatch=comparison.any_mismatch(subject, domain),
        loss=sides[subject].loss.mean(domain),
        loss_source=sides[domain].loss.mean(domain),
    )


def _swaps(comparison: RoutingComparison, totals: Sequence[DomainTotal]) -> tuple[Swap, ...]:
    """Return for each domain the model with the source's routers, the source with the model's, and
    the source.
    """
    swaps = []
    for domain in comparison.job.sources if comparison.swapped else ():
        total = next(t for t in totals if t.model == MODEL and t.domain == domain)
        swaps.append(Swap(domain, MODEL, MODEL, total.mismatch, total.loss))
        for key, side in comparison.swapped.items():
            if domain in (side.domains or ()):
                mismatch, loss = comparison.swap_mismatch(key), side.loss.mean(domain)
                swaps.append(Swap(domain, side.weights_of, side.routers_of, mismatch, loss))
        swaps.append(Swap(domain, domain, domain, 0.0, total.loss_source))
    return tuple(swaps)


def _diagnosis(
    job: DiagnosisJob,
    sides: Mapping[str, Side],
    comparison: RoutingComparison,
    checked: tuple[CheckLoss, ...],
    memorised: Sequence[str],
    seconds: float,
) -> Diagnosis:
    request = job.request
    totals = tuple(
        _total(comparison, sides, subject.name, domain)
        for subject in job.subjects
        for domain in job.sources
    )
    rows = tuple(comparison.rows)
    without_source = request.without_source
    # The verdict uses the sources' domains; the others show the cost elsewhere.
    with_source = tuple(t for t in totals if t.domain not in without_source) or totals
    domains = {total.domain for total in with_source}
    swaps = _swaps(comparison, totals)
    calibrations = {m.name: done for m in job.subjects if (done := _repair_of(m, "calibration"))}
    refits = {m.name: done for m in job.subjects if (done := _repair_of(m, "refit"))}
    models = tuple(NamedModel(model.name, model.label) for model in job.subjects)
    shown = display_names([model.label for model in models])
    names = {model.name: name for model, name in zip(models, shown, strict=True)}
    words = command_words(request)
    measured = Measurements(
        [row for row in rows if row.domain in domains],
        with_source,
        [swap for swap in swaps if swap.domain in domains],
        [name for name, done in (("calibrate", calibrations), ("refit", refits)) if MODEL in done],
        names,
        elsewhere=[total for total in totals if total.domain not in domains],
        # Within another command, the paths may be of folders that it removes.
        command="" if request.command else shlex.join([words[0], "OUT", *words[1:]]),
    )
    return Diagnosis(
        version=__version__,
        command=request.command or command_of(request),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=_facts(job),
        models=models,
        sources={n: NamedModel(n, model.label) for n, model in job.sources.items()},
        domains={
            d.name: DomainFacts(
                d.tokens,
                len(d.rows),
                source_names(request.data[d.name]),
                "base" if d.name in without_source else "source",
            )
            for d in job.domains
        },
        figures=tuple(FIGURES.values()),
        layers=rows,
        totals=totals,
        swaps=swaps,
        calibration=next(iter(calibrations.values()), None),
        calibration_of=next(iter(calibrations), None),
        refit=next(iter(refits.values()), None),
        refit_of=next(iter(refits), None),
        check=checked,
        verdict=verdict_of(with_source, names, measured.swaps),
        advice=advise(measured),
        settings=settings_data(request.settings),
        device=str(job.stream.device),
        dtype=dtype_name(job.stream.dtype),
        notices=(*job.notices, *memorised),
        seconds=seconds,
    )


def _facts(job: DiagnosisJob) -> ModelFacts:
    model = job.model
    gate = job.routers.pairs[0].info.gate
    assert gate is not None  # otherwise `router_view` has refused it
    return ModelFacts(
        label=model.label,
        architecture=model.architecture.model_type or "unknown",
        layers=model.architecture.num_layers,
        experts=max(pair.info.rows for pair in job.routers.pairs),
        top_k=gate.top_k,
        gate=describe_gate(gate),
        routers=len(job.routers.pairs),
    )


REPAIRS: Mapping[str, type[CalibrationDocument | RefitDocument]] = {
    "calibration": CalibrationDocument,
    "refit": RefitDocument,
}


def _repair_of(model: OpenModel, part: str) -> dict[str, Any] | None:
    """Return the calibration or refit part of the folder's report, if there is one."""
    path = model.checkpoint.path / REPORT_NAME
    try:
        section: Any = read_object(path).get(part)
        parse_document(REPAIRS[part], section, str(path))
        json.dumps(section, allow_nan=False)
    except (MoeMergeError, ValueError):
        return None  # missing or not ours: a diagnosis does not need it
    return dict(section)


def command_words(request: DiagnosisRequest) -> list[str]:
    """Return the model, its sources and text as arguments of a command."""
    words = [str(request.model)]
    for name in request.references:
        words += ["--source", f"{name}={request.sources[name]}"] if name in request.sources else []
        for file in source_names(request.data[name]):
            words += ["--data", f"{name}={file}"]
    for name, text in request.check.items():
        for file in source_names(text):
            words += ["--check", f"{name}={file}"]
    for name, experts in request.experts.items():
        words += ["--experts", f"{name}={experts}"]
    return words


def command_of(request: DiagnosisRequest) -> str:
    """Return the command line that repeats this diagnosis."""
    words = ["moemerge", "diagnose", *command_words(request)]
    for other in request.against:
        words += ["--against", str(other)]
    usual = {name: field.default for name, field in DiagnosisSettings.model_fields.items()}
    chosen = {
        name: value
        for name, value in settings_data(request.settings).items()
        if value not in (usual[name], str(usual[name]))
    }
    return shlex.join([*words, *as_flags(chosen), *plugin_flags()])


# A source has memorised its text if its lead over the merged model shrinks by more than this share
# on check text. The merged model has part of the memory, so the whole lead never disappears: of a
# specialist trained for 25 epochs on 150 rows, 0.30 of 0.51 nats were left.
MEMORISED_SHARE: Final = 0.25
# It must also shrink by more than this number of standard errors.
SURE: Final = 3.0


def _lead(model: DocumentLosses | None, source: DocumentLosses | None) -> MeanLoss | None:
    """Return how much better a source predicts a text than the merged model, in nats a token."""
    return None if model is None or source is None else model.minus(source).mean


def has_memorised(own: MeanLoss, check: MeanLoss) -> bool:
    """Return whether a source leads far more on its own text than on check text."""
    if own.error is None or check.error is None:
        return False
    shrinks = own.value - check.value
    return shrinks > max(
        NOTICEABLE, MEMORISED_SHARE * own.value, SURE * math.hypot(own.error, check.error)
    )


def check_losses(
    job: DiagnosisJob, sides: Mapping[str, Side]
) -> tuple[tuple[CheckLoss, ...], list[str]]:
    """Return the loss of every model on check text, and notices about memorised text."""
    losses: list[CheckLoss] = []
    notices: list[str] = []
    for name, domain in zip(job.request.check, job.text.check, strict=True):
        models = [model.name for model in job.subjects]
        models += [name] if name in job.sources else []
        found = {model: sides[model].loss.documents(domain) for model in models}
        losses += [
            _loss(name, model, len(domain.rows), own, found[MODEL])
            for model, own in found.items()
            if own is not None
        ]
        if name in job.sources:
            (data,) = (d for d in job.domains if d.name == name)
            pair = (sides[model].loss.documents(data) for model in (MODEL, name))
            own, check = _lead(*pair), _lead(found[MODEL], found[name])
            if own is not None and check is not None and has_memorised(own, check):
                notices.append(_memorised(name, own, check))
    return tuple(losses), notices


def _loss(
    name: str, model: str, rows: int, own: DocumentLosses, first: DocumentLosses | None
) -> CheckLoss:
    mean = own.mean
    change = None if model == MODEL or first is None else own.minus(first).mean
    return CheckLoss(
        name=name,
        model=model,
        rows=rows,
        documents=len(own.sums),
        tokens=own.total_tokens,
        loss=mean.value,
        error=mean.error,
        change=None if change is None else change.value,
        change_error=None if change is None else change.error,
    )


def _memorised(name: str, own: MeanLoss, check: MeanLoss) -> str:
    return (
        f"{name}: the source predicts its calibration text {own.value:.3f} nats a token better "
        f"than the merged model, but the check text only {check.value:.3f}. It was probably "
        "trained on the calibration text, so held-out figures promise too much: calibrate with "
        "text that no source was trained on, and believe the check text"
    )
