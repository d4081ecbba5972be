"""Expert Merging: coefficients that bring the merged model close to each model on its own text.

(Zhang et al. 2025.) As for AdaMerging, all models are in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemerge.coefficients.adamerging import BlendedModel, descend
from moemerge.coefficients.job import CoefficientsJob, FoundCoefficients
from moemerge.coefficients.maths import next_token_divergence, relative_distance
from moemerge.runtime.progress import Progress
from moemerge.text.batches import Batch


def expertmerging(job: CoefficientsJob, progress: Progress) -> FoundCoefficients:
    """Return coefficients by model and place, and the course of the loss."""
    merged = BlendedModel(job)
    settings = job.request.settings
    places = {name: at for at, name in enumerate(job.models)}

    def loss(lambdas: Tensor, name: str, batch: Batch) -> Tensor:
        mask = merged.mask(batch)
        with torch.no_grad():
            whole = merged.lambdas(0.0)
            whole[places[name]] = 1.0
            expert = merged.run(whole, batch, hidden=True)
        ours = merged.run(lambdas, batch, hidden=True)
        pairs = list(zip(ours.hidden_states[1:], expert.hidden_states[1:], strict=True))
        distances = [relative_distance(a[mask], b[mask]) for a, b in pairs]
        return (
            torch.stack(distances).mean()
            + next_token_divergence(ours.logits[mask], expert.logits[mask])
            + settings.anchor * (lambdas - settings.start).abs().mean()
        )

    return descend(job, merged, loss, progress, what="loss")
