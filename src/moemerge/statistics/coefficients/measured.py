"""Coefficients from measurements of each model on its own text.

acm     layers that share more with the base count less (Yao et al. 2025)
sens    layer sensitivities, and transfer between the models (Sens-Merging, Liu et al. 2025)
neuron  neurons by the domain they serve, one coefficient per group (NeuronMerge, ACL Findings 2025)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint.output import temporary_sibling
from moemerge.config.coefficients import EVERYWHERE, LETTERS, NeuronGroups
from moemerge.config.job_settings import CollectingSettings
from moemerge.config.models import ModelRef
from moemerge.config.parameters import StatisticsKind
from moemerge.config.settings import ForwardSettings
from moemerge.errors import ArchitectureError, UsageError
from moemerge.families.layout import projection_of
from moemerge.forward.stream import ModelStream
from moemerge.runtime.progress import Progress
from moemerge.statistics import Statistics
from moemerge.statistics.coefficients.job import CoefficientsJob, FoundCoefficients
from moemerge.statistics.coefficients.maths import (
    Information,
    balanced_coefficients,
    falling,
    served_domain,
    transfer,
)
from moemerge.statistics.collecting.forward import StateStore
from moemerge.statistics.collecting.job import CollectRequest
from moemerge.statistics.collecting.run import run_collect
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
    totals = dict.fromkeys(job.places, 0.0)
    model = job.request.models[name]
    with _collected(job, model, name, "sensitivity", folder, progress) as statistics:
        for key in statistics.units:
            place = next((p for p in job.places if key.startswith(f"{p}.")), None)
            if place is not None:
                found = statistics.read("sensitivity", key)
                totals[place] += 0.0 if found is None else float(found.values)
    return list(totals.values())


def _collected(
    job: CoefficientsJob,
    model: ModelRef,
    name: str,
    kind: StatisticsKind,
    folder: Path,
    progress: Progress,
) -> Statistics:
    """Collect statistics of `model` on the text of the model `name`, and open their file."""
    fields = ForwardSettings.model_fields
    common: dict[str, Any] = {field: getattr(job.request.settings, field) for field in fields}
    settings = CollectingSettings(kind=kind, **common)
    file = folder / f"{name}.stats"
    run_collect(CollectRequest(model, file, job.request.data[name], settings), progress)
    return Statistics.open(file)


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
            pass


def _real(logits: Tensor, batch: Batch) -> Tensor:
    """Return the logits of real tokens, in float32 on the CPU: (tokens, vocab)."""
    return logits[batch.mask.to(logits.device)].float().cpu()


GENERAL_NEURONS = "general"  # the group of neurons that serve no single domain


def neuron(job: CoefficientsJob, progress: Progress) -> FoundCoefficients:
    """Return every neuron's group, from its activity in the base on each model's text."""
    names, settings = list(job.models), job.request.settings
    groups = [
        *names,
        GENERAL_NEURONS if GENERAL_NEURONS not in names else f"{GENERAL_NEURONS} (none of them)",
    ]
    if len(groups) > len(LETTERS):
        raise UsageError(
            f"neurons are sorted into at most {len(LETTERS) - 1} models' groups, got {len(names)}",
            hint="merge fewer models at once",
        )
    with temporary_sibling(job.request.out) as folder:
        powers = {name: _powers(job, name, folder, progress) for name in names}
    labels = {}
    for place in powers[names[0]]:
        activity = torch.stack([powers[name][place] for name in names])  # (models, neurons)
        served = served_domain(activity, settings.specific)
        labels[place] = "".join(LETTERS[group] for group in served.tolist())
    if not labels:
        raise UsageError(
            f"no MLP of {job.base.label} has neurons whose activity can be measured",
            hint="use `acm` or `sens`",
        )
    shared = (settings.own + (len(names) - 1) * settings.other) / len(names)
    shares = {
        group: {name: settings.own if name == group else settings.other for name in names}
        for group in names
    }
    shares[groups[-1]] = dict.fromkeys(names, shared)
    counts = {
        group: sum(text.count(LETTERS[i]) for text in labels.values())
        for i, group in enumerate(groups)
    }
    everywhere = {name: {EVERYWHERE: shared} for name in names}
    return FoundCoefficients(
        everywhere, {"neurons": counts}, NeuronGroups(groups=shares, labels=labels)
    )


def _powers(
    job: CoefficientsJob, name: str, folder: Path, progress: Progress
) -> Mapping[str, Tensor]:
    """Return the mean act² of every neuron of the base on one model's text, by the MLP's place.

    Tokens that are not routed to an expert leave its neurons at 0.
    """
    units = job.base.architecture.units_by_key
    # If gate and up are one tensor, a merge cannot scale a neuron's rows of it.
    served = {_place(key) for key, unit in units.items() if projection_of(unit) == "up"}
    powers = {}
    with _collected(job, job.request.base, name, "power", folder, progress) as statistics:
        tokens = statistics.provenance.tokens
        for key in statistics.units:
            unit = units.get(key)
            mean = statistics.read("power", key)
            if unit is None or mean is None or projection_of(unit) != "down":
                continue
            if _place(key) in served:
                powers[_place(key)] = mean.values.double() * (mean.tokens / max(1, tokens))
    return powers


def _place(key: str) -> str:
    """Return the MLP's place of `….down_proj.weight`."""
    return key.rpartition(".")[0].rpartition(".")[0]


def acm(job: CoefficientsJob, progress: Progress) -> FoundCoefficients:
    """Return coefficients by model and place, and the mutual information behind them."""
    measured = {name: _information(job, name, progress) for name in job.models}
    sharpness = job.request.settings.sharpness
    values = {
        name: [falling(information, sharpness) for information in layers]
        for name, layers in measured.items()
    }
    by_model = {
        name: {"*": sum(layers) / len(layers), **dict(zip(job.places, layers, strict=True))}
        for name, layers in values.items()
    }
    return FoundCoefficients(by_model, {"mutual_information": measured})


def _information(job: CoefficientsJob, name: str, progress: Progress) -> list[float]:
    """Return each layer's mutual information of base and model, on the model's own text."""
    batches = job.batches(name)
    final: dict[int, Tensor] = {}
    last = Information()

    def of_base(batch: Batch, hidden: Tensor) -> None:
        final[id(batch)] = hidden[batch.mask.to(hidden.device)]

    def of_model(batch: Batch, hidden: Tensor) -> None:
        last.add(final.pop(id(batch)), hidden[batch.mask.to(hidden.device)])

    base_checkpoint, checkpoint = job.base.checkpoint, job.models[name].checkpoint
    layers: list[float] = []
    with (
        ModelStream(
            base_checkpoint, batches, job.stream, on_output=of_base, layer_inputs=True
        ) as base,
        ModelStream(
            checkpoint,
            batches,
            job.stream,
            on_output=of_model,
            layer_inputs=True,
            progress=progress,
        ) as model,
    ):
        for number, _ in zip(base, model, strict=True):
            if 0 < number < len(job.places):  # a layer's input is the output of the layer below
                information = Information()
                for one, other in zip(base.entered, model.entered, strict=True):
                    information.add(one.given[0], other.given[0])
                layers.append(information.mean())
    return [*layers, last.mean()]
