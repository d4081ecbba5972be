"""Sens-Merging: layer sensitivities, and transfer between the models (Liu et al. 2025)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint.output import temporary_sibling
from moemerge.coefficients.job import CoefficientsJob, FoundCoefficients
from moemerge.coefficients.maths import balanced_coefficients, transfer
from moemerge.collecting.forward import StateStore
from moemerge.collecting.job import CollectRequest
from moemerge.collecting.run import run_collect
from moemerge.collecting.settings import CollectingSettings
from moemerge.config.settings import ForwardSettings
from moemerge.errors import ArchitectureError
from moemerge.features.stream import ModelStream
from moemerge.runtime.progress import Progress
from moemerge.statistics import Statistics
from moemerge.text.batches import Batch


def sens(job: CoefficientsJob, progress: Progress) -> FoundCoefficients:
    """Return coefficients by model and place, and the measurements behind them."""
    names = list(job.models)
    distances: dict[str, dict[str, float]] = {name: {} for name in names}
    with temporary_sibling(job.request.out) as folder:
        sensitivities = {name: _sensitivities(job, name, folder, progress) for name in names}
        for name in names:
            for other, distance in _distances(job, name, folder, progress).items():
                distances[other][name] = distance
    shares = transfer(distances)
    values = balanced_coefficients(sensitivities, shares, job.request.settings.temperature)
    by_model = {
        name: {"*": 1.0, **dict(zip(job.places, layers, strict=True))}
        for name, layers in values.items()
    }
    return FoundCoefficients(
        by_model, {"sensitivity": sensitivities, "logit_distance": distances, "transfer": shares}
    )


def _sensitivities(
    job: CoefficientsJob, name: str, folder: Path, progress: Progress
) -> list[float]:
    """Return Σ |W · d loss / d W| of each layer, over the model's own text."""
    file = folder / f"{name}.stats"
    common = {field: getattr(job.request.settings, field) for field in ForwardSettings.model_fields}
    settings = CollectingSettings(kind="sensitivity", **common)
    model = job.request.models[name]
    run_collect(CollectRequest(model, file, job.request.data[name], settings), progress)
    totals = dict.fromkeys(job.places, 0.0)
    with Statistics.open(file) as statistics:
        for key in statistics.units:
            place = next((p for p in job.places if key.startswith(f"{p}.")), None)
            if place is not None:
                found = statistics.read("sensitivity", key)
                totals[place] += 0.0 if found is None else float(found.values)
    return list(totals.values())


def _distances(
    job: CoefficientsJob, name: str, folder: Path, progress: Progress
) -> dict[str, float]:
    """Return the mean distance of every other model's logits from this model's, on its text."""
    batches = job.batches(name)
    numbers = {id(batch): number for number, batch in enumerate(batches)}
    others = [other for other in job.models if other != name]
    store = StateStore("disk", torch.device("cpu"), folder)
    totals = dict.fromkeys(others, 0.0)

    def keep(place: int, batch: Batch, logits: Tensor) -> None:
        store.put((place, numbers[id(batch)]), _real(logits, batch))

    def compare(batch: Batch, logits: Tensor) -> None:
        own = _real(logits, batch)
        for place, other in enumerate(others):
            theirs = store.take((place, numbers[id(batch)]))
            if theirs.shape != own.shape:
                raise ArchitectureError(
                    f"{other} has {theirs.shape[-1]} logits, {name} {own.shape[-1]}",
                    hint="the models must share one vocabulary",
                )
            totals[other] += float(torch.linalg.vector_norm(theirs - own, dim=1).double().sum())

    try:
        for place, other in enumerate(others):
            _run(job, other, batches, partial(keep, place), progress)
        _run(job, name, batches, compare, progress)
    finally:
        store.close()
    tokens = job.domains[name].tokens
    return {other: total / tokens for other, total in totals.items()}


def _run(
    job: CoefficientsJob, name: str, batches: tuple[Batch, ...], on_output: Any, progress: Progress
) -> None:
    with ModelStream(
        job.models[name].checkpoint,
        batches,
        job.stream,
        output="logits",
        on_output=on_output,
        progress=progress,
    ) as stream:
        for _ in stream:
            raise AssertionError("no stop was asked for")


def _real(logits: Tensor, batch: Batch) -> Tensor:
    """Return the logits of real tokens, in float32 on the CPU: (tokens, vocab)."""
    return logits[batch.mask.to(logits.device)].float().cpu()
