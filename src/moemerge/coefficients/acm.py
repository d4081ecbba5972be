"""ACM: layers that share more with the base count less (Yao et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from moemerge.coefficients.job import CoefficientsJob, FoundCoefficients
from moemerge.coefficients.maths import Information, falling
from moemerge.features.stream import ModelStream
from moemerge.runtime.progress import Progress
from moemerge.text.batches import Batch


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
        ModelStream(base_checkpoint, batches, job.stream, on_output=of_base) as base,
        ModelStream(
            checkpoint, batches, job.stream, on_output=of_model, progress=progress
        ) as model,
    ):
        for stream in (base, model):
            stream.stop_at_layers(inputs=True)
        for one, other in zip(base, model, strict=True):
            if 0 < one.layer < len(job.places):  # a layer's input is the output of the layer below
                layers.append(_shared(one.inputs(name), other.inputs(name)))
    return [*layers, last.mean()]


def _shared(ours: list[Tensor], theirs: list[Tensor]) -> float:
    information = Information()
    for a, b in zip(ours, theirs, strict=True):
        information.add(a, b)
    return information.mean()
