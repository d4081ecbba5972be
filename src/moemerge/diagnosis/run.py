"""A diagnosis from models and text to its figures."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from moemerge.architectures.architecture import RouterInfo
from moemerge.architectures.describe import gate_in_words
from moemerge.architectures.opened import OpenModel
from moemerge.config.settings import DiagnosisSettings
from moemerge.diagnosis.advice import Measurements, advise
from moemerge.diagnosis.prepare import DiagnosisRequest, Prepared, prepare
from moemerge.diagnosis.results import (
    MODEL,
    Diagnosis,
    DomainFacts,
    DomainTotal,
    LayerDiagnosis,
    ModelFacts,
    NamedModel,
    Swap,
)
from moemerge.diagnosis.streams import Side, SwappedSide, open_lockstep, sides_of
from moemerge.diagnosis.verdict import judge
from moemerge.errors import ArchitectureError
from moemerge.features.router_stream import RouterStop
from moemerge.lockstep.models import PairedRouter
from moemerge.lockstep.streams import Lockstep
from moemerge.report.document import REPORT_NAME
from moemerge.report.words import display_names
from moemerge.routing.measure import FigureSums, RouterView, compare
from moemerge.runtime.devices import dtype_name
from moemerge.runtime.progress import Progress
from moemerge.text.rows import source_names
from moemerge.version import __version__


def run_diagnosis(request: DiagnosisRequest, progress: Progress) -> Diagnosis:
    """Stream all models over the text, and say what became of the routing."""
    start = time.perf_counter()
    prepared = prepare(request)
    for notice in prepared.notices:
        progress.note(notice)
    sides = sides_of(prepared)
    with open_lockstep(prepared, sides, progress) as lockstep:
        walk = _Walk(prepared, sides)
        walk.run(lockstep)
    return _diagnosis(prepared, sides, walk, time.perf_counter() - start)


class _Walk:
    """Router after router: every subject against every source, on the same tokens."""

    def __init__(self, prepared: Prepared, sides: Mapping[str, Side]) -> None:
        self.prepared = prepared
        self.swapped = {n: side for n, side in sides.items() if isinstance(side, SwappedSide)}
        self.rows: list[LayerDiagnosis] = []
        # Which tokens met a mismatch at some router: a (tokens,) bool per batch.
        self._missed: dict[tuple[str, str], list[Tensor]] = {}
        self._swap_sums: dict[str, FigureSums] = {}

    def run(self, lockstep: Lockstep) -> None:
        left = {pair.place.weight: pair for pair in self.prepared.routers}
        label = self.prepared.model.label
        for stop, beside in lockstep:
            pair = left.pop(stop.weight_name, None)
            if pair is None:
                raise ArchitectureError(
                    f"{label}: {stop.weight_name} is run as a router, but the table of families "
                    "knows nothing of it"
                )
            self._compare(pair, {MODEL: stop, **beside})
        if left:
            raise ArchitectureError(
                f"{label}: the model never ran {', '.join(sorted(left))}",
                hint="config.json and weights may not belong together",
            )

    def _compare(self, pair: PairedRouter, stops: Mapping[str, RouterStop]) -> None:
        for name, source in self.prepared.sources.items():
            wanted = router_view(source, pair.sources[name], stops[name])
            own = stops[name].by_batch(name)
            for subject in self.prepared.subjects:
                place = pair.place if subject.name == MODEL else pair.sources[subject.name]
                view = router_view(subject, place, stops[subject.name])
                sums = FigureSums()
                missed = []
                for (batch, x), (same, y) in zip(
                    stops[subject.name].by_batch(name), own, strict=True
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
                        layer=pair.place.layer,
                        router=pair.place.weight,
                        **vars(sums.result()),
                    )
                )
            self._compare_swapped(name, wanted, pair, stops)

    def _note_missed(self, key: tuple[str, str], missed: list[Tensor]) -> None:
        before = self._missed.get(key)
        self._missed[key] = (
            missed if before is None else [a | b for a, b in zip(before, missed, strict=True)]
        )

    def _compare_swapped(
        self, name: str, wanted: RouterView, pair: PairedRouter, stops: Mapping[str, RouterStop]
    ) -> None:
        own = stops[name].by_batch(name)
        for key, side in self.swapped.items():
            if side.domain != name:
                continue
            place = pair.place if side.weights_of == MODEL else pair.sources[name]
            view = router_view(side.model, place, stops[key])
            sums = self._swap_sums.setdefault(key, FigureSums(["mismatch"]))
            for (_, x), (_, y) in zip(stops[key].by_batch(name), own, strict=True):
                sums.add(compare(wanted, view, y, x))

    def any_mismatch(self, subject: str, domain: str) -> float:
        """The share of tokens with a mismatch at any router."""
        found = self._missed[subject, domain]
        return float(torch.cat(found).double().mean())

    def swap_mismatch(self, key: str) -> float:
        """A swapped model's mismatch, the mean over tokens and routers."""
        return float(self._swap_sums[key].result().mismatch)


def router_view(model: OpenModel, place: RouterInfo, stop: RouterStop) -> RouterView:
    """A stopped model's router as it computes, its selection bias with it."""
    if place.gate is None:
        raise ArchitectureError(f"layer {place.layer}: no gate is known for {place.weight}")
    selection = None
    if place.selection_bias is not None:
        stored = model.checkpoint.read(place.selection_bias)
        selection = stored.reshape(-1)[: place.rows].to(stop.weight.device)
    bias = None if stop.bias is None else stop.bias[: place.rows]
    return RouterView(place.gate, stop.weight[: place.rows], bias, selection)


# --- the end ------------------------------------------------------------------------------------


def _total(walk: _Walk, sides: Mapping[str, Side], subject: str, domain: str) -> DomainTotal:
    return DomainTotal.of(
        [row for row in walk.rows if row.model == subject and row.domain == domain],
        any_mismatch=walk.any_mismatch(subject, domain),
        loss=sides[subject].loss.mean(domain),
        loss_source=sides[domain].loss.mean(domain),
    )


def _swaps(
    walk: _Walk, sides: Mapping[str, Side], totals: Sequence[DomainTotal]
) -> tuple[Swap, ...]:
    """For each domain the model, with the source's routers, the source with its, the source."""
    found = []
    for domain in walk.prepared.sources if walk.swapped else ():
        total = next(t for t in totals if t.model == MODEL and t.domain == domain)
        found.append(Swap(domain, MODEL, MODEL, total.mismatch, total.loss))
        for key, side in walk.swapped.items():
            if side.domain == domain:
                mismatch = walk.swap_mismatch(key)
                loss = sides[key].loss.mean(domain)
                found.append(Swap(domain, side.weights_of, side.routers_of, mismatch, loss))
        found.append(Swap(domain, domain, domain, 0.0, total.loss_source))
    return tuple(found)


def _diagnosis(
    prepared: Prepared, sides: Mapping[str, Side], walk: _Walk, seconds: float
) -> Diagnosis:
    request = prepared.request
    totals = tuple(
        _total(walk, sides, subject.name, domain)
        for subject in prepared.subjects
        for domain in prepared.sources
    )
    rows = tuple(walk.rows)
    swaps = _swaps(walk, sides, totals)
    calibrations = {m.name: found for m in prepared.subjects if (found := _calibration_of(m))}
    models = tuple(NamedModel(model.name, model.label) for model in prepared.subjects)
    shown = display_names([model.label for model in models])
    names = {model.name: name for model, name in zip(models, shown, strict=True)}
    routed = sorted({p.layer for p in prepared.model.architecture.routers() if p.served})
    words = advise(Measurements(rows, totals, swaps, calibrations, names, routed))
    return Diagnosis(
        version=__version__,
        command=request.command or command_of(request),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=_facts(prepared),
        models=models,
        sources={n: NamedModel(n, model.label) for n, model in prepared.sources.items()},
        domains={
            d.name: DomainFacts(d.tokens, len(d.rows), source_names(request.data[d.name]))
            for d in prepared.domains
        },
        layers=rows,
        totals=totals,
        swaps=swaps,
        calibration=next(iter(calibrations.values()), None),
        calibration_of=next(iter(calibrations), None),
        verdict=judge(totals, names),
        advice=words,
        settings=settings_data(request.settings),
        device=str(prepared.device),
        dtype=dtype_name(prepared.dtype),
        notices=prepared.notices,
        seconds=seconds,
    )


def _facts(prepared: Prepared) -> ModelFacts:
    model = prepared.model
    place = prepared.routers[0].place
    gate = place.gate
    assert gate is not None  # `router_view` refused it otherwise
    return ModelFacts(
        label=model.label,
        architecture=model.architecture.model_type or "unknown",
        layers=model.architecture.num_layers,
        experts=max(pair.place.rows for pair in prepared.routers),
        top_k=gate.top_k,
        gate=gate_in_words(gate),
        routers=len(prepared.routers),
    )


def _calibration_of(model: OpenModel) -> dict[str, Any] | None:
    """The calibration part of the folder's own report, where it was calibrated."""
    path = model.checkpoint.path / REPORT_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("calibration")
    except (OSError, ValueError, AttributeError):
        return None  # none, or not ours: a diagnosis does not depend on it
    return found if isinstance(found, dict) and isinstance(found.get("layers"), list) else None


def settings_data(settings: DiagnosisSettings) -> dict[str, Any]:
    """The settings as plain data."""
    values = {name: getattr(settings, name) for name in DiagnosisSettings.model_fields}
    return values | {"layers": str(settings.layers)}


def command_of(request: DiagnosisRequest) -> str:
    """The command line that repeats this diagnosis."""
    words = ["moemerge", "diagnose", str(request.model)]
    for name, source in request.sources.items():
        words += ["--source", f"{name}={source}"]
        for file in source_names(request.data[name]):
            words += ["--data", f"{name}={file}"]
    for other in request.against:
        words += ["--against", str(other)]
    for name, value in settings_data(request.settings).items():
        usual = DiagnosisSettings.model_fields[name].default
        if value in (usual, str(usual)):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
