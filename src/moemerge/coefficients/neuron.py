"""NeuronMerge: group neurons by the domain they serve, with one coefficient per group.

ACL Findings 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.architectures.layout import projection_of
from moemerge.checkpoint.output import temporary_sibling
from moemerge.coefficients.job import CoefficientsJob, FoundCoefficients
from moemerge.coefficients.maths import served_domain
from moemerge.collecting.job import CollectRequest
from moemerge.collecting.run import run_collect
from moemerge.collecting.settings import CollectingSettings
from moemerge.config.coefficients import EVERYWHERE, LETTERS, NeuronGroups
from moemerge.config.settings import ForwardSettings
from moemerge.errors import UsageError
from moemerge.runtime.progress import Progress
from moemerge.statistics import Statistics
from moemerge.statistics.provenance import all_units

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
            f"no MLP of {job.base.label} has neurons whose activity can be told",
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
    file = folder / f"{name}.stats"
    common: dict[str, Any] = {
        field: getattr(job.request.settings, field) for field in ForwardSettings.model_fields
    }
    settings = CollectingSettings(kind="power", **common)
    data = job.request.data[name]
    run_collect(CollectRequest(job.request.base, file, data, settings), progress)
    units = all_units(job.base.checkpoint, job.base.architecture)
    # If gate and up are one tensor, a merge cannot scale a neuron's rows of it.
    served = {_place(key) for key, unit in units.items() if projection_of(unit) == "up"}
    powers = {}
    with Statistics.open(file) as statistics:
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
